"""Feed-forward blocks: one, or a dropless mixture of experts.

Parameters of a block: up [D, F], or [D, 2 F] with the gate's columns first; down [F, D]; optional biases up_bias,
down_bias.

Parameters of a mixture: router [D, X], optional router_bias [X] float32 (corrects the choice of experts), up
[X, D, F or 2 F], down [X, F, D], optional up_bias [X, .], down_bias [X, D], shared (a block), shared_gate [D, 1],
latent_down [D, Z], latent_up [Z, D], optional latent_down_bias [Z], latent_up_bias [D]. With a latent, the experts have
width Z in place of D.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from hybrid_jax.config import MoE
from hybrid_jax.layers.shards import this_shard
from hybrid_jax.products.matrix import Out, as_matrix, mixed, product, product_in_float32
from hybrid_jax.products.xla import linear
from pallas_kernels.grouped_linear import Activation, activate


def mlp(params: dict, h: jax.Array, kind: Activation, *, out: Out = "whole") -> jax.Array:
    """Runs the block on h [..., D]: [..., D], or parts of it; `out` as of `product`."""
    hidden = activate(product(h, params["up"], params.get("up_bias")), kind)
    return product(hidden, params["down"], params.get("down_bias"), out=out)


# --- a mixture of experts ---------------------------------------------------------------------------


def route(params: dict, h: jax.Array, spec: MoE) -> tuple[jax.Array, jax.Array]:
    """Chooses for each token of h [S, D] expert ids int32[S, k] and weights float32[S, k], in float32."""
    logits = product_in_float32(h, params["router"])  # [S, X]
    if spec.routing == "topk_softmax":
        best, ids = jax.lax.top_k(logits, spec.top_k)
        return ids, jax.nn.softmax(best, axis=-1)
    if spec.routing == "softmax_topk":
        weights, ids = jax.lax.top_k(jax.nn.softmax(logits, axis=-1), spec.top_k)
        return ids, weights / weights.sum(-1, keepdims=True) if spec.normalize else weights
    scores = jax.nn.sigmoid(logits)
    choice = scores + params["router_bias"].astype(jnp.float32)
    if spec.num_groups > 1:
        grouped = choice.reshape(-1, spec.num_groups, spec.num_experts // spec.num_groups)
        strength = jax.lax.top_k(grouped, min(2, grouped.shape[-1]))[0].sum(-1)  # [S, groups]
        _, kept = jax.lax.top_k(strength, spec.top_groups)
        keep = jax.nn.one_hot(kept, spec.num_groups, dtype=bool).any(axis=1)
        choice = jnp.where(keep[..., None], grouped, -jnp.inf).reshape(choice.shape)
    _, ids = jax.lax.top_k(choice, spec.top_k)
    weights = jnp.take_along_axis(scores, ids, axis=-1)
    if spec.normalize:
        weights = weights / (weights.sum(-1, keepdims=True) + spec.sum_eps)
    return ids, weights * spec.scale


def moe(params: dict, h: jax.Array, valid: jax.Array, spec: MoE) -> jax.Array:
    """Runs the mixture on h [B, T, D]: [B, T, D]. Tokens where `valid` bool[B, T] is false visit no expert.

    A token's contributions are summed over its k experts in order, so the result does not depend on the other tokens.
    """
    flat = h.reshape(-1, h.shape[-1])
    ids, weights = route(params, flat, spec)
    count = spec.num_experts // spec.shards
    if spec.shards > 1:  # another device's experts are nobody's here
        ids = ids - count * this_shard()
        ids = jnp.where((ids >= 0) & (ids < count), ids, count)
    ids = jnp.where(valid.reshape(-1, 1), ids, count)
    inner = flat
    if spec.latent_width:
        inner = product(flat, params["latent_down"], params.get("latent_down_bias"))
    biases = params.get("up_bias"), params.get("down_bias")
    y = mixed(inner, ids, weights, params["up"], params["down"], *biases, kind=spec.kind)
    if spec.latent_width:
        y = product(y, params["latent_up"], params.get("latent_up_bias"))
    if spec.shared_width:
        shared = mlp(params["shared"], flat, spec.kind)
        if spec.shared_gate:
            # One column: XLA sums it in one launch, also for a lone row.
            gate = linear(flat, as_matrix(params["shared_gate"]).values)
            gate = jax.nn.sigmoid(gate.astype(jnp.float32))
            shared = (shared.astype(jnp.float32) * gate).astype(shared.dtype)
        y = y + shared
    return y.reshape(*h.shape[:-1], -1)
