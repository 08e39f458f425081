"""Attention over whole sequences against loops over queries and keys."""

import functools
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hybrid_jax.config import Attention, Rope
from hybrid_jax.layers import attention

BASE = Attention(num_heads=6, num_kv_heads=2, head_dim=8)
SPECS = {
    "grouped": BASE,
    "one_head_each": replace(BASE, num_kv_heads=6),
    "one_kv_head": replace(BASE, num_kv_heads=1, scale=0.3),
    "window": replace(BASE, sliding_window=3),
    "window_of_one": replace(BASE, sliding_window=1),
    "soft_cap": replace(BASE, soft_cap=0.7),
    "window_and_soft_cap": replace(BASE, sliding_window=5, soft_cap=2.0, scale=1.0),
}
LENGTHS = (11, 4, 1)

attend = functools.partial(jax.jit, static_argnums=5)(attention.attend)


def draw(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def make_inputs(spec: Attention) -> tuple:
    rows, tokens = len(LENGTHS), max(LENGTHS)
    q = draw(rows, tokens, spec.num_heads, spec.head_dim)
    k = draw(rows, tokens, spec.num_kv_heads, spec.head_dim, seed=1)
    v = draw(rows, tokens, spec.num_kv_heads, spec.head_dim, seed=2)
    positions = jnp.broadcast_to(jnp.arange(tokens), (rows, tokens))
    return q, k, v, positions, jnp.asarray(LENGTHS, jnp.int32)


def slow_attend(q, k, v, lengths, spec: Attention) -> np.ndarray:
    """One query head at a time, keys taken one by one; zero past a row's length."""
    q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
    y = np.zeros(q.shape)
    for b, length in enumerate(np.asarray(lengths)):
        for t in range(length):
            first = 0 if spec.sliding_window is None else max(0, t - spec.sliding_window + 1)
            for n in range(spec.num_heads):
                head = n // (spec.num_heads // spec.num_kv_heads)
                scores = [
                    q[b, t, n] @ k[b, s, head] * spec.softmax_scale for s in range(first, t + 1)
                ]
                if spec.soft_cap is not None:
                    scores = [spec.soft_cap * math.tanh(x / spec.soft_cap) for x in scores]
                weights = np.exp(np.array(scores) - max(scores))
                weights /= weights.sum()
                y[b, t, n] = sum(w * v[b, first + s, head] for s, w in enumerate(weights))
    return y


def valid(lengths) -> np.ndarray:
    return np.arange(max(LENGTHS)) < np.asarray(lengths)[:, None]


@pytest.mark.parametrize("name", SPECS)
def test_attend_equals_the_loop(name):
    inputs, spec = make_inputs(SPECS[name]), SPECS[name]
    got = np.asarray(attend(*inputs, spec))
    q, k, v, _, lengths = inputs
    want = slow_attend(q, k, v, lengths, spec)
    real = valid(LENGTHS)
    np.testing.assert_allclose(got[real], want[real], rtol=2e-5, atol=2e-6)


def test_positions_may_start_anywhere():
    inputs, spec = make_inputs(BASE), replace(BASE, sliding_window=3)
    moved = (*inputs[:3], inputs[3] + 1000, inputs[4])
    assert np.array_equal(attend(*moved, spec), attend(*inputs, spec))


@pytest.mark.parametrize("garbage", [np.nan, np.inf, 5.0])
def test_padding_changes_no_bit_of_real_rows(garbage):
    q, k, v, positions, lengths = make_inputs(BASE)
    real = valid(LENGTHS)
    dirty = [jnp.where(real[:, :, None, None], a, garbage) for a in (q, k, v)]
    got = np.asarray(attend(*dirty, positions, lengths, BASE))
    assert np.array_equal(got[real], np.asarray(attend(q, k, v, positions, lengths, BASE))[real])


def test_bfloat16_accumulates_wide_and_returns_its_dtype():
    q, k, v, positions, lengths = make_inputs(BASE)
    half = [a.astype(jnp.bfloat16) for a in (q, k, v)]
    got = attend(*half, positions, lengths, BASE)
    assert got.dtype == jnp.bfloat16
    want = attend(*(a.astype(jnp.float32) for a in half), positions, lengths, BASE)
    assert np.array_equal(np.asarray(got), np.asarray(want.astype(jnp.bfloat16)))


# --- projections ----------------------------------------------------------------------------------

FULL = replace(BASE, qkv_bias=True, out_bias=True, qk_norm=True, qk_norm_eps=1e-2, rope=Rope(dim=4))


def make_params(spec: Attention, width: int = 10) -> dict:
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    return {
        "qkv": draw(width, q + 2 * kv, seed=3),
        "out": draw(q, width, seed=4),
        "qkv_bias": draw(q + 2 * kv, seed=5),
        "out_bias": draw(width, seed=6),
        "q_norm": draw(spec.head_dim, seed=7),
        "k_norm": draw(spec.head_dim, seed=8),
    }


def test_project_splits_norms_and_then_rotates():
    params, h = make_params(FULL), draw(2, 5, 10)
    positions = jnp.asarray([[0, 1, 2, 3, 4], [9, 3, 0, 7, 2]], jnp.int32)
    wide = {name: np.asarray(value, np.float64) for name, value in params.items()}
    mixed = np.asarray(h, np.float64) @ wide["qkv"] + wide["qkv_bias"]
    q, k, v = (a.reshape(2, 5, -1, 8) for a in np.split(mixed, [48, 64], axis=-1))

    def finish(x, weight):
        x = weight * x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-2)
        speed = np.array([1.0, 10_000.0**-0.5])
        turned = (x[..., :2] + 1j * x[..., 2:4]) * np.exp(
            1j * np.asarray(positions)[:, :, None, None] * speed
        )
        return np.concatenate([turned.real, turned.imag, x[..., 4:]], axis=-1)

    *got, projected = jax.jit(attention.project, static_argnums=3)(params, h, positions, FULL)
    np.testing.assert_allclose(projected, mixed, rtol=2e-4, atol=2e-5)
    for a, b in zip(got, (finish(q, wide["q_norm"]), finish(k, wide["k_norm"]), v), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)


def test_output_joins_the_heads():
    params, y = make_params(FULL), draw(2, 5, 6, 8)
    flat = np.asarray(y, np.float64).reshape(2, 5, 48)
    want = flat @ np.asarray(params["out"], np.float64) + np.asarray(params["out_bias"])
    np.testing.assert_allclose(attention.output(params, y, y, FULL), want, rtol=1e-4, atol=1e-5)


def test_a_bfloat16_layer_keeps_its_dtype():
    @jax.jit
    def layer(params, h):
        positions = jnp.broadcast_to(jnp.arange(5), (2, 5))
        q, k, v, qkv = attention.project(params, h, positions, FULL)
        assert q.dtype == k.dtype == v.dtype == h.dtype
        y = attention.attend(q, k, v, positions, jnp.full(2, 5), FULL)
        return attention.output(params, y, qkv, FULL)

    half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), (make_params(FULL), draw(2, 5, 10)))
    got = layer(*half)
    want = layer(*jax.tree.map(lambda a: a.astype(jnp.float32), half))
    assert got.dtype == jnp.bfloat16
    error = np.linalg.norm(np.asarray(got, np.float32) - want) / np.linalg.norm(want)
    assert error < 3e-2
