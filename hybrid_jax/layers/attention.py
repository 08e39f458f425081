"""Grouped-query attention: projections, and the plain form over whole sequences.

Parameters: qkv [D, (N + 2K) H], out [N H, D], optional qkv_bias, out_bias, q_norm [H], k_norm [H].
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from hybrid_jax.config import Attention
from hybrid_jax.layers.linear import HIGHEST, Linear, linear
from hybrid_jax.layers.norm import rms_norm
from hybrid_jax.layers.rope import rotate


def project(
    params: dict, h: jax.Array, positions: jax.Array, spec: Attention, first: Linear = linear
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """h [B, T, D] at positions int32[B, T] to q [B, T, N, H] and k, v [B, T, K, H]."""
    rows, tokens, _ = h.shape
    heads = spec.num_heads + 2 * spec.num_kv_heads
    qkv = first(h, params["qkv"], params.get("qkv_bias"))
    qkv = qkv.reshape(rows, tokens, heads, spec.head_dim)
    q, k, v = jnp.split(qkv, [spec.num_heads, spec.num_heads + spec.num_kv_heads], axis=2)
    if spec.qk_norm:
        q = rms_norm(q, params["q_norm"], spec.qk_norm_eps)
        k = rms_norm(k, params["k_norm"], spec.qk_norm_eps)
    if spec.rope is not None:
        q, k = rotate(q, positions, spec.rope), rotate(k, positions, spec.rope)
    return q, k, v


def output(params: dict, y: jax.Array, last: Linear = linear) -> jax.Array:
    """y [B, T, N, H] to [B, T, D], or to its parts if that is what `last` makes."""
    return last(y.reshape(*y.shape[:2], -1), params["out"], params.get("out_bias"))


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    positions: jax.Array,
    lengths: jax.Array,
    spec: Attention,
) -> jax.Array:
    """Causal attention of whole sequences, the definition the paged forms are tested against.

    Args:
        q: [B, T, N, H]; k, v: [B, T, K, H]; key t stands at positions[:, t].
        positions: int32[B, T]. lengths: int32[B] keys that exist; what lies past them is inert.

    Returns:
        [B, T, N, H] in the dtype of q; rows past `lengths` mean nothing.
    """
    rows, tokens, _, width = q.shape
    grouped = q.reshape(rows, tokens, spec.num_kv_heads, -1, width).astype(jnp.float32)
    scores = jnp.einsum("btkgh,bskh->bkgts", grouped, k.astype(jnp.float32), precision=HIGHEST)
    scores = scores * spec.softmax_scale
    if spec.soft_cap is not None:
        scores = spec.soft_cap * jnp.tanh(scores / spec.soft_cap)
    lag = positions[:, :, None] - positions[:, None, :]  # [B, T, S]
    exists = jnp.arange(tokens)[None] < lengths[:, None]  # [B, S]
    seen = (lag >= 0) & exists[:, None]
    if spec.window is not None:
        seen &= lag < spec.window
    scores = jnp.where(seen[:, None, None], scores, -1e30)
    weights = jax.nn.softmax(scores, axis=-1)
    v = jnp.where(exists[:, :, None, None], v, 0).astype(jnp.float32)  # 0 * NaN would be NaN
    y = jnp.einsum("bkgts,bskh->btkgh", weights, v, precision=HIGHEST)
    return y.reshape(q.shape).astype(q.dtype)
