"""Inference for hybrid language models in JAX.

Names are loaded on first use, so `import hybrid_jax` brings in neither jax nor numpy:

    >>> import hybrid_jax
    >>> sorted(hybrid_jax.__all__)[:3]
    ['BatchSummary', 'CacheConfig', 'CompletionOutput']
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

# Type checkers and editors do not read `_HOMES`. To them, "as" says that a name is public.
if TYPE_CHECKING:
    from hybrid_jax.api.llm import LLM as LLM
    from hybrid_jax.api.outputs import CompletionOutput as CompletionOutput
    from hybrid_jax.api.outputs import Delta as Delta
    from hybrid_jax.api.outputs import Logprob as Logprob
    from hybrid_jax.api.outputs import RequestMetrics as RequestMetrics
    from hybrid_jax.api.outputs import RequestOutput as RequestOutput
    from hybrid_jax.api.reading import Score as Score
    from hybrid_jax.batch import BatchSummary as BatchSummary
    from hybrid_jax.batch import run_batch as run_batch
    from hybrid_jax.config import CacheConfig as CacheConfig
    from hybrid_jax.config import EngineConfig as EngineConfig
    from hybrid_jax.config import ModelConfig as ModelConfig
    from hybrid_jax.config import SpeculationConfig as SpeculationConfig
    from hybrid_jax.config.sampling_params import RequestOutputKind as RequestOutputKind
    from hybrid_jax.config.sampling_params import SamplingParams as SamplingParams
    from hybrid_jax.config.structured_outputs import (
        StructuredOutputsParams as StructuredOutputsParams,
    )
    from hybrid_jax.inspection.report import ModelReport as ModelReport
    from hybrid_jax.inspection.report import inspect_model as inspect_model
    from hybrid_jax.weights import load_model as load_model
    from hybrid_jax.weights import save_orbax as save_orbax

__version__ = "0.1.0"

_HOMES = {
    "api.llm": ("LLM",),
    "api.reading": ("Score",),
    "api.outputs": ("CompletionOutput", "Delta", "Logprob", "RequestMetrics", "RequestOutput"),
    "batch": ("BatchSummary", "run_batch"),
    "config": ("CacheConfig", "EngineConfig", "ModelConfig", "SpeculationConfig"),
    "config.sampling_params": ("RequestOutputKind", "SamplingParams"),
    "config.structured_outputs": ("StructuredOutputsParams",),
    "inspection.report": ("ModelReport", "inspect_model"),
    "weights": ("load_model", "save_orbax"),
}

__all__ = sorted(name for names in _HOMES.values() for name in names)

if not TYPE_CHECKING:  # for a checker it would make every wrong name a right one

    def __getattr__(name: str) -> object:
        home = next((home for home, names in _HOMES.items() if name in names), None)
        if home is None:
            raise AttributeError(f"module 'hybrid_jax' has no attribute {name!r}")
        value = getattr(import_module(f"hybrid_jax.{home}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
