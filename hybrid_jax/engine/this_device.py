"""The device that jax runs models on, and how much of its memory the weights take."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import jax

from hybrid_jax.config.mesh import MeshShape
from hybrid_jax.machine import peak_resident_bytes
from hybrid_jax.mesh.hosts import Hosts
from hybrid_jax.sizing.devices import Device, claim_gpu, host


def this_device(*, held: int, shards: int = 1, hosts: Hosts | None = None) -> Device:
    """As `first_device`, with its memory as far as that is known.

    Args:
        held: bytes of the model's weights that are in memory already. All else that an accelerator holds is taken off
            its memory.
        shards: devices that this model is divided over, and those of its replicas. Those of a host are one processor,
            and share its memory.
        hosts: processes that run a model together; each then has the memory of the one that has least.

    Raises:
        ValueError: jax was told to run on something that it cannot use.
    """
    found = _this_device(held, shards)
    return found if hosts is None else replace(found, num_bytes=hosts.least(found.num_bytes))


def _this_device(held: int, shards: int) -> Device:
    device = first_device()
    if device.platform == "cpu":
        found = host()
        has = found.num_bytes
        return found if has is None else replace(found, num_bytes=has // shards)
    known = device.memory_stats() or {}
    found = as_device(device)
    if "bytes_limit" not in known:
        return found
    others = max(0, known.get("bytes_in_use", 0) - held)
    return replace(found, num_bytes=known["bytes_limit"] - others)


def as_device(device: jax.Device) -> Device:
    """An accelerator as jax describes it."""
    told = ("device_kind", "compute_capability", "core_count", "shared_memory_per_block_optin")
    name, capability, count, shared = (getattr(device, name, None) for name in told)
    return Device(
        platform=device.platform,
        name=name,
        capability=None if capability is None else str(capability),
        num_sms=count,
        shared_bytes=shared,
    )


def host_memory(device: jax.Device) -> jax.sharding.Sharding | None:
    """Where programs of a device put what goes into the host's memory; None for a CPU, whose memory that is."""
    if device.platform == "cpu":
        return None
    return jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")


def first_device() -> jax.Device:
    """Where jax puts arrays: its first device, unless jax_default_device names another.

    jax looks for devices at the first call.

    Raises:
        ValueError: as `this_device`.
    """
    claim_gpu()
    try:
        chosen = jax.config.jax_default_device  # a device, or the name of a platform
        return chosen if isinstance(chosen, jax.Device) else jax.local_devices(backend=chosen)[0]
    except (AssertionError, RuntimeError) as error:  # jax 0.10 asserts
        wanted = jax.config.jax_platforms
        if not wanted:
            raise
        remedy = "leave it out to run on a CPU"
        if "cuda" in wanted or "gpu" in wanted:
            remedy = (
                'on a machine with an NVIDIA GPU, pip install "hybrid_jax[cuda12]"; elsewhere '
                + remedy
            )
        raise ValueError(
            f"LLM: JAX_PLATFORMS={wanted} asks for a device that jax cannot use here; {remedy}"
        ) from error


def first_devices(shape: MeshShape) -> list[list[jax.Device]]:
    """The devices of each replica: `first_device`, and those after it.

    Where this process has too few (`jax.distributed`), those of all processes are meant.

    Raises:
        ValueError: there are fewer.
    """
    first, count = first_device(), shape.num_devices
    found = [d for d in jax.local_devices(backend=first.platform) if d.id >= first.id]
    if len(found) < count and jax.process_count() > 1:
        found = jax.devices(first.platform)
    if len(found) < count:
        sizes = dict(part.split("=") for part in shape.words.split(","))
        parts = shape.words if shape.prefill else shape.words.replace(",", " x ")
        raise ValueError(
            f"EngineConfig: mesh needs {count} devices ({parts}), and jax has {len(found)} from {first} on; lower "
            f"{' or '.join(sizes)}"
        )
    each = iter(found)
    return [list(itertools.islice(each, own)) for own in shape.counts]


def peak_memory_bytes(device: jax.Device) -> int | None:
    """The most memory in use at one time since the process began, as `RequestMetrics` defines it."""
    if device.platform == "cpu":
        return peak_resident_bytes()
    return (device.memory_stats() or {}).get("peak_bytes_in_use")


def device_of(params: Any) -> jax.Device:
    """The device that holds the weights; `first_device` if the weights are only shapes."""
    first = jax.tree.leaves(params)[0]
    return next(iter(first.devices())) if isinstance(first, jax.Array) else first_device()


def held_bytes(params: Any) -> int:
    """Bytes of all arrays on each device that has them; if a step is only to be compiled, their shapes count."""

    def size(leaf: Any) -> int:
        shape = leaf.shape
        if isinstance(leaf, jax.Array):
            shape = leaf.sharding.shard_shape(shape)
        return math.prod(shape) * leaf.dtype.itemsize

    return sum(map(size, jax.tree.leaves(params)))
