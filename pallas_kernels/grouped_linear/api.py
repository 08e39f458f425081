"""Public entry of mix_experts."""

from __future__ import annotations

import jax

from pallas_kernels.arguments import check, check_dtype
from pallas_kernels.dispatch import Implementation, run
from pallas_kernels.grouped_linear.kernel import mix_experts_pallas
from pallas_kernels.grouped_linear.plan import why_unsupported
from pallas_kernels.grouped_linear.reference import (
    Activation,
    ExpertArrays,
    mix_experts_reference,
)
from pallas_kernels.grouped_linear.xla import mix_experts_xla
from pallas_kernels.plan import H200, Chip

IMPLEMENTATIONS = {
    "reference": mix_experts_reference,
    "xla": mix_experts_xla,
    "pallas": mix_experts_pallas,
}
MATRICES = {"gated_silu": 2, "relu2": 1}  # side by side in `ExpertArrays.up`


def mix_experts(
    arrays: ExpertArrays,
    *,
    kind: Activation,
    chip: Chip = H200,
    implementation: Implementation | None = None,
) -> jax.Array:
    """The sum of what a token's experts make of it, each times its weight.

    An expert is activation(x @ up + up_bias) @ down + down_bias. What it makes is rounded to the dtype of x; the sum is
    float32, over a token's visits in order. So a token's result does not depend on the other tokens.

    Args:
        kind: "gated_silu", silu(gate) * up; or "relu2", the square of relu.
        chip: the GPU, by which launches are cut up and tiles are chosen.
        implementation: "reference", "xla", "pallas", or None to choose. A named one never falls back.

    Returns:
        [S, Z] in the dtype of x; zero for tokens without a visit.

    Raises:
        ValueError: a shape or dtype does not fit, or the implementation is unknown.
        NotImplementedError: "pallas" was asked for and cannot.

    Example:
        >>> import jax.numpy as jnp
        >>> x, ids = jnp.ones((3, 4)), jnp.array([[0, 1], [1, 2], [2, 2]])
        >>> up, down = jnp.ones((2, 4, 8)), jnp.ones((2, 8, 4))
        >>> mixed = mix_experts(ExpertArrays(x, ids, jnp.ones((3, 2)), up, down), kind="relu2")
        >>> mixed[:, 0].tolist()  # two visits, one, and none: there are only experts 0 and 1
        [256.0, 128.0, 0.0]
    """
    where = "mix_experts"
    sizes = check(where, arrays)
    for name in ("up", "down", "up_bias", "down_bias"):
        array = getattr(arrays, name)
        if array is not None:
            check_dtype(where, name, array, (arrays.x.dtype.name,))
    if kind not in MATRICES:
        raise ValueError(f"{where}: kind must be one of {sorted(MATRICES)}, got {kind!r}")
    wanted = MATRICES[kind] * sizes.F
    if sizes.columns != wanted:
        raise ValueError(
            f"{where}: up must have {wanted} columns for {kind!r} and {sizes.F} rows of down, got {sizes.columns}"
        )
    if (arrays.up_bias is None) != (arrays.down_bias is None):
        raise ValueError(f"{where}: up_bias and down_bias must be given together, or neither")
    reason = why_unsupported(sizes.X, arrays.x.dtype.name, chip)
    return run(
        where,
        implementation,
        IMPLEMENTATIONS,
        arrays,
        unsupported=reason,
        launch={"chip": chip},
        kind=kind,
    )
