"""Bits per byte on documents the training has not seen."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from hybrid_jax.config import ModelConfig
from hybrid_jax.models.decoder import forward
from hybrid_jax.train.data import Document, segments

SAY_SECONDS = 30.0  # between two lines while it measures


def token_bits(params: dict, tokens: jax.Array, config: ModelConfig) -> jax.Array:
    """Cost of every token but the first: tokens int32[B, T + 1] to float32[B, T] bits."""
    scores = forward(params, tokens[:, :-1], config)
    own = jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1)[..., 0]
    return (jax.nn.logsumexp(scores, axis=-1) - own) / math.log(2)


_jitted_bits = jax.jit(token_bits, static_argnames="config")


def bits_per_byte(
    params: dict,
    config: ModelConfig,
    documents: Sequence[Document],
    context: int,
    *,
    limit: int | None = None,
    rows: int = 4,
    full: bool = False,
    say: Callable[[str], None] | None = None,
) -> dict:
    """Measures the model on documents cut into rows of `context` bytes, each row from an empty state.

    Args:
        params, config: the model.
        documents: what to measure on.
        context: inputs of a row, END included in the first row of a document.
        limit: measure an evenly spaced choice of this many rows; None for all.
        rows: rows per call of the model.
        full: only rows that fill the context, where there are any.
        say: is called with a line about every 30 seconds.

    Returns:
        {"bits_per_byte", "bytes", "by_position": {"0-63": ..., ...}}: the mean over all bytes, and over
        those that stand after that many tokens of context in their row.
    """
    tokens, lengths = segments(documents, context, limit, full=full)
    bits = np.zeros(context)
    counts: np.ndarray = np.zeros(context, np.int64)
    said = time.monotonic()
    for start in range(0, len(tokens), rows):
        if say is not None and time.monotonic() - said > SAY_SECONDS:
            said = time.monotonic()
            say(f"measured {start:,} of {len(tokens):,} rows of {context:,} tokens")
        part, lens = tokens[start : start + rows], lengths[start : start + rows]
        spare = rows - len(part)
        cost = _jitted_bits(params, np.pad(part, ((0, spare), (0, 0))), config)[: len(part)]
        counted = np.arange(context) < lens[:, None]
        bits += np.where(counted, cost, 0).sum(axis=0, dtype=np.float64)
        counts += counted.sum(axis=0)
    edges = [0] + [e for e in (64, 256, 512, 1024, 2048, 4096) if e < context] + [context]
    by_position = {
        f"{a}-{b - 1}": round(float(bits[a:b].sum() / counts[a:b].sum()), 4)
        for a, b in zip(edges, edges[1:], strict=False)
        if counts[a:b].sum()
    }
    return {
        "bits_per_byte": round(float(bits.sum() / counts.sum()), 4),
        "bytes": int(counts.sum()),
        "by_position": by_position,
    }
