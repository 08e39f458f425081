"""What an `LLM` is made of: weights, the engine's settings on this device, and the engine.

Everything for which a new `LLM` needs jax stands here. `api.llm` loads this module when an `LLM` is made, so that
importing `LLM` loads no jax.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import numpy as np

from hybrid_jax.api.options import named_as_llm
from hybrid_jax.api.progress_bar import ProgressOption, progress_of
from hybrid_jax.api.threads.engine_thread import wait_for_dropped
from hybrid_jax.byte_sizes import format_size
from hybrid_jax.config import EngineConfig, ModelConfig, resolve_dtype
from hybrid_jax.config.backend import interpreted
from hybrid_jax.config.speculation import drafting_model
from hybrid_jax.engine.engine import Engine
from hybrid_jax.engine.programs.compile_cache import enable_compile_cache
from hybrid_jax.engine.programs.store import open_store
from hybrid_jax.engine.this_device import first_device, first_devices, held_bytes, this_device
from hybrid_jax.mesh.shards import Placing
from hybrid_jax.mesh.split import shard_config
from hybrid_jax.process.own_settings import own_settings
from hybrid_jax.sizing.defaults import choose_settings
from hybrid_jax.sizing.room import find_room, require_room
from hybrid_jax.text.tokenizer import Tokenizer
from hybrid_jax.weights import Dtype, add_second, open_second, open_with_drafter

LOG = logging.getLogger("hybrid_jax.engine")
UNOPTIMIZED = "jax_disable_most_optimizations"
SECONDS_FOR_DROPPED = 10.0  # how long a new object waits for the memory of dropped ones


class Started(NamedTuple):
    """A model in memory and its engine.

    Attributes:
        stored_dtype: of most of its weights in the files; that of the engine if they were in memory already.
    """

    config: ModelConfig
    params: Any
    weight_bytes: int
    engine_config: EngineConfig
    engine: Engine
    stored_dtype: str


@named_as_llm()
@own_settings()
def start_folder(
    folder: Path,
    settings: Mapping[str, Any],
    *,
    dtype: str,
    progress: ProgressOption,
    tokenizer: Tokenizer | None,
    devices: Sequence[jax.Device] | None = None,
) -> Started:
    """Loads the model of a directory, and starts an engine for it.

    Args:
        folder: as `hybrid_jax.weights.load_model` reads it.
        settings: as `engine_options` returns them.
        dtype, progress: as in `LLM`.
        tokenizer: whose end token ends answers too.
        devices: those that the model is divided over if `settings` says so; None for the first ones.

    Raises:
        As `LLM`.
    """
    opened = open_with_drafter(folder, settings.get("speculation"))
    stored_dtype, device = opened.config.dtype, first_device()
    dtype = resolve_dtype(dtype, stored_dtype, on_cpu=device.platform == "cpu")
    wait_for_dropped(SECONDS_FOR_DROPPED)
    engine_config = choose_engine_config(opened.config, settings, dtype=dtype)
    programs, used = enable_compile_cache(device=device), _dividing(engine_config, devices)
    no_room = device_memory_for("the weights", "use dtype='bfloat16' or a smaller model")
    with progress_of(progress, "loading", unit=1e-6) as report, no_room:
        put = None if used is None else Placing(used)
        config, params = opened.load(dtype=cast(Dtype, dtype), progress=report, put=put)
    config = with_end_token(config, tokenizer)
    return _started(config, params, engine_config, programs, stored_dtype, used)


@named_as_llm()
@own_settings()
def start_params(
    config: ModelConfig,
    params: Any,
    settings: Mapping[str, Any],
    *,
    dtype: str,
    tokenizer: Tokenizer | None,
    devices: Sequence[jax.Device] | None = None,
) -> Started:
    """Starts an engine for weights that are in memory already. The arguments are those of `start_folder`.

    Raises:
        As `LLM`.
    """
    programs = enable_compile_cache(device=first_device())
    wait_for_dropped(SECONDS_FOR_DROPPED)
    params = jax.tree.map(_of_32_bits, params)
    second = open_second(config, settings.get("speculation"))
    config, params = add_second(config, params, second, dtype=dtype)
    engine_config = choose_engine_config(config, settings, dtype=dtype, params=params)
    config = with_end_token(config, tokenizer)
    used = _dividing(engine_config, devices)
    return _started(config, params, engine_config, programs, dtype, used)


def with_end_token(config: ModelConfig, tokenizer: Tokenizer | None) -> ModelConfig:
    """A model whose answers also end at the tokenizer's end token.

    Models that were trained to talk often have the config.json of their base model, and the token that ends an answer
    stands only beside the tokenizer.
    """
    token = None if tokenizer is None else tokenizer.eos_token_id
    known = config.eos_token_ids
    if token is None or token in known or not 0 <= token < config.vocab_size:
        return config
    return replace(config, eos_token_ids=(*known, token))


def _of_32_bits(leaf: Any) -> Any:
    """An array of weights, in 32 bits as programs take it, even if a caller with jax_enable_x64 made it of 64."""
    dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
    return leaf if leaf.dtype == dtype else jax.device_put(np.asarray(leaf).astype(dtype))


def _dividing(
    engine: EngineConfig, devices: Sequence[jax.Device] | None
) -> Sequence[jax.Device] | None:
    """The devices that divide the model; None for one device."""
    return (devices or first_devices(engine.tp)) if engine.tp > 1 else None


def _started(
    config: ModelConfig,
    params: Any,
    engine_config: EngineConfig,
    programs: Path | None,
    stored_dtype: str,
    devices: Sequence[jax.Device] | None,
) -> Started:
    if jax.config.values.get(
        UNOPTIMIZED
    ):  # jax reads it for the whole process whenever it compiles
        LOG.warning(
            "%s is set: programs are slow, and their last bits may differ; unset it", UNOPTIMIZED
        )
    device = first_device()
    if slow := interpreted(engine_config.kernels, device.platform):
        LOG.warning("kernels='pallas' are %s", slow)
    with device_memory_for("arena, rings and tables", "lower memory or max_rows"):
        store = open_store(programs, device, devices or ())
        engine = Engine(config, params, engine_config, store, devices)
    return Started(config, params, held_bytes(params), engine_config, engine, stored_dtype)


def choose_engine_config(
    model: ModelConfig, options: Mapping[str, Any], *, dtype: str, params: Any = None
) -> EngineConfig:
    """An engine's settings on this device. Refuses a model that does not fit its memory, before anything is allocated.

    Args:
        model: what is to run.
        options: as `engine_options` returns them.
        dtype: of the weights.
        params: the weights if they are in memory already; None for those that are about to be read.

    Raises:
        ValueError: as `require_room` and `split_memory`.
    """
    shards = options.get("tp", 1)
    model = shard_config(drafting_model(model, options.get("speculation")), shards)
    held = None if params is None or shards > 1 else held_bytes(params)
    device = this_device(held=held or 0, shards=shards)
    choose = functools.partial(choose_settings, model, device, options, dtype=dtype, held=held)
    engine = choose({})
    require_room(find_room(model, engine, device, held=held, choose=choose))
    return engine


@contextmanager
def device_memory_for(what: str, remedy: str) -> Iterator[None]:
    """Turns a device's "out of memory" into a ValueError that says what did not fit, and what helps."""
    try:
        yield
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if not isinstance(error, MemoryError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        known = first_device().memory_stats() or {}
        has = f" of {format_size(known['bytes_limit'])}" if "bytes_limit" in known else ""
        raise ValueError(
            f"LLM: the device's memory{has} has no room for {what}; {remedy}"
        ) from error
