"""Windows of the gated delta rule: their cases, run by name."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

from tests.kernels.by_name import gated_delta_window_frames
from tests.kernels.cases.gated_delta import (
    SCANS,
    WINDOWS,
    WindowCase,
)
from tests.kernels.framed import in_frames

TOLERANCE = {"float32": 3e-6, "bfloat16": 6e-3}  # of the norm
STATIC = ("implementation",)
every_dtype = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
BY_NAME = {case.name: case for case in (*SCANS, *WINDOWS)}

# Token 0 follows the context; 1 and 2 follow 0; 3 follows 1; 4 follows the context.
PATHS = ((0,), (0, 1), (0, 2), (0, 1, 3), (4,))
TREE = jnp.asarray([sum(1 << token for token in path) for path in PATHS], jnp.int32)
RING = WindowCase(name="ring", slots=37, tokens=5, starts=(0, 9, 32, 3), heads=4, groups=2)
compiled_window = functools.partial(jax.jit, static_argnames=STATIC)(gated_delta_window_frames)


def window(*, implementation: str, state, ancestors=None, **given):
    """y, u, and whether the arena is as it was."""
    arena, frames = in_frames(state, 2)
    exists = jnp.ones(len(frames), bool)
    given |= {"arena": arena, "frames": frames, "exists": exists, "ancestors": ancestors}
    y, u, after = compiled_window(**given, implementation=implementation)
    return y, u, bool((after == arena).all())
