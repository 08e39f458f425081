"""A kind of recurrent layer that carries its state: every channel an average that forgets by a gate of its own.

h_t = a_t h_(t-1) + (1 - a_t) x_t with a_t = sigmoid(W_a u_t + b), output W_o (h_t silu(W_z u_t)); no convolution.
`register` makes it known to the package; nothing else in the tree knows it.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from hybrid_jax.engine.mixers import table as engine_kinds
from hybrid_jax.engine.mixers.carry import Carry, CarryRecurrence
from hybrid_jax.kinds import table as kinds
from hybrid_jax.kinds.kind import RecurrentKind, StateLayout, Weight, Weights
from hybrid_jax.models import decoder
from hybrid_jax.products.matrix import product


@dataclass(frozen=True, kw_only=True)
class Gated:
    """N channels in equal blocks."""

    num_blocks: int
    block_size: int

    @property
    def channels(self) -> int:
        return self.num_blocks * self.block_size


class GatedKind(RecurrentKind):
    name = "gated"
    state_flops = 4

    def layout(self, spec: Gated) -> StateLayout:
        return StateLayout(
            units=spec.num_blocks,
            unit_words=spec.block_size,
            columns=0,
            channels=0,
            records=(),
            carries=True,
        )

    def weights(self, spec: Gated, width: int) -> Weights:
        return {
            "in_proj": Weight(shape=(width, 3 * spec.channels), draw="matrix"),
            "gate_bias": Weight(shape=(spec.channels,), draw="zeros"),
            "out_proj": Weight(shape=(spec.channels, width), draw="output"),
        }


class GatedRecurrence(CarryRecurrence):
    """One token after the other."""

    def project(self, params: dict, h: jax.Array, spec: Gated) -> tuple[jax.Array, tuple]:
        x, gate, z = jnp.split(product(h, params["in_proj"]), 3, axis=-1)
        gate = gate.astype(jnp.float32) + params["gate_bias"].astype(jnp.float32) + 2
        return h[..., :0], (x.astype(jnp.float32), jax.nn.sigmoid(gate), z)

    def advance(
        self,
        params: dict,
        convolved: None,
        rest: tuple,
        state: jax.Array,
        valid: jax.Array,
        kept: jax.Array,
        spec: Gated,
    ) -> tuple[jax.Array, jax.Array]:
        x, a, _ = rest
        first = state.reshape(state.shape[0], -1)

        def step(carry, token):
            state, states, t = carry
            x, a, valid = token
            state = jnp.where(valid[:, None], a * state + (1 - a) * x, state)
            states = jnp.where((kept == t + 1)[..., None], state[:, None], states)
            return (state, states, t + 1), state

        states = jnp.repeat(first[:, None], kept.shape[1], axis=1)
        tokens = jax.tree.map(lambda part: jnp.moveaxis(part, 1, 0), (x, a, valid))
        (_, states, _), y = jax.lax.scan(step, (first, states, 0), tokens)
        return jnp.moveaxis(y, 0, 1), states.reshape(*kept.shape, *state.shape[1:])

    def output(self, params: dict, y: jax.Array, rest: tuple, spec: Gated) -> jax.Array:
        z = rest[2]
        y = y * jax.nn.silu(z.astype(jnp.float32))
        return product(y.astype(z.dtype), params["out_proj"])


def whole(
    params: dict, h: jax.Array, positions: jax.Array, lengths: jax.Array, spec: Gated
) -> jax.Array:
    recurrence = GatedRecurrence()
    _, rest = recurrence.project(params, h, spec)
    state = jnp.zeros((h.shape[0], spec.num_blocks, spec.block_size), jnp.float32)
    valid = jnp.arange(h.shape[1]) < lengths[:, None]
    y, _ = recurrence.advance(params, None, rest, state, valid, lengths[:, None], spec)
    return recurrence.output(params, y, rest, spec)


def register() -> None:
    """Into the three tables that the package finds kinds in."""
    kinds.KINDS[Gated] = GatedKind()
    decoder.MIXERS[Gated] = whole
    engine_kinds.LAYER_STEPS["xla"][Gated] = Carry(GatedRecurrence())
