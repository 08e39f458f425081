"""Static descriptions of models, caches and engines: frozen, hashable, standard library only.

May import: nothing of the package.
"""

from hybrid_jax.config.engine import (
    CACHE_POLICIES,
    MAX_GRAIN,
    CacheConfig,
    EngineConfig,
    fixed_alpha,
)
from hybrid_jax.config.layers import (
    ACTIVATIONS,
    MLP,
    ROUTINGS,
    Attention,
    FeedForward,
    GatedDelta,
    LayerSpec,
    Mamba1,
    Mamba2,
    Mixer,
    MoE,
    RecurrentMixer,
    Rope,
    RopeScaling,
)
from hybrid_jax.config.model import DTYPES, ModelConfig

__all__ = [
    "ACTIVATIONS",
    "CACHE_POLICIES",
    "DTYPES",
    "MAX_GRAIN",
    "MLP",
    "ROUTINGS",
    "Attention",
    "CacheConfig",
    "EngineConfig",
    "FeedForward",
    "GatedDelta",
    "LayerSpec",
    "Mamba1",
    "Mamba2",
    "Mixer",
    "MoE",
    "ModelConfig",
    "RecurrentMixer",
    "Rope",
    "RopeScaling",
    "fixed_alpha",
]
