"""Bucket choice: the smallest shape that fits, few shapes, every choice among those warmed up."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_jax.config import EngineConfig
from hybrid_jax.engine.steps.exact import ExactBucket
from hybrid_jax.engine.steps.fork import ForkBucket
from hybrid_jax.engine.steps.table import kinds_of
from hybrid_jax.schedule.bucket import shapes_of

ANY_MODEL = SimpleNamespace(config=SimpleNamespace(later=()))  # without a cut


def all_buckets(engine, *, max_pages):
    """Every bucket of all kinds of steps; the model does not matter."""
    kinds = kinds_of(engine, ANY_MODEL, max_pages)
    return [shape for kind in kinds for shape in kind.buckets()]


def test_the_default_engine_compiles_few_shapes():
    engine = EngineConfig()
    assert shapes_of(engine).prefill_rows == (1, 4, 8)
    assert shapes_of(engine).prefill_tokens == (32, 128, 256, 512)
    assert shapes_of(engine).decode_rows == (1, 4, 8)
    assert shapes_of(engine).decode_steps == 8
    assert shapes_of(engine).widths(64)[-1] == 64 and shapes_of(engine).widths(0) == (1,)
    assert len(all_buckets(engine, max_pages=16)) <= 7 + 6


def test_a_gpu_engine_compiles_few_shapes():
    engine = EngineConfig(max_rows=256, prefill_tokens=8192, shapes="coarse")
    assert shapes_of(engine).prefill == (
        *((1, 128), (4, 128), (1, 384), (4, 384), (1, 896), (1, 2560), (1, 8192)),
    )
    assert shapes_of(engine).decode_rows == (1, 64, 256)
    assert shapes_of(engine).widths(2048) == (2048,)
    shapes = all_buckets(engine, max_pages=2048)
    assert sum(isinstance(shape, ForkBucket) for shape in shapes) == 1
    assert len(shapes) + 2 <= 13  # and one that writes slots, and one that moves rows


@pytest.mark.parametrize(
    "tokens, chunks",
    [
        *((100, [100]), (128, [128]), (129, [129]), (385, [384, 1]), (400, [384, 16])),
        *((832, [832]), (900, [896, 4]), (1300, [896, 384, 20]), (1600, [896, 704])),
        *((2100, [896, 896, 308]), (2400, [2400]), (3000, [2560, 384, 56]), (5000, [2560, 2440])),
        *((8000, [8000]), (8192, [8192]), (8200, [8192, 8])),
        (20000, [8192, 8192, 2560, 896, 160]),
    ],
)
def test_a_prompt_is_cut_so_that_little_is_padded(tokens, chunks):
    engine = EngineConfig(max_rows=256, prefill_tokens=8192, shapes="coarse")
    found = []
    while tokens:
        found.append(shapes_of(engine).first_chunk(tokens))
        tokens -= found[-1]
    assert found == chunks


@given(tokens=st.integers(1, 30000))
def test_padding_of_a_prompt_stays_within_a_half_and_the_shortest_shapes(tokens):
    engine = EngineConfig(max_rows=256, prefill_tokens=8192, shapes="coarse")
    rest, padded = tokens, 0
    while rest:
        chunk = shapes_of(engine).first_chunk(rest)
        shape = shapes_of(engine).prefill_bucket(
            num_rows=1, num_tokens=chunk, num_pages=0, max_pages=0
        )
        padded += shape.tokens
        assert rest == chunk or chunk % engine.grain == 0
        rest -= chunk
    assert padded <= max(128, 1.5 * tokens + 1.5 * 128)
    assert padded < tokens + 4 * 128


@pytest.mark.parametrize(
    "longest, sizes",
    [
        (512, (128, 512)),
        (1024, (128, 384, 1024)),
        (2048, (128, 384, 896, 2048)),
        (4096, (128, 384, 896, 2560, 4096)),
    ],
)
def test_coarse_shapes_leave_out_sizes_near_the_longest(longest, sizes):
    engine = EngineConfig(max_rows=64, prefill_tokens=longest, shapes="coarse")
    assert shapes_of(engine).prefill_tokens == sizes


def test_a_hit_of_most_of_a_prompt_leaves_one_dispatch_with_little_padding():
    engine = EngineConfig(max_rows=256, prefill_tokens=8192, shapes="coarse")
    left = 8192 - 8192 * 9 // 10 // engine.grain * engine.grain
    assert left == 832 == shapes_of(engine).first_chunk(left)
    assert shapes_of(engine).prefill_of(left) == (896, (1,))


def test_exact_mode_has_one_shape():
    engine = EngineConfig(exact=True, max_rows=6)
    assert all_buckets(engine, max_pages=33) == [ExactBucket(6, 32, 33)]


def test_more_than_the_largest_names_the_limit():
    engine = EngineConfig(max_rows=4)
    with pytest.raises(ValueError, match=r"tokens of a prefill chunk must be at most 512, got 513"):
        shapes_of(engine).prefill_bucket(num_rows=1, num_tokens=513, num_pages=1, max_pages=64)
    with pytest.raises(ValueError, match=r"rows of a decode dispatch must be at most 4, got 5"):
        shapes_of(engine).decode_bucket(num_rows=5, num_pages=1, max_pages=64)


engines = st.builds(
    lambda rows, grain, chunks, steps, shapes: EngineConfig(
        max_rows=rows,
        grain=grain,
        prefill_tokens=grain * chunks,
        steps_per_dispatch=steps,
        shapes=shapes,
    ),
    st.integers(1, 70),
    st.sampled_from([8, 32]),
    st.integers(1, 40),
    st.integers(1, 8),
    st.sampled_from(["fine", "coarse"]),
)


@given(engine=engines, max_pages=st.integers(0, 3000), data=st.data())
def test_every_choice_fits_and_is_warmed_up(engine, max_pages, data):
    warm = all_buckets(engine, max_pages=max_pages)
    assert len(set(warm)) == len(warm)
    tokens = data.draw(st.integers(1, engine.prefill_tokens))
    rows = data.draw(st.integers(1, shapes_of(engine).prefill_of(tokens)[1][-1]))
    pages = data.draw(st.integers(0, max_pages))
    prefill = shapes_of(engine).prefill_bucket(
        num_rows=rows, num_tokens=tokens, num_pages=pages, max_pages=max_pages
    )
    assert prefill in warm and prefill.rows <= engine.max_rows
    assert prefill.rows >= rows and prefill.tokens >= tokens and prefill.width >= pages
    assert prefill.rows * prefill.tokens <= engine.prefill_tokens
    rows = data.draw(st.integers(1, engine.max_rows))
    steps = data.draw(st.integers(1, engine.steps_per_dispatch))
    decode = shapes_of(engine).decode_bucket(num_rows=rows, num_pages=pages, max_pages=max_pages)
    assert decode in warm
    assert decode.rows >= rows and decode.steps >= steps and decode.width >= pages
