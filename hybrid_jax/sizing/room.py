"""Whether a model fits a device with its weights, its `memory` and the temporaries of a step. No jax."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from hybrid_jax.byte_sizes import counted, format_size, parse_size, round_size
from hybrid_jax.config import BACKENDS, PALLAS, XLA, Backend, EngineConfig, ModelConfig
from hybrid_jax.config.arrays import ITEM_BYTES
from hybrid_jax.config.backend import PLATFORMS
from hybrid_jax.config.plans import MAX_FLIGHTS, SAVED_BYTES
from hybrid_jax.costs import weight_bytes
from hybrid_jax.geometry import (
    make_geometry,
)
from hybrid_jax.kinds.table import kind_of, recurrent_kind
from hybrid_jax.machine import PINNED_LIMIT, pinned_bytes, ram_bytes
from hybrid_jax.sizing.budget import MemorySplit, split_memory
from hybrid_jax.sizing.devices import Device
from hybrid_jax.sizing.temporaries import temporary_bytes

Change = dict[str, Any]  # settings by name
Choose = Callable[[Change], EngineConfig]  # settings of an engine after a change
# Advice leaves this much for Python, the compiler and its programs, or a twentieth of the memory if that is less.
HOST_BYTES = 1 << 30
# The default `memory` takes this share of what weights and a step leave of a GPU's memory. The rest is for occasional
# copies, and for XLA, which times variants of a product on copies of its operands: there is room for the largest.
GPU_MEMORY_SHARE = 0.95
TUNING_BYTES = 1 << 28  # beside the largest weight


@dataclass(frozen=True, kw_only=True)
class Room:
    """What a model takes, and whether its machine has it.

    Attributes:
        model, engine, device: what was asked.
        weight_bytes: of all weights.
        weights_given: they are in memory already, so their dtype is fixed.
        temporary_bytes: of the largest step, an estimate.
        sizes: what `memory` is split into.
        choose: settings after a change, for advice; None if all other settings stay as they are.
    """

    model: ModelConfig
    engine: EngineConfig
    device: Device
    weight_bytes: int
    weights_given: bool
    temporary_bytes: int
    sizes: MemorySplit
    choose: Choose | None = None

    @property
    def memory_bytes(self) -> int:
        """The `memory` that was asked for. An engine takes a little less, because frames are whole."""
        return max(self.engine.memory or 0, self.sizes.total_bytes)

    @property
    def host_bytes(self) -> int:
        """What `host_memory` takes of the device's own memory: all on a CPU, else nothing."""
        return self.sizes.host_bytes if self.device.is_host else 0

    @property
    def needed_bytes(self) -> int:
        """Bytes of weights, `memory` and temporaries together; on a CPU with `host_memory`."""
        return self.weight_bytes + self.memory_bytes + self.temporary_bytes + self.host_bytes

    @property
    def taken_bytes(self) -> int:
        """The part of `needed_bytes` that an engine really takes."""
        return self.needed_bytes - self.memory_bytes + self.sizes.total_bytes

    @property
    def fits(self) -> bool | None:
        """Whether the device has what is needed; None if its memory is not known."""
        has = self.device.num_bytes
        return None if has is None else self.needed_bytes <= has

    def parts(self) -> str:
        """What is needed, as a sum: "weights 8 GiB (float32) + ... = 9 GiB"."""
        least = "at least " if self.fits is False and self.engine.memory is None else ""
        below = f"host_memory {format_size(self.host_bytes)} + " if self.host_bytes else ""
        why = " (jax before 0.11 copies bfloat16 weights to float32)"
        copies = why if self.device.widens and self.engine.dtype == "bfloat16" else ""
        return (
            f"weights {format_size(self.weight_bytes)} ({self.engine.dtype}) + "
            f"memory {least}{format_size(self.memory_bytes)} for {counted(self.engine.max_rows, 'row')} + {below}"
            f"temporaries {format_size(self.temporary_bytes)}{copies} = {format_size(self.needed_bytes)}"
        )

    @property
    def remedy(self) -> str:
        """What to do if it does not fit."""
        beside = (self.device.num_bytes or 0) - (self.needed_bytes - self.host_bytes)
        if self.host_bytes and beside > 0:
            most = round_size(beside, up=False).replace(" ", "")  # one word for a shell
            return f'use at most host_memory="{most}"'
        found = [_words(change, self) for change in _changes(self)]
        if found:
            return f"use {' or '.join(found)}"
        needed = round_size(self.needed_bytes, up=True)
        larger = "machine" if self.device.is_host else "device"
        return f"use a smaller model or a {larger} with at least {needed}"


def backend_on(device: Device, engine: EngineConfig, model: ModelConfig) -> Backend:
    """What a model's steps are made of on a device.

    Recurrent layers of some models have sizes that the kernels cannot take. The engine finds these; sizing does not.

    Raises:
        NotImplementedError: nothing serves on the device's platform, or no kernel there reads FP8 pages, and
            `engine.kernels` does not ask for "xla"; or it asks for "pallas", and these do not run on the GPU or cannot
            do an operation.
    """
    refuse_fp8(device, engine)
    if engine.kernels == PALLAS.name and device.platform == "gpu" and not device.runs_kernels:
        raise NotImplementedError(
            "EngineConfig: kernels='pallas' needs a GPU of compute capability 8.0 or more (Ampere and later), found "
            f"{device.capability}{_named(device)}; leave it out"
        )
    if engine.kernels == "auto" and device.api not in XLA.platforms:
        known = ", ".join(PLATFORMS[name] for name in XLA.platforms)
        raise NotImplementedError(
            f"LLM: models run on {known}, not on {PLATFORMS.get(device.api, device.api)}; JAX_PLATFORMS=cpu takes the "
            "CPU, and kernels='xla' tries what XLA compiles for the device, which is not tested"
        )
    auto = PALLAS if device.runs_kernels else XLA
    backend = replace(BACKENDS.get(engine.kernels, auto), chip=device.chip)
    found = left_to_xla(model, engine, backend)
    if found and engine.kernels == PALLAS.name:
        said = "; ".join(f"{operation}: {reason}" for operation, reason in found.items())
        raise NotImplementedError(f"EngineConfig: kernels='pallas': {said}")
    return replace(backend, without=tuple(sorted(found)))


def left_to_xla(model: ModelConfig, engine: EngineConfig, backend: Backend) -> dict[str, str]:
    """Operations that XLA does in steps made of kernels, and why the kernels cannot; empty where XLA does all."""
    found: dict[str, str] = {}
    for part, _ in model.parts if backend.kernels == PALLAS.kernels else ():
        kind = kind_of(part)
        reason = kind.why_unsupported(part, engine.dtype, backend.chip)
        if reason is not None:
            found[kind.operation] = reason
    return found


def refuse_fp8(device: Device, engine: EngineConfig) -> None:
    """Raises NotImplementedError for FP8 pages on a GPU that cannot convert such numbers, unless XLA is asked for."""
    if engine.kv_cache_dtype != "fp8" or engine.kernels == XLA.name or device.converts_fp8:
        return
    raise NotImplementedError(
        "EngineConfig: kv_cache_dtype='fp8' needs a GPU of compute capability 8.9 or more (Ada, Hopper, Blackwell), "
        f"found {device.capability}{_named(device)}; leave it out, or take kernels='xla', which is slower"
    )


def _named(device: Device) -> str:
    """The device's name in brackets, if it is known."""
    return "" if device.name is None else f" ({device.name})"


def scanned_by_triton(model: ModelConfig, engine: EngineConfig) -> bool:
    """Whether Triton scans prompts on Hopper: if its kernels take all recurrent layers, and not in exact mode."""
    reasons = [
        recurrent_kind(spec).triton_unsupported(spec, engine.dtype) for spec in model.recurrent
    ]
    return bool(reasons) and not engine.exact and not any(reasons)


class DoesNotFit(ValueError):
    """A model needs more memory than the device has."""


def find_room(
    model: ModelConfig,
    engine: EngineConfig,
    device: Device,
    *,
    held: int | None = None,
    backend: Backend | None = None,
    choose: Choose | None = None,
) -> Room:
    """Works out what a model takes. The default `memory` is a share of what weights and steps leave.

    Args:
        model, engine, device: what to size for.
        held: bytes of the weights if they are in memory already; None for weights in `engine.dtype`.
        backend: what steps are made of; None for what suits the device.
        choose: as in `Room`.

    Raises:
        ValueError: as `split_memory`.
    """
    weights = weight_bytes(model, engine.dtype) if held is None else held
    if backend is None:
        backend = backend_on(device, engine, model)
    temporaries = temporary_bytes(model, engine, backend=backend, widens=device.widens)
    limit = None
    if device.num_bytes is not None:
        left = device.num_bytes - weights
        if device.is_host:
            # Half, because the host also runs the system, Python and the compiler, and holds compiled programs.
            limit = min(left // 2, left - temporaries, device.num_bytes // 4)
        else:
            left -= temporaries
            tuning = TUNING_BYTES + model.vocab_size * model.width * ITEM_BYTES[engine.dtype]
            limit = min(int(GPU_MEMORY_SHARE * left), left - tuning)
        limit = max(0, limit)
    sizes = split_memory(
        model,
        engine,
        make_geometry(model, engine),
        default_limit=limit,
        takes_all=not device.is_host,
        backend=backend,
    )
    return Room(
        model=model,
        engine=engine,
        device=device,
        weight_bytes=weights,
        weights_given=held is not None,
        temporary_bytes=temporaries,
        sizes=sizes,
        choose=choose,
    )


def require_room(room: Room) -> None:
    """Refuses a model that does not fit its device.

    Raises:
        DoesNotFit: says what the model needs, what there is, and what would fit.
    """
    if not room.device.is_host and room.sizes.host_bytes > (has := ram_bytes() or math.inf):
        raise DoesNotFit(
            f"LLM: host_memory of {format_size(room.sizes.host_bytes)} does not fit: this machine has "
            f"{format_size(int(has))}; lower it"
        )
    require_pinned(room.engine, room.device)
    if room.fits is not False:
        return
    raise DoesNotFit(
        f"LLM: this model does not fit: {room.parts()}, and this {room.device.noun} has "
        f"{format_size(room.device.num_bytes or 0)}; {room.remedy}"
    )


def require_pinned(engine: EngineConfig, device: Device) -> None:
    """Refuses a `host_memory` beside a GPU for which XLA does not pin enough of the host's memory.

    A copy is made before what it replaces goes. So what the plans in flight save may be there beside all the rest.

    Raises:
        DoesNotFit: says what there is, and what to set.
    """
    most, has = MAX_FLIGHTS * SAVED_BYTES, pinned_bytes()
    needed = engine.host_memory + min(engine.host_memory, most)
    if device.platform != "gpu" or needed <= has:
        return
    least = round_size(max(has - most, has // 2), up=False)
    lower = f"lower it to {least}, or " if has else ""
    raise DoesNotFit(
        f"EngineConfig: host_memory of {format_size(engine.host_memory)} does not fit: with copies on their way it "
        f"takes {format_size(needed)}, and XLA pins at most {format_size(has)} of the host's memory for a GPU; {lower}"
        f"set {PINNED_LIMIT}={math.ceil(needed / (1 << 30))} before Python starts"
    )


# --- what would fit -------------------------------------------------------------------------------


def _changes(room: Room) -> list[Change]:
    """Changes after which the model fits, of as few settings as possible. Empty if nothing helps."""
    for count in (1, 2, 3):
        tried = (
            _change(room, names) for names in combinations(("dtype", "memory", "max_rows"), count)
        )
        found = [change for change in tried if change is not None]
        if found:
            return found
    return []


def _change(room: Room, names: Iterable[str]) -> Change | None:
    """Values of these settings with which the model fits; None if there are none."""
    change: Change = {}
    if "dtype" in names:
        if room.engine.dtype != "float32" or room.weights_given:
            return None
        change["dtype"] = "bfloat16"
    lower = "memory" in names
    if lower and room.engine.memory is None:
        return None
    if "max_rows" in names:
        change["max_rows"] = largest(
            lambda rows: _fitting(room, change | {"max_rows": rows}, lower) is not None,
            room.engine.max_rows - 1,
        )
        if not change["max_rows"]:
            return None
    return _fitting(room, change, lower)


def _fitting(room: Room, change: Change, lower_memory: bool) -> Change | None:
    """The change if the model then fits; with the largest `memory` that fits if that is to be lowered."""
    held, has = room.weight_bytes if room.weights_given else None, room.device.num_bytes or 0
    settings = room.choose or (lambda change: replace(room.engine, **change))
    try:
        engine = settings(change)
        if lower_memory:
            least = find_room(room.model, replace(engine, memory=None), room.device, held=held)
            beside = least.weight_bytes + least.temporary_bytes
            spare = min(HOST_BYTES, has // 20)
            memory = round_size(max(1, has - beside - spare), up=False)
            memory = memory.replace(" ", "")  # one word for a shell
            engine = settings(change | {"memory": parse_size(memory)})
            change = change | {"memory": memory}
        fits = find_room(room.model, engine, room.device, held=held).fits
    except ValueError:  # this memory cannot hold one sequence
        return None
    return change if fits else None


def _words(change: Change, room: Room) -> str:
    """The change as keywords of `LLM`."""
    said = []
    for name, value in change.items():
        option = f'{name}="{value}"' if isinstance(value, str) else f"{name}={value}"
        if name == "dtype":
            weights = format_size(weight_bytes(room.model, str(value)))
            said.append(f"{option} ({weights} of weights)")
        else:
            said.append(f"at most {option}")
    return " and ".join(said)


def largest(fits: Callable[[int], bool], limit: int) -> int:
    """The largest n <= limit with fits(n), or 0; fits(n) must imply fits(n - 1)."""
    return bisect_left(range(1, limit + 1), True, key=lambda n: not fits(n))
