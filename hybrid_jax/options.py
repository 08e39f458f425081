"""What `LLM` is told: keywords to an `EngineConfig`, the dtype, and the model's own sampling defaults."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import jax

from hybrid_jax.checkpoint import read_json
from hybrid_jax.config import CacheConfig, EngineConfig
from hybrid_jax.sampling_params import SamplingParams
from hybrid_jax.sizes import parse_size

CACHES = ("off", "lru")
LATER_CACHES = ("marconi", "adaptive")
# Options of features that do not exist yet, and the one value of each that asks for nothing.
LATER_OPTIONS = {
    "speculation": "off",
    "quantize": None,
    "mesh": None,
    "host_memory": None,
    "cache_dir": None,
}
# What other engines call it.
OTHER_NAMES = {
    "enable_prefix_caching": "cache",
    "gpu_memory_utilization": "memory",
    "max_num_batched_tokens": "prefill_tokens",
    "max_num_seqs": "max_rows",
    "tensor_parallel_size": "mesh",
}


def engine_options(given: Mapping[str, Any], *, dtype: str) -> EngineConfig:
    """Keywords of `LLM` to an `EngineConfig`; None leaves a field at its default.

    Raises:
        ValueError, NotImplementedError, TypeError: as `LLM` describes.
    """
    options = dict(given)
    for name, nothing in LATER_OPTIONS.items():
        if (value := options.pop(name, nothing)) != nothing:
            raise NotImplementedError(f"LLM: {name}={value!r} is not built yet; leave it out")
    known = {field.name for field in fields(EngineConfig)} - {"dtype"}
    for name in options:
        if name not in known:
            other = OTHER_NAMES.get(name)
            hint = f"did you mean {other}?" if other else f"it has {', '.join(sorted(known))}"
            raise TypeError(f"LLM: unknown option {name!r}; {hint}")
    options = {name: value for name, value in options.items() if value is not None}
    if "memory" in options:
        options["memory"] = parse_size(options["memory"], name="memory")
    if "cache" in options:
        options["cache"] = _cache_config(options["cache"])
    return EngineConfig(dtype=dtype, **options)


def _cache_config(cache: str | CacheConfig) -> CacheConfig:
    if isinstance(cache, CacheConfig):
        return cache
    if cache in LATER_CACHES:
        raise NotImplementedError(f"LLM: cache={cache!r} is not built yet; use 'lru' or 'off'")
    if cache not in CACHES:
        raise ValueError(f"LLM: cache must be 'lru', 'off' or a CacheConfig, got {cache!r}")
    return CacheConfig(policy=cache)


def resolve_dtype(dtype: str, stored: Callable[[], str]) -> str:
    """ "auto" is float32 on a CPU, which has no fast bfloat16, and elsewhere the stored dtype."""
    if dtype != "auto":
        EngineConfig(dtype=dtype)  # names what is allowed
        return dtype
    if jax.default_backend() == "cpu":
        return "float32"
    return "float32" if stored() == "float32" else "bfloat16"


def default_params(folder: Path) -> SamplingParams:
    """temperature, top_k and top_p of generation_config.json; do_sample false makes it greedy."""
    file = folder / "generation_config.json"
    generation = read_json(file) if file.is_file() else {}
    found = {
        name: generation[name]
        for name in ("temperature", "top_k", "top_p")
        if generation.get(name) is not None
    }
    if generation.get("do_sample") is False:
        found = {"temperature": 0.0}
    try:
        return SamplingParams(**found)
    except ValueError as error:
        raise ValueError(f"LLM: {file}: {error}") from error
