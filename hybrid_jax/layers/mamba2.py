"""The Mamba-2 mixer (SSD): u = x, k = B, q = C, and what a token adds is multiplied by its step size dt.

Parameters as in `matrix_state`, and D [M] float32 and optional norm [M P]. The logarithm of a decay is dt A. A mixer
that reads the state of its group takes C alone from the cut's output, and has no conv, A_log and dt_bias.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from hybrid_jax.config import Mamba2
from hybrid_jax.layers.cut import CutInput, MixerInput, gates_of
from hybrid_jax.layers.matrix_state import Fields, Inputs, MatrixState, Tokens
from hybrid_jax.layers.shards import summed_over_runs
from pallas_kernels import fold as ssd_fold
from pallas_kernels import operands, ssd_scan
from pallas_kernels.dispatch import Implementation
from pallas_kernels.records import ProjectionLayout, split_records
from pallas_kernels.rmsnorm import gated_rmsnorm
from pallas_kernels.rmsnorm.reference import Gated
from pallas_kernels.rmsnorm.xla import gated_rmsnorm_xla


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


class Mamba2State(MatrixState[Mamba2]):
    """See the module."""

    def layout(self, spec: Mamba2) -> ProjectionLayout:
        return ProjectionLayout(
            num_heads=spec.num_heads,
            head_dim=spec.head_dim,
            num_groups=spec.num_groups,
            state_size=spec.state_size,
            conv_width=spec.conv_width,
            dt_limits=spec.dt_limits,
        )

    def project(self, params: dict, h: MixerInput, spec: Mamba2) -> tuple[jax.Array, Inputs]:
        """As for all kinds; step sizes are limited."""
        raw, rest = super().project(params, h, spec)
        return raw, rest._replace(dt=jnp.clip(rest.dt, *spec.dt_limits))

    def activate(self, params: dict, convolved: jax.Array, rest: Inputs, spec: Mamba2) -> Tokens:
        """SiLU of what `convolve` gives; C is [B, T, G R], and the rest is x [B, T, M P]."""
        xBC = jax.nn.silu(convolved).astype(rest.z.dtype)
        xB, C = jnp.split(xBC, [spec.record_size], axis=-1)
        return Tokens(rest.z, C, {"uk": xB, "dt": rest.dt}, xBC[..., : spec.inner_size])

    def shared(self, params: dict, tokens: Tokens, spec: Mamba2) -> SharedInputs:
        """The tokens as the scan takes them."""
        x, B = split_records(tokens.records["uk"], self.layout(spec))
        A = self.decay_rates(params)
        return SharedInputs(x, B, tokens.records["dt"], A, tokens.q.reshape(B.shape))

    def scan(
        self,
        params: dict,
        tokens: Tokens,
        state: jax.Array,
        lengths: jax.Array,
        state_lengths: jax.Array,
        spec: Mamba2,
        implementation: Implementation | None,
    ) -> tuple[jax.Array, Fields, jax.Array]:
        shared = self.shared(params, tokens, spec)
        y, state = run(params, shared, state, lengths, state_lengths, implementation)
        return y, tokens.records, state

    def fold(
        self, rates: jax.Array, state: jax.Array, ring: Fields, lengths: jax.Array, spec: Mamba2
    ) -> jax.Array:
        x, B = split_records(ring["uk"], self.layout(spec))
        return ssd_fold(state, x, ring["dt"], rates, B, lengths=lengths, implementation="xla")

    def gate(
        self,
        params: dict,
        y: jax.Array,
        projected: jax.Array,
        spec: Mamba2,
        implementation: Implementation,
    ) -> jax.Array:
        """Times silu(z), with the norm that the spec says. A norm that goes over several devices is XLA's."""
        if spec.gated_norm == "none":
            z = jax.lax.slice_in_dim(projected, 0, spec.inner_size, axis=-1)
            z = operands.summed(z, y.ndim, y.dtype).astype(jnp.float32)
            return (y.astype(jnp.float32) * jax.nn.silu(z)).astype(y.dtype)
        norm_first = spec.gated_norm == "norm_first"
        if (run := spec.norm_shards) > 1:
            return gated_rmsnorm_xla(
                Gated(y, projected, params["norm"]),
                eps=spec.norm_eps,
                groups=spec.norm_groups,
                norm_before_gate=norm_first,
                across=lambda mean: summed_over_runs(mean, run) / run,
            )
        return gated_rmsnorm(
            y,
            projected,
            params["norm"],
            eps=spec.norm_eps,
            groups=spec.norm_groups,
            norm_before_gate=norm_first,
            implementation=implementation,
        )


MAMBA2 = Mamba2State()
whole = MAMBA2.whole


def skip(params: dict, y: jax.Array, x: jax.Array) -> jax.Array:
    """y [B, T, M, P] of the recurrence with D x added, float32; x: [B, T, M, P]."""
    return y.astype(jnp.float32) + params["D"].astype(jnp.float32)[:, None] * x.astype(jnp.float32)


def run(
    params: dict,
    shared: SharedInputs,
    state: jax.Array,
    lengths: jax.Array,
    state_lengths: jax.Array,
    implementation: Implementation | None,
) -> tuple[jax.Array, jax.Array]:
    """The scan from a state [B, M, P, R]: y float32[B, T, M, P] with D x; the state after `state_lengths` tokens."""
    y, state = ssd_scan(
        shared.x,
        shared.dt,
        shared.A,
        shared.B,
        shared.C,
        initial_state=state,
        lengths=lengths,
        state_lengths=state_lengths,
        implementation=implementation,
    )
    return skip(params, y, shared.x), state


# --- mixers that share a state --------------------------------------------------------------------


def gates_and_readout(params: dict, h: CutInput, spec: Mamba2) -> tuple[jax.Array, jax.Array]:
    """z [B, T, M P] and C [B, T, G, R] of a mixer that reads the state of its group."""
    z, C = gates_of(params, h, spec.inner_size), jax.nn.silu(h.written)
    return z, C.reshape(*C.shape[:2], spec.num_groups, spec.state_size)


def write(
    params: dict, h: CutInput, positions: jax.Array, lengths: jax.Array, spec: Mamba2
) -> SharedInputs:
    """What the first mixer of a group writes of whole sequences; arguments as for `whole`."""
    raw, rest = MAMBA2.project(params, h, spec)
    tokens, _ = MAMBA2.tokens(params, raw, rest, MAMBA2.nothing(h, spec)[1], spec)
    return MAMBA2.shared(params, tokens, spec)


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
    state, _ = MAMBA2.nothing(h, spec)
    return read(params, z, shared._replace(C=C), state, lengths, spec)


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
    y, _ = run(params, shared, state, lengths, lengths, implementation)
    return MAMBA2.output(params, y, z, spec)
