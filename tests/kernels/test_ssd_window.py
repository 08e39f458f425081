"""Window and fold against the recurrence, what may not be read, and the bits of exact mode."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import fold, ssd_scan
from pallas_kernels.ssd_window import RecordSizes
from tests.kernels.by_name import fold_frames, ssd_window_frames
from tests.kernels.cases.ssd_window import CASES, Case, make_inputs
from tests.kernels.compare import assert_same_bits, relative_error
from tests.kernels.framed import framed
from tests.kernels.lowered import kernels_in
from tests.kernels.ssd_windows import FAST, RING, TOLERANCE, assert_close, ringed, window

WIDE = Case(name="wide", tokens=32, heads=16, groups=2, width=32, size=64, starts=(0,) * 8)
# A head's state has more elements than one program of a fold takes.
LARGE = replace(RING, name="large", heads=2, groups=1, width=80, size=200)
RECORDS = ("x", "dt", "B")

scan = jax.jit(functools.partial(ssd_scan, implementation="reference"))


@functools.partial(jax.jit, static_argnames="implementation")
def folded(state, x, dt, A, B, *, lengths=None, implementation):
    """The fold by the function that has the implementation: from frames to frames for "pallas"."""
    if implementation != "pallas":
        return fold(state, x, dt, A, B, lengths=lengths, implementation=implementation)
    arena, table, exists = framed(state)
    lengths = jnp.full(x.shape[0], x.shape[1]) if lengths is None else lengths
    arena = fold_frames(
        **{"arena": arena, "read": table, "write": table, "exists": exists, "lengths": lengths},
        **{"xB": ringed(x, B), "dt": dt[None], "A": A[None]},
        records=RecordSizes.of(x, B),
        per_layer=x.shape[2],
        implementation=implementation,
    )
    return jax.lax.bitcast_convert_type(arena, jnp.float32).reshape(state.shape)


def fold_inputs(inputs: dict) -> dict:
    return {name: inputs[name] for name in ("state", "A", *RECORDS)}


def spoil_after(inputs: dict, counts, garbage: float) -> dict:
    """The same inputs with `garbage` in every ring slot from `counts` on, and in unused C."""
    inputs = dict(inputs)
    for name in RECORDS:
        array = inputs[name]
        dead = jnp.arange(array.shape[1])[None] >= jnp.asarray(counts)[:, None]
        dead = dead.reshape(dead.shape + (1,) * (array.ndim - 2))
        inputs[name] = jnp.where(dead, jnp.asarray(garbage, array.dtype), array)
    unused = jnp.arange(inputs["C"].shape[1])[None] >= inputs["num_valid"][:, None]
    spoiled = jnp.asarray(garbage, inputs["C"].dtype)
    return inputs | {"C": jnp.where(unused[..., None, None], spoiled, inputs["C"])}


def test_window_and_fold_reference_are_the_recurrence():
    case = replace(RING, starts=(0, 3, 20, 31), tokens=4, num_valid=(4, 4, 2, 1))
    inputs = jax.tree.map(lambda a: np.asarray(a, np.float64), make_inputs(case))
    y = window(**make_inputs(case), implementation="reference")
    for b in range(case.rows):
        counts = case.starts[b] + case.valid[b]
        state = folded(
            **fold_inputs(make_inputs(case)),
            lengths=jnp.full(case.rows, counts),
            implementation="reference",
        )
        for m in range(case.heads):
            g = m // (case.heads // case.groups)
            S = inputs["state"][b, m]
            for slot in range(counts):
                dt = inputs["dt"][b, slot, m]
                update = np.outer(inputs["x"][b, slot, m], inputs["B"][b, slot, g])
                S = np.exp(dt * inputs["A"][m]) * S + dt * update
                t = slot - case.starts[b]
                if t >= 0:
                    assert relative_error(y[b, t, m], S @ inputs["C"][b, t, g]) < 1e-5
            assert relative_error(state[b, m], S) < 1e-5


@pytest.mark.parametrize("implementation", FAST)
class TestImplementation:
    @pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_window_equals_the_reference(self, implementation, case, dtype):
        inputs = make_inputs(case, dtype=dtype)
        y = window(**inputs, implementation=implementation)
        assert y.dtype == jnp.float32
        assert_close(y, window(**inputs, implementation="reference"))

    @pytest.mark.parametrize("case", [RING, LARGE], ids=["ring", "large_states"])
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_fold_equals_the_reference(self, implementation, dtype, case):
        inputs = fold_inputs(make_inputs(case, dtype=dtype))
        lengths = jnp.asarray([32, 0, 1, 19], jnp.int32)
        got = folded(**inputs, lengths=lengths, implementation=implementation)
        assert_close(got, folded(**inputs, lengths=lengths, implementation="reference"))
        assert_same_bits(got[1], inputs["state"][1])

    def test_strong_decay_forgets_without_loss_of_precision(self, implementation):
        inputs = make_inputs(RING)
        inputs["dt"] = inputs["dt"] * 50  # up to exp(-800) a token
        y = window(**inputs, implementation=implementation)
        assert_close(y, window(**inputs, implementation="reference"))
        state = folded(**fold_inputs(inputs), implementation=implementation)
        assert_close(state, folded(**fold_inputs(inputs), implementation="reference"))

    def test_swapped_operands_exceed_the_tolerance(self, implementation):
        inputs = make_inputs(RING)
        want = window(**inputs, implementation="reference")
        swapped = inputs | {"B": inputs["C"], "C": inputs["B"]}
        limit = 100 * TOLERANCE["float32"]
        assert relative_error(window(**swapped, implementation=implementation), want) > limit
        late = inputs | {"starts": inputs["starts"] + 1, "num_valid": inputs["num_valid"] - 1}
        assert relative_error(window(**late, implementation=implementation), want) > limit

    @pytest.mark.parametrize("garbage", [np.nan, np.inf, 3.0])
    @pytest.mark.parametrize("case", CASES[:4], ids=lambda case: case.name)
    def test_dead_slots_and_unused_queries_change_no_bit(self, implementation, case, garbage):
        inputs = make_inputs(case)
        live = np.asarray(case.starts) + np.asarray(case.valid)
        y = window(**inputs, implementation=implementation)
        spoiled = spoil_after(inputs, live, garbage)
        assert_same_bits(window(**spoiled, implementation=implementation), y)
        unused = np.arange(case.tokens) >= np.asarray(case.valid)[:, None]
        assert not np.asarray(y)[unused].any()

    def test_fold_reads_no_record_past_its_length(self, implementation):
        inputs = make_inputs(RING)
        lengths = jnp.asarray([31, 0, 1, 19], jnp.int32)
        spoiled = fold_inputs(spoil_after(inputs, lengths, np.nan))
        got = folded(**spoiled, lengths=lengths, implementation=implementation)
        want = folded(**fold_inputs(inputs), lengths=lengths, implementation=implementation)
        assert_same_bits(got, want)

    def test_an_idle_row_returns_zeros_whatever_its_state(self, implementation):
        case = replace(RING, num_valid=(32, 0, 5, 0))
        inputs = make_inputs(case)
        poisoned = inputs | {"state": inputs["state"].at[jnp.array([1, 3])].set(jnp.nan)}
        got = window(**poisoned, implementation=implementation)
        assert_same_bits(got, window(**inputs, implementation=implementation))

    @pytest.mark.parametrize("tokens", [1, 4, 32])
    def test_windows_over_folds_equal_one_recurrence(self, implementation, tokens):
        """128 tokens from a checkpoint, `tokens` at a time, folding whenever the ring is full."""
        long = make_inputs(replace(RING, slots=128, tokens=128))
        want_y, want_state = scan(
            **{name: long[name] for name in (*RECORDS, "A", "C")}, initial_state=long["state"]
        )
        state, ys = long["state"], []
        for position in range(0, 128, tokens):
            grain_start = position - position % 32
            ring = {name: long[name][:, grain_start : grain_start + 32] for name in RECORDS}
            if position and position == grain_start:
                before = {name: long[name][:, position - 32 : position] for name in RECORDS}
                state = folded(state, A=long["A"], **before, implementation=implementation)
            y = window(
                state,
                A=long["A"],
                C=long["C"][:, position : position + tokens],
                starts=jnp.full(RING.rows, position - grain_start),
                implementation=implementation,
                **ring,
            )
            ys.append(y)
        assert_close(jnp.concatenate(ys, axis=1), want_y)
        last = {name: long[name][:, 96:] for name in RECORDS}
        assert_close(folded(state, A=long["A"], **last, implementation=implementation), want_state)

    @pytest.mark.parametrize("length", [1, 16, 28])
    def test_fold_then_window_equals_window_without_fold(self, implementation, length):
        """Folding the first records and moving the rest to the front changes no output."""
        case = replace(RING, tokens=4, starts=(28,) * 4)
        inputs = make_inputs(case)
        want = window(**inputs, implementation=implementation)
        lengths = jnp.full(case.rows, length)
        moved = {name: jnp.roll(inputs[name], -length, axis=1) for name in RECORDS}
        moved["state"] = folded(
            **fold_inputs(inputs), lengths=lengths, implementation=implementation
        )
        moved["starts"] = inputs["starts"] - length
        assert_close(window(**inputs | moved, implementation=implementation), want)

    @pytest.mark.parametrize("case", [RING, WIDE], ids=lambda case: case.name)
    @pytest.mark.parametrize("t", [0, 1, 15, 30, 31])
    def test_a_query_has_the_same_bits_alone_and_together(self, implementation, case, t):
        inputs = make_inputs(case)
        together = window(**inputs, implementation=implementation)
        alone = spoil_after(inputs, np.full(case.rows, t + 1), np.nan)
        alone["C"] = jnp.zeros_like(inputs["C"]).at[:, t].set(inputs["C"][:, t])
        alone["num_valid"] = jnp.full(case.rows, t + 1)
        assert_same_bits(window(**alone, implementation=implementation)[:, t], together[:, t])

    @pytest.mark.parametrize("case", [RING, WIDE], ids=lambda case: case.name)
    def test_a_row_has_the_same_bits_in_any_batch_and_at_any_place(self, implementation, case):
        inputs, others = make_inputs(case), make_inputs(case, seed=1)
        want_y = window(**inputs, implementation=implementation)[0]
        want_state = folded(**fold_inputs(inputs), implementation=implementation)[0]
        for row in range(case.rows):
            mixed = {
                name: others[name].at[row].set(inputs[name][0]) if name != "A" else inputs["A"]
                for name in inputs
            }
            mixed["num_valid"] = (jnp.arange(case.rows) * 5 % 33).at[row].set(32)
            got = window(**mixed, implementation=implementation)
            assert_same_bits(got[row], want_y)
            got = folded(**fold_inputs(mixed), implementation=implementation)
            assert_same_bits(got[row], want_state)


def test_none_is_xla_for_arrays_and_a_name_is_obeyed():
    inputs = fold_inputs(make_inputs(CASES[0]))

    def with_name(name):
        return lambda inputs: fold(**inputs, implementation=name)

    loops = {
        name: "stablehlo.while" in jax.jit(with_name(name)).lower(inputs).as_text()
        for name in (None, "xla", "reference")
    }  # the scan of the reference
    assert loops == {None: False, "xla": False, "reference": True}
    assert kernels_in(with_name(None), inputs) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"implementation": "tpu"}, "ssd_window_frames: implementation .* got 'tpu'"),
        ({"C": jnp.ones((3, 1))}, r"C must have 4 dimensions, got shape \(3, 1\)"),
        ({"frames": jnp.ones((2, 6), jnp.int32)}, r"frames must have shape \(3, 6\), got \(2, 6\)"),
        ({"starts": jnp.ones(2, jnp.int32)}, r"starts .* \(3,\), got \(2,\)"),
        ({"num_valid": jnp.ones(4, jnp.int32)}, r"num_valid .* \(3,\), got \(4,\)"),
        ({"B": jnp.ones((3, 31, 2, 16))}, r"B must .* got \(3, 31, 2, 16\)"),
        ({"ancestors": jnp.ones((3, 2), jnp.int32)}, r"ancestors .* got \(3, 2\)"),
    ],
)
def test_a_wrong_argument_of_a_window_is_named(change, message):
    inputs = make_inputs(CASES[0])
    given = zip(("arena", "frames", "exists"), framed(inputs.pop("state")), strict=True)
    with pytest.raises(ValueError, match=message):
        ssd_window_frames(**dict(given) | inputs | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"state": jnp.ones((3, 6, 8, 4))}, r"state .* got \(3, 6, 8, 4\)"),
        ({"B": jnp.ones((3, 31, 2, 16))}, r"fold: B must .* got \(3, 31, 2, 16\)"),
        ({"lengths": jnp.ones(2, jnp.int32)}, r"fold: lengths .* \(3,\), got \(2,\)"),
        ({"dt": jnp.ones((3, 32, 1))}, r"fold: dt .* \(3, 32, 6\), got \(3, 32, 1\)"),
        ({"implementation": "pallas"}, r"must be one of \['reference', 'xla'\], got 'pallas'"),
    ],
)
def test_a_wrong_argument_of_a_fold_is_named(change, message):
    inputs = fold_inputs(make_inputs(CASES[0]))
    with pytest.raises(ValueError, match=message):
        fold(**inputs | change)
