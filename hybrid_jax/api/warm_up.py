"""Compiles all programs before the first request, in several threads. The engine's own thread runs each one once."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, as_completed
from typing import TYPE_CHECKING

from hybrid_jax.process.ending import pool_of_threads

if TYPE_CHECKING:
    from hybrid_jax.engine.programs.compiling import WarmUp


def warm_up(
    programs: Sequence[WarmUp],
    in_engine: Callable[[Callable[[], object]], object],
    threads: int,
    report: Callable[[int, int], None],
) -> dict[str, float]:
    """Compiles all programs. With several threads, those that can be compiled ahead are run after that.

    Args:
        programs: what to compile.
        in_engine: has the engine's thread make a call.
        threads: how many compile.
        report: called with (programs done, programs in all).

    Returns:
        Seconds of compiling by name.
    """
    seconds = {program.name: 0.0 for program in programs}
    num_done = 0

    def timed(program: WarmUp, call: Callable[[], object]) -> WarmUp:
        start = time.perf_counter()
        call()
        seconds[program.name] += time.perf_counter() - start
        return program

    def finish(program: WarmUp) -> None:
        nonlocal num_done
        timed(program, lambda: in_engine(program.run))
        num_done += 1
        report(num_done, len(programs))

    report(0, len(programs))
    pool = pool_of_threads(threads, "hybrid_jax-compile")
    try:
        futures: list[Future[WarmUp]] = [
            pool.submit(timed, program, program.ahead)
            for program in sorted(programs, key=lambda program: program.rank)
            if program.ahead is not None and threads > 1
        ]
        for program in programs:
            if program.ahead is None or threads == 1:
                finish(program)
        for future in as_completed(futures):
            finish(future.result())
    finally:  # after an error or Ctrl-C no further program is begun
        pool.shutdown(wait=False, cancel_futures=True)
    return seconds
