"""What each device runs of a model that is divided over several, and which part of each weight it has.

A device's part of a model is a model: it has some of the heads, channels and experts, and the whole residual stream.
Which part of a weight it has follows from the weights of both models. Where several linear maps lie side by side
(`Weight.fused`), each of them is cut on its own, and a device has its parts of them side by side.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hybrid_jax.config import ModelConfig
from hybrid_jax.config.block import Layer
from hybrid_jax.kinds.kind import OnDevices, Weight
from hybrid_jax.kinds.table import kind_of, model_weights


def shard_config(config: ModelConfig, count: int) -> ModelConfig:
    """The model that each of `count` devices runs.

    Raises:
        ValueError: heads, groups, channels or experts cannot be divided so; names the numbers.
        NotImplementedError: a kind of part, or the format of the matrices, has no form for several devices.
    """
    if count == 1:
        return config
    if config.matrices:
        place, format = config.matrices[0]
        raise NotImplementedError(
            f"LLM: weights of 8 or 4 bits are not divided over devices yet, and {place} is {format.about}; leave mesh "
            "out"
        )

    def part(layer: Layer) -> Layer:
        return layer.with_parts(kind_of(spec).shard(spec, count) for spec in layer.parts)

    return replace(
        config,
        layers=tuple(map(part, config.layers)),
        mtp=tuple(map(part, config.mtp)),
        draft=None if config.draft is None else shard_config(config.draft, count),
        shards=count,
    )


@dataclass(frozen=True, kw_only=True)
class Split:
    """How a weight lies on the devices.

    Attributes:
        count: devices.
        axis: the one that is cut; None if all devices have the whole.
        whole, part: sizes along it of what lies side by side, in the weight and in a device's part of it. Where there
            are fewer blocks of the part's size than devices, several have the same one.
        how: as in `Weight.on_devices`.
    """

    count: int
    axis: int | None = None
    whole: tuple[int, ...] = ()
    part: tuple[int, ...] = ()
    how: OnDevices = "parts"

    def cut(self, array: np.ndarray, index: int) -> np.ndarray:
        """A device's part of a weight."""
        if self.how == "first":
            return array if index == 0 else np.zeros_like(array)
        if self.axis is None:
            return array
        lead, pieces = (slice(None),) * self.axis, []
        for place, size in zip(self._slices(index), self.part, strict=True):
            piece = array[(*lead, place)]
            missing = size - piece.shape[self.axis]
            filling = [(0, missing * (axis == self.axis)) for axis in range(array.ndim)]
            pieces.append(np.pad(piece, filling) if missing else piece)
        return np.concatenate(pieces, self.axis)

    def undivided_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a weight whose parts, one after the other, have this shape."""
        if self.axis is None:
            return shape
        size = sum(self.whole) if self.whole else shape[self.axis] // self.count
        return (*shape[: self.axis], size, *shape[self.axis + 1 :])

    def undivided(self, array: np.ndarray) -> np.ndarray:
        """The weight whose parts, one after the other along the axis, are this array."""
        if self.axis is None:
            return array
        if self.how == "first":
            return array[
                (slice(None),) * self.axis + (slice(array.shape[self.axis] // self.count),)
            ]
        found: np.ndarray = np.zeros(self.undivided_shape(array.shape), array.dtype)
        for index, part in enumerate(np.split(array, self.count, self.axis)):
            self.put(found, part, index)
        return found

    def put(self, array: np.ndarray, part: np.ndarray, index: int) -> None:
        """Writes a device's part into an array that is divided."""
        assert self.axis is not None and self.how != "first", self
        lead, start = (slice(None),) * self.axis, 0
        for place, size in zip(self._slices(index), self.part, strict=True):
            has = place.stop - place.start
            array[(*lead, place)] = part[(*lead, slice(start, start + has))]
            start += size

    def _slices(self, index: int) -> Iterator[slice]:
        """Which places along the axis a device has, in order. Runs may end early, and are then filled up with zeros."""
        start = 0
        for whole, part in zip(self.whole, self.part, strict=True):
            if self.how == "parts":
                assert whole % part == 0, f"{self}: parts of {part} do not make {whole}"
                first = start + index * (whole // part) // self.count * part
                yield slice(first, first + part)
            else:
                first, last = (start + min(n * part, whole) for n in (index, index + 1))
                yield slice(first, last)
            start += whole


def splits(config: ModelConfig, count: int) -> Any:
    """How each weight of a model lies on `count` devices: a tree like `model_weights`.

    Raises:
        ValueError: as `shard_config`.
    """
    return _splits(model_weights(config), model_weights(shard_config(config, count)), count)


def _splits(whole: Any, part: Any, count: int) -> Any:
    if isinstance(whole, Weight):
        return _split(whole, part, count)
    if isinstance(whole, list):
        return [_splits(x, y, count) for x, y in zip(whole, part, strict=True)]
    return {name: _splits(tree, part[name], count) for name, tree in whole.items()}


def _split(whole: Weight, part: Weight, count: int) -> Split:
    if whole.on_devices == "first":
        return Split(count=count, axis=0, how="first")
    last = len(whole.shape) - 1
    if whole.fused != part.fused:
        how = whole.on_devices
        return Split(count=count, axis=last, whole=whole.fused, part=part.fused, how=how)
    cut = [axis for axis in range(last + 1) if whole.shape[axis] != part.shape[axis]]
    if not cut:
        return Split(count=count)
    [axis] = cut
    sizes = {"whole": whole.shape[axis : axis + 1], "part": part.shape[axis : axis + 1]}
    return Split(count=count, axis=axis, how=whole.on_devices, **sizes)
