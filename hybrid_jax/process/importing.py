"""Importing jax and what comes with it, late and in the middle of somebody's program."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from hybrid_jax.process.streams import forgiving


@contextmanager
def undisturbed() -> Iterator[None]:
    """Wraps imports of libraries that touch the caller's state, and restores it.

    jax asks stdout whether it is a terminal, and cannot be imported if that raises. jax and rich draw from the random
    generators of Python and numpy, which the caller may have seeded.
    """
    stdout, drawn, drawn_by_numpy = sys.stdout, random.getstate(), np.random.get_state()
    try:
        hasattr(stdout, "isatty") and stdout.isatty()
    except Exception:  # whatever such an object raises
        sys.stdout = forgiving(stdout)
    try:
        yield
    finally:
        sys.stdout = stdout
        random.setstate(drawn)
        np.random.set_state(drawn_by_numpy)
