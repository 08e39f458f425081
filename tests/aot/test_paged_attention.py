"""Paged attention compiled for an H200: no spills, shared memory within the chip's, and how many launches."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.append_kv import AppendArrays, AppendOptions, append_kv
from pallas_kernels.paged_attention import (
    AttentionArrays,
    AttentionOptions,
    PageLayout,
    paged_attention,
)
from pallas_kernels.paged_attention.layout import FP8
from tests.aot.chip import H200, OTHER_CHIPS, SHARED_MEMORY, Compiled, chip_of, compile_for_gpu
from tests.aot.kernels import assert_only
from tests.kernels.cases import append_kv as appends

FRAMES = 2048


def spec(*shape: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def compiled_for(
    *,
    rows: int,
    tokens: int,
    keys: int,
    dtype: str = "bfloat16",
    page_tokens: int = 64,
    heads: int = 32,
    kv_heads: int = 8,
    head_dim: int = 128,
    frames: int = FRAMES,
    tree: bool = False,
    chip: str = H200,
    **options,
) -> Compiled:
    layout = PageLayout(
        offset=0,
        page_tokens=page_tokens,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=dtype,
    )
    float_type = "float32" if dtype == "float32" else "bfloat16"

    def attend(*arrays):
        static = AttentionOptions(layout, scale=0.1, dtype=arrays[0].dtype, **options)
        return paged_attention(AttentionArrays(*arrays), options=static, chip=chip_of(chip))

    return compile_for_gpu(
        attend,
        spec(rows, tokens, heads, head_dim, dtype=float_type),
        spec(frames, layout.page_words, dtype="uint32"),
        spec(rows, keys // page_tokens, dtype="int32"),
        spec(rows, dtype="int32"),
        spec(rows, dtype="int32"),
        spec(rows, tokens, dtype="int32") if tree else None,
        chip=chip,
    )


def assert_launches(compiled: Compiled, *names: str) -> None:
    """The program is one launch of each of these kernels, and nothing else."""
    assert set(compiled.kinds) == {"kCustomKernel"}
    assert [launch.name for launch in compiled.launches] == list(names)
    assert all(launch.shared_bytes <= SHARED_MEMORY for launch in compiled.launches)


def part_bytes(compiled: Compiled, rows: int, tokens: int, heads: int, head_dim: int) -> int:
    """Memory of the splits' parts, peaks and totals."""
    splits = compiled.launches[0].grid[0]
    return 4 * splits * rows * tokens * heads * (head_dim + 2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", FP8])
@pytest.mark.parametrize("tokens", [1, 5, 16])
def test_decode_and_verify(dtype, tokens):
    compiled = compiled_for(rows=64, tokens=tokens, keys=8192, dtype=dtype)
    if dtype == "float32" and tokens == 16:  # two blocks of 32 queries instead of two splits
        assert_launches(compiled, "paged_attention")
    else:
        assert_launches(compiled, "paged_attention", "paged_attention_join")
    assert compiled.launches[0].grid == (2, 64, 8)
    assert compiled.temp_bytes < 1.01 * part_bytes(compiled, 64, tokens, 32, 128) + 4096


@pytest.mark.parametrize(
    "shape",
    [
        {"page_tokens": 16},
        {"tree": True},
        {"tree": True, "sliding_window": 1000, "soft_cap": 30.0},
        {"sliding_window": 1000},
        {"head_dim": 64, "heads": 28, "kv_heads": 4},
        {"head_dim": 80, "heads": 8, "kv_heads": 8},
        {"head_dim": 256, "heads": 16, "kv_heads": 8},
        {"head_dim": 256, "dtype": "float32"},
    ],
    ids=lambda shape: "-".join(f"{name}_{value}" for name, value in shape.items()),
)
def test_verify_in_other_shapes(shape):
    compiled = compiled_for(rows=64, tokens=5, keys=8192, **shape)
    assert_launches(compiled, "paged_attention", "paged_attention_join")


def test_one_row_is_split_over_the_chip():
    compiled = compiled_for(rows=1, tokens=1, keys=32768)
    assert_launches(compiled, "paged_attention", "paged_attention_join")
    assert compiled.launches[0].grid == (128, 1, 8)


def test_rows_that_fill_the_chip_are_not_split():
    compiled = compiled_for(rows=256, tokens=1, keys=8192)
    assert_launches(compiled, "paged_attention")
    assert compiled.launches[0].grid == (1, 256, 8)


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"page_tokens": 16},
        {"dtype": "float32"},
        {"sliding_window": 4096, "soft_cap": 30.0},
        {"head_dim": 256},
        {"head_dim": 64, "heads": 28, "kv_heads": 4},
        {"dtype": FP8},
    ],
    ids=lambda shape: "-".join(f"{name}_{value}" for name, value in shape.items()) or "plain",
)
def test_prefill_is_one_launch_without_memory_of_its_own(shape):
    compiled = compiled_for(rows=1, tokens=2048, keys=32768, **shape)
    assert_launches(compiled, "paged_attention")
    assert compiled.temp_bytes < 4096


@pytest.mark.parametrize("window", [None, 4096])
@pytest.mark.parametrize("chip", OTHER_CHIPS)
def test_prefill_fits_every_chip_without_spills(chip, window):
    compiled = compiled_for(rows=1, tokens=2048, keys=32768, sliding_window=window, chip=chip)
    (launch,) = compiled.launches
    assert launch.shared_bytes <= chip_of(chip).shared_bytes


def test_memory_does_not_grow_with_the_arena():
    temp = [compiled_for(rows=8, tokens=1, keys=8192, frames=n).temp_bytes for n in (2048, 65536)]
    assert temp[0] == temp[1]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", FP8])
@pytest.mark.parametrize(
    "case", [case for case in appends.CASES if case.large], ids=lambda case: case.name
)
def test_new_tokens_are_written_in_one_launch(case, dtype):
    inputs = jax.eval_shape(lambda: appends.make_places(case))
    float_type = "bfloat16" if dtype == FP8 else dtype
    inputs |= appends.shapes_of(case, float_type)
    sizes = {"eps": 1e-6, "dtype": float_type, "num_heads": case.heads}
    options = AppendOptions(case.layout(dtype), **sizes)
    arena = inputs.pop("arena")

    def append(arena, inputs):
        return append_kv(AppendArrays(arena=arena, **inputs), options=options)

    compiled = compile_for_gpu(append, arena, inputs, donate=(0,))
    assert_only(compiled, "append_kv")
    assert compiled.alias_bytes >= 4 * arena.size and compiled.temp_bytes < 1024
