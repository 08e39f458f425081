"""Feed-forward blocks.

Parameters: up [D, F], or [D, 2 F] with the gate's columns first; down [F, D]; optional biases
up_bias, down_bias.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

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
