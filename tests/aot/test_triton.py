"""Triton kernels compiled for an H200 through jax-triton, at the shapes of real models."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from pallas_kernels.records import RecordSizes
from pallas_kernels.ssd_scan import ScanFrames, ssd_scan_frames, triton_scan
from tests.aot.chip import compile_for_gpu
from tests.aot.kernels import (
    FRAMES,
    GRANITE_4_H_SMALL,
    GRANITE_4_H_TINY,
    NEMOTRON_H_8B,
    PER_LAYER,
    REGISTERS,
    arena_of,
    spec,
)
from tests.aot.sass import NO_TOOLS, Code, recorded

if NO_TOOLS is not None:
    pytest.skip(NO_TOOLS, allow_module_level=True)

from pallas_kernels.ssd_scan import triton_kernel as kernels

KERNELS = (kernels.decay_kernel, kernels.added_kernel, kernels.starts_kernel, kernels.scan_kernel)
SHARED_OF_TWO = 233_472 // 2 - 1024  # bytes, where two programs are to run on a multiprocessor
REGISTERS_OF_TWO = REGISTERS // 2
THREADS = 128
TOKENS = 4096
SMALLER = RecordSizes(num_heads=32, head_dim=64, num_groups=1, state_size=64)


def check_moves(starts_kernel: Code) -> None:
    """Each byte is read once and written once, 16 bytes a thread, and many loads are on their way at once."""
    moves = re.findall(r"\b(ld|st)\.global\.v4", starts_kernel.ptx)
    # A row's state, and what is added to several segments; then their states, and that of the first segment.
    assert moves == ["ld"] * (1 + triton_scan.AHEAD) + ["st"] * (triton_scan.AHEAD + 1)
    assert len(re.findall(r"\bld\.global\.v", starts_kernel.ptx)) == moves.count("ld")
    assert starts_kernel.registers <= REGISTERS // (10 * THREADS)  # 10 programs a multiprocessor
    # To save registers, the assembler moves some of the loads down behind the first stores.
    order = "".join(re.findall(r"\b([LS])[DT]G\.E\.128", starts_kernel.text))
    assert order.startswith("L" * 4) and order.count("L") == moves.count("ld")


@pytest.mark.parametrize(
    ("records", "rows", "tokens"),
    [
        (NEMOTRON_H_8B, 4, TOKENS),
        (NEMOTRON_H_8B, 1, 512),
        (GRANITE_4_H_SMALL, 1, TOKENS),
        (GRANITE_4_H_TINY, 1, TOKENS),
        (SMALLER, 2, TOKENS),
    ],
    ids=["nemotron_h_8b", "one_segment", "granite_4_h_small", "granite_4_h_tiny", "64x64"],
)
@pytest.mark.parametrize("skips", [True, False], ids=["D", "no_D"])
def test_scan_in_place(records, rows, tokens, skips):
    def scan(arena, read, write, exists, xBC, dt, A, D, lengths, state_lengths):
        skip = D if skips else None
        arrays = (xBC, dt, A, skip, arena, read, write, exists, lengths, state_lengths)
        return ssd_scan_frames(ScanFrames(*arrays), records=records, implementation="triton")

    arena = arena_of(records, 8 * FRAMES)
    table, row = spec(rows, PER_LAYER, dtype="int32"), spec(rows, dtype="int32")
    heads = spec(records.num_heads)
    with recorded(*KERNELS) as compiled:
        program = compile_for_gpu(
            *(scan, arena, table, table, row),
            *(
                spec(rows, tokens, records.conv_size, dtype="bfloat16"),
                spec(rows, tokens, records.num_heads),
            ),
            *(heads, heads, row, row),
            donate=(0,),
        )
    found = {kernel.name: kernel for kernel in compiled}
    segments = -(-tokens // triton_scan.segment_tokens(records.num_heads))
    cut = {"added_kernel", "starts_kernel"} if segments > 1 else set()
    assert set(found) == {"decay_kernel", "scan_kernel"} | cut and len(compiled) == len(found)
    for kernel in compiled:
        assert kernel.spilled_bytes == 0, kernel.name
        assert kernel.shared_bytes <= SHARED_OF_TWO, kernel.name
        assert -(-kernel.registers // 8) * 8 * THREADS <= REGISTERS_OF_TWO, kernel.name
    size = f"m64n{records.state_size}k16"
    assert found["scan_kernel"].products == {"m64n64k16", size}
    assert not cut or found["added_kernel"].products == {size}

    if cut:
        check_moves(found["starts_kernel"])

    # Nothing but the kernels: no copy of the arena, none of the small arguments.
    assert program.kinds == Counter(kCustomCall=len(found))
    assert program.alias_bytes >= 4 * arena.size
    decays = 2 * 4 * rows * tokens * records.num_heads
    starts = 4 * rows * segments * records.num_heads * (records.head_words + 1) if cut else 0
    assert program.temp_bytes <= decays + starts + 4096
