"""The kinds of parts, by the class of their spec."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hybrid_jax.config import (
    MLP,
    Attention,
    Block,
    GatedDelta,
    Layer,
    LowRank,
    Mamba1,
    Mamba2,
    ModelConfig,
    MoE,
    ShortConv,
    keeps_pages,
)
from hybrid_jax.config.block import is_alone
from hybrid_jax.kinds.attention import AttentionKind
from hybrid_jax.kinds.gated_delta import GatedDeltaKind
from hybrid_jax.kinds.kind import Kind, PageEntry, RecurrentKind, Weight, Weights
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
    """The kind of a part.

    Raises:
        ValueError: the class of the spec says that it keeps pages and the kind has no entry, or the other way round.
    """
    kind = KINDS[type(spec)]
    entry, pages = kind.entry(spec), keeps_pages(spec)
    if pages != (entry is not None):
        raise ValueError(
            f"{type(kind).__name__}: entry must be given for specs whose class has pages = True, and for no others, "
            f"got {entry} for {type(spec).__name__} with pages = {pages}; change one of them"
        )
    return kind


def entry_of(spec: object) -> PageEntry:
    """What a mixer that keeps pages has in them of every token."""
    entry = kind_of(spec).entry(spec)
    assert entry is not None, f"{spec} keeps pages"
    return entry


def recurrent_kind(spec: object) -> RecurrentKind:
    """The kind of a recurrent mixer."""
    kind = kind_of(spec)
    assert isinstance(kind, RecurrentKind), f"{spec} is recurrent"
    return kind


def model_weights(config: ModelConfig) -> Weights:
    """All arrays of a model, in a tree like its parameters (`models.decoder`)."""
    norm = _norm(config)

    def layers(specs: Sequence[Layer]) -> list[Weights]:
        return [_layer(layer, config) for layer in specs]

    tree = {
        "embed": Weight(
            shape=(config.shard_vocab, config.width), draw="embedding", on_devices="runs"
        ),
        "layers": layers(config.layers),
        "norm": norm,
    }
    if config.cut is not None:
        tree["cut"] = {"norm": norm} | _written(config)
    if config.exit_head:
        tree["exit"] = {"norm": norm, "head": _head(config)}
    if config.mtp:
        tree["mtp"] = {
            "embed_norm": norm,
            "hidden_norm": norm,
            "in_proj": Weight(shape=(2 * config.width, config.width), draw="matrix"),
            "layers": layers(config.mtp),
            "norm": norm,
        }
    if config.draft is not None:
        tree["draft"] = model_weights(config.draft)
    if not config.tie_embeddings:
        tree["head"] = _head(config)
    # A second model has formats of its own.
    kept = _kept({name: part for name, part in tree.items() if name != "draft"}, config)
    return {name: kept.get(name, part) for name, part in tree.items()}


def uses(config: ModelConfig, layers: Sequence[Layer]) -> list[tuple[Any, Weights]]:
    """The parts that tokens go through in the first of a model's layers, and then in those that draft, each with its
    weights there.

    If a block shares weights, its parts have those of the other block. What a block adds to them is in "changes".
    """
    trees, found = model_weights(config)["layers"], []
    for index, layer in enumerate(layers):
        for number, block in enumerate(layer.blocks):
            of, which = block.weights or (index, number)
            parts = _as_list(trees[of][config.layers[of].names[which].parts])
            changes: list[Weights] = [{}] * len(parts)
            if block.change is not None:
                changes = _as_list(trees[index][layer.names[number].changes])
            pairs = zip(block.parts, parts, changes, strict=True)
            found += [(part, own | {"changes": change}) for part, own, change in pairs]
    return found + (uses(config.drafting, config.drafting.layers) if config.drafting else [])


def _as_list(parts: Any) -> list[Weights]:
    """The weights of a block's parts, of which there may be one alone."""
    return parts if isinstance(parts, list) else [parts]


def _kept(tree: Any, config: ModelConfig) -> Any:
    """Weights in the formats in which a model keeps its matrices."""
    if not config.matrices:
        return tree
    formats = dict(config.matrices)

    def kept(part: Any, place: str) -> Any:
        if isinstance(part, Weight):
            return replace(part, format=formats[place]) if place in formats else part
        if isinstance(part, list):
            return [kept(own, f"{place}.{index}") for index, own in enumerate(part)]
        return {name: kept(own, f"{place}.{name}" if place else name) for name, own in part.items()}

    return kept(tree, "")


def _head(config: ModelConfig) -> Weight:
    shape = (config.width, config.shard_vocab)
    return Weight(shape=shape, draw="matrix", on_devices="runs")


def _norm(config: ModelConfig, width: int | None = None) -> Weight | Weights:
    """A norm of the stream, or of so many columns: its gain; with a bias beside it if it takes the mean away."""
    gain = Weight(shape=(width or config.width,), draw="ones", float32=config.float32_norms)
    return (
        gain if config.norm_kind == "rms" else {"gain": gain, "bias": replace(gain, draw="zeros")}
    )


def _layer(layer: Layer, config: ModelConfig) -> Weights:
    """The weights of a layer's blocks, side by side."""
    tree: Weights = {}
    for names, block in zip(layer.names, layer.blocks, strict=True):
        parts, changes = _parts(block, config)
        if block.weights is None:
            if block.has_norm_before:
                tree[names.norm] = _norm(config, block.width_in(config.width))
            if block.has_norm_after:
                tree[names.after] = _norm(config)
            tree[names.parts] = parts[0] if is_alone(block) else parts
        if block.change is not None:
            tree[names.changes] = changes[0] if is_alone(block) else changes
    return tree


def _parts(block: Block, config: ModelConfig) -> tuple[list[Weights], list[Weights]]:
    """The weights of each part of a block, and what the block adds to them."""
    width = block.width_in(config.width)
    parts = [kind_of(part).weights_between(part, width, config.width) for part in block.parts]
    return parts, _changes(parts, block.change) if block.change else [{}] * len(parts)


def _changes(parts: list[Weights], change: LowRank) -> list[Weights]:
    """Of each part the two matrices of low rank beside each that changes: "a" [I, rank] and "b" [rank, O].

    Raises:
        ValueError: a name that is no matrix [I, O] of a part.
    """
    can = {
        name
        for part in parts
        for name, own in part.items()
        if isinstance(own, Weight) and own.is_matrix and len(own.shape) == 2
    }
    if unknown := sorted(set(change.matrices) - can):
        raise ValueError(
            f"LowRank: matrices must be of {', '.join(sorted(can))}, got {', '.join(unknown)}"
        )

    def pair(own: Weight) -> Weights:
        (rows, columns), rank = own.shape, change.rank
        return {
            "a": Weight(shape=(rows, rank), draw="matrix", stays=rank),
            "b": Weight(shape=(rank, columns), draw="matrix", fused=own.fused, stays=columns),
        }

    return [{name: pair(part[name]) for name in change.matrices if name in part} for part in parts]


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
