"""What the kernel benchmarks share: cases and sides, the check that they agree, clocks, and the roofline.

A case is run by several sides on the same inputs: the Pallas kernel, XLA's own compilation of the fast path and of
the reference, and public kernels (`peers.py`). Each side's output is compared with the truth before anything is
timed; one that disagrees is reported, not timed. All valid sides then take turns in one process.

Inside the clock, for a JAX side: jitted chains of calls over several sets of inputs, which together do not fit in the
L2 cache; several programs are dispatched before waiting for the last one. For a torch side: replays of a CUDA graph of
the same calls, between two device events.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from sys import stderr
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.common import Ceilings, quantiles, turns
from benchmarks.kernels.peers import NotInstalled, TorchClock, to_numpy

CACHE_BYTES = 64e6  # a little more than the L2 cache of an H200
ROTATED_BYTES = 8 * CACHE_BYTES
MOST_SETS, MOST_CALLS = 32, 64
MOST_LINES = 6000  # of a lowered program; XLA takes about a millisecond for each
CHAIN_SECONDS, ROUND_SECONDS = 0.25e-3, 30e-3  # what a chain and a round should take
MOST_PROGRAMS = 128  # in a round
NEVER_WAITS = 16  # programs dispatched at once; jax waits at 32
PEER_SLACK = 3  # public kernels keep more in bfloat16
HOST_BOUND = 0.9  # share of a round spent in dispatching above which a row says so


def with_arrays(function: Callable, kind: type[tuple], **static: Any) -> Callable:
    """The function with some arguments given, and with each of its arrays as an argument by name.

    Args:
        kind: the NamedTuple in which it takes its arrays.
    """

    def call(**given: Any):
        arrays = {name: given.pop(name) for name in kind._fields if name in given}
        return function(kind(**arrays), **given, **static)

    return call


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one call must do.

    Attributes:
        bytes: each input read once, each output written once. flops: on bfloat16 operands.
        tokens: processed by a call, for tokens a second.
    """

    bytes: float
    flops: float = 0.0
    tokens: int = 0

    def floor(self, ceilings: Ceilings) -> float:
        """Seconds that no version can beat by much."""
        return ceilings.floor(self.bytes, self.flops)


@dataclass(frozen=True, kw_only=True)
class Side:
    """One JAX way to do a case.

    Attributes:
        call: (carry, inputs) -> (outputs, carry); the carry is donated, and updated in place.
        draw: inputs of its own from a key, as `Case.draw`; None for those of the case.
        gpu_only: cannot run on a CPU.
    """

    name: str
    call: Callable[[Any, Any], tuple[Any, Any]]
    draw: Callable[[jax.Array], tuple[Any, Any]] | None = None
    note: str = ""
    gpu_only: bool = False


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A public kernel, called through torch.

    Attributes:
        build: (carry, inputs) of one set -> a function without arguments; raises NotInstalled.
        draw: as in `Side`.
        compared: whether its outputs can be compared with the truth at all.
    """

    name: str
    build: Callable[[Any, Any], Callable[[], Any]]
    draw: Callable[[jax.Array], tuple[Any, Any]] | None = None
    note: str = ""
    compared: bool = True


def plain_result(outputs, carry, inputs):
    return outputs


@dataclass(frozen=True, kw_only=True)
class Case:
    """One operation at one shape.

    Attributes:
        draw: key -> (carry, inputs): fresh random arrays on the device; runs under jit.
        truth: a JAX call that every side must agree with.
        result: (outputs, carry, inputs) -> arrays to compare; peers return these directly.
        sides, peers: what is timed. configs: launch parameters to sweep, by name; calls.
        tolerance: largest relative error, in the norm; of integers, the share that may differ.
    """

    operation: str
    name: str
    draw: Callable[[jax.Array], tuple[Any, Any]]
    truth: Callable[[Any, Any], tuple[Any, Any]]
    sides: tuple[Side, ...]
    work: Work
    peers: tuple[Peer, ...] = ()
    configs: dict[str, Callable[[Any, Any], tuple[Any, Any]]]
    result: Callable[[Any, Any, Any], Any] = plain_result
    tolerance: float = 1e-2


def program(call, repeats: int):
    """A chain of calls: (carries, inputs), lists over sets, -> (a number to wait for, the first set's last outputs,
    carries)."""

    def chain(carries, inputs):
        carries, ends, first = list(carries), [], None
        for _ in range(repeats):
            # A barrier, so that repeated calls are not merged, nor computed only as far as is looked at.
            inputs = jax.lax.optimization_barrier(inputs) if repeats > 1 else inputs
            for i, one in enumerate(inputs):
                outputs, carries[i] = call(carries[i], one)
                outputs = jax.lax.optimization_barrier(outputs)
                first = outputs if i == 0 else first
                ends += [
                    leaf[(0,) * leaf.ndim].astype(jnp.float32) for leaf in jax.tree.leaves(outputs)
                ]
        return sum(ends, jnp.float32(0)), first, carries

    return chain


def share_of_chain(call, sets: list, repeats: int) -> tuple[int, int]:
    """How many of the sets one program takes, and how often: fewer where a call is long to compile."""
    lines = jax.jit(call).lower(*sets[0]).as_text().count("\n")
    most = max(1, MOST_LINES // lines)
    if len(sets) * repeats <= most:
        return len(sets), repeats
    return max(n for n in range(1, len(sets) + 1) if len(sets) % n == 0 and n <= most), 1


class JaxClock:
    """Seconds per call of a side, by rounds; compiles and runs once when made, and keeps that run's result.

    Attributes:
        calls: of a chain: `repeats` of every set.
        result: of the first set, after all calls of a chain; what is timed is what is compared.
        host_share: of the last round's time; dispatching alone, as the first programs took it, which never wait.
    """

    def __init__(self, case: Case, call, sets: list, repeats: int):
        self.calls = len(sets) * repeats
        size, inner = share_of_chain(call, sets, repeats)
        groups = [sets[i : i + size] for i in range(0, len(sets), size)]
        self.inputs = [[inputs for _, inputs in group] for group in groups]
        # A copy of each carry: sides share sets, and these are donated.
        self.carries = [[jax.tree.map(jnp.copy, carry) for carry, _ in group] for group in groups]
        self.order = list(range(len(groups))) * (repeats // inner)
        self.program = jax.jit(program(call, inner), donate_argnums=0)
        self.count, self.host_share, first = 1, 0.0, None
        for group in self.order:
            _, outputs, self.carries[group] = self.program(self.carries[group], self.inputs[group])
            first = outputs if group == 0 else first
        found = case.result(first, self.carries[0][0], self.inputs[0][0])
        self.result = jax.tree.map(to_numpy, found)

    def settle(self) -> None:
        """Chooses how many chains make a round."""
        self.count = chains_per_round(self() * self.calls, len(self.order))

    def __call__(self, _=None) -> float:
        order = self.order * self.count
        start = perf_counter()
        for number, group in enumerate(order, 1):
            end, _, self.carries[group] = self.program(self.carries[group], self.inputs[group])
            if number <= NEVER_WAITS:
                each = (perf_counter() - start) / number
        end.block_until_ready()
        seconds = perf_counter() - start
        self.host_share = min(1.0, each * len(order) / seconds)
        return seconds / (self.count * self.calls)


def chains_per_round(seconds: float, programs: int = 1) -> int:
    """How many chains of so many seconds and programs fill a round."""
    return max(1, min(MOST_PROGRAMS // programs, round(ROUND_SECONDS / seconds)))


def sets_and_repeats(work: Work, ceilings: Ceilings, *, smoke: bool) -> tuple[int, int]:
    """Sets of inputs that do not fit in the cache together, and how often a chain goes over them."""
    if smoke:
        return 1, 1
    sets = max(1, min(MOST_SETS, math.ceil(ROTATED_BYTES / work.bytes)))
    wanted = math.ceil(CHAIN_SECONDS / (sets * work.floor(ceilings)))
    return sets, max(1, min(MOST_CALLS // sets, wanted))


def relative_error(got, want) -> float:
    """The largest over two trees of numpy arrays; infinite where one is not finite or shapes differ."""
    errors = []
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if a.shape != b.shape:
            return math.inf
        if np.issubdtype(b.dtype, np.integer):
            errors.append(float(np.mean(a != b)))
            continue
        a, b = a.astype(np.float32), b.astype(np.float32)
        # Sums in float64, without copies in it.
        norm = math.sqrt(np.einsum("i,i->", b.ravel(), b.ravel(), dtype=np.float64))
        difference = (a - b).ravel()
        error = math.sqrt(np.einsum("i,i->", difference, difference, dtype=np.float64))
        errors.append(error / max(norm, 1e-30) if math.isfinite(error) else math.inf)
    return max(errors)


def measure(
    case: Case,
    ceilings: Ceilings,
    *,
    rounds: int,
    smoke: bool = False,
    sweep: bool = False,
    without: Sequence[str] = (),
) -> list[dict]:
    """One row per side: whether it agrees, and its time; progress goes to stderr.

    Args:
        rounds: measurements of each side. smoke: one call of one set, on any device.
        sweep: the case's launch parameters in place of its sides. without: parts of names of sides to leave out.
    """
    sides = case.sides + case.peers
    if sweep:
        sides = tuple(Side(name=name, call=call) for name, call in case.configs.items())
    sides = [side for side in sides if not any(word in side.name for word in without)]
    num_sets, repeats = sets_and_repeats(case.work, ceilings, smoke=smoke)
    keys = [jax.random.key(i) for i in range(num_sets)]
    draws = {None: [jax.jit(case.draw)(key) for key in keys]}
    truth = JaxClock(case, case.truth, draws[None][:1], repeats)
    rows, clocks = [], {}
    for side in sides:
        row = {"operation": case.operation, "case": case.name, "side": side.name}
        row |= {"status": "ok", "note": side.note}
        rows.append(row)
        try:
            if side.draw not in draws:
                draws[side.draw] = [jax.jit(side.draw)(key) for key in keys]
            clock = _agreeing_clock(case, side, draws[side.draw], truth, repeats, row)
            if clock is not None:
                if not smoke:
                    clock.settle()
                clocks[side.name] = clock
        except NotInstalled as missing:
            row["status"] = str(missing)
        except Exception as error:  # whatever a compiler or a peer raises is that side's result
            row["status"] = failure(error)
    if clocks:
        print(f"{case.operation} {case.name}", file=stderr, flush=True)
        seconds = _rounds(rounds, clocks, rows)
        base = "pallas" if "pallas" in seconds else next(iter(seconds), None)
        touched = num_sets * case.work.bytes
        for row in rows:
            if row["side"] in seconds:
                own = seconds[row["side"]]
                row |= _timed(case.work, ceilings, own, seconds[base], clocks[row["side"]])
                row |= {"sets": num_sets, "base": base, "in_cache": touched < 2 * CACHE_BYTES}
    return (
        sorted(rows, key=lambda row: row["us"]["median"] if "us" in row else 1e30)
        if sweep
        else rows
    )


def failure(error: Exception) -> str:
    """A row's status."""
    return f"failed: {type(error).__name__}: {str(error).strip()[:160]}"


def _rounds(rounds: int, clocks: dict, rows: list[dict]) -> dict[str, list[float]]:
    """Seconds of every clock, in turns; one that raises only now costs its own row and no other."""
    failed = {}

    def guarded(name: str, _) -> float:
        try:
            return math.nan if name in failed else clocks[name]()
        except Exception as error:
            failed[name] = failure(error)
            return math.nan

    with redirect_stdout(stderr):
        calls = {name: functools.partial(guarded, name) for name in clocks}
        seconds = turns(rounds, calls, lambda: None)
    for row in rows:
        row["status"] = failed.get(row["side"], row["status"])
    return {name: values for name, values in seconds.items() if name not in failed}


def _agreeing_clock(case: Case, side, sets: list, truth: JaxClock, repeats: int, row: dict):
    """The side's clock, or None where it must not be timed; writes what it finds into the row."""
    limit = case.tolerance
    if isinstance(side, Peer):
        clock, limit = TorchClock(side.build, sets, repeats, chains_per_round), PEER_SLACK * limit
        if not side.compared:
            return clock
    elif side.gpu_only and jax.default_backend() == "cpu":
        row["status"] = "needs a GPU"
        return None
    elif side.call is case.truth and len(sets) == 1:
        clock = truth
    else:
        clock = JaxClock(case, side.call, sets, repeats)
    row["error"] = relative_error(clock.result, truth.result)
    if row["error"] <= limit:
        return clock
    row["status"] = f"disagrees: error {row['error']:.2e}, at most {limit:.0e} allowed"
    return None


def _timed(work: Work, ceilings: Ceilings, own: list[float], base: list[float], clock) -> dict:
    median, floor = quantiles(own)["median"], work.floor(ceilings)
    row = {
        "us": quantiles([1e6 * x for x in own]),
        "ratio": quantiles([a / b for a, b in zip(own, base, strict=True)]),
        "bytes": work.bytes,
        "flops": work.flops,
        "gb_per_s": work.bytes / median / 1e9,
        "tflop_per_s": work.flops / median / 1e12,
        "floor_us": 1e6 * floor,
        "bound": "bytes" if work.bytes / ceilings.copy >= floor else "flops",
        "share": floor / median,
        "calls": clock.calls * clock.count,
        "host_bound": jax.default_backend() == "gpu" and clock.host_share > HOST_BOUND,
    }
    if work.tokens:
        row["tokens_per_s"] = work.tokens / median
    return row
