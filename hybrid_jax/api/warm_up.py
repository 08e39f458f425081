"""Compiling everything before the first request: in threads, while the engine's own thread runs what is ready once."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed

Call = Callable[[], None]


def warm_up(
    jobs: Sequence[tuple[str, Call]],
    ahead: Mapping[str, Call],
    run: Callable[[Call], None],
    threads: int,
    report: Callable[[int, int], None],
) -> dict[str, float]:
    """Does all jobs, those that can be compiled ahead once that is done.

    Args:
        jobs: each program by its name, and a call for the engine's thread that compiles and runs it.
        ahead: for some of them, a call for any thread that compiles it.
        run: has the engine's thread make a call. threads: that compile ahead.
        report: called with (jobs done, jobs in all).

    Returns:
        Seconds of compiling by name.
    """
    seconds: dict[str, float] = {}
    report(0, len(jobs))

    def finish(name: str, job: Call) -> None:
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
