"""The kinds of blocks, by the class of their spec."""

from __future__ import annotations

from hybrid_jax.config import MLP, Attention, GatedDelta, Mamba1, Mamba2, MoE
from hybrid_jax.kinds.attention import AttentionKind
from hybrid_jax.kinds.gated_delta import GatedDeltaKind
from hybrid_jax.kinds.kind import Kind, RecurrentKind
from hybrid_jax.kinds.mamba1 import Mamba1Kind
from hybrid_jax.kinds.mamba2 import Mamba2Kind
from hybrid_jax.kinds.mlp import MLPKind, MoEKind

KINDS: dict[type, Kind] = {
    Attention: AttentionKind(),
    Mamba1: Mamba1Kind(),
    Mamba2: Mamba2Kind(),
    GatedDelta: GatedDeltaKind(),
    MLP: MLPKind(),
    MoE: MoEKind(),
}


def kind_of(spec: object) -> Kind:
    """The kind of a block."""
    return KINDS[type(spec)]


def recurrent_kind(spec: object) -> RecurrentKind:
    """The kind of a recurrent mixer."""
    kind = KINDS[type(spec)]
    assert isinstance(kind, RecurrentKind), f"{spec} is recurrent"
    return kind
