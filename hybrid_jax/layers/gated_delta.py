"""The gated delta net: scan a prompt chunk, run a window of new tokens, fold records.

Parameters: in_proj [D, z | v | k | q | a | b], conv [W, E] with E = v | k | q, optional conv_bias [E], A_log and
dt_bias [M] float32, norm [P], out_proj [M P, D]. After a cut, in_proj has the columns of z alone, or z and what is
added to q; the others come from the projection of the cut's output.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from hybrid_jax.config import GatedDelta
from hybrid_jax.layers.convolution import depthwise
from hybrid_jax.layers.cut import (
    CutInput,
    MixerInput,
    dtype_of,
    gates_of,
    size_of,
)
from hybrid_jax.products.matrix import product
from pallas_kernels.causal_conv.reference import of_length_one
from pallas_kernels.dispatch import Implementation
from pallas_kernels.gated_delta import (
    gated_delta_fold,
    gated_delta_scan,
)
from pallas_kernels.records import ProjectionLayout
from pallas_kernels.rmsnorm import gated_rmsnorm


class Records(NamedTuple):
    """What the recurrence needs to know of each token.

    uk: [B, S, M P + G R] what it writes, and its key, in the activation dtype. dt: float32[B, S, M] step sizes, by
    which the rates of decay are multiplied.
    """

    uk: jax.Array
    dt: jax.Array


class Inputs(NamedTuple):
    """Outputs of in_proj.

    z: [B, T, M P] gates. vkq: [B, T, E] convolution inputs. dt, beta: float32[B, T, M].
    """

    z: jax.Array
    vkq: jax.Array
    dt: jax.Array
    beta: jax.Array


class Convolved(NamedTuple):
    """What the convolution gives, activated.

    v: [B, T, M, P] and k: [B, T, G, R] in the activation dtype. q: float32[B, T, G, R].
    """

    v: jax.Array
    k: jax.Array
    q: jax.Array


def project(params: dict, h: MixerInput, spec: GatedDelta) -> Inputs:
    """Projects h [B, T, D] to the mixer's inputs: dt = softplus(a + dt_bias), beta = sigmoid(b)."""
    sizes = (spec.value_size, spec.conv_size, spec.num_value_heads)
    if isinstance(h, CutInput):
        z = gates_of(params, h, spec.value_size)
        vkq, a, b = jnp.split(h.written, [sizes[1], sizes[1] + sizes[2]], axis=-1)
    else:
        projected = product(h, params["in_proj"])
        z, vkq, a, b = jnp.split(projected, [sum(sizes[: i + 1]) for i in range(3)], axis=-1)
    dt = jax.nn.softplus(a.astype(jnp.float32) + params["dt_bias"].astype(jnp.float32))
    return Inputs(z, vkq, dt, jax.nn.sigmoid(b.astype(jnp.float32)))


def layout_of(spec: GatedDelta) -> ProjectionLayout:
    """How the mixer's projections, records and states lie in memory, if it stands before a cut."""
    return ProjectionLayout(
        num_heads=spec.num_value_heads,
        head_dim=spec.value_dim,
        num_groups=spec.num_key_heads,
        state_size=spec.key_dim,
        conv_width=spec.conv_width,
        delta=True,
    )


def decay_rates(params: dict) -> jax.Array:
    """A = -exp(A_log), float32[M]; the logarithm of a token's decay is dt A."""
    return -jnp.exp(params["A_log"].astype(jnp.float32))


def convolve(params: dict, columns: jax.Array) -> jax.Array:
    """Causal depthwise convolution: raw columns [B, W - 1 + T, E] to float32[B, T, E]."""
    return depthwise(columns, params["conv"], params.get("conv_bias"))


def activate(convolved: jax.Array, dtype: jnp.dtype, spec: GatedDelta) -> Convolved:
    """SiLU of what `convolve` gives, in `dtype`; then k of length 1, q of length R^-1/2."""
    v, k, q = jnp.split(
        jax.nn.silu(convolved).astype(dtype),
        [spec.value_size, spec.record_size],
        axis=-1,
    )
    k, q = (
        of_length_one(x.reshape(*x.shape[:2], spec.num_key_heads, spec.key_dim)) for x in (k, q)
    )
    v = v.reshape(*v.shape[:2], spec.num_value_heads, spec.value_dim)
    return Convolved(v, k.astype(dtype), q * spec.key_dim**-0.5)


def output(params: dict, y: jax.Array, z: jax.Array, spec: GatedDelta) -> jax.Array:
    """Norm of each head of y [B, T, M, P], gate z [B, T, M P] and out_proj: [B, T, D]."""
    y = gate(params, y.reshape(z.shape).astype(z.dtype), z, spec, "xla")
    return product(y, params["out_proj"])


def gate(
    params: dict,
    y: jax.Array,
    projected: jax.Array,
    spec: GatedDelta,
    implementation: Implementation,
) -> jax.Array:
    """Norm of each head of y [B, T, M P], then times silu(z).

    Args:
        projected: [B, T, >= M P] with z in front, or parts of it. implementation: as `gated_rmsnorm` takes it.
    """
    return gated_rmsnorm(
        *(y, projected, params["norm"]),
        eps=spec.norm_eps,
        groups=spec.num_value_heads,
        norm_before_gate=True,
        implementation=implementation,
    )


def join_records(u: jax.Array, k: jax.Array, dt: jax.Array) -> Records:
    """Records of u [B, T, M, P], k [B, T, G, R] and dt float32[B, T, M], in the dtype of k."""
    flat = [x.reshape(*x.shape[:2], -1).astype(k.dtype) for x in (u, k)]
    return Records(jnp.concatenate(flat, axis=-1), dt)


def split_records(records: Records, spec: GatedDelta) -> tuple[jax.Array, jax.Array]:
    """u [B, S, M, P] and k [B, S, G, R] of records."""
    u, k = jnp.split(records.uk, [spec.value_size], axis=-1)
    lead = u.shape[:2]
    u = u.reshape(*lead, spec.num_value_heads, spec.value_dim)
    return u, k.reshape(*lead, spec.num_key_heads, spec.key_dim)


def scan(
    params: dict,
    h: MixerInput,
    state: jax.Array,
    conv: jax.Array,
    lengths: jax.Array,
    state_lengths: jax.Array,
    spec: GatedDelta,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, Records]:
    """Runs a chunk of tokens from a checkpoint.

    Args:
        h: [B, T, D] normed inputs. If only states are asked for, the outputs mean nothing.
        state: [B, M, P, R] float32; conv: [B, W - 1, E] raw convolution inputs before the chunk.
        lengths: int32[B] valid tokens. state_lengths: int32[B] how many tokens the returned state covers.
        implementation: as `gated_delta_scan` takes it.

    Returns:
        out [B, T, D]; the state after `state_lengths` tokens; raw columns [B, W - 1 + T, E] with the history in front,
        so that columns[b, n : n + W - 1] is the history after n tokens; and the records, which mean nothing past
        `lengths`.
    """
    valid = (jnp.arange(size_of(h)[1]) < lengths[:, None])[..., None]
    z, raw, dt, beta = project(params, h, spec)
    raw = jnp.where(valid, raw, 0)
    columns = jnp.concatenate([conv.astype(raw.dtype), raw], axis=1)
    v, k, q = activate(convolve(params, columns), raw.dtype, spec)
    y, u, state = gated_delta_scan(
        *(q, k, v.astype(jnp.float32), dt * decay_rates(params), beta),
        initial_state=state,
        lengths=lengths,
        state_lengths=state_lengths,
        implementation=implementation,
    )
    return output(params, y, z, spec), state, columns, join_records(u, k, dt)


def whole(
    params: dict, h: MixerInput, positions: jax.Array, lengths: jax.Array, spec: GatedDelta
) -> jax.Array:
    """Runs whole sequences h [B, T, D] from a zero state, with lengths int32[B] real tokens: [B, T, D]."""
    state, conv = _nothing(h, spec)
    return scan(params, h, state, conv, lengths, lengths, spec)[0]


def _nothing(h: MixerInput, spec: GatedDelta) -> tuple[jax.Array, jax.Array]:
    """State and columns before a sequence."""
    rows, dtype = size_of(h)[0], dtype_of(h)
    state = jnp.zeros((rows, spec.num_value_heads, spec.value_dim, spec.key_dim), jnp.float32)
    return state, jnp.zeros((rows, spec.conv_width - 1, spec.conv_size), dtype)


def fold(
    A: jax.Array, state: jax.Array, ring: Records, lengths: jax.Array, spec: GatedDelta
) -> jax.Array:
    """Makes the next checkpoint from a checkpoint [B, M, P, R] and the first `lengths` int32[B] records of a ring;
    A comes from `decay_rates`."""
    u, k = split_records(ring, spec)
    return gated_delta_fold(state, u, k, ring.dt * A, lengths=lengths, implementation="xla")
