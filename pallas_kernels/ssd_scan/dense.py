"""The kernel over states that are arrays of their own, with gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.records import Records
from pallas_kernels.ssd_scan.kernel import Columns, scan_frames
from pallas_kernels.ssd_scan.xla import ssd_scan_xla


def scan_dense(x, dt, A, B, C, initial_state, lengths, state_lengths, *, config=None):
    """The scan with every head's state a frame of its own."""
    rows, tokens, heads, _ = x.shape
    records = Records.of(x, B)
    arena = jax.lax.bitcast_convert_type(initial_state, jnp.uint32).reshape(rows * heads, -1)
    frames = jnp.arange(rows * heads, dtype=jnp.int32).reshape(rows, heads)
    flat = [a.reshape(rows, tokens, -1) for a in (x, B.astype(x.dtype), C.astype(x.dtype))]
    y, arena = scan_frames(
        *(arena, frames, frames, jnp.ones(rows, jnp.int32), flat[0], dt, A, *flat[1:], None),
        *(lengths, state_lengths),
        columns=Columns(x=0, B=0, C=0),
        records=records,
        config=config,
    )
    state = jax.lax.bitcast_convert_type(arena, jnp.float32)
    return y.reshape(x.shape), state.reshape(initial_state.shape)


def with_gradients(scan):
    """The scan, with the gradients of "xla"."""
    differentiable = jax.custom_vjp(scan)
    differentiable.defvjp(lambda *arrays: (scan(*arrays), arrays), _backward)
    return differentiable


def _backward(arrays, cotangents):
    *floats, lengths, state_lengths = arrays
    _, pull = jax.vjp(lambda *floats: ssd_scan_xla(*floats, lengths, state_lengths), *floats)
    return (*pull(cotangents), None, None)


ssd_scan_pallas = with_gradients(scan_dense)
