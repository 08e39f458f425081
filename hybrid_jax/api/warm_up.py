"""Compiles all programs before the first request, in several threads. The engine's own thread runs each one once."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed

Compile = Callable[[], None]


def warm_up(
    jobs: Sequence[tuple[str, Compile]],
    ahead: Mapping[str, Compile],
    run: Callable[[Compile], None],
    threads: int,
    report: Callable[[int, int], None],
) -> dict[str, float]:
    """Does all jobs. Those that can be compiled ahead in another thread are done after that.

    Args:
        jobs: the name of each program, and what compiles and runs it in the engine's thread.
        ahead: by the name of some programs, what compiles them in any thread.
        run: has the engine's thread do a job.
        threads: how many compile ahead.
        report: called with (jobs done, jobs in all).

    Returns:
        Seconds of compiling by name.
    """
    seconds: dict[str, float] = {}
    report(0, len(jobs))

    def finish(name: str, job: Compile) -> None:
        start = time.perf_counter()
        run(job)
        seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start
        report(next(count), len(jobs))

    def timed(name: str) -> str:
        start = time.perf_counter()
        ahead[name]()
        seconds[name] = time.perf_counter() - start
        return name

    count, calls = itertools.count(1), dict(jobs)
    pool = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="hybrid_jax-compile")
    try:
        futures: list[Future[str]] = [pool.submit(timed, name) for name in ahead]
        for name, job in jobs:
            if name not in ahead:
                finish(name, job)
        for future in as_completed(futures):
            name = future.result()
            finish(name, calls[name])
    finally:  # after an error or Ctrl-C no further program is begun
        pool.shutdown(wait=False, cancel_futures=True)
    return seconds
