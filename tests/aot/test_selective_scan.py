"""Selective scans compiled for an H200 at the sizes of Jamba mini: one launch each, nothing copied, nothing spilled."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.selective_scan import (
    SelectiveChunk,
    SelectiveWindow,
    selective_chunk,
    selective_window,
)
from tests.aot.chip import compile_for_gpu
from tests.aot.kernels import assert_one_launch

ROWS, LAYERS, CHANNELS, SIZE = 64, 3, 8192, 16
spec = jax.ShapeDtypeStruct
bf16, f32, int32, uint32 = map(jnp.dtype, ("bfloat16", "float32", "int32", "uint32"))
ARENA = spec((20_000, 65_536), uint32)
WEIGHTS = (spec((CHANNELS, SIZE), f32), spec((CHANNELS,), f32), spec((CHANNELS,), f32))


def tokens_of(rows: int, tokens: int, dtype: jnp.dtype) -> tuple:
    """x, dt, B and C of a layer's tokens."""
    wide = spec((rows, tokens, CHANNELS), dtype)
    return wide, wide, spec((rows, tokens, 2 * SIZE), dtype)


@pytest.mark.parametrize("dtype", [bf16, f32], ids=str)
@pytest.mark.parametrize(("rows", "tokens"), [(1, 8192), (4, 1000)])
def test_a_chunk_in_place(rows, tokens, dtype):
    ring, numbers = spec((LAYERS, ROWS + 1, 1, CHANNELS * SIZE), f32), spec((rows,), int32)
    compiled = compile_for_gpu(
        lambda *given: selective_chunk(SelectiveChunk(*given), layer=1, first_frame=2),
        *tokens_of(rows, tokens, dtype),
        spec((rows, tokens, 2 * CHANNELS), dtype),
        *WEIGHTS,
        *(ARENA, spec((rows, 9), int32), spec((rows, 9), int32), numbers),
        *(ring, *[numbers] * 4),
        donate=(7, 11),
    )
    assert_one_launch(compiled, "selective_scan")
    assert compiled.alias_bytes >= 4 * (ARENA.size + ring.size)


@pytest.mark.parametrize(
    ("tokens", "keeps", "tree", "parts"),
    [
        *((1, False, False, 0), (1, False, False, 2), (5, True, False, 0), (5, True, True, 2)),
        *((32, False, False, 0), (32, False, False, 2)),
    ],
)
def test_a_window_in_place(tokens, keeps, tree, parts):
    shape, numbers = (ROWS, tokens, 2 * CHANNELS), spec((ROWS,), int32)
    ring = spec((LAYERS, ROWS + 1, tokens + 1 if keeps else 1, CHANNELS * SIZE), f32)

    def window(*given):
        arrays = SelectiveWindow(*given)
        arrays = arrays._replace(
            loads=arrays.loads if tokens == 32 else None,
            ancestors=arrays.ancestors if tree else None,
        )
        return selective_window(arrays, layer=1, first_frame=2, keeps=keeps)

    compiled = compile_for_gpu(
        window,
        *tokens_of(ROWS, tokens, bf16),
        spec((parts, *shape), f32) if parts else spec(shape, bf16),
        *WEIGHTS,
        *(ring, ARENA, spec((ROWS, 9), int32), *[numbers] * 5),
        spec((ROWS, tokens), int32),
        donate=(7,),
    )
    assert_one_launch(compiled, "selective_window")
    assert compiled.alias_bytes >= 4 * ring.size
