"""The end of a program: it waits for threads inside of XLA, says so, and Ctrl-C ends the wait.

Python aborts if native code of a thread outlives it. So nothing can be given up in the middle, but by ending the
process at once.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from weakref import WeakSet

from hybrid_jax.process.streams import Forgiving, is_terminal, say

INTERRUPTED = 130  # the exit code of a program that Ctrl-C ends
PATIENCE = 0.5  # seconds that a program waits at its end before it says so
_pools: WeakSet[ThreadPoolExecutor] = WeakSet()
_threads: WeakSet[threading.Thread] = WeakSet()  # of these pools


def wait_for(threads: Iterable[threading.Thread]) -> None:
    """Waits for threads at the end of the program. Ctrl-C ends the wait and the process."""
    left = list(threads)
    try:
        deadline = time.monotonic() + PATIENCE
        for thread in left:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in left) and is_terminal(sys.stderr):
            say("hybrid_jax: waiting for a step or the compiler; Ctrl-C stops at once")
        for thread in left:
            thread.join()
    except KeyboardInterrupt:
        Forgiving(sys.stdout).flush()
        os._exit(INTERRUPTED)


def pool_of_threads(number: int, name: str) -> ThreadPoolExecutor:
    """A pool whose threads the end of the program waits for by `wait_for`. Calls that have not begun are dropped."""
    pool = ThreadPoolExecutor(
        number,
        thread_name_prefix=name,
        initializer=lambda: _threads.add(threading.current_thread()),
    )
    _pools.add(pool)
    return pool


def _end_pools() -> None:
    for pool in list(_pools):
        pool.shutdown(wait=False, cancel_futures=True)
    wait_for(_threads)


# Python waits for all pools before it runs what `atexit` has, and Ctrl-C would leave that wait for an abort. What is
# registered later runs earlier, and the pools' own hook came with the import above.
threading._register_atexit(_end_pools)  # type: ignore[attr-defined]
