"""How many devices a mesh has, as callers write it."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

TP = "tp"  # the axis along which a model is divided
AXES = (TP,)


class MeshShape(NamedTuple):
    """Devices along each axis.

    Attributes:
        tp: those that one model is divided over (tensor parallelism).
    """

    tp: int = 1


def read_mesh(mesh: Any) -> MeshShape:
    """The shape of a mesh: None for one device, "tp=4", or a `jax.sharding.Mesh` whose axes have these names.

    Raises:
        ValueError: it is nothing of that, or has other axes.

    Example:
        >>> read_mesh("tp=4")
        MeshShape(tp=4)
    """
    if mesh is None:
        return MeshShape()
    if isinstance(mesh, str):
        found = re.fullmatch(r"\s*tp\s*=\s*(\d+)\s*", mesh)
        if found is None or not (count := int(found[1])):
            raise ValueError(f"LLM: mesh must be like 'tp=4', got {mesh!r}")
        return MeshShape(tp=count)
    shape: Any = getattr(mesh, "shape", None)
    if not hasattr(mesh, "devices") or not hasattr(shape, "items"):
        raise ValueError(f"LLM: mesh must be like 'tp=4', or a jax.sharding.Mesh, got {mesh!r}")
    sizes = dict(shape.items())
    if others := [name for name, size in sizes.items() if name not in AXES and size != 1]:
        raise ValueError(
            f"LLM: the axis of mesh must be named {TP!r}, got {', '.join(map(repr, others))} in {sizes}"
        )
    return MeshShape(tp=sizes.get(TP, 1))


def devices_of(mesh: Any) -> list[Any] | None:
    """The devices of a `jax.sharding.Mesh` in order; None if they are not named."""
    return None if mesh is None or isinstance(mesh, str) else list(mesh.devices.flat)
