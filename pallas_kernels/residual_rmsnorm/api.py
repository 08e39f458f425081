"""Public entry: residual sum and norm."""

from __future__ import annotations

import jax

from pallas_kernels.dispatch import (
    FLAGS,
    FLOATS,
    Implementation,
    check_dtypes,
    check_shape,
    run,
)
from pallas_kernels.parts import check_parts
from pallas_kernels.residual_rmsnorm import kernel, reference, xla

NORMS = {
    "reference": reference.residual_rmsnorm_reference,
    "xla": xla.residual_rmsnorm_xla,
    "pallas": kernel.residual_rmsnorm_pallas,
}


def residual_rmsnorm(
    h: jax.Array,
    update: jax.Array,
    weight: jax.Array,
    *,
    eps: float,
    multiplier: float = 1.0,
    valid: jax.Array | None = None,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """h + multiplier * update, and weight * norm of it: what the last block did, and what the next one reads.

    The product is rounded to the dtype of `update`, the sum to that of h; the norm is computed in float32, and
    rounded to the dtype of h before the weight.

    Args:
        h: [..., D] residual stream.
        update: [..., D], or parts float32[S, ..., D] of a product, whose sum counts in the dtype of `weight`.
        weight: [D].
        eps: added to the mean square. multiplier: factor on the update.
        valid: bool[...] tokens that are real; the others become zero whatever they hold. None for all.
        implementation: "reference", "xla", "pallas", or None to choose. A named one never falls back.

    Returns:
        The sum [..., D] in the dtype of h, and its norm [..., D] in the dtype of `weight`.

    Example:
        >>> import jax.numpy as jnp
        >>> h, update = jnp.zeros((2, 3, 8)), jnp.full((2, 3, 8), 2.0)
        >>> h, normed = residual_rmsnorm(h, update, jnp.ones(8), eps=0.0, multiplier=0.5)
        >>> float(h[0, 0, 0]), float(normed[0, 0, 0])
        (1.0, 1.0)
    """
    where = "residual_rmsnorm"
    check_dtypes(where, FLOATS, h=h, weight=weight)
    check_dtypes(where, FLAGS, valid=valid)
    if h.ndim == 0:
        raise ValueError(f"{where}: h must have channels as its last axis, got a scalar")
    size = h.shape[-1]
    shape = check_parts(where, "update", update, h.ndim)
    check_dtypes(where, FLOATS, update=update)
    if shape != h.shape:
        raise ValueError(f"{where}: update must have the shape of h {h.shape}, got {shape}")
    check_shape(where, "weight", weight, (size,))
    if valid is not None:
        check_shape(where, "valid", valid, h.shape[:-1])
    reason = kernel.why_unsupported(size)
    static = {"eps": eps, "multiplier": multiplier}
    return run(where, implementation, NORMS, h, update, weight, valid, unsupported=reason, **static)
