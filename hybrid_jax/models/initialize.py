"""Random weights of the right shapes: for training from scratch, tests and studies."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from hybrid_jax.config import MLP, Attention, Mamba2, ModelConfig, MoE


def random_params(config: ModelConfig, seed: int, dtype: str = "float32") -> dict:
    """Draws weights: matrices N(0, 1 / fan_in), outputs scaled down with depth, decay as Mamba-2 publishes.

    Args:
        config: the model.
        seed: of numpy's generator; the same seed gives the same weights everywhere.
        dtype: dtype of the weights; A_log, D, dt_bias and router_bias stay float32.
    """
    rng = np.random.default_rng(seed)
    depth = sum(bool(s.mixers) + (s.mlp is not None) for s in config.layers)

    def matrix(*shape: int, scale: float = 1.0) -> jax.Array:
        std = scale / math.sqrt(shape[-2])
        return jnp.asarray(rng.standard_normal(shape, np.float32) * std, dtype)

    def ones(size: int) -> jax.Array:
        return jnp.ones(size, dtype)

    def zeros(*shape: int) -> jax.Array:
        return jnp.zeros(shape, dtype)

    out_scale = 1 / math.sqrt(2 * depth)

    def attention(spec: Attention) -> dict:
        q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        params = {
            "qkv": matrix(config.width, q + 2 * kv),
            "out": matrix(q, config.width, scale=out_scale),
        }
        if spec.qkv_bias:
            params["qkv_bias"] = zeros(q + 2 * kv)
        if spec.out_bias:
            params["out_bias"] = zeros(config.width)
        if spec.qk_norm:
            params |= {"q_norm": ones(spec.head_dim), "k_norm": ones(spec.head_dim)}
        return params

    def mamba2(spec: Mamba2) -> dict:
        dt = np.exp(rng.uniform(math.log(1e-3), math.log(1e-1), spec.num_heads))
        params = {
            "in_proj": matrix(config.width, spec.proj_size),
            "conv": matrix(spec.conv_width, spec.conv_size),
            "A_log": jnp.asarray(np.log(rng.uniform(1, 16, spec.num_heads)), jnp.float32),
            "D": jnp.ones(spec.num_heads, jnp.float32),
            "dt_bias": jnp.asarray(dt + np.log(-np.expm1(-dt)), jnp.float32),
            "norm": ones(spec.inner_size),
            "out_proj": matrix(spec.inner_size, config.width, scale=out_scale),
        }
        if spec.conv_bias:
            params["conv_bias"] = zeros(spec.conv_size)
        if spec.proj_bias:
            params |= {"in_bias": zeros(spec.proj_size), "out_bias": zeros(config.width)}
        return params

    def mlp(width: int, kind: str, bias: bool) -> dict:
        hidden = 2 * width if kind == "gated_silu" else width
        params = {
            "up": matrix(config.width, hidden),
            "down": matrix(width, config.width, scale=out_scale),
        }
        if bias:
            params |= {"up_bias": zeros(hidden), "down_bias": zeros(config.width)}
        return params

    def moe(spec: MoE) -> dict:
        hidden = 2 * spec.width if spec.kind == "gated_silu" else spec.width
        inner, count = spec.latent_width or config.width, spec.num_experts
        params = {
            "router": matrix(config.width, count),
            "up": matrix(count, inner, hidden),
            "down": matrix(count, spec.width, inner, scale=out_scale),
        }
        if spec.routing == "sigmoid":
            params["router_bias"] = jnp.zeros(count, jnp.float32)
        if spec.bias:
            params |= {"up_bias": zeros(count, hidden), "down_bias": zeros(count, inner)}
        if spec.shared_width:
            params["shared"] = mlp(spec.shared_width, spec.kind, spec.bias)
        if spec.latent_width:
            params["latent_down"] = matrix(config.width, spec.latent_width)
            params["latent_up"] = matrix(spec.latent_width, config.width)
            if spec.bias:
                params["latent_down_bias"] = zeros(spec.latent_width)
                params["latent_up_bias"] = zeros(config.width)
        return params

    def layer(spec) -> dict:
        if spec.weights_of is not None:
            return {}
        params = {}
        if spec.mixers:
            params["norm"] = ones(config.width)
            params["mixers"] = [
                attention(m) if isinstance(m, Attention) else mamba2(m) for m in spec.mixers
            ]
        if spec.mlp is not None:
            params["mlp_norm"] = ones(config.width)
            is_mlp = isinstance(spec.mlp, MLP)
            params["mlp"] = (
                mlp(spec.mlp.width, spec.mlp.kind, spec.mlp.bias) if is_mlp else moe(spec.mlp)
            )
        return params

    params = {
        "embed": matrix(config.vocab_size, config.width, scale=math.sqrt(config.vocab_size) * 0.02),
        "layers": [layer(spec) for spec in config.layers],
        "norm": ones(config.width),
    }
    if not config.tie_embeddings:
        params["head"] = matrix(config.width, config.vocab_size)
    return params
