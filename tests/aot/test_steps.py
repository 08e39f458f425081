"""The engine's decode and prefill steps of the 7B hybrid, two periods of its pattern, compiled for an H200."""

from __future__ import annotations

import functools
from collections import Counter

import pytest

from tests.aot.h200 import SHARED_MEMORY, Compiled, compile_for_h200
from tests.aot.models import decode_step, hybrid_7b, prefill_step, side_by_side

ROWS, FRAMES = 64, 2048
MAMBA2, ATTENTION, MLP = 12, 2, 14
FRAME_BYTES = 4 * 65536
# Launches of a block of each kind, and of all that is not in a block.
DECODE_BUDGET = {"mamba2": 6, "attention": 9, "mlp": 4, "rest": 34}
PREFILL_BUDGET = {"mamba2": 10, "attention": 9, "mlp": 4, "rest": 27}


def budget(of: dict[str, int]) -> int:
    blocks = MAMBA2 * of["mamba2"] + ATTENTION * of["attention"] + MLP * of["mlp"]
    return blocks + of["rest"]


@functools.cache
def decode(num_frames: int = FRAMES) -> Compiled:
    step, specs = decode_step(hybrid_7b(2), rows=ROWS, num_frames=num_frames)
    return compile_for_h200(step, *specs, donate=(1,))


@functools.cache
def prefill(num_frames: int = FRAMES) -> Compiled:
    step, specs = prefill_step(hybrid_7b(2), rows=2, chunk=2048, num_frames=num_frames)
    return compile_for_h200(step, *specs, donate=(1,))


def test_a_decode_step_has_no_loop_inside_and_stays_within_its_launches():
    compiled = decode()
    # The loop over steps is the only one; the copy is of its first counter, before it.
    others = compiled.kinds - Counter(kCustomKernel=compiled.kinds["kCustomKernel"])
    assert others == Counter(kWhile=1, kCopy=1) and compiled.launches[0].kind == "kCopy"
    assert sum(compiled.kinds.values()) <= budget(DECODE_BUDGET)
    assert len(compiled.named("ssd_fold")) == 1
    for name in ("causal_conv_window", "ssd_window", "gated_rmsnorm"):
        assert len(compiled.named(name)) == MAMBA2, name
    assert len(compiled.named("paged_attention")) == ATTENTION
    assert (
        len(compiled.named("residual_rmsnorm")) == MAMBA2 + ATTENTION + MLP - 1
    )  # all but the first


def test_a_mamba2_layer_and_its_mlp_are_ten_launches():
    names = [launch.name for launch in decode().launches]
    places = [i for i, name in enumerate(names) if name.startswith("causal_conv_window")]
    apart = Counter(after - before for before, after in zip(places, places[1:], strict=False))
    mamba2, attention, mlp = (DECODE_BUDGET[kind] for kind in ("mamba2", "attention", "mlp"))
    with_attention = mamba2 + mlp + attention + mlp
    assert apart == Counter({mamba2 + mlp: MAMBA2 - 1 - ATTENTION, with_attention: ATTENTION})


def test_a_prefill_step_has_no_loop_and_no_copy_and_stays_within_its_launches():
    compiled = prefill()
    assert set(compiled.kinds) == {"kCustomKernel"}
    assert len(compiled.launches) <= budget(PREFILL_BUDGET)
    for name in ("causal_conv", "ssd_scan", "store_tail", "gated_rmsnorm"):
        assert len(compiled.named(name)) == MAMBA2, name
    assert len(compiled.named("residual_rmsnorm")) == MAMBA2 + ATTENTION + MLP - 1


@pytest.mark.parametrize("step", [decode, prefill], ids=["decode", "prefill"])
def test_the_arena_is_written_in_place(step):
    compiled = step()
    assert compiled.alias_bytes >= FRAMES * FRAME_BYTES
    assert max(launch.shared_bytes for launch in compiled.launches) <= SHARED_MEMORY
    assert step(2 * FRAMES).temp_bytes == compiled.temp_bytes
    assert step(2 * FRAMES).alias_bytes == compiled.alias_bytes + FRAMES * FRAME_BYTES


@pytest.mark.parametrize("attention_first", [False, True])
def test_mixers_side_by_side_copy_neither_arena_nor_rings(attention_first):
    config = side_by_side(attention_first=attention_first)
    step, specs = decode_step(config, rows=ROWS, num_frames=FRAMES)
    compiled = compile_for_h200(step, *specs, donate=(1,))
    assert compiled.kinds["kCopy"] == 1  # of the loop's counter
    assert compiled.alias_bytes >= FRAMES * FRAME_BYTES > 16 * compiled.temp_bytes
    step, specs = prefill_step(config, rows=2, chunk=2048, num_frames=FRAMES)
    assert compile_for_h200(step, *specs, donate=(1,)).kinds["kCopy"] == 0
