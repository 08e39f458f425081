"""Sum and norm on a GPU: one program per token, which stays in registers between the two."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.dispatch import over_limit
from pallas_kernels.operands import as_parts, load_sum, widen
from pallas_kernels.residual_rmsnorm.reference import Arrays
from pallas_kernels.triton import Ref, call, iota, load, power_of_two, store

MAX_SIZE = 16 * 1024  # 16 elements in each of 1024 threads, of 64 registers


@dataclass(frozen=True)
class Config:
    """Launch parameters."""

    num_warps: int

    @classmethod
    def of(cls, size: int, parts: int = 1) -> Config:
        """16 bytes of the update a thread: 8 elements, or 4 of each part. Of wide tokens 16 elements: 8 of 8 parts
        spill registers, by compiling."""
        size = power_of_two(size)
        each = 16 if size > 4096 else 8 if parts == 1 else 4
        return cls(min(max(size // (32 * each), 1), 32))


def why_unsupported(size: int) -> str | None:
    """Why the kernel cannot take tokens of this size, or None."""
    return over_limit(("a token must have at most {} channels", MAX_SIZE, size))


def _kernel(
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
    normed = (wide * scale).astype(out_ref.dtype)
    weight = load(weight_ref, channel, mask=inside)
    store(normed_ref, token, channel, value=widen(normed) * widen(weight), mask=inside)


def residual_rmsnorm_pallas(
    arrays: Arrays, *, eps: float, multiplier: float, config: Config | None = None
):
    """See `api.residual_rmsnorm`."""
    h, update, weight, valid = arrays
    size = h.shape[-1]
    tokens = h.size // size
    rounded = weight.dtype if update.ndim > h.ndim else update.dtype
    parts = as_parts(update, h.ndim)
    config = config or Config.of(size, parts.shape[0])
    flags = jnp.ones(1, jnp.int32) if valid is None else valid.reshape(-1).astype(jnp.int32)
    out, normed = call(
        _kernel,
        *(h.reshape(tokens, size), parts.reshape(-1, tokens, size), weight, flags),
        grid=(tokens,),
        outputs=[jax.ShapeDtypeStruct((tokens, size), like.dtype) for like in (h, weight)],
        name="residual_rmsnorm",
        num_warps=config.num_warps,
        rounded=rounded,
        masked=valid is not None,
        eps=eps,
        multiplier=multiplier,
    )
    return out.reshape(h.shape), normed.reshape(h.shape)
