"""The norm on a GPU: one program per token and block, which stays in registers between its two passes."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.dispatch import over_limit
from pallas_kernels.gated_rmsnorm.reference import Arrays, widest
from pallas_kernels.operands import as_parts, load_sum, widen
from pallas_kernels.triton import Ref, call, iota, load, power_of_two, store

MAX_BLOCK = 32 * 1024  # 32 elements in each of 1024 threads, of 64 registers


@dataclass(frozen=True)
class Config:
    """Launch parameters."""

    num_warps: int

    @classmethod
    def of(cls, size: int) -> Config:
        """16 elements a thread: two loads of 16 bytes of each bfloat16 operand."""
        return cls(min(max(power_of_two(size) // (32 * 16), 1), 32))


def why_unsupported(size: int) -> str | None:
    """Why the kernel cannot take blocks of this size, or None."""
    return over_limit(("a block must have at most {} elements", MAX_BLOCK, size))


def _kernel(
    y_ref: Ref,  # [N, M P]
    gate_ref: Ref,  # [S, N, M P + more]
    weight_ref: Ref,  # [M P]
    out_ref: Ref,  # [N, M P]
    *,
    size: int,
    eps: float,
    dtype: jnp.dtype,
):
    token, group = pl.program_id(0), pl.program_id(1)
    place = iota(size)
    column, inside = group * size + place, place < size
    # float32 from here on: a sum of squares in bfloat16 would lose most of its digits. What lies past the block is
    # loaded as zero, so it adds nothing to the sum.
    y = widen(load(y_ref, token, column, mask=inside))
    z = widen(load_sum(gate_ref, token, column, mask=inside, dtype=dtype))
    weight = load(weight_ref, column, mask=inside)
    gated = y * jax.nn.silu(z)
    # The block is still in registers, so the second pass reads nothing.
    scale = jax.lax.rsqrt(jnp.sum(gated * gated) / size + eps)
    # Rounded before the weight, as the layer's definition does, so that all forms agree.
    normed = (gated * scale).astype(dtype)
    store(out_ref, token, column, value=widen(normed) * widen(weight), mask=inside)


def gated_rmsnorm_pallas(arrays: Arrays, *, eps: float, groups: int, config: Config | None = None):
    """See `api.gated_rmsnorm`."""
    y, gate, weight = arrays
    size = y.shape[-1] // groups
    config = config or Config.of(size)
    tokens = y.size // y.shape[-1]
    dtype = weight.dtype if gate.ndim > y.ndim else gate.dtype
    gate = as_parts(gate, y.ndim)
    (out,) = call(
        _kernel,
        *(y.reshape(tokens, -1), gate.reshape(gate.shape[0], tokens, -1), weight),
        grid=(tokens, groups),
        outputs=[jax.ShapeDtypeStruct((tokens, y.shape[-1]), widest(dtype, weight.dtype))],
        name="gated_rmsnorm",
        num_warps=config.num_warps,
        size=size,
        eps=eps,
        dtype=dtype,
    )
    return out.reshape(y.shape)
