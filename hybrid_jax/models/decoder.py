"""The layer stack over whole sequences: no cache, no pages; training and tests use it as the definition.

Parameters of a model: {"embed": [V, D], "layers": [layer, ...], "norm": [D], "head": [D, V] unless tied}.
A layer: {"norm": [D], "mixers": [mixer, ...]} if it has mixers, {"mlp_norm": [D], "mlp": {...}} if it has
an mlp; a layer that shares weights is an empty dict.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from hybrid_jax.config import MLP, Attention, LayerSpec, Mamba2, ModelConfig
from hybrid_jax.layers import attention, mamba2
from hybrid_jax.layers.linear import linear, linear_transposed
from hybrid_jax.layers.mlp import mlp
from hybrid_jax.layers.moe import moe
from hybrid_jax.layers.norm import rms_norm

Mixer = Attention | Mamba2
Mix = Callable[[dict, jax.Array, Mixer], jax.Array]


def layer_params(params: dict, index: int, config: ModelConfig) -> dict:
    """Weights of one layer, following `weights_of`."""
    source = config.layers[index].weights_of
    return params["layers"][index if source is None else source]


def embed(params: dict, tokens: jax.Array, config: ModelConfig) -> jax.Array:
    """Token ids int32[B, T] to [B, T, D]."""
    h = params["embed"][tokens]
    if config.residual_in_fp32:
        h = h.astype(jnp.float32)
    if config.embedding_multiplier != 1.0:
        h = h * config.embedding_multiplier
    return h


def add(h: jax.Array, update: jax.Array, config: ModelConfig) -> jax.Array:
    """h + residual_multiplier * update, in the dtype of h."""
    if config.residual_multiplier != 1.0:
        update = update * config.residual_multiplier
    return h + update.astype(h.dtype)


def block_input(params: dict, name: str, h: jax.Array, config: ModelConfig) -> jax.Array:
    """The normed input of a block, in the weights' dtype."""
    return rms_norm(h, params[name], config.norm_eps).astype(params[name].dtype)


def feed_forward(
    params: dict, h: jax.Array, valid: jax.Array, spec: LayerSpec, config: ModelConfig
) -> jax.Array:
    """The second half of a layer: h + mlp(norm(h)), or h where the layer has none."""
    if spec.mlp is None:
        return h
    normed = block_input(params, "mlp_norm", h, config)
    if isinstance(spec.mlp, MLP):
        update = mlp(params["mlp"], normed, spec.mlp.kind)
    else:
        update = moe(params["mlp"], normed, valid, spec.mlp)
    return add(h, update, config)


def walk(
    params: dict, tokens: jax.Array, valid: jax.Array, config: ModelConfig, mix: Mix
) -> jax.Array:
    """From token ids to the last hidden state; what a mixer remembers is the caller's business.

    Args:
        tokens: int32[B, T]. valid: bool[B, T] tokens that are real; hidden states of the others are 0.
        mix: called for every mixer in order with its weights, normed inputs [B, T, D] and its spec;
            returns its update [B, T, D].

    Returns:
        [B, T, D] before the last norm.
    """
    h = embed(params, jnp.where(valid, tokens, 0), config)
    h = jnp.where(valid[..., None], h, 0)
    for index, spec in enumerate(config.layers):
        weights = layer_params(params, index, config)
        if spec.mixers:
            normed = block_input(weights, "norm", h, config)
            updates = []
            for part, mixer in zip(weights["mixers"], spec.mixers, strict=True):
                with jax.named_scope(type(mixer).__name__.lower()):
                    updates.append(mix(part, normed, mixer))
            h = add(h, sum(updates[1:], updates[0]), config)
        with jax.named_scope("mlp"):
            h = feed_forward(weights, h, valid, spec, config)
        h = jnp.where(valid[..., None], h, 0)
    return h


def logits(params: dict, h: jax.Array, config: ModelConfig) -> jax.Array:
    """h [..., D] to float32 logits [..., V]."""
    h = rms_norm(h, params["norm"], config.norm_eps).astype(params["norm"].dtype)
    if config.tie_embeddings:
        out = linear_transposed(h, params["embed"])
    else:
        out = linear(h, params["head"])
    out = out.astype(jnp.float32)
    return out if config.logits_multiplier == 1.0 else out * config.logits_multiplier


def forward(
    params: dict, tokens: jax.Array, config: ModelConfig, *, lengths: jax.Array | None = None
) -> jax.Array:
    """Whole sequences from nothing.

    Args:
        params: the model's weights.
        tokens: int32[B, T] token ids.
        config: the model.
        lengths: int32[B] valid tokens per row, or None for T.

    Returns:
        float32[B, T, V] logits; those of padding mean nothing.
    """
    rows, width = tokens.shape
    if lengths is None:
        lengths = jnp.full(rows, width, jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(width), tokens.shape)
    valid = positions < lengths[:, None]

    def mix(weights: dict, normed: jax.Array, spec: Mixer) -> jax.Array:
        if isinstance(spec, Attention):
            q, k, v = attention.project(weights, normed, positions, spec)
            return attention.output(weights, attention.attend(q, k, v, positions, lengths, spec))
        state = jnp.zeros((rows, spec.num_heads, spec.head_dim, spec.state_size), jnp.float32)
        conv = jnp.zeros((rows, spec.conv_width - 1, spec.conv_size), normed.dtype)
        return mamba2.scan(weights, normed, state, conv, lengths, lengths, spec)[0]

    return logits(params, walk(params, tokens, valid, config, mix), config)
