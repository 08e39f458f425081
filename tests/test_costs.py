"""Costs as a cache reckons with them; FLOPs and weights of whole models are in test_geometry.py."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hybrid_jax.config import (
    MLP,
    Attention,
    EngineConfig,
    Mamba2,
    ModelConfig,
    MoE,
    SpeculationConfig,
    residual_layer,
    with_cut,
)
from hybrid_jax.costs import (
    Costs,
    Mixture,
    model_costs,
    part_costs,
    prefill_flops,
    step_costs,
    weight_bytes,
)
from hybrid_jax.geometry import checkpoint_bytes, make_geometry
from hybrid_jax.models.known import load_known

ATTENTION = Attention(num_heads=4, num_kv_heads=2, head_dim=8)
WINDOWED = Attention(num_heads=4, num_kv_heads=2, head_dim=8, sliding_window=5)
MAMBA = Mamba2(num_heads=4, head_dim=8, state_size=16)


def model(*mixers) -> ModelConfig:
    layers = tuple(residual_layer(mixers=(mixer,), mlp=MLP(width=24)) for mixer in mixers)
    return ModelConfig(family="x", vocab_size=8, width=16, layers=layers)


def test_flops_of_a_part_are_those_of_the_whole_without_what_stands_before_it():
    costs = Costs(
        flops_per_token=7,
        flops_per_key=3,
        windows=((5, 2), (40, 11)),
        kv_bytes=1,
        checkpoint_bytes=1,
    )
    for start, end in ((0, 1), (0, 30), (4, 6), (20, 90), (50, 50)):
        keys = lambda window, span=range(start, end): sum(min(q + 1, window) for q in span)
        want = 7 * (end - start) + 3 * keys(10**9) + 2 * keys(5) + 11 * keys(40)
        assert costs.flops(end, start) == want


def test_a_step_reads_no_more_of_a_row_than_its_windows_see():
    windowed = EngineConfig(dtype="float32", grain=16, page_tokens=16, prefill_tokens=64)
    found = {}
    for mixer in (WINDOWED, ATTENTION):
        config = model(MAMBA, mixer)
        costs = model_costs(config, make_geometry(config, windowed), whole=True)
        steps = step_costs(config, windowed, costs, on_cpu=False)
        found[mixer] = [steps.cost(rows=64, tokens=1, context=context) for context in (0, 16, 4000)]
    none, little, much = found[WINDOWED]
    assert none < little == much < found[ATTENTION][2]


def test_windows_of_equal_width_are_counted_together():
    blocks = [(2, WINDOWED, {}), (1, ATTENTION, {}), (3, WINDOWED, {})]
    costs = part_costs(blocks, kv_bytes=0, checkpoint_bytes=0)
    assert costs.windows == ((5, 5 * 4 * 4 * 8),)
    assert costs.flops_per_key == 4 * 4 * 8


@pytest.mark.parametrize(
    "mixers", [(ATTENTION, MAMBA, MAMBA), (ATTENTION, ATTENTION), (MAMBA,)], ids=len
)
def test_a_models_bytes_are_those_of_the_engines_frames(mixers):
    config = model(*mixers)
    geometry = make_geometry(config, EngineConfig(dtype="bfloat16"))
    costs = model_costs(config, geometry)
    assert costs.checkpoint_bytes == checkpoint_bytes(geometry)
    page = geometry.frames_per_page * geometry.frame_bytes if geometry.has_pages else 0
    assert costs.kv_bytes == (page // geometry.page_tokens if page else 0)
    assert (costs.kv_bytes > 0, costs.checkpoint_bytes > 0) == (
        ATTENTION in mixers,
        MAMBA in mixers,
    )


def test_a_models_flops_are_those_of_its_prefill():
    config = model(ATTENTION, MAMBA)
    costs = model_costs(config, make_geometry(config, EngineConfig()))
    assert costs.flops(90, start=30) == prefill_flops(config, 60, 30)


def test_a_step_reads_the_experts_that_its_tokens_visit():
    """By drawing experts: what some tokens read of 64, four each."""
    mixture = Mixture(num_experts=64, top_k=4, expert_bytes=10)
    rng = np.random.default_rng(0)
    for tokens in (1, 5, 40):
        drawn = [
            len({e for _ in range(tokens) for e in rng.choice(64, 4, replace=False)})
            for _ in range(400)
        ]
        assert mixture.read(tokens) == pytest.approx(10 * np.mean(drawn), rel=0.03)


def test_drafts_of_a_mixture_cost_what_their_experts_weigh():
    experts = MoE(num_experts=64, top_k=4, width=256)
    layer = residual_layer(mixers=(ATTENTION,), mlp=experts)
    config = ModelConfig(family="test", layers=(layer,) * 2, vocab_size=64, width=64)
    engine = EngineConfig(speculation=SpeculationConfig())
    geometry = make_geometry(config, engine)
    held = weight_bytes(config, "float32")
    costs = step_costs(config, engine, model_costs(config, geometry), on_cpu=False)
    [mixture] = costs.mixtures
    rows_are_taken_from = 0 if config.tie_embeddings else 4 * config.vocab_size * config.width
    read = mixture.read(10**6) + costs.weight_bytes
    assert read == pytest.approx(held - rows_are_taken_from)
    assert mixture.read(1) == 4 * mixture.expert_bytes
    assert costs.ratio(rows=1, tokens=5, context=0) > 3 > costs.ratio(rows=64, tokens=5, context=0)


def test_a_draft_of_a_head_on_the_cut_costs_the_layers_before_it():
    layer = residual_layer(mixers=(ATTENTION,), mlp=MLP(width=32))
    plain = ModelConfig(family="test", layers=(layer,) * 6, vocab_size=64, width=16)
    config = replace(with_cut(plain, 2), exit_head=True)
    engine = EngineConfig(speculation=SpeculationConfig(method="exit", num_tokens=3))
    found = step_costs(
        config, engine, model_costs(config, make_geometry(config, engine), whole=True), on_cpu=True
    )
    before = replace(plain, layers=plain.layers[:2])
    alone = EngineConfig()
    costs = model_costs(before, make_geometry(before, alone))
    one = step_costs(before, alone, costs, on_cpu=True)
    assert found.drafting.passes == 3
    assert found.drafting.step.weight_bytes == one.weight_bytes
    assert found.drafting.step.token_flops == pytest.approx(one.token_flops)


def test_layers_that_share_are_each_read():
    """Groups save memory, and none of what a decode step reads."""
    model = load_known("nemotron_h_8b")
    found = []
    for group in (1, 2):
        config = with_cut(model, 26, kv_group=group, state_group=group)
        engine = EngineConfig(dtype="bfloat16")
        costs = model_costs(config, make_geometry(config, engine), whole=True)
        found.append(step_costs(config, engine, costs, on_cpu=False))
    assert found[1].kv_bytes == pytest.approx(found[0].kv_bytes, rel=0.05)  # but for padding
    assert found[1].row_bytes == pytest.approx(found[0].row_bytes, rel=0.05)


@pytest.mark.parametrize("method", ["mtp", "draft"])
def test_drafting_costs_a_pass_of_its_layers_for_each_token(method):
    layer = residual_layer(mixers=(ATTENTION,), mlp=MLP(width=32))
    config = ModelConfig(family="test", layers=(layer,) * 6, vocab_size=64, width=16)
    draft = replace(config, layers=(layer,))
    plain, config = config, replace(config, **{method: (layer,) if method == "mtp" else draft})
    prices = []
    for tokens in (2, 4):
        engine = EngineConfig(speculation=SpeculationConfig(method=method, num_tokens=tokens))
        geometry = make_geometry(config, engine)
        costs = step_costs(config, engine, model_costs(config, geometry), on_cpu=True)
        assert costs.drafting.passes == tokens and costs.drafting.tokens == 1
        one = costs.drafting.step.cost(rows=3, tokens=1, context=100)
        assert costs.drafting_cost(rows=3, context=100) == pytest.approx(tokens * one)
        own = step_costs(plain, engine, model_costs(plain, geometry), on_cpu=True).weight_bytes
        assert 1 / 8 < costs.drafting.step.weight_bytes / own < 1 / 2
        # A plain step takes its tokens through the layers that draft, and makes no logits of theirs.
        logits = 4 * config.vocab_size * config.width
        last_norm = 4 * config.width * (method == "draft")
        drafts = costs.drafting.step.weight_bytes - logits - last_norm
        assert costs.weight_bytes - own == drafts
        prices.append(costs.ratio(rows=1, tokens=1 + tokens, context=100))
    assert prices[0] < prices[1]
