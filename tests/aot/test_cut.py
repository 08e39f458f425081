"""Steps of a model with a cut, compiled for an H200 over an arena of 65 GB: two periods of the 7B hybrid, the cut
between them."""

from __future__ import annotations

import functools
from collections import Counter

import jax
import pytest

from hybrid_jax.config import ModelConfig, with_cut
from hybrid_jax.schedule.bucket import Behind
from tests.aot.h200 import Compiled, compile_for_h200
from tests.aot.models import PERIOD, decode_step, hybrid_7b, prefill_step

FRAMES = 250_000
MIXERS = {"ssd": 6, "attention": 1}  # of a period


@functools.cache
def compiled(cut: bool, behind: Behind | None) -> Compiled:
    """A prefill of 2,048 tokens of one row, or a decode step of 64 rows."""
    plain = hybrid_7b(2)
    config: ModelConfig = with_cut(plain, PERIOD) if cut else plain
    if behind is None:
        step, specs = decode_step(config, rows=64, num_frames=FRAMES)
    else:
        step, specs = prefill_step(config, rows=1, chunk=2048, num_frames=FRAMES, behind=behind)
    found = compile_for_h200(step, *specs, donate=(1,))
    state = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(specs[1]))
    assert found.alias_bytes >= state
    return found


def launches(found: Compiled, *names: str) -> list[int]:
    return [len(found.named(name)) for name in names]


def test_a_prompt_that_goes_on_runs_no_layer_behind_the_cut():
    found, whole = compiled(True, Behind.NOTHING), compiled(False, Behind.ALL)
    assert found.outer == ("kCommandBuffer",)
    ssd, attention = MIXERS.values()
    counts = launches(found, "ssd_scan", "append_kv", "paged_attention", "gated_rmsnorm")
    # Layers behind the cut write keys, values and states, and read nothing with them.
    assert counts == [2 * ssd, 2 * attention, attention, ssd]
    assert len(found.launches) < len(whole.launches)
    assert found.temp_bytes < 1.02 * whole.temp_bytes


def test_the_last_token_of_a_prompt_is_a_window_behind_the_cut():
    found, others = compiled(True, Behind.ENDS), compiled(True, Behind.NOTHING)
    assert found.outer == ("kCommandBuffer",)
    ssd, attention = MIXERS.values()
    names = ("ssd_scan", "ssd_window", "append_kv", "gated_rmsnorm")
    assert launches(found, *names) == [2 * ssd, ssd, 3 * attention, 2 * ssd]
    assert found.temp_bytes < 1.02 * others.temp_bytes


@pytest.mark.parametrize("behind", [Behind.NOTHING, Behind.ENDS])
def test_nothing_large_is_copied(behind):
    """Beside the step without a cut: rows of rings, which are small."""
    kinds = [
        Counter(x.kinds)["kCopy"] for x in (compiled(True, behind), compiled(False, Behind.ALL))
    ]
    assert kinds[0] <= kinds[1] + 8


def test_a_decode_step_is_one_command_buffer_with_the_same_kernels():
    found, plain = compiled(True, None), compiled(False, None)
    assert found.body == ("kCommandBuffer",)
    names = ("ssd_window", "causal_conv_window", "append_kv", "gated_rmsnorm")
    assert launches(found, *names) == launches(plain, *names)
    assert len(found.launches) <= len(plain.launches) + 8
