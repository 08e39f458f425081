"""Convolution and gated norm compiled for an H200 at the shapes of real models: one launch each, nothing copied."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import causal_conv, causal_conv_window, gated_rmsnorm
from pallas_kernels.causal_conv import Sizes
from pallas_kernels.causal_conv.cases import GRANITE_4_H_TINY, NEMOTRON_H_8B
from tests.aot.h200 import SHARED_MEMORY, Compiled, compile_for_h200

MODELS = pytest.mark.parametrize("sizes", [NEMOTRON_H_8B, GRANITE_4_H_TINY], ids=["G8", "G1"])
ROWS, LAYERS, GRAIN = 64, 3, 32
spec = jax.ShapeDtypeStruct
bf16, f32, int32, uint16 = map(jnp.dtype, ("bfloat16", "float32", "int32", "uint16"))


def assert_one_launch(compiled: Compiled, kernel: str) -> None:
    (launch,) = compiled.launches
    assert compiled.named(kernel) == [launch] and launch.kind == "kCustomKernel"
    assert launch.shared_bytes <= SHARED_MEMORY and compiled.temp_bytes < 1024


def weights(sizes: Sizes) -> tuple:
    channels = sizes.conv_size
    return (
        spec((sizes.conv_width, channels), bf16),
        spec((channels,), bf16),
        spec((sizes.num_heads,), f32),
    )


@MODELS
@pytest.mark.parametrize(("rows", "tokens"), [(1, 512), (4, 1000)])
def test_convolution_of_a_chunk(sizes, rows, tokens):
    compiled = compile_for_h200(
        functools.partial(causal_conv, sizes=sizes),
        spec((rows, tokens, sizes.projected_size), bf16),
        spec((rows, sizes.history, sizes.conv_size), bf16),
        *weights(sizes),
        spec((rows,), int32),
    )
    assert_one_launch(compiled, "causal_conv")


@MODELS
@pytest.mark.parametrize(
    ("tokens", "tree"), [(1, False), (3, False), (5, False), (5, True), (16, False), (32, False)]
)
def test_convolution_of_a_window_in_place(sizes, tokens, tree):
    aligned = tokens == GRAIN  # such windows stand on the grain
    slots = GRAIN if aligned else GRAIN + tokens - 1
    rings = (
        spec((LAYERS, ROWS + 1, sizes.history + tokens, sizes.conv_size), uint16),
        spec((LAYERS, ROWS + 1, slots, sizes.record_size), uint16),
        spec((LAYERS, ROWS + 1, slots, sizes.num_heads), f32),
    )

    def window(projected, weight, bias, dt_bias, conv, xB, dt, starts, first, num_valid, ancestors):
        return causal_conv_window(
            *(projected, weight, bias, dt_bias, conv, xB, dt),
            layer=1,
            sizes=sizes,
            starts=starts,
            first=first,
            num_valid=num_valid,
            ancestors=ancestors if tree else None,
        )

    compiled = compile_for_h200(
        window,
        spec((ROWS, tokens, sizes.projected_size), bf16),
        *weights(sizes),
        *rings,
        *[spec((ROWS,), int32)] * 3,
        spec((ROWS, tokens), int32),
        donate=(4, 5, 6),
    )
    assert_one_launch(compiled, "causal_conv_window")
    assert compiled.alias_bytes >= sum(ring.size * ring.dtype.itemsize for ring in rings)


@pytest.mark.parametrize("dtype", [bf16, f32], ids=str)
@pytest.mark.parametrize(
    ("sizes", "groups"), [(NEMOTRON_H_8B, 8), (NEMOTRON_H_8B, 1), (GRANITE_4_H_TINY, 1)]
)
def test_gated_norm_reads_its_gate_where_it_lies(sizes, groups, dtype):
    compiled = compile_for_h200(
        functools.partial(gated_rmsnorm, eps=1e-5, groups=groups),
        spec((ROWS, 1, sizes.inner_size), dtype),
        spec((ROWS, 1, sizes.projected_size), bf16),
        spec((sizes.inner_size,), bf16),
    )
    assert_one_launch(compiled, "gated_rmsnorm")


def test_gated_norm_of_the_largest_block():
    size = 32 * 1024
    norm = functools.partial(gated_rmsnorm, eps=1e-5)
    compiled = compile_for_h200(norm, *[spec((ROWS, size), bf16)] * 2, spec((size,), bf16))
    assert_one_launch(compiled, "gated_rmsnorm")
