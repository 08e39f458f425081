"""The convolution of windows of a gated delta net: against its definition and the engine's layer."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hybrid_jax.config import GatedDelta
from hybrid_jax.layers.gated_delta import GATED_DELTA, join_records
from pallas_kernels.causal_conv.api import WINDOWS
from pallas_kernels.operands import floats, stored
from tests.kernels.by_name import causal_conv_window
from tests.kernels.cases.causal_conv import (
    SMALL,
    UNEVEN,
    WINDOW_CASES,
    WindowCase,
    make_window_inputs,
)
from tests.kernels.compare import assert_same_bits, relative_error
from tests.kernels.conv_windows import STATIC, TOLERANCE, assert_close, new_tokens
from tests.kernels.lowered import kernels_in

OUTPUTS = ("conv", "xB", "dt", "q", "scores", "v", "beta")
MADE = OUTPUTS[3:]
window = functools.partial(jax.jit, static_argnames=STATIC)(causal_conv_window)
CASES = [replace(case, layout=replace(case.layout, delta=True)) for case in WINDOW_CASES]
CASE = {case.name: case for case in CASES}
VERIFY = CASE["verify"]
every_form = pytest.mark.parametrize("implementation", sorted(WINDOWS))
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
every_dtype = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


def run(case: WindowCase, inputs: dict, implementation: str, **more) -> dict:
    static = {"layout": case.layout, "layer": case.layer, "implementation": implementation}
    outputs = map(np.asarray, window(**inputs, **static, **more))  # what follows compiles nothing
    return dict(zip(OUTPUTS, outputs, strict=True))


def k_of(case: WindowCase, ring: jax.Array) -> jax.Array:
    """float32[L, B', S, G R]"""
    return floats(ring)[..., case.layout.inner_size :].astype(jnp.float32)


def written(case: WindowCase, inputs: dict) -> dict:
    """Which elements of each ring a call may change."""
    new, layout = new_tokens(case), case.layout
    out = {name: np.zeros(inputs[name].shape, bool) for name in ("conv", "xB", "dt")}
    for row in np.flatnonzero(new.any(1)):
        slots = case.starts[row] + np.flatnonzero(new[row])
        out["xB"][case.layer, row, slots, layout.inner_size :] = True
        out["dt"][case.layer, row, slots] = True
        behind = slice(layout.history + max(case.first[row], 0), layout.history + case.tokens)
        out["conv"][case.layer, row, behind] = True
        if case.num_valid[row] == case.tokens and case.tree is None:
            out["conv"][case.layer, row, : layout.history] = True
    return out


@every_form
@every_dtype
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("tokens", [1, 4])
def test_windows_give_what_the_layer_makes_of_the_whole_sequence(
    implementation, dtype, biased, tokens
):
    """A sequence of 8 tokens, `tokens` at a time."""
    spec = GatedDelta(num_value_heads=4, value_dim=8, num_key_heads=2, key_dim=16, conv_bias=biased)
    case = replace(CASE["decode"], tokens=tokens, layers=1, slots=8, biased=biased)
    inputs, rng = make_window_inputs(case, dtype=dtype), np.random.default_rng(3)
    projected = jnp.asarray(rng.normal(size=(3, 8, case.layout.projected_size)), dtype)
    params = {"in_proj": jnp.eye(case.layout.projected_size, dtype=dtype)}
    params |= {"conv": inputs["weight"], "conv_bias": inputs["bias"], "dt_bias": inputs["dt_bias"]}

    @jax.jit
    def layer(projected):
        before = floats(inputs["conv"])[0, :3, : SMALL.history]
        projection = GATED_DELTA.project(params, projected, spec)
        own, _ = GATED_DELTA.tokens(params, *projection, before, spec)
        v, k, beta = own.rest
        records = join_records(v, k, own.records["dt"])
        return {"v": v, "q": own.q, "beta": beta}, k, records

    want, k, records = layer(projected)
    rings = {name: inputs[name] for name in ("conv", "xB", "dt")}
    static = {"first": jnp.zeros(3, jnp.int32), "num_valid": jnp.full(3, tokens)}
    for start in range(0, 8, tokens):
        now = {"projected": projected[:, start : start + tokens], "starts": jnp.full(3, start)}
        got = run(case, inputs | rings | static | now, implementation)
        rings = {name: got[name] for name in rings}
        for name, whole in want.items():
            part = whole[:, start : start + tokens]
            assert_close(got[name], part.reshape(*part.shape[:2], -1), name)
    assert_close(floats(rings["xB"])[0, :3, :, 32:], records["uk"][..., 32:])
    assert_close(rings["dt"][0, :3], records["dt"])
    length = np.linalg.norm(np.asarray(k, np.float32), axis=-1)
    np.testing.assert_allclose(length, 1, atol=1e-2)


@every_form
@every_case
@every_dtype
def test_outputs_are_those_of_new_tokens_and_nothing_else_changes(implementation, case, dtype):
    """Against the definition, whose scores are what its own q and the ring's k give."""
    inputs = make_window_inputs(case, dtype=dtype)
    want, got = run(case, inputs, "reference"), run(case, inputs, implementation)
    for name, mask in written(case, inputs).items():
        assert_same_bits(np.asarray(got[name])[~mask], np.asarray(inputs[name])[~mask])
        assert_close(got[name][mask], want[name][mask], name)
    new, layout = new_tokens(case), case.layout
    for name in MADE:
        assert_close(got[name], want[name], name)
    for name in ("q", "v", "beta"):
        assert not np.asarray(got[name])[~new].any()
    k, q = k_of(case, got["xB"])[case.layer, : case.rows], got["q"]
    place = np.clip(np.array(case.starts)[:, None] + np.arange(case.tokens), 0, case.slots - 1)
    own = jnp.take_along_axis(k, jnp.asarray(place)[..., None], axis=1)
    seen = np.arange(case.slots) <= place[..., None]  # [B, T, S]
    mask = (seen & new[..., None])[:, :, None]
    for index, x in enumerate((own, q)):
        grouped = (a.reshape(*a.shape[:2], layout.num_groups, -1) for a in (x, k))
        products = jnp.einsum("btgr,bsgr->btgs", *grouped, precision="highest")
        assert_close(got["scores"][:, index], jnp.where(mask, products, 0))


@every_form
@every_case
def test_what_must_not_be_read_changes_no_bit(implementation, case):
    inputs = make_window_inputs(case)
    new, history, layout = new_tokens(case), case.layout.history, case.layout
    projected = jnp.where(new[..., None], inputs["projected"], jnp.nan)
    spoiled = inputs | {"projected": projected.at[..., : layout.conv_start].set(jnp.nan)}
    keep = {name: np.zeros(inputs[name].shape, bool) for name in ("conv", "xB", "dt")}
    for row in np.flatnonzero(new.any(1)):
        held = max(case.first[row], 0)
        keep["conv"][case.layer, row, : history + held] = True
        keep["xB"][case.layer, row, : case.starts[row] + held, layout.inner_size :] = True
    for name, mask in keep.items():
        ring = jnp.where(mask, floats(inputs[name]), jnp.nan)
        spoiled[name] = stored(ring, inputs[name].dtype)
    want, got = (run(case, given, implementation) for given in (inputs, spoiled))
    for name, mask in written(case, inputs).items():
        assert_same_bits(np.asarray(got[name])[mask], np.asarray(want[name])[mask])
        assert_same_bits(np.asarray(got[name])[~mask], np.asarray(spoiled[name])[~mask])
    for name in MADE:
        assert_same_bits(got[name], want[name])


@every_form
@every_dtype
class TestOnce:
    def test_a_projection_in_parts_counts_as_their_sum(self, implementation, dtype):
        inputs = make_window_inputs(VERIFY, dtype=dtype)
        parts = [make_window_inputs(VERIFY, seed=seed)["projected"] for seed in range(3)]
        parts = jnp.stack(parts).astype(jnp.float32)
        want = run(VERIFY, inputs | {"projected": parts.sum(0).astype(dtype)}, "reference")
        got = run(VERIFY, inputs | {"projected": parts}, implementation)
        for name in OUTPUTS:
            assert_close(got[name], want[name], name)

    def test_rings_of_floats_are_rings_of_bits(self, implementation, dtype):
        inputs = make_window_inputs(VERIFY, dtype=dtype)
        want = run(VERIFY, inputs, implementation)
        as_floats = {name: floats(inputs[name]) for name in ("conv", "xB")}
        got = run(VERIFY, inputs | as_floats, implementation)
        for name in OUTPUTS:
            assert_same_bits(got[name], floats(want[name]))


@every_form
def test_mistakes_exceed_the_tolerance(implementation):
    inputs = make_window_inputs(VERIFY)
    want, limit = run(VERIFY, inputs, "reference"), 100 * TOLERANCE["float32"]
    behind, heads = VERIFY.layout.projected_size, VERIFY.layout.num_heads
    a_and_b = jnp.roll(inputs["projected"][..., behind - 2 * heads :], heads, axis=-1)
    swapped = inputs["projected"].at[..., behind - 2 * heads :].set(a_and_b)
    for change, names in (
        ({"weight": inputs["weight"][::-1]}, ("q", "scores", "v")),
        ({"projected": swapped}, ("dt", "beta")),
        ({"starts": inputs["starts"] - inputs["first"]}, ("dt", "scores")),
        ({"first": jnp.zeros_like(inputs["first"])}, ("conv", "dt", "q", "v", "beta")),
    ):
        got = run(VERIFY, inputs | change, implementation)
        for name in names:
            assert relative_error(floats(got[name]), floats(want[name])) > limit, name


def test_the_kernel_is_named_and_chosen_and_is_one_launch():
    inputs = make_window_inputs(VERIFY)
    for name, kernels in ((None, 1), ("pallas", 1), ("reference", 0)):
        static = {"layout": VERIFY.layout, "layer": 1, "implementation": name}
        call = functools.partial(causal_conv_window, **static)
        found = kernels_in(lambda given, call=call: call(**given), inputs)
        assert found == ["causal_conv_window"] * kernels


@pytest.mark.parametrize("layout", [SMALL, UNEVEN], ids=["small", "uneven"])
def test_a_projection_without_rates_of_writing_is_refused(layout):
    inputs = make_window_inputs(replace(VERIFY, layout=layout))
    columns = replace(layout, delta=True).projected_size
    with pytest.raises(ValueError, match=rf"projected must have shape \(5, 5, {columns}\)"):
        causal_conv_window(**inputs, layout=replace(layout, delta=True), layer=1)


def test_states_a_kernel_cannot_take_are_refused_by_name():
    layout = replace(VERIFY.layout, state_size=257)
    inputs = make_window_inputs(replace(VERIFY, layout=layout))
    with pytest.raises(NotImplementedError, match="at most 256 columns for 'pallas', got 257"):
        causal_conv_window(**inputs, layout=layout, layer=1, implementation="pallas")
