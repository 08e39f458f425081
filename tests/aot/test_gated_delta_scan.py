"""The scan of gated delta nets compiled for an H200: two launches, no spills, in place, products on tensor cores."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import pytest

from pallas_kernels.gated_delta import DeltaScanFrames, gated_delta_scan_frames
from pallas_kernels.records import RecordSizes
from tests.aot import sass
from tests.aot.chip import H200, OTHER_CHIPS, SHARED_MEMORY, chip_of, compile_for_gpu
from tests.aot.kernels import arena_of, needs_disassembler, spec

QWEN3_NEXT = RecordSizes(num_heads=32, head_dim=128, num_groups=16, state_size=128)
SMALL_STATES = RecordSizes(num_heads=16, head_dim=64, num_groups=16, state_size=64)
PER_LAYER, FRAMES = 16, 256
INT = functools.partial(spec, dtype="int32")


def scan_of(
    records: RecordSizes,
    rows: int,
    tokens: int,
    dtype: str,
    frames: int = FRAMES,
    chip: str = H200,
):
    """A call whose first argument is donated, and the shapes of its arguments."""

    def scan(arena, read, write, exists, vkq, dt, A, projected, lengths, state_lengths):
        arrays = (vkq, dt, A, projected, arena, read, write, exists, lengths, state_lengths)
        given = DeltaScanFrames(*arrays)
        return gated_delta_scan_frames(given, records=records, chip=chip_of(chip))

    heads = records.num_heads
    return (
        *(scan, arena_of(records, frames), INT(rows, PER_LAYER), INT(rows, PER_LAYER), INT(rows)),
        *(spec(rows, tokens, records.conv_size, dtype=dtype), spec(rows, tokens, heads)),
        spec(heads),
        spec(rows, tokens, records.inner_size + records.conv_size + 2 * heads, dtype=dtype),
        *(INT(rows), INT(rows)),
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("records", "rows", "tokens"),
    [(QWEN3_NEXT, 1, 8192), (QWEN3_NEXT, 2, 2048), (SMALL_STATES, 1, 512)],
    ids=["one row", "two rows", "small states"],
)
def test_two_launches_in_place(records, rows, tokens, dtype):
    small, large = (
        compile_for_gpu(*scan_of(records, rows, tokens, dtype, frames), donate=(0,))
        for frames in (FRAMES, 8 * FRAMES)
    )
    assert set(large.kinds) == {"kCustomKernel"} and len(large.launches) == 2
    assert all(large.named(name) for name in ("gated_delta_solve", "gated_delta_scan"))
    assert max(launch.shared_bytes for launch in large.launches) <= SHARED_MEMORY
    assert large.alias_bytes >= 4 * arena_of(records, 8 * FRAMES).size
    assert large.temp_bytes == small.temp_bytes
    # The triangles' inverses, the weights, and factors; records are a result.
    size, tile = jnp.dtype(dtype).itemsize, 64 if dtype == "bfloat16" else 16
    per_token = records.num_heads * (2 * size * tile + 3 * 4)
    assert large.temp_bytes < 1.01 * rows * tokens * per_token


@pytest.mark.parametrize("chip", OTHER_CHIPS)
def test_the_scan_fits_every_chip_without_spills(chip):
    program = scan_of(QWEN3_NEXT, 1, 8192, "bfloat16", chip=chip)
    compiled = compile_for_gpu(*program, donate=(0,), chip=chip)
    assert max(launch.shared_bytes for launch in compiled.launches) <= chip_of(chip).shared_bytes


@needs_disassembler
def test_a_tile_takes_few_instructions_and_tensor_cores():
    codes = sass.of_program(*scan_of(QWEN3_NEXT, 1, 8192, "bfloat16"), donate=(0,))
    solve, scan = sorted(codes, key=lambda code: code.name, reverse=True)
    assert solve.products == {"m64n64k16"} and scan.products == {"m64n32k16"}
    assert solve.instructions <= 3_500 and scan.instructions <= 1_800
    # 16 products of 64 x 64 x 16 for keys with keys and with queries, and 40 for the inverse.
    assert solve.opcodes["HGMMA"] == 16 + 40
