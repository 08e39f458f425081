"""Public entry: the product of one row."""

from __future__ import annotations

import jax

from pallas_kernels.arguments import check, check_dtype
from pallas_kernels.dispatch import Implementation, run
from pallas_kernels.row_product import kernel, reference

PRODUCTS = {
    "reference": reference.row_product_reference,
    "pallas": kernel.row_product_pallas,
}


def row_product(
    x: jax.Array, weight: jax.Array, *, implementation: Implementation | None = None
) -> jax.Array:
    """x @ weight in parts of the inner dimension: as many as a GPU needs to be busy (`kernel.num_parts`).

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
    where, arrays = "row_product", kernel.Arrays(x, weight)
    check(where, arrays)
    check_dtype(where, "weight", weight, (x.dtype.name,))
    return run(where, implementation, PRODUCTS, arrays)
