"""Frames of real models, counts beside slow definitions, and shapes derived from them."""

import itertools
import math
from dataclasses import replace

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_jax.config import (
    MLP,
    Attention,
    EngineConfig,
    GatedDelta,
    Layer,
    Mamba2,
    ModelConfig,
    MoE,
    Rope,
    residual_layer,
    with_cut,
)
from hybrid_jax.config.arrays import ArraySpec
from hybrid_jax.costs import prefill_flops, weight_count
from hybrid_jax.geometry import (
    FP8,
    checkpoint_bytes,
    checkpoint_padding,
    fit_geometry,
    kv_bytes_per_token,
    make_geometry,
    page_padding,
    ring_specs,
    token_words,
)
from hybrid_jax.kinds.table import entry_of, recurrent_kind
from hybrid_jax.models.initialize import random_params
from hybrid_jax.state import state_specs
from tests import tiny_models

BF16 = EngineConfig(dtype="bfloat16")


def stack(num_attention: int, attention: Attention, num_mamba2: int, mamba: Mamba2) -> ModelConfig:
    """Mixers of both kinds; widths outside the caches do not matter here."""
    specs = (residual_layer(mixers=(attention,)),) * num_attention
    specs += (residual_layer(mixers=(mamba,)),) * num_mamba2
    return ModelConfig(family="real", vocab_size=8, width=8, layers=specs)


def attention(num_kv_heads: int, head_dim: int) -> Attention:
    return Attention(num_heads=num_kv_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)


def mamba(num_heads: int, head_dim: int, state_size: int, num_groups: int = 1) -> Mamba2:
    return Mamba2(
        num_heads=num_heads, head_dim=head_dim, state_size=state_size, num_groups=num_groups
    )


# Caches of published models: KV bytes a token, KiB of state a layer, tokens a page, frames a page
# and a checkpoint. Jamba (Mamba-1) and Qwen3-Next (gated delta net) are given as the Mamba-2 mixer
# with the same bytes.
REAL = {
    "jamba_1.5_mini": (4, attention(8, 128), 28, mamba(128, 64, 16), 16384, 512, 16, 1, 62),
    "7b_of_the_marconi_paper": (
        *(4, attention(32, 128), 24, mamba(64, 64, 128)),
        *(65536, 2048, 16, 4, 195),
    ),
    "nemotron_h_8b": (4, attention(8, 128), 24, mamba(128, 64, 128, 8), 16384, 4096, 16, 1, 390),
    "qwen3_next_80b": (12, attention(2, 256), 36, mamba(32, 128, 128, 16), 24576, 2048, 32, 3, 295),
    "bamba_9b": (3, attention(8, 128), 29, mamba(128, 64, 128), 12288, 4096, 64, 3, 470),
    "granite_4_h_small": (4, attention(8, 128), 36, mamba(128, 64, 128), 16384, 4096, 16, 1, 583),
    "granite_4_h_tiny": (4, attention(4, 128), 36, mamba(48, 64, 128), 8192, 1536, 32, 1, 219),
}


@pytest.mark.parametrize("name", REAL)
def test_real_models_fill_frames_of_256_kib(name):
    *parts, kv_bytes, state_kib, page_tokens, page_frames, state_frames = REAL[name]
    model = stack(*parts)
    tokens = [token_words(entry_of(mixer), BF16.dtype) for mixer in model.paged]
    layouts = [recurrent_kind(spec).layout(spec) for spec in model.recurrent]
    geometry = fit_geometry(tokens, layouts, BF16, min_page_tokens=16)
    assert geometry.frame_bytes == 256 * 1024
    assert kv_bytes_per_token(geometry) == kv_bytes
    assert 4 * geometry.groups[0].layout.state_words == state_kib * 1024
    assert (geometry.page_tokens, geometry.frames_per_page) == (page_tokens, page_frames)
    assert geometry.state_frames == state_frames
    assert checkpoint_bytes(geometry) == state_frames * 256 * 1024
    assert 0 <= checkpoint_padding(geometry) <= 0.013
    assert page_padding(geometry) == 0


def sizes(low: int, high: int) -> st.SearchStrategy[int]:
    return st.integers(low, high)


@settings(max_examples=60, deadline=None)
@given(
    num_attention=sizes(0, 9),
    num_mamba2=sizes(0, 9),
    kv_heads=sizes(1, 9),
    kv_width=sizes(1, 40),
    heads=sizes(1, 40),
    width=sizes(1, 70),
    state_size=sizes(1, 130),
    page_tokens=st.sampled_from([None, 16, 64]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)
def test_every_geometry_has_room_for_what_it_keeps(
    num_attention, num_mamba2, kv_heads, kv_width, heads, width, state_size, page_tokens, dtype
):
    if num_attention + num_mamba2 == 0:
        num_mamba2 = 1
    mixers = attention(kv_heads, 2 * kv_width), mamba(heads, width, state_size)
    model = stack(num_attention, mixers[0], num_mamba2, mixers[1])
    engine = EngineConfig(dtype=dtype, page_tokens=page_tokens)
    geometry = make_geometry(model, engine)
    item = 4 if dtype == "float32" else 2
    if num_attention:
        layers = num_attention // geometry.frames_per_page
        page = layers * geometry.page_tokens * 2 * kv_heads * 2 * kv_width * item
        assert page <= geometry.frame_bytes
        places = [(place.frame, place.offset) for place in geometry.kv]
        part = page // 4 // layers
        assert places == [(i // layers, i % layers * part) for i in range(num_attention)]
        assert page_padding(geometry) == pytest.approx(1 - page / geometry.frame_bytes)
        assert geometry.page_tokens == (page_tokens or geometry.page_tokens) >= 16
    else:
        assert not geometry.has_pages and geometry.num_pages(1000) == 0
    if num_mamba2:
        (group,) = geometry.groups
        assert geometry.states == tuple((0, layer) for layer in range(num_mamba2))
        in_frame = group.units_per_frame * 4 * width * state_size
        assert 0 < in_frame <= geometry.frame_bytes and group.units_per_frame <= heads
        assert group.frames_per_layer * group.units_per_frame >= heads
        assert (group.frames_per_layer - 1) * group.units_per_frame < heads
        conv = num_mamba2 * 4 * -(-3 * (heads * width + 2 * state_size) * item // 4)
        assert conv <= group.column_frames * geometry.frame_bytes < conv + geometry.frame_bytes
        used = conv + num_mamba2 * heads * 4 * width * state_size
        padding = 1 - used / checkpoint_bytes(geometry)
        assert checkpoint_padding(geometry) == pytest.approx(padding)
    else:
        assert geometry.state_frames == checkpoint_bytes(geometry) == 0


def test_pages_and_boundaries_of_a_position():
    geometry = make_geometry(stack(2, attention(2, 8), 1, mamba(2, 8, 8)), EngineConfig())
    tokens = geometry.page_tokens
    assert [geometry.num_pages(n) for n in (0, 1, tokens, tokens + 1)] == [0, 1, 1, 2]
    assert [geometry.align(p) for p in (0, 31, 32, 63)] == [0, 0, 32, 32]


@pytest.mark.parametrize(("num_attention", "num_mamba2"), [(0, 3), (2, 0), (2, 3)])
def test_the_longest_row_fits_and_no_longer_one(num_attention, num_mamba2):
    model = stack(num_attention, attention(2, 8), num_mamba2, mamba(2, 8, 8))
    geometry = make_geometry(model, EngineConfig(page_tokens=16 if num_attention else None))
    for num_frames in range(40):
        longest = geometry.longest_row(num_frames)
        assert longest == 0 or geometry.row_frames(longest) <= num_frames
        if longest < 1 << 40:
            assert geometry.row_frames(longest + 1) > num_frames


def test_a_grain_shorter_than_the_convolution_is_refused():
    mixer = Mamba2(num_heads=2, head_dim=8, state_size=8, conv_width=10)
    model = stack(0, attention(2, 8), 1, mixer)
    assert make_geometry(model, EngineConfig(grain=16)).grain == 16
    message = "grain must be at least conv_width - 1, got 8 and conv_width 10; raise grain"
    with pytest.raises(ValueError, match=message):
        make_geometry(model, EngineConfig(grain=8))


# --- shapes of the ring ---------------------------------------------------------------------------


def test_ring_specs_follow_the_mixer_and_the_window():
    model = stack(1, attention(2, 8), 5, mamba(6, 8, 16, 3))
    record, conv = 6 * 8 + 3 * 16, 6 * 8 + 2 * 3 * 16
    geometry = make_geometry(model, BF16)
    (specs,) = ring_specs(geometry, num_rows=4, window=3)
    assert specs["conv"].shape == (5, 4, 3 + 3, conv) and specs["conv"].dtype == "uint16"
    assert specs["uk"].shape == (5, 4, 32 + 2, record) and specs["uk"].dtype == "uint16"
    assert specs["dt"].shape == (5, 4, 32 + 2, 6) and specs["dt"].dtype == "float32"
    (aligned,) = ring_specs(geometry, num_rows=4, window=1, aligned=True)
    assert aligned["conv"].shape == (5, 4, 3 + 32, conv)
    assert aligned["uk"].shape == (5, 4, 32, record)
    (wide,) = ring_specs(make_geometry(model, EngineConfig()), num_rows=4, window=1)
    assert wide["uk"].dtype == wide["conv"].dtype == "uint32"
    assert wide["uk"].num_bytes == 4 * 5 * 4 * 32 * record


def test_a_model_without_recurrent_layers_has_an_empty_ring():
    model = stack(2, attention(2, 8), 0, mamba(2, 8, 8))
    assert ring_specs(make_geometry(model, EngineConfig()), num_rows=4, window=1) == ()


def test_bytes_of_an_array_spec():
    assert ArraySpec((2, 3, 5), "uint16").num_bytes == 60
    assert ArraySpec((2, 3, 5), "uint8").num_bytes == 30


def test_an_array_of_a_dtype_without_a_size_is_refused_where_it_is_described():
    with pytest.raises(ValueError, match=r"^ArraySpec: dtype must be .*, uint8.* got 'int4'$"):
        ArraySpec((2, 3), "int4")


# --- counts ---------------------------------------------------------------------------------------

SWA = Attention(
    num_heads=6, num_kv_heads=2, head_dim=8, sliding_window=5, qkv_bias=True, qk_norm=True
)
FULL = Attention(num_heads=4, num_kv_heads=2, head_dim=8, rope=Rope(dim=4), out_bias=True)
PLAIN = Mamba2(num_heads=6, head_dim=4, state_size=8, num_groups=3, norm_groups=3)
BIASED = Mamba2(
    num_heads=6, head_dim=4, state_size=8, num_groups=3, conv_bias=False, proj_bias=True
)
EXPERTS = MoE(num_experts=5, top_k=2, width=7)
LATENT = MoE(
    num_experts=6,
    top_k=3,
    width=9,
    kind="relu2",
    routing="sigmoid",
    num_groups=2,
    shared_width=11,
    latent_width=4,
    bias=True,
)
SHARED = MoE(num_experts=4, top_k=1, width=5, shared_width=6, bias=True)
MODELS = {
    "mixer_and_mlp": (
        residual_layer(mixers=(PLAIN,), mlp=MLP(width=20)),
        residual_layer(mixers=(FULL,), mlp=MLP(width=12, kind="relu2", bias=True)),
    ),
    "one_mixer_a_layer": (
        residual_layer(mixers=(BIASED,)),
        residual_layer(mlp=MLP(width=20, bias=True)),
        residual_layer(mixers=(SWA,)),
        residual_layer(mlp=LATENT),
    ),
    "experts": (residual_layer(mixers=(FULL,), mlp=EXPERTS), residual_layer(mlp=SHARED)),
    "parallel_mixers_and_shared_weights": (
        residual_layer(mixers=(FULL, PLAIN), mlp=MLP(width=8)),
        residual_layer(mixers=(PLAIN,)),
        residual_layer(mixers=(FULL, PLAIN), mlp=MLP(width=8)).again(0),
    ),
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_weight_count_is_the_number_of_weights(name, tied):
    model = ModelConfig(
        family="x", vocab_size=33, width=16, layers=MODELS[name], tie_embeddings=tied
    )
    params = random_params(model, seed=0)
    assert weight_count(model) == sum(leaf.size for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize("name", MODELS)
def test_prefill_flops_add_up_over_chunks(name):
    model = ModelConfig(family="x", vocab_size=33, width=16, layers=MODELS[name])
    whole = prefill_flops(model, 100)
    assert isinstance(whole, int)
    for split in (1, 4, 5, 6, 64, 99):
        assert prefill_flops(model, split) + prefill_flops(model, 100 - split, split) == whole
    assert prefill_flops(model, 0, 50) == 0


@pytest.mark.parametrize("window", [None, 1, 5, 200])
def test_attention_flops_count_each_visible_key(window):
    spec = Attention(num_heads=6, num_kv_heads=2, head_dim=8, sliding_window=window)
    model = ModelConfig(
        family="x", vocab_size=8, width=16, layers=(residual_layer(mixers=(spec,)),)
    )
    projections = 2 * 16 * (6 + 2 + 2 + 6) * 8
    for start, tokens in ((0, 1), (0, 40), (3, 9), (60, 12)):
        keys = sum(min(q + 1, window or math.inf) for q in range(start, start + tokens))
        want = tokens * projections + 4 * 6 * 8 * keys
        assert prefill_flops(model, tokens, start) == want


def test_recurrent_and_expert_flops_per_token():
    def per_token(*specs: Layer) -> int:
        return prefill_flops(ModelConfig(family="x", vocab_size=8, width=16, layers=specs), 1, 7)

    proj_in, proj_out = 16 * PLAIN.proj_size, 16 * PLAIN.inner_size
    conv = PLAIN.conv_size * (PLAIN.conv_width + 1)
    small = 3 * PLAIN.num_heads + PLAIN.inner_size
    want = 2 * (proj_in + proj_out + conv + small) + 6 * 6 * 4 * 8
    assert per_token(residual_layer(mixers=(PLAIN,))) == want
    router, expert = 16 * EXPERTS.num_experts, 3 * 16 * EXPERTS.width
    assert per_token(residual_layer(mlp=EXPERTS)) == 2 * (router + EXPERTS.top_k * expert)
    twice = MODELS["parallel_mixers_and_shared_weights"]
    assert per_token(twice[0]) * 2 + per_token(twice[1]) == per_token(*twice)


def test_layers_of_another_spec_are_another_group_even_if_they_cache_the_same():
    """A group folds by one kind and one spec."""
    one = Mamba2(num_heads=4, head_dim=8, state_size=16)
    other = Mamba2(num_heads=4, head_dim=8, state_size=16, dt_limits=(0.1, 1.0))
    layers = tuple(residual_layer(mixers=(spec,)) for spec in (one, other, one))
    geometry = make_geometry(ModelConfig(family="m", vocab_size=8, width=8, layers=layers), BF16)
    assert [(place.group, place.layer) for place in geometry.states] == [(0, 0), (1, 0), (0, 1)]
    assert [group.num_layers for group in geometry.groups] == [2, 1]


def test_a_state_of_two_kinds_has_at_most_twelve_donated_leaves():
    """Each one more is an argument of every step."""
    mamba = Mamba2(num_heads=4, head_dim=8, state_size=16)
    delta = GatedDelta(num_key_heads=2, num_value_heads=4, key_dim=8, value_dim=8)
    layers = tuple(residual_layer(mixers=(spec,)) for spec in (mamba, delta, mamba))
    model = ModelConfig(family="m", vocab_size=8, width=8, layers=layers)
    specs = state_specs(make_geometry(model, BF16), num_frames=4, max_slots=4, max_rows=2)
    assert len(jax.tree.leaves(specs)) == 4 + 3 + 3
    assert len(jax.tree.leaves(specs)) <= 12


def test_experts_work_in_the_latent_width():
    spec = MoE(num_experts=6, top_k=2, width=12, latent_width=4)
    model = ModelConfig(family="x", vocab_size=8, width=16, layers=(residual_layer(mlp=spec),))
    router, latent, expert = 16 * 6, 2 * 16 * 4, 3 * 4 * 12
    assert prefill_flops(model, 1, 7) == 2 * (router + latent + 2 * expert)


@pytest.mark.parametrize("name", sorted(tiny_models.MODELS))
def test_no_two_layers_share_words_of_a_page(name):
    geometry = make_geometry(tiny_models.MODELS[name](), EngineConfig())
    spans: dict[int, list[tuple[int, int]]] = {}
    for place in geometry.kv:
        end = place.offset + geometry.page_tokens * place.token_words
        spans.setdefault(place.frame, []).append((place.offset, end))
    for found in map(sorted, spans.values()):
        assert found[-1][1] <= geometry.frame_words
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(found))


@pytest.mark.parametrize("group", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_kv_bytes_with_a_cut_groups_and_fp8(group, kv_cache_dtype):
    """SwiftKV (arXiv 2410.03960, section 3.2) on 32 dense layers, half of them after the cut; scales are counted."""
    model = with_cut(stack(32, attention(8, 128), 0, mamba(1, 1, 1)), 16, kv_group=group)
    engine = replace(BF16, kv_cache_dtype=kv_cache_dtype)
    geometry = make_geometry(model, engine)
    layers = 16 + 16 // group
    each = 2 * 8 * (128 * 2 if kv_cache_dtype == "auto" else 128 + 4)
    assert kv_bytes_per_token(geometry) == layers * each
    held = geometry.frames_per_page * geometry.frame_bytes
    assert held == geometry.page_tokens * layers * each and page_padding(geometry) == 0
    saved = 1 - layers * each / (32 * 2 * 8 * 128 * 2)
    if (group, kv_cache_dtype) == (2, "fp8"):
        assert saved == pytest.approx(0.613, abs=5e-4)
    if (group, kv_cache_dtype) == (16, "auto"):
        assert saved == pytest.approx(0.46875)


def test_scales_of_fp8_lie_behind_the_elements_of_a_page():
    model = stack(3, attention(2, 8), 2, mamba(4, 8, 16))
    engine = EngineConfig(kv_cache_dtype="fp8", page_tokens=16)
    geometry = make_geometry(model, engine)
    assert (geometry.dtype, geometry.kv_dtype) == ("float32", FP8)
    for place in geometry.kv:
        assert (place.token_words, place.scale_words) == (2 * 2 * 8 // 4, 2 * 2)
    part = 16 * (8 + 4)
    assert [place.offset % part for place in geometry.kv] == [0, 0, 0]


def test_heads_that_do_not_fill_words_are_refused_for_fp8():
    with pytest.raises(ValueError, match="head sizes that are multiples of 4, got 6; use kv_cac"):
        make_geometry(
            stack(1, attention(2, 6), 1, mamba(1, 1, 1)), replace(BF16, kv_cache_dtype="fp8")
        )


def windowed(*windows, page_tokens=16, prefill_tokens=128):
    model = ModelConfig(
        family="windows",
        vocab_size=8,
        width=8,
        layers=tuple(
            residual_layer(mixers=(replace(attention(2, 8), sliding_window=window),))
            for window in windows
        ),
    )
    engine = EngineConfig(page_tokens=page_tokens, prefill_tokens=prefill_tokens)
    return make_geometry(model, engine)


def test_layers_of_two_windows_share_no_frame():
    geometry = windowed(30, None, 7, None, 30, None, 7, 30, None, 30)
    groups = [(group.window, group.first_frame, group.num_frames) for group in geometry.page_groups]
    assert [window for window, _, _ in groups] == [None, 7, 30]
    held = {window: set(range(first, first + count)) for window, first, count in groups}
    assert sum(len(frames) for frames in held.values()) == geometry.frames_per_page
    assert set().union(*held.values()) == set(range(geometry.frames_per_page))
    windows = (30, None, 7, None, 30, None, 7, 30, None, 30)
    for window, place in zip(windows, geometry.kv, strict=True):
        assert place.frame in held[window]
    assert len({(place.frame, place.offset) for place in geometry.kv}) == len(windows)


def test_one_window_for_all_layers_changes_no_place():
    some, none = windowed(30, 30, 30, 30), windowed(None, None, None, None)
    assert some.kv == none.kv and some.frame_words == none.frame_words
    assert some.page_groups[0].num_frames == none.page_groups[0].num_frames


@pytest.mark.parametrize("window", [1, 2, 16, 17, 90])
@pytest.mark.parametrize(("chunk", "span"), [(128, 128), (32, 2 * 32 + 1)])
def test_a_group_holds_every_page_that_a_window_and_a_span_touch(window, chunk, span):
    """The span is a chunk, or what a decoding row keeps behind its last resume point and is fed after it."""
    group = windowed(window, prefill_tokens=chunk).page_groups[0]
    touched = [
        (start + span - 1) // 16 - max(start - window + 1, 0) // 16 + 1 for start in range(1000)
    ]
    assert group.max_pages == max(touched)


def test_frames_of_a_row_with_windows_are_bounded():
    geometry = windowed(30, None)
    far = geometry.page_groups[0].num_frames
    one, two = geometry.page_frames(8000), geometry.page_frames(16000)
    assert two - one == far * 500
    assert windowed(30).row_frames(8000) == windowed(30).row_frames(10**9)
    for num_frames in (5, 60, 1000):
        longest = geometry.longest_row(num_frames)
        assert geometry.row_frames(longest) <= num_frames < geometry.row_frames(longest + 1)
