"""The definition: every token times the matrices of each of its experts, one visit like the other."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import FLOAT32, FLOATS, INTS
from pallas_kernels.dispatch import HIGHEST

Activation = Literal["gated_silu", "relu2"]


class ExpertArrays(NamedTuple):
    """Arrays of `api.mix_experts`.

    Attributes:
        x: [S, Z] tokens.
        ids: int32[S, k] experts that each token visits; X or more for no visit. weights: float32[S, k] of the visits.
        up: [X, Z, F], or [X, Z, 2 F] with the gate's columns first. down: [X, F, Z].
        up_bias: [X, F or 2 F] or None. down_bias: [X, Z] or None.
    """

    x: Annotated[jax.Array, FLOATS, "S Z"]
    ids: Annotated[jax.Array, INTS, "S k"]
    weights: Annotated[jax.Array, FLOAT32, "S k"]
    up: Annotated[jax.Array, FLOATS, "X Z columns"]
    down: Annotated[jax.Array, FLOATS, "X F Z"]
    up_bias: Annotated[jax.Array | None, FLOATS, "None X columns"] = None
    down_bias: Annotated[jax.Array | None, FLOATS, "None X Z"] = None


def activate(hidden: jax.Array, kind: Activation) -> jax.Array:
    """Turns [..., 2 F] (gate, up) into silu(gate) * up, or [..., F] into relu²."""
    if kind == "gated_silu":
        gate, up = jnp.split(hidden, 2, axis=-1)
        return jax.nn.silu(gate) * up
    return jnp.square(jax.nn.relu(hidden))


def mixed(parts: jax.Array, ids: jax.Array, weights: jax.Array, num_experts: int) -> jax.Array:
    """[S, Z]: the sum of weights x parts [S, k, Z] over a token's visits, in float32 and in order. What is no visit may
    hold anything."""
    weighted = weights[..., None] * parts.astype(jnp.float32)
    visit = (ids < num_experts)[..., None]
    return jnp.where(visit, weighted, 0.0).sum(1).astype(parts.dtype)


def mix_experts_reference(arrays: ExpertArrays, *, kind: Activation):
    """See `api.mix_experts`. It holds a copy of two matrices for every visit."""
    x, ids, weights, up, down, up_bias, down_bias = arrays
    num_experts = up.shape[0]
    expert = jnp.minimum(ids, num_experts - 1)

    def of_visits(array: jax.Array) -> jax.Array:
        return array[expert].astype(jnp.float32)  # [S, k, ...]

    hidden = jnp.einsum("sz,skzf->skf", x.astype(jnp.float32), of_visits(up), precision=HIGHEST)
    if up_bias is not None:
        hidden = hidden + of_visits(up_bias)
    hidden = activate(hidden, kind).astype(x.dtype).astype(jnp.float32)
    parts = jnp.einsum("skf,skfz->skz", hidden, of_visits(down), precision=HIGHEST)
    if down_bias is not None:
        parts = parts + of_visits(down_bias)
    return mixed(parts.astype(x.dtype), ids, weights, num_experts)
