"""The selective scan: tiles against the recurrence, and the recurrence against numpy."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.selective_scan import selective_scan
from tests.kernels.cases.selective_scan import CASES, make_inputs
from tests.kernels.compare import assert_same_bits, relative_error

TOLERANCE = 1e-6  # of the norm
scan = functools.partial(jax.jit, static_argnames=("implementation",))(selective_scan)
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
BY_NAME = {case.name: case for case in CASES}


@every_case
def test_the_reference_is_the_recurrence(case):
    inputs = make_inputs(case)
    given = {name: np.asarray(value, np.float64) for name, value in inputs.items()}
    got_y, got_states = scan(**inputs, implementation="reference")
    lengths = case.lengths or (case.tokens,) * case.rows
    for row in range(case.rows):
        state, states = given["state"][row], [given["state"][row]]
        for t in range(lengths[row]):
            step = given["dt"][row, t][:, None]
            state = np.exp(step * given["A"]) * state
            state = state + step * given["x"][row, t][:, None] * given["B"][row, t]
            states.append(state)
            assert relative_error(got_y[row, t], state @ given["C"][row, t]) < 1e-5
        kept = case.kept[row] if case.kept else (case.tokens,)
        for place, count in enumerate(kept):
            want = states[min(count, lengths[row])]
            assert relative_error(got_states[row, place], want) < 1e-5


@every_case
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tiles_equal_the_reference(case, dtype):
    inputs = make_inputs(case, dtype=dtype)
    for got, want in zip(
        scan(**inputs, implementation="xla"),
        scan(**inputs, implementation="reference"),
        strict=True,
    ):
        assert got.shape == want.shape and got.dtype == want.dtype == jnp.float32
        assert relative_error(got, want) <= TOLERANCE


@pytest.mark.parametrize("name", ["padding", "window_of_a_few"])
def test_what_is_not_valid_changes_no_bit_whatever_it_holds(name):
    inputs = make_inputs(BY_NAME[name])
    poisoned = dict(inputs)
    for key in ("x", "dt", "B", "C"):
        poisoned[key] = jnp.where(inputs["valid"][..., None], inputs[key], jnp.nan)
    for got, want in zip(
        scan(**poisoned, implementation="xla"), scan(**inputs, implementation="xla"), strict=True
    ):
        assert_same_bits(got, want)


def test_mistakes_exceed_the_tolerance():
    inputs = make_inputs(BY_NAME["tiles_and_a_bit"])
    want = scan(**inputs, implementation="reference")
    for change in (
        {"B": inputs["C"], "C": inputs["B"]},
        {"dt": jnp.roll(inputs["dt"], 1, axis=1)},
        {"A": inputs["A"][::-1]},
        {"state": inputs["state"][::-1]},
    ):
        got = scan(**inputs | change, implementation="xla")
        assert relative_error(got[0], want[0]) > 100 * TOLERANCE
    late = inputs | {"kept": inputs["kept"] + 1}
    assert relative_error(scan(**late, implementation="xla")[1], want[1]) > 100 * TOLERANCE


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"implementation": "tpu"}, "implementation must be one of .* got 'tpu'"),
        ({"A": jnp.ones((12, 6))}, r"B must have shape \(2, 21, 6\), got \(2, 21, 5\)"),
        ({"dt": jnp.ones((2, 21, 12), jnp.bfloat16)}, "dt must be float32, got bfloat16"),
        ({"state": jnp.ones((2, 11, 5))}, r"state must have shape \(2, 12, 5\)"),
    ],
)
def test_a_wrong_argument_is_named(change, message):
    with pytest.raises(ValueError, match=f"selective_scan: {message}"):
        selective_scan(**make_inputs(BY_NAME["tiles_and_a_bit"]) | change)
