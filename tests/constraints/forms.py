"""Forms for small vocabularies, and what they allow after some tokens."""

from __future__ import annotations

from hybrid_jax.config import Attention, ModelConfig, residual_layer
from hybrid_jax.config.structured_outputs import StructuredOutputsParams
from tests.constraints.vocabularies import tokens_of


def config_of(vocab_size, eos=()):
    layer = residual_layer(mixers=(Attention(num_heads=1, num_kv_heads=1, head_dim=8),))
    return ModelConfig(
        family="llama",
        vocab_size=vocab_size,
        width=8,
        layers=(layer,),
        max_position=200,
        eos_token_ids=tuple(eos),
    )


def form(**given):
    return StructuredOutputsParams(**given)


def after(constraint, output):
    return set(tokens_of(constraint.mask(output)).tolist())
