"""Drafters by name."""

from __future__ import annotations

from collections.abc import Callable

from hybrid_jax.config import SpeculationConfig
from hybrid_jax.engine.drafters.drafter import Drafter
from hybrid_jax.engine.drafters.given import Given
from hybrid_jax.engine.drafters.layers import Exit, Layers
from hybrid_jax.engine.drafters.ngram import NGram

DRAFTERS: dict[str, Callable[[SpeculationConfig], Drafter]] = {
    "ngram": NGram,
    "suffix": Given,
    "mtp": Layers,
    "draft": Layers,
    "exit": Exit,
}


def drafter_of(config: SpeculationConfig) -> Drafter:
    """The drafter of an engine with this setting."""
    return DRAFTERS[config.method](config)
