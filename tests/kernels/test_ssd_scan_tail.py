"""The end of a chunk in rings and frames: against one row after another, and nothing else touched."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.causal_conv import ProjectionLayout
from pallas_kernels.ssd_scan.tail import TAILS
from tests.kernels.by_name import store_tail
from tests.kernels.lowered import kernels_in

SIZES = ProjectionLayout(num_heads=3, head_dim=5, num_groups=1, state_size=7)
LAYERS, SLOTS, FRAME_WORDS = 3, 8, 48
ROWS = jnp.asarray([2, 0, 3, 4], jnp.int32)  # ring rows; the last one is the sink's
LENGTHS = jnp.asarray([20, 1, 16, 0], jnp.int32)
STATE_LENGTHS = jnp.asarray([16, 0, 16, 0], jnp.int32)


def arguments(dtype: str) -> dict:
    """Random everything; frames of the padding row are the sink."""
    rng = np.random.default_rng(0)
    bits = {"bfloat16": np.uint16, "float32": np.uint32}[dtype]
    batch, tokens, ring_rows = 4, 20, 5

    def words(*shape):
        return jnp.asarray(rng.integers(0, np.iinfo(bits).max, shape, bits))

    def normal(*shape, dtype=dtype):
        return jnp.asarray(rng.standard_normal(shape, np.float32), dtype)

    per_row = 6
    frames = 1 + rng.permutation(batch * per_row).reshape(batch, per_row)
    frames[3] = 0
    return {
        "arena": jnp.asarray(rng.integers(0, 2**32, (28, FRAME_WORDS), np.uint32)),
        "conv": words(LAYERS, ring_rows, SIZES.history + 1, SIZES.conv_size),
        "xB": words(LAYERS, ring_rows, SLOTS, SIZES.record_size),
        "dt": normal(LAYERS, ring_rows, SLOTS, SIZES.num_heads, dtype="float32"),
        "projected": normal(batch, tokens, SIZES.projected_size),
        "history": words(batch, SIZES.history, SIZES.conv_size),
        "xBC": normal(batch, tokens, SIZES.conv_size),
        "steps": normal(batch, tokens, SIZES.num_heads, dtype="float32"),
        "frames": jnp.asarray(frames, jnp.int32),
        "rows": ROWS,
        "lengths": LENGTHS,
        "state_lengths": STATE_LENGTHS,
    }


def stored(implementation: str | None, dtype: str, layer: int = 1, **changes):
    run = functools.partial(store_tail, layer=layer, layout=SIZES, implementation=implementation)
    return [np.asarray(a) for a in jax.jit(run)(**arguments(dtype) | changes)]


@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_rings_and_frames_are_written_as_row_after_row(dtype, layer):
    got, want = stored("pallas", dtype, layer), stored("reference", dtype, layer)
    got[0], want[0] = got[0][1:], want[0][1:]  # the sink holds whatever was written last
    for name, a, b in zip(("arena", "conv", "xB", "dt"), got, want, strict=True):
        np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8), err_msg=name)


@pytest.mark.parametrize("implementation", ["pallas", "reference"])
def test_a_projection_of_many_leaves_the_same(implementation):
    own = arguments("float32")["projected"][..., SIZES.inner_size :]
    own = jnp.pad(own, ((0, 0), (0, 0), (4, 2)), constant_values=jnp.nan)
    layout = replace(SIZES, within=(4, own.shape[-1]))
    ungated = functools.partial(store_tail, layer=1, layout=layout, implementation=implementation)
    got = jax.jit(ungated)(**arguments("float32") | {"projected": own})
    for a, b in zip(got, stored(implementation, "float32"), strict=True):
        np.testing.assert_array_equal(np.asarray(a).view(np.uint8), b.view(np.uint8))


def test_the_reference_is_what_numpy_cuts():
    given = {name: np.asarray(a) for name, a in arguments("float32").items()}
    arena, conv, xB, dt = stored("reference", "float32")
    inner, history = SIZES.inner_size, SIZES.history
    for b in range(4):
        raw = given["projected"][b, :, inner : inner + SIZES.conv_size].view(np.uint32)
        columns = np.concatenate([given["history"][b], raw])
        row, length, kept = ROWS[b], int(LENGTHS[b]), int(STATE_LENGTHS[b])
        np.testing.assert_array_equal(conv[1, row, :history], columns[length : length + history])
        count = length - kept
        records = given["xBC"][b, kept:length, : SIZES.record_size].view(np.uint32)
        np.testing.assert_array_equal(xB[1, row, :count], records)
        np.testing.assert_array_equal(dt[1, row, :count], given["steps"][b, kept:length])
        words = columns[kept : kept + history].ravel()
        flat = arena[given["frames"][b]].ravel()[len(words) : 2 * len(words)]
        if b < 3:
            np.testing.assert_array_equal(flat, words)


def test_nothing_else_changes():
    given = {name: np.array(a) for name, a in arguments("bfloat16").items()}
    arena, conv, xB, dt = stored("pallas", "bfloat16")
    for ring, old in ((conv, given["conv"]), (xB, given["xB"]), (dt, given["dt"])):
        np.testing.assert_array_equal(ring[[0, 2]].view(np.uint8), old[[0, 2]].view(np.uint8))
        np.testing.assert_array_equal(ring[1, 1].view(np.uint8), old[1, 1].view(np.uint8))
    np.testing.assert_array_equal(conv[1, :, SIZES.history :], given["conv"][1, :, SIZES.history :])
    spare = np.setdiff1d(np.arange(28), given["frames"])
    np.testing.assert_array_equal(arena[spare], given["arena"][spare])


def test_another_length_shows():
    longer = stored("pallas", "bfloat16", lengths=LENGTHS + 1)
    assert (longer[1] != stored("reference", "bfloat16")[1]).any()
    later = stored("pallas", "bfloat16", state_lengths=STATE_LENGTHS + 1)
    assert (later[2] != stored("reference", "bfloat16")[2]).any()


def test_none_chooses_by_platform():
    run = functools.partial(store_tail, layer=0, layout=SIZES)
    given = arguments("bfloat16")
    assert kernels_in(lambda given: run(**given), given) == ["store_tail"]
    assert kernels_in(lambda given: run(**given, implementation="reference"), given) == []
    assert sorted(TAILS) == ["pallas", "reference"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"conv": jnp.ones((3, 5, 4, 29))},
            "conv must be uint16 or uint32, got float32; pass the bits",
        ),
        ({"layer": 7}, r"layer must lie in \[0, 3\), got 7"),
        (
            {"frames": jnp.ones((4, 1), jnp.int32), "layer": 2},
            "frames must hold .* words a row, got 1 of 48",
        ),
        (
            {"history": jnp.ones((4, 3, 29))},
            "history must be uint16 or uint32, got float32; pass the bits",
        ),
        ({"rows": ROWS[:3]}, r"rows must have shape \(4,\), got \(3,\)"),
        ({"steps": jnp.ones((4, 20, 2))}, r"steps must have shape \(4, 20, 3\), got \(4, 20, 2\)"),
    ],
)
def test_a_wrong_argument_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        store_tail(**{**arguments("bfloat16"), "layer": 0, **change}, layout=SIZES)
