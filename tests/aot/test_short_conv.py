"""Gated short convolutions compiled for an H200 at a width of 2,048: one launch each, nothing copied."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.short_conv import (
    ShortTail,
    ShortWindow,
    short_conv,
    short_conv_window,
    store_short_tail,
)
from tests.aot.chip import compile_for_gpu
from tests.aot.kernels import assert_one_launch

ROWS, LAYERS, CHANNELS, TAPS = 64, 3, 2048, 3
spec = jax.ShapeDtypeStruct
bf16, f32, int32, uint16, uint32 = map(
    jnp.dtype, ("bfloat16", "float32", "int32", "uint16", "uint32")
)


@pytest.mark.parametrize("dtype", [bf16, f32], ids=str)
@pytest.mark.parametrize(("rows", "tokens"), [(1, 8192), (4, 1000)])
def test_a_chunk(rows, tokens, dtype):
    compiled = compile_for_gpu(
        lambda BCx, history, weight, lengths: short_conv(BCx, history, weight, None, lengths),
        spec((rows, tokens, 3 * CHANNELS), dtype),
        spec((rows, TAPS - 1, CHANNELS), dtype),
        spec((TAPS, CHANNELS), dtype),
        spec((rows,), int32),
    )
    assert_one_launch(compiled, "short_conv")


@pytest.mark.parametrize(
    ("tokens", "tree", "parts"),
    [
        *((1, False, 0), (1, False, 2), (1, False, 8), (5, False, 0), (5, True, 2)),
        *((16, False, 0), (32, False, 0), (32, False, 2)),
    ],
)
def test_a_window_in_place(tokens, tree, parts):
    shape = (ROWS, tokens, 3 * CHANNELS)
    ring = spec((LAYERS, ROWS + 1, TAPS - 1 + tokens, CHANNELS), uint16)

    def window(projected, weight, conv, first, num_valid, ancestors):
        tree_of = ancestors if tree else None
        arrays = ShortWindow(projected, weight, None, conv, first, num_valid, tree_of)
        return short_conv_window(arrays, layer=1)

    compiled = compile_for_gpu(
        window,
        spec((parts, *shape), f32) if parts else spec(shape, bf16),
        spec((TAPS, CHANNELS), bf16),
        ring,
        *[spec((ROWS,), int32)] * 2,
        spec((ROWS, tokens), int32),
        donate=(2,),
    )
    assert_one_launch(compiled, "short_conv_window")
    assert compiled.alias_bytes >= 2 * ring.size


def test_a_tail_in_place():
    arena = spec((512, 65536), uint32)
    ring = spec((LAYERS, ROWS + 1, TAPS, CHANNELS), uint16)

    def tail(arena, conv, *others):
        return store_short_tail(ShortTail(arena, conv, *others), layer=1)

    compiled = compile_for_gpu(
        tail,
        *(arena, ring),
        spec((2, 4096, 3 * CHANNELS), bf16),
        spec((2, TAPS - 1, CHANNELS), uint16),
        spec((2, 1), int32),
        *[spec((2,), int32)] * 3,
        donate=(0, 1),
    )
    assert_one_launch(compiled, "store_short_tail")
    assert compiled.alias_bytes >= 4 * arena.size + 2 * ring.size
