"""The model of `hybrid_7b.py`: its configuration, weights made on the device, and memory for an engine."""

from __future__ import annotations

import dataclasses
import functools
import math
import os

import jax
import jax.numpy as jnp
import numpy as np

from hybrid_jax.config import EngineConfig, ModelConfig
from hybrid_jax.geometry import make_geometry
from hybrid_jax.kinds.tensors import Stored
from hybrid_jax.models import FAMILIES, config_from_hf
from hybrid_jax.models.known import known, load_known
from hybrid_jax.sizing.budget import split_memory

TINY = {  # two layers with each mixer, for the smoke run
    "hybrid_override_pattern": "M*-M*",
    "num_hidden_layers": 5,
    "hidden_size": 32,
    "intermediate_size": 64,
    "vocab_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attention_head_dim": 16,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
    "n_groups": 2,
    "max_position_embeddings": 1024,
}
TO_RESIDUAL = ("out", "out_proj", "down")  # matrices whose products are added to the residual
MEMORY_SHARE = "0.92"  # of the device, for JAX; the rest is the driver's and the libraries'
WORKSPACE = 4 << 30  # device memory left to activations and the compiler's own


def hybrid(name: str = "hybrid_7b", *, tiny: bool) -> ModelConfig:
    """A model of `configs/models` by its folder; or one like the 7B hybrid that is small enough for a CPU."""
    return config_from_hf(known()["hybrid_7b"] | TINY) if tiny else load_known(name)


# --- weights --------------------------------------------------------------------------------------


def make_weights(config: ModelConfig, dtype: str, seed: int = 0) -> dict:
    """Random weights, made on the device; A_log, D and dt_bias float32. One program per shape and kind.

    Drawn as `models.initialize.random_params` draws on the host: every block's update stays near 1, so
    activations stay finite through all layers.
    """
    stored = FAMILIES[config.family].stored(config)
    leaves, tree = jax.tree_util.tree_flatten_with_path(
        stored, is_leaf=lambda leaf: isinstance(leaf, Stored)
    )
    depth = sum(len(layer.blocks) for layer in config.layers)
    key, params = jax.random.key(seed), []
    for index, (path, leaf) in enumerate(leaves):
        name = path[-1].key
        scale = 1 / math.sqrt(2 * depth) if name in TO_RESIDUAL else 1.0
        if name == "embed":
            scale = 0.02 * math.sqrt(config.vocab_size)
        params.append(
            _draw(
                jax.random.fold_in(key, index),
                np.float32(scale),
                kind="matrix" if len(leaf.shape) > 1 and name != "A_log" else name,
                shape=leaf.shape,
                dtype="float32" if leaf.float32 else dtype,
            )
        )
    return jax.block_until_ready(tree.unflatten(params))


@functools.partial(jax.jit, static_argnames=("kind", "shape", "dtype"))
def _draw(key: jax.Array, scale: jax.Array, *, kind: str, shape: tuple, dtype: str) -> jax.Array:
    if kind == "matrix":
        values = jax.random.normal(key, shape) * scale / math.sqrt(shape[-2])
    elif kind == "A_log":
        values = jnp.log(jax.random.uniform(key, shape, minval=1.0, maxval=16.0))
    elif kind == "dt_bias":  # softplus of it: steps of 0.001 to 0.1
        steps = jnp.exp(jax.random.uniform(key, shape, minval=math.log(1e-3), maxval=math.log(0.1)))
        values = steps + jnp.log(-jnp.expm1(-steps))
    elif kind.endswith("bias"):
        values = 0.02 * jax.random.normal(key, shape)
    else:  # D and the norms
        values = 1 + 0.02 * jax.random.normal(key, shape)
    return values.astype(dtype)


# --- memory ---------------------------------------------------------------------------------------


def with_memory(
    config: ModelConfig, engine: EngineConfig, *, tokens: int, sequences: int, checkpoints: int
) -> EngineConfig:
    """The settings with memory for `sequences` of `tokens` tokens and `checkpoints` each."""
    geometry = make_geometry(config, engine)
    pages = geometry.num_pages(tokens) * geometry.frames_per_page
    frames = 3 + sequences * (pages + checkpoints * geometry.state_frames)
    line = 4 * max(geometry.state_frames, 1)  # two lines of the slot table are there in any case
    fixed = split_memory(config, engine, geometry).row_bytes + 2 * line
    return dataclasses.replace(engine, memory=fixed + frames * (geometry.frame_bytes + 4))


def take_most_memory() -> None:
    """Gives most of the device's memory to jax, which must not have begun to use it."""
    if "XLA_CLIENT_MEM_FRACTION" not in os.environ:  # the new name of the same; both are an error
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", MEMORY_SHARE)


def free_bytes() -> int | None:
    """Device memory that engines may take now; None where the device does not say."""
    known = jax.devices()[0].memory_stats() or {}
    if "bytes_limit" not in known:
        return None
    return known["bytes_limit"] - known["bytes_in_use"] - WORKSPACE
