"""Compiling behind the steps that run: one program at a time, for calls to come."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor

LOG = logging.getLogger("hybrid_jax.compiling")


class Behind:
    """A thread that compiles what would have fitted better. The process ends after the program it is at."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._begun: set[Hashable] = set()

    def compile(self, key: Hashable, prepare: Callable[[], Callable[[], None]]) -> None:
        """Has a program compiled, once.

        Args:
            key: the program. prepare: makes, in the caller's thread, a call for any thread that compiles it.
        """
        if key in self._begun:
            return
        self._begun.add(key)
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="hybrid_jax-compile-behind")
        self._pool.submit(_logged, prepare())

    def close(self) -> None:
        """No further program is begun."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)


def _logged(call: Callable[[], None]) -> None:
    try:
        call()
    except Exception:  # the larger program goes on serving
        LOG.exception("could not compile a program ahead; a larger one serves in its place")
