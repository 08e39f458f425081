"""The convolution's history, and states that rings carry, go into a checkpoint's frames as other paths read them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.checkpoint import STATES, STORES, pack_states
from tests.kernels.by_name import store_columns, store_states
from tests.kernels.lowered import kernels_in


def inputs_of(dtype, *, layers=3, rows=4, columns=3, channels=21, frame_words=48):
    """Rings of `rows` rows and one to spare, and an arena of which every row has as many frames as it needs."""
    rng = np.random.default_rng(0)
    size = np.dtype(dtype).itemsize
    raw = rng.integers(0, 2 ** (8 * size), (layers, rows + 1, columns + 1, channels), dtype)
    words = layers * -(-columns * channels * size // 4)
    per_row = -(-words // frame_words)
    frames = rng.permutation(np.arange(1, rows * per_row + 3))[: rows * per_row]
    arena = rng.integers(0, 2**32, (rows * per_row + 3, frame_words), np.uint32)
    return {
        "arena": jnp.asarray(arena),
        "frames": jnp.asarray(frames.reshape(rows, per_row), jnp.int32),
        "folds": jnp.asarray([32, -1, 0, 5], jnp.int32),
        "conv": jnp.asarray(raw),
    }


def expected(given, columns: int) -> np.ndarray:
    """The same with numpy's bytes, one row at a time."""
    arena, frames, conv = (np.array(given[name]) for name in ("arena", "frames", "conv"))
    for row, folds in enumerate(np.asarray(given["folds"])):
        if folds < 0:
            continue
        layers = [conv[layer, row, :columns].tobytes() for layer in range(conv.shape[0])]
        padded = b"".join(raw + b"\0" * (-len(raw) % 4) for raw in layers)
        words = np.frombuffer(padded, np.uint32)
        flat = arena[frames[row]].ravel()
        flat[: len(words)] = words
        arena[frames[row]] = flat.reshape(len(frames[row]), -1)
    return arena


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
@pytest.mark.parametrize("implementation", sorted(STORES))
def test_columns_lie_layer_after_layer(implementation, dtype):
    given = inputs_of(dtype)
    run = jax.jit(functools.partial(store_columns, columns=3, implementation=implementation))
    got, want = np.asarray(run(**given)), expected(given, 3)
    np.testing.assert_array_equal(got, want)


def test_another_number_of_columns_shows():
    given = inputs_of("uint16")
    got = store_columns(**given, columns=2, implementation="pallas")
    assert (np.asarray(got) != expected(given, 3)).any()


def test_none_chooses_by_platform():
    given = inputs_of("uint16")
    run = functools.partial(store_columns, columns=3)
    assert kernels_in(lambda given: run(**given), given) == ["store_columns"]
    run = functools.partial(run, implementation="reference")
    assert kernels_in(lambda given: run(**given), given) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"frames": jnp.ones((4, 1), jnp.int32)}, "frames must hold 96 words a row, got 1 of 48"),
        ({"columns": 5}, r"5 columns of 4 rows must lie within the rings, got \(3, 5, 4, 21\)"),
        (
            {"conv": jnp.ones((3, 5, 4, 21))},
            "conv must be uint16 or uint32, got float32; pass the bits",
        ),
        ({"folds": jnp.ones(3, jnp.int32)}, r"folds must have shape \(4,\), got \(3,\)"),
    ],
)
def test_a_wrong_argument_is_named(change, message):
    given = inputs_of("uint16") | {"columns": 3} | change
    if "columns" in change:
        given["frames"] = jnp.ones((4, 9), jnp.int32)
    with pytest.raises(ValueError, match=message):
        store_columns(**given)


def states_of(*, layers=3, rows=4, units=7, unit_words=5, per_frame=3) -> dict:
    """Rings with two copies of a state in each of `rows` rows and one to spare; the frames are a word too large."""
    rng = np.random.default_rng(0)
    per_row = layers * -(-units // per_frame)
    frames = rng.permutation(np.arange(1, rows * per_row + 3))[: rows * per_row]
    arena = rng.integers(
        0, 2**32, (rows * per_row + 3, per_frame * unit_words + 1), dtype=np.uint32
    )
    state = rng.standard_normal((layers, rows + 1, 2, units * unit_words), np.float32)
    return {
        "arena": jnp.asarray(arena),
        "frames": jnp.asarray(frames.reshape(rows, per_row), jnp.int32),
        "folds": jnp.asarray([32, -1, 0, 5], jnp.int32),
        "copies": jnp.asarray([1, 0, 0, 1], jnp.int32),
        "state": jnp.asarray(state),
    }


@pytest.mark.parametrize("implementation", sorted(STATES))
def test_states_lie_layer_after_layer_in_frames_of_whole_units(implementation):
    given = states_of()
    run = functools.partial(store_states, unit_words=5, implementation=implementation)
    got, want = np.asarray(jax.jit(run)(**given)), np.array(given["arena"])
    for row in (0, 2, 3):
        for layer in range(3):
            state = given["state"][layer, row, given["copies"][row]].reshape(1, 7, 5)
            words = np.asarray(pack_states(state, 3, 3))[0]
            own = np.asarray(given["frames"])[row, 3 * layer : 3 * layer + 3]
            want[own[:2], :15] = words[:2]
            want[own[2], :5] = words[2, :5]
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"frames": jnp.ones((4, 8), jnp.int32)}, "9 frames and 4 rows are needed, got 8"),
        ({"unit_words": 4}, "unit_words must divide the state's 35 words .* got 4"),
        ({"copies": jnp.ones(3, jnp.int32)}, r"copies must have shape \(4,\), got \(3,\)"),
    ],
)
def test_a_wrong_argument_of_states_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        store_states(**states_of() | {"unit_words": 5} | change)
