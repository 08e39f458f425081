"""What rows ask of the hidden states of their prompts, and the calls of the programs that read it from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from hybrid_jax.engine.sampling import Sampled
from hybrid_jax.engine.steps.step import Made, Results, StepKind
from hybrid_jax.schedule.plan import PrefillRow, Row

# Runs the program of a name and a shape on arrays.
Read = Callable[..., Any]


def results_of(kind: StepKind, rows: Sequence[Row], made: Made, read: Read) -> Results:
    """What a dispatch brings to its rows: what its step made, and what they ask of its hidden states.

    Args:
        kind: of the step. rows: of the dispatch. made: by the step.
        read: runs one of the programs `small.READERS`, by its name and shape, on arrays.
    """
    hidden = made.hidden
    if hidden is None:
        return Results(made.sampled, drafted=made.drafted)
    return Results(
        sampled=made.sampled,
        prompt=_prompt_logprobs(kind, rows, hidden, read),
        pooled=_pooled_hidden(kind, rows, hidden, read),
        hidden=_all_hidden(rows, hidden, read),
        drafted=made.drafted,
    )


def _prompt_logprobs(
    kind: StepKind, rows: Sequence[Row], hidden: jax.Array, read: Read
) -> Sampled | None:
    """Log-probabilities of the prompts of rows that ask for them, from hidden states [R, T, D]."""
    wanted = [
        (index, row)
        for index, row in enumerate(rows)
        if isinstance(row, PrefillRow) and row.reads and row.request.lacks_prompt_logprobs
    ]
    if not wanted:
        return None
    tokens = np.zeros(hidden.shape[:2], np.int32)
    for index, row in wanted:
        following = row.request.prompt[row.start + 1 : row.start + len(row.tokens) + 1]
        tokens[kind.line(row, index), : len(following)] = following
    return read("prompt_logprobs", tokens.shape, hidden, tokens)


def _pooled_hidden(
    kind: StepKind, rows: Sequence[Row], hidden: jax.Array, read: Read
) -> jax.Array | None:
    """Sums of the hidden states [R, T, D] that rows ask for, float32[R, D]; None if no row asks."""
    num_rows, width, _ = hidden.shape
    begin, end = np.zeros((2, num_rows), np.int32)
    for index, row in enumerate(rows):
        if not isinstance(row, PrefillRow) or row.request.pooling == "none":
            continue
        if pooled := row.pooled:
            line = kind.line(row, index)
            # Of some prefills only the last token's hidden state comes back; places count from there.
            skipped = row.length - 1 if width == 1 else 0
            begin[line], end[line] = pooled.start - skipped, pooled.stop - skipped
    return read("pooled_hidden", hidden.shape, hidden, begin, end) if end.any() else None


def _all_hidden(rows: Sequence[Row], hidden: jax.Array, read: Read) -> jax.Array | None:
    """Hidden states [R, T, D] after the last norm, float32, if a row asks for all of its own."""
    asked = any(isinstance(r, PrefillRow) and r.request.pooling == "none" for r in rows)
    return read("all_hidden", hidden.shape, hidden) if asked else None
