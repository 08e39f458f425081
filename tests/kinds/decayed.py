"""A kind of recurrent layer that keeps records: linear attention whose heads forget at a rate of their own.

State of a head: S_t = a S_(t-1) + v_t k_t^T; output: S_t q_t (retention, arXiv 2307.08621). k and v are convolved.
`register` makes it known to the package; nothing else in the tree knows it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from hybrid_jax.engine.kinds import table as engine_kinds
from hybrid_jax.engine.kinds.replay import Checkpoint, Recurrence, Replay
from hybrid_jax.kinds import table as kinds
from hybrid_jax.kinds.kind import RecurrentKind, StateLayout, StepSize, Weight, Weights
from hybrid_jax.kinds.tensors import Stored, matrix, vector
from hybrid_jax.layers import mixers
from hybrid_jax.layers.linear import HIGHEST, linear


@dataclass(frozen=True, kw_only=True)
class Decayed:
    """M heads with states of P x R; k and v pass through W taps."""

    num_heads: int
    value_dim: int
    key_dim: int
    conv_width: int

    @property
    def channels(self) -> int:
        return self.num_heads * (self.value_dim + self.key_dim)


class DecayedKind(RecurrentKind):
    name = "decayed"
    state_flops = 5

    def layout(self, spec: Decayed) -> StateLayout:
        return StateLayout(
            units=spec.num_heads,
            unit_words=spec.value_dim * spec.key_dim,
            columns=spec.conv_width - 1,
            channels=spec.channels,
            records=(("vk", spec.channels, None),),
        )

    def weights(self, spec: Decayed, width: int) -> Weights:
        inner, keys = spec.num_heads * spec.value_dim, spec.num_heads * spec.key_dim
        return {
            "in_proj": Weight(shape=(width, spec.channels + keys), draw="matrix"),
            "conv": Weight(shape=(spec.conv_width, spec.channels), draw="matrix"),
            "A_log": Weight(shape=(spec.num_heads,), draw="log_decay", float32=True),
            "out_proj": Weight(shape=(inner, width), draw="output"),
        }

    def stored(self, prefix: str, width: int, spec: Decayed) -> dict:
        inner, keys = spec.num_heads * spec.value_dim, spec.num_heads * spec.key_dim
        conv = (f"{prefix}.conv.weight", (spec.channels, 1, spec.conv_width))
        return {
            "in_proj": matrix(width, (f"{prefix}.in_proj.weight", spec.channels + keys)),
            "conv": Stored(parts=(conv,), layout="conv"),
            "A_log": vector(f"{prefix}.A_log", spec.num_heads, keep_dtype=True),
            "out_proj": matrix(inner, (f"{prefix}.out_proj.weight", width)),
        }

    def written(self, spec: Decayed, width: int) -> tuple[int, int]:
        return width * spec.channels, spec.channels

    def row_bytes(self, spec: Decayed, step: StepSize) -> int:
        return 4 * spec.channels * step.item

    def chunk_bytes(self, spec: Decayed, step: StepSize) -> int:
        return 4 * spec.channels * step.item

    def xla_elements(self, spec: Decayed, width: int) -> int:
        return 8 * spec.channels


def decay(params: dict) -> jax.Array:
    """float32[M] in (0, 1)."""
    return jnp.exp(-jnp.exp(params["A_log"]) / 4)


def convolve(params: dict, columns: jax.Array) -> jax.Array:
    """Columns [B, W - 1 + T, E] to [B, T, E]."""
    taps = params["conv"].astype(jnp.float32)
    count = columns.shape[1] - taps.shape[0] + 1
    parts = (columns[:, w : w + count].astype(jnp.float32) * tap for w, tap in enumerate(taps))
    return jax.nn.silu(sum(parts)).astype(columns.dtype)


def heads(vk: jax.Array, spec: Decayed) -> tuple[jax.Array, jax.Array]:
    """float32[..., M, P] and [..., M, R]."""
    v, k = jnp.split(vk.astype(jnp.float32), [spec.num_heads * spec.value_dim], axis=-1)
    return (x.reshape(*x.shape[:-1], spec.num_heads, -1) for x in (v, k))


def output(params: dict, y: jax.Array, dtype: jnp.dtype) -> jax.Array:
    return linear(y.reshape(*y.shape[:2], -1).astype(dtype), params["out_proj"])


class DecayedRecurrence(Recurrence):
    """Plain sums over the ring, and one token after the other over prompts."""

    def share(self, params: list[dict]) -> jax.Array:
        """Decay float32[L, M]."""
        return jnp.stack([decay(weights) for weights in params])

    def project(self, params: dict, h: jax.Array, spec: Decayed) -> tuple[jax.Array, jax.Array]:
        raw, q = jnp.split(linear(h, params["in_proj"]), [spec.channels], axis=-1)
        return raw, q.astype(jnp.float32).reshape(*q.shape[:2], spec.num_heads, -1)

    def records(self, params: dict, columns: jax.Array, rest: Any, spec: Decayed) -> tuple:
        return {"vk": convolve(params, columns)}, rest

    def read(
        self, params: dict, q: jax.Array, checkpoint: Checkpoint, plan, ring: dict, spec: Decayed
    ) -> tuple[jax.Array, jax.Array]:
        rows, slot = plan.rows, jnp.arange(ring["vk"].shape[1])
        starts = rows.base - rows.checkpoint
        known = slot < (starts + jnp.maximum(rows.end - rows.base, 0))[:, None]
        v, k = heads(jnp.where(known[..., None], ring["vk"], 0), spec)
        own = starts[:, None] + jnp.arange(q.shape[1])  # [B, T]
        age = (own[..., None] - slot).astype(jnp.float32)  # [B, T, S]
        weight = jnp.where(age >= 0, decay(params)[:, None, None, None] ** age, 0)  # [M, B, T, S]
        scores = jnp.einsum("btmr,bsmr->mbts", q, k, precision=HIGHEST) * weight
        y = jnp.einsum("mbts,bsmp->btmp", scores, v, precision=HIGHEST)
        old = matrices(checkpoint.state(), spec)
        before = jnp.einsum("bmpr,btmr->btmp", old, q, precision=HIGHEST)
        since = decay(params)[:, None, None] ** (own + 1).astype(jnp.float32)
        y += before * since.transpose(1, 2, 0)[..., None]
        return output(params, y, params["out_proj"].dtype), checkpoint.arena

    def scan(
        self, params: dict, h: jax.Array, state: jax.Array, history: jax.Array, rows, spec: Decayed
    ) -> tuple:
        raw, q = self.project(params, h, spec)
        exists = jnp.arange(h.shape[1]) < rows.length[:, None]
        raw = jnp.where(exists[..., None], raw, 0)
        columns = jnp.concatenate([history.astype(raw.dtype), raw], axis=1)
        vk = convolve(params, columns)
        kept, y = run(decay(params), matrices(state, spec), vk, q, rows.state_len, spec)
        return output(params, y, h.dtype), kept.reshape(state.shape), columns, {"vk": vk}

    def fold(
        self, shared: jax.Array, state: jax.Array, ring: dict, count: jax.Array, spec: Decayed
    ) -> jax.Array:
        slots = ring["vk"].shape[1]
        q = jnp.zeros((state.shape[0], slots, spec.num_heads, spec.key_dim))
        return run(shared, matrices(state, spec), ring["vk"], q, count, spec)[0].reshape(
            state.shape
        )


def matrices(state: jax.Array, spec: Decayed) -> jax.Array:
    """[B, M, P R] as [B, M, P, R]."""
    return state.reshape(*state.shape[:2], spec.value_dim, spec.key_dim)


def run(
    rates: jax.Array, state: jax.Array, vk: jax.Array, q: jax.Array, count: jax.Array, spec: Decayed
) -> tuple[jax.Array, jax.Array]:
    """The definition: the state after `count` int32[B] of T tokens, and what each reads, [B, T, M, P]."""

    def step(carry, token):
        state, kept, t = carry
        vk, q = token
        v, k = heads(vk, spec)
        state = rates[:, None, None] * state + v[..., None] * k[..., None, :]
        kept = jnp.where((t < count)[:, None, None, None], state, kept)
        y = jnp.einsum("bmpr,bmr->bmp", state, q, precision=HIGHEST)
        return (state, kept, t + 1), y

    tokens = jnp.moveaxis(vk, 1, 0), jnp.moveaxis(q, 1, 0)
    (_, kept, _), y = jax.lax.scan(step, (state, state, 0), tokens)
    return kept, jnp.moveaxis(y, 0, 1)


def whole(
    params: dict, h: jax.Array, positions: jax.Array, lengths: jax.Array, spec: Decayed
) -> jax.Array:
    raw, q = DecayedRecurrence().project(params, h, spec)
    history = jnp.zeros((h.shape[0], spec.conv_width - 1, spec.channels), h.dtype)
    vk = convolve(params, jnp.concatenate([history, raw], axis=1))
    shape = (h.shape[0], spec.num_heads, spec.value_dim, spec.key_dim)
    y = run(decay(params), jnp.zeros(shape, jnp.float32), vk, q, lengths, spec)[1]
    return output(params, y, h.dtype)


def register() -> None:
    """Into the three tables that the package finds kinds in."""
    kinds.KINDS[Decayed] = DecayedKind()
    mixers.MIXERS[Decayed] = whole
    engine_kinds.KINDS["xla"][Decayed] = Replay(DecayedRecurrence())
