"""Public entry: the gated norm."""

from __future__ import annotations

import jax

from pallas_kernels.arguments import check
from pallas_kernels.dispatch import Implementation, run
from pallas_kernels.gated_rmsnorm import kernel, reference, xla

NORMS = {
    "reference": reference.gated_rmsnorm_reference,
    "xla": xla.gated_rmsnorm_xla,
    "pallas": kernel.gated_rmsnorm_pallas,
}


def gated_rmsnorm(
    y: jax.Array,
    gate: jax.Array,
    weight: jax.Array,
    *,
    eps: float,
    groups: int = 1,
    implementation: Implementation | None = None,
) -> jax.Array:
    """weight * norm(y * silu(z)), where z stands in front of what else is in `gate`.

    In float32 until the norm, which is rounded to the dtype of `gate` before the weight.

    Args:
        y: [..., M P] outputs of the recurrence, of any float dtype.
        gate: [..., >= M P]; z is at 0 .. M P - 1 of the last axis, so that what in_proj gave can be passed whole;
            or parts float32[S, ...] of a product, whose sum counts in the dtype of `weight`.
        weight: [M P].
        eps: added to the mean square. groups: equal blocks, each with a mean square of its own.
        implementation: "reference", "xla", "pallas", or None to choose. A named one never falls back.

    Returns:
        [..., M P] in the wider dtype of `gate` and `weight`; that of `weight` for parts.

    Example:
        >>> import jax.numpy as jnp
        >>> y, projected = jnp.ones((2, 3, 8)), jnp.ones((2, 3, 20))
        >>> gated_rmsnorm(y, projected, jnp.ones(8), eps=1e-5, groups=2).shape
        (2, 3, 8)
    """
    where, arrays = "gated_rmsnorm", reference.Arrays(y, gate, weight)
    sizes = check(where, arrays)
    size = sizes.channels
    if groups < 1 or size % groups:
        raise ValueError(f"{where}: groups must divide the last axis of y, got {groups} and {size}")
    if sizes.columns < size:
        raise ValueError(f"{where}: gate must have {size} columns or more, got {sizes.columns}")
    reason = kernel.why_unsupported(size // groups)
    static = {"eps": eps, "groups": groups}
    return run(where, implementation, NORMS, arrays, unsupported=reason, **static)
