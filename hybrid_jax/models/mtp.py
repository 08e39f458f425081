"""A head for multi-token prediction (arXiv 2412.19437): from a hidden state and the next token, the token after it.

The entry at position p takes the hidden state at p - 1, after the last norm, and the token at p. It predicts the token
at p + 1, through the model's own embeddings and head. To predict further, an entry takes the hidden state of the entry
before it in place of the model's.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from hybrid_jax.config import XLA, Backend, ModelConfig
from hybrid_jax.models import decoder
from hybrid_jax.models.decoder import Mix, Stream
from hybrid_jax.products.matrix import product


def head(
    params: dict,
    tokens: jax.Array,
    hidden: jax.Array,
    valid: jax.Array,
    config: ModelConfig,
    mix: Mix,
    backend: Backend = XLA,
) -> jax.Array:
    """Entries of the head.

    Args:
        params, config: the model's, with a head in params["mtp"].
        tokens: int32[B, T] the tokens of the entries. hidden: [B, T, D] what stands before each, normed.
        valid, mix, backend: as in `decoder.walk`; `mix` numbers the head's layers from 0.

    Returns:
        [B, T, D] after the head's norm: what the next entry takes, and what `decoder.head_logits` takes.
    """
    own, dtype = params["mtp"], decoder.activation_dtype(params)
    embedded = decoder.enter(params, tokens, valid, config).h
    joined = jnp.concatenate(
        [
            decoder.normed(embedded, own["embed_norm"], config),
            decoder.normed(hidden, own["hidden_norm"], config),
        ],
        axis=-1,
    )
    stream = Stream(product(joined.astype(dtype), own["in_proj"]), None)
    layers, weights = config.drafting, {"embed": params["embed"], "layers": own["layers"]}
    assert layers is not None, "there is a head"
    stream = decoder.through(
        weights, stream, valid, range(len(layers.layers)), layers, mix, backend
    )
    h = decoder.leave(weights, stream, valid, layers)
    return decoder.normed(h, own["norm"], config).astype(dtype)


def forward(
    params: dict, tokens: jax.Array, hidden: jax.Array, lengths: jax.Array, config: ModelConfig
) -> jax.Array:
    """`head` over whole sequences from nothing: tokens int32[B, T] at positions 0 to T - 1, lengths int32[B]."""
    valid, mix = decoder.whole_sequences(tokens, lengths)
    return head(params, tokens, hidden, valid, config, mix)
