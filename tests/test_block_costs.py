"""Blocks of every shape: what their uses cost, counted in the parameters that a walk takes and in its products."""

from __future__ import annotations

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from hybrid_jax.config import MLP, Attention, Block, EngineConfig, Layer, Mamba2, ModelConfig, MoE
from hybrid_jax.costs import model_costs, step_costs, token_costs, weight_bytes
from hybrid_jax.geometry import kv_bytes_per_token, make_geometry
from hybrid_jax.models import decoder
from hybrid_jax.models.initialize import random_params
from hybrid_jax.products.matrix import Matrix
from tests import blocks

EXPERTS = MoE(num_experts=6, top_k=2, width=20, shared_width=12, latent_width=8, bias=True)
BIASED = Attention(num_heads=2, num_kv_heads=1, head_dim=12, qkv_bias=True, out_bias=True)
# Weights whose width is that of what is read, of what is made, or neither.
WIDE = Layer(
    blocks=(
        Block(parts=(BIASED,), reads="joined"),
        Block(parts=(MLP(width=24, bias=True),), reads="joined"),
        Block(parts=(EXPERTS,), reads="joined"),
    )
)
LAYERS = blocks.LAYERS | {"wide": (WIDE, WIDE.again(0), WIDE.again(0))}


def model(layers: tuple[Layer, ...]) -> ModelConfig:
    return ModelConfig(family="blocks", vocab_size=61, width=blocks.WIDTH, layers=layers)


def unshared(config: ModelConfig) -> ModelConfig:
    layers = [
        Layer(blocks=tuple(replace(block, weights=None) for block in layer.blocks))
        for layer in config.layers
    ]
    return replace(config, layers=tuple(layers))


def num_bytes(tree) -> int:
    """Of arrays, and of matrices with what is added to them."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Matrix))
    return sum(
        num_bytes([leaf.arrays, leaf.change])
        if isinstance(leaf, Matrix)
        else math.prod(leaf.shape) * leaf.dtype.itemsize
        for leaf in leaves
    )


@pytest.mark.parametrize("name", LAYERS)
def test_weights_are_held_once_and_read_at_each_use(name):
    config, engine = model(LAYERS[name]), EngineConfig()
    params = jax.eval_shape(lambda: random_params(config, 0))
    assert weight_bytes(config, "float32") == num_bytes(params)
    costs = step_costs(
        config, engine, model_costs(config, make_geometry(config, engine)), on_cpu=True
    )
    used = [decoder.block_params(params, config, index) for index in range(len(config.layers))]
    experts = sum(mixture.num_experts * mixture.expert_bytes for mixture in costs.mixtures)
    read = num_bytes([used, params["norm"], params["head"]])
    assert costs.weight_bytes + experts == read


@pytest.mark.parametrize("name", LAYERS)
def test_each_use_keeps_what_it_has_of_a_token(name):
    config = model(LAYERS[name])
    found = [make_geometry(each, EngineConfig()) for each in (config, unshared(config))]
    assert kv_bytes_per_token(found[0]) == kv_bytes_per_token(found[1])
    assert found[0].states == found[1].states


def test_what_reads_twice_the_width_makes_what_the_stream_takes():
    config = model(LAYERS["wide"])
    params = jax.eval_shape(lambda: random_params(config, 0))
    tokens = jax.ShapeDtypeStruct((2, 5), jnp.int32)
    logits = jax.eval_shape(lambda *given: decoder.forward(*given, config), params, tokens)
    assert logits.shape == (2, 5, config.vocab_size)


def dots(jaxpr) -> int:
    """FLOPs of all products in a program, those of its parts included."""
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            lengths = [eqn.invars[0].aval.shape[axis] for axis in contracted]
            total += 2 * math.prod(lengths) * math.prod(eqn.outvars[0].aval.shape)
        for part in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, "eqns")):
            part = getattr(part, "jaxpr", part)
            total += dots(part) if hasattr(part, "eqns") else 0
    return total


@pytest.mark.parametrize("name", blocks.LAYERS)
def test_flops_are_those_of_the_products_of_each_use(name):
    """Of one token that sees itself alone, with attention in the place of all other mixers, and without biases."""

    def attending(layer: Layer) -> Layer:
        mixers = [blocks.ATTENTION if isinstance(m, Mamba2) else m for m in layer.mixers]
        return layer.with_mixers(replace(mixer, qkv_bias=False) for mixer in mixers)

    config = model(tuple(map(attending, blocks.LAYERS[name])))
    params = jax.eval_shape(lambda: random_params(config, 0))
    forward = jax.make_jaxpr(lambda params, tokens: decoder.forward(params, tokens, config))
    made = dots(forward(params, jax.ShapeDtypeStruct((1, 1), jnp.int32)).jaxpr)
    logits = 2 * config.width * config.vocab_size
    assert token_costs(config, whole=True).flops(1) + logits == made
