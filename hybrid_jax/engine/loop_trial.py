"""A trial of a program that loops over steps, with one row of the dispatch that is waiting for it.

The row takes two steps in one call, the same again, and then the two steps in two calls. Tokens, and all bits that the
steps leave in the row's ring, must be equal. So the loop runs as often as it should, and a command buffer can be used
again, also with other arrays. On a GPU the call must return before its steps are done. Nothing of this stays. The row's
ring is put back, and what it has written to its own pages comes again.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import jax
import numpy as np

from hybrid_jax.engine.programs.loops import Begun, Loops
from hybrid_jax.engine.programs.store import PASSED, ProgramStore
from hybrid_jax.engine.trial_errors import fault_of
from hybrid_jax.schedule.plan import DecodeRow

STEPS = 2
NO_TOKEN = -1
# A call that takes so long, and is done when it returns, has waited for its steps. To start a graph takes less.
WAITED_SECONDS = 2e-3
UNDECIDED = "undecided"
WITHOUT_LOOPS = "XLA_FLAGS=--xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUSTOM_CALL"
T = TypeVar("T")


class LoopFailed(RuntimeError):
    """A loop raised in its trial. What the device holds is not known. The host starts each step from now on."""


def row_for_trial(
    rows: Sequence[DecodeRow],
    where: Callable[[], tuple[np.ndarray, np.ndarray]],
    *,
    tokens: int,
    grain: int | None,
) -> DecodeRow | None:
    """A row that can take more steps than a trial has, and keeps its checkpoint meanwhile; None if there is none.

    A ring that folds may overwrite the checkpoint that the next run would read.

    Args:
        where: waits for `State.tokens` and `State.lengths`. tokens: the most that a row takes in a step.
        grain: tokens of a ring; None for a model without recurrent layers.
    """
    able = [row for row in rows if row.num_steps >= STEPS and row.num_tokens > STEPS]
    if not able:
        return None
    fed, lengths = where()
    for row in able:
        length = int(lengths[row.row])
        last = max(length - 1, 0)
        room = STEPS * tokens if grain is None else grain - (length - last // grain * grain)
        if fed[row.row] >= 0 and room >= STEPS * tokens:
            return row
    return None


@dataclass(frozen=True)
class Outcome:
    """What a row drew, and the bytes that it left in its ring.

    Attributes:
        counts: tokens that each call drew. waited: every call has waited for its steps.
    """

    drawn: list[int]
    left: list[bytes]
    counts: list[int] = field(compare=False)
    waited: bool = field(compare=False)


def wrong_with_loop(
    row: DecodeRow,
    call: Callable[[DecodeRow, int], jax.Array],
    read: Callable[[], dict[str, Any]],
    write: Callable[[dict[str, Any]], None],
    *,
    tokens: int,
    may_wait: bool,
) -> str | None:
    """Says what is wrong with a loop; None for nothing, and `UNDECIDED` if the row has stopped on its way.

    Args:
        call: runs the program for this row alone and so many steps; the tokens int32[n] that it drew.
        read: what the state has of the row. write: puts that back.
        tokens: the most that a row takes in a step. may_wait: a call may wait for its steps.
    """
    before = read()

    def run(*calls: int) -> Outcome:
        write(before)
        jax.block_until_ready(read())
        drawn: list[int] = []
        counts: list[int] = []
        left, held, waited = row.num_tokens, before, True
        for num_steps in calls:
            start = time.perf_counter()
            made = call(replace(row, num_tokens=left), num_steps)
            waited &= made.is_ready() and time.perf_counter() - start > WAITED_SECONDS
            new = np.asarray(made)
            drawn += (new := new[new != NO_TOKEN].tolist())
            counts.append(len(new))
            held = jax.device_get(read())
            left = row.num_tokens - int(held["lengths"] - before["lengths"])
        bits = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(held)]
        return Outcome(drawn, bits, counts, waited)

    together, again, one_by_one = run(STEPS), run(STEPS), run(*[1] * STEPS)
    write(before)
    if together != again:
        return "its second run differs from its first"
    if max(one_by_one.counts) > tokens:
        return "one step drew more than a step can"
    if together != one_by_one:
        return f"{STEPS} steps in one call differ from the same in {STEPS} calls"
    if not all(one_by_one.counts):
        return UNDECIDED
    # A host that paused once looks the same, so each call must have waited.
    if not may_wait and together.waited and again.waited and one_by_one.waited:
        return "its call waited for its steps, so the compiler left it out of the command buffer"
    return None


class LoopTrial:
    """The trial of an engine's loops.

    Args:
        loops: learns what came of it. device: where programs run.
        store: remembers what came of it, or None. name: of the trial there.
    """

    def __init__(
        self, loops: Loops, device: jax.Device, store: ProgramStore | None, name: str
    ) -> None:
        self._loops, self._device, self.store, self.name = loops, device, store, name
        self.may_wait = device.platform != "gpu"  # a call may wait for its steps
        self._has_run = False  # a program with a loop
        self._ends = 0  # earlier processes that have ended in this trial

    def run(
        self,
        row: DecodeRow,
        call: Callable[[DecodeRow, int], jax.Array],
        read: Callable[[], dict[str, Any]],
        write: Callable[[dict[str, Any]], None],
        *,
        tokens: int,
    ) -> None:
        """Tries a loop; the arguments are those of `wrong_with_loop`. If it failed, the host starts each step now.

        Raises:
            LoopFailed: the program raised. Other errors say nothing about the loop.
        """
        with self._begun():
            wrong = wrong_with_loop(row, call, read, write, tokens=tokens, may_wait=self.may_wait)
        if wrong == UNDECIDED:
            self._note(None)
        else:
            self._end(wrong)

    def guarded(self, call: Callable[[], T]) -> T:
        """Runs a program with a loop that was not tried yet, because it is warmed up or no row suits a trial.

        Raises:
            LoopFailed: it could not be compiled, or raised.
        """
        if self._has_run:
            with self._failing():
                return call()
        with self._begun():
            made = jax.block_until_ready(call())
        self._note(None)
        self._has_run = True
        return made

    @contextlib.contextmanager
    def _begun(self) -> Iterator[None]:
        """That a loop runs is noted meanwhile. If it ends the process, and another one, no later one runs it again."""
        if self.store is not None:
            earlier = Begun.read(self.store.verdict(self.name))
            self._ends = max(self._ends, 0 if earlier is None else earlier.ended)
        self._note(str(Begun.now(self._ends)))
        with self._failing():
            yield

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """An error inside is the loop's, unless it says something else."""
        try:
            yield
        except Exception as error:
            remedy = "" if self.store is not None else f" with {WITHOUT_LOOPS}"
            try:
                wrong = fault_of(error, self._device, tried="a loop over steps", remedy=remedy)
            except RuntimeError:
                self._note("the GPU stopped working")
                raise
            if wrong is None:
                self._note(None)
                raise
            self._end(wrong)
            raise LoopFailed(wrong) from error
        except BaseException:  # somebody ends the process
            self._note(None)
            raise

    def _end(self, wrong: str | None) -> None:
        self._note(PASSED if wrong is None else wrong)
        self._loops.untried = False
        if wrong is not None:
            self._loops.by_the_host(f"failed a trial: {wrong}")

    def _note(self, verdict: str | None) -> None:
        if self.store is not None:
            self.store.note(self.name, verdict)
