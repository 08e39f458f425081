"""Windows of the causal convolution: their arguments, and what is compared."""

from __future__ import annotations

import numpy as np

from pallas_kernels.operands import floats
from tests.kernels.cases.causal_conv import (
    WindowCase,
)
from tests.kernels.compare import relative_error

TOLERANCE = {"float32": 1e-6, "bfloat16": 1e-3}  # of the norm
STATIC = ("layer", "layout", "moves", "implementation")


def assert_close(got, want, name: str = "") -> None:
    assert got.shape == want.shape and got.dtype == want.dtype
    got, want = floats(got), floats(want)
    assert relative_error(got, want) <= TOLERANCE[got.dtype.name], name


def new_tokens(case: WindowCase) -> np.ndarray:
    """bool[B, T]"""
    token = np.arange(case.tokens)
    first, end = np.asarray(case.first)[:, None], np.asarray(case.num_valid)[:, None]
    return (token >= np.maximum(first, 0)) & (token < end)
