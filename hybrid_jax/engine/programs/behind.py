"""Compiling behind the steps that run: one program at a time, for later calls."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor

LOG = logging.getLogger("hybrid_jax.compiling")


class Behind:
    """A thread that compiles programs that would have fitted better. The process waits for the one being compiled."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._begun: set[Hashable] = set()

    def compile(self, key: Hashable, prepare: Callable[[], Callable[[], None]]) -> None:
        """Has a program compiled, once.

        Args:
            key: names the program. prepare: runs in the caller's thread and returns a call that compiles the program
                in any thread.
        """
        if key in self._begun:
            return
        self._begun.add(key)
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="hybrid_jax-compile-behind")
        self._pool.submit(_logged, prepare())

    def close(self) -> None:
        """Stops: no further program is begun."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)


def _logged(call: Callable[[], None]) -> None:
    try:
        call()
    except Exception:  # the larger program stays in use
        LOG.exception("could not compile a program ahead; a larger one serves in its place")
