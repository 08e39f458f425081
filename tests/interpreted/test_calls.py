"""The call itself: arrays in place, outputs, every dtype, and versions that cannot be used."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import jax_triton
from tests.drawing import spine

try:
    import triton
    import triton.language as tl
except ModuleNotFoundError:
    pytest.skip("needs triton", allow_module_level=True)


@triton.jit
def add_and_multiply(x, y, product, size: tl.constexpr, block: tl.constexpr):
    i = tl.program_id(0) * block + tl.arange(0, block)
    a = tl.load(x + i, mask=i < size).to(tl.float32)
    b = tl.load(y + i, mask=i < size).to(tl.float32)
    tl.store(x + i, (a + b).to(x.dtype.element_ty), mask=i < size)
    tl.store(product + i, a * b, mask=i < size)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint16"])
@spine("float32")
def test_in_place_and_an_output(dtype):
    x = jnp.arange(100).astype(dtype)

    @jax.jit
    def run(x, y):
        return jax_triton.call(
            *(add_and_multiply, x, y),
            outputs=[jax.ShapeDtypeStruct(x.shape, "float32")],
            in_place=[0],
            grid=(4,),
            num_warps=4,
            size=100,
            block=32,
        )

    total, product = run(x, x + 1)
    assert total.dtype == x.dtype and np.array_equal(total, 2 * x + 1)
    assert np.array_equal(product, np.arange(100.0) * np.arange(1.0, 101))
    assert np.array_equal(x, jnp.arange(100).astype(dtype))  # without donation it stays
