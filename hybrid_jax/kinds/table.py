"""The kinds of blocks, by the class of their spec."""

from __future__ import annotations

from dataclasses import replace

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
from hybrid_jax.kinds.kind import Kind, PageEntry, RecurrentKind, Weight, Weights, map_weights
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


def entry_of(spec: object) -> PageEntry:
    """What a mixer that keeps pages has in them of every token."""
    entry = KINDS[type(spec)].entry(spec)
    assert entry is not None, f"{spec} keeps pages"
    return entry


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
    if config.cut is not None:
        tree["cut"] = {"norm": norm} | _written(config)
    if config.exit_head:
        head = Weight(shape=(config.width, config.vocab_size), draw="matrix")
        tree["exit"] = {"norm": norm, "head": head}
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
    if config.matrices == "dense":
        return tree

    def kept(weight: Weight) -> Weight:
        return replace(weight, format=config.matrices) if weight.is_matrix else weight

    # A second model has a format of its own.
    return {
        name: part if name == "draft" else map_weights(kept, part) for name, part in tree.items()
    }


def _written(config: ModelConfig) -> Weights:
    """The projection of the cut's output for all layers after it, in their order."""
    mixers = [mixer for index in config.later for mixer in config.layers[index].mixers]
    sizes = tuple(size for mixer in mixers for size in kind_of(mixer).parts(mixer).written.values())
    tree = {"write": Weight(shape=(config.width, sum(sizes)), draw="matrix", fused=sizes)}
    if any(getattr(mixer, name, False) for mixer in mixers for name in ("qkv_bias", "proj_bias")):
        tree["write_bias"] = Weight(shape=(sum(sizes),), draw="zeros", fused=sizes)
    return tree


def written_columns(config: ModelConfig) -> dict[tuple[int, int], slice]:
    """Which columns of that projection belong to a mixer, by its layer and its number among the layer's mixers."""
    found, start = {}, 0
    for index in config.later:
        for number, mixer in enumerate(config.layers[index].mixers):
            size = sum(kind_of(mixer).parts(mixer).written.values())
            found[index, number] = slice(start, start + size)
            start += size
    return found
