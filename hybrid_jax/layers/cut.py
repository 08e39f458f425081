"""What a mixer behind a model's cut takes (SwiftKV, arXiv 2410.03960): one input to read with, and another to write."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class CutInput(NamedTuple):
    """The two inputs of a mixer behind a cut.

    Attributes:
        own: [B, T, D] the layer's own normed input, for queries and gates; None if the mixer only writes.
        written: [B, T, w] the mixer's columns of the projection of the cut's output, for keys, values and states.
    """

    own: jax.Array | None
    written: jax.Array

    def read_with(self) -> jax.Array:
        """The layer's own input."""
        assert self.own is not None, "the mixer only writes"
        return self.own


MixerInput = jax.Array | CutInput


def own_input(h: MixerInput) -> jax.Array | None:
    """What a mixer reads with; None if it only writes."""
    return h.own if isinstance(h, CutInput) else h


def with_own(h: MixerInput, own: jax.Array) -> MixerInput:
    """The same with another form of the layer's own input."""
    return h._replace(own=own) if isinstance(h, CutInput) else own


def size_of(h: MixerInput) -> tuple[int, int]:
    """B and T."""
    array = h.written if isinstance(h, CutInput) else h
    return array.shape[0], array.shape[1]


def dtype_of(h: MixerInput) -> jnp.dtype:
    """Of the activations."""
    return (h.written if isinstance(h, CutInput) else h).dtype


def zeros_like_own(h: CutInput, columns: int) -> jax.Array:
    """In place of columns of a projection of the layer's own input, where nobody will read what they lead to."""
    return jnp.zeros((*h.written.shape[:-1], columns), h.written.dtype)
