"""Windows of the gated delta rule whose records lie in rings: against the form for XLA, and what must stay."""

from __future__ import annotations

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gated_delta import gated_delta_fold
from pallas_kernels.gated_delta.api import RINGS
from pallas_kernels.operands import floats
from pallas_kernels.records import RecordSizes, read_states
from pallas_kernels.ssd_window import FoldFrames, fold_frames
from pallas_kernels.ssd_window.api import FRAME_FOLDS
from tests.kernels.by_name import gated_delta_window_rings
from tests.kernels.cases.gated_delta import WINDOWS, WindowCase, make_window_inputs
from tests.kernels.compare import assert_same_bits, relative_error
from tests.kernels.framed import in_frames
from tests.kernels.gated_delta_windows import BY_NAME, RING, TOLERANCE, TREE, every_dtype, window
from tests.kernels.lowered import kernels_in

LAYERS, LAYER, FIRST_FRAME = 3, 1, 2
STATIC = ("records", "layer", "first_frame", "dtype", "implementation")
compiled = functools.partial(jax.jit, static_argnames=STATIC)(gated_delta_window_rings)
every_form = pytest.mark.parametrize("implementation", sorted(RINGS))
KNOWN_IN_A_TREE = replace(RING, known=(0, 1, 0, 2), valid=(5, 5, 3, 2))


def ancestors_of(case: WindowCase) -> jax.Array:
    return jnp.broadcast_to(TREE, (case.rows, case.tokens))


def given_of(inputs: dict, rate: float = -0.5, per_frame: int = 2) -> dict:
    """Arrays of the window over rings. Other layers and rows, and frames of other layers, are NaN."""
    q, v, u, k = (inputs[name] for name in ("q", "v", "u", "k"))
    rows, place = len(k), jnp.asarray(slots_of(inputs))
    arena, frames = in_frames(inputs["state"], per_frame)
    wide_q, wide_k = (x.astype(jnp.float32) for x in (q, k))
    own_k = jnp.take_along_axis(wide_k, place[..., None, None], axis=1)
    scores = [
        jnp.einsum("btgr,bsgr->btgs", x, wide_k, precision="highest") for x in (own_k, wide_q)
    ]

    def flat(x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:2], -1)

    lead = ((LAYER, LAYERS - LAYER - 1), (0, 1), (0, 0), (0, 0))
    pad = functools.partial(jnp.pad, pad_width=lead, constant_values=np.nan)
    bits = jnp.uint16 if k.dtype == jnp.bfloat16 else jnp.uint32
    uk = jnp.concatenate([flat(u), flat(k)], axis=-1)
    A = jnp.linspace(rate, 2 * rate, u.shape[2])
    return {
        "q": flat(q),
        "v": flat(v),
        "beta": inputs["beta"],
        "scores": jnp.stack(scores, axis=1),
        "uk": jax.lax.bitcast_convert_type(pad(uk[None]), bits),
        "dt": pad((inputs["log_decay"] / A)[None]),
        "A": jnp.stack([A * 0, A, -A]),
        "arena": arena,
        "frames": jnp.pad(frames, ((0, 0), (FIRST_FRAME, 1))),
        "exists": jnp.ones(rows, bool),
        **{name: inputs[name] for name in ("starts", "num_known", "num_valid")},
        "ancestors": inputs.get("ancestors"),
    }


def run(inputs: dict, given: dict, implementation: str, dtype=jnp.float32):
    """y, and u of the layer's rows."""
    records = RecordSizes.of(inputs["u"], inputs["k"])
    static = {"records": records, "layer": LAYER, "first_frame": FIRST_FRAME, "dtype": dtype}
    return compiled(**given, **static, implementation=implementation)


def new_tokens(inputs: dict) -> np.ndarray:
    """bool[B, T]"""
    token = np.arange(inputs["q"].shape[1])
    known, valid = (np.asarray(inputs[name])[:, None] for name in ("num_known", "num_valid"))
    return (token >= known) & (token < valid)


def slots_of(inputs: dict) -> np.ndarray:
    """int[B, T] ring slots of the tokens, the last one for those past it."""
    place = np.asarray(inputs["starts"])[:, None] + np.arange(inputs["q"].shape[1])
    return np.minimum(place, inputs["u"].shape[1] - 1)


def written(inputs: dict, uk: jax.Array) -> np.ndarray:
    """bool of the ring's shape: u of the new tokens."""
    mask = np.zeros(uk.shape, bool)
    for row, (slots, new) in enumerate(zip(slots_of(inputs), new_tokens(inputs), strict=True)):
        mask[LAYER, row, slots[new], : inputs["u"][0, 0].size] = True
    return mask


def new_u(inputs: dict, uk: jax.Array) -> jax.Array:
    """u [B, T, M, P] of the tokens, as the ring has it."""
    rows, tokens, heads, width = inputs["v"].shape
    own = floats(uk)[LAYER, np.arange(rows)[:, None], slots_of(inputs), : heads * width]
    return own.reshape(rows, tokens, heads, width)


def assert_equal_to_xla(inputs: dict, dtype: str, implementation: str) -> None:
    given = given_of(inputs)
    y, uk = run(inputs, given, implementation)
    want_y, want_u, _ = window(**inputs, implementation="xla")
    new = new_tokens(inputs)
    assert relative_error(y[new], want_y[new]) <= TOLERANCE[dtype]
    assert relative_error(new_u(inputs, uk)[new], want_u[new]) <= TOLERANCE[dtype]
    assert not np.asarray(y)[~new].any()
    kept = ~written(inputs, uk)
    assert_same_bits(np.asarray(uk)[kept], np.asarray(given["uk"])[kept])


@every_form
@every_dtype
class TestRings:
    @pytest.mark.parametrize("case", WINDOWS, ids=lambda case: case.name)
    def test_equal_the_form_for_xla_and_leave_the_rest_of_the_ring(
        self, case, dtype, implementation
    ):
        assert_equal_to_xla(make_window_inputs(case, dtype=dtype), dtype, implementation)

    @pytest.mark.parametrize("case", [RING, KNOWN_IN_A_TREE], ids=["new", "known"])
    def test_trees_too(self, case, dtype, implementation):
        inputs = make_window_inputs(case, dtype=dtype) | {"ancestors": ancestors_of(case)}
        assert_equal_to_xla(inputs, dtype, implementation)

    @pytest.mark.parametrize("name", ["verify", "whole_ring", "decode_with_idle_rows"])
    def test_what_is_not_live_changes_no_bit_whatever_it_holds(self, name, dtype, implementation):
        inputs = make_window_inputs(BY_NAME[name], dtype=dtype)
        given = given_of(inputs)
        starts, known, valid = (np.asarray(inputs[n]) for n in ("starts", "num_known", "num_valid"))
        slot, token = (np.arange(inputs[n].shape[1]) for n in ("u", "q"))
        inner, spoiled = inputs["u"][0, 0].size, dict(given)
        idle = (known >= valid)[:, None]
        beyond = (slot >= (starts + valid)[:, None]) | idle
        unwritten = (slot >= (starts + known)[:, None]) | idle
        records = np.array(floats(given["uk"]).astype(jnp.float32))
        rows = records[LAYER, : len(starts)]
        rows[..., :inner][unwritten] = np.nan
        rows[..., inner:][beyond] = np.nan
        records = jnp.asarray(records).astype(dtype)
        spoiled["uk"] = jax.lax.bitcast_convert_type(records, given["uk"].dtype)
        spoiled["dt"] = (
            given["dt"]
            .at[LAYER, : len(starts)]
            .set(jnp.where(beyond[..., None], jnp.nan, given["dt"][LAYER, : len(starts)]))
        )
        absent = ~new_tokens(inputs)[..., None]
        for name in ("q", "v", "beta"):
            spoiled[name] = jnp.where(absent, jnp.nan, given[name])
        unseen = slot > starts[:, None, None] + token[:, None]
        unseen = (unseen | absent)[:, None, :, None]
        spoiled["scores"] = jnp.where(unseen, jnp.nan, given["scores"])
        y, uk = run(inputs, spoiled, implementation)
        want_y, want_uk = run(inputs, given, implementation)
        assert_same_bits(y, want_y)
        mask = written(inputs, uk)
        assert_same_bits(np.asarray(uk)[mask], np.asarray(want_uk)[mask])
        assert_same_bits(np.asarray(uk)[~mask], np.asarray(spoiled["uk"])[~mask])

    def test_a_token_gets_the_same_bits_whatever_is_known_before_it(self, dtype, implementation):
        """As exact mode needs it: the window is the whole ring, and more and more of it is known."""
        inputs = make_window_inputs(
            replace(BY_NAME["whole_ring"], known=None, valid=None), dtype=dtype
        )
        given = given_of(inputs)
        y, uk = run(inputs, given, implementation)
        for known, valid in ((0, 9), (9, 10), (10, 32), (31, 32)):
            count = {"num_known": jnp.full(4, known), "num_valid": jnp.full(4, valid)}
            ring = given["uk"].at[:, :, :known].set(uk[:, :, :known])
            got_y, got_uk = run(inputs, given | count | {"uk": ring}, implementation)
            assert_same_bits(got_y[:, known:valid], y[:, known:valid])
            a, b = (np.asarray(x)[LAYER, :4, known:valid] for x in (got_uk, uk))
            assert_same_bits(a, b)


@every_form
class TestRingsOnce:
    @pytest.mark.parametrize("per_frame", [1, 4, 64])
    def test_rows_without_a_checkpoint_start_from_nothing(self, per_frame, implementation):
        inputs = make_window_inputs(RING)
        exists = jnp.asarray([True, False, True, False])
        given = given_of(inputs, per_frame=per_frame) | {"exists": exists}
        given["frames"] = jnp.where(exists[:, None], given["frames"], 0)  # NaN throughout
        state = jnp.where(exists[:, None, None, None], inputs["state"], 0.0)
        want, u, _ = window(**inputs | {"state": state}, implementation="xla")
        y, uk = run(inputs, given, implementation)
        assert relative_error(y, want) <= TOLERANCE["float32"]
        assert relative_error(new_u(inputs, uk), u) <= TOLERANCE["float32"]

    def test_a_head_that_forgets_fast_loses_no_digits(self, implementation):
        inputs = make_window_inputs(BY_NAME["whole_ring"])
        inputs["log_decay"] = jnp.where(
            jnp.arange(32)[None, :, None] % 5 < 2, -30.0, inputs["log_decay"] / 10
        )
        assert_equal_to_xla(inputs, "float32", implementation)

    def test_outputs_have_the_dtype_asked_for_and_rings_may_be_floats(self, implementation):
        inputs = make_window_inputs(BY_NAME["verify"], dtype="bfloat16")
        given = given_of(inputs)
        y, uk = run(inputs, given, implementation)
        half, ring = run(inputs, given | {"uk": floats(given["uk"])}, implementation, jnp.bfloat16)
        assert_same_bits(half, y.astype(jnp.bfloat16))
        assert_same_bits(ring, floats(uk))

    def test_mistakes_exceed_the_tolerance(self, implementation):
        inputs = make_window_inputs(BY_NAME["verify"])
        given = given_of(inputs)
        want = run(inputs, given, "reference")
        new, limit = new_tokens(inputs), 100 * TOLERANCE["float32"]
        swapped = {"frames": jnp.roll(given["frames"], 1, axis=0)}
        other_u = inputs | {"u": inputs["u"][:, ::-1]}
        for change in (
            *(swapped, {"beta": given["beta"][:, ::-1]}, {"v": given["v"][:, ::-1]}),
            *({"A": given["A"][:, ::-1]}, {"starts": given["starts"].at[1].add(1)}),
            {"uk": given_of(other_u)["uk"]},
        ):
            y, uk = run(inputs, given | change, implementation)
            assert relative_error(y[new], want[0][new]) > limit
            assert relative_error(new_u(inputs, uk)[new], new_u(inputs, want[1])[new]) > limit
        y, uk = run(inputs, given | {"q": given["q"][..., ::-1]}, implementation)
        assert relative_error(y[new], want[0][new]) > limit
        assert_same_bits(uk, run(inputs, given, implementation)[1])

    def test_another_tree_gives_other_numbers_to_its_nodes_alone(self, implementation):
        inputs = make_window_inputs(RING)
        given = given_of(inputs)
        trees = (TREE, TREE.at[3].set(0b01101))
        (y, uk), (other, other_uk) = (
            run(inputs, given | {"ancestors": jnp.broadcast_to(tree, (4, 5))}, implementation)
            for tree in trees
        )
        assert relative_error(y[:, 3], other[:, 3]) > 1e-3
        for a, b in ((y, other), (new_u(inputs, uk), new_u(inputs, other_uk))):
            assert_same_bits(a[:, [0, 1, 2, 4]], b[:, [0, 1, 2, 4]])


@pytest.mark.parametrize("implementation", sorted(FRAME_FOLDS))
@every_dtype
def test_folds_between_frames_are_folds_of_the_rule(dtype, implementation):
    """Row 0 folds in place, row 1 from nothing, row 2 some records, row 3 not at all; what does not count is NaN."""
    inputs = make_window_inputs(RING, dtype=dtype)
    lengths, exists = jnp.asarray([37, 32, 7, -1]), jnp.asarray([True, False, True, True])
    beyond = jnp.arange(RING.slots) >= lengths[:, None]
    u, k, log_decay = (
        jnp.where(beyond.reshape(*beyond.shape, *(1,) * (x.ndim - 2)), jnp.nan, x)
        for x in (inputs["u"], inputs["k"], inputs["log_decay"])
    )
    arena, table = in_frames(inputs["state"], 3)
    A = jnp.linspace(-0.5, -2, RING.heads)
    uk = jnp.concatenate([x.reshape(*x.shape[:2], -1) for x in (u, k)], axis=-1)
    arrays = FoldFrames(
        lengths, uk[None], (log_decay / A)[None], A[None], arena, table, table, exists
    )
    records = RecordSizes.of(u, k)
    run = functools.partial(fold_frames, records=records, per_layer=table.shape[1])
    run = jax.jit(functools.partial(run, implementation=implementation), static_argnames="scaled")
    got, scaled = (
        read_states(run(arrays, scaled=scaled), table, jnp.ones(4, bool), records)
        for scaled in (False, True)
    )
    state = jnp.where(exists[:, None, None, None], inputs["state"], 0.0)
    counted = jnp.maximum(lengths, 0)
    want = gated_delta_fold(state, u, k, log_decay, lengths=counted, implementation="xla")
    assert relative_error(got[:3], want[:3]) <= TOLERANCE["float32"]
    assert relative_error(scaled[:3], want[:3]) > 0.1
    assert_same_bits(got[3], inputs["state"][3])


def by_default(inputs: dict, implementation: str | None = None) -> list[str]:
    """Kernels of the call."""
    records = RecordSizes.of(inputs["u"], inputs["k"])
    static = {"records": records, "layer": LAYER, "first_frame": FIRST_FRAME}
    call = functools.partial(gated_delta_window_rings, **static, implementation=implementation)
    return kernels_in(lambda given: call(**given), given_of(inputs))


def test_the_kernel_is_named_and_chosen():
    inputs = make_window_inputs(RING)
    for name, kernels in ((None, 1), ("pallas", 1), ("reference", 0)):
        assert by_default(inputs, name) == ["gated_delta_window"] * kernels


def test_shapes_a_kernel_cannot_take_are_refused_by_name_and_run_by_default():
    inputs = make_window_inputs(replace(RING, slots=160))
    with pytest.raises(NotImplementedError, match="at most 128 slots for 'pallas', got 160"):
        by_default(inputs, "pallas")
    assert by_default(inputs) == []
    inputs = make_window_inputs(replace(RING, size=300))
    with pytest.raises(NotImplementedError, match="at most 256 columns for 'pallas', got 300"):
        by_default(inputs, "pallas")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer": 3}, r"layer 3 and 4 rows must lie within the rings \(3, 5\)"),
        ({"first_frame": 4}, "frames must hold 4 heads of each of 4 rows"),
        ({"scores": jnp.ones((4, 5, 2, 37))}, "scores must have 5 dimensions"),
        ({"scores": jnp.ones((4, 1, 5, 2, 37))}, r"scores must have shape \(4, 2, 5, 2, 37\)"),
        ({"uk": jnp.ones((3, 5, 37, 65))}, r"uk must have shape \(3, 5, 37, 64\)"),
        ({"v": jnp.ones((4, 5, 33))}, r"v must have shape \(4, 5, 32\)"),
        ({"beta": jnp.ones((4, 5, 4), jnp.bfloat16)}, "beta must be float32, got bfloat16"),
        ({"dtype": jnp.int32}, "dtype must be float32 .* got int32"),
        ({"ancestors": jnp.ones((4, 4), jnp.int32)}, r"ancestors must have shape \(4, 5\)"),
    ],
)
def test_a_wrong_argument_is_named(change, message):
    inputs = make_window_inputs(RING)
    records = RecordSizes.of(inputs["u"], inputs["k"])
    static = {"records": records, "layer": LAYER, "first_frame": FIRST_FRAME}
    with pytest.raises(ValueError, match=f"gated_delta_window_rings: {message}"):
        gated_delta_window_rings(**given_of(inputs) | static | change)
