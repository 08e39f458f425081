"""Shapes and bytes of everything that an engine keeps. It uses the standard library only.

There is one `Geometry` for each model with engine settings. The arena, the rings, the budgets and the cache's
arithmetic all follow from it, so no shape is stated twice.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import NamedTuple

from hybrid_jax.config import EngineConfig, ModelConfig
from hybrid_jax.config.arrays import FP8, ITEM_BYTES, ArraySpec
from hybrid_jax.kinds.kind import PageEntry, StateLayout
from hybrid_jax.kinds.table import entry_of, recurrent_kind

FRAME_TARGET_BYTES = 256 * 1024
LEAST_FRAME_WORDS = 16
NUM_FRAMES_LIMIT = 1 << 24  # a handle keeps 24 bits of frame id
PROMPT_POSITIONS = 32  # prompt positions whose logits exist at once, for their log-probabilities
# How many arrays as large as the logits XLA holds at once, by its own count; tests/sizing/test_sizing.py checks this.
LOGITS_OF_A_ROW = 10  # 7 if nothing is reported or adjusted, 9.6 if both are
LOGITS_OF_A_POSITION = 2
KERNEL_LOGITS_MARGIN = 1.05  # for log-probabilities; tests/aot


@dataclass(frozen=True, kw_only=True)
class KVPlace:
    """Where one layer has its entries in every page, such as its keys and values.

    Attributes:
        frame: index of the frame in the page. offset: words of that frame in front of the layer's entries.
        token_words: words of one token's entry, without scales.
        scale_words: words of its scales, for FP8. Those of a page lie after the entries of all its tokens.
    """

    frame: int
    offset: int
    token_words: int
    scale_words: int = 0


@dataclass(frozen=True, kw_only=True)
class StateGroup:
    """The recurrent layers of one spec. They share a part of every checkpoint and a set of rings.

    For each group, a checkpoint holds the states of the group's layers, and then their convolution columns.

    Attributes:
        layout: what one layer caches.
        num_layers: layers of the group.
        units_per_frame: units of a state in one frame.
        first_frame: index of the first frame of the group's part of a checkpoint.
        column_words: words of one layer's columns. column_frames: frames of the columns of all layers.
    """

    layout: StateLayout
    num_layers: int
    units_per_frame: int
    first_frame: int
    column_words: int
    column_frames: int

    @property
    def frames_per_layer(self) -> int:
        """Frames of one layer's state."""
        return -(-self.layout.units // self.units_per_frame)

    @property
    def num_frames(self) -> int:
        """Frames of the group's part of a checkpoint."""
        return self.num_layers * self.frames_per_layer + self.column_frames

    @property
    def columns(self) -> slice:
        """Which frames of a checkpoint hold the columns."""
        end = self.first_frame + self.num_frames
        return slice(end - self.column_frames, end)

    @property
    def used_words(self) -> int:
        """Words of the group's part of a checkpoint, without the padding of frames."""
        return self.num_layers * (self.layout.state_words + self.column_words)

    def state_frame(self, layer: int) -> int:
        """Index of the first frame of a checkpoint that holds the state of this layer of the group."""
        return self.first_frame + layer * self.frames_per_layer


class NarrowPart(NamedTuple):
    """Words of one group of layers in a narrow checkpoint, in this order.

    Attributes:
        states: int8 codes of all layers' states, four to a word, or float32 states where there are no scales.
        scales: of the codes, float32. columns: of all layers, as in `StateGroup`.
    """

    states: int
    scales: int
    columns: int


@dataclass(frozen=True, kw_only=True)
class NarrowForm:
    """How the cache keeps checkpoints as int8: all parts are one run of words, which fills frame after frame.

    Attributes:
        num_frames: frames of a checkpoint. parts: of each group.
    """

    num_frames: int
    parts: tuple[NarrowPart, ...]


@dataclass(frozen=True, kw_only=True)
class PageGroup:
    """The layers with pages that see equally far back. They share the first frames of a page, or the next ones.

    Attributes:
        window: how many tokens their queries see, with the query itself; None for all.
        first_frame, num_frames: which frames of a page are theirs.
        max_pages: the most pages whose frames a row must hold at once to go on; None without a window.
    """

    window: int | None
    first_frame: int
    num_frames: int
    max_pages: int | None = None

    @property
    def frames(self) -> slice:
        """Which frames of a page are theirs."""
        return slice(self.first_frame, self.first_frame + self.num_frames)


class StatePlace(NamedTuple):
    """A recurrent layer's group, by its number, and the layer's index in the group."""

    group: int
    layer: int

    def of(self, geometry: Geometry) -> StateGroup:
        """The layer's group."""
        return geometry.groups[self.group]


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """Where pages and checkpoints of a model lie in equal frames.

    Attributes:
        frame_words: uint32 words of one frame.
        page_tokens: tokens of one KV page; 0 without attention.
        page_groups: the layers with pages by their window; the one that sees everything comes first.
        kv: place of each layer with pages, in layer order.
        groups: the recurrent layers by their spec.
        states: place of each recurrent layer, in layer order.
        grain: tokens between resume points.
        dtype: dtype of ring records and convolution columns. kv_dtype: of KV pages.
        narrow: the form in which the cache keeps checkpoints; None for that of rows.
    """

    frame_words: int
    page_tokens: int
    page_groups: tuple[PageGroup, ...]
    kv: tuple[KVPlace, ...]
    groups: tuple[StateGroup, ...]
    states: tuple[StatePlace, ...]
    grain: int
    dtype: str
    kv_dtype: str
    narrow: NarrowForm | None = None

    @property
    def frame_bytes(self) -> int:
        """Bytes of one frame."""
        return 4 * self.frame_words

    @functools.cached_property
    def state_frames(self) -> int:
        """Frames of one checkpoint as rows have it; 0 for a model without recurrent layers."""
        return sum(group.num_frames for group in self.groups)

    @property
    def checkpoint_frames(self) -> tuple[int, ...]:
        """Frames of a checkpoint in each form: that of rows, and the narrow one if there is one."""
        return (self.state_frames, *((self.narrow.num_frames,) if self.narrow else ()))

    @property
    def cached_state_frames(self) -> int:
        """Frames of one checkpoint in the cache."""
        return self.checkpoint_frames[-1]

    @functools.cached_property
    def frames_per_page(self) -> int:
        """Frames of one page; 0 without attention."""
        return sum(group.num_frames for group in self.page_groups)

    @functools.cached_property
    def windowed(self) -> tuple[PageGroup, ...]:
        """The groups of pages that have a window."""
        return tuple(group for group in self.page_groups if group.window is not None)

    @property
    def has_pages(self) -> bool:
        """Whether the model has attention layers."""
        return bool(self.kv)

    @property
    def has_state(self) -> bool:
        """Whether the model has recurrent layers."""
        return bool(self.states)

    def num_pages(self, num_tokens: int) -> int:
        """How many pages `num_tokens` tokens take."""
        return -(-num_tokens // self.page_tokens) if self.has_pages else 0

    def first_page(self, group: PageGroup, position: int) -> int:
        """The first page of which a query at `position`, or a later one, may see something in a group's layers."""
        return max(position - group.window + 1, 0) // self.page_tokens if group.window else 0

    def window_pages(self, group: PageGroup) -> int:
        """The pages that a row reads through a group's window if it goes on at the start of a page."""
        assert group.window, "geometry: a group without a window"
        return -(-(group.window - 1) // self.page_tokens)

    @property
    def about_windows(self) -> str:
        """What rows hold of layers with a sliding window, in words; "" if there are none."""
        held = (
            f"of {group.window:,} tokens: a row holds at most {group.max_pages} pages of these layers"
            for group in self.windowed
        )
        return "; ".join(held)

    def cached_frames(self, num_tokens: int) -> int:
        """How many frames a cached prefix takes that shares none, with the checkpoint at its end."""
        pages, frames = self.num_pages(num_tokens), self.cached_state_frames
        for group in self.page_groups:
            first = self.first_page(group, num_tokens) if self.has_state else 0
            frames += (pages - first) * group.num_frames
        return frames

    def page_frames(self, num_tokens: int) -> int:
        """How many frames the pages of a sequence take that shares none; with a window, those that it holds at once."""
        pages = self.num_pages(num_tokens)
        return sum(min(pages, g.max_pages or pages) * g.num_frames for g in self.page_groups)

    def row_frames(self, num_tokens: int) -> int:
        """How many frames a sequence takes that shares nothing: its pages, and a checkpoint once it is past a grain."""
        state = self.state_frames if num_tokens > self.grain else 0
        return self.page_frames(num_tokens) + state

    def longest_row(self, num_frames: int) -> int:
        """The most tokens of one sequence in `num_frames` frames; a huge number if frames do not limit it."""
        low, high = 0, 1 << 40
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (
                (middle, high) if self.row_frames(middle) <= num_frames else (low, middle - 1)
            )
        return low

    def align(self, position: int) -> int:
        """The last grain boundary at or before `position`."""
        return position - position % self.grain

    def checkpoint(self, num_tokens: int) -> int:
        """Where the checkpoint of a decoding row stands; the row's ring keeps at least its last token."""
        return self.align(max(num_tokens - 1, 0))


def token_words(entry: PageEntry, dtype: str) -> int:
    """Words of what one layer keeps of a token in its pages, without scales.

    Raises:
        ValueError: a head, or an entry, does not fill whole words.
    """
    if dtype == FP8 and entry.scaled % 4:
        raise ValueError(
            f"Geometry: kv_cache_dtype='fp8' needs head sizes that are multiples of 4, got {entry.scaled}; "
            "use kv_cache_dtype='auto'"
        )
    if dtype == FP8 and entry.elements % entry.scaled:
        raise ValueError(
            f"Geometry: {entry.elements} elements of a token must be a multiple of those that share a scale, got "
            f"{entry.scaled}"
        )
    if entry.elements * ITEM_BYTES[dtype] % 4:
        raise ValueError(
            f"Geometry: what a layer keeps of a token must fill words of 4 bytes, got {entry.elements} elements of "
            f"{dtype}"
        )
    return entry.elements * ITEM_BYTES[dtype] // 4


def make_geometry(model: ModelConfig, engine: EngineConfig) -> Geometry:
    """Chooses frame size and page size so that pages and checkpoints both fill their frames.

    Every frame of a page holds the same number of layers, one after the other, and all of them see equally far back.

    Args:
        model: the model.
        engine: gives grain, page size (or None) and dtype.

    Raises:
        ValueError: the grain is shorter than the convolution's history, or FP8 does not fit the heads.
    """
    entries = [entry_of(spec) for spec in model.paged]
    tokens = [token_words(entry, engine.kv_dtype) for entry in entries]
    scaled = engine.kv_dtype == FP8
    scales = [entry.elements // entry.scaled for entry in entries] if scaled else None
    layouts = [replace(recurrent_kind(spec).layout(spec), spec=spec) for spec in model.recurrent]
    return fit_geometry(
        tokens, layouts, engine, scales=scales, windows=[entry.window for entry in entries]
    )


def fit_geometry(
    tokens: list[int],
    layouts: list[StateLayout],
    engine: EngineConfig,
    *,
    scales: list[int] | None = None,
    windows: list[int | None] | None = None,
    min_page_tokens: int = 64,
) -> Geometry:
    """`make_geometry` for a model of which it is only known what its layers cache.

    Args:
        tokens: for each attention layer, the words of one token's K and V.
        layouts: what each recurrent layer caches.
        engine: as in `make_geometry`.
        scales: for each attention layer, the words of one token's scales; None if there are none.
        windows: for each attention layer, how many tokens a query sees; None if all see everything.
        min_page_tokens: the smallest page that is considered if the engine leaves the size open. 64 suits a CPU, where
            shorter pages make the loop over pages too long.
    """
    for layout in layouts:
        if engine.grain < layout.columns:
            raise ValueError(
                f"Geometry: grain must be at least conv_width - 1, got {engine.grain} and "
                f"conv_width {layout.columns + 1}; raise grain"
            )
    if engine.page_tokens is not None:
        page_sizes = [engine.page_tokens]
    else:
        page_sizes = [t for t in (16, 32, 64, 128) if t >= min_page_tokens]
    windows = [None] * len(tokens) if windows is None else windows
    counts = Counter(sorted(windows, key=lambda window: window or 0))
    # Layers of one window stand side by side.
    order = sorted(range(len(tokens)), key=lambda index: windows[index] or 0)
    if not tokens:
        page_sizes, splits = [0], [0]
    else:
        splits = [d for d in range(1, len(tokens) + 1) if math.gcd(*counts.values()) % d == 0]
    scales = [0] * len(tokens) if scales is None else scales
    sizes = [tokens[index] + scales[index] for index in order]
    options = []
    for page_tokens in page_sizes:
        for layers in splits:
            page = [page_tokens * sum(sizes[i : i + layers]) for i in _starts(sizes, layers)]
            for words in _frame_options(max(page, default=0), layouts):
                options.append((_cost(words, page, layouts), words, page_tokens, layers))
    _, words, page_tokens, layers = min(options)
    groups, states = _state_groups(layouts, words, engine.dtype)
    return Geometry(
        frame_words=words,
        narrow=narrow_form(groups, words) if engine.cache.checkpoints == "int8" else None,
        page_tokens=page_tokens,
        page_groups=page_groups(
            counts,
            layers=layers,
            page_tokens=page_tokens,
            longest_chunk=engine.prefill_tokens,
            grain=engine.grain,
        ),
        kv=tuple(
            KVPlace(
                frame=place // layers,
                offset=page_tokens * sum(sizes[place - place % layers : place]),
                token_words=tokens[index],
                scale_words=scales[index],
            )
            for index, place in sorted(zip(order, range(len(order)), strict=True))
        ),
        groups=groups,
        states=states,
        grain=engine.grain,
        dtype=engine.dtype,
        kv_dtype=engine.kv_dtype,
    )


def sized_geometry(
    *,
    frame_words: int,
    page_tokens: int,
    frames_per_page: int,
    token_words: int,
    state_frames: int,
    grain: int,
    narrow_frames: int = 0,
) -> Geometry:
    """A geometry for a model of which only sizes are known: one layer has all K and V, another the whole state.

    Args:
        token_words: words of one token's K and V over all layers; 0 without attention.
        state_frames: frames of a checkpoint. narrow_frames: in the cache, if these are fewer; 0 if not.
    """
    layout = StateLayout(
        units=state_frames, unit_words=frame_words, columns=0, channels=0, records=()
    )
    groups, states = _state_groups([layout] if state_frames else [], frame_words, "bfloat16")
    return Geometry(
        frame_words=frame_words,
        page_tokens=page_tokens,
        page_groups=(
            (PageGroup(window=None, first_frame=0, num_frames=frames_per_page),)
            if token_words
            else ()
        ),
        kv=(KVPlace(frame=0, offset=0, token_words=token_words),) if token_words else (),
        groups=groups,
        states=states,
        grain=grain,
        dtype="bfloat16",
        kv_dtype="bfloat16",
        narrow=NarrowForm(num_frames=narrow_frames, parts=()) if narrow_frames else None,
    )


def page_groups(
    counts: Counter[int | None], *, layers: int, page_tokens: int, longest_chunk: int, grain: int
) -> tuple[PageGroup, ...]:
    """The groups of the given numbers of layers by window, None first, with `layers` layers per frame.

    Args:
        longest_chunk: the most tokens of a prompt that a step takes of one row.
        grain: tokens between resume points.
    """
    # A decoding row keeps what is read from the resume point before its last one on (`Memory.give_back`). It moves
    # both on when it has been fed a grain of tokens after the last, and before the next one.
    span = max(longest_chunk, 2 * grain + 1)
    groups: list[PageGroup] = []
    for window, count in counts.items():
        pages = None
        if window is not None:  # the pages that window - 1 tokens and the span may touch
            pages = -(-(window + span - 2) // page_tokens) + 1
        first = sum(group.num_frames for group in groups)
        groups.append(
            PageGroup(window=window, first_frame=first, num_frames=count // layers, max_pages=pages)
        )
    return tuple(groups)


def _starts(sizes: list[int], layers: int) -> range:
    """The first layer of each frame of a page, with `layers` layers per frame."""
    return range(0, len(sizes), max(layers, 1))


def _state_groups(
    layouts: list[StateLayout], words: int, dtype: str
) -> tuple[tuple[StateGroup, ...], tuple[StatePlace, ...]]:
    """The groups in the order of their first layers, and the place of each layer."""
    counts = Counter(layouts)
    groups: list[StateGroup] = []
    for layout, count in counts.items():
        columns = -(-layout.columns * layout.channels * ITEM_BYTES[dtype] // 4)
        groups.append(
            StateGroup(
                layout=layout,
                num_layers=count,
                units_per_frame=_units_per_frame(layout, words),
                first_frame=sum(group.num_frames for group in groups),
                column_words=columns,
                column_frames=-(-count * columns // words),
            )
        )
    numbers = {layout: i for i, layout in enumerate(counts)}
    seen: Counter[StateLayout] = Counter()
    places = []
    for layout in layouts:
        places.append(StatePlace(numbers[layout], seen[layout]))
        seen[layout] += 1
    return tuple(groups), tuple(places)


def narrow_parts(groups: tuple[StateGroup, ...]) -> tuple[NarrowPart, ...]:
    """The parts of a narrow checkpoint, one for each group."""
    parts = []
    for group in groups:
        layout, units = group.layout, group.num_layers * group.layout.units
        assert not layout.scales or layout.unit_words % layout.scales == 0, layout
        codes = -(-units * layout.unit_words // (4 if layout.scales else 1))
        parts.append(
            NarrowPart(codes, units * layout.scales, group.num_layers * group.column_words)
        )
    return tuple(parts)


def narrow_form(groups: tuple[StateGroup, ...], words: int) -> NarrowForm | None:
    """The narrow form of checkpoints in frames of so many words; None if it takes as many frames as that of rows."""
    parts = narrow_parts(groups)
    frames = -(-sum(map(sum, parts)) // words)
    rows = sum(group.num_frames for group in groups)
    return NarrowForm(num_frames=frames, parts=parts) if frames < rows else None


def _frame_options(page_words: int, layouts: list[StateLayout]) -> list[int]:
    """Frame sizes that are worth trying: the page's own size, and whole blocks of units that hold a page."""
    if not layouts:
        return [page_words]
    least = max(page_words, LEAST_FRAME_WORDS, *(layout.unit_words for layout in layouts))
    sizes = {_round_up(least, 16)}
    for layout in set(layouts):
        for frames in range(1, layout.units + 1):  # none where columns are all that is cached
            words = _round_up(-(-layout.units // frames) * layout.unit_words, 16)
            if words >= least:
                sizes.add(words)
    return sorted(sizes)


def _cost(words: int, page: list[int], layouts: list[StateLayout]) -> float:
    """Wasted share of pages and checkpoints, plus a pull towards the usual frame size."""
    held = len(page) * words
    waste = (held - sum(page)) / held if held else 0.0
    frames = sum(-(-layout.units // _units_per_frame(layout, words)) for layout in layouts)
    if frames:
        waste += 1 - sum(layout.state_words for layout in layouts) / (frames * words)
    distance = abs(math.log2(4 * words / FRAME_TARGET_BYTES))
    return waste + 0.02 * distance


def _units_per_frame(layout: StateLayout, words: int) -> int:
    """How many units of a state a frame of so many words holds; any number for a layer that has none."""
    return min(words // layout.unit_words, layout.units) if layout.units else 1


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


def checkpoint_padding(geometry: Geometry) -> float:
    """Share of a checkpoint's frames that holds nothing."""
    if not geometry.has_state:
        return 0.0
    used = sum(group.used_words for group in geometry.groups)
    return 1 - used / (geometry.state_frames * geometry.frame_words)


def page_padding(geometry: Geometry) -> float:
    """Share of a KV page's frames that holds nothing."""
    if not geometry.has_pages:
        return 0.0
    used = geometry.page_tokens * kv_bytes_per_token(geometry)
    return 1 - used / (geometry.frames_per_page * geometry.frame_bytes)


def ring_specs(
    geometry: Geometry, *, num_rows: int, window: int, aligned: bool = False
) -> tuple[dict[str, ArraySpec], ...]:
    """Specs of the arrays in each group's rings.

    `conv` has the raw inputs of the convolution. The records since the checkpoint have arrays by their names. A kind
    that carries its state has `state` instead: copies of the state. The state after p tokens is copy p modulo the
    number of copies. Usually there is one copy. If it is decided after a window how many of its new tokens stay, there
    is one copy for each number of tokens that may stay.

    Args:
        geometry: the model's geometry.
        num_rows: batch rows, the sink row included.
        window: the most new tokens of a decoding row in a window (1 for plain decode).
        aligned: windows are as long as the grain and aligned to it, so the ring needs no room after its last record.
    """
    bits = "uint16" if geometry.dtype != "float32" else "uint32"
    room = geometry.grain + (0 if aligned else window - 1)
    copies = 1 if window == 1 else window + 1
    width = geometry.grain if aligned else window
    found = []
    for group in geometry.groups:
        layout, lead = group.layout, (group.num_layers, num_rows)
        rings = {}
        if layout.columns:
            columns = (layout.columns + width, layout.channels)
            rings["conv"] = ArraySpec((*lead, *columns), bits)
        if layout.carries:
            states = (copies, layout.state_words)
            rings["state"] = ArraySpec((*lead, *states), "float32")
        for name, size, dtype in layout.records:
            rings[name] = ArraySpec((*lead, room, size), dtype or bits)
        found.append(rings)
    return tuple(found)


def table_specs(geometry: Geometry, *, max_slots: int, max_rows: int) -> dict[str, ArraySpec]:
    """Specs of the small arrays of a state: the slot table, and the next token and the length of each row."""
    row = ArraySpec((max_rows + 1,), "int32")
    frames = max(geometry.state_frames, 1)
    return {
        "slots": ArraySpec((max_slots, frames), "int32"),
        "tokens": row,
        "lengths": row,
    }


def drafting_specs(
    model: ModelConfig, engine: EngineConfig, max_model_len: int
) -> dict[str, ArraySpec]:
    """Specs of what drafters keep of each row; the last row is the sink's."""
    found = {}
    if engine.speculation is not None and engine.speculation.keeps_history:
        # A window may reach over the end of the longest sequence.
        columns = max_model_len + engine.decode_tokens
        found["history"] = ArraySpec((engine.max_rows + 1, columns), "int32")
    if model.mtp:
        found["hidden"] = ArraySpec((engine.max_rows + 1, model.width), engine.dtype)
    return found


def adjust_specs(model: ModelConfig, *, num_rows: int) -> dict[str, ArraySpec]:
    """Specs of the arrays that change logits before sampling; `num_rows` includes the sink row."""
    shape = (num_rows, model.vocab_size)
    return {"counts": ArraySpec(shape, "int32"), "bias": ArraySpec(shape, "float32")}


# --- bytes ----------------------------------------------------------------------------------------


def kv_bytes_per_token(geometry: Geometry) -> int:
    """Bytes of one token's K and V over all attention layers, with their scales, without the padding of the page."""
    return 4 * sum(place.token_words + place.scale_words for place in geometry.kv)


def checkpoint_bytes(geometry: Geometry) -> int:
    """Bytes of one checkpoint as rows have it, its padding included."""
    return geometry.state_frames * geometry.frame_bytes


def cached_checkpoint_bytes(geometry: Geometry) -> int:
    """Bytes of one checkpoint in the cache, its padding included."""
    return geometry.cached_state_frames * geometry.frame_bytes


def logits_bytes(
    model: ModelConfig, *, max_rows: int, tokens: int = 1, dtype: str | None = None
) -> int:
    """Bytes of all arrays over the vocabulary in the largest step, for decoding rows or a prompt's positions.

    Args:
        tokens: of each row whose logits exist at once. Only those of one token of each row are sampled at once.
        dtype: dtype of the weights if the step is made of Pallas kernels; such a step holds the product in that dtype
            and in float32. None for a step that XLA makes.
    """
    row: float = LOGITS_OF_A_ROW * ITEM_BYTES["float32"]
    if dtype is not None:
        row = KERNEL_LOGITS_MARGIN * (ITEM_BYTES[dtype] + ITEM_BYTES["float32"])
    row += (tokens - 1) * ITEM_BYTES["float32"]
    position = LOGITS_OF_A_POSITION * ITEM_BYTES["float32"]
    return int(max(row * max_rows, position * PROMPT_POSITIONS) * model.vocab_size)
