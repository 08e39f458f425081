"""Public entries: the gated norm, and the residual sum with its norm."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import check, check_result_dtype
from pallas_kernels.dispatch import Implementation, run
from pallas_kernels.rmsnorm import kernel, reference, xla

GATED = {
    "reference": reference.gated_rmsnorm_reference,
    "xla": xla.gated_rmsnorm_xla,
    "pallas": kernel.gated_rmsnorm_pallas,
}
RESIDUAL = {
    "reference": reference.residual_rmsnorm_reference,
    "xla": xla.residual_rmsnorm_xla,
    "pallas": kernel.residual_rmsnorm_pallas,
}


def gated_rmsnorm(
    y: jax.Array,
    gate: jax.Array,
    weight: jax.Array,
    *,
    eps: float,
    groups: int = 1,
    norm_before_gate: bool = False,
    implementation: Implementation | None = None,
) -> jax.Array:
    """weight * norm(y * silu(z)), or weight * norm(y) * silu(z), where z stands in front of what else is in `gate`.

    In float32 until the norm, which is rounded to the dtype of `gate` before the weight.

    Args:
        y: [..., M P] outputs of the recurrence, of any float dtype.
        gate: [..., >= M P]; z is at 0 .. M P - 1 of the last axis, so that what in_proj gave can be passed whole;
            or parts float32[S, ...] of a product, whose sum counts in the dtype of `weight`.
        weight: [M P], or [M P / groups] if all groups share it.
        eps: added to the mean square. groups: equal blocks, each with a mean square of its own.
        norm_before_gate: the second form, as in gated delta nets (arXiv 2412.06464); the first is that of Mamba-2.
        implementation: "reference", "xla", "pallas", or None to choose. A named one never falls back.

    Returns:
        [..., M P] in the wider dtype of `gate` and `weight`; that of `weight` for parts.

    Example:
        >>> import jax.numpy as jnp
        >>> y, projected = jnp.ones((2, 3, 8)), jnp.ones((2, 3, 20))
        >>> gated_rmsnorm(y, projected, jnp.ones(8), eps=1e-5, groups=2).shape
        (2, 3, 8)
    """
    where, arrays = "gated_rmsnorm", reference.Gated(y, gate, weight)
    sizes = check(where, arrays)
    size = sizes.channels
    if groups < 1 or size % groups:
        raise ValueError(f"{where}: groups must divide the last axis of y, got {groups} and {size}")
    if sizes.columns < size:
        raise ValueError(f"{where}: gate must have {size} columns or more, got {sizes.columns}")
    if sizes.weights not in (size, size // groups):
        raise ValueError(
            f"{where}: weight must have {size} elements, or the {size // groups} of a group, got {sizes.weights}"
        )
    reason = kernel.gated_unsupported(size // groups)
    static = {"eps": eps, "groups": groups, "norm_before_gate": norm_before_gate}
    return run(where, implementation, GATED, arrays, unsupported=reason, **static)


def residual_rmsnorm(
    h: jax.Array,
    update: jax.Array,
    weight: jax.Array,
    *,
    eps: float,
    multiplier: float = 1.0,
    valid: jax.Array | None = None,
    dtype: jnp.dtype | None = None,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """h + multiplier * update, and weight * norm of it: what the last block did, and what the next one reads.

    The product is rounded to the dtype of `update`, the sum to that of h; the norm is computed in float32, and
    rounded to the wider dtype of h and `weight` before the weight.

    Args:
        h: [..., D] residual stream.
        update: [..., D], or parts float32[S, ..., D] of a product, whose sum counts in `dtype`.
        weight: [D].
        eps: added to the mean square. multiplier: factor on the update.
        valid: bool[...] tokens that are real; the others become zero whatever they hold. None for all.
        dtype: of the norm; None for that of `weight`.
        implementation: "reference", "xla", "pallas", or None to choose. A named one never falls back.

    Returns:
        The sum [..., D] in the dtype of h, and its norm [..., D] in `dtype`.

    Example:
        >>> import jax.numpy as jnp
        >>> h, update = jnp.zeros((2, 3, 8)), jnp.full((2, 3, 8), 2.0)
        >>> h, normed = residual_rmsnorm(h, update, jnp.ones(8), eps=0.0, multiplier=0.5)
        >>> float(h[0, 0, 0]), float(normed[0, 0, 0])
        (1.0, 1.0)
    """
    where, arrays = "residual_rmsnorm", reference.Residual(h, update, weight, valid)
    reason = kernel.residual_unsupported(check(where, arrays).channels)
    dtype = jnp.dtype(arrays.weight.dtype if dtype is None else dtype)
    check_result_dtype(where, dtype)
    static = {"eps": eps, "multiplier": multiplier, "dtype": dtype}
    return run(where, implementation, RESIDUAL, arrays, unsupported=reason, **static)
