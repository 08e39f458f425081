"""What a projection gives a selective scan: the inputs of step sizes, and B and C, each normed or as they are."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.arguments import FLOATS, check
from pallas_kernels.dispatch import Implementation, run
from pallas_kernels.operands import as_parts, load_sum, summed, widen
from pallas_kernels.rmsnorm.xla import rms_norm
from pallas_kernels.triton import Ref, call, iota, load, store


class ScanInputs(NamedTuple):
    """Arrays of `scan_inputs`.

    Attributes:
        projected: [B, T, D + 2 R] dt | B | C, or parts float32[S, B, T, D + 2 R] of that product.
        dt_weight: [D], B_weight: [R], C_weight: [R] of the norms; ones for norms without weights.
    """

    projected: Annotated[jax.Array, FLOATS, "parts? B T columns"]
    dt_weight: Annotated[jax.Array, FLOATS, "D"]
    B_weight: Annotated[jax.Array, FLOATS, "R"]
    C_weight: Annotated[jax.Array, FLOATS, "R"]


def scan_inputs(
    arrays: ScanInputs, *, eps: float | None, implementation: Implementation | None = None
) -> tuple[jax.Array, jax.Array]:
    """Norms the three pieces of a projection and takes them apart.

    Args:
        eps: of the norms; None for pieces that are not normed.
        implementation: "reference", "pallas", or None to choose. A named one never falls back.

    Returns:
        dt [B, T, D] and B | C [B, T, 2 R], in the dtype of `projected`, of `dt_weight` for parts.
    """
    where = "scan_inputs"
    sizes = check(where, arrays)
    if sizes.columns != sizes.D + 2 * sizes.R:
        raise ValueError(
            f"{where}: projected must have {sizes.D} + 2 x {sizes.R} columns, got {sizes.columns}"
        )
    return run(where, implementation, INPUTS, arrays, eps=eps)


def scan_inputs_reference(arrays: ScanInputs, *, eps: float | None):
    """See `scan_inputs`: one norm after another."""
    projected, *weights = arrays
    projected = summed(projected, 3, weights[0].dtype)
    rank, size = (weight.size for weight in weights[:2])
    pieces = jnp.split(projected, [rank, rank + size], axis=-1)
    if eps is not None:
        pairs = zip(pieces, weights, strict=True)
        pieces = [rms_norm(piece, weight, eps).astype(piece.dtype) for piece, weight in pairs]
    return pieces[0], jnp.concatenate(pieces[1:], axis=-1)


def _kernel(
    projected_ref: Ref,  # [S, N, D + 2 R]
    dt_weight_ref: Ref,  # [D]
    B_weight_ref: Ref,  # [R]
    C_weight_ref: Ref,  # [R]
    dt_ref: Ref,  # [N, D]
    BC_ref: Ref,  # [N, 2 R]
    *,
    eps: float | None,
):
    token, dtype = pl.program_id(0), dt_ref.dtype
    rank, size = dt_weight_ref.size, B_weight_ref.size

    def piece(begin: int, weight_ref: Ref):
        place = iota(weight_ref.size)
        inside = place < weight_ref.size
        x = load_sum(projected_ref, token, begin + place, mask=inside, dtype=dtype)
        if eps is None:
            return place, inside, x
        wide = widen(x)
        scale = jax.lax.rsqrt(jnp.sum(wide * wide) / weight_ref.size + eps)
        # Rounded before the weight, as the layer's definition does.
        weight = widen(load(weight_ref, place, mask=inside))
        return place, inside, widen((wide * scale).astype(dtype)) * weight

    place, inside, x = piece(0, dt_weight_ref)
    store(dt_ref, token, place, value=x, mask=inside)
    for number, weight_ref in enumerate((B_weight_ref, C_weight_ref)):
        place, inside, x = piece(rank + number * size, weight_ref)
        store(BC_ref, token, number * size + place, value=x, mask=inside)


def scan_inputs_pallas(arrays: ScanInputs, *, eps: float | None):
    """See `scan_inputs`. A program has one token."""
    projected, *weights = arrays
    dtype = weights[0].dtype if projected.ndim > 3 else projected.dtype
    projected = as_parts(projected, 3)
    lead, tokens = projected.shape[1:3], projected.shape[1] * projected.shape[2]
    rank, size = (weight.size for weight in weights[:2])
    dt, BC = call(
        _kernel,
        *(projected.reshape(projected.shape[0], tokens, -1), *weights),
        grid=(tokens,),
        outputs=[jax.ShapeDtypeStruct((tokens, width), dtype) for width in (rank, 2 * size)],
        name="scan_inputs",
        num_warps=1,
        eps=eps,
    )
    return dt.reshape(*lead, rank), BC.reshape(*lead, 2 * size)


INPUTS = {"reference": scan_inputs_reference, "pallas": scan_inputs_pallas}
