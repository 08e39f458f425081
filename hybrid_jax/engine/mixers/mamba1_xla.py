"""Mamba for XLA."""

from __future__ import annotations

import jax

from hybrid_jax.config import Mamba1
from hybrid_jax.engine.mixers.carry import CarryRecurrence
from hybrid_jax.layers import mamba1
from hybrid_jax.layers.mamba1 import Convolved


class Mamba1Recurrence(CarryRecurrence[Mamba1]):
    """States are those of the layer as they are."""

    def project(self, params: dict, h: jax.Array, spec: Mamba1) -> tuple[jax.Array, jax.Array]:
        return mamba1.project(params, h, spec)

    def convolve(self, params: dict, columns: jax.Array, spec: Mamba1) -> Convolved:
        return mamba1.convolve(params, columns, spec)

    def advance(
        self,
        params: dict,
        convolved: Convolved,
        z: jax.Array,
        state: jax.Array,
        valid: jax.Array,
        kept: jax.Array,
        spec: Mamba1,
    ) -> tuple[jax.Array, jax.Array]:
        return mamba1.advance(params, convolved, state, valid, kept, "xla")

    def output(self, params: dict, y: jax.Array, z: jax.Array, spec: Mamba1) -> jax.Array:
        return mamba1.output(params, y, z)
