"""The gated delta rule: closed forms against the recurrence, and the recurrence against numpy."""

from __future__ import annotations

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gated_delta import gated_delta_fold, gated_delta_scan
from pallas_kernels.gated_delta.xla import inverse
from tests.kernels.cases.gated_delta import (
    SCANS,
    WINDOWS,
    ScanCase,
    WindowCase,
    make_scan_inputs,
    make_window_inputs,
)
from tests.kernels.compare import assert_same_bits, relative_error
from tests.kernels.gated_delta_windows import (
    BY_NAME,
    PATHS,
    RING,
    STATIC,
    TOLERANCE,
    TREE,
    every_dtype,
    window,
)

scan = functools.partial(jax.jit, static_argnames=STATIC)(gated_delta_scan)
fold = functools.partial(jax.jit, static_argnames=STATIC)(gated_delta_fold)
every_scan = pytest.mark.parametrize("case", SCANS, ids=lambda case: case.name)
every_window = pytest.mark.parametrize("case", WINDOWS, ids=lambda case: case.name)


def in_numpy(inputs: dict) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Outputs, what is written, and the last state, in float64."""
    q, k, v, log_decay, beta, state = (
        np.asarray(inputs[name], np.float64)
        for name in ("q", "k", "v", "log_decay", "beta", "initial_state")
    )
    (rows, tokens, heads, _), state = v.shape, state.copy()
    y, u = np.zeros(v.shape), np.zeros(v.shape)
    for b, t, m in np.ndindex(rows, tokens, heads):
        group = m // (heads // k.shape[2])
        own = np.exp(log_decay[b, t, m]) * state[b, m]
        u[b, t, m] = beta[b, t, m] * (v[b, t, m] - own @ k[b, t, group])
        state[b, m] = own + np.outer(u[b, t, m], k[b, t, group])
        y[b, t, m] = state[b, m] @ q[b, t, group]
    return y, u, state


@pytest.mark.parametrize("name", ["two_tiles_and_a_bit", "odd_sizes", "keys_alike", "forgetful"])
def test_the_reference_is_the_recurrence(name):
    inputs = make_scan_inputs(BY_NAME[name])
    got = scan(**inputs, implementation="reference")
    for a, b in zip(got, in_numpy(inputs), strict=True):
        assert relative_error(a, b) < 1e-5


class TestScan:
    @every_scan
    @every_dtype
    def test_equals_the_reference(self, case, dtype):
        inputs = make_scan_inputs(case, dtype=dtype)
        got = scan(**inputs, implementation="xla")
        want = scan(**inputs, implementation="reference")
        for a, b in zip(got, want, strict=True):
            assert a.shape == b.shape and a.dtype == b.dtype
            assert relative_error(a, b) <= TOLERANCE[a.dtype.name]

    def test_padding_is_zero_and_changes_no_bit_whatever_it_holds(self):
        case = BY_NAME["padding"]
        inputs = make_scan_inputs(case)
        padding = np.arange(case.tokens) >= np.array(case.lengths)[:, None]
        poisoned = dict(inputs)
        for name in ("q", "k", "v", "log_decay", "beta"):
            mask = padding.reshape(*padding.shape, *(1,) * (inputs[name].ndim - 2))
            poisoned[name] = jnp.where(mask, jnp.nan, inputs[name])
        got, want = (scan(**given, implementation="xla") for given in (poisoned, inputs))
        for a, b in zip(got, want, strict=True):
            assert_same_bits(a, b)
        assert not np.asarray(got[0])[padding].any() and not np.asarray(got[1])[padding].any()

    def test_a_prompt_in_two_chunks_is_a_prompt(self):
        inputs = make_scan_inputs(replace(BY_NAME["two_tiles_and_a_bit"], tokens=128))
        whole = scan(**inputs, implementation="xla")
        state, parts = inputs.pop("initial_state"), []
        for cut in (slice(0, 96), slice(96, 128)):
            part = {name: x[:, cut] for name, x in inputs.items() if x is not None}
            *made, state = scan(**part, initial_state=state, implementation="xla")
            parts.append(made)
        for index in range(2):
            joined = jnp.concatenate([part[index] for part in parts], axis=1)
            assert relative_error(joined, whole[index]) <= TOLERANCE["float32"]
        assert relative_error(state, whole[2]) <= TOLERANCE["float32"]

    def test_mistakes_exceed_the_tolerance(self):
        inputs = make_scan_inputs(BY_NAME["two_tiles_and_a_bit"])
        want = scan(**inputs, implementation="reference")[0]
        changes = (
            {"q": inputs["k"], "k": inputs["q"]},
            {"k": inputs["k"][:, :, ::-1]},
            {"beta": jnp.roll(inputs["beta"], 1, axis=1)},
            {"log_decay": jnp.roll(inputs["log_decay"], 1, axis=1)},
            {"initial_state": jnp.swapaxes(inputs["initial_state"], 0, 1)[:2]},
        )
        for change in changes[:4]:
            got = scan(**inputs | change, implementation="xla")[0]
            assert relative_error(got, want) > 100 * TOLERANCE["float32"]


@pytest.mark.parametrize("size", [1, 3, 8, 20, 64])
def test_inverse_of_a_triangle(size):
    rng = np.random.default_rng(0)
    lower = np.tril(rng.uniform(-1, 1, (2, 3, size, size)), -1) / max(1, size**0.5)
    got = jax.jit(inverse)(jnp.asarray(lower, jnp.float32))
    assert relative_error(got, np.linalg.inv(np.eye(size) + lower)) < 1e-5


class TestWindow:
    @every_window
    @every_dtype
    def test_equals_the_reference(self, case, dtype):
        inputs = make_window_inputs(case, dtype=dtype)
        *got, same = window(**inputs, implementation="xla")
        *want, _ = window(**inputs, implementation="reference")
        assert same
        for a, b in zip(got, want, strict=True):
            assert a.shape == b.shape and a.dtype == b.dtype
            assert relative_error(a, b) <= TOLERANCE[dtype]

    @pytest.mark.parametrize("name", ["verify", "whole_ring", "decode_with_idle_rows"])
    def test_what_does_not_count_changes_no_bit_whatever_it_holds(self, name):
        case = BY_NAME[name]
        inputs = make_window_inputs(case)
        poisoned = dict(inputs)
        valid = np.asarray(inputs["num_valid"])[:, None]
        beyond = np.arange(case.slots) >= np.asarray(inputs["starts"])[:, None] + valid
        known = np.asarray(inputs["starts"] + inputs["num_known"])[:, None]
        unwritten = np.arange(case.slots) >= known
        behind = np.arange(case.tokens) >= valid
        masks = {"k": beyond, "log_decay": beyond, "u": unwritten}
        masks |= dict.fromkeys(("q", "v", "beta"), behind)
        for name, mask in masks.items():
            x = inputs[name]
            mask = mask.reshape(*mask.shape, *(1,) * (x.ndim - 2))
            poisoned[name] = jnp.where(mask, jnp.nan, x)
        got, want = (window(**given, implementation="xla") for given in (poisoned, inputs))
        for a, b in zip(got[:2], want[:2], strict=True):
            assert_same_bits(a, b)

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_a_token_gets_the_same_bits_whatever_is_known_before_it(self, dtype):
        """As exact mode needs it: the window is the whole ring, and more and more of it is known."""
        case = replace(BY_NAME["whole_ring"], known=None, valid=None)
        inputs = make_window_inputs(case, dtype=dtype)
        y, u, _ = window(**inputs, implementation="xla")
        for known, valid in ((0, 9), (9, 10), (10, 32), (31, 32)):
            count = {"num_known": jnp.full(4, known), "num_valid": jnp.full(4, valid)}
            ring = inputs["u"].at[:, :known].set(u[:, :known])
            got = window(**inputs | count | {"u": ring}, implementation="xla")
            for a, b in ((got[0], y), (got[1], u)):
                assert_same_bits(a[:, known:valid], b[:, known:valid])

    def test_a_window_continues_a_scan(self):
        """Prompt by the scan, then tokens one by one through the ring: the numbers of the whole sequence."""
        case = ScanCase(name="both", tokens=45, heads=4, groups=2)
        inputs = make_scan_inputs(case)
        y, u, _ = scan(**inputs, implementation="reference")
        kept = {name: inputs[name] for name in ("q", "k", "v", "log_decay", "beta")}
        first = {name: x[:, :32] for name, x in kept.items()}
        *_, state = scan(**first, initial_state=inputs["initial_state"], implementation="reference")
        rest = {name: x[:, 32:] for name, x in kept.items()}
        empty = {name: jnp.zeros_like(x) for name, x in rest.items()}
        ring_u = jnp.zeros_like(rest["v"])
        for t in range(13):
            put = {name: empty[name].at[:, : t + 1].set(rest[name][:, : t + 1]) for name in empty}
            place = {"starts": jnp.full(2, t), "num_valid": jnp.ones(2, jnp.int32)}
            one = {name: rest[name][:, t : t + 1] for name in ("q", "v", "beta")}
            got_y, got_u, _ = window(
                **{"state": state, "u": ring_u, "k": put["k"], "log_decay": put["log_decay"]},
                **one,
                **place,
                num_known=jnp.zeros(2, jnp.int32),
                implementation="xla",
            )
            ring_u = ring_u.at[:, t].set(got_u[:, 0])
            assert relative_error(got_y[:, 0], y[:, 32 + t]) < 1e-5
            assert relative_error(got_u[:, 0], u[:, 32 + t]) < 1e-5

    def test_a_node_is_the_end_of_its_own_chain(self):
        """Every node of the tree gives what a window over its path alone would give."""
        inputs = make_window_inputs(RING)
        ancestors = jnp.broadcast_to(TREE, (RING.rows, 5))
        got = window(**inputs, ancestors=ancestors, implementation="xla")
        for node, path in enumerate(PATHS):
            place = inputs["starts"][:, None] + jnp.asarray(path)
            alone = dict(inputs, num_valid=jnp.full(RING.rows, len(path)))
            for name in ("k", "log_decay"):
                ring = inputs[name]
                index = place.reshape(*place.shape, *(1,) * (ring.ndim - 2))
                moved = jnp.take_along_axis(ring, index, axis=1)
                for row, start in enumerate(RING.starts):
                    ring = ring.at[row, start : start + len(path)].set(moved[row])
                alone[name] = ring
            for name in ("q", "v", "beta"):
                alone[name] = inputs[name][:, jnp.asarray(path)]
            want = window(**alone, implementation="reference")
            for index in range(2):
                error = relative_error(got[index][:, node], want[index][:, -1])
                assert error <= TOLERANCE["float32"]

    def test_mistakes_exceed_the_tolerance(self):
        inputs = make_window_inputs(BY_NAME["verify"])
        want = window(**inputs, implementation="reference")[0]
        for change in (
            {"u": inputs["u"][:, ::-1]},  # v in place of what was written would do the same
            {"beta": inputs["beta"][:, ::-1]},
            {"state": jnp.roll(inputs["state"], 1, axis=0)},
            {"starts": inputs["starts"].at[1].add(1)},
        ):
            got = window(**inputs | change, implementation="xla")[0]
            assert relative_error(got, want) > 100 * TOLERANCE["float32"]


@every_dtype
@pytest.mark.parametrize("lengths", [None, (0, 7, 32)])
def test_fold_equals_the_reference_and_the_scan(dtype, lengths):
    case = WindowCase(name="fold", tokens=1, starts=(0, 0, 0), heads=6, groups=2)
    inputs = make_window_inputs(case, dtype=dtype)
    given = {name: inputs[name] for name in ("state", "u", "k", "log_decay")}
    given["lengths"] = None if lengths is None else jnp.asarray(lengths)
    if lengths is not None:
        beyond = (np.arange(32) >= np.array(lengths)[:, None])[..., None]
        given["log_decay"] = jnp.where(beyond, jnp.nan, given["log_decay"])
        for name in ("u", "k"):
            given[name] = jnp.where(beyond[..., None], jnp.nan, given[name])
    got, want = (fold(**given, implementation=name) for name in ("xla", "reference"))
    assert relative_error(got, want) <= TOLERANCE["float32"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"implementation": "pallas"}, "implementation must be one of .* got 'pallas'"),
        ({"k": jnp.ones((2, 70, 3, 16))}, r"k must have shape \(2, 70, 1, 16\)"),
        ({"v": jnp.ones((2, 70, 2, 8), jnp.int32)}, "v must be float32 .* got int32"),
        ({"beta": jnp.ones((2, 70, 3))}, r"beta must have shape \(2, 70, 2\)"),
    ],
)
def test_a_wrong_argument_is_named(change, message):
    inputs = make_scan_inputs(BY_NAME["keys_alike"])
    with pytest.raises(ValueError, match=f"gated_delta_scan: .*{message}"):
        gated_delta_scan(**inputs | change)


def test_heads_that_do_not_divide_are_refused():
    inputs = make_scan_inputs(BY_NAME["keys_alike"])
    inputs |= {"q": jnp.ones((2, 70, 3, 16)), "k": jnp.ones((2, 70, 3, 16))}
    with pytest.raises(ValueError, match="groups of k must divide the heads of v, got 3 and 2"):
        gated_delta_scan(**inputs)
