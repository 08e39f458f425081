"""The gated short convolution: kernels against the definition, the definition against the layer."""

from __future__ import annotations

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hybrid_jax.config import ShortConv
from hybrid_jax.layers import short_conv as layer
from pallas_kernels.operands import floats, stored
from pallas_kernels.short_conv import short_conv
from tests.kernels.by_name import short_conv_window, store_short_tail
from tests.kernels.cases.short_conv import (
    CHUNKS,
    LAYER,
    WINDOWS,
    Case,
    make_chunk_inputs,
    make_tail_inputs,
    make_window_inputs,
)
from tests.kernels.compare import assert_same_bits, relative_error
from tests.kernels.lowered import kernels_in

TOLERANCE = {"float32": 1e-6, "bfloat16": 2e-3}  # of the norm
BY_NAME = {case.name: case for case in (*CHUNKS, *WINDOWS)}
every_chunk = pytest.mark.parametrize("case", CHUNKS, ids=lambda case: case.name)
every_window = pytest.mark.parametrize("case", WINDOWS, ids=lambda case: case.name)
every_dtype = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
chunk = jax.jit(short_conv, static_argnames=("implementation", "gated"))
NAMES = ("implementation", "layer", "moves", "gated")
window, tail = (
    functools.partial(jax.jit, static_argnames=NAMES)(function)
    for function in (short_conv_window, store_short_tail)
)


def assert_close(got, want) -> None:
    assert got.shape == want.shape and got.dtype == want.dtype
    got, want = floats(got), floats(want)
    assert relative_error(got, want) <= TOLERANCE[got.dtype.name]


def of_layer(inputs: dict) -> jax.Array:
    """What the layers make of a chunk."""
    if inputs["projected"].shape[-1] == 2 * inputs["weight"].shape[1]:
        x, _ = jnp.split(inputs["projected"], 2, axis=-1)
        columns, taps = jnp.concatenate([inputs["history"], x], axis=1), len(inputs["weight"])
        parts = (columns[:, w : w + x.shape[1]] * inputs["weight"][w] for w in range(taps))
        return jax.nn.silu(sum(parts) + inputs["bias"])
    B, C, x = jnp.split(inputs["projected"], 3, axis=-1)
    columns = jnp.concatenate([inputs["history"], B * x], axis=1)
    spec = ShortConv(
        size=x.shape[-1], conv_width=len(inputs["weight"]), bias=inputs["bias"] is not None
    )
    params = {"conv": inputs["weight"], "conv_bias": inputs["bias"]}
    return C * layer.convolve(params, columns, spec)


@every_chunk
def test_the_definition_is_what_the_layer_computes(case):
    inputs = make_chunk_inputs(case)
    got = chunk(**inputs, gated=case.gated, implementation="reference")
    want = of_layer(inputs)
    exists = (np.arange(case.tokens) < np.array(case.lengths)[:, None])[..., None]
    assert_close(got, jnp.where(exists, want, 0))


@every_chunk
@every_dtype
def test_a_chunk_equals_the_reference_whatever_padding_holds(case, dtype):
    inputs, static = make_chunk_inputs(case, dtype=dtype), {"gated": case.gated}
    want = chunk(**inputs, **static, implementation="reference")
    exists = (np.arange(case.tokens) < np.array(case.lengths)[:, None])[..., None]
    inputs["projected"] = jnp.where(exists, inputs["projected"], jnp.nan)
    assert_close(chunk(**inputs, **static, implementation="pallas"), want)


@every_window
@every_dtype
def test_a_window_equals_the_reference_and_touches_nothing_else(case, dtype):
    inputs = make_window_inputs(case, dtype=dtype)
    static = {"layer": LAYER, "gated": case.gated}
    conv, y = window(**inputs, **static, implementation="pallas")
    want_conv, want = window(**inputs, **static, implementation="reference")
    assert_close(y, want)
    assert_close(conv, want_conv)
    assert_same_bits(conv[1 - LAYER], inputs["conv"][1 - LAYER])
    assert_same_bits(conv[LAYER, case.rows], inputs["conv"][LAYER, case.rows])
    idle = np.array(case.lengths) <= np.array(case.first or 0)
    assert_same_bits(conv[LAYER, : case.rows][idle], inputs["conv"][LAYER, : case.rows][idle])


def test_windows_one_after_the_other_are_a_chunk():
    """Through the ring's own columns: a chunk in windows of one, and of a few."""
    case = replace(BY_NAME["chunk"], tokens=6, lengths=(6, 6))
    inputs = make_chunk_inputs(case)
    want = chunk(**inputs, implementation="reference")
    for size in (1, 3):
        given = make_window_inputs(Case(name="w", tokens=size, lengths=(size, size), biased=True))
        given |= {name: inputs[name] for name in ("weight", "bias")}
        history = stored(inputs["history"], jnp.uint32)
        given["conv"] = given["conv"].at[LAYER, :2, :2].set(history)
        for start in range(0, 6, size):
            given["projected"] = inputs["projected"][:, start : start + size]
            given["conv"], y = window(**given, layer=LAYER, implementation="pallas")
            assert_close(y, want[:, start : start + size])


def test_a_window_whose_tokens_may_go_leaves_the_columns_before_it():
    inputs = make_window_inputs(BY_NAME["verify"])
    for name in ("pallas", "reference"):
        conv, _ = window(**inputs, layer=LAYER, moves=False, implementation=name)
        assert_same_bits(conv[:, :, :2], inputs["conv"][:, :, :2])


@every_chunk
@every_dtype
def test_a_tail_equals_the_reference(case, dtype):
    inputs = make_tail_inputs(case, dtype=dtype)
    got, want = (
        tail(**inputs, layer=LAYER, gated=case.gated, implementation=name)
        for name in ("pallas", "reference")
    )
    for a, b in zip(got, want, strict=True):
        assert_same_bits(a, b)
    assert not np.array_equal(got[0], inputs["arena"])


def test_mistakes_exceed_the_tolerance():
    inputs = make_chunk_inputs(BY_NAME["chunk"])
    want = chunk(**inputs, implementation="reference")
    for change in (
        {"projected": jnp.roll(inputs["projected"], 20, axis=-1)},  # other gates
        {"weight": inputs["weight"][::-1]},
        {"history": inputs["history"][:, ::-1]},
        {"bias": None},
    ):
        got = chunk(**inputs | change, implementation="pallas")
        assert relative_error(got, want) > 100 * TOLERANCE["float32"]


def test_none_chooses_by_platform_and_a_name_is_obeyed():
    inputs = make_chunk_inputs(BY_NAME["chunk"], dtype="bfloat16")
    for name, kernels in ((None, ["short_conv"]), ("pallas", ["short_conv"]), ("reference", [])):
        call = functools.partial(short_conv, implementation=name)
        assert kernels_in(lambda x, call=call: call(**x), inputs) == kernels


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"projected": jnp.ones((3, 37, 40))}, "projected must have 3 x 20 columns, got 40"),
        ({"history": jnp.ones((3, 3, 20))}, "history must have 2 columns for 3 taps, got 3"),
        ({"implementation": "xla"}, "implementation must be one of .* got 'xla'"),
    ],
)
def test_a_wrong_argument_is_named(change, message):
    with pytest.raises(ValueError, match=f"short_conv: {message}"):
        short_conv(**make_chunk_inputs(BY_NAME["chunk"]) | change)


@pytest.mark.parametrize(
    ("change", "static", "message"),
    [
        ({}, {"layer": 2}, r"layer 2 and 4 rows must lie within the rings \(2, 5\)"),
        ({"conv": jnp.zeros((2, 5, 5, 7), jnp.uint32)}, {}, r"room for 2 \+ 4 columns, got 5"),
    ],
)
def test_a_ring_that_does_not_fit_is_named(change, static, message):
    inputs = make_window_inputs(BY_NAME["verify"]) | change
    with pytest.raises(ValueError, match=f"short_conv_window: .*{message}"):
        short_conv_window(**inputs, **({"layer": LAYER} | static))
