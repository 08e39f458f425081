"""The Mamba-2 mixer: scan a prompt chunk, run a window of new tokens, fold records.

Parameters: in_proj [D, z | x | B | C | dt], conv [W, E], optional conv_bias [E], A_log, D, dt_bias
[M] float32, out_proj [M P, D], optional norm [M P], in_bias, out_bias. After a cut, in_proj has the columns of z
alone, or of z and of what is added to C; the others come from the projection of the cut's output. A mixer that reads
the state of its group takes C alone from there, and has no conv, A_log and dt_bias.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from hybrid_jax.config import Mamba2
from hybrid_jax.layers.convolution import depthwise
from hybrid_jax.layers.cut import (
    CutInput,
    MixerInput,
    dtype_of,
    gates_of,
    size_of,
)
from hybrid_jax.products.matrix import product
from pallas_kernels import WindowFrames, operands, ssd_scan, ssd_window_frames
from pallas_kernels import fold as ssd_fold
from pallas_kernels.dispatch import Implementation
from pallas_kernels.records import ProjectionLayout, split_records
from pallas_kernels.rmsnorm import gated_rmsnorm


class Records(NamedTuple):
    """What the recurrence needs to know of each token.

    xB: [B, S, M P + G R] x and B in the activation dtype. dt: float32[B, S, M] step sizes.
    """

    xB: jax.Array
    dt: jax.Array


class Inputs(NamedTuple):
    """Outputs of in_proj.

    z: [B, T, M P] gates. xBC: [B, T, E] convolution inputs. dt: float32[B, T, M] step sizes.
    """

    z: jax.Array
    xBC: jax.Array
    dt: jax.Array


class SharedInputs(NamedTuple):
    """What reads of a state need besides C: the tokens' inputs, shared by all mixers of a group.

    x: [B, T, M, P]. B: [B, T, G, R]. dt: float32[B, T, M]. A: float32[M] decay rates. C: [B, T, G, R] of the mixer that
    writes the state.
    """

    x: jax.Array
    B: jax.Array
    dt: jax.Array
    A: jax.Array
    C: jax.Array


def project(params: dict, h: MixerInput, spec: Mamba2) -> Inputs:
    """Projects h [B, T, D] to the mixer's inputs; dt = softplus(dt + dt_bias), limited, in float32."""
    if isinstance(h, CutInput):
        z = gates_of(params, h, spec.inner_size)
        xBC, dt = jnp.split(h.written, [spec.conv_size], axis=-1)
    else:
        projected = product(h, params["in_proj"], params.get("in_bias"))
        ends = [spec.inner_size, spec.inner_size + spec.conv_size]
        z, xBC, dt = jnp.split(projected, ends, axis=-1)
    dt = jax.nn.softplus(dt.astype(jnp.float32) + params["dt_bias"].astype(jnp.float32))
    return Inputs(z, xBC, jnp.clip(dt, *spec.dt_limits))


def gates_and_readout(params: dict, h: CutInput, spec: Mamba2) -> tuple[jax.Array, jax.Array]:
    """z [B, T, M P] and C [B, T, G, R] of a mixer that reads the state of its group."""
    z, C = gates_of(params, h, spec.inner_size), jax.nn.silu(h.written)
    return z, C.reshape(*C.shape[:2], spec.num_groups, spec.state_size)


def convolve(params: dict, columns: jax.Array) -> jax.Array:
    """Causal depthwise convolution: raw columns [B, W - 1 + T, E] to float32[B, T, E]."""
    return depthwise(columns, params["conv"], params.get("conv_bias"))


def activate(convolved: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """x, B and C [B, T, E]: SiLU of what `convolve` gives, in `dtype`."""
    return jax.nn.silu(convolved).astype(dtype)


def output(params: dict, y: jax.Array, x: jax.Array, z: jax.Array, spec: Mamba2) -> jax.Array:
    """D skip, gated norm and out_proj.

    y: [B, T, M, P] of the recurrence; x: [B, T, M, P]; z: [B, T, M P]. Returns [B, T, D].
    """
    y = y.astype(jnp.float32) + params["D"].astype(jnp.float32)[:, None] * x.astype(jnp.float32)
    y = gate(params, y.reshape(z.shape).astype(z.dtype), z, spec, "xla")
    return product(y, params["out_proj"], params.get("out_bias"))


def gate(
    params: dict, y: jax.Array, projected: jax.Array, spec: Mamba2, implementation: Implementation
) -> jax.Array:
    """y [B, T, M P] times silu(z), with the norm that the spec says.

    Args:
        projected: [B, T, >= M P] with z in front, or parts of it. implementation: as `gated_rmsnorm` takes it.
    """
    if spec.gated_norm == "none":
        z = jax.lax.slice_in_dim(projected, 0, spec.inner_size, axis=-1)
        z = operands.whole(z, y.ndim, y.dtype).astype(jnp.float32)
        return (y.astype(jnp.float32) * jax.nn.silu(z)).astype(y.dtype)
    return gated_rmsnorm(
        *(y, projected, params["norm"]),
        eps=spec.norm_eps,
        groups=spec.norm_groups,
        norm_before_gate=spec.gated_norm == "norm_first",
        implementation=implementation,
    )


def decay_rates(params: dict) -> jax.Array:
    """A = -exp(A_log), float32[M]."""
    return -jnp.exp(params["A_log"].astype(jnp.float32))


def layout_of(spec: Mamba2) -> ProjectionLayout:
    """How the mixer's projections, records and states lie in memory, if it stands before a cut."""
    return ProjectionLayout(
        num_heads=spec.num_heads,
        head_dim=spec.head_dim,
        num_groups=spec.num_groups,
        state_size=spec.state_size,
        conv_width=spec.conv_width,
        dt_limits=spec.dt_limits,
    )


def scan(
    params: dict,
    h: MixerInput,
    state: jax.Array,
    conv: jax.Array,
    lengths: jax.Array,
    state_lengths: jax.Array,
    spec: Mamba2,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, Records]:
    """Runs a chunk of tokens from a checkpoint.

    Args:
        h: [B, T, D] normed inputs. If only states are asked for, the outputs mean nothing.
        state: [B, M, P, R] float32; conv: [B, W - 1, E] raw convolution inputs before the chunk.
        lengths: int32[B] valid tokens. state_lengths: int32[B] how many tokens the returned state covers.
        implementation: as `ssd_scan` takes it.

    Returns:
        out [B, T, D]; the state after `state_lengths` tokens; raw columns [B, W - 1 + T, E] with the history in front,
        so that columns[b, n : n + W - 1] is the history after n tokens; and the records, which mean nothing past
        `lengths`.
    """
    valid = (jnp.arange(size_of(h)[1]) < lengths[:, None])[..., None]
    z, raw, dt = project(params, h, spec)
    raw = jnp.where(valid, raw, 0)
    columns = jnp.concatenate([conv.astype(raw.dtype), raw], axis=1)
    xBC = activate(convolve(params, columns), raw.dtype)
    xB, C = jnp.split(xBC, [spec.record_size], axis=-1)
    x, B = split_records(xB, layout_of(spec))
    C = C.reshape(B.shape)
    y, state = ssd_scan(
        x,
        dt,
        decay_rates(params),
        B,
        C,
        initial_state=state,
        lengths=lengths,
        state_lengths=state_lengths,
        implementation=implementation,
    )
    return output(params, y, x, z, spec), state, columns, Records(xB, dt)


def whole(
    params: dict, h: MixerInput, positions: jax.Array, lengths: jax.Array, spec: Mamba2
) -> jax.Array:
    """Runs whole sequences h [B, T, D] from a zero state, with lengths int32[B] real tokens: [B, T, D]."""
    state, conv = _nothing(h, spec)
    return scan(params, h, state, conv, lengths, lengths, spec)[0]


def write(
    params: dict, h: CutInput, positions: jax.Array, lengths: jax.Array, spec: Mamba2
) -> SharedInputs:
    """What the first mixer of a group writes of whole sequences; arguments as for `whole`."""
    _, conv = _nothing(h, spec)
    _, raw, dt = project(params, h, spec)
    xBC = activate(convolve(params, jnp.concatenate([conv, raw], axis=1)), raw.dtype)
    xB, C = jnp.split(xBC, [spec.record_size], axis=-1)
    x, B = split_records(xB, layout_of(spec))
    return SharedInputs(x, B, dt, decay_rates(params), C.reshape(B.shape))


def read_whole(
    params: dict,
    h: CutInput,
    shared: SharedInputs,
    positions: jax.Array,
    lengths: jax.Array,
    spec: Mamba2,
) -> jax.Array:
    """What a mixer reads of what its group shares: [B, T, D]; the other arguments as for `whole`."""
    if spec.source == "cut":
        z, C = gates_of(params, h, spec.inner_size), shared.C
    else:
        z, C = gates_and_readout(params, h, spec)
    return read(params, z, shared._replace(C=C), _nothing(h, spec)[0], lengths, spec)


def read(
    params: dict,
    z: jax.Array,
    shared: SharedInputs,
    state: jax.Array,
    lengths: jax.Array,
    spec: Mamba2,
    implementation: Implementation | None = None,
) -> jax.Array:
    """What a mixer with gates z [B, T, M P] reads of what its group shares [B, T, D], from a state [B, M, P, R].

    Args:
        shared: with the mixer's own C. lengths: int32[B] real tokens. implementation: of the scan.
    """
    y, _ = ssd_scan(
        *(shared.x, shared.dt, shared.A, shared.B, shared.C),
        initial_state=state,
        lengths=lengths,
        state_lengths=lengths,
        implementation=implementation,
    )
    return output(params, y, shared.x, z, spec)


def _nothing(h: MixerInput, spec: Mamba2) -> tuple[jax.Array, jax.Array]:
    """State and columns before a sequence."""
    rows, dtype = size_of(h)[0], dtype_of(h)
    state = jnp.zeros((rows, spec.num_heads, spec.head_dim, spec.state_size), jnp.float32)
    return state, jnp.zeros((rows, spec.conv_width - 1, spec.conv_size), dtype)


def window_frames(
    params: dict,
    z: jax.Array,
    C: jax.Array,
    x: jax.Array,
    arena: jax.Array,
    frames: jax.Array,
    exists: jax.Array,
    ring: Records,
    A: jax.Array,
    starts: jax.Array,
    num_valid: jax.Array,
    spec: Mamba2,
    ancestors: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Computes the outputs of T new tokens. Their records are in the ring already; no state is written.

    Args:
        params: weights of the mixer.
        z: [B, T, M P] gates; C: [B, T, G R]; x: [B, T, M P]; these three belong to the new tokens.
        arena: uint32[U, words] with the checkpoints.
        frames: int32[B, n] frames of each row's checkpoint; exists: bool[B], the state is zero where it is false.
        ring: records since the checkpoints, [B, S, ...]. A: from `decay_rates`, of the mixer that made them.
        starts: int32[B] ring slot of the first new token; num_valid: int32[B] how many tokens count.
        spec: sizes of the mixer.
        ancestors: int32[B, T] of a tree, as in `WindowFrames`; None for a chain.

    Returns:
        out [B, T, D], and the arena as it was.
    """
    ring_x, ring_B = split_records(ring.xB, layout_of(spec))
    C = C.reshape(*C.shape[:2], spec.num_groups, spec.state_size)
    arrays = WindowFrames(
        *(ring_x, ring.dt, A, ring_B, C, arena, frames, exists),
        *(starts, num_valid, ancestors),
    )
    y, arena = ssd_window_frames(arrays, implementation="xla")
    return output(params, y, x.reshape(y.shape), z, spec), arena


def fold(
    A: jax.Array,
    state: jax.Array,
    ring: Records,
    lengths: jax.Array,
    spec: Mamba2,
) -> jax.Array:
    """Makes the next checkpoint from a checkpoint [B, M, P, R] and ring records; A comes from `decay_rates`."""
    x, B = split_records(ring.xB, layout_of(spec))
    return ssd_fold(state, x, ring.dt, A, B, lengths=lengths, implementation="xla")
