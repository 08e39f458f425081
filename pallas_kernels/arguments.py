"""What an operation takes: its arrays are listed once, in a class that says their dtypes and dimensions.

    class Arrays(NamedTuple):
        x: Annotated[jax.Array, FLOATS, "B T M"]
        bias: Annotated[jax.Array | None, FLOATS, "None M"]

The API checks them by that list (`check`), and every implementation takes them as one value. Operations on an engine's
memory take that value from their caller, too.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any, get_args, get_type_hints

import jax
import jax.numpy as jnp

MOST_IN_A_TREE = 31  # bits of an int32 that are not its sign
INTS, FLAGS, WORDS = ("int32",), ("bool", "int32"), ("uint32",)
FLOATS, FLOAT32 = ("float32", "bfloat16", "float16"), ("float32",)
BITS = ("uint16", "uint32")  # of bfloat16, and of float32


@functools.cache
def _declared(kind: type) -> dict[str, tuple[tuple[str, ...], list[str]]]:
    """The dtypes and dimensions of every field."""
    found = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        _, dtypes, dimensions = get_args(hint)
        found[name] = dtypes, dimensions.split()
    return found


def check(where: str, arrays: Any, **sizes: int) -> SimpleNamespace:
    """Checks arrays by what their class declares, in its order; returns the size of every dimension by name.

    A dimension is a number, or a name, which must have one size in all arrays. "..." stands for any dimensions, the
    same ones in all arrays. A dimension with "?" may be missing; what has one whose name ends in "parts?" is float32
    parts of a product. An array with "None" in front of its dimensions may be left out.

    Args:
        where: public function, for messages.
        arrays: a NamedTuple whose fields are annotated as above.
        sizes: those of dimensions that something else decides.
    """
    for name, (dtypes, dimensions) in _declared(type(arrays)).items():
        array = getattr(arrays, name)
        if dimensions[0] == "None":
            if array is None:
                continue
            dimensions = dimensions[1:]
        check_dtype(where, name, array, dtypes)
        if 0 in array.shape:
            raise ValueError(
                f"{where}: {name} must not be empty, got shape {array.shape}; leave the call out"
            )
        _check_shape(where, name, array, dimensions, sizes)
    return SimpleNamespace(**sizes)


def check_array(where: str, name: str, array: jax.Array) -> None:
    """Checks that this has a shape and a dtype, as arrays of JAX and numpy have."""
    if not hasattr(array, "shape") or not hasattr(array, "dtype"):
        raise TypeError(
            f"{where}: {name} must be an array, got {type(array).__name__}; make one with jnp.asarray"
        )


def check_dtype(where: str, name: str, array: jax.Array, dtypes: tuple[str, ...]) -> None:
    """Checks that an array is of one of the dtypes: as JAX sees it, which takes numpy's int64 as int32 unless told
    otherwise."""
    check_array(where, name, array)
    found = jax.dtypes.canonicalize_dtype(array.dtype, allow_extended_dtype=True)
    if found.name not in dtypes:
        remedy = "pass the bits" if dtypes[0].startswith("u") else "convert it"
        raise ValueError(
            f"{where}: {name} must be {' or '.join(dtypes)}, got {array.dtype}; {remedy}"
        )


def check_result_dtype(where: str, dtype: jnp.dtype) -> None:
    """Checks the dtype that a result is asked for in."""
    if jnp.dtype(dtype).name not in FLOATS:
        raise ValueError(
            f"{where}: dtype must be {' or '.join(FLOATS)}, got {jnp.dtype(dtype).name}"
        )


def check_words(where: str, arena: jax.Array, offset: int, words: int) -> None:
    """Checks that the frames of an arena uint32[U, W] hold words [offset, offset + words)."""
    if offset < 0 or words < 0 or offset + words > arena.shape[1]:
        raise ValueError(
            f"{where}: words [{offset}, {offset + words}) must lie within a frame of {arena.shape[1]}; "
            "correct the offset, or take larger frames"
        )


def check_table(where: str, table: jax.Array, page_frame: int) -> None:
    """Checks which frame of each page a table int32[B, frames_per_page, pages] is asked for."""
    if not 0 <= page_frame < table.shape[1]:
        raise ValueError(
            f"{where}: page_frame must be one of the table's {table.shape[1]} frames per page, got {page_frame}"
        )


def check_tree(where: str, ancestors: jax.Array | None) -> None:
    """Checks the mask of a tree of new tokens, int32[B, T], or None for a chain."""
    if ancestors is not None and ancestors.shape[1] > MOST_IN_A_TREE:
        raise ValueError(
            f"{where}: a tree must have at most {MOST_IN_A_TREE} new tokens, got {ancestors.shape[1]}; "
            "split it, or pass a chain"
        )


def _check_shape(
    where: str, name: str, array: jax.Array, dimensions: list[str], sizes: dict[str, Any]
) -> None:
    dimensions = list(dimensions)
    if "..." in dimensions:
        place = dimensions.index("...")
        sizes.setdefault("...", array.shape[: max(array.ndim - len(dimensions) + 1, 0)])
        dimensions[place : place + 1] = map(str, sizes["..."])
    optional = next((d for d in dimensions if d.endswith("?")), None)
    alternative = ""
    if optional is not None and array.ndim != len(dimensions):
        alternative = f", or {len(dimensions)} with {optional[:-1]}"
        dimensions.remove(optional)
    if array.ndim != len(dimensions):
        raise ValueError(
            f"{where}: {name} must have {len(dimensions)} dimensions{alternative}, got shape {array.shape}; "
            f"they are [{', '.join(dimensions)}]"
        )
    if any(d.endswith("parts?") for d in dimensions) and array.dtype != jnp.float32:
        raise ValueError(
            f"{where}: {name} must be parts float32[S, ...], "
            f"got {array.dtype}{list(array.shape)}; sum what is rounded already"
        )
    for dimension, size in zip(dimensions, array.shape, strict=True):
        if not dimension.isdigit():
            sizes.setdefault(dimension, size)
    wanted = tuple(int(d) if d.isdigit() else sizes[d] for d in dimensions)
    if array.shape != wanted:
        raise ValueError(f"{where}: {name} must have shape {wanted}, got {array.shape}")
