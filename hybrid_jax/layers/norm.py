"""RMS norms, computed in float32 and returned in the input's dtype."""

from __future__ import annotations

import jax

from pallas_kernels.gated_rmsnorm import gated_rmsnorm
from pallas_kernels.residual_rmsnorm import xla


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """weight * x / rms(x) over the last axis, rounded before the weight is applied, as Llama does.

    The result has the wider dtype of the two, because the residual stream may be float32 while the weight is not.
    """
    return xla.rms_norm(x, weight, eps)


def gated_rms_norm(
    x: jax.Array, gate: jax.Array, weight: jax.Array, eps: float, groups: int
) -> jax.Array:
    """weight * norm(x * silu(gate)); the mean square is over each of `groups` equal blocks."""
    return gated_rmsnorm(x, gate, weight, eps=eps, groups=groups, implementation="xla")
