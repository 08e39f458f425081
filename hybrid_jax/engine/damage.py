"""Weights that are not finite: they are looked for once a request's numbers are not."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def not_finite(params: Any) -> list[str]:
    """Names of the arrays among weights that hold a NaN or an infinity, such as "layers.3.mlp.down"."""
    are_all_finite = jax.jit(lambda array: jnp.isfinite(array).all())
    return [
        jax.tree_util.keystr(path, simple=True, separator=".")
        for path, array in jax.tree.leaves_with_path(params)
        if not are_all_finite(array)
    ]
