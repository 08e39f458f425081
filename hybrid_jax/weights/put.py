"""Where weights go, one after the other, as they are read."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np

from hybrid_jax.config import ModelConfig

# From a model, the path of a weight among its parameters, and its numbers, an array on one or several devices; None for
# a weight that is not kept.
Put = Callable[[ModelConfig, jax.tree_util.KeyPath, np.ndarray], jax.Array | None]
