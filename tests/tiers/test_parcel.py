"""The form of what leaves an arena: what the engine's own reads find in frames, and the same for any geometry."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from hybrid_jax.config import Attention, CacheConfig
from hybrid_jax.config.arrays import FP8
from hybrid_jax.engine.frames import read_columns, read_state
from hybrid_jax.geometry import Geometry
from hybrid_jax.schedule.tiers.arrivals import places_in, wanted_frames
from hybrid_jax.state import Model
from hybrid_jax.tiers.form import Form
from hybrid_jax.tiers.parcel import (
    Frames,
    form_of,
    page_shapes,
    places_of,
    read_pages,
)
from pallas_kernels.paged_attention.layout import PageLayout
from tests.tiers.prefixes import geometry_of, joined, random_prefix, same
from tests.tiny_models import tiny_model

NAMES = ("mamba2", "qwen3_next", "jamba", "windowed", "with_unknown_kind", "with_two_shapes")
NAMES += ("with_cut", "with_latent", "with_fixed_decay", "llama", "lfm2")
WITH_FP8 = ("qwen3_next", "windowed", "with_cut", "with_latent", "llama", "lfm2")  # by size of head
FORMS = {
    "bfloat16": {"dtype": "bfloat16"},
    "fp8": {"kv_cache_dtype": "fp8"},
    "bfloat16 and fp8": {"dtype": "bfloat16", "kv_cache_dtype": "fp8"},
}
NARROW = {"cache": CacheConfig(checkpoints="int8")}
GEOMETRIES: dict[str, dict] = {
    "small pages": {"page_tokens": 16},
    "large pages": {"page_tokens": 512},
    "another grain": {"grain": 8, "prefill_tokens": 256},
}
POSITION = 352  # a page of 64 and a run of 256 end before it


def frames_for(geometry: Geometry, position: int) -> Frames:
    return Frames.zeros(geometry, places_in(wanted_frames(geometry, position)))


def filled(geometry: Geometry, position: int, seed: int = 0) -> tuple[dict, Frames]:
    """Random content, and frames that it was written to."""
    arrays, frames = random_prefix(geometry, position, seed), frames_for(geometry, position)
    Form(geometry).write_prefix(position, arrays, frames)
    return arrays, frames


@pytest.mark.parametrize(
    ("name", "form"),
    [(name, form) for name in NAMES for form in FORMS if "fp8" not in form or name in WITH_FP8],
)
def test_what_is_written_to_frames_is_read_from_them(name, form):
    geometry = geometry_of(name, **FORMS[form])
    for position in (geometry.grain, 64, POSITION):
        arrays, frames = filled(geometry, position)
        assert same(joined(Form(geometry).read_prefix(position, frames)), arrays)


@pytest.mark.parametrize("how", GEOMETRIES)
@pytest.mark.parametrize("name", NAMES)
def test_the_form_is_that_of_other_geometries(name, how):
    """Written from the frames of one, and read into those of another."""
    one, other = geometry_of(name), geometry_of(name, **GEOMETRIES[how])
    assert form_of(one) == form_of(other)
    arrays, frames = filled(one, POSITION)
    taken = frames_for(other, POSITION)
    Form(other).write_prefix(POSITION, joined(Form(one).read_prefix(POSITION, frames)), taken)
    assert same(joined(Form(other).read_prefix(POSITION, taken)), arrays)


@pytest.mark.parametrize("name", ["qwen3_next", "jamba", "with_unknown_kind"])
def test_a_narrow_checkpoint_is_one_run_of_words_in_any_frames(name):
    one, other = geometry_of(name, **NARROW), geometry_of(name, page_tokens=512, **NARROW)
    assert form_of(one) == form_of(other) != form_of(geometry_of(name))
    arrays, frames = filled(one, POSITION)
    assert len(frames.checkpoint) == one.cached_state_frames < one.state_frames
    assert arrays["narrow"].size > (one.cached_state_frames - 1) * one.frame_words
    taken = frames_for(other, POSITION)
    Form(other).write_prefix(POSITION, joined(Form(one).read_prefix(POSITION, frames)), taken)
    assert same(joined(Form(other).read_prefix(POSITION, taken)), arrays)


@pytest.mark.parametrize(
    "settings", [{"dtype": "bfloat16"}, {"kv_cache_dtype": "fp8"}], ids=["bfloat16", "fp8"]
)
def test_other_dtypes_have_another_form(settings):
    assert form_of(geometry_of("with_cut")) != form_of(geometry_of("with_cut", **settings))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_states_and_columns_are_those_that_the_engine_reads(name, dtype):
    config, _ = tiny_model(name, dtype)
    geometry = geometry_of(name, dtype=dtype)
    if not geometry.has_state:
        assert not any(array.startswith("state") for array in random_prefix(geometry, 64))
        return
    arrays, frames = filled(geometry, 64)
    model = Model(config, geometry)
    arena = jnp.asarray(np.concatenate([np.zeros_like(frames.checkpoint[:1]), frames.checkpoint]))
    ids = jnp.arange(1, geometry.state_frames + 1, dtype=jnp.int32)[None]
    exists = jnp.ones(1, bool)
    for number, place in enumerate(geometry.states):
        group = place.of(geometry)
        if group.layout.units:
            begin = group.state_frame(place.layer)
            own = ids[:, begin : begin + group.frames_per_layer]
            state = read_state(arena, own, exists, group, model)[0]
            assert np.asarray(state).tobytes() == arrays[f"state.{number}"].tobytes()
        if group.layout.columns:
            bits = read_columns(arena, ids, exists, place.layer, group, model)[0]
            assert np.asarray(bits).tobytes() == arrays[f"columns.{number}"].tobytes()


@pytest.mark.parametrize(
    ("name", "kv_cache_dtype"), [("with_two_shapes", "auto"), ("llama", "auto"), ("llama", "fp8")]
)
def test_pages_are_those_that_kernels_read(name, kv_cache_dtype):
    config, _ = tiny_model(name)
    geometry = geometry_of(name, kv_cache_dtype=kv_cache_dtype)
    arrays, frames = filled(geometry, 128)
    for number, (place, spec) in enumerate(zip(geometry.kv, config.mixers(Attention), strict=True)):
        layout = PageLayout(
            offset=place.offset,
            page_tokens=geometry.page_tokens,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            dtype=FP8 if kv_cache_dtype == "fp8" else "float32",
        )
        for page in range(2):
            words = frames.at(page, place.frame)[layout.offset :][: layout.page_words]
            elements, scales = layout.split(jnp.asarray(words))
            tokens = slice(page * 64, (page + 1) * 64)
            own = arrays[f"pages.{number}"][tokens]
            assert np.asarray(elements).tobytes() == own.tobytes()
            if scales is not None:
                own = arrays[f"scales.{number}"][tokens]
                assert np.asarray(scales).tobytes() == own.tobytes()


@pytest.mark.parametrize("how", GEOMETRIES)
def test_a_run_of_tokens_is_read_from_its_pages_alone(how):
    geometry = geometry_of("llama", **GEOMETRIES[how])
    arrays, frames = filled(geometry, POSITION)
    size = geometry.page_tokens
    places = places_of(geometry, POSITION, range(256 // size, -(-POSITION // size)))
    few = Frames({place: frames.pages[place] for place in places}, None)
    found = joined(read_pages(geometry, 256, POSITION, few.at))
    assert same(found, {name: arrays[name][256:] for name in page_shapes(geometry, 0, 1)})
    if size < 256:
        with pytest.raises(KeyError):
            read_pages(geometry, 192, POSITION, few.at)


def test_of_a_window_only_its_last_tokens_are_kept():
    geometry = geometry_of("windowed")
    windows = {group.window for group in geometry.windowed}
    arrays = random_prefix(geometry, POSITION)
    lengths = {len(array) for name, array in arrays.items() if name.startswith("window.")}
    assert lengths == {window - 1 for window in windows}
    early = random_prefix(geometry, geometry.grain)
    lengths = {len(array) for name, array in early.items() if name.startswith("window.")}
    assert lengths == {min(window - 1, geometry.grain) for window in windows}
