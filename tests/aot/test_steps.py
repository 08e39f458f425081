"""The engine's decode and prefill steps, compiled for an H200 over an arena of 100 GB: of the 7B hybrid two periods of
its pattern, and at full depth with all tests; and three layers with experts."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import jax
import numpy as np
import pytest

from hybrid_jax.config import (
    Attention,
    EngineConfig,
    Mamba2,
    ModelConfig,
    MoE,
    SpeculationConfig,
    residual_layer,
)
from hybrid_jax.engine.programs.loops import GPU_OPTIONS, LOOP_OPTIONS
from hybrid_jax.geometry import logits_bytes
from hybrid_jax.sizing.temporaries import kernel_step_bytes
from pallas_kernels import jax_triton
from tests.aot.chip import CHIPS, SHARED_MEMORY, Compiled, compile_for_gpu
from tests.aot.models import (
    PERIODS,
    counted_bytes,
    decode_step,
    hybrid_7b,
    mixture,
    prefill_step,
    side_by_side,
    smallest,
    verify_step,
    window_step,
)
from tests.drawing import EVERYTHING, left_to_all, spine

NO_TRITON = jax_triton.why_unavailable()
FRAME_BYTES = 4 * 65536
FRAMES = 400_000  # 105 GB: offsets of 64 bits
SPILLS = ("l40s",)  # 20 bytes of a thread of `ssd_fold`
BLOCKS = {"mamba2": 6, "attention": 1, "mlp": 7}  # of a period
# Launches of a block of each kind, and of all that is not in a block. Whether numbers are finite takes two of the
# rest in a prefill step: a reduction of what the maximum of each row left, and a selection.
DECODE_BUDGET = {"mamba2": 6, "attention": 6, "mlp": 4, "rest": 34}
ONE_ROW_BUDGET = {"mamba2": 5, "attention": 6, "mlp": 4, "rest": 48}
PREFILL_BUDGET = {"mamba2": 10, "attention": 5, "mlp": 4, "rest": 32}
ONE_ROW_PREFILL_BUDGET = {"mamba2": 10, "attention": 10, "mlp": 4, "rest": 28}
# Of three layers with experts.
EXPERT_LAYERS = {"mamba2": 2, "attention": 1, "moe": 3}
EXPERTS_DECODE_BUDGET = DECODE_BUDGET | {"moe": 12}
EXPERTS_PREFILL_BUDGET = PREFILL_BUDGET | {"moe": 12}
# Rows, tokens, and how much more than it holds may be counted for a step. XLA splits fewer products of few tokens.
EXPERTS_STEPS = [(64, 1, 1.25), (2, 2048, 1.25)]
# (rows, periods) and (rows, tokens, periods)
DECODES = [(1, 1), (64, 2)]
PREFILLS = [(1, 8192, 1), (2, 2048, 1)]
if EVERYTHING:
    DECODES += [(256, 1), (1, 2), (64, PERIODS)]
    PREFILLS += [(1, 512, 1), (1, 2048, 1), (2, 2048, 2), (1, 8192, PERIODS)]
    EXPERTS_STEPS += [(1, 512, 1.5), (1, 8192, 1.25)]


def budget(of: dict[str, int], periods: int) -> int:
    return of["rest"] + periods * sum(count * of[kind] for kind, count in BLOCKS.items())


@functools.cache
def compiled_step(make: Callable, config: ModelConfig, **sizes) -> Compiled:
    """The same object however a test writes what it asks for: a step compiles once."""
    step, specs = make(config, **sizes)
    options = LOOP_OPTIONS if make is decode_step else GPU_OPTIONS
    return compile_for_gpu(step, *specs, donate=(1,), options=options)


def decode(
    rows: int = 64, periods: int = 2, num_frames: int = FRAMES, sampling: str = "pallas"
) -> Compiled:
    config = hybrid_7b(periods)
    return compiled_step(decode_step, config, rows=rows, num_frames=num_frames, sampling=sampling)


def prefill(
    rows: int = 2,
    tokens: int = 2048,
    periods: int = 1,
    num_frames: int = FRAMES,
    scan: str = "pallas",
) -> Compiled:
    config = hybrid_7b(periods)
    return compiled_step(
        prefill_step, config, rows=rows, chunk=tokens, num_frames=num_frames, scan=scan
    )


@pytest.mark.parametrize("chip", CHIPS)
@spine("h200")
@left_to_all("h100")
def test_a_small_decode_step_runs_each_kernel_once_for_each_of_its_blocks_and_copies_nothing(chip):
    step, specs = decode_step(smallest(), rows=4, num_frames=FRAMES, tokens=512)
    compiled = compile_for_gpu(
        step, *specs, donate=(1,), chip=chip, options=LOOP_OPTIONS, spills=chip in SPILLS
    )
    once = ("causal_conv_window", "ssd_window", "ssd_fold", "gated_rmsnorm")
    for name in (*once, "append_kv", "paged_attention", "sample_tokens"):
        assert len(compiled.named(name)) == 1, name
    assert len(compiled.named("residual_rmsnorm")) == 4 - 1  # but the first
    assert compiled.kinds - Counter(kCustomKernel=compiled.kinds["kCustomKernel"]) == Counter(
        kWhile=1, kCopy=1
    )
    assert compiled.outer == ("kCommandBuffer",)
    held = [specs[1].arena, *jax.tree.leaves(specs[1].rings)]
    assert compiled.alias_bytes >= sum(x.size * x.dtype.itemsize for x in held)


@pytest.mark.parametrize("tokens", [1, 4])
def test_without_its_options_the_host_starts_each_step_of_a_loop(tokens):
    """So a program that the host starts has no loop."""
    if tokens == 1:
        step, specs = decode_step(smallest(), rows=4, num_frames=FRAMES, tokens=512)
        alone, own = decode_step(smallest(), rows=4, num_frames=FRAMES, tokens=512, loops=False)
    else:
        settings = {"rows": 4, "num_frames": FRAMES, "tokens": 512}
        step, specs = verify_step(smallest(), **settings)
        alone, own = verify_step(smallest(), **settings, loops=False)
    assert "kWhile" in compile_for_gpu(step, *specs, donate=(1,)).outer
    compiled = compile_for_gpu(alone, *own, donate=(1,))
    assert compiled.outer == ("kCommandBuffer",) and "kWhile" not in compiled.kinds


@pytest.mark.parametrize("rows, periods", DECODES)
@left_to_all("64-2]")
def test_a_decode_step_is_one_command_buffer_and_stays_within_its_launches(rows, periods):
    compiled = decode(rows, periods)
    assert compiled.outer == ("kCommandBuffer",)
    others = compiled.kinds - Counter(kCustomKernel=compiled.kinds["kCustomKernel"])
    # The loop over steps is the only one. Of one row XLA copies what it would slice of many: counters, page tables.
    assert others == Counter(kWhile=1, kCopy=1) or (rows == 1 and others["kWhile"] == 1)
    of = ONE_ROW_BUDGET if rows == 1 else DECODE_BUDGET
    assert len(compiled.launches) <= budget(of, periods)
    blocks = {kind: count * periods for kind, count in BLOCKS.items()}
    assert len(compiled.named("ssd_fold")) == 1
    for name in ("causal_conv_window", "ssd_window", "gated_rmsnorm"):
        assert len(compiled.named(name)) == blocks["mamba2"], name
    for name in ("append_kv", "paged_attention"):
        assert len(compiled.named(name)) == blocks["attention"], name
    assert len(compiled.named("residual_rmsnorm")) == sum(blocks.values()) - 1  # but the first


@pytest.mark.parametrize("rows, tokens, periods", PREFILLS)
def test_a_prefill_step_is_one_command_buffer_and_stays_within_its_launches(rows, tokens, periods):
    compiled = prefill(rows, tokens, periods)
    assert compiled.outer == ("kCommandBuffer",)
    assert set(compiled.kinds) == {"kCustomKernel"} or rows == 1
    of = ONE_ROW_PREFILL_BUDGET if rows == 1 else PREFILL_BUDGET
    assert len(compiled.launches) <= budget(of, periods)
    blocks = {kind: count * periods for kind, count in BLOCKS.items()}
    for name in ("causal_conv", "ssd_scan", "store_tail", "gated_rmsnorm"):
        assert len(compiled.named(name)) == blocks["mamba2"], name
    assert len(compiled.named("residual_rmsnorm")) == sum(blocks.values()) - 1


@pytest.mark.skipif(NO_TRITON is not None, reason=str(NO_TRITON))
@pytest.mark.parametrize("rows, tokens", [(1, 8192), (2, 2048)])
@left_to_all("2-2048]")
def test_a_prefill_step_with_the_triton_scan_copies_nothing_more(rows, tokens):
    """Four launches a layer in the one command buffer; arena in place, temporaries as they are counted."""
    compiled, pallas = (prefill(rows, tokens, scan=scan) for scan in ("triton", "pallas"))
    layers = BLOCKS["mamba2"]
    assert compiled.kinds["kCustomCall"] == 4 * layers
    assert not compiled.named("ssd_scan.*")
    scans = {"ssd_scan", "ssd_scan_segments", "ssd_scan_starts"}
    others = len(pallas.launches) - sum(len(pallas.named(name)) for name in scans)
    assert len(compiled.launches) == others + 4 * layers
    assert compiled.kinds["kCopy"] == pallas.kinds["kCopy"]
    assert compiled.outer == ("kCommandBuffer",)
    assert compiled.alias_bytes == pallas.alias_bytes >= FRAMES * FRAME_BYTES
    engine = EngineConfig(dtype="bfloat16", max_rows=rows, max_model_len=8192)
    assert compiled.temp_bytes <= kernel_step_bytes(hybrid_7b(1), engine, rows=rows, tokens=tokens)


@pytest.mark.skipif(NO_TRITON is not None, reason=str(NO_TRITON))
@left_to_all
def test_a_decode_step_whose_tokens_triton_draws_copies_nothing_more():
    """Five launches in the one command buffer; arena in place, and memory as with one launch."""
    compiled, pallas = decode(sampling="triton"), decode()
    calls = ("kCustomCall",) * 5
    assert compiled.outer == pallas.outer == ("kCommandBuffer",)
    assert not compiled.named("sample_tokens")
    assert compiled.kinds == pallas.kinds - Counter(kCustomKernel=1) + Counter(calls)
    assert compiled.alias_bytes == pallas.alias_bytes >= FRAMES * FRAME_BYTES
    assert compiled.temp_bytes <= pallas.temp_bytes + 4096


def steps() -> list:
    """Every step of this file, and its rows and tokens."""
    found = [(decode, shape, shape[0], 1) for shape in DECODES]
    return found + [(prefill, shape, *shape[:2]) for shape in PREFILLS]


@pytest.mark.parametrize("step, shape, rows, tokens", steps())
def test_arena_and_rings_are_written_in_place(step, shape, rows, tokens):
    """They are aliased whole, and what a step holds beside them is far smaller than either."""
    compiled = step(*shape)
    config = hybrid_7b(shape[-1])
    _, specs = decode_step(config, rows=rows if tokens == 1 else 64, num_frames=FRAMES)
    state = specs[1]
    rings = jax.tree.leaves(state.rings)
    held = sum(array.size * array.dtype.itemsize for array in (state.arena, *rings))
    assert compiled.alias_bytes >= held >= FRAMES * FRAME_BYTES
    assert max(launch.shared_bytes for launch in compiled.launches) <= SHARED_MEMORY
    if tokens == 1:
        assert compiled.temp_bytes < 100e6
        assert rows == 1 or compiled.temp_bytes < held - FRAMES * FRAME_BYTES


@pytest.mark.parametrize("step, shape, rows, tokens", steps())
def test_temporaries_are_what_the_formula_says(step, shape, rows, tokens):
    counted = counted_bytes(hybrid_7b(shape[-1]), rows=rows, tokens=tokens)
    assert step(*shape).temp_bytes <= counted <= 1.25 * step(*shape).temp_bytes


@pytest.mark.parametrize("rows", [pytest.param(1, marks=left_to_all), 64])
def test_exact_mode_writes_in_place_and_holds_what_the_formula_says(rows):
    config = hybrid_7b(1)
    step, specs = window_step(config, rows=rows, num_frames=FRAMES)
    compiled = compile_for_gpu(step, *specs, donate=(1,))
    state = specs[1]
    smallest = min(
        x.size * x.dtype.itemsize
        for x in (state.arena, *state.rings[0].values())
        if x.dtype != np.float32
    )
    assert compiled.alias_bytes >= sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
    if rows > 1:  # the rings of one row are smaller than what a window works with
        assert compiled.temp_bytes < smallest
    engine = EngineConfig(dtype="bfloat16", max_rows=rows, max_model_len=8192, exact=True)
    counted = kernel_step_bytes(config, engine, rows=rows, tokens=engine.grain)
    assert compiled.temp_bytes <= counted <= 1.25 * compiled.temp_bytes


def drafting_for(config: ModelConfig, method: str) -> ModelConfig:
    """The 7B hybrid with a head of attention, or with a second model of two Mamba-2 layers and one of attention."""
    layers = {type(layer.mixers[0]): layer for layer in config.layers if layer.mixers}
    if method == "mtp":
        return replace(config, mtp=(layers[Attention],))
    if method == "draft":
        few = (layers[Mamba2], layers[Attention], layers[Mamba2])
        return replace(config, draft=replace(config, layers=few))
    return config


JUDGES = {
    "chain": SpeculationConfig(),
    "tree": SpeculationConfig(tree=(0, 0, 1, 1, 2, 3)),
    "head": SpeculationConfig(method="mtp", num_tokens=3),
    "head_tree": SpeculationConfig(method="mtp", tree=(0, 0, 1, 1, 2, 3)),
    "second": SpeculationConfig(method="draft", num_tokens=3),
    "second_tree": SpeculationConfig(method="draft", tree=(0, 0, 1, 1, 2, 3)),
}


@pytest.mark.parametrize("name", JUDGES)
@left_to_all("head_tree", "head]", "tree]", "second]")
def test_a_step_that_judges_drafts_is_one_command_buffer_and_written_in_place(name):
    """One period is enough: what is moved by how many tokens stay is moved for all layers at once."""
    speculation = JUDGES[name]
    config = drafting_for(hybrid_7b(1), speculation.method)
    step, specs = verify_step(config, rows=64, num_frames=FRAMES, speculation=speculation)
    compiled = compile_for_gpu(step, *specs, donate=(1,), options=LOOP_OPTIONS)
    state = specs[1]
    assert compiled.outer == ("kCommandBuffer",)
    others = compiled.kinds - Counter(kCustomKernel=compiled.kinds["kCustomKernel"])
    assert others.keys() == {"kWhile", "kCopy"}
    # Copies are of what the host sends, and of small arrays.
    assert others["kWhile"] == 1 and others["kCopy"] <= 2
    deepest = speculation.num_tokens if speculation.tree is None else max(speculation.depths)
    drafting = 2 * (1 + deepest) if speculation.method == "draft" else 0
    assert len(compiled.named("causal_conv_window")) == BLOCKS["mamba2"] + drafting
    # Only the pages of a tree wait for what the second model's last layer makes of tokens that are judged.
    unread = int(name == "second")
    assert len(compiled.named("ssd_window")) == BLOCKS["mamba2"] + drafting - unread
    assert compiled.alias_bytes >= sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
    conv = state.rings[0]["conv"]
    assert compiled.temp_bytes < conv.size * conv.dtype.itemsize
    tokens = speculation.window
    engine = EngineConfig(dtype="bfloat16", max_rows=64, max_model_len=8192)
    counted = kernel_step_bytes(config, engine, rows=64, tokens=tokens)
    counted += logits_bytes(config, max_rows=64, tokens=tokens, dtype="bfloat16")
    assert 0.4 * counted <= compiled.temp_bytes <= counted


def step_with_experts(rows: int, tokens: int) -> Compiled:
    if tokens == 1:
        return compiled_step(decode_step, mixture(), rows=rows, num_frames=FRAMES)
    return compiled_step(prefill_step, mixture(), rows=rows, chunk=tokens, num_frames=FRAMES)


@pytest.mark.parametrize("rows", [1, 64])
@left_to_all("1]")
def test_experts_of_a_decode_step_are_in_its_command_buffer(rows):
    """The loop over steps is the only one: there is none over experts."""
    compiled = step_with_experts(rows, 1)
    assert compiled.outer == ("kCommandBuffer",)
    assert compiled.kinds["kWhile"] == 1
    of = EXPERTS_DECODE_BUDGET
    assert len(compiled.launches) <= of["rest"] + sum(
        count * of[kind] for kind, count in EXPERT_LAYERS.items()
    )
    layers = EXPERT_LAYERS["moe"]
    for name in ("expert_up", "expert_down"):
        assert len(compiled.named(name)) == layers, name
    assert len(compiled.named("expert_visits")) == (layers if rows > 1 else 0)


def test_of_a_lone_row_no_launch_writes_the_products_of_a_router():
    """512 experts, each chosen by 2,048 channels: as products in float32 they are 4 MB, more than all else together."""
    width, experts = 2048, MoE(num_experts=512, top_k=10, width=512, shared_width=512)
    mixer = Mamba2(num_heads=8, head_dim=64, state_size=128)
    layer = residual_layer(mixers=(mixer,), mlp=experts)
    config = ModelConfig(
        family="granitemoehybrid", width=width, vocab_size=2048, layers=(layer,), max_position=8192
    )
    compiled = compiled_step(decode_step, config, rows=1, num_frames=FRAMES)
    # in_proj and out_proj, the router, up and down of the shared expert, and the head.
    assert len(compiled.named("row_product")) == 6
    assert compiled.temp_bytes < 4 * width * experts.num_experts / 16


def test_experts_of_a_prefill_step_are_in_its_command_buffer():
    compiled = step_with_experts(2, 2048)
    assert compiled.outer == ("kCommandBuffer",) and set(compiled.kinds) == {"kCustomKernel"}
    of = EXPERTS_PREFILL_BUDGET
    assert len(compiled.launches) <= of["rest"] + sum(
        count * of[kind] for kind, count in EXPERT_LAYERS.items()
    )


@pytest.mark.parametrize("rows, tokens, most", EXPERTS_STEPS)
def test_temporaries_of_experts_are_what_the_formula_says(rows, tokens, most):
    counted = counted_bytes(mixture(), rows=rows, tokens=tokens)
    held = step_with_experts(rows, tokens).temp_bytes
    assert held <= counted <= most * held


@left_to_all
def test_the_logits_of_a_step_are_what_is_counted_for_them():
    counted = logits_bytes(hybrid_7b(1), max_rows=256, dtype="bfloat16")
    assert decode(256, 1).temp_bytes <= counted <= 1.25 * decode(256, 1).temp_bytes


def test_memory_does_not_grow_with_the_arena():
    small, large = decode(num_frames=2048), decode()
    assert small.temp_bytes == large.temp_bytes
    assert large.alias_bytes - small.alias_bytes == (FRAMES - 2048) * FRAME_BYTES


def test_a_mamba2_layer_and_its_mlp_are_ten_launches():
    names = [launch.name for launch in decode().launches]
    places = [i for i, name in enumerate(names) if name.startswith("causal_conv_window")]
    apart = Counter(after - before for before, after in zip(places, places[1:], strict=False))
    mamba2, attention, mlp = (DECODE_BUDGET[kind] for kind in ("mamba2", "attention", "mlp"))
    with_attention = mamba2 + mlp + attention + mlp
    assert apart == Counter({mamba2 + mlp: 2 * 6 - 1 - 2, with_attention: 2})


def test_of_a_lone_row_each_weight_is_read_by_one_launch():
    """in_proj and out_proj, qkv and out, up and down, and the head: nothing else is as large as a weight."""
    compiled = decode(1, 1)
    assert len(compiled.named("row_product")) == 2 * sum(BLOCKS.values()) + 1
    assert not [x for x in compiled.launches if "gemm" in x.name or "dot" in x.name]
    assert compiled.temp_bytes < 2**20


@pytest.mark.parametrize("attention_first", [False, True])
@left_to_all
def test_mixers_side_by_side_copy_neither_arena_nor_rings(attention_first):
    config = side_by_side(attention_first=attention_first)
    step, specs = decode_step(config, rows=64, num_frames=FRAMES)
    compiled = compile_for_gpu(step, *specs, donate=(1,))
    assert compiled.kinds["kCopy"] == 1  # of the loop's counter
    assert compiled.alias_bytes >= FRAMES * FRAME_BYTES > 16 * compiled.temp_bytes
    step, specs = prefill_step(config, rows=2, chunk=2048, num_frames=FRAMES)
    assert compile_for_gpu(step, *specs, donate=(1,)).kinds["kCopy"] == 0
