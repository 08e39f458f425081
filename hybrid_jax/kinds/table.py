"""The kinds of blocks, by the class of their spec."""

from __future__ import annotations

from hybrid_jax.config import (
    MLP,
    Attention,
    GatedDelta,
    LayerSpec,
    Mamba1,
    Mamba2,
    ModelConfig,
    MoE,
    ShortConv,
)
from hybrid_jax.kinds.attention import AttentionKind
from hybrid_jax.kinds.gated_delta import GatedDeltaKind
from hybrid_jax.kinds.kind import Kind, RecurrentKind, Weight, Weights
from hybrid_jax.kinds.mamba1 import Mamba1Kind
from hybrid_jax.kinds.mamba2 import Mamba2Kind
from hybrid_jax.kinds.mlp import MLPKind, MoEKind
from hybrid_jax.kinds.short_conv import ShortConvKind

KINDS: dict[type, Kind] = {
    Attention: AttentionKind(),
    Mamba1: Mamba1Kind(),
    Mamba2: Mamba2Kind(),
    GatedDelta: GatedDeltaKind(),
    ShortConv: ShortConvKind(),
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


def model_weights(config: ModelConfig) -> Weights:
    """All arrays of a model, in a tree like its parameters (`models.decoder`)."""
    norm = Weight(shape=(config.width,), draw="ones", float32=config.float32_norms)

    def block(spec: object) -> Weights:
        return kind_of(spec).weights(spec, config.width)

    def layer(spec: LayerSpec) -> Weights:
        tree: Weights = {}
        if spec.weights_of is not None:
            return tree
        if spec.mixers:
            tree |= {"norm": norm, "mixers": [block(mixer) for mixer in spec.mixers]}
        if spec.mlp is not None:
            tree |= {"mlp_norm": norm, "mlp": block(spec.mlp)}
        return tree

    tree = {
        "embed": Weight(shape=(config.vocab_size, config.width), draw="embedding"),
        "layers": [layer(spec) for spec in config.layers],
        "norm": norm,
    }
    if config.mtp:
        tree["mtp"] = {
            "embed_norm": norm,
            "hidden_norm": norm,
            "in_proj": Weight(shape=(2 * config.width, config.width), draw="matrix"),
            "layers": [layer(spec) for spec in config.mtp],
            "norm": norm,
        }
    if config.draft is not None:
        tree["draft"] = model_weights(config.draft)
    if not config.tie_embeddings:
        tree["head"] = Weight(shape=(config.width, config.vocab_size), draw="matrix")
    return tree
