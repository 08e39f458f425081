"""How many devices a mesh has, as callers write it."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

DP = "dp"  # the axis of replicas
TP = "tp"  # the axis along which a model is divided
AXES = (DP, TP)
PREFILL, DECODE = (
    "prefill",
    "decode",
)  # replicas that only compute prompts, and those that go on from them
LIKE = "like 'tp=4', 'dp=2', 'dp=2,tp=2' or 'prefill=1,decode=2'"


class MeshShape(NamedTuple):
    """Devices along each axis.

    Attributes:
        dp: replicas, each with a whole model on devices of its own. It is no axis of a program.
        tp: devices that each model is divided over (tensor parallelism).
        prefill: further replicas, before the others, that only compute prompts for them; 0 for none.
        prefill_tp: as `tp`, of these; 0 for the same.
    """

    dp: int = 1
    tp: int = 1
    prefill: int = 0
    prefill_tp: int = 0

    @property
    def counts(self) -> tuple[int, ...]:
        """Devices of each replica."""
        return (self.prefill_tp or self.tp,) * self.prefill + (self.tp,) * self.dp

    @property
    def num_replicas(self) -> int:
        """All replicas."""
        return self.prefill + self.dp

    @property
    def num_devices(self) -> int:
        """All of them."""
        return sum(self.counts)

    @property
    def words(self) -> str:
        """As callers write it: the axes that have more than one device."""
        if self.prefill:
            sides = f"{PREFILL}={self.prefill},{DECODE}={self.dp}"
            return sides + f",{TP}={self.tp}" * (self.tp > 1)
        sizes = {DP: self.dp, TP: self.tp}
        return ",".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1)


def read_mesh(mesh: Any) -> MeshShape:
    """The shape of a mesh: None for one device, "dp=2,tp=4", or a `jax.sharding.Mesh` whose axes have these names.

    Raises:
        ValueError: it is nothing of that, or has other axes.

    Example:
        >>> read_mesh("dp=2, tp=4"), read_mesh("tp=4").words
        (MeshShape(dp=2, tp=4, prefill=0, prefill_tp=0), 'tp=4')
    """
    if mesh is None:
        return MeshShape()
    if isinstance(mesh, str):
        return MeshShape(**_sizes(mesh))
    shape: Any = getattr(mesh, "shape", None)
    if not hasattr(mesh, "devices") or not hasattr(shape, "items"):
        raise ValueError(f"LLM: mesh must be {LIKE}, or a jax.sharding.Mesh, got {mesh!r}")
    sizes = dict(shape.items())
    if others := [name for name, size in sizes.items() if name not in AXES and size != 1]:
        raise ValueError(
            f"LLM: the axes of mesh must be named {DP!r} and {TP!r}, got {', '.join(map(repr, others))} in {sizes}"
        )
    return MeshShape(**{axis: sizes.get(axis, 1) for axis in AXES})


def _sizes(text: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for part in text.split(","):
        axis = re.fullmatch(r"\s*(dp|tp|prefill|decode)\s*=\s*([0-9]+)\s*", part)
        if axis is None or axis[1] in found or not int(axis[2]):
            raise ValueError(f"LLM: mesh must be {LIKE}, got {text!r}")
        found[axis[1]] = int(axis[2])
    if (PREFILL in found) != (DECODE in found) or (PREFILL in found and DP in found):
        raise ValueError(
            f"LLM: mesh must name both prefill and decode, as in 'prefill=1,decode=2', and then no dp; got {text!r}"
        )
    if DECODE in found:
        found[DP] = found.pop(DECODE)
    return found


def devices_of(mesh: Any) -> list[list[Any]] | None:
    """The devices of each replica of a `jax.sharding.Mesh`, in order; None if they are not named."""
    if mesh is None or isinstance(mesh, str):
        return None
    shape, names = read_mesh(mesh), list(mesh.axis_names)
    own = [names.index(axis) for axis in AXES if axis in names]
    others = [place for place in range(len(names)) if place not in own]  # of one device each
    found: list[list[Any]] = mesh.devices.transpose(*own, *others).reshape(shape[:2]).tolist()
    return found
