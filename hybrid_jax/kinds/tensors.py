"""How the tensors of a Hugging Face checkpoint make up our parameter tree; nothing here touches an array.

A family describes its checkpoint as a tree shaped like the parameters (see `models.decoder`), with a `Stored` at each
leaf. `weights.load_model` walks it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from hybrid_jax.config import MLP, ModelConfig, MoE


@dataclass(frozen=True, kw_only=True)
class Stored:
    """One leaf of our tree and the tensors it is made from.

    Attributes:
        parts: (name, shape as stored) of each tensor.
        layout: "same"; "linear" swaps the last two axes, [..., out, in] to [..., in, out]; "conv" turns
            [E, 1, W] into [W, E].
        join: "last" concatenates the parts along the last axis, "stack" stacks them on a new first one.
        keep_dtype: the values are never cast, because these few are worth their stored precision.
        zeros_if_absent: a part that is missing in the file is zero.
    """

    parts: tuple[tuple[str, tuple[int, ...]], ...]
    layout: Literal["same", "linear", "conv"] = "same"
    join: Literal["last", "stack"] = "last"
    keep_dtype: bool = False
    zeros_if_absent: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the leaf."""
        shapes = [laid_out(shape, self.layout) for _, shape in self.parts]
        if self.join == "stack":
            return (len(shapes), *shapes[0])
        return (*shapes[0][:-1], sum(shape[-1] for shape in shapes))

    @property
    def size(self) -> int:
        """Elements of the leaf."""
        return math.prod(self.shape)


def laid_out(shape: tuple[int, ...], layout: str) -> tuple[int, ...]:
    """Shape of a part after `Stored.layout`."""
    if layout == "conv":
        return (shape[2], shape[0])
    return (*shape[:-2], shape[-1], shape[-2]) if layout == "linear" else shape


def vector(name: str, *shape: int, keep_dtype: bool = False) -> Stored:
    """A tensor that is taken as it is: a norm, a bias, an embedding."""
    return Stored(parts=((name, shape),), keep_dtype=keep_dtype)


def matrix(inputs: int, *outputs: tuple[str, int]) -> Stored:
    """Linear weights [out, in], several of them fused side by side; `outputs` gives (name, out) for each."""
    parts = tuple((name, (size, inputs)) for name, size in outputs)
    return Stored(parts=parts, layout="linear")


def bias(*outputs: tuple[str, int], zeros_if_absent: bool = False) -> Stored:
    """The biases that belong to a `matrix`."""
    parts = tuple((name, (size,)) for name, size in outputs)
    return Stored(parts=parts, zeros_if_absent=zeros_if_absent)


def gated_mlp(prefix: str, width: int, spec: MLP) -> dict:
    """`gate_proj`, `up_proj`, `down_proj` under `prefix`."""
    outputs = (("gate_proj", spec.width), ("up_proj", spec.width))
    tree = {
        "up": matrix(width, *((f"{prefix}.{name}.weight", size) for name, size in outputs)),
        "down": matrix(spec.width, (f"{prefix}.down_proj.weight", width)),
    }
    if spec.bias:
        tree["up_bias"] = bias(*((f"{prefix}.{name}.bias", size) for name, size in outputs))
        tree["down_bias"] = bias((f"{prefix}.down_proj.bias", width))
    return tree


def relu2_mlp(prefix: str, width: int, spec: MLP | MoE, hidden: int) -> dict:
    """`up_proj` and `down_proj` of `hidden` units under `prefix`."""
    tree = {
        "up": matrix(width, (f"{prefix}.up_proj.weight", hidden)),
        "down": matrix(hidden, (f"{prefix}.down_proj.weight", width)),
    }
    if spec.bias:
        tree["up_bias"] = bias((f"{prefix}.up_proj.bias", hidden))
        tree["down_bias"] = bias((f"{prefix}.down_proj.bias", width))
    return tree


def model(config: ModelConfig, embed: str, norm: str, layer: Callable[[int, object], dict]) -> dict:
    """The whole tree. `layer(index, spec)` gives the tree of one layer; the head is always `lm_head.weight`."""
    tree = {
        "embed": vector(embed, config.vocab_size, config.width),
        "layers": [layer(index, spec) for index, spec in enumerate(config.layers)],
        "norm": vector(norm, config.width),
    }
    if not config.tie_embeddings:
        tree["head"] = matrix(config.width, ("lm_head.weight", config.vocab_size))
    return tree
