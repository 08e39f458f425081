"""Choosing an implementation by name, the same way for every kernel package."""

from __future__ import annotations

from typing import Literal

import jax

Implementation = Literal["reference", "xla"]
HIGHEST = jax.lax.Precision.HIGHEST


def choose(implementation: str | None, available: dict, where: str):
    """Returns the named implementation, or the default one ("xla") for None."""
    name = "xla" if implementation is None else implementation
    if name not in available:
        raise ValueError(
            f"{where}: implementation must be one of {sorted(available)}, got {name!r}"
        )
    return available[name]


def check_rank(where: str, name: str, array: jax.Array, rank: int) -> None:
    if array.ndim != rank:
        raise ValueError(f"{where}: {name} must have {rank} dimensions, got shape {array.shape}")


def check_shape(where: str, name: str, array: jax.Array, shape: tuple[int, ...]) -> None:
    if array.shape != shape:
        raise ValueError(f"{where}: {name} must have shape {shape}, got {array.shape}")
