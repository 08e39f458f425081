"""Products whose inner dimension is split, so that few rows still fill the chip.

XLA splits such products by itself, from the chip's description, and sums their parts in a launch of its own. Split
here, they stay parts, float32[S, ...], for a kernel that reads them anyway: it adds them up, and rounds the sum as the
product would have been.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.triton import NUM_SMS, cdiv, load

TILE_ROWS, TILE_COLUMNS = 64, 128  # of a product, by one program
LEAST = 192  # elements of the inner dimension that are worth a program


def num_parts(rows: int, inner: int, columns: int) -> int:
    """Parts of a product [rows, inner] @ [inner, columns] that make 1.5 programs a multiprocessor, or as many as the
    inner dimension allows.

    Not fewer than XLA's own, or it would split the parts again. A lone row is no product to XLA: it reads the matrix
    in a way of its own, and would turn a split one over first.
    """
    tiles, parts = cdiv(rows, TILE_ROWS) * cdiv(columns, TILE_COLUMNS), 1
    while rows > 1 and 2 * tiles * parts < 3 * NUM_SMS:
        part, rest = divmod(inner, 2 * parts)
        if rest or part < LEAST:
            break
        parts *= 2
    return parts


def check_parts(where: str, name: str, array: jax.Array, rank: int) -> tuple[int, ...]:
    """The shape [...] of an array of `rank` dimensions, or of the sum of its parts float32[S, ...]."""
    if array.ndim == rank:
        return array.shape
    if array.ndim != rank + 1:
        raise ValueError(
            f"{where}: {name} must have {rank} dimensions, or {rank + 1} in parts, got shape {array.shape}"
        )
    if array.dtype != jnp.float32 or not array.shape[0]:
        raise ValueError(
            f"{where}: {name} must be parts float32[S, ...] with S > 0, "
            f"got {array.dtype}{list(array.shape)}; sum what is rounded already"
        )
    return array.shape[1:]


def whole(array: jax.Array, rank: int, dtype: jnp.dtype) -> jax.Array:
    """An array of `rank` dimensions as it is; the sum of parts in `dtype`."""
    return array if array.ndim == rank else array.sum(0).astype(dtype)


def as_parts(array: jax.Array, rank: int) -> jax.Array:
    """Parts as they are; an array of `rank` dimensions as the only part, of its own dtype."""
    return array[None] if array.ndim == rank else array


def load_sum(ref, *index, mask, dtype: jnp.dtype) -> jax.Array:
    """`whole` at the broadcast indices of `as_parts`, inside a kernel; zero where the mask is false."""
    first, *more = (load(ref, part, *index, mask=mask) for part in range(ref.shape[0]))
    return sum(more, first).astype(dtype)
