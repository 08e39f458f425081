"""Steps of models with a cut, compiled for an H200 over an arena of 65 GB: two periods of the 7B hybrid with the cut
between them, and eight layers of Qwen3.5 with the cut in their middle."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import replace

import jax
import pytest

from hybrid_jax.config import EngineConfig, ModelConfig, SpeculationConfig, with_cut
from hybrid_jax.engine.programs.loops import GPU_OPTIONS, LOOP_OPTIONS
from hybrid_jax.geometry import logits_bytes
from hybrid_jax.models.known import load_known
from hybrid_jax.schedule.bucket import AfterCut
from hybrid_jax.sizing.temporaries import kernel_step_bytes
from tests.aot.chip import Compiled, compile_for_gpu
from tests.aot.models import (
    PERIOD,
    counted_bytes,
    decode_step,
    hybrid_7b,
    prefill_step,
    verify_step,
)
from tests.drawing import left_to_all

FRAMES = 250_000


def qwen() -> ModelConfig:
    """Two times three gated delta nets and an attention layer."""
    config = load_known("qwen3_5_9b")
    return replace(config, layers=config.layers[:8])


MODELS = {"hybrid": (functools.partial(hybrid_7b, 2), PERIOD), "qwen": (qwen, 4)}
FIRST = ("hybrid", pytest.param("qwen", marks=left_to_all))
GROUPS = {
    "shared": ("hybrid", {"state_group": 3})
}  # of the same layers, three and three share a state
# Before and after the cut each: recurrent mixers, attention mixers, and those with a gated norm.
COUNTS = {"hybrid": (6, 1, 6), "qwen": (3, 1, 3)}
WINDOWS = {"hybrid": "ssd_window", "qwen": "gated_delta_window"}


@functools.cache
def compiled(
    name: str, cut: bool, after_cut: AfterCut | None, rows: int = 1, kv_cache_dtype: str = "auto"
) -> Compiled:
    """A prefill of rows of 2,048 tokens, or a decode step of 64 rows."""
    name, groups = GROUPS.get(name, (name, {}))
    make, where = MODELS[name]
    config = with_cut(make(), where, **groups) if cut else make()
    sizes = {"num_frames": FRAMES, "kv_cache_dtype": kv_cache_dtype}
    if after_cut is None:
        step, specs = decode_step(config, rows=64, **sizes)
    else:
        step, specs = prefill_step(config, rows=rows, chunk=2048, after_cut=after_cut, **sizes)
    options = LOOP_OPTIONS if after_cut is None else GPU_OPTIONS
    found = compile_for_gpu(step, *specs, donate=(1,), options=options)
    state = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(specs[1]))
    assert found.alias_bytes >= state
    return found


def launches(found: Compiled, *names: str) -> list[int]:
    return [len(found.named(name)) for name in names]


def test_a_prompt_that_goes_on_runs_no_layer_after_the_cut():
    found, whole = (
        compiled("hybrid", *step) for step in ((True, AfterCut.NOTHING), (False, AfterCut.ALL))
    )
    assert found.outer == ("kCommandBuffer",)
    ssd, attention, _ = COUNTS["hybrid"]
    counts = launches(found, "ssd_scan", "append_kv", "paged_attention", "gated_rmsnorm")
    # Layers after the cut write keys, values and states, and read nothing with them.
    assert counts == [2 * ssd, 2 * attention, attention, ssd]
    assert len(found.launches) < len(whole.launches)
    assert found.temp_bytes < 1.02 * whole.temp_bytes


def test_gated_delta_nets_after_the_cut_write_their_states():
    found = compiled("qwen", True, AfterCut.NOTHING)
    assert found.outer == ("kCommandBuffer",)
    nets, attention, _ = COUNTS["qwen"]
    names = (
        "gated_delta_solve",
        "gated_delta_scan",
        "append_kv",
        "paged_attention",
        "gated_rmsnorm",
    )
    assert launches(found, *names) == [2 * nets, 2 * nets, 2 * attention, attention, nets]


@pytest.mark.parametrize("name", FIRST)
def test_the_last_token_of_a_prompt_is_a_window_after_the_cut(name):
    found, others = (
        compiled(name, True, after_cut) for after_cut in (AfterCut.ENDS, AfterCut.NOTHING)
    )
    assert found.outer == ("kCommandBuffer",)
    recurrent, attention, normed = COUNTS[name]
    counts = launches(found, WINDOWS[name], "append_kv", "gated_rmsnorm")
    assert counts == [recurrent, 3 * attention, 2 * normed]
    assert found.temp_bytes < 1.02 * others.temp_bytes


@left_to_all
def test_layers_that_share_a_state_have_scores_in_place_of_a_convolution():
    found, plain = compiled("shared", True, None), compiled("hybrid", True, None)
    assert found.outer == ("kCommandBuffer",)
    ssd, attention, normed = COUNTS["hybrid"]
    names = ("causal_conv_window", "ssd_window", "ssd_window_scores", "append_kv", "gated_rmsnorm")
    firsts = ssd // 3
    assert launches(found, *names) == [
        ssd + firsts,
        2 * ssd,
        ssd - firsts,
        2 * attention,
        2 * normed,
    ]
    assert (
        found.temp_bytes < 1.02 * plain.temp_bytes and found.kinds["kCopy"] <= plain.kinds["kCopy"]
    )


@left_to_all
@pytest.mark.parametrize("after_cut", [AfterCut.ENDS, AfterCut.ALL])
def test_prompts_of_layers_that_share_a_state_copy_nothing_large(after_cut):
    found, plain = (compiled(name, True, after_cut) for name in ("shared", "hybrid"))
    assert found.outer == ("kCommandBuffer",)
    assert found.kinds["kCopy"] <= plain.kinds["kCopy"] + 8
    # Before the cut nobody keeps what others would read; after it, where no layer runs on a chunk, neither.
    readers = 4 if after_cut is AfterCut.ALL else 0
    frames_read = [len(x.named("read_frames")) for x in (found, plain)]
    assert frames_read[0] <= frames_read[1] + readers
    if after_cut is AfterCut.ENDS:
        assert found.temp_bytes < 1.05 * plain.temp_bytes


@left_to_all
def test_four_prompts_at_a_time_have_the_launches_of_one():
    found, one = (compiled("hybrid", True, AfterCut.ENDS, rows) for rows in (4, 1))
    assert found.outer == ("kCommandBuffer",)
    names = ("ssd_scan", "ssd_window", "append_kv", "gated_rmsnorm")
    assert launches(found, *names) == launches(one, *names)


@pytest.mark.parametrize("after_cut", [AfterCut.NOTHING, AfterCut.ENDS])
@pytest.mark.parametrize("name", FIRST)
def test_nothing_large_is_copied(name, after_cut):
    """Beside the step without a cut: rows of rings, which are small."""
    kinds = [
        Counter(x.kinds)["kCopy"]
        for x in (compiled(name, True, after_cut), compiled(name, False, AfterCut.ALL))
    ]
    assert kinds[0] <= kinds[1] + 8


@pytest.mark.parametrize("name", FIRST)
def test_a_decode_step_is_one_command_buffer_with_the_same_kernels(name):
    found, plain = compiled(name, True, None), compiled(name, False, None)
    assert found.outer == ("kCommandBuffer",)
    names = (WINDOWS[name], "causal_conv_window", "append_kv", "gated_rmsnorm")
    assert launches(found, *names) == launches(plain, *names)
    assert len(found.launches) <= len(plain.launches) + 8


@pytest.mark.parametrize("after_cut", [pytest.param(AfterCut.ENDS, marks=left_to_all), None])
@left_to_all
def test_fp8_pages_add_no_launch_and_no_copy(after_cut):
    found, plain = (compiled("hybrid", True, after_cut, 1, dtype) for dtype in ("fp8", "auto"))
    assert found.kinds == plain.kinds and found.outer == plain.outer == ("kCommandBuffer",)
    assert found.temp_bytes < 1.02 * plain.temp_bytes


@pytest.mark.parametrize(
    "name, after_cut",
    [
        ("hybrid", AfterCut.NOTHING),
        ("hybrid", AfterCut.ENDS),
        ("hybrid", None),
        ("qwen", AfterCut.NOTHING),
        ("shared", None),
        pytest.param("hybrid", AfterCut.ALL, marks=left_to_all),
        pytest.param("shared", AfterCut.ALL, marks=left_to_all),
        *(
            pytest.param("qwen", after_cut, marks=left_to_all)
            for after_cut in (AfterCut.ENDS, AfterCut.ALL, None)
        ),
    ],
)
def test_temporaries_are_at_most_what_the_formula_says(name, after_cut):
    """And not far from it in the largest steps: those that run all layers."""
    of, groups = GROUPS.get(name, (name, {}))
    make, where = MODELS[of]
    config, rows = with_cut(make(), where, **groups), 64 if after_cut is None else 1
    counted = counted_bytes(config, rows=rows, tokens=1 if after_cut is None else 2048)
    held = compiled(name, True, after_cut).temp_bytes
    assert held <= counted
    if after_cut in (AfterCut.ALL, None):
        assert counted <= 1.25 * held


@left_to_all
def test_a_step_whose_drafts_come_from_the_cut_is_one_command_buffer():
    speculation = SpeculationConfig(method="exit", num_tokens=3)
    config = replace(with_cut(hybrid_7b(2), PERIOD), exit_head=True)
    step, specs = verify_step(config, rows=64, num_frames=FRAMES, speculation=speculation)
    found = compile_for_gpu(step, *specs, donate=(1,), options=LOOP_OPTIONS)
    assert found.outer == ("kCommandBuffer",)
    assert found.kinds["kWhile"] == 1
    state = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(specs[1]))
    assert found.alias_bytes >= state
    engine = EngineConfig(dtype="bfloat16", max_rows=64, max_model_len=8192)
    counted = kernel_step_bytes(config, engine, rows=64, tokens=speculation.window)
    counted += logits_bytes(config, max_rows=64, tokens=speculation.window, dtype="bfloat16")
    assert found.temp_bytes <= counted
