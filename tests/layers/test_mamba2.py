"""The mixer's scan, window and fold against its equations, one token at a time in float64."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hybrid_jax.config import Mamba2
from hybrid_jax.layers.mamba2 import MAMBA2, skip
from hybrid_jax.layers.matrix_state import Fields, Tokens
from pallas_kernels import WindowFrames, ssd_window_frames
from pallas_kernels.records import split_records

WIDTH, GRAIN = 10, 32
SPECS = {
    "groups_and_biases": Mamba2(
        num_heads=6,
        head_dim=4,
        state_size=8,
        num_groups=3,
        norm_groups=3,
        proj_bias=True,
        dt_limits=(0.05, 0.9),
        norm_eps=1e-3,
    ),
    "plain": Mamba2(num_heads=3, head_dim=8, state_size=5, conv_width=2, conv_bias=False),
}
BOTH = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)

scan = functools.partial(jax.jit, static_argnames="spec")(MAMBA2.chunk)


def make_params(spec: Mamba2, seed: int = 0) -> dict:
    """Every weight drawn, none left at a value that would hide its absence."""
    rng = np.random.default_rng(seed)
    params = {
        "in_proj": rng.standard_normal((WIDTH, spec.proj_size)) / 3,
        "conv": rng.standard_normal((spec.conv_width, spec.conv_size)),
        "conv_bias": rng.standard_normal(spec.conv_size),
        "A_log": np.log(rng.uniform(0.5, 8, spec.num_heads)),
        "D": rng.standard_normal(spec.num_heads),
        "dt_bias": rng.standard_normal(spec.num_heads) - 1,
        "norm": rng.standard_normal(spec.inner_size),
        "out_proj": rng.standard_normal((spec.inner_size, WIDTH)) / 4,
    }
    if not spec.conv_bias:
        del params["conv_bias"]
    if spec.proj_bias:
        params["in_bias"] = rng.standard_normal(spec.proj_size)
        params["out_bias"] = rng.standard_normal(WIDTH)
    return {name: jnp.asarray(value, jnp.float32) for name, value in params.items()}


def window_of(params, tokens: Tokens, state, ring: Fields, starts, num_valid, spec: Mamba2):
    """What a window of tokens gives, with every head's state in a frame of its own."""
    rows, heads = state.shape[:2]
    arena = jax.lax.bitcast_convert_type(state, jnp.uint32).reshape(rows * heads, -1)
    frames = jnp.arange(rows * heads).reshape(rows, heads)
    x, B = split_records(ring["uk"], MAMBA2.layout(spec))
    C = tokens.q.reshape(*tokens.q.shape[:2], *B.shape[2:])
    records = (x, ring["dt"], MAMBA2.decay_rates(params), B, C)
    places = (arena, frames, jnp.ones(rows, bool), starts, num_valid)
    y, _ = ssd_window_frames(WindowFrames(*records, *places), implementation="xla")
    y = skip(params, y, tokens.rest.reshape(y.shape))
    return MAMBA2.output(params, y, tokens.z, spec)


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def nothing(spec: Mamba2, rows: int, dtype="float32") -> dict:
    """The zero state and an empty convolution history."""
    state = jnp.zeros((rows, spec.num_heads, spec.head_dim, spec.state_size), jnp.float32)
    return {"state": state, "conv": jnp.zeros((rows, spec.conv_width - 1, spec.conv_size), dtype)}


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def slow_mixer(params: dict, h: np.ndarray, spec: Mamba2) -> tuple[np.ndarray, np.ndarray]:
    """One sequence h [T, D]: outputs [T, D] and the state after every token [T, M, P, R]."""
    p = {name: np.asarray(value, np.float64) for name, value in params.items()}
    inner, bc = spec.inner_size, spec.num_groups * spec.state_size
    history = [np.zeros(spec.conv_size)] * (spec.conv_width - 1)
    state = np.zeros((spec.num_heads, spec.head_dim, spec.state_size))
    outputs, states = [], []
    for token in np.asarray(h, np.float64):
        mixed = token @ p["in_proj"] + p.get("in_bias", 0)
        z, raw, dt = np.split(mixed, [inner, inner + spec.conv_size])
        history.append(raw)
        taps = sum(p["conv"][w] * history[-spec.conv_width + w] for w in range(spec.conv_width))
        x, B, C = np.split(silu(taps + p.get("conv_bias", 0)), [inner, inner + bc])
        dt = np.clip(np.log1p(np.exp(dt + p["dt_bias"])), *spec.dt_limits)
        x = x.reshape(spec.num_heads, spec.head_dim)
        B, C = B.reshape(spec.num_groups, -1), C.reshape(spec.num_groups, -1)
        y = np.zeros_like(x)
        for m in range(spec.num_heads):
            g = m // (spec.num_heads // spec.num_groups)
            decay = math.exp(-math.exp(p["A_log"][m]) * dt[m])
            state[m] = decay * state[m] + dt[m] * np.outer(x[m], B[g])
            y[m] = state[m] @ C[g] + p["D"][m] * x[m]
        gated = (y.ravel() * silu(z)).reshape(spec.norm_groups, -1)
        normed = gated / np.sqrt((gated**2).mean(-1, keepdims=True) + spec.norm_eps)
        outputs.append((p["norm"] * normed.ravel()) @ p["out_proj"] + p.get("out_bias", 0))
        states.append(state.copy())
    return np.array(outputs), np.array(states)


def relative_error(got, want) -> float:
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return np.linalg.norm(got - want) / np.linalg.norm(want)


@BOTH
def test_scan_equals_the_equations(spec):
    params, h = make_params(spec), draw(3, 70, WIDTH)
    lengths, state_lengths = np.array([70, 33, 1]), np.array([64, 32, 0])
    out, state, columns, records = scan(
        params,
        h,
        **nothing(spec, 3),
        lengths=jnp.asarray(lengths, jnp.int32),
        state_lengths=jnp.asarray(state_lengths, jnp.int32),
        spec=spec,
    )
    for b in range(3):
        want, states = slow_mixer(params, h[b, : lengths[b]], spec)
        assert relative_error(out[b, : lengths[b]], want) < 1e-5
        if state_lengths[b]:
            assert relative_error(state[b], states[state_lengths[b] - 1]) < 1e-5
        else:
            assert not np.asarray(state[b]).any()
    assert columns.shape == (3, spec.conv_width - 1 + 70, spec.conv_size)
    assert records["uk"].shape == (3, 70, spec.record_size)
    assert records["dt"].dtype == jnp.float32


@BOTH
def test_a_limited_step_size_and_every_weight_matter(spec):
    """The comparison above would notice each of them missing."""
    params, h = make_params(spec), draw(1, 40, WIDTH)
    want, _ = slow_mixer(params, h[0], spec)
    full = {"lengths": jnp.array([40]), "state_lengths": jnp.array([40]), "spec": spec}
    for name in params:
        changed = params | {name: params[name] * 1.01}
        out = scan(changed, h, **nothing(spec, 1), **full)[0]
        assert relative_error(out[0], want) > 1e-4, name
    if spec.dt_limits[1] < math.inf:
        dt = np.asarray(MAMBA2.project(params, jnp.asarray(h), spec)[1].dt)
        assert dt.min() == np.float32(0.05) and dt.max() == np.float32(0.9)


@BOTH
def test_two_chunks_with_state_and_history_equal_one(spec):
    params, h = make_params(spec), draw(1, 90, WIDTH)
    want, states = slow_mixer(params, h[0], spec)
    first, state, columns, _ = scan(
        params,
        h[:, :64],
        **nothing(spec, 1),
        lengths=jnp.array([64]),
        state_lengths=jnp.array([64]),
        spec=spec,
    )
    history = columns[:, 64 : 64 + spec.conv_width - 1]
    second, state, _, _ = scan(
        params,
        h[:, 64:],
        state=state,
        conv=history,
        lengths=jnp.array([26]),
        state_lengths=jnp.array([26]),
        spec=spec,
    )
    assert relative_error(np.concatenate([first[0], second[0]]), want) < 1e-5
    assert relative_error(state[0], states[-1]) < 1e-5


@BOTH
@pytest.mark.parametrize("garbage", [np.nan, 50.0])
def test_padding_changes_no_bit_of_a_scan(spec, garbage):
    params, h = make_params(spec), draw(3, 40, WIDTH)
    lengths = np.array([40, 33, 0])
    real = np.arange(40) < lengths[:, None]
    dirty = np.where(real[..., None], h, np.float32(garbage))
    ends = {
        "lengths": jnp.asarray(lengths, jnp.int32),
        "state_lengths": jnp.array([32, 32, 0], jnp.int32),
        "spec": spec,
    }
    out, state, columns, records = scan(params, h, **nothing(spec, 3), **ends)
    got = scan(params, dirty, **nothing(spec, 3), **ends)
    assert np.array_equal(np.asarray(got[0])[real], np.asarray(out)[real])
    assert np.array_equal(got[1], state)
    assert np.array_equal(got[2], columns)
    for name, record in records.items():
        assert np.array_equal(np.asarray(got[3][name])[real], np.asarray(record)[real])


# --- prefill, then decode from checkpoint and ring ------------------------------------------------


@functools.partial(jax.jit, static_argnames="spec")
def decode(params, h, state, conv, ring: Fields, count, num_valid, spec: Mamba2):
    """One step of T tokens: folds full rings, stores records, runs the window, moves the cursor."""
    full = count == GRAIN
    folded = MAMBA2.fold(MAMBA2.decay_rates(params), state, ring, jnp.where(full, GRAIN, 0), spec)
    state = jnp.where(full[:, None, None, None], folded, state)
    count = jnp.where(full, 0, count)
    tokens, columns = MAMBA2.tokens(params, *MAMBA2.project(params, h, spec), conv, spec)

    def store(ring, new, start):
        return jax.vmap(lambda r, n, s: jax.lax.dynamic_update_slice(r, n, (s, 0)))(
            ring, new, start
        )

    ring = {name: store(ring[name], new, count) for name, new in tokens.records.items()}
    out = window_of(params, tokens, state, ring, count, num_valid, spec)
    history = jax.vmap(lambda c, n: jax.lax.dynamic_slice_in_dim(c, n, spec.conv_width - 1))(
        columns, num_valid
    )
    return out, state, history, ring, count + num_valid


def prefill(params, h, lengths, spec: Mamba2, window: int):
    """Scans prompts as the engine does; dead ring slots hold NaN."""
    lengths = np.asarray(lengths)
    state_lengths = (lengths - 1) // GRAIN * GRAIN
    out, state, columns, records = scan(
        params,
        h,
        **nothing(spec, len(lengths)),
        lengths=jnp.asarray(lengths, jnp.int32),
        state_lengths=jnp.asarray(state_lengths, jnp.int32),
        spec=spec,
    )
    slots = GRAIN + window - 1
    ring = {
        name: np.full((len(lengths), slots, record.shape[-1]), np.nan, np.float32)
        for name, record in records.items()
    }
    conv = []
    for b, (n, s) in enumerate(zip(lengths, state_lengths, strict=True)):
        for name, record in records.items():
            ring[name][b, : n - s] = record[b, s:n]
        conv.append(columns[b, n : n + spec.conv_width - 1])
    counts = jnp.asarray(lengths - state_lengths, jnp.int32)
    return out, state, jnp.stack(conv), jax.tree.map(jnp.asarray, ring), counts


@BOTH
@pytest.mark.parametrize("window", [1, 4])
def test_prefill_then_windows_equal_the_equations(spec, window):
    """Prompts of 1, 45, 64 (a full ring) and 65 tokens, then 40 more with folds in between."""
    lengths, total = np.array([1, 45, 64, 65]), 105
    params, h = make_params(spec), draw(4, total, WIDTH)
    out, state, conv, ring, count = prefill(params, h[:, :65], lengths, spec, window)
    got = [list(np.asarray(out[b, :n])) for b, n in enumerate(lengths)]
    done, folds = lengths.copy(), 0
    while (done < lengths + 40).any():
        at = np.asarray(count)
        folds += int((at == GRAIN).sum())
        # A window never straddles a grain boundary, and drafts past the last token do not count.
        room = GRAIN - at % GRAIN
        num_valid = np.minimum(np.minimum(window, room), lengths + 40 - done)
        index = np.minimum(done[:, None] + np.arange(window), total - 1)
        tokens = np.take_along_axis(h, index[..., None], axis=1)
        out, state, conv, ring, count = decode(
            params, tokens, state, conv, ring, count, jnp.asarray(num_valid, jnp.int32), spec
        )
        for b, n in enumerate(num_valid):
            got[b] += list(np.asarray(out[b, :n]))
        done += num_valid
    assert folds >= 5
    for b, n in enumerate(lengths):
        want, _ = slow_mixer(params, h[b, : n + 40], spec)
        assert relative_error(got[b][:n], want[:n]) < 1e-5
        assert relative_error(got[b][n:], want[n:]) < 1e-5


@BOTH
def test_fold_equals_the_state_of_the_scan(spec):
    params, h = make_params(spec), draw(2, 64, WIDTH)
    full = {"lengths": jnp.array([64, 64]), "spec": spec}
    _, half, _, records = scan(
        params, h, **nothing(spec, 2), state_lengths=jnp.array([32, 32]), **full
    )
    ring = {name: record[:, 32:] for name, record in records.items()}
    rates = MAMBA2.decay_rates(params)
    got = jax.jit(MAMBA2.fold, static_argnums=4)(rates, half, ring, jnp.array([32, 11]), spec)
    for b, n in enumerate((64, 43)):
        assert relative_error(got[b], slow_mixer(params, h[b, :n], spec)[1][-1]) < 1e-5


@BOTH
def test_a_token_of_a_window_has_the_same_bits_alone_and_together(spec):
    """Exact mode: the same window of 32 queries computes a token in prefill and in decode."""
    params, h = make_params(spec), draw(3, GRAIN, WIDTH)
    state = jnp.asarray(draw(3, spec.num_heads, spec.head_dim, spec.state_size, seed=5))
    columns = spec.conv_width - 1
    conv = jnp.asarray(draw(3, columns, spec.conv_size, seed=6))

    @jax.jit
    def window(h, num_valid):
        valid = (jnp.arange(GRAIN) < num_valid[:, None])[..., None]
        h = jnp.where(valid, h, 0)
        tokens, _ = MAMBA2.tokens(params, *MAMBA2.project(params, h, spec), conv, spec)
        starts = jnp.zeros(3, jnp.int32)
        return window_of(params, tokens, state, tokens.records, starts, num_valid, spec)

    together = np.asarray(window(h, jnp.full(3, GRAIN)))
    for t in (0, 1, 17, 31):
        other = np.where(np.arange(3)[:, None, None] == 1, h, draw(3, GRAIN, WIDTH, seed=t + 9))
        alone = window(other, jnp.array([0, t + 1, 32 - t]))
        assert np.array_equal(np.asarray(alone)[1, t], together[1, t])


@BOTH
def test_a_bfloat16_mixer_keeps_its_dtype(spec):
    wide = make_params(spec)
    precise = ("A_log", "D", "dt_bias")
    params = {n: a if n in precise else a.astype(jnp.bfloat16) for n, a in wide.items()}
    h = jnp.asarray(draw(2, 50, WIDTH), jnp.bfloat16)
    ends = {"lengths": jnp.array([50, 50]), "state_lengths": jnp.array([32, 32]), "spec": spec}
    out, state, columns, records = scan(params, h, **nothing(spec, 2, "bfloat16"), **ends)
    assert out.dtype == columns.dtype == records["uk"].dtype == jnp.bfloat16
    assert state.dtype == records["dt"].dtype == jnp.float32
    want, want_state, _, _ = scan(
        {n: a.astype(jnp.float32) for n, a in params.items()},
        h.astype(jnp.float32),
        **nothing(spec, 2),
        **ends,
    )
    assert relative_error(out, want) < 3e-2
    assert relative_error(state, want_state) < 3e-2

    @jax.jit
    def window(params, h, state, columns, records):
        _, rest = MAMBA2.project(params, h, spec)
        tokens = MAMBA2.activate(params, MAMBA2.convolve(params, columns, spec), rest, spec)
        tokens, ring = jax.tree.map(lambda part: part[:, 32:], (tokens, records))
        starts = jnp.zeros(2, jnp.int32)
        return window_of(params, tokens, state, ring, starts, starts + 18, spec)

    windowed = window(params, h, state, columns, records)
    assert windowed.dtype == jnp.bfloat16
    assert relative_error(windowed, want[:, 32:]) < 3e-2
