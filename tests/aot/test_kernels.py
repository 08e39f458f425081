"""Every kernel compiled for an H200 at the shapes of real models: no spills, shared memory within the chip's."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from pallas_kernels.frame_io import copy_frames, move_words, read_frames
from pallas_kernels.gated_delta import DeltaRings, gated_delta_window_rings
from pallas_kernels.records import RecordSizes
from pallas_kernels.ssd_scan import ScanFrames, ssd_scan_frames
from pallas_kernels.ssd_window import (
    FoldFrames,
    WindowRings,
    WindowScores,
    fold_frames,
    ssd_window_rings,
    ssd_window_scores,
)
from tests.aot import sass
from tests.aot.chip import H200, OTHER_CHIPS, SHARED_MEMORY, chip_of, compile_for_gpu
from tests.aot.kernels import (
    FRAMES,
    GRANITE_4_H_SMALL,
    GRANITE_4_H_TINY,
    LAYERS,
    NEMOTRON_H_8B,
    PER_LAYER,
    REGISTERS,
    ROWS,
    SLOTS,
    arena_of,
    assert_only,
    needs_disassembler,
    spec,
)
from tests.drawing import left_to_all

QWEN3_NEXT = RecordSizes(num_heads=32, head_dim=128, num_groups=16, state_size=128)  # and 3.5
FALCON_H1_3B = RecordSizes(num_heads=32, head_dim=128, num_groups=1, state_size=256)
FALCON_H1_34B = RecordSizes(num_heads=32, head_dim=320, num_groups=2, state_size=256)
OTHER_STATES = [
    FALCON_H1_34B,
    RecordSizes(num_heads=32, head_dim=64, num_groups=1, state_size=256),
    RecordSizes(num_heads=32, head_dim=128, num_groups=1, state_size=128),
    RecordSizes(num_heads=32, head_dim=64, num_groups=1, state_size=64),
]


def window_of(records: RecordSizes, tokens: int) -> tuple:
    """A call of `ssd_window_rings` and the shapes of its arguments."""
    slots = 32 + tokens - 1

    def window(arena, frames, exists, xB, dt, A, C, D, starts, num_valid, scores):
        arrays = (C, xB, dt, A, D, scores, arena, frames, exists, starts, num_valid)
        return ssd_window_rings(
            WindowRings(*arrays),
            layer=1,
            first_frame=PER_LAYER,
            records=records,
            dtype=jnp.bfloat16,
        )

    return (
        window,
        arena_of(records),
        spec(ROWS, LAYERS * PER_LAYER, dtype="int32"),
        spec(ROWS, dtype="int32"),
        spec(LAYERS, ROWS + 1, slots, records.record_size, dtype="uint16"),
        spec(LAYERS, ROWS + 1, slots, records.num_heads),
        spec(LAYERS, records.num_heads),
        spec(ROWS, tokens, records.num_groups * records.state_size, dtype="bfloat16"),
        spec(records.num_heads),
        spec(ROWS, dtype="int32"),
        spec(ROWS, dtype="int32"),
        spec(ROWS, tokens, records.num_groups, slots),
    )


def scores_of(records: RecordSizes, tokens: int, bits: str) -> tuple:
    """A call of `ssd_window_scores` and the shapes of its arguments."""

    def scores(C, xB, starts, num_valid):
        arrays = WindowScores(C, xB, starts, num_valid)
        return ssd_window_scores(arrays, layer=1, records=records)

    dtype = "bfloat16" if bits == "uint16" else "float32"
    return (
        scores,
        spec(ROWS, tokens, records.num_groups * records.state_size, dtype=dtype),
        spec(LAYERS, ROWS + 1, 32 + tokens - 1, records.record_size, dtype=bits),
        spec(ROWS, dtype="int32"),
        spec(ROWS, dtype="int32"),
    )


def delta_window_of(tokens: int, bits: str, tree: bool = False) -> tuple:
    """A call of `gated_delta_window_rings`, whose ring is donated, and the shapes of its arguments."""
    records, aligned = QWEN3_NEXT, tokens == SLOTS  # such windows stand on the grain
    slots = SLOTS if aligned else SLOTS + tokens - 1

    def window(uk, q, v, beta, scores, dt, A, arena, frames, exists, starts, known, valid, nodes):
        arrays = (q, v, beta, scores, uk, dt, A, arena, frames, exists, starts, known, valid)
        return gated_delta_window_rings(
            DeltaRings(*arrays, ancestors=nodes if tree else None),
            layer=1,
            first_frame=PER_LAYER,
            records=records,
            dtype={"uint16": jnp.bfloat16, "uint32": jnp.float32}[bits],
        )

    row, dtype = spec(ROWS, dtype="int32"), {"uint16": "bfloat16", "uint32": "float32"}[bits]
    return (
        window,
        spec(LAYERS, ROWS + 1, slots, records.record_size, dtype=bits),
        spec(ROWS, tokens, records.shared_size),
        spec(ROWS, tokens, records.inner_size, dtype=dtype),
        spec(ROWS, tokens, records.num_heads),
        spec(ROWS, 2, tokens, records.num_groups, slots),
        spec(LAYERS, ROWS + 1, slots, records.num_heads),
        spec(LAYERS, records.num_heads),
        arena_of(records),
        spec(ROWS, LAYERS * PER_LAYER, dtype="int32"),
        *(row, row, row, row),
        spec(ROWS, tokens, dtype="int32"),
    )


def fold_of(records: RecordSizes, bits: str = "uint16", scaled: bool = True) -> tuple:
    """A call of `fold_frames`, whose first argument is donated, and the shapes of its arguments."""

    def fold(arena, read, write, exists, lengths, xB, dt, A):
        arrays = FoldFrames(lengths, xB, dt, A, arena, read, write, exists)
        return fold_frames(arrays, records=records, per_layer=PER_LAYER, scaled=scaled)

    frames = spec(ROWS, LAYERS * PER_LAYER + 1, dtype="int32")
    return (
        *(fold, arena_of(records), frames, frames),
        spec(ROWS, dtype="int32"),
        spec(ROWS, dtype="int32"),
        spec(LAYERS, ROWS + 1, SLOTS, records.record_size, dtype=bits),
        spec(LAYERS, ROWS + 1, SLOTS, records.num_heads),
        spec(LAYERS, records.num_heads),
    )


@pytest.mark.parametrize("records", [NEMOTRON_H_8B, GRANITE_4_H_SMALL, *OTHER_STATES], ids=str)
@pytest.mark.parametrize("tokens", [1, 5, 16])
def test_window_over_rings(records, tokens):
    compiled = compile_for_gpu(*window_of(records, tokens))
    assert_only(compiled, "ssd_window")
    assert compiled.temp_bytes < 1024


@pytest.mark.parametrize("bits", ["uint16", "uint32"])
@pytest.mark.parametrize("records", [NEMOTRON_H_8B, *OTHER_STATES], ids=str)
@pytest.mark.parametrize("tokens", [pytest.param(1, marks=left_to_all), 5])
def test_scores_of_a_readout_of_its_own(records, tokens, bits):
    compiled = compile_for_gpu(*scores_of(records, tokens, bits))
    assert_only(compiled, "ssd_window_scores")
    assert compiled.temp_bytes < 1024


@pytest.mark.parametrize("bits", ["uint16", "uint32"])
@pytest.mark.parametrize("records", [NEMOTRON_H_8B, *OTHER_STATES], ids=str)
def test_fold_in_place(records, bits):
    compiled = compile_for_gpu(*fold_of(records, bits), donate=(0,))
    assert_only(compiled, "ssd_fold")
    assert compiled.alias_bytes >= 4 * arena_of(records).size and compiled.temp_bytes < 1024


@pytest.mark.parametrize("bits", ["uint16", "uint32"])
@pytest.mark.parametrize(
    ("tokens", "tree"), [(1, False), (5, False), (5, True), (16, True), (32, False)]
)
def test_window_of_the_delta_rule_in_place(tokens, tree, bits):
    function, ring, *specs = delta_window_of(tokens, bits, tree)
    compiled = compile_for_gpu(function, ring, *specs, donate=(0,))
    assert_only(compiled, "gated_delta_window")
    assert compiled.alias_bytes >= ring.size * ring.dtype.itemsize and compiled.temp_bytes < 1024


@pytest.mark.parametrize("bits", ["uint16", "uint32"])
def test_fold_of_the_delta_rule_in_place(bits):
    compiled = compile_for_gpu(*fold_of(QWEN3_NEXT, bits, scaled=False), donate=(0,))
    assert_only(compiled, "ssd_fold")
    assert compiled.alias_bytes >= 4 * arena_of(QWEN3_NEXT).size and compiled.temp_bytes < 1024


@needs_disassembler
@pytest.mark.parametrize(("tokens", "instructions", "fit"), [(1, 840, 16), (5, 1020, 12)])
def test_a_window_takes_few_instructions(tokens, instructions, fit):
    """A head takes four programs of one warp; one program of 4 warps took 900 instructions and 130 shuffles in each."""
    (code,) = sass.of_program(*window_of(NEMOTRON_H_8B, tokens))
    assert code.instructions <= instructions and code.opcodes["SHFL"] <= 126
    assert -(-code.registers // 8) * 8 * 32 <= REGISTERS // fit


@needs_disassembler
@pytest.mark.parametrize("bits", ["uint16", "uint32"])
def test_a_fold_takes_few_instructions_and_tensor_cores(bits):
    """One record after another took 323 instructions each."""
    (code,) = sass.of_program(*fold_of(NEMOTRON_H_8B, bits), donate=(0,))
    assert code.instructions <= {"uint16": 32, "uint32": 48}[bits] * SLOTS
    assert code.products == {"m64n128k16"}


def scan_of(
    records: RecordSizes, rows: int, dtype: str, frames: int = FRAMES, chip: str = H200
) -> tuple:
    """A call of `ssd_scan_frames`, whose first argument is donated, and the shapes of its arguments."""
    tokens, width = 4096, records.conv_size

    def scan(arena, read, write, exists, xBC, dt, A, D, lengths, state_lengths):
        arrays = (xBC, dt, A, D, arena, read, write, exists, lengths, state_lengths)
        return ssd_scan_frames(ScanFrames(*arrays), records=records, chip=chip_of(chip))

    table, row = spec(rows, PER_LAYER, dtype="int32"), spec(rows, dtype="int32")
    heads = spec(records.num_heads)
    return (
        *(scan, arena_of(records, frames), table, table, row),
        *(spec(rows, tokens, width, dtype=dtype), spec(rows, tokens, records.num_heads)),
        *(heads, heads, row, row),
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("records", "rows", "kernels"),
    [
        (NEMOTRON_H_8B, 4, 1),
        (GRANITE_4_H_SMALL, 1, 1),
        (GRANITE_4_H_TINY, 1, 3),
        (FALCON_H1_3B, 1, 3),
        (FALCON_H1_34B, 4, 1),
    ],
    ids=["G8", "G1", "segments", "large states in segments", "large states"],
)
def test_scan_in_place(records, rows, kernels, dtype):
    small, large = (
        compile_for_gpu(*scan_of(records, rows, dtype, frames), donate=(0,))
        for frames in (FRAMES, 8 * FRAMES)
    )
    assert set(large.kinds) == {"kCustomKernel"} and len(large.launches) == kernels
    assert max(launch.shared_bytes for launch in large.launches) <= SHARED_MEMORY
    assert large.alias_bytes >= 4 * arena_of(records, 8 * FRAMES).size
    assert large.temp_bytes == small.temp_bytes


@pytest.mark.parametrize(
    ("records", "rows"),
    [(NEMOTRON_H_8B, 4), (GRANITE_4_H_TINY, 1), (FALCON_H1_3B, 1), (FALCON_H1_34B, 4)],
    ids=["whole", "segments", "large states in segments", "large states"],
)
@pytest.mark.parametrize("chip", OTHER_CHIPS)
def test_the_scan_fits_every_chip_without_spills(chip, records, rows):
    program = scan_of(records, rows, "bfloat16", chip=chip)
    compiled = compile_for_gpu(*program, donate=(0,), chip=chip)
    assert max(launch.shared_bytes for launch in compiled.launches) <= chip_of(chip).shared_bytes


ARENA, SPAN = spec(FRAMES, 65536, dtype="uint32"), spec(ROWS, dtype="int32")
FRAME_IO = {
    "read_frames": (read_frames, (ARENA, spec(8, 2, dtype="int32"))),
    "copy_frames": (copy_frames, (ARENA, SPAN, SPAN)),
    "move_words": (
        lambda *arrays: move_words(*arrays, words=1024),
        (ARENA, *[spec(ROWS, 4, 2, dtype="int32")] * 2),
    ),
}


@pytest.mark.parametrize("name", sorted(FRAME_IO))
def test_frames_in_place(name):
    function, specs = FRAME_IO[name]
    compiled = compile_for_gpu(function, *specs, donate=() if name == "read_frames" else (0,))
    assert_only(compiled, name)
    assert compiled.temp_bytes < 1024
    if name != "read_frames":
        assert compiled.alias_bytes >= 4 * ARENA.size
