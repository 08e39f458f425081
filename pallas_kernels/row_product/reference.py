"""The definition: each part's product, in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import HIGHEST
from pallas_kernels.row_product.kernel import Arrays, part_length


def row_product_reference(arrays: Arrays) -> jax.Array:
    """See `api.row_product`; the last part may be shorter than the others."""
    x, weight = arrays
    inner, columns = weight.shape
    length = part_length(inner, columns)
    padding = -inner % length
    x = jnp.pad(x.astype(jnp.float32), (0, padding)).reshape(-1, length)
    weight = jnp.pad(weight, ((0, padding), (0, 0))).reshape(-1, length, columns)
    return jnp.einsum("si,sio->so", x, weight.astype(jnp.float32), precision=HIGHEST)
