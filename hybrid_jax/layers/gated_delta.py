"""The gated delta net: a token corrects what the state holds under its key.

Parameters as in `matrix_state`, and norm [P]. u_t = beta_t (v_t - decay_t state_(t-1) k_t), k has length 1, q length
R^-1/2, and the logarithm of a decay is dt A.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from hybrid_jax.config import GatedDelta
from hybrid_jax.layers.matrix_state import Fields, Inputs, MatrixState, Tokens
from pallas_kernels.causal_conv.reference import of_length_one
from pallas_kernels.dispatch import Implementation
from pallas_kernels.gated_delta import gated_delta_fold, gated_delta_scan
from pallas_kernels.records import ProjectionLayout, split_records
from pallas_kernels.rmsnorm import gated_rmsnorm


class Corrections(NamedTuple):
    """What tokens write, but for what the state holds already.

    v: [B, T, M, P] and k: [B, T, G, R] in the activation dtype. beta: float32[B, T, M].
    """

    v: jax.Array
    k: jax.Array
    beta: jax.Array


class GatedDeltaState(MatrixState[GatedDelta]):
    """See the module."""

    def layout(self, spec: GatedDelta) -> ProjectionLayout:
        return ProjectionLayout(
            num_heads=spec.num_value_heads,
            head_dim=spec.value_dim,
            num_groups=spec.num_key_heads,
            state_size=spec.key_dim,
            conv_width=spec.conv_width,
            delta=True,
        )

    def activate(
        self, params: dict, convolved: jax.Array, rest: Inputs, spec: GatedDelta
    ) -> Tokens:
        """SiLU of what `convolve` gives; then k of length 1, q float32 and of length R^-1/2."""
        dtype = rest.z.dtype
        v, k, q = jnp.split(
            jax.nn.silu(convolved).astype(dtype),
            [spec.value_size, spec.record_size],
            axis=-1,
        )
        k, q = (
            of_length_one(x.reshape(*x.shape[:2], spec.num_key_heads, spec.key_dim)) for x in (k, q)
        )
        v = v.reshape(*v.shape[:2], spec.num_value_heads, spec.value_dim)
        k, q = k.astype(dtype), q * spec.key_dim**-0.5
        assert rest.beta is not None
        made = Corrections(v, k, rest.beta)
        return Tokens(rest.z, q, join_records(jnp.zeros_like(v), k, rest.dt), made)

    def scan(
        self,
        params: dict,
        tokens: Tokens,
        state: jax.Array,
        lengths: jax.Array,
        state_lengths: jax.Array,
        spec: GatedDelta,
        implementation: Implementation | None,
    ) -> tuple[jax.Array, Fields, jax.Array]:
        (v, k, beta), dt = tokens.rest, tokens.records["dt"]
        y, u, state = gated_delta_scan(
            q=tokens.q,
            k=k,
            v=v.astype(jnp.float32),
            log_decay=dt * self.decay_rates(params),
            beta=beta,
            initial_state=state,
            lengths=lengths,
            state_lengths=state_lengths,
            implementation=implementation,
        )
        return y, join_records(u, k, dt), state

    def fold(
        self, rates: jax.Array, state: jax.Array, ring: Fields, lengths: jax.Array, spec: GatedDelta
    ) -> jax.Array:
        u, k = split_records(ring["uk"], self.layout(spec))
        return gated_delta_fold(
            state, u, k, ring["dt"] * rates, lengths=lengths, implementation="xla"
        )

    def gate(
        self,
        params: dict,
        y: jax.Array,
        projected: jax.Array,
        spec: GatedDelta,
        implementation: Implementation,
    ) -> jax.Array:
        """Norm of each head, then times silu(z)."""
        return gated_rmsnorm(
            y,
            projected,
            params["norm"],
            eps=spec.norm_eps,
            groups=spec.num_value_heads,
            norm_before_gate=True,
            implementation=implementation,
        )


def join_records(u: jax.Array, k: jax.Array, dt: jax.Array) -> Fields:
    """Records of u [B, T, M, P], k [B, T, G, R] and dt float32[B, T, M], in the dtype of k."""
    flat = [x.reshape(*x.shape[:2], -1).astype(k.dtype) for x in (u, k)]
    return {"uk": jnp.concatenate(flat, axis=-1), "dt": dt}


GATED_DELTA = GatedDeltaState()
whole = GATED_DELTA.whole
