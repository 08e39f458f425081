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
from pallas_kernels.plan import H200, Chip
from pallas_kernels.row_product import plan
from pallas_kernels.triton import Ref, call, cdiv, iota, load, store

NUM_WARPS = 4


class Arrays(NamedTuple):
    """Arrays of `row_product`."""

    x: Annotated[jax.Array, FLOATS, "I"]
    weight: Annotated[jax.Array, FLOATS, "I O"]


def row_product(
    x: jax.Array,
    weight: jax.Array,
    *,
    chip: Chip = H200,
    implementation: Implementation | None = None,
) -> jax.Array:
    """x @ weight in parts of the inner dimension: as many as a GPU needs to be busy (`plan.num_parts`).

    Products and sums are float32, also of bfloat16. XLA for GPUs makes a multiplication and sums of such a product, and
    for some shapes writes all products to memory first.

    Args:
        x: [I]. weight: [I, O], of the same dtype.
        chip: the GPU, whose multiprocessors the launch fills.
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
    return run(where, implementation, PRODUCTS, arrays, num_sms=chip.num_sms)


def row_product_reference(arrays: Arrays, *, num_sms: int) -> jax.Array:
    """See `row_product`; the last part may be shorter than the others."""
    x, weight = arrays
    inner, columns = weight.shape
    length = plan.part_length(inner, columns, num_sms)
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
    column = block * plan.BLOCK_COLUMNS + iota(plan.BLOCK_COLUMNS, 1, 2)
    inside = column < columns

    def step(i: jax.Array, total: jax.Array):
        place = part * length + i * plan.BLOCK_INNER + iota(plan.BLOCK_INNER, 0, 2)
        exists = place < inner
        # Sums stay apart for every place of the tile until the end: adding up within the loop would make threads
        # wait for each other at each step.
        x = widen(load(x_ref, place, mask=exists))
        return total + x * widen(load(weight_ref, place, column, mask=exists & inside))

    total = jnp.zeros((plan.BLOCK_INNER, plan.BLOCK_COLUMNS), jnp.float32)
    total = jax.lax.fori_loop(0, length // plan.BLOCK_INNER, step, total)
    column = block * plan.BLOCK_COLUMNS + iota(plan.BLOCK_COLUMNS)
    # The only exchange between threads, once a program.
    store(parts_ref, part, column, value=total.sum(0), mask=column < columns)


def row_product_pallas(arrays: Arrays, *, num_sms: int) -> jax.Array:
    """See `row_product`. The grid walks over blocks of columns, then parts."""
    inner, columns = arrays.weight.shape
    length = plan.part_length(inner, columns, num_sms)
    parts = plan.num_parts(inner, columns, num_sms)
    (product,) = call(
        _kernel,
        *arrays,
        grid=(cdiv(columns, plan.BLOCK_COLUMNS), parts),
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
