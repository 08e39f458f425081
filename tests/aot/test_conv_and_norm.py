"""Convolution, norms and split products compiled for an H200 at the shapes of real models: one launch each, nothing
copied."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

from hybrid_jax.config import PALLAS
from hybrid_jax.products import kernels
from hybrid_jax.products.xla import linear
from pallas_kernels import (
    ConvWindow,
    causal_conv,
    causal_conv_window,
    gated_rmsnorm,
    residual_rmsnorm,
)
from pallas_kernels.causal_conv import ProjectionLayout
from tests.aot.chip import SHARED_MEMORY, compile_for_gpu
from tests.aot.kernels import assert_one_launch
from tests.kernels.cases.causal_conv import GRANITE_4_H_TINY, NEMOTRON_H_8B, QWEN3_NEXT

MODELS = pytest.mark.parametrize("layout", [NEMOTRON_H_8B, GRANITE_4_H_TINY], ids=["G8", "G1"])
ROWS, LAYERS, GRAIN = 64, 3, 32
linear_in_parts = functools.partial(kernels.linear_in_parts, backend=PALLAS)
spec = jax.ShapeDtypeStruct
bf16, f32, int32, uint16 = map(jnp.dtype, ("bfloat16", "float32", "int32", "uint16"))


def weights(layout: ProjectionLayout, dtype: jnp.dtype = bf16) -> tuple:
    channels = layout.conv_size
    return (
        spec((layout.conv_width, channels), dtype),
        spec((channels,), dtype),
        spec((layout.num_heads,), f32),
    )


def projection(
    parts: int, tokens: int, layout: ProjectionLayout, dtype: jnp.dtype = bf16
) -> jax.ShapeDtypeStruct:
    """What in_proj gives, whole or in parts."""
    shape = (ROWS, tokens, layout.projected_size)
    return spec((parts, *shape), f32) if parts else spec(shape, dtype)


@MODELS
@pytest.mark.parametrize(("rows", "tokens"), [(1, 512), (4, 1000)])
def test_convolution_of_a_chunk(layout, rows, tokens):
    compiled = compile_for_gpu(
        functools.partial(causal_conv, layout=layout),
        spec((rows, tokens, layout.projected_size), bf16),
        spec((rows, layout.history, layout.conv_size), bf16),
        *weights(layout),
        spec((rows,), int32),
    )
    assert_one_launch(compiled, "causal_conv")


def window_of(
    layout: ProjectionLayout, tokens: int, tree: bool, parts: int, dtype: jnp.dtype = bf16
) -> tuple:
    """A call of `causal_conv_window`, whose rings, at places 4 to 6, are donated, and the shapes of its arguments."""
    aligned = tokens == GRAIN  # such windows stand on the grain
    slots = GRAIN if aligned else GRAIN + tokens - 1
    bits = {2: uint16, 4: jnp.dtype("uint32")}[dtype.itemsize]
    rings = (
        spec((LAYERS, ROWS + 1, layout.history + tokens, layout.conv_size), bits),
        spec((LAYERS, ROWS + 1, slots, layout.record_size), bits),
        spec((LAYERS, ROWS + 1, slots, layout.num_heads), f32),
    )

    def window(projected, weight, bias, dt_bias, conv, xB, dt, starts, first, num_valid, ancestors):
        arrays = ConvWindow(
            projected=projected,
            weight=weight,
            bias=bias,
            dt_bias=dt_bias,
            xB=xB,
            dt=dt,
            conv=conv,
            starts=starts,
            first=first,
            num_valid=num_valid,
            ancestors=ancestors if tree else None,
        )
        return causal_conv_window(arrays, layer=1, layout=layout)

    return (
        *(window, projection(parts, tokens, layout, dtype), *weights(layout, dtype), *rings),
        *(*[spec((ROWS,), int32)] * 3, spec((ROWS, tokens), int32)),
    )


def assert_in_place(function: Callable, *specs: jax.ShapeDtypeStruct) -> None:
    compiled = compile_for_gpu(function, *specs, donate=(4, 5, 6))
    assert_one_launch(compiled, "causal_conv_window")
    assert compiled.alias_bytes >= sum(ring.size * ring.dtype.itemsize for ring in specs[4:7])


@MODELS
@pytest.mark.parametrize(
    ("tokens", "tree", "parts"),
    [
        *((1, False, 0), (3, False, 0), (5, False, 0), (5, True, 0), (16, False, 0)),
        *((32, False, 0), (1, False, 2), (1, False, 4), (2, False, 2), (5, True, 2)),
        (32, False, 2),
    ],
)
def test_convolution_of_a_window_in_place(layout, tokens, tree, parts):
    assert_in_place(*window_of(layout, tokens, tree, parts))


@pytest.mark.parametrize("dtype", [bf16, f32], ids=str)
@pytest.mark.parametrize(
    ("tokens", "tree", "parts"),
    [
        *((1, False, 0), (1, False, 4), (2, False, 0), (3, False, 0), (5, False, 2)),
        *((5, True, 0), (5, True, 2), (16, True, 0), (32, False, 0), (32, False, 2)),
    ],
)
def test_convolution_of_a_window_of_the_delta_rule_in_place(tokens, tree, parts, dtype):
    assert_in_place(*window_of(QWEN3_NEXT, tokens, tree, parts, dtype))


@pytest.mark.parametrize("dtype", [bf16, f32], ids=str)
@pytest.mark.parametrize("parts", [0, 2])
@pytest.mark.parametrize(
    ("layout", "groups"), [(NEMOTRON_H_8B, 8), (NEMOTRON_H_8B, 1), (GRANITE_4_H_TINY, 1)]
)
def test_gated_norm_reads_its_gate_where_it_lies(layout, groups, parts, dtype):
    compiled = compile_for_gpu(
        functools.partial(gated_rmsnorm, eps=1e-5, groups=groups),
        spec((ROWS, 1, layout.inner_size), dtype),
        projection(parts, 1, layout),
        spec((layout.inner_size,), bf16),
    )
    assert_one_launch(compiled, "gated_rmsnorm")


def test_gated_norm_of_the_largest_block():
    size = 32 * 1024
    norm = functools.partial(gated_rmsnorm, eps=1e-5)
    compiled = compile_for_gpu(norm, *[spec((ROWS, size), bf16)] * 2, spec((size,), bf16))
    assert_one_launch(compiled, "gated_rmsnorm")


@pytest.mark.parametrize(
    ("tokens", "size", "parts", "h_dtype"),
    [
        *((64, 4096, 8, bf16), (64, 4096, 8, f32), (64, 4096, 0, bf16), (4096, 4096, 0, f32)),
        *((64, 1536, 8, bf16), (8, 2688, 16, bf16), (64, 8192, 8, f32), (64, 16384, 4, bf16)),
    ],
)
def test_residual_sum_and_norm(tokens, size, parts, h_dtype):
    shape = (tokens, size)

    def norm(h, update, weight, valid):
        return residual_rmsnorm(h, update, weight, eps=1e-5, multiplier=0.22, valid=valid)

    compiled = compile_for_gpu(
        norm,
        spec(shape, h_dtype),
        spec((parts, *shape), f32) if parts else spec(shape, bf16),
        *(spec((size,), bf16), spec((tokens,), jnp.dtype("bool"))),
    )
    # The flags become integers before it, once for all layers of a step.
    _, launch = compiled.launches
    assert compiled.named("residual_rmsnorm") == [launch]
    assert launch.shared_bytes <= SHARED_MEMORY and compiled.temp_bytes <= 4 * tokens + 1024


@pytest.mark.parametrize(
    ("rows", "inner", "columns"),
    [
        *((2, 8192, 4096), (64, 8192, 4096), (256, 8192, 4096), (64, 16384, 4096)),
        *((64, 4096, 18560), (64, 1536, 1536)),
    ],
)
def test_a_product_in_parts_is_one_launch_where_xla_would_make_two(rows, inner, columns):
    specs = spec((rows, 1, inner), bf16), spec((inner, columns), bf16)
    assert len(compile_for_gpu(linear, *specs).launches) == 2
    compiled = compile_for_gpu(linear_in_parts, *specs)
    assert len(compiled.launches) == 1 and compiled.temp_bytes == 0


def test_a_lone_row_reads_the_matrix_as_it_lies():
    specs = spec((1, 1, 8192), bf16), spec((8192, 4096), bf16)
    assert compile_for_gpu(linear_in_parts, *specs).temp_bytes <= 2**21
