"""What a model costs and what fits, from its config alone: `hybrid-jax inspect`. It needs neither weights nor jax."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hybrid_jax.byte_sizes import format_size
from hybrid_jax.config import EngineConfig, ModelConfig
from hybrid_jax.costs import prefill_flops, weight_count
from hybrid_jax.geometry import (
    Geometry,
    checkpoint_bytes,
    checkpoint_padding,
    kv_bytes_per_token,
    make_geometry,
    page_padding,
)
from hybrid_jax.models.files import (
    CONFIG_FILE,
    STORED_CONFIG_FILE,
    CheckpointNotFound,
    how_to_get,
    model_path,
)
from hybrid_jax.models.files import read_config as read_config_file
from hybrid_jax.sizing.budget import DEFAULT_LENGTH, MemorySplit
from hybrid_jax.sizing.devices import Device
from hybrid_jax.sizing.room import GPU_MEMORY_SHARE, Choose, Room, find_room, largest, steps_on

CONTEXTS = (512, 2048, 8192, 32768, 131072)
MAX_ROWS_SHOWN = 65536
KERNELS = {
    "xla": "what XLA compiles",
    "pallas": "Pallas, compiled for an H200 and not run on a GPU yet; on Hopper Triton scans prompts and draws tokens",
}
SHARE_TITLES = [
    *("tokens", "--max-rows", "weights", "sequences", "rows' own", "temporaries", "cache", "free"),
    *("for CUDA", "in all"),
]
RoomOf = Callable[[int], Room | None]


def read_config(path: str | Path) -> ModelConfig:
    """The config of a model directory, or of a config.json given by itself. There need not be any weights.

    Raises:
        FileNotFoundError: nothing is there.
        ValueError, NotImplementedError: the config is malformed or not supported.
    """
    given = model_path(path, "inspect")
    files = [given] if given.is_file() else [given / STORED_CONFIG_FILE, given / CONFIG_FILE]
    file = next((f for f in files if f.is_file()), None)
    if file is None:
        what = f"it has no {CONFIG_FILE}" if given.exists() else "it does not exist"
        raise CheckpointNotFound(
            f"inspect: {given} is not a model directory: {what}; {how_to_get(path)}"
        )
    return read_config_file(file, "inspect")


@dataclass(frozen=True, kw_only=True)
class Share:
    """Where a device's memory goes if as many sequences of one length run as fit. The bytes add up to all of it.

    Attributes:
        tokens: length of each sequence.
        rows: sequences.
        weight_bytes: of the weights.
        sequence_bytes: frames of the sequences: KV and a checkpoint each.
        row_bytes: rings, logits and the like of these rows, and the tables.
        temporary_bytes: of the largest step, an estimate.
        cache_bytes: frames that are left for cached prefixes.
        free_bytes: what nothing takes.
        reserved_bytes: what jax leaves to CUDA; 0 on a host.
    """

    tokens: int
    rows: int
    weight_bytes: int
    sequence_bytes: int
    row_bytes: int
    temporary_bytes: int
    cache_bytes: int
    free_bytes: int
    reserved_bytes: int


@dataclass(frozen=True, kw_only=True)
class ModelReport:
    """What a model costs under given engine settings, and what fits.

    Attributes:
        model, engine, device: what was asked. Where `engine` was given no `memory`, it has that of `sizes`.
        geometry: of the two.
        room: what the model takes, and whether the device has it.
        sizes: how `memory` is split. If none is given and the device does not have enough for the model, this is the
            default of a device that has.
        default: sizes of the engine if it is given no `memory` and the device has enough.
        default_fits: whether the device has that beside weights and temporaries; None if that is not known.
        longest_context: tokens of the longest sequence that has the arena to itself, within the model's own limit.
        rows: for some lengths in tokens, the most sequences of that length that fit together.
        shares: for some lengths, where the device's memory goes; empty if the model does not fit.
        remedy: what to do if the model does not fit.
    """

    model: ModelConfig
    engine: EngineConfig
    device: Device
    geometry: Geometry
    room: Room
    sizes: MemorySplit
    default: MemorySplit
    default_fits: bool | None
    longest_context: int
    rows: dict[int, int]
    shares: list[Share]
    remedy: str | None

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of the keys and values of a token; 0 without attention."""
        return kv_bytes_per_token(self.geometry)

    @property
    def checkpoint_tokens(self) -> float | None:
        """Tokens whose KV costs as much as one checkpoint; None without attention or without state."""
        size, per_token = checkpoint_bytes(self.geometry), self.kv_bytes_per_token
        return size / per_token if size and per_token else None

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON. Sizes are bytes, lengths are tokens.

        Keys that need a word:
            dtype, stored_dtype: of weights, activations and KV pages here; of the weights in the checkpoint.
            layers: how many there are of each kind.
            flops_per_token: of prefill at the start of a sequence, without logits.
            frame_bytes, page_tokens, frames_per_page, frames_per_checkpoint: the units of the arena.
            page_padding, checkpoint_padding: share of their frames that holds nothing.
            ring_bytes_per_row: outside the arena.
            grain: tokens between resume points.
            max_rows, max_model_len, prefill_tokens, steps_per_dispatch: engine settings. Those that were not given are
                as the engine chooses them for the device.
            default_memory, default_fits: as `default` and `default_fits`.
            fit: how `memory` is split, and what it holds: frames (with the sink), slots for checkpoints, the longest
                sequence, rows by length, and the most cached prefixes and tokens if nothing else is in the arena.
            platform, device: "cpu" or "gpu", and the card's name if that is known.
            machine_bytes, total_bytes: memory of the device that a model may take, and all memory of a card; None if
                they are not known.
            kernels: what steps are made of: "xla", or "pallas", where Triton kernels may take a part.
            temporary_bytes: of the largest step, an estimate.
            needed_bytes, needs: of weights, `memory` and temporaries together, and the parts in words. If the model
                does not fit and no budget is given, this is with the least `memory` that serves these rows.
            fits: whether the device has them; None if that is not known.
        """
        model, engine, geometry, device = self.model, self.engine, self.geometry, self.device
        return {
            "family": model.family,
            "max_position": model.max_position,
            "width": model.width,
            "vocab_size": model.vocab_size,
            "dtype": engine.dtype,
            "stored_dtype": model.dtype,
            "layers": _count_blocks(model),
            "parameters": weight_count(model),
            "weight_bytes": self.room.weight_bytes,
            "flops_per_token": prefill_flops(model, 1),
            "kv_bytes_per_token": self.kv_bytes_per_token,
            "checkpoint_bytes": checkpoint_bytes(geometry),
            "checkpoint_tokens": self.checkpoint_tokens,
            "frame_bytes": geometry.frame_bytes,
            "page_tokens": geometry.page_tokens,
            "frames_per_page": geometry.frames_per_page,
            "frames_per_checkpoint": geometry.state_frames,
            "page_padding": page_padding(geometry),
            "checkpoint_padding": checkpoint_padding(geometry),
            "ring_bytes_per_row": self._ring_bytes,
            "grain": geometry.grain,
            "max_rows": engine.max_rows,
            "max_model_len": self.default.max_model_len,
            "prefill_tokens": engine.prefill_tokens,
            "steps_per_dispatch": engine.steps_per_dispatch,
            "default_memory": self.default.total_bytes,
            "default_fits": self.default_fits,
            "fit": self._fit(),
            "platform": device.platform,
            "device": device.name,
            "machine_bytes": device.num_bytes,
            "total_bytes": device.total_bytes,
            "kernels": steps_on(device, engine.kernels),
            "shares": [asdict(share) for share in self.shares],
            "temporary_bytes": self.room.temporary_bytes,
            "needed_bytes": self.room.needed_bytes,
            "fits": self.room.fits,
            "remedy": self.remedy,
            "needs": self.room.parts(),
            "cache": self.cache_summary(),
        }

    def _fit(self) -> dict[str, Any]:
        """How the budget is split, and what it holds."""
        sizes, geometry = self.sizes, self.geometry
        frames = sizes.num_frames - 1  # the sink holds nothing
        pages = frames // geometry.frames_per_page if geometry.has_pages else 0
        return {
            "memory": self.engine.memory,
            "arena_bytes": sizes.arena_bytes,
            "ring_bytes": sizes.ring_bytes,
            "table_bytes": sizes.table_bytes,
            "logits_bytes": sizes.logits_bytes,
            "adjust_bytes": sizes.adjust_bytes,
            "num_frames": sizes.num_frames,
            "num_slots": sizes.max_slots,
            "longest_context": self.longest_context,
            "rows": self.rows,
            "cached_prefixes": frames // geometry.state_frames if geometry.has_state else 0,
            "cached_tokens": pages * geometry.page_tokens,
        }

    @property
    def _ring_bytes(self) -> int:
        return self.default.ring_bytes // (self.engine.max_rows + 1)

    def cache_summary(self) -> str:
        """What the prefix cache can do for this model, in a few words."""
        grain = self.geometry.grain
        if not self.geometry.state_frames:
            return (
                f"A prompt can resume at any multiple of {grain} tokens whose KV is cached; "
                "there is no recurrent state."
            )
        cost = f"A checkpoint takes {format_size(checkpoint_bytes(self.geometry))}"
        if self.checkpoint_tokens:
            cost += f", as much as the KV of {self.checkpoint_tokens:,.0f} tokens"
        return (
            f"A prompt can resume where a checkpoint stands, at multiples of {grain} tokens: at the "
            f"end of prompts and outputs, and where prompts part. {cost}."
        )

    def _device(self) -> str:
        """Whether the model fits the device, and why."""
        device, needs = self.device, self.room.parts()
        if device.num_bytes is None:
            return f"its memory is not known here; {needs}"
        has = f"of {format_size(device.num_bytes)}"
        if device.total_bytes is not None:
            share, size = device.num_bytes / device.total_bytes, format_size(device.total_bytes)
            has += f" ({share:.0%} of the card's {size}; the rest is for CUDA)"
        if not self.room.fits:
            return f"does not fit; {needs}, {has}; {self.remedy}"
        return f"fits; {needs} {has}, {format_size(device.num_bytes - self.room.needed_bytes)} left"

    def _default_memory(self) -> str:
        """How much the engine takes unless it is told, and why."""
        size = format_size(self.default.total_bytes)
        if self.default_fits and not self.device.is_host:
            return (
                f"{size}: {GPU_MEMORY_SHARE:.0%} of what weights and temporaries leave, or less, so that the compiler "
                "can time the largest product"
            )
        length = min(self.default.max_model_len, DEFAULT_LENGTH)
        said = f"{size} for {_rows(self.engine.max_rows)} of up to {length:,} tokens"
        if not self.device.is_host:
            return said
        return (
            f"{said}; less where that is more than 1/4 of a host's RAM, or than 1/2 of what is free beside the "
            "weights"
        )

    def table(self) -> list[list[str]]:
        """`shares` for people: a line of titles, then one for each length. Empty if there are none."""
        if not self.shares:
            return []
        lines = [list(SHARE_TITLES)]
        for share in self.shares:
            sizes = [value for name, value in asdict(share).items() if name.endswith("_bytes")]
            cells = [format_size(size) for size in (*sizes, sum(sizes))]
            lines.append([f"{share.tokens:,}", f"{share.rows:,}", *cells])
        if self.device.is_host:  # nothing is reserved there
            for line in lines:
                del line[-2]
        return lines

    def lines(self) -> list[tuple[str, str]]:
        """(name, value) pairs for people."""
        model, engine, geometry, sizes = self.model, self.engine, self.geometry, self.sizes
        kinds = ", ".join(f"{count} {kind}" for kind, count in _count_blocks(model).items())
        rows = ", ".join(f"{count:,} of {length:,}" for length, count in self.rows.items())
        fits = self.room.fits is not False
        device = self.device.name or ("this machine" if self.device.is_host else "this GPU")
        weights = f"{format_size(self.room.weight_bytes)} {engine.dtype}"
        lines = [
            (True, device, self._device()),
            (
                True,
                "family",
                f"{model.family}, width {model.width:,}, vocabulary {model.vocab_size:,}",
            ),
            (True, "blocks", kinds),
            (
                True,
                "dtype",
                f"{engine.dtype}, stored as {model.dtype} (auto: float32 on a CPU, elsewhere as stored)",
            ),
            (True, "parameters", f"{weight_count(model):,} ({weights})"),
            (True, "prefill", f"{prefill_flops(model, 1) / 1e9:.3g} GFLOP a token"),
            (True, "context", f"{model.max_position:,} tokens"),
            (self.kv_bytes_per_token, "KV", f"{format_size(self.kv_bytes_per_token)} a token"),
            (
                geometry.state_frames,
                "checkpoint",
                f"{format_size(checkpoint_bytes(geometry))} in {_frames(geometry.state_frames)} "
                f"({checkpoint_padding(geometry):.1%} padding)",
            ),
            (
                geometry.page_tokens,
                "page",
                f"{geometry.page_tokens} tokens in {_frames(geometry.frames_per_page)} "
                f"({page_padding(geometry):.1%} padding)",
            ),
            (True, "frame", format_size(geometry.frame_bytes)),
            (self._ring_bytes, "ring", f"{format_size(self._ring_bytes)} a row"),
            (
                True,
                "steps",
                f"{_rows(engine.max_rows)}, chunks of up to {engine.prefill_tokens:,} prompt tokens, "
                f"{engine.steps_per_dispatch} tokens a row and dispatch",
            ),
            (True, "kernels", KERNELS[steps_on(self.device, engine.kernels)]),
            (True, "default memory", self._default_memory()),
            (
                fits,
                "budget",
                f"{format_size(engine.memory or 0)}: arena {format_size(sizes.arena_bytes)} in {sizes.num_frames:,} "
                f"frames, rings {format_size(sizes.ring_bytes)} for {_rows(engine.max_rows)}, tables "
                f"{format_size(sizes.table_bytes)} for {sizes.max_slots:,} checkpoints, logits "
                f"{format_size(sizes.logits_bytes)}, penalties and biases {format_size(sizes.adjust_bytes)}",
            ),
            (fits, "longest context", f"{self.longest_context:,} tokens"),
            (fits, "most rows", rows or "none"),
            (True, "prefix cache", self.cache_summary()),
        ]
        return [(name, value) for shown, name, value in lines if shown]


def inspect_model(
    config: ModelConfig,
    engine: EngineConfig,
    device: Device | None = None,
    choose: Choose | None = None,
) -> ModelReport:
    """Works out what a model costs under the given engine settings.

    Args:
        config: the model.
        engine: dtype, grain, rows, lengths; `memory` None stands for the engine's default.
        device: what would run it, which bounds that default; None for a CPU whose memory is not known. It is an answer,
            not a mistake, that a model does not fit.
        choose: as in `Room`.

    Raises:
        ValueError: a setting does not fit the model, or the memory cannot hold one short sequence.

    Example:
        >>> from hybrid_jax.config import Attention, EngineConfig, LayerSpec, ModelConfig
        >>> attention = Attention(num_heads=4, num_kv_heads=2, head_dim=64)
        >>> config = ModelConfig(
        ...     family="llama", vocab_size=256, width=256, layers=(LayerSpec(mixers=(attention,)),)
        ... )
        >>> report = inspect_model(config, EngineConfig(max_rows=4))
        >>> report.kv_bytes_per_token, report.longest_context
        (1024, 4096)
    """
    device = Device() if device is None else device
    geometry = make_geometry(config, engine)
    room = find_room(config, engine, device, choose=choose)
    default_room = find_room(config, replace(engine, memory=None), device)
    default = default_room.sizes
    if device.is_host or not default_room.fits:
        unbounded = Device(platform=device.platform, capability=device.capability)
        default = find_room(config, replace(engine, memory=None), unbounded).sizes
    sizes = default if engine.memory is None and room.fits is False else room.sizes
    engine = replace(engine, memory=engine.memory or sizes.total_bytes)
    room_of, limit = _rooms(config, engine, device), max(MAX_ROWS_SHOWN, engine.max_rows)
    rows = {n: _most_rows(geometry, n, limit, room_of) for n in _lengths(sizes.max_model_len)}
    return ModelReport(
        model=config,
        engine=engine,
        device=device,
        geometry=geometry,
        room=replace(room, choose=None),  # a function, and so nothing to keep in a report
        sizes=sizes,
        default=default,
        default_fits=default_room.fits,
        # the last token is never fed, so nothing of it is kept
        longest_context=largest(
            lambda n: geometry.row_frames(n - 1) < sizes.num_frames, sizes.max_model_len
        ),
        rows={n: count for n, count in rows.items() if count},
        shares=_shares(geometry, sizes, device, room_of) if room.fits else [],
        remedy=room.remedy if room.fits is False else None,
    )


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count:,} rows"


def _frames(count: int) -> str:
    return "1 frame" if count == 1 else f"{count} frames"


def _count_blocks(config: ModelConfig) -> dict[str, int]:
    kinds: Counter[str] = Counter()
    for layer in config.layers:
        kinds.update(type(mixer).__name__ for mixer in layer.mixers)
        kinds.update([type(layer.mlp).__name__] if layer.mlp is not None else [])
    return dict(kinds)


def _rooms(config: ModelConfig, engine: EngineConfig, device: Device) -> RoomOf:
    """What a number of rows takes; None if the memory cannot hold one sequence beside them."""

    @functools.cache
    def room_of(rows: int) -> Room | None:
        try:
            return find_room(config, replace(engine, max_rows=rows), device)
        except ValueError:
            return None

    return room_of


def _lengths(limit: int) -> list[int]:
    """The sequence lengths that are shown for a model with this longest one."""
    return sorted({n for n in CONTEXTS if n < limit} | {limit})


def _most_rows(
    geometry: Geometry, num_tokens: int, limit: int, room_of: RoomOf, *, on_device: bool = False
) -> int:
    """The most rows of `num_tokens` tokens that fit together, each with the ring it needs.

    Args:
        geometry: of the model.
        num_tokens: length of each row.
        limit: on the rows.
        room_of: what a number of rows takes.
        on_device: the device must also have what a step of these rows holds beside the budget.
    """
    alone = geometry.row_frames(num_tokens)

    def fits(rows: int) -> bool:
        room = room_of(rows)
        if room is None or (on_device and not room.fits):
            return False
        return rows * alone < room.sizes.num_frames

    return largest(fits, limit)


def _shares(geometry: Geometry, sizes: MemorySplit, device: Device, room_of: RoomOf) -> list[Share]:
    """Where the device's memory goes, for some lengths."""
    shares, has = [], device.num_bytes or 0
    for tokens in _lengths(sizes.max_model_len):
        rows = _most_rows(geometry, tokens, MAX_ROWS_SHOWN, room_of, on_device=True)
        room = room_of(rows) if rows else None
        if room is None:
            continue
        sequences = rows * geometry.row_frames(tokens) * geometry.frame_bytes
        shares.append(
            Share(
                tokens=tokens,
                rows=rows,
                weight_bytes=room.weight_bytes,
                sequence_bytes=sequences,
                row_bytes=room.sizes.row_bytes + room.sizes.table_bytes,
                temporary_bytes=room.temporary_bytes,
                cache_bytes=room.sizes.arena_bytes - sequences,
                free_bytes=has - room.taken_bytes,
                reserved_bytes=(device.total_bytes or has) - has,
            )
        )
    return shares
