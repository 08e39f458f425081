"""What every Pallas kernel is made of."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.triton import dot


@pytest.mark.parametrize("shape", [(8, 64), (64, 8), (1, 1), (16, 16)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_product_too_small_for_tensor_cores_is_one_of_float32(shape, dtype):
    a, b = jnp.ones(shape, dtype), jnp.ones((shape[1], 4), dtype)
    (product,) = [one for one in jax.make_jaxpr(dot)(a, b).eqns if "dot" in one.primitive.name]
    expected = dtype if min(shape) >= 16 else "float32"
    assert {str(operand.aval.dtype) for operand in product.invars} == {expected}
    assert product.outvars[0].aval.dtype == jnp.float32
    assert np.array_equal(dot(a, b), np.full((shape[0], 4), shape[1]))
