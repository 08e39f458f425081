"""Rows of a dispatch as one int32 array: what the host writes is what the step reads."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from hybrid_jax.config import EngineConfig
from hybrid_jax.config.sampling_params import SamplingParams
from hybrid_jax.engine import pack
from hybrid_jax.engine.sampling import unpack_sampling
from hybrid_jax.engine.steps.decode import Decode
from hybrid_jax.engine.steps.exact import Exact, ExactBucket
from hybrid_jax.engine.steps.fork import Fork, ForkBucket
from hybrid_jax.engine.steps.prefill import Prefill
from hybrid_jax.schedule.bucket import DecodeBucket, PrefillBucket
from hybrid_jax.schedule.request import Request

PAGES, NO_PAGES = (
    SimpleNamespace(geometry=SimpleNamespace(frames_per_page=frames), speculation=None)
    for frames in (2, 0)
)
LAYOUTS = {
    "prefill": Prefill(EngineConfig(), PAGES, 5).layout(PrefillBucket(2, 32, 5)),
    "fork": Fork(EngineConfig(), PAGES, 5).layout(ForkBucket(2)),
    "decode": Decode(EngineConfig(), PAGES, 5).layout(DecodeBucket(2, 4, 5)),
    "exact": Exact(EngineConfig(), PAGES, 5).layout(ExactBucket(2, 32, 5)),
    "prefill_without_attention": Prefill(EngineConfig(), NO_PAGES, 5).layout(
        PrefillBucket(2, 8, 1)
    ),
    "decode_without_attention": Decode(EngineConfig(), NO_PAGES, 5).layout(DecodeBucket(2, 4, 1)),
}


def request(**settings) -> Request:
    settings = {"seed": 0, "params": SamplingParams()} | settings
    return Request(request_id="r", prompt=[1], **settings)


@pytest.mark.parametrize("name", LAYOUTS)
def test_fields_cover_the_row_without_overlap(name):
    layout = LAYOUTS[name]
    names = [field for field, _ in layout.fields]
    assert len(set(names)) == len(names)
    owners = np.zeros(layout.size, int)
    for field in names:
        owners[layout.spans[field]] += 1
    assert (owners == 1).all()


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_field_comes_back_and_no_other_changes(name):
    layout, rng = LAYOUTS[name], np.random.default_rng(0)
    batch, wrote = np.zeros((3, layout.size), np.int32), {}
    for row in (0, 2):
        for field, width in layout.fields:
            wrote[row, field] = rng.integers(-(2**31), 2**31 - 1, width)
            layout.set(batch, row, field, wrote[row, field] if width > 1 else wrote[row, field][0])
    for field, width in layout.fields:
        for read in (layout.get(batch, field), layout.get(jnp.asarray(batch), field)):
            assert read.shape == ((3,) if width == 1 else (3, width))
            np.testing.assert_array_equal(np.ravel(read[0]), wrote[0, field])
            np.testing.assert_array_equal(np.ravel(read[2]), wrote[2, field])
    assert not batch[1].any()


def test_a_shorter_value_fills_the_front():
    layout = LAYOUTS["prefill"]
    batch = np.full((1, layout.size), 9, np.int32)
    layout.set(batch, 0, "tokens", [4, 5])
    np.testing.assert_array_equal(layout.get(batch, "tokens")[0], [4, 5] + [9] * 30)


def test_an_unknown_field_is_named():
    with pytest.raises(KeyError, match="nothing"):
        LAYOUTS["decode"].spans["nothing"]


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 + 5, 2**63 - 1])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_sampling_parameters_come_back(layout, seed):
    params = SamplingParams(temperature=0.7, top_k=40, top_p=0.93)
    batch = np.full((2, layout.size), 77, np.int32)
    pack.set_sampling(
        layout,
        batch,
        1,
        request(params=params, seed=seed, sample_index=3, stop_ids=frozenset({9, 260, 0})),
    )
    rows = unpack_sampling(layout, jnp.asarray(batch))
    low, high = np.asarray(rows.seed[1], np.uint64)
    assert int(low) | int(high) << 32 == seed
    assert rows.sample_index[1] == 3
    assert rows.temperature[1] == np.float32(0.7) and rows.top_p[1] == np.float32(0.93)
    assert rows.top_k[1] == 40
    np.testing.assert_array_equal(rows.stop_ids[1], [0, 9, 260] + [-1] * (pack.MAX_STOP_IDS - 3))


@pytest.mark.parametrize("top_k", [-1, 0])
def test_no_top_k_is_zero_on_the_device(top_k):
    layout = LAYOUTS["decode"]
    batch = np.zeros((1, layout.size), np.int32)
    pack.set_sampling(layout, batch, 0, request(params=SamplingParams(top_k=top_k)))
    assert layout.get(batch, "top_k")[0] == 0


@pytest.mark.parametrize("given, drawn_at", [(None, 1.0), (0.5, 0.5), (0.0, 0.0)])
def test_no_temperature_is_one_on_the_device(given, drawn_at):
    layout = LAYOUTS["decode"]
    batch = np.zeros((1, layout.size), np.int32)
    pack.set_sampling(layout, batch, 0, request(params=SamplingParams(temperature=given)))
    assert unpack_sampling(layout, jnp.asarray(batch)).temperature[0] == drawn_at


def test_as_many_stop_ids_as_there_is_room_for():
    layout = LAYOUTS["decode"]
    batch = np.zeros((1, layout.size), np.int32)
    stops = frozenset(range(5, 5 + pack.MAX_STOP_IDS))
    pack.set_sampling(layout, batch, 0, request(stop_ids=stops))
    assert set(layout.get(batch, "stop_ids")[0].tolist()) == stops


def test_page_tables_are_group_major_and_padded_with_the_sink():
    layout = LAYOUTS["prefill"]
    batch = np.zeros((2, layout.size), np.int32)
    pack.set_pages(layout, batch, 1, np.array([(3, 4), (8, 6), (5, 7)]))
    table = pack.get_pages(layout, batch, 2)
    np.testing.assert_array_equal(table[1], [[3, 8, 5, 0, 0], [4, 6, 7, 0, 0]])
    assert not table[0].any()


@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_model_without_attention_has_an_empty_table(count):
    layout = LAYOUTS["decode_without_attention"]
    batch = np.zeros((1, layout.size), np.int32)
    pack.set_pages(layout, batch, 0, np.zeros((count, 0), np.int32))
    assert not batch.any()


def test_forbidden_tokens_alone_adjust_the_logits():
    assert not request().adjusts_logits
    assert request(forbidden_ids=frozenset({3})).adjusts_logits


@pytest.mark.parametrize("order", [1, -1])
def test_a_decode_dispatch_is_as_long_as_its_longest_row_and_as_wide_as_its_last(order):
    """A row without steps left between two others still has its line."""
    engine = EngineConfig(max_rows=8, shapes="fine")
    decode = Decode(engine, PAGES, 5)
    pages = np.zeros((1, 2), np.int32)
    rows = [
        SimpleNamespace(row=row, num_tokens=n, num_steps=n, pages=pages)
        for row, n in ((0, 1), (4, 3))
    ]
    assert decode.rest(rows[::order], None) == (3,)
    assert decode.bucket(rows[::order], None).rows >= 5 > decode.shapes.decode_rows[0]
