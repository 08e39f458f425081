"""Compiles all programs before the first request, in several threads. The engine's own thread runs each one once."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, as_completed

from hybrid_jax.api.threads.questions import WarmUpProgram
from hybrid_jax.process.ending import pool_of_threads


def warm_up(
    programs: Sequence[WarmUpProgram],
    compile_ahead: Callable[[int], object],
    run: Callable[[int], object],
    threads: int,
    report: Callable[[int, int], None],
) -> dict[str, float]:
    """Compiles all programs. With several threads, those that can be compiled ahead are run after that.

    Args:
        programs: what to compile.
        compile_ahead: compiles a program that can be compiled ahead, given its place in the list.
        run: has the engine's thread run a program.
        threads: how many compile.
        report: called with (programs done, programs in all).

    Returns:
        Seconds of compiling by name.
    """
    seconds = {program.name: 0.0 for program in programs}
    num_done = 0

    def timed(index: int, call: Callable[[int], object]) -> int:
        start = time.perf_counter()
        call(index)
        seconds[programs[index].name] += time.perf_counter() - start
        return index

    def finish(index: int) -> None:
        nonlocal num_done
        timed(index, run)
        num_done += 1
        report(num_done, len(programs))

    report(0, len(programs))
    is_ahead = [program.has_ahead and threads > 1 for program in programs]
    pool = pool_of_threads(threads, "hybrid_jax-compile")
    try:
        futures: list[Future[int]] = [
            pool.submit(timed, index, compile_ahead)
            for index in sorted(range(len(programs)), key=lambda index: programs[index].rank)
            if is_ahead[index]
        ]
        for index, ahead in enumerate(is_ahead):
            if not ahead:
                finish(index)
        for future in as_completed(futures):
            finish(future.result())
    finally:  # after an error or Ctrl-C no further program is begun
        pool.shutdown(wait=False, cancel_futures=True)
    return seconds
