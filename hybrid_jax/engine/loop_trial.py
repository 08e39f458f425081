"""A trial of a program that loops over steps, with a row of the dispatch that it is about to run for.

The row takes two steps in one call, the same again, and then the two steps in two calls. Tokens, and all bits that the
steps leave in the row's ring, must be equal. So the loop runs as often as it should, and a command buffer can be used
again. Nothing of this stays. The row's ring is put back, and what it has written to its own pages comes again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from hybrid_jax.engine.programs.loops import BEGUN, Loops, first_line
from hybrid_jax.engine.programs.store import PASSED, ProgramStore
from hybrid_jax.schedule.plan import DecodeRow

STEPS = 2
NO_TOKEN = -1


class LoopFailed(RuntimeError):
    """A loop raised in its trial. What the device holds is not known. The host starts each step from now on."""


def row_for_trial(
    rows: Sequence[DecodeRow], lengths: np.ndarray, *, tokens: int, grain: int | None
) -> DecodeRow | None:
    """A row that can take the steps of a trial and keeps its checkpoint; None if there is none.

    A ring that folds may overwrite the checkpoint that the next run would read.

    Args:
        lengths: `State.lengths`. tokens: the most that a row takes in a step.
        grain: tokens of a ring; None for a model without recurrent layers.
    """
    for row in rows:
        length = int(lengths[row.row])
        last = max(length - 1, 0)
        room = STEPS * tokens if grain is None else grain - (length - last // grain * grain)
        if min(row.num_steps, row.num_tokens) >= STEPS and room >= STEPS * tokens:
            return row
    return None


@dataclass(frozen=True)
class Outcome:
    """What a row drew, and the bytes that it left in its ring."""

    drawn: list[int]
    left: list[bytes]


class LoopTrial:
    """The trial of an engine's loops.

    Args:
        loops: learns what came of it. store: remembers it, or None. name: of the trial there.
    """

    def __init__(self, loops: Loops, store: ProgramStore | None, name: str) -> None:
        self._loops, self.store, self.name = loops, store, name

    def run(
        self,
        row: DecodeRow,
        call: Callable[[DecodeRow, int], jax.Array],
        read: Callable[[], dict[str, Any]],
        write: Callable[[dict[str, Any]], None],
    ) -> None:
        """Tries a loop; the arguments are those of `wrong_with_loop`. If it failed, the host starts each step now.

        Raises:
            LoopFailed: the program could not be compiled, or raised.
        """
        # Kept before the trial, so that a process which it ends is not followed by another. One that starts in just
        # this moment will start each step by the host.
        self._note(BEGUN)
        try:
            wrong = wrong_with_loop(row, call, read, write)
        except Exception as error:
            if "RESOURCE_EXHAUSTED" in str(error):  # it says nothing about the loop
                self._note(None)
                raise
            wrong = f"{type(error).__name__}: {first_line(error)}"
            self._end(wrong)
            raise LoopFailed(wrong) from error
        self._end(wrong)

    def _end(self, wrong: str | None) -> None:
        self._note(PASSED if wrong is None else wrong)
        self._loops.untried = False
        if wrong is not None:
            self._loops.by_the_host(f"failed a trial: {wrong}")

    def _note(self, verdict: str | None) -> None:
        if self.store is not None:
            self.store.note(self.name, verdict)


def wrong_with_loop(
    row: DecodeRow,
    call: Callable[[DecodeRow, int], jax.Array],
    read: Callable[[], dict[str, Any]],
    write: Callable[[dict[str, Any]], None],
) -> str | None:
    """Says what is wrong with a loop, or None.

    Args:
        call: runs the program for this row alone and so many steps; the tokens int32[n] that it drew.
        read: what the state has of the row. write: puts that back.
    """
    before = read()

    def run(*calls: int) -> Outcome:
        write(before)
        drawn: list[int] = []
        left, held = row.num_tokens, before
        for num_steps in calls:
            tokens = np.asarray(call(replace(row, num_tokens=left), num_steps))
            drawn += tokens[tokens != NO_TOKEN].tolist()
            held = jax.device_get(read())
            left = row.num_tokens - int(held["lengths"] - before["lengths"])
        return Outcome(drawn, [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(held)])

    together, again, one_by_one = run(STEPS), run(STEPS), run(*[1] * STEPS)
    write(before)
    if not together.drawn:
        return "no token came"
    if together != again:
        return "its second run differs from its first"
    if together != one_by_one:
        return f"{STEPS} steps in one call differ from the same in {STEPS} calls"
    return None
