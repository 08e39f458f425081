"""The selective scan over an engine's checkpoints and rings: kernels against the definition, and against the layer."""

from __future__ import annotations

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hybrid_jax.layers import mamba1
from pallas_kernels.selective_scan.reference import layer_frames, read_states
from tests.kernels.by_name import selective_chunk, selective_window
from tests.kernels.cases.selective_scan import (
    CHUNKS,
    FIRST_FRAME,
    LAYER,
    WINDOWS,
    EngineCase,
    make_chunk_inputs,
    make_window_inputs,
)
from tests.kernels.compare import assert_same_bits, relative_error

TOLERANCE = {"float32": 1e-6, "bfloat16": 4e-3}  # of the norm
BY_NAME = {case.name: case for case in (*CHUNKS, *WINDOWS)}
PLACE = {"layer": LAYER, "first_frame": FIRST_FRAME}
STATIC = ("implementation", "layer", "first_frame", "keeps")
chunk, window = (
    functools.partial(jax.jit, static_argnames=STATIC)(function)
    for function in (selective_chunk, selective_window)
)
every_chunk = pytest.mark.parametrize("case", CHUNKS, ids=lambda case: case.name)
every_window = pytest.mark.parametrize("case", WINDOWS, ids=lambda case: case.name)
every_dtype = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


def run_chunk(inputs: dict, implementation: str) -> list[np.ndarray]:
    """y, states of the checkpoints, the arena, the rings."""
    y, arena, ring = chunk(**inputs, **PLACE, implementation=implementation)
    return [np.asarray(a) for a in (y, states(inputs, arena, inputs["write"]), arena, ring)]


def run_window(case: EngineCase, inputs: dict, implementation: str) -> list[np.ndarray]:
    static = PLACE | {"keeps": case.keeps, "implementation": implementation}
    return [np.asarray(a) for a in window(**inputs, **static)]


def states(inputs: dict, arena: jax.Array, frames: jax.Array) -> jax.Array:
    channels, size = inputs["A_log"].shape
    own = layer_frames(frames, FIRST_FRAME, channels, size, words=arena.shape[1])
    return read_states(arena, own, jnp.ones(len(frames), bool), channels, size)


def exist(tokens: int, lengths, first=0) -> np.ndarray:
    """bool[B, T, 1]"""
    token = np.arange(tokens)
    return ((token >= np.reshape(first, (-1, 1))) & (token < np.reshape(lengths, (-1, 1))))[
        ..., None
    ]


@every_chunk
@every_dtype
def test_a_chunk_equals_the_reference_whatever_padding_holds(case, dtype):
    inputs = make_chunk_inputs(case, dtype=dtype)
    want = run_chunk(inputs, "reference")
    there = exist(case.tokens, case.lengths)
    for name in ("x", "dt", "BC", "projected"):
        inputs[name] = jnp.where(there, inputs[name], jnp.nan)
    got = run_chunk(inputs, "pallas")
    for a, b in zip(got[:2], want[:2], strict=True):
        assert a.dtype == b.dtype and relative_error(a, b) <= TOLERANCE[dtype]
    assert relative_error(got[3], want[3]) <= TOLERANCE[dtype]
    before, written = np.asarray(inputs["arena"]), np.asarray(inputs["write"])[:, FIRST_FRAME:]
    others = np.setdiff1d(np.arange(len(before)), written)
    assert_same_bits(got[2][others], before[others])
    assert_same_bits(got[2][:, -1], before[:, -1])  # after the last channel of a frame
    ring = np.asarray(inputs["state"]).copy()
    ring[LAYER, inputs["rows"], inputs["copies"]] = got[3][LAYER, inputs["rows"], inputs["copies"]]
    assert_same_bits(got[3], ring)


@every_window
@every_dtype
def test_a_window_equals_the_reference_and_touches_nothing_else(case, dtype):
    inputs = make_window_inputs(case, dtype=dtype)
    want = run_window(case, inputs, "reference")
    there = exist(case.tokens, case.lengths, case.first or 0)
    for name in ("x", "BC") if case.parts else ("x", "dt", "BC"):
        inputs[name] = jnp.where(there, inputs[name], jnp.nan)
    y, ring = run_window(case, inputs, "pallas")
    assert y.dtype == want[0].dtype and relative_error(y, want[0]) <= TOLERANCE[dtype]
    assert (y[~np.broadcast_to(there, y.shape)] == 0).all()
    assert relative_error(ring, want[1]) <= TOLERANCE[dtype]
    before = np.asarray(inputs["state"])
    assert_same_bits(ring[1 - LAYER], before[1 - LAYER])
    assert_same_bits(ring[LAYER, case.rows :], before[LAYER, case.rows :])
    idle = ~there.any((1, 2))
    assert_same_bits(ring[LAYER, : case.rows][idle], before[LAYER, : case.rows][idle])


@every_dtype
def test_a_chunk_is_what_the_layer_makes_of_it(dtype):
    case = replace(BY_NAME["chunk"], lengths=(21, 5, 7), ends=(16, 0, 7))
    inputs = make_chunk_inputs(case, dtype=dtype)
    size = case.size
    params = {name: inputs[name] for name in ("A_log", "D")}
    params |= {"out_proj": jnp.eye(case.channels, dtype=dtype)}
    dt = jax.nn.softplus(inputs["dt"].astype(jnp.float32) + inputs["dt_bias"])
    B, C = inputs["BC"][..., :size], inputs["BC"][..., size:]
    first = states(inputs, inputs["arena"], inputs["read"])
    first = jnp.where(inputs["exists"][:, None, None], first, 0)
    valid = jnp.asarray(exist(case.tokens, case.lengths)[..., 0])
    kept = jnp.stack([inputs["state_lengths"], inputs["lengths"]], axis=1)
    y, new = mamba1.advance(
        params, mamba1.Convolved(inputs["x"], dt, B, C), first, valid, kept, "reference"
    )
    z = inputs["projected"][..., case.channels :]
    want = np.where(valid[..., None], mamba1.output(params, y, z), 0)
    got = run_chunk(inputs, "reference")
    assert relative_error(got[0], want) <= TOLERANCE[dtype]
    assert relative_error(got[1], new[:, 0]) <= 1e-6
    last = got[3][LAYER, inputs["rows"], inputs["copies"]].reshape(new[:, 1].shape)
    assert relative_error(last, new[:, 1]) <= 1e-6


def test_windows_one_after_the_other_are_a_chunk():
    """Through the states in the ring, of windows of one token, and of three whose states are all kept."""
    case = replace(BY_NAME["chunk"], tokens=6, lengths=(6, 6, 6), ends=(0, 0, 0))
    inputs = make_chunk_inputs(case)
    want = run_chunk(inputs, "reference")
    for size, copies, keeps in ((1, 1, False), (3, 4, True)):
        own = EngineCase(
            name="window",
            tokens=size,
            channels=case.channels,
            size=case.size,
            lengths=(size,) * 3,
            copies=copies,
            keeps=keeps,
        )
        given = make_window_inputs(own)
        first = states(inputs, inputs["arena"], inputs["read"])
        first = jnp.where(inputs["exists"][:, None, None], first, 0)
        given["state"] = given["state"].at[LAYER, :3, 0].set(first.reshape(3, -1))
        given |= {name: inputs[name] for name in ("A_log", "D", "dt_bias")}
        for start in range(0, 6, size):
            for name in ("x", "dt", "BC", "projected"):
                given[name] = inputs[name][:, start : start + size]
            given["base"] = jnp.full(3, start, jnp.int32)
            y, ring = run_window(own, given, "pallas")
            given["state"] = jnp.asarray(ring)
            assert relative_error(y, want[0][:, start : start + size]) <= TOLERANCE["float32"]
        last = want[3][LAYER, inputs["rows"], 0]
        assert relative_error(ring[LAYER, :3, 6 % copies], last) <= TOLERANCE["float32"]


def test_mistakes_exceed_the_tolerance():
    case = BY_NAME["verify"]
    inputs = make_window_inputs(case)
    want = run_window(case, inputs, "reference")[0]
    for change in (
        {"projected": inputs["projected"][..., ::-1]},  # other gates
        {"BC": jnp.roll(inputs["BC"], case.size, axis=-1)},
        {"base": inputs["base"] + 1},  # another copy of the state
        {"dt_bias": 0 * inputs["dt_bias"]},
        {"D": 0 * inputs["D"]},
    ):
        got = run_window(case, inputs | change, "pallas")[0]
        assert relative_error(got, want) > 100 * TOLERANCE["float32"], list(change)


@pytest.mark.parametrize(
    ("change", "static", "message"),
    [
        ({"BC": jnp.ones((4, 4, 9))}, {}, "BC must have 10 columns, got 9"),
        ({"projected": jnp.ones((4, 4, 41))}, {}, "projected must have 40 columns, got 41"),
        ({}, {"layer": 2}, r"layer 2 and 4 rows must lie within the rings \(2, 6\)"),
        ({}, {"first_frame": 3}, "states of 20 channels from frame 3 on, got 7"),
        ({"state": jnp.ones((2, 6, 4, 100))}, {}, "more than 4 copies .* got 4"),
        ({"ancestors": jnp.ones((4, 4), jnp.int32)}, {"keeps": False}, "a tree needs keeps=True"),
    ],
)
def test_a_wrong_argument_is_named(change, static, message):
    inputs = make_window_inputs(BY_NAME["verify"]) | change
    with pytest.raises(ValueError, match=f"selective_window: .*{message}"):
        selective_window(**inputs, **(PLACE | {"keeps": True} | static))
