"""Grouped-query attention: its projections, rotary positions, and its plain form over whole sequences.

Parameters: qkv [D, (N + 2K) H], out [N H, D], optional qkv_bias, out_bias, q_norm [H], k_norm [H].
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from hybrid_jax.config import Attention, Rope
from hybrid_jax.layers.linear import HIGHEST, Linear, linear
from pallas_kernels.append_kv import heads


def project(
    params: dict, h: jax.Array, positions: jax.Array, spec: Attention
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Projects h [B, T, D] at positions int32[B, T] to q [B, T, N, H] and k, v [B, T, K, H]."""
    qkv = linear(h, params["qkv"], params.get("qkv_bias"))
    static = {"eps": spec.qk_norm_eps, "num_heads": spec.num_heads, "head_dim": spec.head_dim}
    return heads.split_heads(qkv, **norms_and_rotation(params, positions, spec), **static)


def norms_and_rotation(params: dict, positions: jax.Array, spec: Attention) -> dict:
    """Norms and rotations of queries and keys at positions int32[B, T]: arrays of `split_heads` and `append_kv`."""
    cos, sin = None, None
    if spec.rope is not None:
        cos, sin = heads.turns(positions, frequencies(spec.rope))
    return {
        "cos": cos,
        "sin": sin,
        "q_norm": params["q_norm"] if spec.qk_norm else None,
        "k_norm": params["k_norm"] if spec.qk_norm else None,
    }


def output(params: dict, y: jax.Array, last: Linear = linear) -> jax.Array:
    """Projects y [B, T, N, H] to [B, T, D], or to parts of it if `last` makes parts."""
    return last(y.reshape(*y.shape[:2], -1), params["out"], params.get("out_bias"))


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    positions: jax.Array,
    lengths: jax.Array,
    spec: Attention,
) -> jax.Array:
    """Causal attention of whole sequences: the definition that the paged forms are tested against.

    Args:
        q: [B, T, N, H]; k, v: [B, T, K, H]; key t stands at positions[:, t].
        positions: int32[B, T]. lengths: int32[B] keys that exist; what lies past them has no effect.

    Returns:
        [B, T, N, H] in the dtype of q; tokens past `lengths` mean nothing.
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
    if spec.sliding_window is not None:
        seen &= lag < spec.sliding_window
    scores = jnp.where(seen[:, None, None], scores, -1e30)
    weights = jax.nn.softmax(scores, axis=-1)
    v = jnp.where(exists[:, :, None, None], v, 0).astype(jnp.float32)  # 0 * NaN would be NaN
    y = jnp.einsum("bkgts,bskh->btkgh", weights, v, precision=HIGHEST)
    return y.reshape(q.shape).astype(q.dtype)


def whole(
    params: dict, h: jax.Array, positions: jax.Array, lengths: jax.Array, spec: Attention
) -> jax.Array:
    """Runs whole sequences h [B, T, D] at positions int32[B, T], with lengths int32[B] real tokens: [B, T, D]."""
    q, k, v = project(params, h, positions, spec)
    return output(params, attend(q, k, v, positions, lengths, spec))


# --- rotary position embedding ----------------------------------------------------------------------
# On the first channels of each head, in the half-split convention.


def frequencies(rope: Rope) -> np.ndarray:
    """Radians per position, float32[dim / 2], with scaling applied."""
    exponent = np.arange(0, rope.dim, 2, dtype=np.float32) / rope.dim
    base = (1.0 / (np.float32(rope.theta) ** exponent)).astype(np.float32)
    scaling = rope.scaling
    if scaling is None:
        return base
    if scaling.kind == "linear":
        return (base / scaling.factor).astype(np.float32)
    # As in Llama 3: long wavelengths are divided, short ones are kept, and those in between are blended linearly.
    wavelength = 2 * math.pi / base
    turns = scaling.original_max_position / wavelength
    span = scaling.high_freq_factor - scaling.low_freq_factor
    blend = np.clip((turns - scaling.low_freq_factor) / span, 0.0, 1.0)
    return ((1 - blend) * base / scaling.factor + blend * base).astype(np.float32)
