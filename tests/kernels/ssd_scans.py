"""Scans of the SSD recurrence: their cases, run by name."""

from __future__ import annotations

import functools

import jax

from pallas_kernels import ssd_scan
from tests.kernels.cases.ssd_scan import CASES
from tests.kernels.compare import relative_error

TOLERANCE = {"float32": 1e-6, "bfloat16": 1e-3}  # of the norm, by the dtype of the compared array
ROUNDED = 6e-3  # where bfloat16 inputs are multiplied on tensor cores: weights and states are rounded to it
RAGGED = next(case for case in CASES if case.name == "ragged_rows_and_an_empty_one")
TAIL = next(case for case in CASES if case.name == "tail_within_a_tile")
scan = functools.partial(jax.jit, static_argnames="implementation")(ssd_scan)


def assert_close(got, want, tolerance: float | None = None) -> None:
    assert got.shape == want.shape and got.dtype == want.dtype
    assert relative_error(got, want) <= (tolerance or TOLERANCE[got.dtype.name])
