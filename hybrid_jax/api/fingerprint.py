"""Which model this is, as a short digest: for files that must only go on with the model they began with."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import jax
import numpy as np

from hybrid_jax.config import ModelConfig
from hybrid_jax.text.tokenizer import Tokenizer

SAMPLES = 256  # values read of each array of weights


def fingerprint(config: ModelConfig, params: Any, tokenizer: Tokenizer | None) -> str:
    """Digest of a model's shape, of a sample of every array of its weights, and of its tokenizer.

    Reads no more than `SAMPLES` values of an array, so it is quick for any size; two checkpoints that
    differ in a few single values may look the same.
    """
    digest = hashlib.blake2b(repr(config).encode(), digest_size=16)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        digest.update(f"{jax.tree_util.keystr(path)} {leaf.shape} {leaf.dtype}".encode())
        digest.update(_sample(leaf).tobytes())
    if tokenizer is not None:
        digest.update(tokenizer.backend.to_str().encode())
        beside = [tokenizer.special_tokens, tokenizer.chat_templates]
        digest.update(json.dumps(beside, sort_keys=True).encode())
    return digest.hexdigest()


def _sample(leaf: jax.Array) -> np.ndarray:
    """Values spread over an array; on a CPU the array is looked at where it lies."""
    flat = (np.asarray(leaf) if jax.default_backend() == "cpu" else leaf).reshape(-1)
    return np.asarray(flat[:: max(1, flat.size // SAMPLES)])
