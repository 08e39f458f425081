"""What changes a row's logits before sampling: bias, penalties for tokens seen, a mask of allowed tokens.

The arrays are made when the first request asks for any of these. Steps that use them are executables of their own. On a
CPU such a step also reports log-probabilities, and it branches past all of this where no row asks for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.struct import PyTreeNode

from hybrid_jax.config import ModelConfig
from hybrid_jax.engine.pack import Layout
from hybrid_jax.engine.sampling import (
    NOT_FINITE,
    Sampled,
    are_finite,
    logprobs,
    sample,
    stopped,
    unpack_sampling,
)
from hybrid_jax.geometry import adjust_specs
from hybrid_jax.schedule.request import Request
from pallas_kernels.dispatch import Implementation


class Adjust(PyTreeNode):
    """Counts and biases for each ring row and token; the sink's row is the last one.

    Attributes:
        counts: int32[rows + 1, V] twice the number of times a token was generated, plus 1 if the prompt has it.
        bias: float32[rows + 1, V] added to the logits; -inf forbids a token.
    """

    counts: jax.Array
    bias: jax.Array


def make_adjust(model: ModelConfig, max_rows: int) -> Adjust:
    """Zeros for every ring row."""
    specs = adjust_specs(model, num_rows=max_rows + 1)
    return Adjust(**{name: jnp.zeros(spec.shape, spec.dtype) for name, spec in specs.items()})


def row_of(request: Request, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Present counts int32[V] and bias float32[V] of a request."""
    params = request.params
    counts = 2 * np.bincount(request.output.token_ids, minlength=vocab_size).astype(np.int32)
    counts[request.prompt] += 1
    bias: np.ndarray = np.zeros(vocab_size, np.float32)
    for token, value in dict(params.logit_bias or ()).items():
        bias[token] = value
    if params.allowed_token_ids is not None:
        allowed = bias[list(params.allowed_token_ids)]
        bias[:] = -np.inf
        bias[list(params.allowed_token_ids)] = allowed
    bias[list(request.forbidden_ids)] = -np.inf
    return counts, bias


def load_row(adjust: Adjust, row: jax.Array, counts: jax.Array, bias: jax.Array) -> Adjust:
    """Writes one ring row's counts int32[V] and bias float32[V]."""
    put = lambda old, new: jax.lax.dynamic_update_slice(old, new[None], (row, 0))  # noqa: E731
    return Adjust(counts=put(adjust.counts, counts), bias=put(adjust.bias, bias))


def read_row(adjust: Adjust, row: jax.Array) -> Adjust:
    """What one ring row has."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, row, keepdims=False), adjust)


def write_row(adjust: Adjust, row: jax.Array, held: Adjust) -> Adjust:
    """Puts back what `read_row` has read."""
    put = lambda x, y: jax.lax.dynamic_update_index_in_dim(x, y, row, 0)  # noqa: E731
    return jax.tree.map(put, adjust, held)


def move_row(adjust: Adjust, source: jax.Array, target: jax.Array) -> Adjust:
    """Copies what one ring row has to another."""

    def move(array):
        part = jax.lax.dynamic_slice(array, (source, 0), (1, array.shape[1]))
        return jax.lax.dynamic_update_slice(array, part, (target, 0))

    return jax.tree.map(move, adjust)


def adjusted(
    logits: jax.Array, adjust: Adjust, ring_rows: jax.Array, layout: Layout, batch: jax.Array
) -> jax.Array:
    """The logits to sample from.

    Bias comes first, then the repetition penalty (positive logits of tokens in prompt or output are divided by it,
    negative ones are multiplied), then frequency and presence penalties for tokens of the output, then the mask. Rows
    that ask for none of these keep their logits.

    Args:
        logits: float32[B, V].
        ring_rows: int32[B] where each row stands in `adjust`.
        layout, batch: the rows' columns.
    """
    get = lambda name: layout.get(batch, name)  # noqa: E731
    floats = lambda name: jax.lax.bitcast_convert_type(get(name), jnp.float32)[:, None]  # noqa: E731
    counts, out = adjust.counts[ring_rows], logits + adjust.bias[ring_rows]
    repeated = jnp.where(out > 0, out / floats("repetition"), out * floats("repetition"))
    out = jnp.where(counts > 0, repeated, out)
    generated = counts >> 1
    out = out - floats("frequency") * generated.astype(jnp.float32)
    out = jnp.where(generated > 0, out - floats("presence"), out)
    tokens = jnp.arange(logits.shape[1])
    words = get("mask").reshape(logits.shape[0], -1)[:, tokens // 32]
    allowed = (words >> (tokens % 32)) & 1
    out = jnp.where((get("masked")[:, None] > 0) & (allowed == 0), -jnp.inf, out)
    return jnp.where(get("adjusted")[:, None] > 0, out, logits)


def _nothing_like(call: Callable[[], Any]) -> Callable[[], Any]:
    """A call that returns zeros of the shapes that another one returns."""
    return lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(call))


def count(adjust: Adjust, ring_rows: jax.Array, tokens: jax.Array, counted: jax.Array) -> Adjust:
    """Counts generated tokens int32[B] of rows, where `counted` is true; what is no token counts nowhere."""
    sink = adjust.counts.shape[0] - 1
    ring_rows = jnp.where(counted & (tokens >= 0), ring_rows, sink)
    return adjust.replace(counts=adjust.counts.at[ring_rows, tokens].add(2))


def choose(
    logits: jax.Array,
    batch: jax.Array,
    layout: Layout,
    positions: jax.Array,
    samples: jax.Array,
    num_logprobs: int,
    adjust: Adjust | None,
    ring_rows: jax.Array,
    sampler: Implementation,
    kept: tuple[jax.Array, jax.Array] | None = None,
) -> tuple[Sampled, jax.Array, Adjust | None]:
    """Samples a token per row, from adjusted logits if there are any, and counts the tokens drawn.

    Args:
        logits: float32[B, V] before they are adjusted; log-probabilities come from these.
        batch, layout: the rows' columns. positions: int32[B] absolute positions of the tokens to draw.
        samples: bool[B] false for rows that draw no token here; what is sampled for them means nothing.
        num_logprobs: how many of the most likely tokens to report; 0 for no log-probabilities.
        adjust: None if no row asks for it. ring_rows: int32[B] where each row stands in it.
        sampler: as in `sample`.
        kept: tokens int32[B], and bool[B] for which rows they are taken in place of what would be drawn. Rows whose
            logits are adjusted draw.

    Returns:
        What was sampled, with NOT_FINITE for rows whose logits are not all finite; int32[B] the token to feed, -1 after
        a stop token or NOT_FINITE and for rows that do not sample; adjust.
    """
    rows = unpack_sampling(layout, batch)
    branches = sampler == "xla"  # a kernel's steps must not wait for the host to read a condition
    other = logits
    if adjust is not None:

        def change(adjust: Adjust = adjust) -> jax.Array:
            return adjusted(logits, adjust, ring_rows, layout, batch)

        asked = (layout.get(batch, "adjusted") > 0).any()
        other = jax.lax.cond(asked, change, lambda: logits) if branches else change()
    tokens = sample(other, rows, positions, sampler)
    if kept is not None:
        given, which = kept
        if adjust is not None:
            which &= layout.get(batch, "adjusted") == 0
        tokens = jnp.where(which, given, tokens)
    tokens = jnp.where(are_finite(logits), tokens, NOT_FINITE)
    fed = jnp.where(samples & (tokens >= 0) & ~stopped(tokens, rows), tokens, -1)
    extra = None
    if num_logprobs:

        def report():
            return logprobs(logits, tokens, num_logprobs)

        asked = (samples & (layout.get(batch, "reported") > 0)).any()
        extra = jax.lax.cond(asked, report, _nothing_like(report)) if branches else report()
    if adjust is not None:
        adjust = count(adjust, ring_rows, tokens, samples)
    return Sampled(tokens, extra), fed, adjust
