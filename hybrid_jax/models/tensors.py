"""How the tensors of a Hugging Face checkpoint make up our parameter tree.

A family describes its checkpoint as a tree shaped like the parameters (see `models.decoder`), with a
`Stored` at each leaf. `checkpoint.load_model` walks it; nothing here touches an array.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from hybrid_jax.config import MLP, Attention, Mamba2, ModelConfig, MoE


@dataclass(frozen=True, kw_only=True)
class Stored:
    """One leaf of our tree and the tensors it is made from.

    Attributes:
        parts: (name, shape as stored) of each tensor.
        layout: "same"; "linear" swaps the last two axes, [..., out, in] to [..., in, out]; "conv" turns
            [E, 1, W] into [W, E].
        join: "last" concatenates the parts along the last axis, "stack" stacks them on a new first one.
        keep_dtype: never cast; these few values are worth their stored precision.
        zeros_if_absent: a part that the file lacks is zero.
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
        return math.prod(self.shape)


def laid_out(shape: tuple[int, ...], layout: str) -> tuple[int, ...]:
    """Shape of a part after `Stored.layout`."""
    if layout == "conv":
        return (shape[2], shape[0])
    return (*shape[:-2], shape[-1], shape[-2]) if layout == "linear" else shape


def vector(name: str, *shape: int, keep_dtype: bool = False) -> Stored:
    """A tensor taken as it is: norms, biases, embeddings."""
    return Stored(parts=((name, shape),), keep_dtype=keep_dtype)


def matrix(inputs: int, *outputs: tuple[str, int]) -> Stored:
    """Linear weights [out, in], several of them fused side by side: (name, out) each."""
    parts = tuple((name, (size, inputs)) for name, size in outputs)
    return Stored(parts=parts, layout="linear")


def bias(*outputs: tuple[str, int], zeros_if_absent: bool = False) -> Stored:
    """The biases that belong to a `matrix`."""
    parts = tuple((name, (size,)) for name, size in outputs)
    return Stored(parts=parts, zeros_if_absent=zeros_if_absent)


def attention(prefix: str, width: int, spec: Attention, *, zeros_if_absent: bool = False) -> dict:
    """`q_proj`, `k_proj`, `v_proj`, `o_proj` under `prefix`."""
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    outputs = (("q_proj", q), ("k_proj", kv), ("v_proj", kv))
    tree = {
        "qkv": matrix(width, *((f"{prefix}.{name}.weight", size) for name, size in outputs)),
        "out": matrix(q, (f"{prefix}.o_proj.weight", width)),
    }
    if spec.qkv_bias:
        biases = ((f"{prefix}.{name}.bias", size) for name, size in outputs)
        tree["qkv_bias"] = bias(*biases, zeros_if_absent=zeros_if_absent)
    if spec.out_bias:
        tree["out_bias"] = bias((f"{prefix}.o_proj.bias", width), zeros_if_absent=zeros_if_absent)
    return tree


def mamba2(prefix: str, width: int, spec: Mamba2) -> dict:
    """A Mamba-2 mixer; every family uses the same names."""
    inner, heads = spec.inner_size, spec.num_heads
    conv = (f"{prefix}.conv1d.weight", (spec.conv_size, 1, spec.conv_width))
    tree = {
        "in_proj": matrix(width, (f"{prefix}.in_proj.weight", spec.proj_size)),
        "conv": Stored(parts=(conv,), layout="conv"),
        "A_log": vector(f"{prefix}.A_log", heads, keep_dtype=True),
        "D": vector(f"{prefix}.D", heads, keep_dtype=True),
        "dt_bias": vector(f"{prefix}.dt_bias", heads, keep_dtype=True),
        "norm": vector(f"{prefix}.norm.weight", inner),
        "out_proj": matrix(inner, (f"{prefix}.out_proj.weight", width)),
    }
    if spec.conv_bias:
        tree["conv_bias"] = vector(f"{prefix}.conv1d.bias", spec.conv_size)
    if spec.proj_bias:
        tree["in_bias"] = vector(f"{prefix}.in_proj.bias", spec.proj_size)
        tree["out_bias"] = vector(f"{prefix}.out_proj.bias", width)
    return tree


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
    """The whole tree: `layer(index, spec)` gives one layer's; the head is always `lm_head.weight`."""
    tree = {
        "embed": vector(embed, config.vocab_size, config.width),
        "layers": [layer(index, spec) for index, spec in enumerate(config.layers)],
        "norm": vector(norm, config.width),
    }
    if not config.tie_embeddings:
        tree["head"] = matrix(config.width, ("lm_head.weight", config.vocab_size))
    return tree
