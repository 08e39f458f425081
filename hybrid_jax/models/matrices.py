"""The weights of a model as a step sees them: its matrices with their format, and with what multiplies."""

from __future__ import annotations

from typing import Any

import jax

from hybrid_jax.config import Backend, ModelConfig
from hybrid_jax.kinds.kind import Weight
from hybrid_jax.kinds.table import model_weights
from hybrid_jax.products.matrix import Matrix


def place_of(path: jax.tree_util.KeyPath) -> str:
    """A path among a model's parameters, as `ModelConfig.matrices` names it: "layers.5.mixers.0.in_proj"."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def with_matrices(params: dict, config: ModelConfig, backend: Backend) -> dict:
    """A model's parameters, or tracers of them, with a `Matrix` in place of the arrays of each."""
    return bound(params, model_weights(config), backend)


def bound(params: Any, weights: Any, backend: Backend) -> Any:
    """Parameters with a `Matrix` in place of the arrays of each.

    Args:
        params: arrays, or tracers of them. They may have more than `weights` does.
        weights: what they are, in a tree like theirs, such as `kinds.table.model_weights`.
        backend: what multiplies.
    """
    if isinstance(weights, Weight):
        return Matrix(params, weights.format, backend) if weights.is_multiplied else params
    if isinstance(weights, list):
        pairs = zip(params, weights, strict=True)
        return [bound(part, own, backend) for part, own in pairs]
    if isinstance(weights, dict):
        return {name: bound(part, weights.get(name), backend) for name, part in params.items()}
    return params
