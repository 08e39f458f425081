"""The gated norm against its definition and the engine's layer."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import gated_rmsnorm
from pallas_kernels.rmsnorm.api import GATED
from tests.kernels.cases.rmsnorm import SMALL_GATED_CASES, GatedCase, make_gated_inputs
from tests.kernels.compare import relative_error
from tests.kernels.lowered import kernels_in

FAST = sorted(set(GATED) - {"reference"})
TOLERANCE = {"float32": 1e-6, "bfloat16": 2e-3}  # of the norm
BLOCKS = GatedCase(name="blocks", size=96, groups=4, behind=55)
EPS = 1e-3

STATIC = ("eps", "groups", "norm_before_gate", "implementation")
norm = functools.partial(jax.jit, static_argnames=STATIC)(gated_rmsnorm)


def run(case: GatedCase, inputs: dict, implementation):
    static = {"groups": case.groups, "norm_before_gate": case.norm_before_gate}
    return norm(**inputs, eps=EPS, **static, implementation=implementation)


def assert_close(got, want) -> None:
    assert got.shape == want.shape and got.dtype == want.dtype
    assert relative_error(got, want) <= TOLERANCE[got.dtype.name]


def test_the_reference_is_the_definition():
    inputs = make_gated_inputs(BLOCKS)
    got = run(BLOCKS, inputs, "reference")
    y, gate, weight = (np.asarray(inputs[name], np.float64) for name in ("y", "gate", "weight"))
    z = gate[..., :96]
    blocks = (y * z / (1 + np.exp(-z))).reshape(2, 3, 4, 24)
    normed = blocks / np.sqrt((blocks**2).mean(-1, keepdims=True) + EPS)
    assert relative_error(got, normed.reshape(y.shape) * weight) < 1e-6


def test_the_reference_of_a_norm_before_the_gate_is_the_definition():
    case = replace(BLOCKS, norm_before_gate=True, shared=True)
    inputs = make_gated_inputs(case)
    y, gate, weight = (np.asarray(inputs[name], np.float64) for name in ("y", "gate", "weight"))
    z, blocks = gate[..., :96], y.reshape(2, 3, 4, 24)
    normed = blocks / np.sqrt((blocks**2).mean(-1, keepdims=True) + EPS) * weight
    want = normed.reshape(y.shape) * z / (1 + np.exp(-z))
    assert relative_error(run(case, inputs, "reference"), want) < 1e-6


@pytest.mark.parametrize("implementation", FAST)
class TestImplementation:
    @pytest.mark.parametrize("case", SMALL_GATED_CASES, ids=lambda case: case.name)
    @pytest.mark.parametrize(
        ("dtype", "y_dtype"),
        [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32")],
    )
    def test_equals_the_reference_whatever_stands_beside_z(
        self, implementation, case, dtype, y_dtype
    ):
        inputs = make_gated_inputs(case, dtype=dtype, y_dtype=y_dtype)
        want = run(case, inputs, "reference")
        beside = np.arange(inputs["gate"].shape[-1]) >= case.size
        inputs["gate"] = jnp.where(beside, jnp.nan, inputs["gate"])
        assert_close(run(case, inputs, implementation), want)

    @pytest.mark.parametrize("weight", ["float32", "bfloat16"])
    @pytest.mark.parametrize("gate", ["float32", "bfloat16"])
    def test_is_what_the_engines_layer_computes_in_the_same_dtypes(
        self, implementation, gate, weight
    ):
        inputs = make_gated_inputs(BLOCKS, dtype=gate, y_dtype="bfloat16")
        inputs["weight"] = inputs["weight"].astype(weight)
        z = inputs["gate"][..., :96]
        want = run(BLOCKS, inputs | {"gate": z}, "xla")
        assert_close(run(BLOCKS, inputs, implementation), want)

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_a_gate_in_parts_counts_as_their_sum(self, implementation, dtype):
        inputs = make_gated_inputs(BLOCKS, dtype=dtype)
        parts = jnp.stack([make_gated_inputs(BLOCKS, seed=seed)["gate"] for seed in range(3)])
        want = run(BLOCKS, inputs | {"gate": parts.sum(0).astype(dtype)}, "reference")
        assert_close(run(BLOCKS, inputs | {"gate": parts}, implementation), want)
        got = run(BLOCKS, inputs | {"gate": parts[1:]}, implementation)
        assert relative_error(got, want) > 100 * TOLERANCE["float32"]

    def test_a_token_of_zeros_stays_zero(self, implementation):
        inputs = make_gated_inputs(BLOCKS)
        inputs["y"] = inputs["y"].at[0, 1].set(0)
        got = np.asarray(run(BLOCKS, inputs, implementation))
        assert not got[0, 1].any() and np.isfinite(got).all()

    def test_swapped_operands_exceed_the_tolerance(self, implementation):
        inputs = make_gated_inputs(BLOCKS)
        want = run(BLOCKS, inputs, "reference")
        z, limit = inputs["gate"][..., :96], 100 * TOLERANCE["float32"]
        swapped = inputs | {"y": z, "gate": inputs["gate"].at[..., :96].set(inputs["y"])}
        assert relative_error(run(BLOCKS, swapped, implementation), want) > limit
        shifted = inputs | {"gate": jnp.roll(inputs["gate"], 1, axis=-1)}
        assert relative_error(run(BLOCKS, shifted, implementation), want) > limit
        got = norm(**inputs, eps=EPS, groups=2, implementation=implementation)
        assert relative_error(got, want) > limit
        late = replace(BLOCKS, norm_before_gate=True)
        assert relative_error(run(late, inputs, implementation), want) > limit


def test_none_chooses_by_platform_and_a_name_is_obeyed():
    inputs = make_gated_inputs(BLOCKS, dtype="bfloat16")

    def with_name(name):
        return lambda x: gated_rmsnorm(**x, eps=EPS, groups=4, implementation=name)

    for name in (None, "pallas"):
        assert kernels_in(with_name(name), inputs) == ["gated_rmsnorm"]
    assert kernels_in(with_name("xla"), inputs) == []


def test_blocks_too_large_for_the_kernel_are_refused_by_name_and_run_by_default():
    inputs = make_gated_inputs(GatedCase(name="huge", lead=(1,), size=32 * 1024 + 1))
    with pytest.raises(NotImplementedError, match="at most 32768 elements .* got 32769"):
        gated_rmsnorm(**inputs, eps=EPS, implementation="pallas")
    assert kernels_in(lambda x: gated_rmsnorm(**x, eps=EPS), inputs) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"implementation": "tpu"}, "gated_rmsnorm: implementation .* got 'tpu'"),
        ({"groups": 7}, "groups must divide the last axis of y, got 7 and 96"),
        ({"groups": 0}, "groups must divide the last axis of y, got 0 and 96"),
        ({"gate": jnp.ones((3, 2, 200))}, r"gate .* \(2, 3, 200\), got \(3, 2, 200\)"),
        ({"gate": jnp.ones((2, 2, 3), jnp.bfloat16)}, r"gate .* \(2, 3, 3\), got \(2, 2, 3\)"),
        (
            {"gate": jnp.ones((2, 2, 3, 151), jnp.bfloat16)},
            r"parts float32.* bfloat16\[2, 2, 3, 151\]",
        ),
        ({"gate": jnp.ones(151)}, r"gate must have 3 dim.* got shape \(151,\)"),
        ({"gate": jnp.ones((2, 3, 95))}, "gate must have 96 columns or more, got 95"),
        ({"weight": jnp.ones(95)}, "weight must have 96 elements, or the 24 of a group, got 95"),
    ],
)
def test_a_wrong_argument_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        gated_rmsnorm(**{"eps": EPS, "groups": 4} | make_gated_inputs(BLOCKS) | change)
