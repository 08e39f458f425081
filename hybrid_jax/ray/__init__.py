"""Engines on a Ray cluster: actors, an `LLM` over them, and a stage for Ray Data.

May import: api, config, process, worker.
Packages: numpy, ray.
"""

from __future__ import annotations

from hybrid_jax.process.extras import needs_extra

with needs_extra("ray"):
    import ray as ray  # noqa: F401

from hybrid_jax.ray.actor import LLMActor
from hybrid_jax.ray.data import Generate
from hybrid_jax.ray.replicas import start_llm

__all__ = ["Generate", "LLMActor", "start_llm"]
