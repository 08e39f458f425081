"""The residual sum and norm against their definition and the engine's expressions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import residual_rmsnorm
from pallas_kernels.rmsnorm.api import RESIDUAL
from pallas_kernels.rmsnorm.xla import rms_norm
from tests.kernels.cases.rmsnorm import SMALL_RESIDUAL_CASES, ResidualCase, make_residual_inputs
from tests.kernels.compare import assert_same_bits, relative_error
from tests.kernels.lowered import kernels_in

FAST = sorted(set(RESIDUAL) - {"reference"})
TOLERANCE = {"float32": 1e-6, "bfloat16": 2e-3}  # of the norm
DTYPES = pytest.mark.parametrize(
    ("dtype", "h_dtype"),
    [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32")],
)
PADDED = next(case for case in SMALL_RESIDUAL_CASES if case.name == "padding")
PARTS = ResidualCase(name="parts", size=96, parts=3, multiplier=0.3, masked=True)
EPS = 1e-3

STATIC = ("eps", "multiplier", "dtype", "implementation")
# XLA may leave out roundings inside what it fuses; here each one counts.
compiled = functools.partial(jax.jit, compiler_options={"xla_allow_excess_precision": False})
norm = compiled(residual_rmsnorm, static_argnames=STATIC)


def run(case: ResidualCase, inputs: dict, implementation, dtype: str | None = None):
    static = {"eps": EPS, "multiplier": case.multiplier, "dtype": dtype}
    return norm(**inputs, **static, implementation=implementation)


def error(got, want) -> float:
    """The larger of the sums' and the norms' relative errors."""
    return max(relative_error(a, b) for a, b in zip(got, want, strict=True))


def widened(array: jax.Array) -> jax.Array:
    return array.astype(jnp.float32) if array.dtype == jnp.bfloat16 else array


def assert_close(got, want, limit: float | None = None) -> None:
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        assert relative_error(a, b) <= (limit or TOLERANCE[a.dtype.name])


@pytest.mark.parametrize("case", [PADDED, PARTS], ids=lambda case: case.name)
def test_the_reference_is_the_definition(case):
    inputs = make_residual_inputs(case)
    got = run(case, inputs, "reference")
    h, update, weight = (np.asarray(inputs[name], np.float64) for name in ("h", "update", "weight"))
    h = h + case.multiplier * (update.sum(0) if case.parts else update)
    h = np.where(np.asarray(inputs["valid"])[..., None], h, 0)
    assert_close(got, (jnp.asarray(h, "float32"), got[1]))
    normed = h / np.sqrt((h**2).mean(-1, keepdims=True) + EPS) * weight
    assert relative_error(got[1], normed) < 1e-6


@pytest.mark.parametrize("implementation", FAST)
class TestImplementation:
    @pytest.mark.parametrize("case", SMALL_RESIDUAL_CASES, ids=lambda case: case.name)
    @DTYPES
    def test_equals_the_reference(self, implementation, case, dtype, h_dtype):
        inputs = make_residual_inputs(case, dtype=dtype, h_dtype=h_dtype)
        got = run(case, inputs, implementation, dtype)
        assert got[0].dtype == h_dtype and got[1].dtype == dtype
        want = run(case, inputs, "reference", dtype)
        if not case.parts or dtype == "float32":
            # Parts are summed in some order, and the last sum may be rounded the other way.
            assert_close(got, want, TOLERANCE[dtype] if case.parts else None)
            return
        # On a CPU, XLA leaves out roundings between the parts and the sum: never farther from the truth.
        truth = run(case, jax.tree.map(widened, inputs), "reference")  # in float32
        for a, b, exact in zip(got, want, truth, strict=True):
            assert relative_error(a, exact) <= 1.02 * relative_error(b, exact)

    @pytest.mark.parametrize("case", [PADDED, PARTS], ids=lambda case: case.name)
    @DTYPES
    def test_padding_is_zero_and_changes_no_bit_whatever_it_holds(
        self, implementation, case, dtype, h_dtype
    ):
        inputs = make_residual_inputs(case, dtype=dtype, h_dtype=h_dtype)
        padding = ~inputs["valid"][..., None]
        poisoned = inputs | {
            name: jnp.where(padding, jnp.nan, inputs[name]) for name in ("h", "update")
        }
        got, want = run(case, poisoned, implementation), run(case, inputs, implementation)
        for a, b in zip(got, want, strict=True):
            assert_same_bits(a, b)
            assert not np.asarray(a)[~np.asarray(inputs["valid"])].any()

    @pytest.mark.parametrize("multiplier", [1.0, 0.22])
    @DTYPES
    def test_is_what_the_engine_computes_one_after_the_other(
        self, implementation, multiplier, dtype, h_dtype
    ):
        case = ResidualCase(name="engine", size=192, multiplier=multiplier)
        inputs = make_residual_inputs(case, dtype=dtype, h_dtype=h_dtype)

        @compiled
        def engine(h, update, weight):
            if multiplier != 1.0:
                update = update * multiplier
            h = h + update.astype(h.dtype)
            return h, rms_norm(h, weight, EPS).astype(weight.dtype)

        inputs.pop("valid")
        got, want = run(case, inputs, implementation), engine(**inputs)
        assert_same_bits(got[0], want[0])
        assert_close(got, want)

    def test_a_token_of_zeros_stays_zero(self, implementation):
        case = ResidualCase(name="zeros", size=64)
        inputs = make_residual_inputs(case)
        inputs["h"] = inputs["h"].at[0, 1].set(-inputs["update"][0, 1])
        got = run(case, inputs, implementation)
        assert not any(np.asarray(x)[0, 1].any() for x in got)
        assert all(np.isfinite(np.asarray(x)).all() for x in got)

    def test_mistakes_exceed_the_tolerance(self, implementation):
        inputs = make_residual_inputs(PARTS)
        want, limit = run(PARTS, inputs, "reference"), 100 * TOLERANCE["float32"]

        def wrong(change: dict, **static):
            static = {"eps": EPS, "multiplier": PARTS.multiplier} | static
            return error(norm(**inputs | change, **static, implementation=implementation), want)

        assert wrong({}) <= TOLERANCE["float32"]
        assert wrong({"update": inputs["update"][:2]}) > limit
        assert wrong({"update": inputs["h"], "h": inputs["update"].sum(0)}) > limit
        assert wrong({"valid": None}) > limit
        assert wrong({"valid": jnp.roll(inputs["valid"], 1)}) > limit
        assert wrong({"weight": jnp.roll(inputs["weight"], 1)}) > limit
        assert wrong({}, multiplier=1.0) > limit
        assert wrong({}, eps=0.1) > limit


def test_none_chooses_by_platform_and_a_name_is_obeyed():
    inputs = make_residual_inputs(PARTS, dtype="bfloat16")

    def with_name(name):
        return lambda x: residual_rmsnorm(**x, eps=EPS, implementation=name)

    for name in (None, "pallas"):
        assert kernels_in(with_name(name), inputs) == ["residual_rmsnorm"]
    assert kernels_in(with_name("xla"), inputs) == []


def test_tokens_too_large_for_the_kernel_are_refused_by_name_and_run_by_default():
    inputs = make_residual_inputs(ResidualCase(name="huge", lead=(1,), size=16 * 1024 + 1))
    with pytest.raises(NotImplementedError, match="at most 16384 channels .* got 16385; use 'xla'"):
        residual_rmsnorm(**inputs, eps=EPS, implementation="pallas")
    assert kernels_in(lambda x: residual_rmsnorm(**x, eps=EPS), inputs) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"implementation": "tpu"}, "residual_rmsnorm: implementation .* got 'tpu'"),
        ({"update": jnp.ones((2, 3, 95))}, r"update .* \(2, 3, 96\), got \(2, 3, 95\)"),
        ({"update": jnp.ones((4, 2, 2, 96))}, r"update .* \(4, 2, 3, 96\), got \(4, 2, 2, 96\)"),
        ({"update": jnp.ones((3, 96))}, r"update must have 3 dim.* got shape \(3, 96\)"),
        (
            {"update": jnp.ones((4, 2, 3, 96), jnp.bfloat16)},
            r"update must be parts float32.* got bfloat16\[4, 2, 3, 96\]; sum",
        ),
        (
            {"update": jnp.ones((0, 2, 3, 96))},
            r"update must not be empty, got shape \(0, 2, 3, 96\)",
        ),
        ({"weight": jnp.ones(95)}, r"weight .* \(96,\), got \(95,\)"),
        ({"valid": jnp.ones((3, 2), bool)}, r"valid .* \(2, 3\), got \(3, 2\)"),
    ],
)
def test_a_wrong_argument_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        residual_rmsnorm(**{"eps": EPS} | make_residual_inputs(PARTS) | change)
