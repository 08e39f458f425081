"""A digest that tells models apart."""

from __future__ import annotations

import hashlib
from typing import Any, Protocol

import jax
import numpy as np

from hybrid_jax.config import ModelConfig
from hybrid_jax.process.own_settings import own_settings

SAMPLES = 256  # values read of each array of weights


@own_settings()
def weights_digest(config: ModelConfig, params: Any) -> str:
    """A digest of a model's shape and of a sample of every array of its weights.

    It reads about `SAMPLES` values of each array, so it is quick for any size. Two checkpoints that differ in a few
    single values may have the same digest.
    """
    digest = hashlib.blake2b(repr(config).encode(), digest_size=16)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        digest.update(f"{jax.tree_util.keystr(path)} {leaf.shape} {leaf.dtype}".encode())
        digest.update(sample(leaf, SAMPLES).tobytes())
    return digest.hexdigest()


class Sampled(Protocol):
    """An array that gives samples itself, because it is in parts."""

    def sample(self, count: int) -> np.ndarray:
        """As `sample` below."""


def sample(leaf: jax.Array | Sampled, count: int) -> np.ndarray:
    """About `count` values spread over an array. On a CPU the array is not copied for this."""
    if not isinstance(leaf, jax.Array | np.ndarray):
        return leaf.sample(count)
    flat = (np.asarray(leaf) if jax.default_backend() == "cpu" else leaf).reshape(-1)
    return np.asarray(flat[:: max(1, flat.size // count)])
