"""Products of activations and weights."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hybrid_jax.config import PALLAS
from hybrid_jax.products import kernels
from hybrid_jax.products.matrix import Matrix, product, product_in_float32
from hybrid_jax.products.parts import num_parts
from hybrid_jax.products.xla import linear, linear_transposed
from pallas_kernels.plan import H200

linear_in_parts = functools.partial(kernels.linear_in_parts, backend=PALLAS)
linear_on_kernels = functools.partial(kernels.linear_on_kernels, backend=PALLAS)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lead", [(1,), (1, 1), (3, 1), (2, 5)])
def test_linear_is_the_product(dtype, lead):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((*lead, 24)), dtype)
    weight, bias = jnp.asarray(rng.standard_normal((24, 40)), dtype), jnp.ones(40, dtype)
    want = np.asarray(x, np.float64) @ np.asarray(weight, np.float64) + 1
    got = linear(x, weight, bias)
    assert got.dtype == x.dtype and got.shape == (*lead, 40)
    bound = {"float32": 1e-6, "bfloat16": 8e-3}[dtype] * np.abs(want).max()
    assert np.abs(np.asarray(got, np.float64) - want).max() < bound
    transposed = linear_transposed(x, weight.T)
    assert transposed.dtype == x.dtype and transposed.shape == (*lead, 40)
    assert np.abs(np.asarray(transposed, np.float64) + 1 - want).max() < bound


@pytest.mark.parametrize(
    ("rows", "inner", "columns", "parts"),
    [
        (64, 8192, 4096, 8),  # out_proj of the 7B hybrid
        (64, 4096, 18560, 2),  # its in_proj
        (256, 4096, 18560, 1),  # enough rows
        (4096, 8192, 4096, 1),
        (64, 16384, 512, 64),
        (64, 1024, 512, 4),  # no fewer than 192 elements each
        (64, 382, 512, 1),
        (64, 387, 512, 1),
        (1, 8192, 4096, 1),  # a lone row is not split
    ],
)
def test_products_are_split_where_their_programs_do_not_fill_a_gpu(rows, inner, columns, parts):
    assert num_parts(rows, inner, columns, H200.num_sms) == parts


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parts_are_float32_and_sum_to_the_product(dtype):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((2, 3, 1024)), dtype)
    weight = jnp.asarray(rng.standard_normal((1024, 40)), dtype)
    parts = linear_in_parts(x, weight)
    assert parts.shape == (4, 2, 3, 40) and parts.dtype == jnp.float32
    want = np.asarray(x, np.float64) @ np.asarray(weight, np.float64)
    assert np.abs(np.asarray(parts, np.float64).sum(0) - want).max() < 1e-6 * np.abs(want).max()
    assert np.abs(np.asarray(parts[1:], np.float64).sum(0) - want).max() > 0.1


def test_a_lone_row_on_kernels_comes_in_parts_where_they_can_be_summed():
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((1, 1, 1024)), rng.standard_normal((1024, 40))
    x, weight = jnp.asarray(x, jnp.bfloat16), jnp.asarray(weight, jnp.bfloat16)
    want = np.asarray(x, np.float64) @ np.asarray(weight, np.float64)
    parts = linear_in_parts(x, weight)
    assert parts.shape == (4, 1, 1, 40) and parts.dtype == jnp.float32
    assert np.abs(np.asarray(parts, np.float64).sum(0) - want).max() < 1e-6 * np.abs(want).max()
    whole = linear_on_kernels(x, weight)
    assert whole.shape == (1, 1, 40) and whole.dtype == jnp.bfloat16
    np.testing.assert_array_equal(whole, parts.sum(0).astype(jnp.bfloat16))
    bias = jnp.ones(40, x.dtype)
    np.testing.assert_array_equal(linear_in_parts(x, weight, bias), whole + bias)


def test_a_backend_gives_parts_where_they_are_asked_for():
    x, weight = jnp.ones((2, 1, 1024), jnp.bfloat16), jnp.ones((1024, 40), jnp.bfloat16)
    matrix = Matrix(weight, backend=PALLAS)
    parts, whole = product(x, matrix, out="parts"), product(x, matrix)
    assert parts.shape == (4, 2, 1, 40) and parts.dtype == jnp.float32
    assert whole.shape == (2, 1, 40) and whole.dtype == jnp.bfloat16
    assert product(x, Matrix(weight), out="parts").shape == whole.shape  # XLA has no parts


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_product_in_float32_rounds_no_sum(rows, dtype):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((rows, 1024)), dtype)
    weight = jnp.asarray(rng.standard_normal((1024, 40)), dtype)
    want = np.asarray(x, np.float64) @ np.asarray(weight, np.float64)
    on_xla = jax.jit(product_in_float32)(x, weight)
    on_kernels = jax.jit(lambda x, w: product_in_float32(x, Matrix(w, backend=PALLAS)))(x, weight)
    for got in (on_xla, on_kernels):
        assert got.dtype == jnp.float32 and got.shape == want.shape
        assert np.abs(np.asarray(got, np.float64) - want).max() < 1e-6 * np.abs(want).max()
    if rows > 1:
        np.testing.assert_array_equal(on_kernels, on_xla)
    else:
        np.testing.assert_array_equal(on_kernels, linear_in_parts(x, weight).sum(0))


def test_a_product_with_bias_stays_whole():
    x, weight = jnp.ones((2, 1, 1024), jnp.bfloat16), jnp.ones((1024, 40), jnp.bfloat16)
    y = linear_in_parts(x, weight, jnp.ones(40, x.dtype))
    assert y.ndim == 3 and y.dtype == jnp.bfloat16


@pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="XLA of jax 0.10 widens the weights of every product"
)
@pytest.mark.parametrize("rows", [1, 4])
def test_bfloat16_weights_are_not_widened(rows):
    x, weight = jnp.ones((rows, 512), jnp.bfloat16), jnp.ones((512, 2048), jnp.bfloat16)
    text = jax.jit(linear).lower(x, weight).compile().as_text()
    assert "f32[512,2048]" not in text
    text = jax.jit(linear_transposed).lower(x, weight.T).compile().as_text()
    assert "f32[512,2048]" not in text and "f32[2048,512]" not in text


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_transposed_weight_is_not_copied(dtype):
    if dtype == "bfloat16" and jax.__version_info__ < (0, 11):
        pytest.skip("XLA of jax 0.10 widens the weights of every product")
    x, weight = jnp.ones((1, 512), dtype), jnp.ones((2048, 512), dtype)
    step = jax.jit(lambda x, w: jax.lax.fori_loop(0, 3, lambda i, x: _next(x, w), x))
    memory = step.lower(x, weight).compile().memory_analysis()
    assert memory.temp_size_in_bytes < weight.nbytes / 4


def _next(x, weight):
    return x + linear_transposed(x, weight)[:, :512]
