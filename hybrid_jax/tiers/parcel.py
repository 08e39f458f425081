"""The form of what leaves an arena. It does not depend on page size, grain, rows or frame size.

What resuming at a position takes is K and V of the tokens before it, and one checkpoint. In arrays by name:

- `pages.I` uint32[tokens, words] for the I-th layer with pages and without a window, with `scales.I` float32 bits
  uint32[tokens, words] where pages are FP8. The words of a token are those of `PageLayout`: [2 (K, V), K heads,
  words of a head], or what else the layer keeps of a token.
- `window.I` and `window_scales.I` the same for a layer with a window: of the last window - 1 tokens alone.
- `state.I` float32[units, words of a unit] of the I-th recurrent layer, `columns.I` uint16 or uint32[columns,
  channels], the bits of its convolution's last inputs.

Where the cache keeps checkpoints as int8, all states and columns are one array `narrow` uint32[words], in the order of
`NarrowForm`. All of it is little endian.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from hybrid_jax.geometry import Geometry, KVPlace, PageGroup, StatePlace

# Where a frame of a page is: the page's number in the sequence, and the frame's index in the page.
FramePlace = tuple[int, int]
# uint32[frame_words] of the frame there.
FrameOf = Callable[[int, int], np.ndarray]


NARROW = "narrow"


class Shape(NamedTuple):
    """Dtype and shape of an array of a part."""

    dtype: str
    shape: tuple[int, ...]


class Pieces(NamedTuple):
    """An array that is not in one piece: views of frames, whose bytes one after the other are its bytes."""

    dtype: str
    shape: tuple[int, ...]
    parts: list[np.ndarray]

    def joined(self) -> np.ndarray:
        """The array."""
        flat: list[np.ndarray] = [part.reshape(-1).view(np.uint8) for part in self.parts]
        data = np.concatenate(flat) if flat else np.zeros(0, np.uint8)
        return data.view(self.dtype).reshape(self.shape)

    @property
    def num_bytes(self) -> int:
        """Its bytes."""
        return sum(part.nbytes for part in self.parts)


class Frames(NamedTuple):
    """Frames of a prefix.

    Attributes:
        pages: uint32[frame_words] by place.
        checkpoint: uint32[frames of a cached checkpoint, frame_words]; None without a state.

    Those that go from one arena to another like it are arrays of jax, and the checkpoint is a list.
    """

    pages: dict[FramePlace, Any]
    checkpoint: Any

    @classmethod
    def of(cls, places: Sequence[FramePlace], words: Sequence[np.ndarray]) -> Frames:
        """Frames one after the other: those of pages at their places, then those of the checkpoint."""
        states = words[len(places) :]
        pages: dict[FramePlace, np.ndarray] = dict(zip(places, words, strict=False))
        return cls(pages, np.stack(states) if len(states) else None)

    @classmethod
    def zeros(
        cls, geometry: Geometry, places: Iterable[FramePlace], frame_words: int | None = None
    ) -> Frames:
        """Frames to be filled, of so many words; None for those of the geometry."""
        words = frame_words or geometry.frame_words
        shape = geometry.cached_state_frames, words
        pages: dict[FramePlace, np.ndarray] = {
            place: np.zeros(words, np.uint32) for place in places
        }
        return cls(pages, np.zeros(shape, np.uint32) if geometry.has_state else None)

    def words(self, places: Iterable[FramePlace]) -> list[Any]:
        """The frames at some places, then those of the checkpoint.

        Raises:
            KeyError: one is not there.
        """
        return [self.pages[place] for place in places] + list(
            () if self.checkpoint is None else self.checkpoint
        )

    def at(self, page: int, column: int) -> np.ndarray:
        """As `FrameOf`.

        Raises:
            KeyError: it is not there.
        """
        return self.pages[page, column]


class _PageField(NamedTuple):
    """One field of a layer's pages: the name of its array, its place in a page, and its layer's group."""

    name: str
    frame: int
    offset: int
    words: int
    group: PageGroup


def _page_fields(geometry: Geometry, *, windowed: bool) -> Iterator[_PageField]:
    """The fields of all layers with pages, of those with a window or of the others."""
    prefix = "window" if windowed else "pages"
    scales = "window_scales" if windowed else "scales"
    for number, place in enumerate(geometry.kv):
        group = _group_of(geometry, place)
        if (group.window is not None) != windowed:
            continue
        yield _PageField(f"{prefix}.{number}", place.frame, place.offset, place.token_words, group)
        if place.scale_words:
            offset = place.offset + geometry.page_tokens * place.token_words
            yield _PageField(f"{scales}.{number}", place.frame, offset, place.scale_words, group)


def _group_of(geometry: Geometry, place: KVPlace) -> PageGroup:
    [group] = [g for g in geometry.page_groups if 0 <= place.frame - g.first_frame < g.num_frames]
    return group


def form_of(geometry: Geometry) -> tuple:
    """What a parcel of this model holds, for the digest of the root: equal for every geometry of one model."""
    pages = [
        (field.name, field.words, field.group.window)
        for windowed in (False, True)
        for field in _page_fields(geometry, windowed=windowed)
    ]
    return tuple(pages), tuple(state_shapes(geometry).items()), geometry.dtype, geometry.kv_dtype


def needs_checkpoint(geometry: Geometry) -> bool:
    """Whether pages alone are not enough to resume, because of a state or of a window."""
    return geometry.has_state or bool(geometry.windowed)


def places_of(geometry: Geometry, position: int, pages: Iterable[int]) -> list[FramePlace]:
    """The places that hold some pages without a window, and what windows see from `position` on."""
    found: list[FramePlace] = []
    for group in geometry.page_groups:
        numbers = pages
        if group.window is not None:
            numbers = range(geometry.first_page(group, position), geometry.num_pages(position))
        columns = range(group.first_frame, group.first_frame + group.num_frames)
        found += [(page, column) for page in numbers for column in columns]
    return found


# --- pages ----------------------------------------------------------------------------------------


def page_shapes(geometry: Geometry, begin: int, end: int) -> dict[str, Shape]:
    """The arrays of the pages of tokens [begin, end)."""
    return {
        field.name: Shape("uint32", (end - begin, field.words))
        for field in _page_fields(geometry, windowed=False)
    }


def window_shapes(geometry: Geometry, position: int) -> dict[str, Shape]:
    """The arrays of what windows see from `position` on."""
    return {
        field.name: Shape("uint32", (position - _first_seen(field.group, position), field.words))
        for field in _page_fields(geometry, windowed=True)
    }


def _first_seen(group: PageGroup, position: int) -> int:
    assert group.window is not None, group
    return max(position - group.window + 1, 0)


def read_pages(geometry: Geometry, begin: int, end: int, frame_of: FrameOf) -> dict[str, Pieces]:
    """What the pages hold of tokens [begin, end), of layers without a window."""
    return {
        field.name: _read_tokens(geometry, field, begin, end, frame_of)
        for field in _page_fields(geometry, windowed=False)
    }


def read_windows(geometry: Geometry, position: int, frame_of: FrameOf) -> dict[str, Pieces]:
    """What the pages hold that windows see from `position` on."""
    return {
        field.name: _read_tokens(
            geometry, field, _first_seen(field.group, position), position, frame_of
        )
        for field in _page_fields(geometry, windowed=True)
    }


def write_pages(
    geometry: Geometry, begin: int, end: int, arrays: Mapping[str, np.ndarray], frame_of: FrameOf
) -> None:
    """The inverse of `read_pages`; `frame_of` gives frames that may be written."""
    for field in _page_fields(geometry, windowed=False):
        _write_tokens(geometry, field, begin, end, arrays[field.name], frame_of)


def write_windows(
    geometry: Geometry, position: int, arrays: Mapping[str, np.ndarray], frame_of: FrameOf
) -> None:
    """The inverse of `read_windows`."""
    for field in _page_fields(geometry, windowed=True):
        begin = _first_seen(field.group, position)
        _write_tokens(geometry, field, begin, position, arrays[field.name], frame_of)


def _read_tokens(
    geometry: Geometry, field: _PageField, begin: int, end: int, frame_of: FrameOf
) -> Pieces:
    parts = [part for *_, part in _spans(geometry, field, begin, end, frame_of)]
    return Pieces("uint32", (end - begin, field.words), parts)


def _write_tokens(
    geometry: Geometry,
    field: _PageField,
    begin: int,
    end: int,
    tokens: np.ndarray,
    frame_of: FrameOf,
) -> None:
    for first, last, part in _spans(geometry, field, begin, end, frame_of):
        part[:] = tokens[first - begin : last - begin]


def _spans(
    geometry: Geometry, field: _PageField, begin: int, end: int, frame_of: FrameOf
) -> Iterator[tuple[int, int, np.ndarray]]:
    """Page by page the tokens [first, last), and a view of a frame where they are: uint32[last - first, words]."""
    size = geometry.page_tokens
    for page in range(begin // size, -(-end // size)):
        first, last = max(begin, page * size), min(end, (page + 1) * size)
        words = frame_of(page, field.frame)[field.offset : field.offset + size * field.words]
        yield (
            first,
            last,
            words.reshape(size, field.words)[first - page * size : last - page * size],
        )


# --- whole prefixes -------------------------------------------------------------------------------


def prefix_shapes(geometry: Geometry, position: int) -> dict[str, Shape]:
    """The arrays of what resuming at `position` takes."""
    pages = page_shapes(geometry, 0, position)
    return pages | window_shapes(geometry, position) | state_shapes(geometry)


def read_end(geometry: Geometry, position: int, frames: Frames) -> dict[str, Pieces]:
    """What resuming at `position` takes beside the pages of layers without a window, from its frames."""
    found = read_windows(geometry, position, frames.at)
    return found if frames.checkpoint is None else found | read_states(geometry, frames.checkpoint)


def write_end(
    geometry: Geometry, position: int, arrays: Mapping[str, np.ndarray], frames: Frames
) -> None:
    """The inverse of `read_end`, as far as there are frames."""
    write_windows(geometry, position, arrays, writable(geometry, frames))
    if frames.checkpoint is not None:
        write_states(geometry, arrays, frames.checkpoint)


def writable(geometry: Geometry, frames: Frames) -> FrameOf:
    """Frames to write; what goes to others is lost."""
    lost: np.ndarray = np.zeros(geometry.frame_words, np.uint32)
    return lambda page, column: frames.pages.get((page, column), lost)


# --- checkpoints ----------------------------------------------------------------------------------


def state_shapes(geometry: Geometry) -> dict[str, Shape]:
    """The arrays of a checkpoint."""
    if geometry.narrow is not None:
        words = sum(sum(part) for part in geometry.narrow.parts)
        return {NARROW: Shape("uint32", (words,))}
    found, bits = {}, "uint32" if geometry.dtype == "float32" else "uint16"
    for number, place in enumerate(geometry.states):
        layout = place.of(geometry).layout
        if layout.units:
            found[f"state.{number}"] = Shape("float32", (layout.units, layout.unit_words))
        if layout.columns:
            found[f"columns.{number}"] = Shape(bits, (layout.columns, layout.channels))
    return found


def read_states(geometry: Geometry, frames: np.ndarray) -> dict[str, Pieces]:
    """The arrays of a checkpoint, from its frames uint32[n, frame_words]."""
    if geometry.narrow is not None:
        [narrow] = state_shapes(geometry).values()
        return {NARROW: Pieces(*narrow, [frames.reshape(-1)[: math.prod(narrow.shape)]])}
    found = {}
    for name, (dtype, shape), words in _state_words(geometry, frames):
        rest, parts = math.prod(shape) * np.dtype(dtype).itemsize, []
        for part in words:
            own: np.ndarray = part.view(np.uint8)[:rest]
            parts.append(own)
            rest -= own.size
        found[name] = Pieces(dtype, shape, parts)
    return found


def write_states(geometry: Geometry, arrays: Mapping[str, np.ndarray], frames: np.ndarray) -> None:
    """The inverse of `read_states`: writes to frames uint32[n, frame_words] of zeros."""
    if geometry.narrow is not None:
        frames.reshape(-1)[: arrays[NARROW].size] = arrays[NARROW]
        return
    for name, _, words in _state_words(geometry, frames):
        data = np.ascontiguousarray(arrays[name]).reshape(-1).view(np.uint8)
        data = np.pad(data, (0, -data.size % 4)).view(np.uint32)
        begin = 0
        for part in words:
            rest = data[begin : begin + part.size]
            part.reshape(-1)[: rest.size] = rest
            begin += rest.size


def narrow_arrays(geometry: Geometry, words: np.ndarray) -> dict[str, np.ndarray]:
    """Views of the layers' arrays in the words uint32[n] of a narrow checkpoint.

    Those of the I-th recurrent layer are codes.I int8[units, words of a unit], or float32 where there are no scales,
    scales.I float32[units, scales], and columns.I uint16 or uint32[columns, channels].
    """
    assert geometry.narrow is not None, "parcel: checkpoints stay as rows have them"
    bits = np.dtype("uint32" if geometry.dtype == "float32" else "uint16")
    found, begins = {}, np.cumsum([0, *(sum(part) for part in geometry.narrow.parts)])
    for number, place in enumerate(geometry.states):
        group, sizes = place.of(geometry), geometry.narrow.parts[place.group]
        layout, own = group.layout, words[begins[place.group] : begins[place.group + 1]]
        codes, scales, columns = np.split(own, np.cumsum(sizes[:-1]))
        if layout.units:
            flat = codes.view(np.int8 if layout.scales else np.float32)
            count = layout.state_words
            of_layer = flat[place.layer * count : (place.layer + 1) * count]
            found[f"codes.{number}"] = of_layer.reshape(layout.units, layout.unit_words)
        if layout.scales:
            of_layers = scales.view(np.float32).reshape(-1, layout.units, layout.scales)
            found[f"scales.{number}"] = of_layers[place.layer]
        if layout.columns:
            line = columns.reshape(-1, group.column_words)[place.layer].view(bits)
            line = line[: layout.columns * layout.channels]
            found[f"columns.{number}"] = line.reshape(layout.columns, layout.channels)
    return found


def _state_words(
    geometry: Geometry, frames: np.ndarray
) -> Iterator[tuple[str, Shape, list[np.ndarray]]]:
    """Each array of a checkpoint, and views of where its words are in frames."""
    shapes = state_shapes(geometry)
    for number, place in enumerate(geometry.states):
        for name, words in (
            (f"state.{number}", _own_states(place, geometry, frames)),
            (f"columns.{number}", _own_columns(place, geometry, frames)),
        ):
            if name in shapes:
                yield name, shapes[name], words


def _own_states(place: StatePlace, geometry: Geometry, frames: np.ndarray) -> list[np.ndarray]:
    group = place.of(geometry)
    begin, layout = group.state_frame(place.layer), group.layout
    per_frame = group.units_per_frame * layout.unit_words
    return [frame[:per_frame] for frame in frames[begin : begin + group.frames_per_layer]]


def _own_columns(place: StatePlace, geometry: Geometry, frames: np.ndarray) -> list[np.ndarray]:
    """A layer's columns may begin in one frame and end in the next."""
    group, size = place.of(geometry), geometry.frame_words
    begin, end = place.layer * group.column_words, (place.layer + 1) * group.column_words
    own = frames[group.columns]
    return [
        own[number, max(begin - number * size, 0) : min(end - number * size, size)]
        for number in range(begin // size, -(-end // size))
    ]
