"""The layer stack over whole sequences: no cache, no pages; training and tests use it as the definition.

Parameters of a model: {"embed": [V, D], "layers": [layer, ...], "norm": [D], "head": [D, V] unless tied}.
A layer: {"norm": [D], "mixers": [mixer, ...]} if it has mixers, {"mlp_norm": [D], "mlp": {...}} if it has
an mlp; a layer that shares weights is an empty dict.

A head for multi-token prediction, "mtp": norms of embeddings and of hidden states "embed_norm", "hidden_norm" [D],
"in_proj" [2 D, D] of both, the embedding first, and its own "layers" and "norm".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from hybrid_jax.config import (
    MLP,
    Attention,
    GatedDelta,
    Mamba1,
    Mamba2,
    Mixer,
    ModelConfig,
    MoE,
    ShortConv,
)
from hybrid_jax.layers import attention, gated_delta, mamba1, mamba2, short_conv
from hybrid_jax.layers.linear import LINEARS, LINEARS_IN_PARTS, linear_transposed
from hybrid_jax.layers.mlp import mlp, moe
from pallas_kernels.operands import whole
from pallas_kernels.rmsnorm import residual_rmsnorm
from pallas_kernels.rmsnorm.xla import residual_sum, rms_norm

# From a mixer's weights, its normed inputs [B, T, D], its spec, and its layer with its number among the layer's mixers,
# the mixer's update [B, T, D], or parts of it.
Mix = Callable[[dict, jax.Array, Mixer, tuple[int, int]], jax.Array]


class Stream(NamedTuple):
    """The residual stream between two layers.

    Attributes:
        h: [B, T, D]. update: what the last block adds to it, in parts or not; None before the first block.
    """

    h: jax.Array
    update: jax.Array | None


def layer_params(params: dict, index: int, config: ModelConfig) -> dict:
    """Weights of one layer, following `weights_of`."""
    source = config.layers[index].weights_of
    return params["layers"][index if source is None else source]


def enter_block(
    h: jax.Array,
    update: jax.Array | None,
    weight: jax.Array,
    valid: jax.Array | None,
    dtype: jnp.dtype,
    config: ModelConfig,
    kernels: str,
) -> tuple[jax.Array, jax.Array]:
    """The residual stream with the last block's update in it, if there was one, and the block's normed input."""
    if update is None:
        return h, rms_norm(h, weight, config.norm_eps).astype(dtype)
    return residual_rmsnorm(
        *(h, update, weight),
        eps=config.norm_eps,
        multiplier=config.residual_multiplier,
        valid=valid,
        dtype=dtype,
        implementation=kernels,
    )


def activation_dtype(params: dict) -> jnp.dtype:
    """The dtype in which blocks compute: that of the embeddings. Some weights are kept wider."""
    return params["embed"].dtype


def mix_all(
    params: list[dict], normed: jax.Array, index: int, mixers: tuple[Mixer, ...], mix: Mix
) -> jax.Array:
    """The sum of the outputs of a layer's mixers; the output of a single mixer as it is, in parts or not."""
    updates = []
    for number, (part, mixer) in enumerate(zip(params, mixers, strict=True)):
        with jax.named_scope(type(mixer).__name__.lower()):
            updates.append(mix(part, normed, mixer, (index, number)))
    if len(updates) == 1:
        return updates[0]
    first, *others = (whole(update, normed.ndim, normed.dtype) for update in updates)
    return sum(others, first)


def _mlp(params: dict, normed: jax.Array, valid: jax.Array, spec: MLP, kernels: str) -> jax.Array:
    return mlp(params, normed, spec.kind, LINEARS[kernels], LINEARS_IN_PARTS[kernels])


def _moe(params: dict, normed: jax.Array, valid: jax.Array, spec: MoE, kernels: str) -> jax.Array:
    return moe(params, normed, valid, spec, LINEARS[kernels], kernels)


# By the class of the spec. Each mixer takes whole sequences from a zero state, which is the definition that engines are
# tested against: weights, normed inputs [B, T, D], positions int32[B, T], lengths int32[B], spec. A feed-forward block
# takes weights, normed inputs, valid bool[B, T], spec, and `kernels` as in `walk`.
MIXERS: dict[type, Callable[..., jax.Array]] = {
    Attention: attention.whole,
    Mamba2: mamba2.whole,
    GatedDelta: gated_delta.whole,
    ShortConv: short_conv.whole,
    Mamba1: mamba1.whole,
}
FEED_FORWARD: dict[type, Callable[..., jax.Array]] = {MLP: _mlp, MoE: _moe}


def enter(params: dict, tokens: jax.Array, valid: jax.Array, config: ModelConfig) -> Stream:
    """The stream in front of the first layer; arguments as for `walk`."""
    h = params["embed"][jnp.where(valid, tokens, 0)]
    if config.residual_in_fp32:
        h = h.astype(jnp.float32)
    if config.embedding_multiplier != 1.0:
        h = h * config.embedding_multiplier
    return Stream(jnp.where(valid[..., None], h, 0), None)


def through(
    params: dict,
    stream: Stream,
    valid: jax.Array,
    layers: range,
    config: ModelConfig,
    mix: Mix,
    kernels: str = "xla",
) -> Stream:
    """The stream behind some layers; arguments as for `walk`."""
    (h, update), dtype = stream, activation_dtype(params)
    for index in layers:
        spec, weights, real = config.layers[index], layer_params(params, index, config), valid
        if spec.mixers:
            h, normed = enter_block(h, update, weights["norm"], real, dtype, config, kernels)
            update = mix_all(weights["mixers"], normed, index, spec.mixers, mix)
            real = None  # once a layer is enough
        if spec.mlp is not None:
            with jax.named_scope("mlp"):
                given = (h, update, weights["mlp_norm"], real, dtype)
                h, normed = enter_block(*given, config, kernels)
                run = FEED_FORWARD[type(spec.mlp)]
                update = run(weights["mlp"], normed, valid, spec.mlp, kernels)
    return Stream(h, update)


def leave(params: dict, stream: Stream, valid: jax.Array, config: ModelConfig) -> jax.Array:
    """The last hidden state [B, T, D] before the last norm, from the stream behind the last layer."""
    h = residual_sum(*stream, activation_dtype(params), config.residual_multiplier)
    return jnp.where(valid[..., None], h, 0)


def walk(
    params: dict,
    tokens: jax.Array,
    valid: jax.Array,
    config: ModelConfig,
    mix: Mix,
    kernels: str = "xla",
) -> jax.Array:
    """From token ids to the last hidden state [B, T, D] before the last norm; the caller keeps what a mixer remembers.

    Args:
        tokens: int32[B, T]. valid: bool[B, T] tokens that are real; hidden states of the others are 0.
        mix: called for every mixer in order.
        kernels: "xla" or "pallas", the implementation of the sums and norms between blocks.
    """
    stream, layers = enter(params, tokens, valid, config), range(len(config.layers))
    stream = through(params, stream, valid, layers, config, mix, kernels)
    return leave(params, stream, valid, config)


def logits(params: dict, h: jax.Array, config: ModelConfig, kernels: str = "xla") -> jax.Array:
    """h [..., D] before the last norm to float32 logits [..., V]; `kernels` as in `walk`."""
    h = rms_norm(h, params["norm"], config.norm_eps).astype(activation_dtype(params))
    return head_logits(params, h, config, kernels)


def head_logits(params: dict, h: jax.Array, config: ModelConfig, kernels: str = "xla") -> jax.Array:
    """`logits` of what is normed already."""
    if config.tie_embeddings:
        out = linear_transposed(h, params["embed"])
    else:
        out = LINEARS[kernels](h, params["head"])
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
    if lengths is None:
        lengths = jnp.full(tokens.shape[0], tokens.shape[1], jnp.int32)
    valid, mix = whole_sequences(tokens, lengths)
    return logits(params, walk(params, tokens, valid, config, mix), config)


def whole_sequences(tokens: jax.Array, lengths: jax.Array) -> tuple[jax.Array, Mix]:
    """For whole sequences from nothing: which of the tokens int32[B, T] are real, bool[B, T], and how layers mix them.

    Args:
        lengths: int32[B] valid tokens per row.
    """
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)

    def mix(weights: dict, normed: jax.Array, spec: Mixer, where: tuple[int, int]) -> jax.Array:
        return MIXERS[type(spec)](weights, normed, positions, lengths, spec)

    return positions < lengths[:, None], mix
