"""The convolution over prompt chunks against its definition and the engine's layer, and what it may not read."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hybrid_jax.config import Mamba2
from hybrid_jax.layers.mamba2 import MAMBA2
from pallas_kernels import causal_conv
from pallas_kernels.causal_conv import ProjectionLayout
from pallas_kernels.causal_conv.api import CHUNKS
from pallas_kernels.causal_conv.kernel import Config, causal_conv_pallas
from pallas_kernels.causal_conv.reference import Chunk
from pallas_kernels.operands import stored
from tests.kernels.cases.causal_conv import CASES, NEMOTRON_H_8B, SMALL, Case, make_inputs
from tests.kernels.compare import assert_same_bits, relative_error
from tests.kernels.lowered import kernels_in

FAST = sorted(set(CHUNKS) - {"reference"})
TOLERANCE = {"float32": 1e-6, "bfloat16": 1e-3}  # of the norm
ROW = Case(name="row", tokens=20, lengths=(20, 11))

conv = functools.partial(jax.jit, static_argnames=("layout", "implementation"))(causal_conv)


def assert_close(got, want) -> None:
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        assert relative_error(a, b) <= TOLERANCE[a.dtype.name]


def past(lengths, tokens: int):
    return (np.arange(tokens) >= np.asarray(lengths)[:, None])[..., None]


def test_the_reference_is_the_definition():
    layout, inputs = SMALL, make_inputs(ROW)
    xBC, dt = conv(**inputs, layout=layout, implementation="reference")
    exact = {name: np.asarray(a, np.float64) for name, a in inputs.items()}
    first, last = layout.inner_size, layout.inner_size + layout.conv_size
    for b, length in enumerate(ROW.lengths):
        columns = np.concatenate([exact["history"][b], exact["projected"][b, :, first:last]])
        for t in range(length):
            y = (columns[t : t + 4] * exact["weight"]).sum(0) + exact["bias"]
            assert relative_error(xBC[b, t], y / (1 + np.exp(-y))) < 1e-6
            steps = np.log1p(np.exp(exact["projected"][b, t, last:] + exact["dt_bias"]))
            assert relative_error(dt[b, t], steps) < 1e-6


@pytest.mark.parametrize("implementation", FAST)
class TestImplementation:
    @pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_equals_the_reference_whatever_lies_past_the_lengths(self, implementation, case, dtype):
        inputs = make_inputs(case, dtype=dtype)
        want = conv(**inputs, layout=case.layout, implementation="reference")
        dead = past(case.lengths, case.tokens)
        inputs["projected"] = jnp.where(dead, jnp.nan, inputs["projected"])
        inputs["projected"] = inputs["projected"].at[..., : case.layout.conv_start].set(jnp.nan)
        got = conv(**inputs, layout=case.layout, implementation=implementation)
        assert_close(got, want)
        for out in got:
            assert not np.asarray(out)[np.broadcast_to(dead, out.shape)].any()

    @pytest.mark.parametrize("length", [0, 1, 2, 3, 15, 16, 17, 20])
    def test_a_chunk_in_two_parts_is_the_chunk(self, implementation, length):
        """The columns before the second part are its history, also as bits."""
        inputs = make_inputs(replace(ROW, lengths=(20, 20)))
        whole = conv(**inputs, layout=SMALL, implementation=implementation)
        raw, _ = SMALL.split(inputs["projected"])
        columns = jnp.concatenate([inputs["history"], raw], axis=1)
        history = stored(columns[:, length : length + SMALL.history], jnp.uint32)
        rest = jnp.roll(inputs["projected"], -length, axis=1)
        counts = {"lengths": jnp.full(2, 20 - length)}
        after = inputs | counts | {"projected": rest, "history": history}
        late = conv(**after, layout=SMALL, implementation=implementation)
        for got, want in zip(late, whole, strict=True):
            if length < 20:
                assert_close([got[:, : 20 - length]], [want[:, length:]])

    def test_swapped_operands_exceed_the_tolerance(self, implementation):
        inputs = make_inputs(ROW)
        want, steps = conv(**inputs, layout=SMALL, implementation="reference")
        limit = 100 * TOLERANCE["float32"]
        for change in (
            {"weight": inputs["weight"][::-1]},
            {"history": inputs["history"][:, ::-1]},
            {"bias": None},
        ):
            got, _ = conv(**inputs | change, layout=SMALL, implementation=implementation)
            assert relative_error(got, want) > limit
        change = {"dt_bias": inputs["dt_bias"][::-1]}
        got = conv(**inputs | change, layout=SMALL, implementation=implementation)
        assert relative_error(got[1], steps) > limit

    def test_is_what_the_engines_layer_computes(self, implementation):
        spec = Mamba2(num_heads=4, head_dim=8, state_size=16, num_groups=2, dt_limits=(0.1, 0.8))
        layout = ProjectionLayout(
            num_heads=4, head_dim=8, num_groups=2, state_size=16, dt_limits=spec.dt_limits
        )
        inputs = make_inputs(replace(ROW, layout=layout, lengths=(20, 20)), dtype="bfloat16")
        rng = np.random.default_rng(1)
        params = {
            "in_proj": jnp.asarray(rng.normal(size=(24, layout.projected_size)), jnp.bfloat16) / 5,
            "conv": inputs["weight"],
            "conv_bias": inputs["bias"],
            "dt_bias": inputs["dt_bias"],
        }
        h = jnp.asarray(rng.normal(size=(2, 20, 24)), jnp.bfloat16)

        @jax.jit
        def layer(h):
            projected = jnp.einsum("btd,dp->btp", h, params["in_proj"])
            projection = MAMBA2.project(params, h, spec)
            tokens, _ = MAMBA2.tokens(params, *projection, inputs["history"], spec)
            xBC = jnp.concatenate([tokens.records["uk"], tokens.q], axis=-1)
            return projected, (xBC, tokens.records["dt"])

        projected, want = layer(h)
        got = conv(
            **inputs | {"projected": projected}, layout=layout, implementation=implementation
        )
        assert_close(got, want)


@pytest.mark.as_users
@pytest.mark.parametrize("config", [Config(4, 16, 1), Config(1, 8, 1), Config(32, 64, 2)])
def test_blocks_of_any_size_give_the_same_bits(config):
    inputs = make_inputs(ROW)
    want = conv(**inputs, layout=SMALL, implementation="pallas")
    got = jax.jit(functools.partial(causal_conv_pallas, layout=SMALL, config=config))(
        Chunk(**inputs)
    )
    for a, b in zip(got, want, strict=True):
        assert_same_bits(a, b)


def test_none_chooses_by_platform_and_a_name_is_obeyed():
    inputs = make_inputs(ROW, dtype="bfloat16")

    def with_name(name):
        return lambda inputs: causal_conv(**inputs, layout=SMALL, implementation=name)

    for name in (None, "pallas"):
        assert kernels_in(with_name(name), inputs) == ["causal_conv"]
    assert kernels_in(with_name("reference"), inputs) == []
    loops = {
        name: "stablehlo.while" in jax.jit(with_name(name)).lower(inputs).as_text()
        for name in (None, "reference", "pallas")
    }  # the grid that interpret mode walks
    assert loops == {None: False, "reference": False, "pallas": True}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"implementation": "tpu"}, "causal_conv: implementation .* got 'tpu'"),
        ({"projected": jnp.ones((2, 132))}, r"projected must have 3 dim.* got shape \(2, 132\)"),
        ({"projected": jnp.ones((2, 20, 131))}, r"projected .* 132\), got \(2, 20, 131\)"),
        ({"history": jnp.ones((2, 4, 96))}, r"history .* \(2, 3, 96\), got \(2, 4, 96\)"),
        ({"weight": jnp.ones((3, 96))}, r"weight .* \(4, 96\), got \(3, 96\)"),
        ({"bias": jnp.ones(95)}, r"bias .* \(96,\), got \(95,\)"),
        ({"dt_bias": jnp.ones(5)}, r"dt_bias .* \(4,\), got \(5,\)"),
        ({"lengths": jnp.ones(3, jnp.int32)}, r"lengths .* \(2,\), got \(3,\)"),
        ({"layout": NEMOTRON_H_8B}, r"projected .* 18560\), got \(2, 20, 132\)"),
    ],
)
def test_a_wrong_argument_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        causal_conv(**{"layout": SMALL} | make_inputs(ROW) | change)
