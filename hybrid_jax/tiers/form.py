"""Parcels of one engine: out of its frames and into them, also where several devices have a part of each frame.

A frame of such an engine has the frames of its devices one after the other. What these hold of an array of a parcel is
put together to what one device would hold, so that engines of any number of devices read and write the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from hybrid_jax.geometry import Geometry
from hybrid_jax.tiers import parcel
from hybrid_jax.tiers.parcel import FrameOf, FramePlace, Frames, Pieces, Shape


class Join(Protocol):
    """How an array of a parcel is made of those of the devices."""

    def cut(self, array: np.ndarray, index: int) -> np.ndarray:
        """What a device has of it."""

    def put(self, array: np.ndarray, part: np.ndarray, index: int) -> None:
        """Writes what a device has of it into it."""


class Form:
    """The parcels of one engine.

    Args:
        geometry: the engine's; that of each device if there are several.
        whole: the same of the model on one device, whatever its frames; None for one device.
        joins: of each array, by its name. count: devices.
    """

    def __init__(
        self,
        geometry: Geometry,
        whole: Geometry | None = None,
        joins: Mapping[str, Join] | None = None,
        count: int = 1,
    ) -> None:
        self.geometry, self.whole = geometry, whole or geometry
        self._joins, self.count = joins or {}, count

    @property
    def frame_words(self) -> int:
        """Words of a frame, with those of all devices."""
        return self.count * self.geometry.frame_words

    @property
    def identity(self) -> tuple:
        """What a parcel of this model holds, for the digest of the root."""
        return parcel.form_of(self.whole)

    def zeros(self, places: Sequence[FramePlace]) -> Frames:
        """Frames to be filled."""
        return Frames.zeros(self.geometry, places, self.frame_words)

    # --- shapes -----------------------------------------------------------------------------------

    def page_shapes(self, begin: int, end: int) -> dict[str, Shape]:
        """As `parcel.page_shapes`."""
        return parcel.page_shapes(self.whole, begin, end)

    def end_shapes(self, position: int) -> dict[str, Shape]:
        """The arrays of what resuming takes beside the pages of layers without a window."""
        return parcel.window_shapes(self.whole, position) | parcel.state_shapes(self.whole)

    def prefix_shapes(self, position: int) -> dict[str, Shape]:
        """As `parcel.prefix_shapes`."""
        return parcel.prefix_shapes(self.whole, position)

    # --- out of frames, and into them -------------------------------------------------------------

    def read_pages(self, begin: int, end: int, frames: Frames) -> dict[str, Pieces]:
        """As `parcel.read_pages`."""
        shapes = self.page_shapes(begin, end)
        parts = [
            parcel.read_pages(self.geometry, begin, end, own.at) for own in self._parts(frames)
        ]
        return self._joined(shapes, parts)

    def read_end(self, position: int, frames: Frames) -> dict[str, Pieces]:
        """As `parcel.read_end`."""
        parts = [parcel.read_end(self.geometry, position, own) for own in self._parts(frames)]
        return self._joined(self.end_shapes(position), parts)

    def read_prefix(self, position: int, frames: Frames) -> dict[str, Pieces]:
        """What resuming at `position` takes, from its frames."""
        return self.read_pages(0, position, frames) | self.read_end(position, frames)

    def write_pages(
        self, begin: int, end: int, arrays: Mapping[str, np.ndarray], frames: Frames
    ) -> None:
        """As `parcel.write_pages`, as far as there are frames."""
        for index, own in enumerate(self._parts(frames)):
            target: FrameOf = parcel.writable(self.geometry, own)
            parcel.write_pages(self.geometry, begin, end, self._cut(arrays, index), target)

    def write_end(self, position: int, arrays: Mapping[str, np.ndarray], frames: Frames) -> None:
        """As `parcel.write_end`."""
        for index, own in enumerate(self._parts(frames)):
            parcel.write_end(self.geometry, position, self._cut(arrays, index), own)

    def write_prefix(self, position: int, arrays: Mapping[str, np.ndarray], frames: Frames) -> None:
        """The inverse of `read_prefix`, as far as there are frames: they have zeros before."""
        self.write_pages(0, position, arrays, frames)
        self.write_end(position, arrays, frames)

    # --- devices ----------------------------------------------------------------------------------

    def _parts(self, frames: Frames) -> list[Frames]:
        """Views of what each device has of frames."""
        if self.count == 1:
            return [frames]
        size, found = self.geometry.frame_words, []
        for begin in range(0, self.frame_words, size):
            own = slice(begin, begin + size)
            pages = {place: frame[own] for place, frame in frames.pages.items()}
            states = frames.checkpoint
            found.append(Frames(pages, None if states is None else states[:, own]))
        return found

    def _joined(
        self, shapes: Mapping[str, Shape], parts: list[dict[str, Pieces]]
    ) -> dict[str, Pieces]:
        if self.count == 1:
            return parts[0]
        found = {}
        for name, (dtype, shape) in shapes.items():
            array: np.ndarray = np.zeros(shape, dtype)
            for index, own in enumerate(parts):
                self._joins[name].put(array, own[name].joined(), index)
            found[name] = Pieces(dtype, shape, [array])
        return found

    def _cut(self, arrays: Mapping[str, np.ndarray], index: int) -> Mapping[str, np.ndarray]:
        if self.count == 1:
            return arrays
        known = self._joins
        return {name: known[name].cut(x, index) for name, x in arrays.items() if name in known}


class NarrowJoin:
    """`Join` of a narrow checkpoint, which is one run of words.

    Args:
        whole, part: geometry of the model on one device, and of each device. joins: of the arrays of its layers, by
            the names of `parcel.narrow_arrays`.
    """

    def __init__(self, whole: Geometry, part: Geometry, joins: Mapping[str, Join]) -> None:
        self._whole, self._part, self._joins = whole, part, joins

    def cut(self, array: np.ndarray, index: int) -> np.ndarray:
        """As in `Join`."""
        [(_, shape)] = parcel.state_shapes(self._part).values()
        part: np.ndarray = np.zeros(shape, np.uint32)
        own = parcel.narrow_arrays(self._part, part)
        for name, values in parcel.narrow_arrays(self._whole, array).items():
            own[name][...] = self._joins[name].cut(values, index)
        return part

    def put(self, array: np.ndarray, part: np.ndarray, index: int) -> None:
        """As in `Join`."""
        whole = parcel.narrow_arrays(self._whole, array)
        for name, values in parcel.narrow_arrays(self._part, part).items():
            self._joins[name].put(whole[name], values, index)
