"""Weights that are not finite: they are looked for once a request's numbers are not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from hybrid_jax.models.matrices import place_of

SHOWN_WEIGHTS = 3  # names of damaged weights in an error


def not_finite(params: Any) -> list[str]:
    """Names of the arrays among weights that hold a NaN or an infinity, such as "layers.3.mlp.down"."""
    are_all_finite = jax.jit(lambda array: jnp.isfinite(array).all())
    return [
        place_of(path)
        for path, array in jax.tree.leaves_with_path(params)
        if not are_all_finite(array)
    ]


def words(damaged: Sequence[str], dtype: str) -> str:
    """Where to look if a model's numbers are not finite.

    Args:
        damaged: names of the weights that are not finite.
        dtype: in which the engine computes.
    """
    if damaged:
        more = f" and {len(damaged) - SHOWN_WEIGHTS} more" * (len(damaged) > SHOWN_WEIGHTS)
        names = ", ".join(damaged[:SHOWN_WEIGHTS])
        return f"the weights {names}{more} hold such values: fetch or convert the model again"
    if dtype != "float32":
        return "all weights are finite, so a sum has overflowed: try dtype='float32'"
    return "all weights are finite, so a sum has overflowed: compare config.json and weights with the original"
