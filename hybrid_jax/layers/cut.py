"""What a mixer after a model's cut takes: one input to read with, and another to write."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from hybrid_jax.products.matrix import product
from pallas_kernels.records import ProjectionLayout


class CutInput(NamedTuple):
    """The two inputs of a mixer after a cut.

    Attributes:
        own: [B, T, D] the layer's own normed input, for queries and gates; None if the mixer only writes.
        projected: [B, T, columns] of the cut's output, with what keys, values and states are made of.
        columns: where the mixer finds its own; None if these are all.
    """

    own: jax.Array | None
    projected: jax.Array
    columns: slice | None = None

    @property
    def written(self) -> jax.Array:
        """[B, T, w] the mixer's columns. Kernels that find them by themselves spare a copy."""
        return self.projected if self.columns is None else self.projected[..., self.columns]

    def read_with(self) -> jax.Array:
        """The layer's own input."""
        assert self.own is not None, "the mixer only writes"
        return self.own

    def alone(self) -> CutInput:
        """The same with the mixer's columns alone."""
        return CutInput(self.own, self.written)


MixerInput: TypeAlias = jax.Array | CutInput


def own_input(h: MixerInput) -> jax.Array | None:
    """What a mixer reads with; None if it only writes."""
    return h.own if isinstance(h, CutInput) else h


def with_own(h: MixerInput, own: jax.Array) -> MixerInput:
    """The same with another form of the layer's own input."""
    return h._replace(own=own) if isinstance(h, CutInput) else own


def size_of(h: MixerInput) -> tuple[int, int]:
    """B and T."""
    array = h.projected if isinstance(h, CutInput) else h
    return array.shape[0], array.shape[1]


def dtype_of(h: MixerInput) -> jnp.dtype:
    """Of the activations."""
    return (h.projected if isinstance(h, CutInput) else h).dtype


def zeros_like_own(h: CutInput, columns: int) -> jax.Array:
    """In place of columns of a projection of the layer's own input, where nobody will read what they lead to."""
    return jnp.zeros((*h.projected.shape[:-1], columns), h.projected.dtype)


def gates_of(params: dict, h: CutInput, columns: int) -> jax.Array:
    """The gates [B, T, columns] of a recurrent mixer after a cut; zeros if it only writes.

    Args:
        params: with in_proj [D, columns] and optional in_bias.
    """
    if h.own is None:
        return zeros_like_own(h, columns)
    return product(h.own, params["in_proj"], params.get("in_bias"))


def within_cut(layout: ProjectionLayout, h: MixerInput) -> ProjectionLayout:
    """The layout of what a mixer projects; after a cut, of the cut's projection for all mixers."""
    if not isinstance(h, CutInput):
        return layout
    start = 0 if h.columns is None else h.columns.start
    return replace(layout, within=(start, h.projected.shape[-1]))
