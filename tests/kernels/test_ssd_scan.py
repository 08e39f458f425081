"""The scan's implementations against the recurrence, and what padding may not do."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import ssd_scan
from pallas_kernels.ssd_scan.api import IMPLEMENTATIONS
from tests.kernels.cases.ssd_scan import CASES, make_inputs
from tests.kernels.compare import assert_same_bits, relative_error
from tests.kernels.lowered import kernels_in
from tests.kernels.ssd_scans import RAGGED, ROUNDED, TAIL, TOLERANCE, assert_close, scan

FAST = sorted(set(IMPLEMENTATIONS) - {"reference"})


def slow_scan(x, dt, A, B, C, initial_state=None, lengths=None, state_lengths=None):
    """The recurrence with float64 numbers, one row, head and token at a time."""
    rows, tokens, heads, width = x.shape
    x, dt, A, B, C = (np.asarray(a, np.float64) for a in (x, dt, A, B, C))
    y = np.zeros(x.shape)
    last = np.zeros((rows, heads, width, B.shape[-1]))
    for b in range(rows):
        length = tokens if lengths is None else int(lengths[b])
        state_length = length if state_lengths is None else int(state_lengths[b])
        for m in range(heads):
            g = m // (heads // B.shape[2])
            state = 0 if initial_state is None else np.asarray(initial_state[b, m], np.float64)
            last[b, m] = state
            for t in range(length):
                update = np.outer(x[b, t, m], B[b, t, g])
                state = np.exp(dt[b, t, m] * A[m]) * state + dt[b, t, m] * update
                y[b, t, m] = state @ C[b, t, g]
                if t < state_length:
                    last[b, m] = state
    return y, last


@pytest.mark.parametrize("case", [RAGGED, TAIL], ids=lambda case: case.name)
def test_reference_is_the_recurrence(case):
    inputs = make_inputs(case)
    y, state = scan(**inputs, implementation="reference")
    want_y, want_state = slow_scan(**inputs)
    assert relative_error(y, want_y) <= TOLERANCE["float32"]
    assert relative_error(state, want_state) <= TOLERANCE["float32"]


@pytest.mark.parametrize("implementation", FAST)
class TestImplementation:
    @pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
    def test_outputs_and_state_equal_the_reference(self, implementation, case):
        inputs = make_inputs(case)
        y, state = scan(**inputs, implementation=implementation)
        want_y, want_state = scan(**inputs, implementation="reference")
        assert_close(y, want_y)
        assert_close(state, want_state)

    @pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
    def test_bfloat16_inputs(self, implementation, case):
        inputs = make_inputs(case, dtype="bfloat16")
        y, state = scan(**inputs, implementation=implementation)
        want_y, want_state = scan(**inputs, implementation="reference")
        assert y.dtype == jnp.bfloat16 and state.dtype == jnp.float32
        tolerance = ROUNDED if implementation == "pallas" else None
        assert_close(y, want_y, tolerance)
        assert_close(state, want_state, tolerance)

    def test_swapped_projections_exceed_the_tolerance(self, implementation):
        inputs = make_inputs(TAIL)
        want_y, want_state = scan(**inputs, implementation="reference")
        swapped = inputs | {"B": inputs["C"], "C": inputs["B"]}
        y, state = scan(**swapped, implementation=implementation)
        assert relative_error(y, want_y) > 100 * TOLERANCE["float32"]
        assert relative_error(state, want_state) > 100 * TOLERANCE["float32"]

    def test_a_shorter_state_leaves_outputs_bit_for_bit(self, implementation):
        inputs = make_inputs(TAIL)
        y, _ = scan(**inputs, implementation=implementation)
        full = inputs | {"state_lengths": inputs["lengths"]}
        assert_same_bits(y, scan(**full, implementation=implementation)[0])

    def test_an_aligned_tail_of_one_grain_is_left_out_of_the_state(self, implementation):
        inputs = make_inputs(replace(TAIL, lengths=None, state_lengths=None))
        lengths = jnp.asarray([33, 64, 65, 96, 160], jnp.int32)
        state_lengths = (lengths - 1) // 32 * 32
        _, state = scan(
            **inputs, lengths=lengths, state_lengths=state_lengths, implementation=implementation
        )
        _, want = scan(**inputs, lengths=state_lengths, implementation="reference")
        assert_close(state, want)

    @pytest.mark.parametrize("garbage", [np.nan, np.inf, 7.0])
    def test_padding_changes_no_bit(self, implementation, garbage):
        inputs = make_inputs(RAGGED)
        lengths = inputs["lengths"]
        real = np.arange(RAGGED.tokens) < np.asarray(lengths)[:, None]
        dirty = dict(inputs)
        for name in ("x", "dt", "B", "C"):
            mask = real.reshape(real.shape + (1,) * (inputs[name].ndim - 2))
            dirty[name] = jnp.where(mask, inputs[name], jnp.float32(garbage))
        y, state = scan(**inputs, implementation=implementation)
        dirty_y, dirty_state = scan(**dirty, implementation=implementation)
        assert_same_bits(dirty_y, y)
        assert_same_bits(dirty_state, state)
        assert not np.asarray(y)[~real].any()

    def test_an_empty_row_keeps_its_state_and_returns_zeros_even_from_nan(self, implementation):
        inputs = make_inputs(RAGGED)
        empty = RAGGED.lengths.index(0)
        poisoned = inputs | {"initial_state": inputs["initial_state"].at[empty].set(jnp.nan)}
        y, state = scan(**inputs, implementation=implementation)
        poisoned_y, poisoned_state = scan(**poisoned, implementation=implementation)
        assert_same_bits(state[empty], inputs["initial_state"][empty])
        assert_same_bits(poisoned_y, y)
        others = np.arange(RAGGED.rows) != empty
        assert_same_bits(np.asarray(poisoned_state)[others], np.asarray(state)[others])

    def test_two_chunks_with_the_state_carried_equal_one_scan(self, implementation):
        inputs = make_inputs(replace(RAGGED, lengths=None))
        want_y, want_state = scan(**inputs, implementation="reference")
        head, tail = dict(inputs), dict(inputs)
        for name in ("x", "dt", "B", "C"):
            head[name], tail[name] = inputs[name][:, :96], inputs[name][:, 96:]
        head_y, tail["initial_state"] = scan(**head, implementation=implementation)
        tail_y, state = scan(**tail, implementation=implementation)
        assert_close(jnp.concatenate([head_y, tail_y], axis=1), want_y)
        assert_close(state, want_state)

    def test_strong_decay_forgets_without_overflow(self, implementation):
        inputs = make_inputs(replace(RAGGED, lengths=None))
        inputs["dt"] = inputs["dt"] * 50  # up to exp(-800) a token
        y, state = scan(**inputs, implementation=implementation)
        want_y, want_state = scan(**inputs, implementation="reference")
        assert_close(y, want_y)  # plain running sums, here down to -4000, would be 1.5e-5 off
        assert_close(state, want_state)

    def test_gradients_equal_the_reference(self, implementation):
        inputs = make_inputs(RAGGED)
        lengths = inputs.pop("lengths")

        @functools.partial(jax.jit, static_argnums=1)
        @jax.grad
        def gradients(inputs, implementation):
            y, state = ssd_scan(**inputs, lengths=lengths, implementation=implementation)
            return jnp.sum(jnp.sin(y)) + jnp.sum(jnp.cos(state))

        got, want = gradients(inputs, implementation), gradients(inputs, "reference")
        for name in inputs:
            assert np.isfinite(got[name]).all(), name
            assert relative_error(got[name], want[name]) < 1e-5, name


def test_none_chooses_by_platform_and_a_name_is_obeyed():
    inputs = make_inputs(CASES[1])

    def with_name(name):
        return lambda inputs: ssd_scan(**inputs, implementation=name)

    for name in (None, "pallas"):
        assert kernels_in(with_name(name), inputs) == ["ssd_scan"]
    assert kernels_in(with_name("xla"), inputs) == []
    on_cpu = [str(jax.make_jaxpr(with_name(name))(inputs)) for name in ("xla", "reference")]
    assert on_cpu[0] != on_cpu[1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"implementation": "cuda"}, "ssd_scan: implementation must be one of .* got 'cuda'"),
        ({"x": jnp.ones((2, 3))}, r"ssd_scan: x must have 4 dimensions, got shape \(2, 3\)"),
        ({"dt": jnp.ones((2, 1, 5))}, r"dt must have shape \(2, 1, 2\), got \(2, 1, 5\)"),
        ({"A": -jnp.ones(3)}, r"A must have shape \(2,\), got \(3,\)"),
        ({"C": jnp.ones((2, 1, 1, 8))}, r"C must have shape \(2, 1, 1, 16\), got \(2, 1, 1, 8\)"),
        ({"lengths": jnp.ones(3, jnp.int32)}, r"lengths must have shape \(2,\), got \(3,\)"),
        ({"initial_state": jnp.ones((2, 2, 8, 4))}, r"initial_state .* got \(2, 2, 8, 4\)"),
        (
            {name: jnp.ones((2, 1, 3, 16)) for name in "BC"},
            "groups of B must divide the heads of x, got 3 and 2",
        ),
    ],
)
def test_a_wrong_argument_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        ssd_scan(**make_inputs(CASES[0]) | change)
