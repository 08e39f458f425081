"""Choosing an implementation by name, the same way for every kernel package."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

Implementation = Literal["reference", "xla", "pallas", "triton"]
HIGHEST = jax.lax.Precision.HIGHEST
MOST_IN_A_TREE = 31  # bits of an int32 that are not its sign
INTS, FLAGS, WORDS = ("int32",), ("bool", "int32"), ("uint32",)
FLOATS, FLOAT32 = ("float32", "bfloat16", "float16"), ("float32",)
BITS = ("uint16", "uint32")  # of bfloat16, and of float32


def run(
    where: str,
    implementation: str | None,
    available: dict[str, Callable],
    *arrays: jax.Array,
    unsupported: str | None = None,
    no_triton: str | None = None,
    differentiable: bool = False,
    **static: Any,
):
    """Calls the named implementation, or for None the one for the platform the program is lowered for.

    Args:
        where: public function, for messages.
        available: implementations by name, all of one signature. "reference" is the definition; "xla" is there where
            XLA makes more of another form.
        arrays, static: their arguments.
        unsupported: why "pallas" cannot take these arguments, or None if it can.
        no_triton: the same of "triton".
        differentiable: "pallas" brings a derivative of its own; otherwise it has none, and None takes that of the
            form for other platforms.

    Raises:
        ValueError: no implementation has that name.
        NotImplementedError: "pallas" or "triton" was asked for and cannot.
    """
    arrays = [None if array is None else jnp.asarray(array) for array in arrays]  # numpy's, too
    if implementation is None:
        plain = functools.partial(available.get("xla", available["reference"]), **static)
        if unsupported is not None or "pallas" not in available:
            return plain(*arrays)
        pallas = functools.partial(available["pallas"], **static)
        either = functools.partial(jax.lax.platform_dependent, cuda=pallas, default=plain)
        return (either if differentiable else _differentiated_as(either, plain))(*arrays)
    if not isinstance(implementation, str) or implementation not in available:
        raise ValueError(
            f"{where}: implementation must be one of {sorted(available)}, got {implementation!r}"
        )
    named = functools.partial(available[implementation], **static)
    if implementation not in ("pallas", "triton"):
        return named(*arrays)
    reason = unsupported if implementation == "pallas" else no_triton
    if reason is not None:
        raise NotImplementedError(f"{where}: {reason}")
    if differentiable:
        return named(*arrays)
    underived = functools.partial(_no_derivative, where, implementation)
    return _differentiated_as(named, underived)(*arrays)


def _differentiated_as(function: Callable, other: Callable) -> Callable:
    """The function, with the derivatives of another one that computes the same.

    A kernel's own would be wrong without a word: states reach it as bits, through which nothing is differentiated.
    """
    called = jax.custom_jvp(function)
    called.defjvp(functools.partial(jax.jvp, other))
    return called


def _no_derivative(where: str, implementation: str, *arrays: jax.Array):
    raise NotImplementedError(
        f"{where}: {implementation!r} has no derivative; leave the choice to None, which has one"
    )


def check_rank(where: str, name: str, array: jax.Array, rank: int) -> None:
    """Checks that this is an array of so many dimensions."""
    check_array(where, name, array)
    if array.ndim != rank:
        raise ValueError(f"{where}: {name} must have {rank} dimensions, got shape {array.shape}")


def check_array(where: str, name: str, array: jax.Array) -> None:
    """Checks that this has a shape and a dtype, as arrays of JAX and numpy have."""
    if not hasattr(array, "shape") or not hasattr(array, "dtype"):
        raise TypeError(
            f"{where}: {name} must be an array, got {type(array).__name__}; make one with jnp.asarray"
        )


def check_dtypes(where: str, dtypes: tuple[str, ...], **arrays: jax.Array | None) -> None:
    """Checks that all arrays, None left out, hold something of one of the dtypes: as JAX sees them, which takes numpy's
    int64 as int32 unless told otherwise."""
    for name, array in arrays.items():
        if array is None:
            continue
        check_array(where, name, array)
        found = jax.dtypes.canonicalize_dtype(array.dtype, allow_extended_dtype=True)
        if found.name not in dtypes:
            remedy = "pass the bits" if dtypes[0].startswith("u") else "convert it"
            raise ValueError(
                f"{where}: {name} must be {' or '.join(dtypes)}, got {array.dtype}; {remedy}"
            )
        if 0 in array.shape:
            raise ValueError(
                f"{where}: {name} must not be empty, got shape {array.shape}; leave the call out"
            )


def check_shape(where: str, name: str, array: jax.Array, shape: tuple[int, ...]) -> None:
    """Checks that this is an array of exactly this shape."""
    check_array(where, name, array)
    if array.shape != shape:
        raise ValueError(f"{where}: {name} must have shape {shape}, got {array.shape}")


def check_group(where: str, table: jax.Array, group: int) -> None:
    """Checks which line of a page table int32[B, groups, pages] is asked for."""
    if not 0 <= group < table.shape[1]:
        raise ValueError(
            f"{where}: group must be one of the table's {table.shape[1]} lines, got {group}"
        )


def check_ancestors(where: str, ancestors: jax.Array | None, rows: int, tokens: int) -> None:
    """Checks the mask of a tree of new tokens, int32[rows, tokens], or None for a chain."""
    if ancestors is None:
        return
    check_shape(where, "ancestors", ancestors, (rows, tokens))
    check_dtypes(where, INTS, ancestors=ancestors)
    if tokens > MOST_IN_A_TREE:
        raise ValueError(
            f"{where}: a tree must have at most {MOST_IN_A_TREE} new tokens, got {tokens}; "
            "split it, or pass a chain"
        )
