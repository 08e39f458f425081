"""The norms on a GPU: one program per token, or per block of one, which stays in registers between its two passes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.operands import as_parts, load_sum, widen
from pallas_kernels.plan import over_limit
from pallas_kernels.rmsnorm.reference import Gated, Residual, widest
from pallas_kernels.triton import Ref, call, iota, load, power_of_two, store

# Of each of 1024 threads, which have 64 registers: 32 elements of a gated norm, or 16 of a norm with a residual sum.
MAX_BLOCK, MAX_SIZE = 32 * 1024, 16 * 1024


def _warps(size: int, each: int) -> int:
    """As many warps as have `each` elements in a thread."""
    return min(max(power_of_two(size) // (32 * each), 1), 32)


def gated_unsupported(size: int) -> str | None:
    """Why the kernel cannot take blocks of this size, or None."""
    return over_limit(("a block must have at most {} elements", MAX_BLOCK, size))


def residual_unsupported(size: int) -> str | None:
    """Why the kernel cannot take tokens of this size, or None."""
    return over_limit(("a token must have at most {} channels", MAX_SIZE, size))


def _gated_kernel(
    y_ref: Ref,  # [N, M P]
    gate_ref: Ref,  # [S, N, M P + more]
    weight_ref: Ref,  # [M P], or [M P / groups]
    out_ref: Ref,  # [N, M P]
    *,
    size: int,
    eps: float,
    dtype: jnp.dtype,
    norm_before_gate: bool,
):
    token, group = pl.program_id(0), pl.program_id(1)
    place = iota(size)
    column, inside = group * size + place, place < size
    # float32 from here on: a sum of squares in bfloat16 would lose most of its digits. What lies past the block is
    # loaded as zero, so it adds nothing to the sum.
    y = widen(load(y_ref, token, column, mask=inside))
    z = widen(load_sum(gate_ref, token, column, mask=inside, dtype=dtype))
    weight = load(weight_ref, place if weight_ref.size == size else column, mask=inside)
    gated = y if norm_before_gate else y * jax.nn.silu(z)
    # The block is still in registers, so the second pass reads nothing.
    scale = jax.lax.rsqrt(jnp.sum(gated * gated) / size + eps)
    # Rounded before the weight, as the layer's definition does, so that all forms agree.
    weighed = widen((gated * scale).astype(dtype)) * widen(weight)
    if norm_before_gate:
        weighed = weighed * jax.nn.silu(z)
    store(out_ref, token, column, value=weighed, mask=inside)


def gated_rmsnorm_pallas(
    arrays: Gated,
    *,
    eps: float,
    groups: int,
    norm_before_gate: bool,
    num_warps: int | None = None,
):
    """See `api.gated_rmsnorm`."""
    y, gate, weight = arrays
    size = y.shape[-1] // groups
    # Two loads of 16 bytes of each bfloat16 operand in a thread.
    num_warps = num_warps or _warps(size, 16)
    tokens = y.size // y.shape[-1]
    dtype = weight.dtype if gate.ndim > y.ndim else gate.dtype
    gate = as_parts(gate, y.ndim)
    (out,) = call(
        _gated_kernel,
        *(y.reshape(tokens, -1), gate.reshape(gate.shape[0], tokens, -1), weight),
        grid=(tokens, groups),
        outputs=[jax.ShapeDtypeStruct((tokens, y.shape[-1]), widest(dtype, weight.dtype))],
        name="gated_rmsnorm",
        num_warps=num_warps,
        size=size,
        eps=eps,
        dtype=dtype,
        norm_before_gate=norm_before_gate,
    )
    return out.reshape(y.shape)


def _residual_kernel(
    h_ref: Ref,  # [N, D]
    update_ref: Ref,  # [S, N, D]
    weight_ref: Ref,  # [D]
    valid_ref: Ref,  # [N]
    out_ref: Ref,  # [N, D]
    normed_ref: Ref,  # [N, D]
    *,
    rounded: jnp.dtype,
    masked: bool,
    eps: float,
    multiplier: float,
):
    token, size = pl.program_id(0), h_ref.shape[1]
    channel = iota(size)
    inside = channel < size
    real = inside & (valid_ref[token] > 0) if masked else inside  # what is not is never read
    # Parts are summed here, where they are read anyway: a sum of its own would be a launch more.
    update = load_sum(update_ref, token, channel, mask=real, dtype=rounded)
    if multiplier != 1.0:
        # The factor is rounded first: XLA multiplies by it in the dtype of the update, too.
        factor = float(jnp.dtype(rounded).type(multiplier))
        update = (widen(update) * factor).astype(rounded)
    h = widen(load(h_ref, token, channel, mask=real)) + widen(update)
    # The norm is of what is stored, not of the wider sum: the next block reads the same numbers.
    h = h.astype(out_ref.dtype)
    store(out_ref, token, channel, value=h, mask=inside)
    wide = widen(h)
    # Masked channels are zero, so the sum over all of them is the sum over the token.
    scale = jax.lax.rsqrt(jnp.sum(wide * wide) / size + eps)
    normed = (wide * scale).astype(widest(out_ref.dtype, weight_ref.dtype))
    weight = load(weight_ref, channel, mask=inside)
    store(normed_ref, token, channel, value=widen(normed) * widen(weight), mask=inside)


def residual_rmsnorm_pallas(
    arrays: Residual,
    *,
    eps: float,
    multiplier: float,
    dtype: jnp.dtype,
    num_warps: int | None = None,
):
    """See `api.residual_rmsnorm`."""
    h, update, weight, valid = arrays
    size = h.shape[-1]
    tokens = h.size // size
    rounded = dtype if update.ndim > h.ndim else update.dtype
    parts = as_parts(update, h.ndim)
    if num_warps is None:
        # 16 bytes of the update a thread: 8 elements, or 4 of each part. Of wide tokens 16 elements: 8 of 8 parts spill
        # registers, by compiling.
        each = 8 if parts.shape[0] == 1 else 4
        num_warps = _warps(size, 16 if power_of_two(size) > 4096 else each)
    flags = jnp.ones(1, jnp.int32) if valid is None else valid.reshape(-1).astype(jnp.int32)
    out, normed = call(
        _residual_kernel,
        *(h.reshape(tokens, size), parts.reshape(-1, tokens, size), weight, flags),
        grid=(tokens,),
        outputs=[jax.ShapeDtypeStruct((tokens, size), each) for each in (h.dtype, dtype)],
        name="residual_rmsnorm",
        num_warps=num_warps,
        rounded=rounded,
        masked=valid is not None,
        eps=eps,
        multiplier=multiplier,
    )
    return out.reshape(h.shape), normed.reshape(h.shape)
