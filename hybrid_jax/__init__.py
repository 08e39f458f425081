"""Inference for hybrid language models in JAX.

Names are loaded on first use, so `import hybrid_jax` brings in neither jax nor numpy:

    >>> import hybrid_jax
    >>> sorted(hybrid_jax.__all__)[:3]
    ['BatchSummary', 'CacheConfig', 'CompletionOutput']
"""

from __future__ import annotations

from importlib import import_module

__version__ = "0.1.0"

_HOME = {
    "BatchSummary": "batch",
    "CacheConfig": "config",
    "CompletionOutput": "outputs",
    "Delta": "outputs",
    "EngineConfig": "config",
    "LLM": "llm",
    "Logprob": "outputs",
    "ModelConfig": "config",
    "RequestMetrics": "outputs",
    "RequestOutput": "outputs",
    "RequestOutputKind": "sampling_params",
    "SamplingParams": "sampling_params",
    "StructuredOutputsParams": "structured_outputs",
    "load_model": "checkpoint",
    "run_batch": "batch",
}

__all__ = sorted(_HOME)


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'hybrid_jax' has no attribute {name!r}")
    value = getattr(import_module(f"hybrid_jax.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
