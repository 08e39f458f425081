"""A kind of recurrent layer that keeps records which need the state: a gated delta rule (arXiv 2412.06464).

State of a head: S' = a_t S_(t-1), S_t = S' + u_t k_t^T with u_t = beta_t (v_t - S' k_t); output: S_t q_t. k and v are
convolved, and k has length 1. A record is k, u and log a. `register` makes the kind known to the package; nothing else
in the tree knows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from hybrid_jax.engine.kinds import table as engine_kinds
from hybrid_jax.engine.kinds.replay import Past, Replay, ReplayRecurrence
from hybrid_jax.kinds import table as kinds
from hybrid_jax.kinds.kind import RecurrentKind, StateLayout, StepSize, Weight, Weights
from hybrid_jax.layers.linear import HIGHEST, linear
from hybrid_jax.models import decoder


@dataclass(frozen=True, kw_only=True)
class Delta:
    """M heads with states of P x R; v and k pass through W taps."""

    num_heads: int
    value_dim: int
    key_dim: int
    conv_width: int

    @property
    def values(self) -> int:
        return self.num_heads * self.value_dim

    @property
    def keys(self) -> int:
        return self.num_heads * self.key_dim

    @property
    def channels(self) -> int:
        return self.values + self.keys


class DeltaKind(RecurrentKind):
    name = "delta"
    state_flops = 8

    def layout(self, spec: Delta) -> StateLayout:
        return StateLayout(
            units=spec.num_heads,
            unit_words=spec.value_dim * spec.key_dim,
            columns=spec.conv_width - 1,
            channels=spec.channels,
            records=(
                ("k", spec.keys, None),
                ("u", spec.values, "float32"),
                ("log_a", spec.num_heads, "float32"),
            ),
        )

    def weights(self, spec: Delta, width: int) -> Weights:
        columns = spec.channels + spec.keys + 2 * spec.num_heads
        return {
            "in_proj": Weight(shape=(width, columns), draw="matrix"),
            "conv": Weight(shape=(spec.conv_width, spec.channels), draw="conv"),
            "A_log": Weight(shape=(spec.num_heads,), draw="log_decay", float32=True),
            "out_proj": Weight(shape=(spec.values, width), draw="output"),
        }

    def row_bytes(self, spec: Delta, step: StepSize) -> int:
        return 6 * spec.channels * step.item

    def chunk_bytes(self, spec: Delta, step: StepSize) -> int:
        return 6 * spec.channels * step.item

    def xla_elements(self, spec: Delta, width: int) -> int:
        return 10 * spec.channels


def project(params: dict, h: jax.Array, spec: Delta) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Raw v and k [B, T, E]; q float32[B, T, M R], beta and log a float32[B, T, M]."""
    sizes = (spec.channels, spec.keys, spec.num_heads)
    edges = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    raw, q, beta, gate = jnp.split(linear(h, params["in_proj"]), edges, axis=-1)
    log_a = -jnp.exp(params["A_log"]) / 4 * jax.nn.sigmoid(gate.astype(jnp.float32))
    beta = jax.nn.sigmoid(beta.astype(jnp.float32))
    return raw, {"q": q.astype(jnp.float32), "beta": beta, "log_a": log_a}


def convolve(params: dict, columns: jax.Array, spec: Delta) -> dict[str, jax.Array]:
    """Columns [B, W - 1 + T, E] to v float32[B, T, M P] and k [B, T, M R] of length 1."""
    taps = params["conv"].astype(jnp.float32)
    count = columns.shape[1] - taps.shape[0] + 1
    parts = (columns[:, w : w + count].astype(jnp.float32) * tap for w, tap in enumerate(taps))
    v, k = jnp.split(jax.nn.silu(sum(parts)), [spec.values], axis=-1)
    k = k.reshape(*k.shape[:2], spec.num_heads, -1)
    k = k * jax.lax.rsqrt(jnp.square(k).sum(-1, keepdims=True) + 1e-6)
    return {"v": v, "k": k.reshape(*k.shape[:2], -1).astype(columns.dtype)}


def run(
    state: jax.Array, tokens: dict, old: jax.Array, new: jax.Array, count: jax.Array, spec: Delta
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The definition, one token after the other.

    Args:
        state: float32[B, M, P R].
        tokens: [B, S, ...] k and log a; u of old tokens; v, beta and q of new ones.
        old, new: bool[B, S] tokens that have a record, or get one. Others leave the state as it is.
        count: int32[B] after so many tokens the state is wanted.

    Returns:
        That state, u of new tokens and what they read, both [B, S, M P].
    """
    rows, shape = state.shape[0], (state.shape[0], spec.num_heads, spec.value_dim, spec.key_dim)

    def step(carry, token):
        state, kept, t = carry
        x, old, new = token
        x = {name: jnp.where((old | new)[:, None], part, 0) for name, part in x.items()}
        k = x["k"].astype(jnp.float32).reshape(rows, spec.num_heads, -1)
        decayed = jnp.exp(x["log_a"])[..., None, None] * state
        seen = jnp.einsum("bmpr,bmr->bmp", decayed, k, precision=HIGHEST)
        u = x["beta"][..., None] * (x["v"].reshape(seen.shape) - seen)
        u = jnp.where(new[:, None, None], u, x["u"].reshape(seen.shape))
        state = decayed + u[..., None] * k[..., None, :]
        kept = jnp.where((t < count)[:, None, None, None], state, kept)
        y = jnp.einsum("bmpr,bmr->bmp", state, x["q"].reshape(k.shape), precision=HIGHEST)
        return (state, kept, t + 1), (u.reshape(rows, -1), y.reshape(rows, -1))

    lead, start = old.shape, state.reshape(shape)
    blank = {
        "u": jnp.zeros((*lead, spec.values)),
        "v": jnp.zeros((*lead, spec.values)),
        "q": jnp.zeros((*lead, spec.keys)),
        "beta": jnp.zeros((*lead, spec.num_heads)),
    }
    each = jax.tree.map(lambda part: jnp.moveaxis(part, 1, 0), (blank | tokens, old, new))
    (_, kept, _), (u, y) = jax.lax.scan(step, (start, start, 0), each)
    return kept.reshape(state.shape), jnp.moveaxis(u, 0, 1), jnp.moveaxis(y, 0, 1)


def output(params: dict, y: jax.Array) -> jax.Array:
    return linear(y.astype(params["out_proj"].dtype), params["out_proj"])


class DeltaRecurrence(ReplayRecurrence):
    """Runs over the whole ring in each window."""

    def prepare(self, params: Sequence[dict]) -> None:
        """Nothing, because records have the decay."""

    def project(self, params: dict, h: jax.Array, spec: Delta) -> tuple[jax.Array, dict]:
        return project(params, h, spec)

    def convolve(self, params: dict, columns: jax.Array, spec: Delta) -> dict:
        return convolve(params, columns, spec)

    def window(self, params: dict, convolved: dict, rest: dict, past: Past, spec: Delta) -> tuple:
        own, rows = rest | convolved, past.plan.rows
        ring, width = past.records(), rest["q"].shape[1]
        place, starts = jnp.arange(ring["k"].shape[1]), (rows.base - rows.checkpoint)[:, None]
        source = jnp.clip(place - starts, 0, width - 1)  # the token that a place is for
        new = jnp.take_along_axis(past.plan.valid, source, axis=1) & (place - starts == source)
        old = place < (rows.begin - rows.checkpoint)[:, None]
        spread = lambda part: jnp.take_along_axis(part, source[..., None], axis=1)  # noqa: E731
        tokens = {name: spread(part) for name, part in own.items()}
        for name, part in ring.items():
            tokens[name] = jnp.where(old[..., None], part, tokens.get(name, 0))
        back = jnp.clip(starts + jnp.arange(width), 0, place.size - 1)
        state = past.state()
        if rows.ancestors is not None:  # each token in a row of its own, where only its path is new
            path = (rows.ancestors[:, :, None] >> source[:, None]) & 1 > 0
            new = (new[:, None] & path).reshape(-1, place.size)
            many = lambda part: jnp.repeat(part, width, axis=0)  # noqa: E731
            state, tokens, old = jax.tree.map(many, (state, tokens, old))
        _, u, y = run(state, tokens, old, new, jnp.zeros(len(old), jnp.int32), spec)
        back = back.reshape(len(old), -1, 1)
        u, y = (jnp.take_along_axis(part, back, axis=1) for part in (u, y))
        u, y = (part.reshape(*rest["beta"].shape[:2], -1) for part in (u, y))
        _, entries = past.join({"k": own["k"], "u": u, "log_a": own["log_a"]})
        return output(params, y), past.arena, entries

    def scan(
        self, params: dict, h: jax.Array, state: jax.Array, history: jax.Array, rows, spec: Delta
    ) -> tuple:
        raw, rest = project(params, h, spec)
        exists = jnp.arange(h.shape[1]) < rows.length[:, None]
        raw = jnp.where(exists[..., None], raw, 0)
        columns = jnp.concatenate([history.astype(raw.dtype), raw], axis=1)
        tokens = rest | convolve(params, columns, spec)
        none = jnp.zeros_like(exists)
        kept, u, y = run(state, tokens, none, exists, rows.state_len, spec)
        records = {"k": tokens["k"], "u": u, "log_a": tokens["log_a"]}
        return output(params, y), kept, columns, records

    def fold(
        self, shared: None, state: jax.Array, ring: dict, count: jax.Array, spec: Delta
    ) -> jax.Array:
        old = jnp.arange(ring["k"].shape[1]) < count[:, None]
        return run(state, ring, old, jnp.zeros_like(old), count, spec)[0]


def whole(
    params: dict, h: jax.Array, positions: jax.Array, lengths: jax.Array, spec: Delta
) -> jax.Array:
    raw, rest = project(params, h, spec)
    history = jnp.zeros((h.shape[0], spec.conv_width - 1, spec.channels), h.dtype)
    tokens = rest | convolve(params, jnp.concatenate([history, raw], axis=1), spec)
    state = jnp.zeros((h.shape[0], spec.num_heads, spec.value_dim * spec.key_dim))
    new = jnp.arange(h.shape[1]) < lengths[:, None]
    return output(params, run(state, tokens, jnp.zeros_like(new), new, lengths, spec)[2])


def register() -> None:
    """Into the three tables that the package finds kinds in."""
    kinds.KINDS[Delta] = DeltaKind()
    decoder.MIXERS[Delta] = whole
    engine_kinds.LAYER_STEPS["xla"][Delta] = Replay(DeltaRecurrence())
