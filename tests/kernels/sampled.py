"""Rows to sample, and the tokens that an implementation draws."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from tests.kernels.by_name import sample_tokens

ROWS = 24


def arguments(vocab: int, seed: int = 0, **changes) -> dict:
    """Rows with every mixture of settings; about a third are greedy."""
    rng = np.random.default_rng(seed)
    given = {
        "logits": jnp.asarray(rng.standard_normal((ROWS, vocab)) * 3, jnp.float32),
        "keys": jnp.asarray(rng.integers(0, 2**32, (ROWS, 2), np.uint32)),
        "temperature": jnp.asarray(rng.choice([0, 0.7, 1.0, 2.0], ROWS), jnp.float32),
        "top_k": jnp.asarray(rng.choice([0, 1, 5, 50, vocab + 9], ROWS), jnp.int32),
        "top_p": jnp.asarray(rng.choice([1.0, 0.9, 0.3], ROWS), jnp.float32),
        "min_p": jnp.asarray(rng.choice([0, 0.05, 0.5], ROWS), jnp.float32),
        "banned": jnp.asarray(rng.integers(-1, vocab, (ROWS, 3)), jnp.int32),
    }
    return given | changes


def tokens(given: dict, implementation: str) -> np.ndarray:
    run = functools.partial(sample_tokens, implementation=implementation)
    return np.asarray(jax.jit(run)(**given))
