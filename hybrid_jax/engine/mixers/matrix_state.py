"""Mixers whose state is a matrix for each head (`layers.matrix_state`), as XLA runs them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from hybrid_jax.engine.mixers.mixer import ChunkRows, Entry, Spec
from hybrid_jax.engine.mixers.replay import Past, ReplayRecurrence
from hybrid_jax.layers.cut import MixerInput
from hybrid_jax.layers.matrix_state import Fields, MatrixState, Tokens
from pallas_kernels.records import RecordSizes


class Read(NamedTuple):
    """What the tokens of a window read.

    Attributes:
        y: [B, T, M, P]. arena: as it was.
        records: theirs [B, T, ...], if a token's record follows from the state; None if the ring has them already.
    """

    y: jax.Array
    arena: jax.Array
    records: Fields | None = None


class MatrixRecurrence(ReplayRecurrence[Spec]):
    """A kind says how a window reads a checkpoint and a ring. All else follows from its equations."""

    equations: MatrixState[Any]

    def read(self, params: dict, tokens: Tokens, ring: Fields, past: Past, spec: Spec) -> Read:
        """What the tokens of a window read of a checkpoint and a ring.

        Args:
            ring: records [B, S, ...] since the checkpoint, with those of `tokens` among them.
        """
        raise NotImplementedError

    def prepare(self, params: Sequence[dict]) -> Any:
        return self.equations.prepare(params)

    def project(self, params: dict, h: MixerInput, spec: Spec) -> tuple[jax.Array, Any]:
        return self.equations.project(params, h, spec)

    def convolve(self, params: dict, columns: jax.Array, spec: Spec) -> jax.Array:
        return self.equations.convolve(params, columns, spec)

    def window(
        self, params: dict, convolved: jax.Array, rest: Any, past: Past, spec: Spec
    ) -> tuple[jax.Array, jax.Array, dict[str, Entry]]:
        tokens = self.equations.activate(params, convolved, rest, spec)
        ring, entries = past.join(tokens.records)
        y, arena, records = self.read(params, tokens, ring, past, spec)
        if records is not None:
            _, entries = past.join(records)
        return self.equations.output(params, y, tokens.z, spec), arena, entries

    def scan(
        self,
        params: dict,
        h: MixerInput,
        state: jax.Array,
        history: jax.Array,
        rows: ChunkRows,
        spec: Spec,
    ) -> tuple[jax.Array, jax.Array, jax.Array, Fields]:
        heads = by_heads(state, self.equations.layout(spec))
        out, new, columns, records = self.equations.chunk(
            params, h, heads, history, rows.length, rows.state_len, spec, "xla"
        )
        return out, new.reshape(state.shape), columns, records

    def fold(
        self, shared: Any, state: jax.Array, ring: Fields, count: jax.Array, spec: Spec
    ) -> jax.Array:
        heads = by_heads(state, self.equations.layout(spec))
        return self.equations.fold(shared, heads, ring, count, spec).reshape(state.shape)


def by_heads(state: jax.Array, sizes: RecordSizes) -> jax.Array:
    """A state [B, M, P R] as [B, M, P, R]."""
    return state.reshape(*state.shape[:2], sizes.head_dim, sizes.state_size)
