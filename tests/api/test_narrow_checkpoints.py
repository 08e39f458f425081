"""`LLM(cache=CacheConfig(checkpoints="int8"))`: what it says, what it counts, and how memory is split."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hybrid_jax import CacheConfig, SamplingParams, inspect_model
from hybrid_jax.cli.options.model import ModelOptions
from hybrid_jax.config import EngineConfig
from hybrid_jax.costs import frame_costs, model_costs
from hybrid_jax.geometry import cached_checkpoint_bytes, checkpoint_bytes, make_geometry
from hybrid_jax.models.known import load_known
from hybrid_jax.sizing.budget import split_memory
from tests.llms import tiny_llm

GREEDY = SamplingParams(max_tokens=6, temperature=0.0)
PROMPT = {"prompt_token_ids": [(k * k) % 250 for k in range(120)]}
INT8 = CacheConfig(checkpoints="int8")


def test_an_llm_hits_and_says_so():
    with tiny_llm(cache=INT8, max_rows=1, max_model_len=256) as llm:
        for _ in range(2):
            [output] = llm.generate([PROMPT], GREEDY)
        stats = llm.stats()
        assert output.num_cached_tokens == 96
        assert stats["widened_checkpoints"] == 1 == stats["cache_hits"]
        assert "as int8" in llm.describe()
    with tiny_llm(max_rows=1, max_model_len=256) as llm:
        assert "as int8" not in llm.describe()
        for _ in range(2):
            llm.generate([PROMPT], GREEDY)
        assert llm.stats()["widened_checkpoints"] == llm.stats()["narrowed_checkpoints"] == 0


def test_a_warm_up_compiles_what_narrows_and_widens():
    with tiny_llm(cache=INT8, max_rows=1, max_model_len=256) as llm:
        assert {"narrow_checkpoint", "widen_checkpoint"} <= llm.warmup().keys()
        traced = llm.stats()["num_traces"]
        for _ in range(2):
            llm.generate([PROMPT], GREEDY)
        assert llm.stats()["widened_checkpoints"] == 1 and llm.stats()["num_traces"] == traced


@pytest.mark.parametrize("name", ["hybrid_7b", "nemotron_h_8b"])
def test_large_models_keep_three_and_a_half_times_as_many(name):
    model, engine = load_known(name), EngineConfig(dtype="bfloat16", max_rows=4, memory=8 << 30)
    narrow = replace(engine, cache=INT8)
    wide_geometry, geometry = (make_geometry(model, each) for each in (engine, narrow))
    assert replace(geometry, narrow=None) == wide_geometry
    wide, small = geometry.checkpoint_frames
    assert wide / small > 3.5
    slots = [
        split_memory(model, each, geometry_of).max_slots
        for each, geometry_of in ((engine, wide_geometry), (narrow, geometry))
    ]
    assert slots[1] > 3.5 * slots[0]


def test_policies_count_narrow_bytes_and_rows_those_of_steps():
    model = load_known("hybrid_7b")
    geometry = make_geometry(model, EngineConfig(dtype="bfloat16", cache=INT8))
    narrow = cached_checkpoint_bytes(geometry)
    assert frame_costs(geometry).checkpoint_bytes == narrow
    assert model_costs(model, geometry).checkpoint_bytes == narrow < checkpoint_bytes(geometry) / 3


def test_columns_alone_have_no_narrow_form():
    geometry = make_geometry(load_known("lfm2_1_2b"), EngineConfig(cache=INT8))
    assert geometry.narrow is None and geometry.cached_state_frames == geometry.state_frames


def test_inspect_says_what_a_checkpoint_takes():
    report = inspect_model("hybrid_7b", device="h200", checkpoints="int8")
    assert report["checkpoint_bytes"] > 3.5 * report["cached_checkpoint_bytes"]
    assert "; as int8 in the cache it takes 27 MiB." in str(report)
    plain = inspect_model("hybrid_7b", device="h200")
    assert plain["checkpoint_bytes"] == plain["cached_checkpoint_bytes"]
    assert "int8" not in str(plain)
    # One more than the rows' own fits 3.6 times, so nearly as many more prefixes.
    assert report["fit"]["cached_prefixes"] > 3.5 * plain["fit"]["cached_prefixes"]


def test_the_option_of_commands_is_a_cache_of_that_form():
    assert ModelOptions(checkpoints="int8", cache="lru").for_llm()["cache"] == CacheConfig(
        policy="lru", checkpoints="int8"
    )
    assert ModelOptions().for_llm()["cache"] == "adaptive"
