"""Memory budgets: what is allocated stays within them, and what does not fit is refused with a number that does."""

from __future__ import annotations

import bisect
import re
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import jax
import numpy as np
import pytest

from hybrid_jax.api.overview import overview
from hybrid_jax.byte_sizes import parse_size
from hybrid_jax.config import (
    BACKENDS,
    MLP,
    PALLAS,
    XLA,
    Attention,
    Block,
    CacheConfig,
    EngineConfig,
    GatedDelta,
    Layer,
    LowRank,
    Mamba1,
    Mamba2,
    ModelConfig,
    MoE,
    ShortConv,
    SpeculationConfig,
    residual_layer,
)
from hybrid_jax.config.formats import Scaled
from hybrid_jax.config.sampling_params import SamplingParams
from hybrid_jax.config.speculation import METHODS
from hybrid_jax.engine import runner as runners
from hybrid_jax.engine.adjust import make_adjust
from hybrid_jax.engine.drafters.table import DRAFTERS
from hybrid_jax.engine.engine import Engine
from hybrid_jax.engine.kernel_choice import choose_kernels
from hybrid_jax.engine.programs.loops import Loops
from hybrid_jax.engine.runner import Runner
from hybrid_jax.engine.steps.fork import Fork
from hybrid_jax.engine.steps.step import Variant
from hybrid_jax.geometry import (
    LOGITS_OF_A_POSITION,
    LOGITS_OF_A_ROW,
    PROMPT_POSITIONS,
    Geometry,
    make_geometry,
)
from hybrid_jax.kinds import mamba1
from hybrid_jax.models.initialize import random_params
from hybrid_jax.schedule.request import Request
from hybrid_jax.sizing import temporaries
from hybrid_jax.sizing.budget import DEFAULT_LENGTH, MAX_SLOTS, MemorySplit, split_memory
from hybrid_jax.sizing.devices import Device
from hybrid_jax.sizing.room import find_room
from hybrid_jax.sizing.temporaries import narrowing_bytes, temporary_bytes
from hybrid_jax.state import make_state, state_specs
from pallas_kernels.selective_scan import xla as selective_scan_xla
from tests.drawing import left_to_all
from tests.kinds import fixed_decay, latent
from tests.kinds.fixed_decay import FixedDecay
from tests.kinds.latent import Latent
from tests.products.cases import CASES, kept

fixed_decay.register()
latent.register()


def model(pattern: str, **settings) -> ModelConfig:
    mixers = {
        "M": Mamba2(num_heads=4, head_dim=8, state_size=8),
        "A": Attention(num_heads=4, num_kv_heads=2, head_dim=8),
    }
    layers = tuple(residual_layer(mixers=(mixers[kind],), mlp=MLP(width=24)) for kind in pattern)
    settings = {"vocab_size": 31, "width": 16, "max_position": 1024} | settings
    return ModelConfig(family="test", layers=layers, **settings)


def sizes(config: ModelConfig, engine: EngineConfig, **settings) -> tuple[MemorySplit, Geometry]:
    geometry = make_geometry(config, engine)
    return split_memory(config, engine, geometry, **settings), geometry


def least_memory(config: ModelConfig, **settings) -> int:
    """The fewest bytes that are not refused."""

    def suffices(memory: int) -> bool:
        with suppress(ValueError):
            return bool(sizes(config, EngineConfig(memory=memory, **settings)))
        return False

    return bisect.bisect_left(range(10**9), True, key=suffices)


@pytest.mark.parametrize("pattern", ["MAM", "AA", "MM"])
@pytest.mark.parametrize("settings", [{}, {"exact": True}, {"dtype": "bfloat16"}, {"grain": 16}])
def test_what_is_allocated_is_what_is_counted_and_within_the_budget(pattern, settings):
    config = model(pattern)
    least = least_memory(config, **settings)
    for memory in (least, least + 1, least + 12345, 3 * least, 10**8 + 7):
        engine = EngineConfig(memory=memory, **settings)
        found, geometry = sizes(config, engine)
        assert found.total_bytes <= memory
        # Nothing worth a frame is left over, but for a table line of an extra slot.
        slack = 2 * 4 * max(geometry.state_frames, 1)
        per_frame = geometry.frame_bytes + 4
        assert memory - found.total_bytes <= per_frame + slack + 4 * found.num_frames
        specs = state_specs(
            geometry,
            num_frames=found.num_frames,
            max_slots=found.max_slots,
            max_rows=engine.max_rows,
            window=1,
            aligned=engine.exact,
        )
        assert sum(spec.num_bytes for spec in jax.tree.leaves(specs)) == found.state_bytes


@pytest.mark.parametrize("pattern", ["MAM", "AA", "MM"])
def test_following_the_advice_works_and_one_byte_less_does_not(pattern):
    config = model(pattern)
    settings = {"max_rows": 2, "prefill_tokens": 32, "steps_per_dispatch": 2}
    least = least_memory(config, **settings)
    with pytest.raises(
        ValueError, match="memory must hold .* at least, got .*; raise mem"
    ) as error:
        sizes(config, EngineConfig(memory=least - 1, **settings))
    named = parse_size(re.search(r"([\d.]+ \w+) at least", str(error.value))[1])
    assert least <= named < 1.01 * least
    sizes(config, EngineConfig(memory=least, **settings))


def test_an_engine_with_the_least_memory_serves_short_requests():
    config = model("MA")
    settings = {"max_rows": 2, "prefill_tokens": 32, "steps_per_dispatch": 2}
    least = least_memory(config, **settings)
    engine = Engine(config, random_params(config, 0), EngineConfig(memory=least, **settings))
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(engine.runner.state))
    assert held == engine.sizes.state_bytes == engine.stats()["memory_bytes"]
    assert engine.sizes.total_bytes <= least
    requests = [
        Request(
            request_id=str(i),
            prompt=np.random.default_rng(i).integers(0, 31, 40).tolist(),
            params=SamplingParams(temperature=0, presence_penalty=0.5),
            seed=0,
            max_tokens=20,
        )
        for i in range(3)
    ]
    for request in requests:
        engine.add(request)
    while engine.has_work:
        engine.step()
        engine.scheduler.check_invariants()
    assert [len(request.output.token_ids) for request in requests] == [20, 20, 20]
    assert all(request.output.finish_reason == "length" for request in requests)
    adjust = jax.tree.leaves(engine.runner.adjust)
    assert sum(leaf.nbytes for leaf in adjust) == engine.sizes.adjust_bytes == 2 * 4 * 3 * 31


def count_held(runner, monkeypatch):
    """Steps are compiled but not run: bytes that each holds beside what it is given, and what compiles one."""
    build, held = runner.programs.get, {}

    def compiled(kind, *key):
        def call(*args):
            # Buffers are settled before LLVM, whose own optimisation would take most of the time.
            quick = {"xla_backend_optimization_level": 0}
            lowered = build(kind, *key).lower(*args)
            memory = lowered.compile(compiler_options=quick).memory_analysis()
            fresh = memory.output_size_in_bytes - memory.alias_size_in_bytes
            held[kind, key] = memory.temp_size_in_bytes + fresh
            return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), lowered.out_info)

        return call

    monkeypatch.setattr(runner.programs, "get", compiled)
    return held, compiled


@pytest.mark.as_users
@pytest.mark.usefixtures("no_compile_cache")
@pytest.mark.parametrize(
    "max_rows, exact, drafts",
    [pytest.param(2, False, 0, marks=left_to_all), (16, False, 0), (16, True, 0), (16, False, 7)],
)
@left_to_all("16-False")
def test_the_logits_of_every_step_fit_what_is_counted_for_them(
    max_rows, exact, drafts, monkeypatch
):
    """By XLA's own count of what a step holds beside what it is given; nothing runs."""
    config = model("MA", vocab_size=30011)
    settings = EngineConfig(
        max_rows=max_rows,
        max_model_len=64,
        prefill_tokens=64,
        exact=exact,
        speculation=SpeculationConfig(num_tokens=drafts) if drafts else None,
    )
    engine = Engine(config, random_params(config, 0), settings)
    runner = engine.runner
    held, compiled = count_held(runner, monkeypatch)
    variants = (Variant(), Variant(20, True))[exact:]
    for kind in runner.kinds:
        for shape in kind.buckets():
            if shape.rows == max_rows or isinstance(kind, Fork):
                for variant in variants:
                    runner._warm_step(kind, shape, variant)
    hidden, following = jax.ShapeDtypeStruct((2, 64, 16), "float32"), np.zeros((2, 64), np.int32)
    compiled("prompt_logprobs", following.shape)(runner.params, hidden, following)
    small = 2**20  # layers of width 16, and what is reported
    counted = engine.sizes.logits_bytes
    assert max(held.values()) <= counted + small, held
    assert max(held.values()) >= 0.75 * counted, held


WIDE = {
    "attention": residual_layer(
        mixers=(Attention(num_heads=16, num_kv_heads=16, head_dim=64),), mlp=MLP(width=512)
    ),
    "mamba": residual_layer(mixers=(Mamba2(num_heads=16, head_dim=64, state_size=64),)),
    "mamba1": residual_layer(mixers=(Mamba1(inner_size=1024, state_size=16, dt_rank=32),)),
    "short": residual_layer(mixers=(ShortConv(size=512),)),
    "gated": residual_layer(
        mixers=(Attention(num_heads=8, num_kv_heads=2, head_dim=64, gate=True, qk_norm=True),)
    ),
    "delta": residual_layer(
        mixers=(GatedDelta(num_key_heads=8, num_value_heads=16, key_dim=64, value_dim=64),)
    ),
    "mixture": residual_layer(
        mixers=(Attention(num_heads=4, num_kv_heads=2, head_dim=64),),
        mlp=MoE(num_experts=8, top_k=2, width=512),
    ),
    "latent": residual_layer(mixers=(Latent(num_heads=16, head_dim=64, rank=256),)),
    "fixed": residual_layer(mixers=(FixedDecay(num_heads=16, value_dim=64, key_dim=48),)),
    # Parts that make little, so that what blocks hold beside them counts.
    "joined": Layer(
        blocks=(
            Block(
                parts=(Attention(num_heads=2, num_kv_heads=1, head_dim=8),),
                reads="joined",
                adds=None,
                change=LowRank(matrices=("qkv", "out"), rank=8),
            ),
            Block(parts=(MLP(width=8),)),
            Block(parts=(MLP(width=8),), reads="both"),
        )
    ),
}


# Blocks of layers, and settings of an engine.
STEPS = {
    "attention_prefill": (["attention"], {"max_rows": 2, "prefill_tokens": 512}),
    "attention_rows": (["attention"], {"max_rows": 256}),
    "attention_mamba_rows": (["attention", "mamba"], {"max_rows": 128}),
    "attention_mamba_exact": (["attention", "mamba"], {"max_rows": 64, "exact": True}),
    "delta_prefill": (["delta"], {"max_rows": 2, "prefill_tokens": 512}),
    "gated_delta_rows": (["gated", "delta"], {"max_rows": 128}),
    "short_prefill": (["short"], {"max_rows": 2, "prefill_tokens": 512}),
    "mamba1_prefill": (["mamba1"], {"max_rows": 2, "prefill_tokens": 512}),
    "mamba1_attention_exact": (["mamba1", "attention"], {"max_rows": 64, "exact": True}),
    "short_attention_exact": (["short", "attention"], {"max_rows": 64, "exact": True}),
    "gated_delta_exact": (["gated", "delta"], {"max_rows": 64, "exact": True}),
    "mamba1_exact": (["mamba1"], {"max_rows": 64, "exact": True}),
    "mamba1_rows": (["mamba1"], {"max_rows": 64}),
    "attention_mamba_ngram": (
        ["attention", "mamba"],
        {"max_rows": 64, "speculation": SpeculationConfig()},
    ),
    "gated_delta_drafts15": (
        ["gated", "delta"],
        {"max_rows": 64, "speculation": SpeculationConfig(num_tokens=15)},
    ),
    "mamba1_ngram": (["mamba1"], {"max_rows": 64, "speculation": SpeculationConfig()}),
    "short_ngram": (["short"], {"max_rows": 64, "speculation": SpeculationConfig()}),
    "mamba_mtp": (["mamba"], {"max_rows": 64, "speculation": SpeculationConfig(method="mtp")}),
    "short_attention_few": (["short", "attention"], {"max_rows": 2}),
    "short_mtp": (
        ["short"],
        {"max_rows": 2, "prefill_tokens": 512, "speculation": SpeculationConfig(method="mtp")},
    ),
    "short_draft": (["short"], {"max_rows": 64, "speculation": SpeculationConfig(method="draft")}),
    "short_tree": (
        ["short"],
        {"max_rows": 64, "speculation": SpeculationConfig(method="draft", tree=(0,))},
    ),
    "latent_mamba_exact": (["latent", "mamba"], {"max_rows": 64, "exact": True}),
    "fixed_prefill": (["fixed"], {"max_rows": 2, "prefill_tokens": 512}),
    "fixed_attention_exact": (["fixed", "attention"], {"max_rows": 64, "exact": True}),
    # With our own products fewer bytes are held: they copy no expert.
    "mixture_few": (["mixture"], {"max_rows": 2, "kernels": "xla"}),
    "joined_prefill": (["joined", "joined"], {"max_rows": 2, "prefill_tokens": 2048}),
}


@pytest.mark.as_users
@pytest.mark.usefixtures("no_compile_cache")
@pytest.mark.parametrize("kinds, settings", STEPS.values(), ids=STEPS)
@left_to_all(
    "attention_mamba_rows]",
    "attention_mamba_exact]",
    "mamba1_attention_exact]",
    "short_attention_exact]",
    "gated_delta_exact]",
    "attention_mamba_ngram]",
    "gated_delta_drafts15]",
    "mamba1_ngram]",
    "mamba_mtp]",
    "short_mtp]",
)
def test_no_step_holds_more_than_is_counted_for_temporaries(kinds, settings, monkeypatch):
    layers = tuple(WIDE[kind] for kind in kinds)
    config = ModelConfig(family="test", layers=layers, vocab_size=64, width=512, max_position=256)
    method = getattr(settings.get("speculation"), "method", None)
    if method == "mtp":
        config = replace(config, mtp=(WIDE["attention"],))
    if method == "draft":
        config = replace(config, draft=replace(config, layers=(WIDE["attention"], WIDE["delta"])))
    held, counted = held_and_counted(
        config, EngineConfig(**{"prefill_tokens": 64} | settings), monkeypatch
    )
    assert max(held.values()) <= counted, (held, counted)
    assert max(held.values()) >= 0.25 * counted, (held, counted)


def held_and_counted(config, engine, monkeypatch):
    """Bytes that the largest step of each kind holds beside what it is given, and what is counted for them."""
    found = find_room(config, engine, Device())
    params = jax.eval_shape(lambda: random_params(config, 0))
    monkeypatch.setattr(
        runners, "make_state", lambda specs: jax.eval_shape(lambda: make_state(specs))
    )
    geometry = make_geometry(config, engine)
    runner = Runner(
        config,
        params,
        engine,
        geometry,
        kernels=choose_kernels(config, geometry, engine, Device()),
        num_frames=found.sizes.num_frames,
        max_slots=found.sizes.max_slots,
        max_model_len=found.sizes.max_model_len,
    )
    runner.adjust = jax.eval_shape(lambda: make_adjust(config, engine.max_rows))
    held, _ = count_held(runner, monkeypatch)
    largest = {}
    for kind in runner.kinds:
        for shape in kind.buckets():
            largest[kind] = shape  # they come in order of size
    for kind, shape in largest.items():
        if not isinstance(kind, Fork):
            runner._warm_step(kind, shape, Variant(20, True) if engine.exact else Variant())
    return held, found.temporary_bytes + found.sizes.logits_bytes


@pytest.mark.as_users
@pytest.mark.usefixtures("no_compile_cache")
@pytest.mark.parametrize("kind", ["attention", "mixture"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@left_to_all(*(f"{case}-" for case in CASES if case not in ("fp8_blocks", "int4")))
@left_to_all("fp8_blocks-attention]", "int4-mixture]")
def test_what_products_with_codes_hold_is_counted(case, kind, monkeypatch):
    config = ModelConfig(
        family="test",
        layers=(WIDE[kind], WIDE["mamba"], WIDE[kind]),
        vocab_size=64,
        width=512,
        max_position=256,
    )
    engine = EngineConfig(prefill_tokens=64, max_rows=2)
    held, counted = held_and_counted(kept(config, case.format), engine, monkeypatch)
    assert 0.25 * counted <= max(held.values()) <= counted, (held, counted)


def test_a_product_with_codes_is_counted_for_the_tokens_that_it_is_made_for():
    """Those of a step, and of a head those that are drawn."""
    narrow = Scaled(code="int4", group=4)

    def held(vocab_size: int, **settings) -> int:
        engine = EngineConfig(**{"max_rows": 8, "prefill_tokens": 512} | settings)
        config = model("A", tie_embeddings=False, vocab_size=vocab_size)
        own = temporary_bytes(kept(config, narrow), engine, backend=XLA)
        return own - temporary_bytes(config, engine, backend=XLA)

    def product_bytes(shape: tuple[int, int], tokens: int) -> int:
        return narrow.tile_bytes(shape, "float32") + tokens * narrow.token_bytes(shape, "float32")

    head = model("A").width, 4000
    assert held(4000) == product_bytes(head, PROMPT_POSITIONS)
    assert held(4000, max_rows=20, exact=True) == product_bytes(head, PROMPT_POSITIONS)
    assert held(4000, max_rows=600) == product_bytes(head, 600)
    drafts = SpeculationConfig(num_tokens=3)
    assert held(4000, max_rows=600, speculation=drafts) == product_bytes(head, 2400)
    assert held(31) < held(31, max_rows=600) < product_bytes(head, 600)


def test_the_tile_that_is_counted_is_the_one_that_is_computed():
    assert mamba1.TILE == selective_scan_xla.TILE


def test_a_row_pays_for_its_logits():
    found = [sizes(model("AA", vocab_size=n), EngineConfig(max_rows=64))[0] for n in (100, 1100)]
    assert found[1].logits_bytes - found[0].logits_bytes == 64 * LOGITS_OF_A_ROW * 4 * 1000
    assert found[1].adjust_bytes - found[0].adjust_bytes == 65 * 8 * 1000
    small, _ = sizes(model("AA"), EngineConfig(max_rows=1))
    assert small.logits_bytes == PROMPT_POSITIONS * LOGITS_OF_A_POSITION * 4 * 31
    memory = {"max_rows": 64, "memory": 10**7}
    few, _ = sizes(model("AA", vocab_size=100), EngineConfig(**memory))
    many, geometry = sizes(model("AA", vocab_size=1100), EngineConfig(**memory))
    grown = many.logits_bytes + many.adjust_bytes - few.logits_bytes - few.adjust_bytes
    assert few.num_frames - many.num_frames == pytest.approx(grown / geometry.frame_bytes, abs=1)


def test_more_rows_cost_rings_and_leave_fewer_frames():
    found = [sizes(model("MAM"), EngineConfig(memory=10**7, max_rows=n))[0] for n in (1, 8, 64)]
    assert found[0].ring_bytes < found[1].ring_bytes < found[2].ring_bytes
    assert found[0].num_frames > found[1].num_frames > found[2].num_frames


def test_rings_that_alone_exceed_the_memory_are_refused_with_the_rows():
    with pytest.raises(ValueError, match="rings and logits of 4,096 rows .* lower max_rows"):
        sizes(model("MAM"), EngineConfig(memory=10**6, max_rows=4096))


def test_the_default_holds_every_row_at_full_length_and_checkpoints_beside():
    engine = EngineConfig(max_rows=4)
    found, geometry = sizes(model("MAM"), engine)
    assert found.max_model_len == 1024
    each = geometry.num_pages(1024) * geometry.frames_per_page + geometry.state_frames
    assert found.num_frames - 1 >= 4 * each
    assert found.max_slots >= 4 * 8
    far, geometry = sizes(model("MAM", max_position=10**6), engine)
    each = geometry.num_pages(DEFAULT_LENGTH) * geometry.frames_per_page
    assert 4 * each < far.num_frames < 8 * each + 400
    assert far.max_model_len == 10**6


@pytest.mark.parametrize("pattern", ["AA", "MA"])
def test_the_default_holds_what_the_cache_keeps_of_layers_with_a_window(pattern):
    """All pages without recurrent layers; with them, those that rows and checkpoints read."""
    near = Attention(num_heads=4, num_kv_heads=2, head_dim=8, sliding_window=40)
    config = model(pattern, max_position=DEFAULT_LENGTH)
    layers = [
        layer.with_mixers(near if isinstance(mixer, Attention) else mixer for mixer in layer.mixers)
        for layer in config.layers
    ]
    found, geometry = sizes(replace(config, layers=tuple(layers)), EngineConfig(max_rows=4))
    assert found.num_frames - 1 >= 4 * (
        geometry.row_frames(DEFAULT_LENGTH) + 7 * geometry.cached_frames(DEFAULT_LENGTH)
        if geometry.has_state
        else geometry.cached_frames(DEFAULT_LENGTH)
    )
    whole = 4 * (
        geometry.num_pages(DEFAULT_LENGTH) * geometry.frames_per_page + 9 * geometry.state_frames
    )
    assert (found.num_frames - 1 < whole) == geometry.has_state


def test_the_default_stays_within_the_machine_but_serves_one_short_sequence():
    config, engine = model("MAM"), EngineConfig(max_rows=4)
    least = least_memory(config, max_rows=4)
    for limit in (least, least + 54321, 2 * least):
        found, _ = sizes(config, engine, default_limit=limit)
        assert found.total_bytes <= limit
    whole, _ = sizes(config, engine)
    assert sizes(config, engine, default_limit=10**12)[0] == whole
    tight, _ = sizes(config, engine, default_limit=0)
    assert tight.total_bytes <= least
    explicit = EngineConfig(max_rows=4, memory=3 * least)
    assert sizes(config, explicit, default_limit=0) == sizes(config, explicit)


@pytest.mark.parametrize("pattern", ["MAM", "AA", "MM"])
def test_a_default_for_very_short_sequences_is_never_refused(pattern):
    for length in (2, 3, 16, 40):
        engine = EngineConfig(max_rows=1, max_model_len=length, page_tokens=16)
        found, _ = sizes(model(pattern), engine)
        assert found.max_model_len == length and found.num_frames >= 2


def test_slots_are_bounded_and_a_model_without_state_has_none():
    found, geometry = sizes(model("M"), EngineConfig(memory=2 * 10**9))
    assert found.max_slots <= MAX_SLOTS
    assert (found.num_frames - 1) // geometry.state_frames > MAX_SLOTS
    assert sizes(model("AA"), EngineConfig())[0].max_slots == 2


def test_a_longer_model_than_there_is_is_refused():
    with pytest.raises(
        ValueError, match="max_model_len must be at most the model's 1024, got 2000"
    ):
        sizes(model("MAM"), EngineConfig(max_model_len=2000))
    assert sizes(model("MAM"), EngineConfig(max_model_len=100))[0].max_model_len == 100


def running(config, engine, sizes, backend=XLA, not_triton=None, left_to_xla=None):
    """What is known of an engine that runs."""
    return SimpleNamespace(
        config=config,
        engine_config=engine,
        sizes=sizes,
        device=Device(),
        backend=backend,
        about_disk="",
        not_triton=not_triton or {},
        left_to_xla=left_to_xla or {},
        about_products="",
        max_model_len=256,
    )


def test_a_hybrid_says_what_a_resume_point_costs_and_how_many_fit():
    config = model("MMA")
    engine = EngineConfig(
        memory=1 << 20, max_rows=1, max_model_len=256, cache=CacheConfig(policy="adaptive")
    )
    found, geometry = sizes(config, engine)
    # 122 frames of 8 KiB; a page of 64 tokens is one, a checkpoint one for each mixer and one for both's columns.
    assert (found.num_frames, geometry.frame_bytes, geometry.state_frames) == (123, 8192, 3)
    told = overview(running(config, engine, found), weight_bytes=0, sampling=SamplingParams())
    assert told.splitlines()[-2] == (
        "cache     adaptive; prompts resume at multiples of 32 tokens with a checkpoint of 24 KiB, as much as 192 "
        "tokens of KV; 40 of them fit"
    )


def test_a_new_way_to_draft_is_described_by_its_own_words(monkeypatch):
    assert METHODS.keys() == DRAFTERS.keys()
    monkeypatch.setitem(METHODS, "sibling", "told by a sibling")
    settings = SpeculationConfig(method="sibling", num_tokens=3, adaptive=False)
    engine = EngineConfig(memory=1 << 20, max_rows=1, max_model_len=256, speculation=settings)
    found, _ = sizes(model("A"), engine)
    told = overview(running(model("A"), engine, found), weight_bytes=0, sampling=SamplingParams())
    assert "drafts    3 tokens a step, told by a sibling" in told.splitlines()


def test_kernels_that_a_cpu_interprets_are_said_to_be_slow():
    config, engine = model("A"), EngineConfig(memory=1 << 20, max_rows=1, max_model_len=256)
    found, _ = sizes(config, engine)
    for backend in BACKENDS.values():
        made = running(config, engine, found, backend)
        told = overview(made, weight_bytes=0, sampling=SamplingParams())
        slow = "made of Pallas kernels, interpreted on a CPU, many times slower; leave kernels out"
        assert (slow in told) == (backend.name == "pallas")


def test_where_the_loop_over_steps_runs_is_said_where_there_is_a_choice():
    config, engine = model("A"), EngineConfig(memory=1 << 20, max_rows=1, max_model_len=256)
    made = running(config, engine, sizes(config, engine)[0])

    def told(**loops: str) -> list[str]:
        lines = overview(made, weight_bytes=0, sampling=SamplingParams(), **loops).splitlines()
        return [line for line in lines if line.startswith("loop")]

    assert told() == []
    assert told(loops=Loops().about) == ["loop      of 8 steps: the GPU loops over them"]
    by_the_host = Loops(inside=False, why_not="needs a driver of CUDA 12.3, found 12.2")
    assert told(loops=by_the_host.about) == [
        "loop      of 8 steps: the host starts each step, because a loop needs a driver of CUDA 12.3, found 12.2"
    ]


MISSING, OLD = "needs the package triton: pip", "they failed a trial: RuntimeError: an old driver"


@pytest.mark.parametrize(
    ("layers", "not_triton", "said"),
    [
        ("MMA", {}, "prompts are scanned and tokens drawn by Triton kernels"),
        (
            "MMA",
            {"sampling": OLD},
            f"prompts are scanned by Triton kernels; tokens are not drawn by them: {OLD}",
        ),
        (
            "MMA",
            {"scan": OLD},
            f"tokens are drawn by Triton kernels; prompts are not scanned by them: {OLD}",
        ),
        ("MMA", {"scan": MISSING, "sampling": MISSING}, f"not used: {MISSING}"),
        (
            "MMA",
            {"scan": "a", "sampling": "b"},
            "prompts are not scanned by Triton kernels: a; tokens are not drawn by them: b",
        ),
        ("AA", {}, "tokens are drawn by Triton kernels"),
        ("AA", {"sampling": MISSING}, f"not used: {MISSING}"),
    ],
)
def test_what_triton_kernels_do_is_said_where_there_is_a_choice(layers, not_triton, said):
    config = model(layers)

    def lines(kernels: str, *, exact: bool = False) -> list[str]:
        engine = EngineConfig(memory=1 << 20, max_rows=1, max_model_len=256, exact=exact)
        made = running(config, engine, sizes(config, engine)[0], BACKENDS[kernels], not_triton)
        told = overview(made, weight_bytes=0, sampling=SamplingParams())
        return [line for line in told.splitlines() if "Triton" in line or "triton" in line]

    assert lines("pallas") == [f"triton    {said}"]
    assert lines("xla") == []
    if not not_triton:  # exact mode scans nothing
        assert lines("pallas", exact=True) == ["triton    tokens are drawn by Triton kernels"]


@pytest.mark.parametrize("backend", [XLA, PALLAS])
def test_a_checkpoint_that_becomes_int8_counts_where_no_step_holds_more(backend):
    config, engine = model("MA"), EngineConfig(cache=CacheConfig(checkpoints="int8"))
    wide, narrow = make_geometry(config, engine).checkpoint_frames
    made = narrowing_bytes(config, engine, backend=backend)
    assert narrow < wide and made > wide * make_geometry(config, engine).frame_bytes
    assert narrowing_bytes(config, EngineConfig(), backend=backend) == 0
    plain = temporary_bytes(config, EngineConfig(), backend=backend)
    assert temporary_bytes(config, engine, backend=backend) == max(plain, made)
    with mock.patch.object(temporaries, "_step_bytes", lambda *_, **__: 1):
        assert temporary_bytes(config, engine, backend=backend) == made
