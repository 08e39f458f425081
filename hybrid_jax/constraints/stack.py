"""Calls with a stack of known size. How much the caller's thread has is the choice of the program and the system."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
STACK_BYTES = 8 << 20  # four times what forms are tried with; only what is used takes memory
_starting = threading.Lock()


def with_large_stack(function: Callable[[], T]) -> T:
    """What a function returns, or raises, in a new thread with STACK_BYTES of stack.

    Raises:
        RuntimeError: no thread can be started.

    Example:
        >>> with_large_stack(lambda: 3)
        3
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            results.append(function())
        except BaseException as error:  # a panic of native code is none of Python's own exceptions
            errors.append(error)

    thread = threading.Thread(target=call, name="hybrid_jax form", daemon=True)
    with _starting:  # the size is one for all threads that a program starts
        before = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    if errors:
        try:
            raise errors[0]
        finally:
            errors.clear()  # the error's traceback leads here, and would keep all of it for a while
    return results[0]
