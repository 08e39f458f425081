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
from hybrid_jax.layers.linear import Linear, linear


def activate(hidden: jax.Array, kind: str) -> jax.Array:
    """Turns [..., 2 F] (gate, up) into silu(gate) * up, or [..., F] into relu²; see `config.MLP`."""
    if kind == "gated_silu":
        gate, up = jnp.split(hidden, 2, axis=-1)
        return jax.nn.silu(gate) * up
    return jnp.square(jax.nn.relu(hidden))


def mlp(
    params: dict, h: jax.Array, kind: str, first: Linear = linear, last: Linear = linear
) -> jax.Array:
    """Runs the block on h [..., D]: [..., D], or parts of it if `last` makes parts."""
    hidden = activate(first(h, params["up"], params.get("up_bias")), kind)
    return last(hidden, params["down"], params.get("down_bias"))


# --- a mixture of experts ---------------------------------------------------------------------------


def route(params: dict, h: jax.Array, spec: MoE) -> tuple[jax.Array, jax.Array]:
    """Chooses for each token of h [S, D] expert ids int32[S, k] and weights float32[S, k], in float32."""
    logits = linear(h.astype(jnp.float32), params["router"].astype(jnp.float32))  # [S, X]
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
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    return ids, weights * spec.scale


def moe(
    params: dict, h: jax.Array, valid: jax.Array, spec: MoE, product: Linear = linear
) -> jax.Array:
    """Runs the mixture on h [B, T, D]: [B, T, D]. Tokens where `valid` bool[B, T] is false visit no expert.

    A token's contributions are summed over its k experts in order, so the result does not depend on the other tokens.
    """
    flat = h.reshape(-1, h.shape[-1])
    ids, weights = route(params, flat, spec)
    ids = jnp.where(valid.reshape(-1, 1), ids, spec.num_experts)
    inner = flat
    if spec.latent_width:
        inner = product(flat, params["latent_down"], params.get("latent_down_bias"))
    parts = _visit_experts(params, inner, ids, spec)  # [S, k, Z]
    mixed = jnp.zeros(inner.shape, jnp.float32)
    for slot in range(spec.top_k):
        mixed = mixed + weights[:, slot, None] * parts[:, slot]
    mixed = mixed.astype(h.dtype)
    if spec.latent_width:
        mixed = product(mixed, params["latent_up"], params.get("latent_up_bias"))
    if spec.shared_width:
        shared = mlp(params["shared"], flat, spec.kind, product, product)
        if spec.shared_gate:
            gate = jax.nn.sigmoid(linear(flat, params["shared_gate"]).astype(jnp.float32))
            shared = (shared.astype(jnp.float32) * gate).astype(shared.dtype)
        mixed = mixed + shared
    return mixed.reshape(h.shape)


def _visit_experts(params: dict, x: jax.Array, ids: jax.Array, spec: MoE) -> jax.Array:
    """The outputs float32[S, k, Z] of each token's experts, from x [S, Z] and expert ids int32[S, k].

    The S k visits are sorted by expert and done in blocks of one expert each. So the work grows with the visits, not
    with the number of experts. Visits to `num_experts` come last and are left out. A block that is not full also
    computes visits of the next expert, but the next expert's own block then overwrites them.
    """
    count, top_k = ids.size, spec.top_k
    size = _block_size(*ids.shape, spec.num_experts, x.dtype)
    order = jnp.argsort(ids.reshape(-1), stable=True)
    place = jnp.argsort(order, stable=True)  # where a visit stands in that order
    padded = jnp.pad(order, (0, size))
    visits = jnp.sum(ids.reshape(-1, 1) == jnp.arange(spec.num_experts), axis=0)  # [X]
    first_visit = jnp.cumsum(visits) - visits
    last_block = jnp.cumsum(-(-visits // size))
    first_block = last_block + visits // -size

    def visit(block: jax.Array, parts: jax.Array) -> jax.Array:  # parts: [S k + size, Z]
        expert = jnp.sum(last_block <= block)
        start = first_visit[expert] + (block - first_block[expert]) * size
        tokens = jax.lax.dynamic_slice(padded, (start,), (size,)) // top_k
        out = _one_expert(params, x[tokens], expert, spec)
        return jax.lax.dynamic_update_slice(parts, out.astype(jnp.float32), (start, 0))

    # This zero only exists once this layer's visits do. From a constant, XLA for GPUs would make the arrays of all
    # layers first and hold them together (12 GB for 40 layers of Granite-4.0-H-Tiny and 8,192 tokens).
    zero = jnp.minimum(visits.sum(), 0).astype(jnp.float32)
    parts = jnp.broadcast_to(zero, (count + size, x.shape[1]))
    parts = jax.lax.fori_loop(0, last_block[-1], visit, parts)
    # Places without a visit may hold anything that a block left there, so they are set to zero.
    parts = jnp.where((jnp.arange(count + size) < visits.sum())[:, None], parts, 0.0)
    return parts[place].reshape(*ids.shape, -1)


def _block_size(num_tokens: int, top_k: int, num_experts: int, dtype: jnp.dtype) -> int:
    """How many visits a block has: the power of two above the mean of an expert's visits, 4 to 64.

    A single token visits each expert at most once. In float32 a product of one row is faster than one of four rows. In
    bfloat16 a CPU makes a float32 copy of the matrix for a product of one row.
    """
    if num_tokens == 1 and dtype == jnp.float32:
        return 1
    return min(64, max(4, 1 << (num_tokens * top_k // num_experts).bit_length()))


def _one_expert(params: dict, x: jax.Array, expert: jax.Array, spec: MoE) -> jax.Array:
    """Runs x [size, Z] through one expert: [size, Z]."""

    def visit() -> jax.Array:
        hidden = linear(x, params["up"][expert], _at(params.get("up_bias"), expert))
        hidden = activate(hidden, spec.kind)
        return linear(hidden, params["down"][expert], _at(params.get("down_bias"), expert))

    def visit_inside_a_branch() -> jax.Array:
        return jax.lax.cond(expert < spec.num_experts, visit, lambda: jnp.zeros_like(x))

    # The branch is always taken. Without it, XLA for CPUs up to jax 0.10 converts bfloat16 weights to float32 before it
    # slices them, and then moves the conversion out of the loop. Each call would then convert all experts.
    return jax.lax.platform_dependent(cpu=visit_inside_a_branch, default=visit)


def _at(stacked: jax.Array | None, index: jax.Array) -> jax.Array | None:
    return None if stacked is None else stacked[index]
