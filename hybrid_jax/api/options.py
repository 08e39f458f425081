"""What `LLM` is told: keywords to an `EngineConfig`, the dtype, and the model's own sampling defaults."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, TypedDict

import jax

from hybrid_jax.checkpoint import read_json
from hybrid_jax.config import (
    CACHE_POLICIES,
    CacheConfig,
    EngineConfig,
    ModelConfig,
    fixed_alpha,
)
from hybrid_jax.config.other_names import LLM_OPTIONS
from hybrid_jax.config.sampling_params import SamplingParams
from hybrid_jax.engine.this_device import first_device, held_bytes, this_device
from hybrid_jax.machine import peak_resident_bytes
from hybrid_jax.sizes import format_size, parse_size
from hybrid_jax.sizing.defaults import chooser
from hybrid_jax.sizing.room import find_room, require_room

DTYPES = ("auto", "float32", "bfloat16")
# Options of features that do not exist yet, and the one value of each that asks for nothing.
LATER_OPTIONS = {
    "speculation": "off",
    "quantize": None,
    "mesh": None,
    "host_memory": None,
    "cache_dir": None,
}
# What generation_config.json says of sampling, and what it is called here.
GENERATION_FIELDS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
# What `LLM` takes beside the fields of `EngineConfig`.
OWN_OPTIONS = ("model", "dtype", "quiet", "progress")


class LaterOptions(TypedDict, total=False):
    """Options of features that do not exist yet: all that a checker lets through is what asks for nothing."""

    speculation: Literal["off"]
    quantize: None
    mesh: None
    host_memory: None
    cache_dir: None


class RareOptions(LaterOptions, total=False):
    """Fields of `EngineConfig` that `LLM` does not write out in its signature; None for the default."""

    grain: int | None
    page_tokens: int | None
    prefill_tokens: int | None
    steps_per_dispatch: int | None
    shapes: Literal["fine", "coarse"] | None
    kernels: Literal["auto", "xla", "pallas"] | None


class EngineOptions(RareOptions, total=False):
    """What `LLM.from_params` takes for an `EngineConfig`, but for its dtype; None for the default."""

    memory: int | str | None
    max_rows: int | None
    max_model_len: int | None
    cache: str | CacheConfig | None
    seed: int | None
    exact: bool | None


class LLMOptions(EngineOptions, total=False):
    """What `LLM` takes beside the model and `progress`."""

    dtype: str
    quiet: bool


def engine_options(
    given: Mapping[str, Any], *, own: Collection[str] = OWN_OPTIONS
) -> dict[str, Any]:
    """Keywords of `LLM` to fields of an `EngineConfig`; those that are None are left to the device's defaults.

    `own` are the keywords that the caller took for itself; one of them may be what a wrong name stands for.

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
            LLM_OPTIONS.refuse(name, {*known, *own})
    options = {name: value for name, value in options.items() if value is not None}
    if "memory" in options:
        options["memory"] = parse_size(options["memory"], name="memory")
    if "cache" in options:
        options["cache"] = _cache_config(options["cache"])
    EngineConfig(**options)  # mistakes show before anything is loaded
    return options


def _cache_config(cache: str | CacheConfig) -> CacheConfig:
    if isinstance(cache, CacheConfig):
        return cache
    if cache not in CACHE_POLICIES and fixed_alpha(cache) is None:
        raise ValueError(
            f"LLM: cache must be one of {', '.join(CACHE_POLICIES)}, or alpha:X with a number X >= 0, or a "
            f"CacheConfig, got {cache!r}"
        )
    return CacheConfig(policy=cache)


def resolve_dtype(dtype: str, stored: Callable[[], str]) -> str:
    """ "auto" is float32 on a CPU, which has no fast bfloat16, and elsewhere the stored dtype."""
    if dtype not in DTYPES:
        raise ValueError(f"LLM: dtype must be auto, float32 or bfloat16, got {dtype!r}")
    if dtype != "auto":
        return dtype
    if first_device().platform == "cpu":
        return "float32"
    return "float32" if stored() == "float32" else "bfloat16"


# --- room for it ----------------------------------------------------------------------------------


def settle(
    model: ModelConfig, options: Mapping[str, Any], *, dtype: str, params: Any = None
) -> EngineConfig:
    """An engine's settings on this device. A model that it has not the memory for is refused before anything is
    allocated.

    Args:
        model: what is to run. options: as `engine_options` gives them. dtype: of the weights.
        params: the weights if they are in memory already; None for those that are about to be read.

    Raises:
        ValueError: as `require_room` and `choose_sizes`.
    """
    held = None if params is None else held_bytes(params)
    device = this_device(held=held or 0)
    choose = chooser(model, device, options, dtype=dtype, held=held)
    engine = choose({})
    require_room(find_room(model, engine, device, held=held, choose=choose))
    return engine


def peak_memory_bytes() -> int | None:
    """The most memory in use at one time since the process began, as `RequestMetrics` describes it."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        return peak_resident_bytes()
    return (device.memory_stats() or {}).get("peak_bytes_in_use")


@contextmanager
def device_memory_for(what: str, remedy: str) -> Iterator[None]:
    """Turns a device's "out of memory" into a ValueError that says what found no room, and what helps."""
    try:
        yield
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if not isinstance(error, MemoryError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        known = jax.devices()[0].memory_stats() or {}
        has = f" of {format_size(known['bytes_limit'])}" if "bytes_limit" in known else ""
        raise ValueError(
            f"LLM: the device's memory{has} has no room for {what}; {remedy}"
        ) from error


# --- sampling -------------------------------------------------------------------------------------


def default_params(folder: Path) -> SamplingParams:
    """`GENERATION_FIELDS` of generation_config.json; do_sample false makes it greedy."""
    file = folder / "generation_config.json"
    generation = read_json(file) if file.is_file() else {}
    found = {
        ours: generation[theirs]
        for theirs, ours in GENERATION_FIELDS.items()
        if generation.get(theirs) is not None
    }
    if generation.get("do_sample") is False:
        found["temperature"] = 0.0
    try:
        return SamplingParams(**found)
    except ValueError as error:
        raise ValueError(f"LLM: {file}: {error}") from error
