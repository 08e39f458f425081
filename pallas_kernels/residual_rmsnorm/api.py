"""Public entry: residual sum and norm."""

from __future__ import annotations

import jax

from pallas_kernels.arguments import check
from pallas_kernels.dispatch import Implementation, run
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
    where, arrays = "residual_rmsnorm", reference.Arrays(h, update, weight, valid)
    reason = kernel.why_unsupported(check(where, arrays).channels)
    static = {"eps": eps, "multiplier": multiplier}
    return run(where, implementation, NORMS, arrays, unsupported=reason, **static)
