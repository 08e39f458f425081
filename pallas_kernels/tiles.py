"""What XLA's scans of prompts by tiles of tokens share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

# Tokens of a tile. Products within a tile grow with its square. A GPU wants them large; a CPU takes 0.5 to 0.9 of the
# time with small ones.
GPU_TILE, CPU_TILE = 64, 16


def with_usual_tile(scan: Callable[..., Any], arrays: Any) -> Any:
    """Calls a scan with as many tokens a tile as suit the platform the program is lowered for."""
    tiles = {"cuda": GPU_TILE, "default": CPU_TILE}
    scans = {name: functools.partial(scan, tile=tile) for name, tile in tiles.items()}
    return jax.lax.platform_dependent(arrays, **scans)


def kept_state(
    kept: jax.Array, counts: jax.Array, tile: int, make: Callable[[jax.Array], jax.Array]
) -> jax.Array:
    """The states [B, G, h, P, R] that a scan returns, after one more tile.

    Args:
        kept: those before. counts: int32[B] tokens from the tile's start to where a row's state stands.
        make: the states after the tokens bool[B, Q] of the tile; called only where some row's stands in it.
    """
    ends = (counts > 0) & (counts <= tile)

    def new() -> jax.Array:
        made = make(jnp.arange(tile) < counts[:, None])
        return jnp.where(ends.reshape(-1, 1, 1, 1, 1), made, kept)

    return jax.lax.cond(ends.any(), new, lambda: kept)
