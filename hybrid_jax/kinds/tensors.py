"""How the tensors of a Hugging Face checkpoint make up our parameter tree; nothing here touches an array.

Weights say what shape a parameter has, and names say which tensors it is made from. Together they give a `Stored` for
each parameter, which `weights.load_model` reads.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, replace
from types import EllipsisType
from typing import Any, Literal

from hybrid_jax.config.formats import Format
from hybrid_jax.kinds.kind import Draw, Names, Weight, Weights

Layout = Literal["same", "linear", "conv"]
LAYOUTS: dict[Draw, Layout] = {"matrix": "linear", "output": "linear", "conv": "conv"}


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Some rows of a tensor whose rows come in equal blocks, such as heads: rows start .. stop - 1 of each block."""

    blocks: int
    size: int
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A tensor of which a parameter is made, where it is not simply the whole tensor.

    Attributes:
        name: of the tensor.
        rows: those that belong to the parameter; None for all.
        factor, plus: every value is multiplied by one and the other is added, in float32.
    """

    name: str
    rows: Rows | None = None
    factor: float = 1.0
    plus: float = 0.0


@dataclass(frozen=True)
class Either:
    """Two ways in which files name the tensors of a parameter: the first, unless only the second is there."""

    first: Names
    second: Names


@dataclass(frozen=True, kw_only=True)
class Part:
    """One tensor's share of a parameter.

    Attributes:
        name, shape: of the tensor, as stored.
        place: index of the share in the parameter.
        rows, factor, plus: as in `Piece`.
    """

    name: str
    shape: tuple[int, ...]
    place: tuple[int | slice | EllipsisType, ...]
    rows: Rows | None
    factor: float
    plus: float


@dataclass(frozen=True, kw_only=True)
class Stored:
    """One leaf of our tree and the tensors it is made from.

    Attributes:
        shape: of the leaf.
        parts: the tensors.
        layout: of every tensor: "same"; "linear" swaps the last two axes, [..., out, in] to [..., in, out]; "conv"
            turns [E, 1, W] into [W, E].
        float32: the values are kept in float32, because these few are worth it.
        format, is_matrix: as of `Weight`.
    """

    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    layout: Layout
    float32: bool
    format: Format
    is_matrix: bool


# --- names that most families use -----------------------------------------------------------------

ATTENTION: Names = {
    "qkv": ("q_proj.weight", "k_proj.weight", "v_proj.weight"),
    "qkv_bias": ("q_proj.bias", "k_proj.bias", "v_proj.bias"),
    "out": "o_proj.weight",
    "out_bias": "o_proj.bias",
    "q_norm": "q_norm.weight",
    "k_norm": "k_norm.weight",
}
MAMBA2: Names = {
    "in_proj": "in_proj.weight",
    "in_bias": "in_proj.bias",
    "conv": "conv1d.weight",
    "conv_bias": "conv1d.bias",
    "A_log": "A_log",
    "D": "D",
    "dt_bias": "dt_bias",
    "norm": "norm.weight",
    "out_proj": "out_proj.weight",
    "out_bias": "out_proj.bias",
}
MAMBA1: Names = {
    "in_proj": "in_proj.weight",
    "in_bias": "in_proj.bias",
    "conv": "conv1d.weight",
    "conv_bias": "conv1d.bias",
    "x_proj": "x_proj.weight",
    "dt_proj": "dt_proj.weight",
    "dt_bias": "dt_proj.bias",
    "A_log": "A_log",
    "D": "D",
    "out_proj": "out_proj.weight",
    "out_bias": "out_proj.bias",
    "dt_norm": "dt_layernorm.weight",
    "B_norm": "b_layernorm.weight",
    "C_norm": "c_layernorm.weight",
}
GATED_MLP: Names = {
    "up": ("gate_proj.weight", "up_proj.weight"),
    "down": "down_proj.weight",
    "up_bias": ("gate_proj.bias", "up_proj.bias"),
    "down_bias": "down_proj.bias",
}
# One tensor for each expert, or those of all experts in one.
GATED_EXPERTS: Names = {
    "up": Either(
        ("experts.{}.gate_proj.weight", "experts.{}.up_proj.weight"), "experts.gate_up_proj"
    ),
    "down": Either("experts.{}.down_proj.weight", "experts.down_proj"),
}
PLAIN_MLP: Names = GATED_MLP | {"up": "up_proj.weight", "up_bias": "up_proj.bias"}


def under(prefix: str, names: Names) -> Any:
    """The same names, each with a prefix and a dot in front of it."""
    if isinstance(names, str):
        return f"{prefix}.{names}"
    if isinstance(names, Piece):
        return replace(names, name=f"{prefix}.{names.name}")
    if isinstance(names, Either):
        return Either(under(prefix, names.first), under(prefix, names.second))
    if isinstance(names, dict):
        return {key: under(prefix, name) for key, name in names.items()}
    return type(names)(under(prefix, name) for name in names)


# --- trees ----------------------------------------------------------------------------------------


def stored(weights: Weights | Weight, names: Names, there: Container[str] = ()) -> Any:
    """A tree of weights with a `Stored` for each of them. `names` may have more than the weights need.

    The name of a leaf is a string or a `Piece`, a tuple of these for tensors that lie side by side in it, or `Either`
    of two. Names with {} stand for as many tensors as the leaf has experts.

    Args:
        there: names of the tensors of a file.
    """
    if isinstance(weights, Weight):
        if not isinstance(names, Either):
            return _leaf(weights, names)
        leaves = [_leaf(weights, names.first), _leaf(weights, names.second)]
        found = [any(part.name in there for part in leaf.parts) for leaf in leaves]
        return leaves[found == [False, True]]
    if isinstance(weights, list):
        pairs = zip(weights, names, strict=True)
        return [stored(weight, name, there) for weight, name in pairs]
    return {key: stored(weight, names[key], there) for key, weight in weights.items()}


def _leaf(weight: Weight, names: Names) -> Stored:
    layout, shape = LAYOUTS.get(weight.draw, "same"), weight.shape
    names = names if isinstance(names, tuple) else (names,)
    pieces = [Piece(name=name) if isinstance(name, str) else name for name in names]
    sizes = weight.fused if len(pieces) > 1 else (shape[-1],)
    parts, start = [], 0
    for piece, size in zip(pieces, sizes, strict=True):
        columns = slice(start, start + size)
        start += size
        if "{}" in piece.name:
            whole = _as_stored((*shape[1:-1], size), layout)
            for index in range(shape[0]):
                one = replace(piece, name=piece.name.format(index))
                parts.append(_part(one, whole, (index, ..., columns)))
        else:
            whole = _as_stored((*shape[:-1], size), layout)
            parts.append(_part(piece, whole, (..., columns)))
    return Stored(
        shape=shape,
        parts=tuple(parts),
        layout=layout,
        float32=weight.float32,
        format=weight.format,
        is_matrix=weight.is_matrix,
    )


def _part(piece: Piece, shape: tuple[int, ...], place: tuple) -> Part:
    """The share of a piece that has this shape as stored, but for rows that it leaves out."""
    rows = piece.rows
    if rows is not None:
        assert shape[0] == rows.blocks * (rows.stop - rows.start), f"{piece} is to fill {shape}"
        shape = (rows.blocks * rows.size, *shape[1:])
    return Part(
        name=piece.name,
        shape=shape,
        place=place,
        rows=rows,
        factor=piece.factor,
        plus=piece.plus,
    )


def _as_stored(shape: tuple[int, ...], layout: Layout) -> tuple[int, ...]:
    """Shape of a tensor that has this shape once it is laid out."""
    if layout == "conv":
        return (shape[1], 1, shape[0])
    return (*shape[:-2], shape[-1], shape[-2]) if layout == "linear" else shape
