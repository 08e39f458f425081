"""Choosing an implementation by name, the same way for every kernel package."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal

import jax

Implementation = Literal["reference", "xla", "pallas"]
HIGHEST = jax.lax.Precision.HIGHEST
MOST_IN_A_TREE = 31  # bits of an int32 that are not its sign


def run(
    where: str,
    implementation: str | None,
    available: dict[str, Callable],
    *arrays: jax.Array,
    unsupported: str | None = None,
    **static,
):
    """Calls the named implementation, or for None the one for the platform the program is lowered for.

    Args:
        where: public function, for messages.
        available: implementations by name, all of one signature.
        arrays, static: their arguments.
        unsupported: why "pallas" cannot take these arguments, or None if it can.

    Raises:
        ValueError: no implementation has that name.
        NotImplementedError: "pallas" was asked for and cannot.
    """
    if implementation is None:
        xla = functools.partial(available["xla"], **static)
        if unsupported is not None or "pallas" not in available:
            return xla(*arrays)
        pallas = functools.partial(available["pallas"], **static)
        return jax.lax.platform_dependent(*arrays, cuda=pallas, default=xla)
    if implementation not in available:
        raise ValueError(
            f"{where}: implementation must be one of {sorted(available)}, got {implementation!r}"
        )
    if implementation == "pallas" and unsupported is not None:
        raise NotImplementedError(f"{where}: {unsupported}")
    return available[implementation](*arrays, **static)


def check_rank(where: str, name: str, array: jax.Array, rank: int) -> None:
    if array.ndim != rank:
        raise ValueError(f"{where}: {name} must have {rank} dimensions, got shape {array.shape}")


def check_shape(where: str, name: str, array: jax.Array, shape: tuple[int, ...]) -> None:
    if array.shape != shape:
        raise ValueError(f"{where}: {name} must have shape {shape}, got {array.shape}")


def check_ancestors(where: str, ancestors: jax.Array | None, rows: int, tokens: int) -> None:
    """Checks the mask of a tree of new tokens, int32[rows, tokens], or None for a chain."""
    if ancestors is None:
        return
    check_shape(where, "ancestors", ancestors, (rows, tokens))
    if tokens > MOST_IN_A_TREE:
        raise ValueError(
            f"{where}: a tree must have at most {MOST_IN_A_TREE} new tokens, got {tokens}; "
            "split it, or pass a chain"
        )
