"""Grouped-query attention: its projections, rotary positions, and its plain form over whole sequences.

Parameters: qkv [D, (N + 2K) H], or with a gate [D, (2N + 2K) H] and the gate's columns last; out [N H, D]; optional
qkv_bias, out_bias, q_norm [H], k_norm [H]. After a cut, qkv has no columns of keys and values. These come from the
projection of the cut's output, or, in a layer that reads those of its group, from nowhere: it has no k_norm.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from hybrid_jax.config import Attention, Rope
from hybrid_jax.layers.cut import CutInput, MixerInput, dtype_of
from hybrid_jax.products.matrix import product
from hybrid_jax.products.xla import HIGHEST
from pallas_kernels import operands
from pallas_kernels.append_kv import heads
from pallas_kernels.paged_attention.layout import kept
from pallas_kernels.rmsnorm.xla import rms_norm


def project(
    params: dict, h: MixerInput, positions: jax.Array, spec: Attention
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Projects h [B, T, D] at positions int32[B, T] to q [B, T, N, H] and k, v [B, T, K, H]; the projection, too."""
    qkv = operands.summed(joined(params, h, spec), 3, dtype_of(h))
    q, k, v = heads.split_heads(
        qkv,
        **norms_and_rotation(params, positions, spec),
        eps=spec.qk_norm_eps,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
    )
    return q.astype(qkv.dtype), k.astype(qkv.dtype), v, qkv


def joined(params: dict, h: MixerInput, spec: Attention) -> jax.Array:
    """Queries, keys, values, and the gate if there is one, side by side: [B, T, columns], or parts of it.

    After a cut, the columns of keys and values come from the cut's output.
    """
    if not isinstance(h, CutInput):
        return product(h, params["qkv"], params.get("qkv_bias"), out="parts")
    size = spec.num_heads * spec.head_dim
    if h.own is None:
        return h.written
    own = product(h.own, params["qkv"], params.get("qkv_bias"))
    return jnp.concatenate([own[..., :size], h.written, own[..., size:]], axis=-1)


def queries(
    params: dict, h: CutInput, positions: jax.Array, spec: Attention
) -> tuple[jax.Array, jax.Array]:
    """Queries [B, T, N, H] of a layer that reads the keys and values of its group; its projection, too."""
    own = product(h.read_with(), params["qkv"], params.get("qkv_bias"))
    q = own[..., : spec.num_heads * spec.head_dim]
    q = q.reshape(*q.shape[:2], spec.num_heads, spec.head_dim)
    if spec.qk_norm:
        q = rms_norm(q, params["q_norm"], spec.qk_norm_eps)
    if spec.rope is not None:
        q = heads.rotate(q, *heads.turns(positions, frequencies(spec.rope)))
    return q.astype(own.dtype), own


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


def output(params: dict, y: jax.Array, qkv: jax.Array, spec: Attention) -> jax.Array:
    """Gates y [B, T, N, H], if the layer does, and projects it to [B, T, D], or to parts of it.

    Args:
        qkv: [B, T, columns] what the layer has projected to, or parts of it; the gate stands in its last N H columns.
    """
    y = y.reshape(*y.shape[:2], -1)
    if spec.gate:
        size = qkv.shape[-1]
        gate = jax.lax.slice_in_dim(qkv, size - y.shape[-1], size, axis=-1)
        gate = operands.summed(gate, y.ndim, y.dtype).astype(jnp.float32)
        y = (y.astype(jnp.float32) * jax.nn.sigmoid(gate)).astype(y.dtype)
    return product(y, params["out"], params.get("out_bias"), out="parts")


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
    params: dict,
    h: MixerInput,
    positions: jax.Array,
    lengths: jax.Array,
    spec: Attention,
    kv_dtype: str | None = None,
) -> jax.Array:
    """Runs whole sequences h [B, T, D] at positions int32[B, T], with lengths int32[B] real tokens: [B, T, D].

    Keys and values are what pages of `kv_dtype` keep of them; all of them if that is None.
    """
    q, k, v, qkv = project(params, h, positions, spec)
    if kv_dtype is not None:
        k, v = kept(k, kv_dtype), kept(v, kv_dtype)
    return output(params, attend(q, k, v, positions, lengths, spec), qkv, spec)


def write(
    params: dict,
    h: CutInput,
    positions: jax.Array,
    lengths: jax.Array,
    spec: Attention,
    kv_dtype: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """k and v [B, T, K, H] of the first layer of a group; arguments as for `whole`."""
    _, k, v, _ = project(params, h, positions, spec)
    return (k, v) if kv_dtype is None else (kept(k, kv_dtype), kept(v, kv_dtype))


def read(
    params: dict,
    h: CutInput,
    kv: tuple[jax.Array, jax.Array],
    positions: jax.Array,
    lengths: jax.Array,
    spec: Attention,
) -> jax.Array:
    """What a layer reads of its group's k and v: [B, T, D]; the other arguments as for `whole`."""
    q, own = queries(params, h, positions, spec)
    return output(params, attend(q, *kv, positions, lengths, spec), own, spec)


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
