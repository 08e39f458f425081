"""The static data that the steps of an engine are specialised on."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax.numpy as jnp

from hybrid_jax.config import Attention, ModelConfig
from hybrid_jax.geometry import Geometry, KVPlace, StatePlace


@dataclass(frozen=True)
class Model:
    """What a step is specialised on; hashable, and static under jit.

    Attributes:
        kernels: "xla" or "pallas": the implementation in `pallas_kernels` of which the step is made.
        scan, sampling: which kernels scan prompts, and which draw tokens, if the step is made of kernels: "pallas" or
            "triton".
    """

    config: ModelConfig
    geometry: Geometry
    kernels: str = "xla"
    scan: str = "pallas"
    sampling: str = "pallas"

    @functools.cached_property
    def places(self) -> dict[tuple[int, int], KVPlace | StatePlace]:
        """Where each mixer has what it caches, by its layer and its number among the layer's mixers."""
        kv, states = iter(self.geometry.kv), iter(self.geometry.states)
        return {
            (index, number): next(kv if isinstance(mixer, Attention) else states)
            for index, layer in enumerate(self.config.layers)
            for number, mixer in enumerate(layer.mixers)
        }

    @property
    def sampler(self) -> str:
        """What draws tokens: "xla", "pallas" or "triton"."""
        return self.sampling if self.kernels == "pallas" else "xla"

    @property
    def activation_dtype(self) -> jnp.dtype:
        """The dtype of activations, KV pages and records."""
        return jnp.dtype(self.geometry.dtype)
