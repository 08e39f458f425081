"""A lone row times a matrix, as in a decode step of one sequence.

On a GPU it is bound by reading the matrix. A program takes a block of columns and a part of the inner dimension. Its
threads keep sums of their own places of a tile, 16 bytes of a matrix row each, and add them up across the tile once, at
the end.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.arguments import FLOATS, check, check_dtype
from pallas_kernels.dispatch import HIGHEST, Implementation, run
from pallas_kernels.operands import widen
from pallas_kernels.triton import NUM_SMS, Ref, call, cdiv, iota, load, store

BLOCK_INNER, BLOCK_COLUMNS, NUM_WARPS = 64, 64, 4
PROGRAMS_PER_SM = 4  # each keeps a tile of 8 KB (bfloat16) on the way
MOST_PARTS = 8  # what follows sums them with few threads
LEAST = 256  # elements of the inner dimension that are worth a program


class Arrays(NamedTuple):
    """Arrays of `row_product`."""

    x: Annotated[jax.Array, FLOATS, "I"]
    weight: Annotated[jax.Array, FLOATS, "I O"]


def row_product(
    x: jax.Array, weight: jax.Array, *, implementation: Implementation | None = None
) -> jax.Array:
    """x @ weight in parts of the inner dimension: as many as a GPU needs to be busy (`num_parts`).

    Products and sums are float32, also of bfloat16. XLA for GPUs makes a multiplication and sums of such a product, and
    for some shapes writes all products to memory first.

    Args:
        x: [I]. weight: [I, O], of the same dtype.
        implementation: "reference", "pallas", or None to choose. A named one never falls back.

    Returns:
        float32[S, O], whose sum over S is the product.

    Example:
        >>> import jax.numpy as jnp
        >>> row_product(jnp.ones(1024), jnp.ones((1024, 24))).sum(0)[0]
        Array(1024., dtype=float32)
    """
    where, arrays = "row_product", Arrays(x, weight)
    check(where, arrays)
    check_dtype(where, "weight", weight, (x.dtype.name,))
    return run(where, implementation, PRODUCTS, arrays)


def part_length(inner: int, columns: int) -> int:
    """Elements of the inner dimension in a part, whole tiles; the last part may have fewer.

    Parts make `PROGRAMS_PER_SM` programs a multiprocessor, or as many as are worth it.
    """
    parts = 1
    while cdiv(columns, BLOCK_COLUMNS) * parts < PROGRAMS_PER_SM * NUM_SMS:
        if parts == MOST_PARTS or inner < 2 * parts * LEAST:
            break
        parts *= 2
    return cdiv(cdiv(inner, parts), BLOCK_INNER) * BLOCK_INNER


def num_parts(inner: int, columns: int) -> int:
    """Parts of a product."""
    return cdiv(inner, part_length(inner, columns))


def row_product_reference(arrays: Arrays) -> jax.Array:
    """See `row_product`; the last part may be shorter than the others."""
    x, weight = arrays
    inner, columns = weight.shape
    length = part_length(inner, columns)
    padding = -inner % length
    x = jnp.pad(x.astype(jnp.float32), (0, padding)).reshape(-1, length)
    weight = jnp.pad(weight, ((0, padding), (0, 0))).reshape(-1, length, columns)
    return jnp.einsum("si,sio->so", x, weight.astype(jnp.float32), precision=HIGHEST)


def _kernel(
    x_ref: Ref,  # [I]
    weight_ref: Ref,  # [I, O]
    parts_ref: Ref,  # [S, O]
    *,
    length: int,
):
    block, part = pl.program_id(0), pl.program_id(1)
    inner, columns = weight_ref.shape
    # A block of columns and a part of the rows: one row alone has too few columns to keep every multiprocessor
    # loading.
    column = block * BLOCK_COLUMNS + iota(BLOCK_COLUMNS, 1, 2)
    inside = column < columns

    def step(i: jax.Array, total: jax.Array):
        place = part * length + i * BLOCK_INNER + iota(BLOCK_INNER, 0, 2)
        exists = place < inner
        # Sums stay apart for every place of the tile until the end: adding up within the loop would make threads
        # wait for each other at each step.
        x = widen(load(x_ref, place, mask=exists))
        return total + x * widen(load(weight_ref, place, column, mask=exists & inside))

    total = jnp.zeros((BLOCK_INNER, BLOCK_COLUMNS), jnp.float32)
    total = jax.lax.fori_loop(0, length // BLOCK_INNER, step, total)
    column = block * BLOCK_COLUMNS + iota(BLOCK_COLUMNS)
    # The only exchange between threads, once a program.
    store(parts_ref, part, column, value=total.sum(0), mask=column < columns)


def row_product_pallas(arrays: Arrays) -> jax.Array:
    """See `row_product`. The grid walks over blocks of columns, then parts."""
    inner, columns = arrays.weight.shape
    length, parts = part_length(inner, columns), num_parts(inner, columns)
    (product,) = call(
        _kernel,
        *arrays,
        grid=(cdiv(columns, BLOCK_COLUMNS), parts),
        outputs=[jax.ShapeDtypeStruct((parts, columns), jnp.float32)],
        name="row_product",
        num_warps=NUM_WARPS,
        length=length,
    )
    return product


PRODUCTS = {
    "reference": row_product_reference,
    "pallas": row_product_pallas,
}
