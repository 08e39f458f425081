"""The product of a lone row against its definition: shapes that fill tiles and that do not, few parts and many."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.plan import H200
from pallas_kernels.row_product.kernel import PRODUCTS, row_product
from pallas_kernels.row_product.plan import num_parts
from tests.kernels.lowered import kernels_in

SHAPES = [(64, 64), (1, 5), (300, 70), (512, 130), (1000, 64), (2112, 200)]
product = functools.partial(jax.jit, static_argnames="implementation")(row_product)


def inputs(inner: int, columns: int, dtype: str):
    rng = np.random.default_rng(inner)
    x = jnp.asarray(rng.standard_normal(inner), dtype)
    return x, jnp.asarray(rng.standard_normal((inner, columns)), dtype)


@pytest.mark.parametrize("implementation", sorted(PRODUCTS))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_parts_sum_to_the_product(shape, dtype, implementation):
    inner, columns = shape
    x, weight = inputs(inner, columns, dtype)
    parts = product(x, weight, implementation=implementation)
    want_shape = num_parts(inner, columns, H200.num_sms), columns
    assert parts.dtype == jnp.float32 and parts.shape == want_shape
    want = np.asarray(x, np.float64) @ np.asarray(weight, np.float64)
    error = np.abs(np.asarray(parts, np.float64).sum(0) - want).max()
    assert (
        error <= 2e-6 * np.abs(want).max() + 1e-6
    )  # also of bfloat16: no product is rounded to it
    reference = product(x, weight, implementation="reference")
    np.testing.assert_allclose(parts, reference, rtol=1e-5, atol=1e-4)


def test_what_lies_past_the_ends_is_not_read():
    x, weight = inputs(300, 70, "float32")
    whole = jnp.full((400, 100), jnp.nan).at[:300, :70].set(weight)
    got = jax.jit(lambda x, w: row_product(x, w[:300, :70], implementation="pallas"))(x, whole)
    np.testing.assert_array_equal(got, product(x, weight, implementation="pallas"))


@pytest.mark.parametrize(
    ("inner", "columns", "parts"),
    [
        (4096, 4096, 8),
        (8192, 4096, 8),
        (4096, 18560, 2),
        (4096, 131072, 1),
        (512, 64, 2),
        (511, 64, 1),
    ],
)
def test_parts_are_as_many_as_fill_a_gpu_and_few_enough_to_sum(inner, columns, parts):
    assert num_parts(inner, columns, H200.num_sms) == parts


def test_a_gpu_gets_one_kernel():
    assert kernels_in(row_product, *inputs(64, 64, "bfloat16")) == ["row_product"]


@pytest.mark.parametrize(
    ("x", "weight", "message"),
    [
        (jnp.ones((1, 4)), jnp.ones((4, 4)), "x must have 1 dimensions, got shape"),
        (jnp.ones(4), jnp.ones((5, 4)), "weight must have shape"),
        (jnp.ones(4), jnp.ones((4, 4), jnp.bfloat16), "weight must be float32, got bfloat16"),
    ],
)
def test_wrong_arguments_are_refused(x, weight, message):
    with pytest.raises(ValueError, match=f"row_product: {message}"):
        row_product(x, weight)
