"""How the tensors of a Hugging Face checkpoint make up our parameter tree; nothing here touches an array.

Weights say what shape a parameter has, and names say which tensors it is made from. Together they give a `Stored` for
each parameter, which `weights.load_model` reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from hybrid_jax.kinds.kind import Draw, Names, Weight, Weights

Layout = Literal["same", "linear", "conv"]
Join = Literal["last", "stack"]
LAYOUTS: dict[Draw, Layout] = {"matrix": "linear", "output": "linear", "conv": "conv"}

# Names of the tensors of a feed-forward block.
GATED_MLP: Names = {
    "up": ("gate_proj.weight", "up_proj.weight"),
    "down": "down_proj.weight",
    "up_bias": ("gate_proj.bias", "up_proj.bias"),
    "down_bias": "down_proj.bias",
}
PLAIN_MLP: Names = GATED_MLP | {"up": "up_proj.weight", "up_bias": "up_proj.bias"}


@dataclass(frozen=True, kw_only=True)
class Stored:
    """One leaf of our tree and the tensors it is made from.

    Attributes:
        shape: of the leaf.
        parts: (name, shape as stored) of each tensor.
        layout: "same"; "linear" swaps the last two axes, [..., out, in] to [..., in, out]; "conv" turns
            [E, 1, W] into [W, E].
        join: "last" concatenates the parts along the last axis, "stack" stacks them on a new first one.
        keep_dtype: the values are never cast, because these few are worth their stored precision.
    """

    shape: tuple[int, ...]
    parts: tuple[tuple[str, tuple[int, ...]], ...]
    layout: Layout
    join: Join
    keep_dtype: bool


def stored(weights: Weights | Weight, names: Names) -> Any:
    """A tree of weights with a `Stored` for each of them. `names` may have more than the weights need."""
    if isinstance(weights, Weight):
        return _leaf(weights, names)
    if isinstance(weights, list):
        return [stored(*pair) for pair in zip(weights, names, strict=True)]
    return {key: stored(weight, names[key]) for key, weight in weights.items()}


def under(prefix: str, names: Names) -> Any:
    """The same names, each with a prefix and a dot in front of it."""
    if isinstance(names, str):
        return f"{prefix}.{names}"
    if isinstance(names, dict):
        return {key: under(prefix, name) for key, name in names.items()}
    return [under(prefix, name) for name in names]


def _leaf(weight: Weight, names: Names) -> Stored:
    layout, shape = LAYOUTS.get(weight.draw, "same"), weight.shape
    join: Join = "last"
    if isinstance(names, str) and "{}" in names:
        parts = [(names.format(index), shape[1:]) for index in range(shape[0])]
        join = "stack"
    elif isinstance(names, str):
        parts = [(names, shape)]
    else:
        sizes = zip(names, weight.fused, strict=True)
        parts = [(name, (*shape[:-1], size)) for name, size in sizes]
    return Stored(
        shape=shape,
        parts=tuple((name, _as_stored(part, layout)) for name, part in parts),
        layout=layout,
        join=join,
        keep_dtype=weight.float32,
    )


def _as_stored(shape: tuple[int, ...], layout: Layout) -> tuple[int, ...]:
    """Shape of a tensor that has this shape once it is laid out."""
    if layout == "conv":
        return (shape[1], 1, shape[0])
    return (*shape[:-2], shape[-1], shape[-2]) if layout == "linear" else shape
