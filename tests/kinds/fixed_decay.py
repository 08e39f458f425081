"""A kind with a matrix state and fixed decays, one for each head (the shape of lightning attention, arXiv 2501.08313).

state_t = d state_(t-1) + v_t k_t^T and y_t = state_t q_t, with q, k, v = silu(W u_t), and output W_o (norm(y_t)
sigmoid(W_z u_t)); no convolution. Its arithmetic is that of SSD with step sizes of 1. `register` makes it known to the
package; nothing else in the tree knows it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp

from hybrid_jax.engine.mixers import table as mixers
from hybrid_jax.engine.mixers.matrix_state import MatrixRecurrence, Read
from hybrid_jax.engine.mixers.replay import Fields, Past, Replay
from hybrid_jax.kinds import table as kinds
from hybrid_jax.kinds.kind import Weight, Weights
from hybrid_jax.kinds.matrix_state import MatrixSize, MatrixStateKind
from hybrid_jax.layers.matrix_state import Inputs, MatrixState, Tokens
from hybrid_jax.models import decoder
from pallas_kernels import WindowFrames, ssd_scan, ssd_window_frames
from pallas_kernels import fold as ssd_fold
from pallas_kernels.records import ProjectionLayout, split_records
from pallas_kernels.rmsnorm.xla import rms_norm


@dataclass(frozen=True, kw_only=True)
class FixedDecay:
    """M heads of values and keys with P and R channels."""

    num_heads: int
    value_dim: int
    key_dim: int
    conv_width: ClassVar[int] = 1

    @property
    def rates(self) -> jax.Array:
        """Logarithms of the decays, float32[M]."""
        return -(2.0 ** (-2 - jnp.arange(self.num_heads, dtype=jnp.float32)))


class FixedDecayKind(MatrixStateKind):
    name = "fixed_decay"
    names = "z", "v", "k", "q"
    state_flops = 6

    def size(self, spec: FixedDecay) -> MatrixSize:
        return MatrixSize(spec.num_heads, spec.value_dim, spec.num_heads, spec.key_dim)

    def weights(self, spec: FixedDecay, width: int) -> Weights:
        inner = spec.num_heads * spec.value_dim
        return super().weights(spec, width) | {"norm": Weight(shape=(inner,), draw="ones")}


class FixedDecayState(MatrixState[FixedDecay]):
    def layout(self, spec: FixedDecay) -> ProjectionLayout:
        return ProjectionLayout(
            num_heads=spec.num_heads,
            head_dim=spec.value_dim,
            num_groups=spec.num_heads,
            state_size=spec.key_dim,
            conv_width=spec.conv_width,
        )

    def decay_rates(self, params: dict) -> None:
        return None

    def activate(
        self, params: dict, convolved: jax.Array, rest: Inputs, spec: FixedDecay
    ) -> Tokens:
        layout = self.layout(spec)
        vkq = jax.nn.silu(convolved.astype(jnp.float32)).astype(rest.z.dtype)
        vk, q = jnp.split(vkq, [layout.record_size], axis=-1)
        q = q.reshape(*q.shape[:2], layout.num_groups, layout.state_size)
        return Tokens(rest.z, q, {"uk": vk})

    def scan(self, params, tokens, state, lengths, state_lengths, spec, implementation):
        v, k = split_records(tokens.records["uk"], self.layout(spec))
        y, state = ssd_scan(
            x=v,
            dt=ones(v),
            A=spec.rates,
            B=k,
            C=tokens.q,
            initial_state=state,
            lengths=lengths,
            state_lengths=state_lengths,
            implementation=implementation,
        )
        return y, tokens.records, state

    def fold(self, rates, state, ring, lengths, spec):
        v, k = split_records(ring["uk"], self.layout(spec))
        return ssd_fold(state, v, ones(v), spec.rates, k, lengths=lengths, implementation="xla")

    def gate(self, params, y, z, spec, implementation):
        y = rms_norm(y, params["norm"], 1e-5).astype(jnp.float32)
        return (y * jax.nn.sigmoid(z.astype(jnp.float32))).astype(z.dtype)


class FixedDecayRecurrence(MatrixRecurrence[FixedDecay]):
    equations = FixedDecayState()

    def read(
        self, params: dict, tokens: Tokens, ring: Fields, past: Past, spec: FixedDecay
    ) -> Read:
        v, k = split_records(ring["uk"], self.equations.layout(spec))
        rows = past.plan.rows
        arrays = WindowFrames(
            x=v,
            dt=ones(v),
            A=spec.rates,
            B=k,
            C=tokens.q,
            arena=past.arena,
            frames=past.frames(),
            exists=past.plan.exists,
            starts=rows.starts,
            num_valid=rows.num_valid,
            ancestors=rows.ancestors,
        )
        return Read(*ssd_window_frames(arrays, implementation="xla"))


def ones(v: jax.Array) -> jax.Array:
    """Step sizes [B, T, M]."""
    return jnp.ones(v.shape[:-1], jnp.float32)


def register() -> None:
    """Into the three tables that the package finds kinds in."""
    kinds.KINDS[FixedDecay] = FixedDecayKind()
    decoder.MIXERS[FixedDecay] = FixedDecayRecurrence.equations.whole
    mixers.LAYER_STEPS["xla"][FixedDecay] = Replay(FixedDecayRecurrence())
