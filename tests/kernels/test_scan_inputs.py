"""The inputs of a selective scan: the kernel against the definition, and that against the layer's norms."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.selective_scan import ScanInputs, scan_inputs
from pallas_kernels.selective_scan.inputs import INPUTS
from tests.kernels.compare import relative_error

RANK, SIZE = 7, 5
TOLERANCE = {"float32": 1e-6, "bfloat16": 2e-3}


def make_inputs(dtype: str, parts: int = 0) -> ScanInputs:
    rng = np.random.default_rng(0)
    shape = (2, 3, RANK + 2 * SIZE)
    kind = "float32" if parts else dtype
    projected = rng.standard_normal((parts, *shape) if parts else shape, np.float32)
    weights = [rng.uniform(0.5, 2, size) for size in (RANK, SIZE, SIZE)]
    return ScanInputs(jnp.asarray(projected, kind), *(jnp.asarray(w, dtype) for w in weights))


@functools.partial(jax.jit, static_argnames=("eps", "implementation"))
def run(arrays: ScanInputs, eps: float | None, implementation: str):
    return scan_inputs(arrays, eps=eps, implementation=implementation)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("eps", [None, 1e-2])
@pytest.mark.parametrize("parts", [0, 3])
def test_the_kernel_equals_the_reference(dtype, eps, parts):
    arrays = make_inputs(dtype, parts)
    got, want = (run(arrays, eps, name) for name in ("pallas", "reference"))
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype == dtype
        assert relative_error(a, b) <= TOLERANCE[dtype]


@pytest.mark.parametrize("implementation", sorted(INPUTS))
def test_each_piece_is_normed_by_itself(implementation):
    arrays = make_inputs("float32")
    dt, BC = (np.asarray(a) for a in run(arrays, 1e-2, implementation))
    pieces = np.split(np.asarray(arrays.projected), [RANK, RANK + SIZE], axis=-1)
    for got, piece, weight in zip(
        (dt, BC[..., :SIZE], BC[..., SIZE:]), pieces, arrays[1:], strict=True
    ):
        want = piece / np.sqrt((piece**2).mean(-1, keepdims=True) + 1e-2) * np.asarray(weight)
        assert relative_error(got, want) < 1e-6
    assert relative_error(run(arrays, None, implementation)[0], pieces[0]) == 0


def test_columns_that_do_not_fit_are_named():
    arrays = make_inputs("float32")
    with pytest.raises(
        ValueError, match=r"scan_inputs: projected must have 7 \+ 2 x 5 columns, got 16"
    ):
        scan_inputs(arrays._replace(projected=arrays.projected[..., 1:]), eps=None)
