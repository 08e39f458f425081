"""Frames of the arena, bit for bit: each form beside plain indexing, and nothing touched beside its target."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.frame_io import (
    COPY,
    MOVE,
    READ,
    UNROLL_LIMIT,
    WRITE,
    copy_frames,
    move_words,
    read_frames,
    write_frames,
)
from tests.kernels.lowered import kernels_in

FAST = ("pallas", "xla")
ID_SHAPES = [(1,), (3, 4), (UNROLL_LIMIT + 1,)]

read = jax.jit(read_frames, static_argnames=("offset", "words", "implementation"))
write = jax.jit(write_frames, static_argnames=("offset", "implementation"))
copy = jax.jit(copy_frames, static_argnames="implementation")
move = jax.jit(move_words, static_argnames=("words", "implementation"))


def random_words(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).integers(0, 2**32, shape, np.uint32))


def shuffled_ids(shape: tuple[int, ...], num_frames: int, seed: int = 0) -> jax.Array:
    ids = np.random.default_rng(seed).permutation(np.arange(1, num_frames))[: np.prod(shape)]
    return jnp.asarray(ids.reshape(shape), jnp.int32)


@pytest.mark.parametrize("implementation", FAST)
class TestImplementation:
    @pytest.mark.parametrize("shape", ID_SHAPES, ids=str)
    @pytest.mark.parametrize(("offset", "words"), [(0, None), (5, 6)])
    def test_read_equals_the_reference(self, implementation, shape, offset, words):
        arena, ids = random_words(80, 11), shuffled_ids(shape, 80)
        got = read(arena, ids, offset=offset, words=words, implementation=implementation)
        want = read(arena, ids, offset=offset, words=words, implementation="reference")
        assert got.shape == (*shape, 11 if words is None else words)
        np.testing.assert_array_equal(got, want)

    @pytest.mark.parametrize("count", [1, 4, UNROLL_LIMIT + 1])
    def test_copies_change_their_targets_and_no_other_frame(self, implementation, count):
        """Several of one frame, and padding from the sink to the sink."""
        arena, rng = random_words(2 * count + 40, 5), np.random.default_rng(count)
        frames = rng.permutation(np.arange(1, 2 * count + 40)).astype(np.int32)
        targets, sources = frames[:count], rng.choice(frames[count:], count).astype(np.int32)
        targets[count // 2 + 1 :: 3] = sources[count // 2 + 1 :: 3] = 0
        want = np.array(arena)
        want[targets] = np.asarray(arena)[sources]
        got = copy(arena, sources, targets, implementation=implementation)
        np.testing.assert_array_equal(got, want)
        if count < UNROLL_LIMIT:
            slow = copy_frames(arena, sources, targets, implementation="reference")
            np.testing.assert_array_equal(slow, want)

    @pytest.mark.parametrize("words", [5, 1100])
    def test_words_of_a_row_move_together_one_after_another(self, implementation, words):
        """Places of a row: some of what moves lies where an earlier one of the row went, or comes from where a later
        one goes. Padding moves the sink to the sink."""
        rng, (rows, places) = np.random.default_rng(0), (3, 7)
        arena = random_words(1 + rows * 2, 4 * words)
        at = [
            [(1 + 2 * b + place // 4, place % 4 * words) for place in range(8)] for b in range(rows)
        ]
        sources = np.zeros((rows, places, 2), np.int32)
        targets = np.zeros_like(sources)
        want = np.array(arena)
        for b in range(rows):
            kept = np.sort(rng.choice(np.arange(1, 8), rng.integers(3, 7), replace=False))
            for target, source in enumerate(kept, start=1):
                sources[b, target - 1], targets[b, target - 1] = at[b][source], at[b][target]
                (frame, word), (to, there) = at[b][source], at[b][target]
                want[to, there : there + words] = want[frame, word : word + words]
        got = move(arena, sources, targets, words=words, implementation=implementation)
        np.testing.assert_array_equal(got, want)
        slow = move(arena, sources, targets, words=words, implementation="reference")
        np.testing.assert_array_equal(slow, want)

    def test_bits_that_mean_nan_pass_unchanged(self, implementation):
        """Quiet and signalling NaN, infinities, subnormals: words are words."""
        special = [0x7FC00000, 0x7F800001, 0xFFFFFFFF, 0x7F800000, 0x00000001, 0x80000000]
        arena = jnp.tile(jnp.array(special, jnp.uint32), (5, 2))
        ids = jnp.array([1, 4], jnp.int32)
        found = read(arena, ids, implementation=implementation)
        np.testing.assert_array_equal(found, arena[ids])
        fresh = jnp.zeros_like(arena)
        put = write(fresh, ids, found, implementation="xla")
        np.testing.assert_array_equal(put[ids], arena[ids])
        np.testing.assert_array_equal(
            copy(arena, ids, ids - 1, implementation=implementation), arena
        )


@pytest.mark.parametrize("shape", ID_SHAPES, ids=str)
@pytest.mark.parametrize(("offset", "words"), [(0, 11), (5, 6)])
def test_write_changes_its_words_and_no_other(shape, offset, words):
    arena, ids = random_words(80, 11), shuffled_ids(shape, 80)
    values = random_words(*shape, words, seed=1)
    want = np.array(arena)
    want[np.ravel(ids), offset : offset + words] = np.reshape(values, (-1, words))
    got = write(arena, ids, values, offset=offset, implementation="xla")
    np.testing.assert_array_equal(got, want)
    if ids.size < UNROLL_LIMIT:
        slow = write_frames(arena, ids, values, offset=offset, implementation="reference")
        np.testing.assert_array_equal(slow, want)


@pytest.mark.parametrize("count", [2, UNROLL_LIMIT + 1])
def test_what_is_written_to_the_sink_touches_nothing_else(count):
    arena, ids = random_words(4, 6), jnp.zeros(count, jnp.int32).at[1].set(2)
    values = random_words(count, 6, seed=1)
    got = write(arena, ids, values, implementation="xla")
    np.testing.assert_array_equal(got[1:], arena.at[2].set(values[1])[1:])


def test_none_chooses_by_platform_and_a_name_is_obeyed():
    arena, ids = random_words(9, 8), jnp.array([1, 2], jnp.int32)
    pair = jnp.ones((1, 1, 2), jnp.int32)
    calls = {
        "read_frames": lambda name: read_frames(arena, ids, implementation=name),
        "copy_frames": lambda name: copy_frames(arena, ids, ids, implementation=name),
        "write_frames": lambda name: write_frames(arena, ids, arena[:2], implementation=name),
        "move_words": lambda name: move_words(arena, pair, pair, words=2, implementation=name),
    }
    for kernel, call in calls.items():
        for name in (None, "pallas") if kernel != "write_frames" else ():
            assert kernels_in(functools.partial(call, name)) == [kernel]
        assert kernels_in(functools.partial(call, "xla")) == []
        programs = {str(jax.make_jaxpr(functools.partial(call, n))()) for n in ("xla", "reference")}
        assert len(programs) == 2
    assert kernels_in(functools.partial(calls["write_frames"], None)) == []
    assert sorted(READ) == sorted(COPY) == sorted(MOVE) == sorted([*WRITE, "pallas"])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda a, i: read_frames(a, i, implementation="tpu"), "read_frames: .* got 'tpu'"),
        (lambda a, i: read_frames(a[0], i), r"arena must have 2 dimensions, got shape \(8,\)"),
        (lambda a, i: read_frames(a.astype(jnp.int32), i), "arena must be uint32, got int32"),
        (lambda a, i: read_frames(a, i, offset=6, words=3), r"words \[6, 9\) .* frame of 8"),
        (lambda a, i: read_frames(a, i, offset=-1, words=3), r"words \[-1, 2\) .* frame of 8"),
        (lambda a, i: write_frames(a, i, a[:1]), r"values must have shape \(2, 8\), got \(1, 8\)"),
        (lambda a, i: copy_frames(a, i, i[:1]), r"targets must have shape \(2,\), got \(1,\)"),
        (lambda a, i: copy_frames(a, i[None], i), r"sources must have 1 dimensions, .* \(1, 2\)"),
    ],
)
def test_a_wrong_argument_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(random_words(4, 8), jnp.array([1, 2], jnp.int32))
