"""What an `LLM` is made of: weights, the engine's settings on this device, and the engine.

Everything for which a new `LLM` needs jax stands here. `api.llm` loads this module when an `LLM` is made, so that
importing `LLM` loads no jax.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import jax
import numpy as np

from hybrid_jax.api.completions import Job
from hybrid_jax.api.options import named_as_llm
from hybrid_jax.api.progress_bar import ProgressOption, progress_of
from hybrid_jax.api.threads.engine_thread import EngineThread, wait_for_dropped
from hybrid_jax.api.threads.front import Front
from hybrid_jax.api.threads.loop import Loop
from hybrid_jax.api.threads.loop_of_hosts import LoopOfHosts
from hybrid_jax.api.threads.prefill_side import PrefillSide
from hybrid_jax.api.threads.replicas import Replicas, routers_here
from hybrid_jax.byte_sizes import format_size
from hybrid_jax.config import EngineConfig, ModelConfig, resolve_dtype
from hybrid_jax.config.backend import interpreted
from hybrid_jax.config.mesh import MeshShape, devices_of, read_mesh
from hybrid_jax.config.speculation import drafting_model
from hybrid_jax.engine.engine import Engine
from hybrid_jax.engine.programs.compile_cache import enable_compile_cache
from hybrid_jax.engine.programs.store import open_store
from hybrid_jax.engine.this_device import first_device, first_devices, held_bytes, this_device
from hybrid_jax.geometry import Geometry
from hybrid_jax.mesh.hosts import Hosts, hosts_of
from hybrid_jax.mesh.shards import Placing
from hybrid_jax.mesh.split import shard_config
from hybrid_jax.process.own_settings import own_settings
from hybrid_jax.sizing.defaults import choose_settings
from hybrid_jax.sizing.room import find_room, require_room
from hybrid_jax.text.tokenizer import Tokenizer
from hybrid_jax.tiers.chain import root_of
from hybrid_jax.tiers.disk import Disk
from hybrid_jax.tiers.form import Form
from hybrid_jax.tiers.hand_over import ENDS, HandOver
from hybrid_jax.weights import Dtype, add_second, open_second, open_with_drafter, with_draft
from hybrid_jax.weights.digest import weights_digest

LOG = logging.getLogger("hybrid_jax.engine")
UNOPTIMIZED = "jax_disable_most_optimizations"
MOST_TRIED = 16  # devices, of which is said whether they divide a model
SECONDS_FOR_DROPPED = 10.0  # how long a new object waits for the memory of dropped ones


class Started(NamedTuple):
    """A model in memory and its engines.

    Attributes:
        weight_bytes: of the first engine. digest: tells its weights from others; it holds them.
        engine_config: of replicas that generate.
        engines: one for each replica.
        stored_dtype: of most of its weights in the files; that of the engine if they were in memory already.
        hand_over: between the first engines, which only compute prompts, and the others; None if all do both.
    """

    config: ModelConfig
    digest: Callable[[], str]
    weight_bytes: int
    engine_config: EngineConfig
    engines: list[Engine]
    stored_dtype: str
    hand_over: HandOver | None = None

    def threads(self, *, record: Callable[[Job], None], quiet: bool) -> Front:
        """What runs calls on the engines. The arguments are those of `Loop`."""
        loops = [_loop(engine, record=record, quiet=quiet) for engine in self.engines]
        if len(loops) == 1:
            return EngineThread(loops[0])
        routers, prefill = routers_here(self.engines), None
        if self.hand_over is not None:
            prefill = PrefillSide(
                self.hand_over,
                routers["prefill"],
                grain=max(engine.geometry.grain for engine in self.engines),
                chunk=self.engines[0].engine_config.prefill_tokens,
            )
        return Replicas(loops, routers=routers, prefill=prefill)


def _loop(engine: Engine, *, record: Callable[[Job], None], quiet: bool) -> Loop:
    if engine.hosts is None:
        return Loop(engine, record=record, quiet=quiet)
    return LoopOfHosts(engine, engine.hosts, record=record, quiet=quiet)


# Makes one end of a hand-over, of an engine's geometry and form.
Side = Callable[[Geometry, Form], Disk]
Chosen = TypeVar("Chosen")
# The devices of a replica; None for wherever jax puts arrays.
Devices = Sequence[jax.Device] | None


@named_as_llm()
@own_settings()
def start_folder(
    folder: Path,
    settings: Mapping[str, Any],
    *,
    dtype: str,
    progress: ProgressOption,
    tokenizer: Tokenizer | None,
    mesh: Any = None,
    prefill: Mapping[str, Any] | None = None,
    sharing: int = 1,
    side: Side | None = None,
) -> Started:
    """Loads the model of a directory, and starts an engine for each replica.

    Args:
        folder: as `hybrid_jax.weights.load_model` reads it.
        settings: as `engine_options` returns them.
        dtype, progress, mesh: as in `LLM`.
        tokenizer: whose end token ends answers too.
        prefill: settings of the replicas that only compute prompts; None for the same.
        sharing: processes that share the memory of this machine, this one included.
        side: in place of a tier on disk, as in `Engine`.

    Raises:
        As `LLM`.
    """
    if side is not None:
        _check_sides(settings)
    opened = open_with_drafter(folder, settings.get("speculation"))
    if (quantize := settings.get("quantize")) is not None:
        opened = opened.quantized(quantize)
    stored_dtype, sides = opened.config.dtype, Sides.of(mesh, settings, prefill)
    replicas = sides.devices(opened.config, mesh)
    hosts, sharing = _hosts(replicas, settings), sharing * len(replicas)
    with _on(replicas[0]):
        device = first_device()
        dtype = resolve_dtype(dtype, stored_dtype, on_cpu=device.platform == "cpu")
        wait_for_dropped(SECONDS_FOR_DROPPED)
        choose = functools.partial(
            choose_engine_config, opened.config, dtype=dtype, sharing=sharing, hosts=hosts
        )
        engine_configs = sides.each(choose)
        programs = enable_compile_cache(device=device)
    no_room = device_memory_for("the weights", "use dtype='bfloat16' or a smaller model")
    loaded = []
    with progress_of(progress, "loading", unit=1e-6) as report, no_room:
        for index, devices in enumerate(replicas):
            put = _placing(devices, engine_configs[index].tp)
            shown = functools.partial(_nth_of, report, index, len(replicas))
            with _on(devices):
                config, params = opened.load(dtype=cast(Dtype, dtype), progress=shown, put=put)
            loaded.append(params)
    config = with_end_token(config, tokenizer)
    return _started(
        config,
        loaded,
        engine_configs,
        programs,
        stored_dtype,
        replicas,
        sides.mesh.prefill,
        sharing=sharing,
        side=side,
        hosts=hosts,
    )


@named_as_llm()
@own_settings()
def start_params(
    config: ModelConfig,
    params: Any,
    settings: Mapping[str, Any],
    *,
    dtype: str,
    tokenizer: Tokenizer | None,
    mesh: Any = None,
    prefill: Mapping[str, Any] | None = None,
) -> Started:
    """Starts engines for weights that are in memory already. The arguments are those of `start_folder`.

    Raises:
        As `LLM`.
    """
    if (name := settings.get("quantize")) is not None:
        raise ValueError(
            f"LLM: quantize={name!r} is for models that are read from files; save these weights with save_orbax, or "
            "leave quantize out"
        )
    second = open_second(config, settings.get("speculation"))
    drafting = config if second is None else with_draft(config, second.config)
    sides = Sides.of(mesh, settings, prefill)
    replicas = sides.devices(drafting, mesh)
    hosts = _hosts(replicas, settings)
    wait_for_dropped(SECONDS_FOR_DROPPED)
    params = jax.tree.map(_of_32_bits, params)
    given, loaded = config, []
    for devices in replicas:
        with _on(devices):
            own, tp = params, 1 if devices is None else len(devices)
            if devices is not None and tp == 1:
                own = jax.device_put(params, devices[0])
            put = _placing(devices, tp)
            config, own = add_second(given, own, second, dtype=dtype, put=put)
        loaded.append(own)
    with _on(replicas[0]):
        programs = enable_compile_cache(device=first_device())
        choose = functools.partial(
            choose_engine_config,
            config,
            dtype=dtype,
            params=loaded[0],
            sharing=len(replicas),
            hosts=hosts,
        )
        engine_configs = sides.each(choose)
    config = with_end_token(config, tokenizer)
    return _started(
        config,
        loaded,
        engine_configs,
        programs,
        dtype,
        replicas,
        sides.mesh.prefill,
        sharing=len(replicas),
        hosts=hosts,
    )


class Sides(NamedTuple):
    """The settings of all replicas.

    Attributes:
        mesh: how many there are, and devices of each.
        settings: of those that generate. prefill: of those that only compute prompts.
    """

    mesh: MeshShape
    settings: Mapping[str, Any]
    prefill: Mapping[str, Any]

    @classmethod
    def of(cls, mesh: Any, settings: Mapping[str, Any], prefill: Mapping[str, Any] | None) -> Sides:
        """Those of a mesh."""
        prefill = settings if prefill is None else prefill
        shape = read_mesh(mesh)._replace(prefill_tp=prefill.get("tp", 1))
        return cls(shape, settings, prefill)

    def each(self, choose: Callable[[Mapping[str, Any]], Chosen]) -> list[Chosen]:
        """What is chosen for each replica."""
        others = choose(self.settings)
        differ = self.mesh.prefill and self.prefill != self.settings
        firsts = choose(self.prefill) if differ else others
        return [firsts] * self.mesh.prefill + [others] * self.mesh.dp

    def devices(self, config: ModelConfig, mesh: Any) -> list[Devices]:
        """The devices of each replica.

        Raises:
            ValueError: as `shard_config` and `first_devices`.
        """
        if self.mesh.prefill:
            _check_sides(self.prefill)
            _check_sides(self.settings)
        drafting = drafting_model(config, self.settings.get("speculation"))
        for count in dict.fromkeys(self.mesh.counts):
            _require_divisible(drafting, count)
        if (named := devices_of(mesh)) is not None:
            return [*named]
        return [None] if self.mesh.num_devices == 1 else [*first_devices(self.mesh)]


def _require_divisible(config: ModelConfig, count: int) -> None:
    """ValueError for a model that so many devices cannot divide, with the numbers that can."""
    try:
        shard_config(config, count)
    except ValueError as error:
        others = [other for other in range(2, MOST_TRIED + 1) if _is_divisible(config, other)]
        can = " or ".join(f"tp={other}" for other in others)
        instead = f"{can} would" if can else f"no tp up to {MOST_TRIED} would, so leave it out"
        raise ValueError(f"LLM: tp={count} cannot divide this model: {error}; {instead}") from error


def _is_divisible(config: ModelConfig, count: int) -> bool:
    try:
        shard_config(config, count)
    except ValueError:
        return False
    return True


def _hosts(replicas: Sequence[Devices], settings: Mapping[str, Any]) -> Hosts | None:
    """The processes that run the model together; None for this one alone.

    Raises:
        ValueError: as `hosts_of`; or what is asked for has no form for several processes.
    """
    used = [device for devices in replicas for device in devices or ()]
    if (hosts := hosts_of(used)) is None:
        return None
    if len(replicas) > 1:
        raise ValueError(
            f"LLM: a mesh over several processes is one model, as in mesh='tp={jax.device_count()}', got "
            f"{len(replicas)} replicas; make an LLM in each process, and give each its own prompts"
        )
    for name in ("cache_dir", "host_memory"):
        if settings.get(name):
            raise ValueError(
                f"LLM: {name} has no form for a model over several processes yet; leave it out, got {settings[name]!r}"
            )
    return hosts


def _check_sides(settings: Mapping[str, Any]) -> None:
    """ValueError for settings that do not go with replicas that compute prompts for others."""
    cache = settings.get("cache")
    if cache is not None and cache.policy == "off":
        raise ValueError(
            "LLM: prompts are handed over through prefix caches, so 'prefill=...' needs one; leave cache='off' out"
        )
    if settings.get("cache_dir") is not None:
        raise ValueError(
            "LLM: cache_dir does not go with 'prefill=...' yet; leave one of the two out, got cache_dir="
            f"{settings['cache_dir']!r}"
        )


def _placing(devices: Devices, tp: int) -> Placing | None:
    """What puts the weights of a replica on its devices while they are read; None for where jax puts arrays."""
    return Placing(devices) if devices is not None and tp > 1 else None


def _on(devices: Devices) -> AbstractContextManager[None]:
    """Has jax put arrays on the first device of a replica, of those that this process has."""
    if devices is None:
        return nullcontext()
    here = jax.process_index()
    first = next(device for device in devices if device.process_index == here)
    return own_settings(jax_default_device=first)


def _nth_of(
    report: Callable[[int, int], None], index: int, count: int, done: int, total: int
) -> None:
    """Reports what is done of the `index`-th of `count` equal parts."""
    report(index * total + done, count * total)


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


def _started(
    config: ModelConfig,
    loaded: Sequence[Any],
    engine_configs: Sequence[EngineConfig],
    programs: Path | None,
    stored_dtype: str,
    replicas: Sequence[Devices],
    prefill: int,
    *,
    sharing: int,
    side: Side | None = None,
    hosts: Hosts | None = None,
) -> Started:
    if jax.config.values.get(
        UNOPTIMIZED
    ):  # jax reads it for the whole process whenever it compiles
        LOG.warning(
            "%s is set: programs are slow, and their last bits may differ; unset it", UNOPTIMIZED
        )
    engines: list[Engine] = []
    hand_over = HandOver(root_of("replicas")) if prefill else None
    try:
        each = zip(loaded, engine_configs, replicas, strict=True)
        for index, (params, engine_config, devices) in enumerate(each):
            if hand_over is not None:
                end = ENDS["prefill" if index < prefill else "decode"]
                side = functools.partial(end, hand_over)
            with _on(devices):
                engine = _engine(
                    config,
                    params,
                    engine_config,
                    programs,
                    devices,
                    sharing=sharing,
                    side=side,
                    hosts=hosts,
                )
                engines.append(engine)
    except BaseException:
        for engine in engines:
            engine.close()
        raise
    engine_config = engine_configs[-1]
    if slow := interpreted(engine_config.kernels, engines[0].device.platform):
        LOG.warning("kernels='pallas' are %s", slow)
    size = held_bytes(loaded[0])
    # That of one device, so that engines with other meshes can be compared.
    digest = functools.partial(weights_digest, config, engines[0].whole(loaded[0]))
    return Started(config, digest, size, engine_config, engines, stored_dtype, hand_over)


def _engine(
    config: ModelConfig,
    params: Any,
    engine_config: EngineConfig,
    programs: Path | None,
    devices: Devices,
    *,
    sharing: int,
    side: Side | None,
    hosts: Hosts | None,
) -> Engine:
    device, divide = first_device(), devices if engine_config.tp > 1 else None
    with device_memory_for("arena, rings and tables", "lower memory or max_rows"):
        store = None if hosts is not None else open_store(programs, device, divide or ())
        return Engine(
            config, params, engine_config, store, divide, sharing=sharing, side=side, hosts=hosts
        )


def choose_engine_config(
    model: ModelConfig,
    options: Mapping[str, Any],
    *,
    dtype: str,
    params: Any = None,
    sharing: int = 1,
    hosts: Hosts | None = None,
) -> EngineConfig:
    """An engine's settings on this device. Refuses a model that does not fit its memory, before anything is allocated.

    Args:
        model: what is to run.
        options: as `engine_options` returns them.
        dtype: of the weights.
        params: the weights if they are in memory already; None for those that are about to be read.
        sharing: engines that share the memory of a host.
        hosts: as in `Engine`.

    Raises:
        ValueError: as `require_room` and `split_memory`.
    """
    shards = options.get("tp", 1)
    model = shard_config(drafting_model(model, options.get("speculation")), shards)
    held = None if params is None or shards > 1 else held_bytes(params)
    device = this_device(held=held or 0, shards=shards * sharing, hosts=hosts)
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
