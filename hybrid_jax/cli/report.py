"""What a model costs and what fits, from its config alone: `hybrid-jax inspect`. No weights, no jax."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

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
from hybrid_jax.sizes import format_size
from hybrid_jax.sizing.budget import DEFAULT_LENGTH, Sizes
from hybrid_jax.sizing.devices import Device
from hybrid_jax.sizing.room import GPU_MEMORY_SHARE, Choose, Room, find_room, largest, steps_on

CONTEXTS = (512, 2048, 8192, 32768, 131072)
MAX_ROWS_SHOWN = 65536
KERNELS = {
    "xla": "what XLA compiles",
    "pallas": "Pallas, compiled for an H200 and not run on a GPU yet; on Hopper Triton scans prompts and draws tokens",
}


def read_config(path: str | Path) -> ModelConfig:
    """The config of a model directory, or of a config.json given by itself; weights need not be there.

    Raises:
        FileNotFoundError: nothing is there.
        ValueError, NotImplementedError: the config is malformed or not supported.
    """
    place = model_path(path, "inspect")
    files = [place] if place.is_file() else [place / STORED_CONFIG_FILE, place / CONFIG_FILE]
    file = next((f for f in files if f.is_file()), None)
    if file is None:
        what = f"it has no {CONFIG_FILE}" if place.exists() else "it does not exist"
        raise CheckpointNotFound(
            f"inspect: {place} is no model directory: {what}; {how_to_get(path)}"
        )
    return read_config_file(file, "inspect")


@dataclass(frozen=True, kw_only=True)
class Fit:
    """What fits a memory budget.

    Attributes:
        memory: bytes for arena, rings, tables and logits.
        arena_bytes, ring_bytes, table_bytes, logits_bytes, adjust_bytes: how it is split when `max_rows` rows
            decode together; the last are counts and biases of penalties and the like.
        num_frames: frames of the arena, the sink included.
        num_slots: checkpoints the tables have room for.
        longest_context: tokens of the longest sequence that has the arena to itself, the model's own
            limit applied.
        rows: context length in tokens to the most rows of that length that fit together.
        cached_prefixes: checkpoints that fit beside nothing else; 0 for a model without state.
        cached_tokens: tokens of KV that fit beside nothing else; 0 for a model without attention.
    """

    memory: int
    arena_bytes: int
    ring_bytes: int
    table_bytes: int
    logits_bytes: int
    adjust_bytes: int
    num_frames: int
    num_slots: int
    longest_context: int
    rows: dict[int, int]
    cached_prefixes: int
    cached_tokens: int


@dataclass(frozen=True, kw_only=True)
class Share:
    """Where a device's memory goes when as many sequences of one length run as fit; the bytes add up to all of it.

    Attributes:
        tokens: of each sequence. rows: sequences.
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
    """The geometry of a model under given engine settings; sizes are bytes, lengths tokens.

    Attributes:
        family, max_position, width, vocab_size: of the model.
        dtype: of weights, activations and KV pages here; stored_dtype: in the checkpoint.
        layers: kind of layer to count.
        parameters, weight_bytes: in all.
        flops_per_token: of prefill at the start of a sequence, logits left out.
        kv_bytes_per_token, checkpoint_bytes: what a cached prefix costs.
        checkpoint_tokens: tokens whose KV costs as much as one checkpoint; None without attention.
        frame_bytes, page_tokens, frames_per_page, frames_per_checkpoint: the arena's units.
        page_padding, checkpoint_padding: share of their frames that holds nothing.
        ring_bytes_per_row: outside the arena.
        grain: tokens between resume points.
        max_rows, max_model_len, prefill_tokens, steps_per_dispatch: engine settings, those that were not given as
            the engine chooses them for the device.
        default_memory: bytes the engine takes when it is given no budget and the device has enough. `fit.memory` is
            less where it has less.
        default_fits: whether the device has them beside weights and temporaries; None where that is not known.
        fit: what fits the budget. Where no budget is given and the device has not the memory for the model,
            that is the default of one that has.
        platform, device: what would run it: "cpu" or "gpu", and the card's name if it is known.
        machine_bytes: memory of the device that a model may take; None where it is not known.
        total_bytes: of a card, all of its memory; None where it is not known.
        kernels: what steps are made of: "xla", or "pallas", where Triton kernels may take a part.
        shares: for some lengths, where the device's memory goes; empty where the model does not fit it.
        temporary_bytes: of the largest step, an estimate.
        needed_bytes: of weights, `memory` and temporaries here. Where the model does not fit and no budget is
            given, that is with the least `memory` that serves these rows.
        fits: whether the device has them; None where it is not known.
        remedy: what to do if it has not.
        needs: the parts of `needed_bytes` in words.
    """

    family: str
    max_position: int
    width: int
    vocab_size: int
    dtype: str
    stored_dtype: str
    layers: dict[str, int]
    parameters: int
    weight_bytes: int
    flops_per_token: int
    kv_bytes_per_token: int
    checkpoint_bytes: int
    checkpoint_tokens: float | None
    frame_bytes: int
    page_tokens: int
    frames_per_page: int
    frames_per_checkpoint: int
    page_padding: float
    checkpoint_padding: float
    ring_bytes_per_row: int
    grain: int
    max_rows: int
    max_model_len: int
    prefill_tokens: int
    steps_per_dispatch: int
    default_memory: int
    default_fits: bool | None
    fit: Fit
    platform: str
    device: str | None
    machine_bytes: int | None
    total_bytes: int | None
    kernels: str
    shares: list[Share]
    temporary_bytes: int
    needed_bytes: int
    fits: bool | None
    remedy: str | None
    needs: str

    def as_dict(self) -> dict:
        """Plain data, for JSON."""
        return asdict(self)

    def cache_summary(self) -> str:
        """What the prefix cache can do for this model, in one sentence."""
        if not self.frames_per_checkpoint:
            return (
                f"A prompt can resume at any multiple of {self.grain} tokens whose KV is cached; "
                "there is no recurrent state."
            )
        cost = f"A checkpoint takes {format_size(self.checkpoint_bytes)}"
        if self.checkpoint_tokens:
            cost += f", as much as the KV of {self.checkpoint_tokens:,.0f} tokens"
        return (
            f"A prompt can resume where a checkpoint stands, at multiples of {self.grain} tokens: at the "
            f"end of prompts and outputs, and where prompts part. {cost}."
        )

    def _device(self) -> str:
        """Whether the model fits it, and why."""
        if self.machine_bytes is None:
            return f"its memory is not known here; {self.needs}"
        has = f"of {format_size(self.machine_bytes)}"
        if self.total_bytes is not None:
            share = self.machine_bytes / self.total_bytes
            has += f" ({share:.0%} of the card's {format_size(self.total_bytes)}; the rest is for CUDA)"
        if not self.fits:
            return f"does not fit; {self.needs}, {has}; {self.remedy}"
        left = format_size(self.machine_bytes - self.needed_bytes)
        return f"fits; {self.needs} {has}, {left} left"

    def _default_memory(self) -> str:
        """How much the engine takes unless it is told, and why."""
        size = format_size(self.default_memory)
        if self.default_fits and self.platform != "cpu":
            return (
                f"{size}: {GPU_MEMORY_SHARE:.0%} of what weights and temporaries leave, or less, so that the compiler "
                "can time the largest product"
            )
        said = f"{size} for {_rows(self.max_rows)} of up to {min(self.max_model_len, DEFAULT_LENGTH):,} tokens"
        if self.platform != "cpu":
            return said
        return (
            f"{said}; less where that is more than 1/4 of a host's RAM, or than 1/2 of what is free beside the "
            "weights"
        )

    def table(self) -> list[list[str]]:
        """`shares` for people: a line of titles, then one for each length; empty where there are none."""
        if not self.shares:
            return []
        titles = [
            "tokens",
            "--max-rows",
            "weights",
            "sequences",
            "rows' own",
            "temporaries",
            "cache",
        ]
        titles += ["free", "for CUDA", "in all"]
        lines = [titles]
        for share in self.shares:
            sizes = [value for name, value in asdict(share).items() if name.endswith("_bytes")]
            cells = [format_size(size) for size in (*sizes, sum(sizes))]
            lines.append([f"{share.tokens:,}", f"{share.rows:,}", *cells])
        if self.platform == "cpu":
            for line in lines:
                del line[-2]
        return lines

    def lines(self) -> list[tuple[str, str]]:
        """(name, value) pairs for people."""
        fit = self.fit
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.layers.items())
        rows = ", ".join(f"{count:,} of {length:,}" for length, count in fit.rows.items())
        lines = [
            (
                self.device or ("this machine" if self.platform == "cpu" else "this GPU"),
                self._device(),
            ),
            ("family", f"{self.family}, width {self.width:,}, vocabulary {self.vocab_size:,}"),
            ("blocks", kinds),
            (
                "dtype",
                f"{self.dtype}, stored as {self.stored_dtype} (auto: float32 on a CPU, elsewhere as stored)",
            ),
            ("parameters", f"{self.parameters:,} ({format_size(self.weight_bytes)} {self.dtype})"),
            ("prefill", f"{self.flops_per_token / 1e9:.3g} GFLOP a token"),
            ("context", f"{self.max_position:,} tokens"),
            ("KV", f"{format_size(self.kv_bytes_per_token)} a token"),
            (
                "checkpoint",
                f"{format_size(self.checkpoint_bytes)} in {_frames(self.frames_per_checkpoint)} "
                f"({self.checkpoint_padding:.1%} padding)",
            ),
            (
                "page",
                f"{self.page_tokens} tokens in {_frames(self.frames_per_page)} "
                f"({self.page_padding:.1%} padding)",
            ),
            ("frame", format_size(self.frame_bytes)),
            ("ring", f"{format_size(self.ring_bytes_per_row)} a row"),
            (
                "steps",
                f"{_rows(self.max_rows)}, chunks of up to {self.prefill_tokens:,} prompt tokens, "
                f"{self.steps_per_dispatch} tokens a row and dispatch",
            ),
            ("kernels", KERNELS[self.kernels]),
            ("default memory", self._default_memory()),
            (
                "budget",
                f"{format_size(fit.memory)}: arena {format_size(fit.arena_bytes)} in {fit.num_frames:,} "
                f"frames, rings {format_size(fit.ring_bytes)} for {_rows(self.max_rows)}, tables "
                f"{format_size(fit.table_bytes)} for {fit.num_slots:,} checkpoints, logits "
                f"{format_size(fit.logits_bytes)}, penalties and biases {format_size(fit.adjust_bytes)}",
            ),
            ("longest context", f"{fit.longest_context:,} tokens"),
            ("most rows", rows or "none"),
            ("prefix cache", self.cache_summary()),
        ]
        absent = {
            "KV": not self.kv_bytes_per_token,
            "page": not self.page_tokens,
            "checkpoint": not self.frames_per_checkpoint,
            "ring": not self.ring_bytes_per_row,
            **dict.fromkeys(("budget", "longest context", "most rows"), self.fits is False),
        }
        return [(name, value) for name, value in lines if not absent.get(name)]


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
        device: what would run it, which bounds that default; None for a CPU whose memory is not known. A model that
            does not fit it is an answer, not a mistake.
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
        >>> report.kv_bytes_per_token, report.fit.longest_context
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
    hypothetical = engine.memory is None and room.fits is False
    sizes = default if hypothetical else room.sizes
    length = default.max_model_len
    engine = replace(engine, memory=engine.memory or sizes.total_bytes)
    room_of_rows = _rooms(config, engine, device)
    per_token, per_checkpoint = kv_bytes_per_token(geometry), checkpoint_bytes(geometry)
    return ModelReport(
        family=config.family,
        max_position=config.max_position,
        width=config.width,
        vocab_size=config.vocab_size,
        dtype=engine.dtype,
        stored_dtype=config.dtype,
        layers=_count_blocks(config),
        parameters=weight_count(config),
        weight_bytes=room.weight_bytes,
        flops_per_token=prefill_flops(config, 1),
        kv_bytes_per_token=per_token,
        checkpoint_bytes=per_checkpoint,
        checkpoint_tokens=per_checkpoint / per_token if per_token and per_checkpoint else None,
        frame_bytes=geometry.frame_bytes,
        page_tokens=geometry.page_tokens,
        frames_per_page=geometry.frames_per_page,
        frames_per_checkpoint=geometry.state_frames,
        page_padding=page_padding(geometry),
        checkpoint_padding=checkpoint_padding(geometry),
        ring_bytes_per_row=default.ring_bytes // (engine.max_rows + 1),
        grain=geometry.grain,
        max_rows=engine.max_rows,
        max_model_len=length,
        prefill_tokens=engine.prefill_tokens,
        steps_per_dispatch=engine.steps_per_dispatch,
        default_memory=default.total_bytes,
        default_fits=default_room.fits,
        fit=_fit(geometry, engine, sizes, room_of_rows),
        platform=device.platform,
        device=device.name,
        machine_bytes=device.num_bytes,
        total_bytes=device.total_bytes,
        kernels=steps_on(device, engine.kernels),
        shares=_shares(geometry, sizes, device, room_of_rows) if room.fits else [],
        temporary_bytes=room.temporary_bytes,
        needed_bytes=room.needed_bytes,
        fits=room.fits,
        remedy=room.remedy if room.fits is False else None,
        needs=room.parts(),
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


def _rooms(
    config: ModelConfig, engine: EngineConfig, device: Device
) -> Callable[[int], Room | None]:
    """What a number of rows takes; None where the memory cannot hold one sequence beside them."""

    @functools.cache
    def room_of(rows: int) -> Room | None:
        try:
            return find_room(config, replace(engine, max_rows=rows), device)
        except (
            ValueError
        ):  # it names the least memory that would do, which is not the question here
            return None

    return room_of


def _fit(
    geometry: Geometry,
    engine: EngineConfig,
    sizes: Sizes,
    room_of: Callable[[int], Room | None],
) -> Fit:
    frames, limit = sizes.num_frames - 1, sizes.max_model_len  # the sink holds nothing

    def rows_of(num_tokens: int) -> int:
        return _most_rows(geometry, num_tokens, max(MAX_ROWS_SHOWN, engine.max_rows), room_of)

    rows = {n: rows_of(n) for n in _lengths(limit)}
    return Fit(
        memory=engine.memory,
        arena_bytes=sizes.arena_bytes,
        ring_bytes=sizes.ring_bytes,
        table_bytes=sizes.table_bytes,
        logits_bytes=sizes.logits_bytes,
        adjust_bytes=sizes.adjust_bytes,
        num_frames=sizes.num_frames,
        num_slots=sizes.max_slots,
        # the last token is never fed, so nothing of it is kept
        longest_context=largest(lambda n: geometry.row_frames(n - 1) <= frames, limit),
        rows={n: count for n, count in rows.items() if count},
        cached_prefixes=frames // geometry.state_frames if geometry.has_state else 0,
        cached_tokens=(
            frames // geometry.frames_per_page * geometry.page_tokens if geometry.has_pages else 0
        ),
    )


def _lengths(limit: int) -> list[int]:
    """The lengths that are looked at, of a model's up to its longest."""
    return sorted({n for n in CONTEXTS if n < limit} | {limit})


def _most_rows(
    geometry: Geometry,
    num_tokens: int,
    limit: int,
    room_of: Callable[[int], Room | None],
    *,
    on_device: bool = False,
) -> int:
    """Rows of `num_tokens` tokens that fit together, each with the ring it needs.

    Args:
        on_device: the device must also have what a step of so many rows holds beside the budget.
    """
    alone = geometry.row_frames(num_tokens)

    def fits(rows: int) -> bool:
        room = room_of(rows)
        if room is None or (on_device and not room.fits):
            return False
        return rows * alone < room.sizes.num_frames

    return largest(fits, limit)


def _shares(
    geometry: Geometry, sizes: Sizes, device: Device, room_of: Callable[[int], Room | None]
) -> list[Share]:
    """Where the device's memory goes, for some lengths."""
    shares = []
    for tokens in _lengths(sizes.max_model_len):
        rows = _most_rows(geometry, tokens, MAX_ROWS_SHOWN, room_of, on_device=True)
        if not rows:
            continue
        room, sequences = room_of(rows), rows * geometry.row_frames(tokens) * geometry.frame_bytes
        shares.append(
            Share(
                tokens=tokens,
                rows=rows,
                weight_bytes=room.weight_bytes,
                sequence_bytes=sequences,
                row_bytes=room.sizes.row_bytes + room.sizes.table_bytes,
                temporary_bytes=room.temporary_bytes,
                cache_bytes=room.sizes.arena_bytes - sequences,
                free_bytes=device.num_bytes - room.taken_bytes,
                reserved_bytes=(device.total_bytes or device.num_bytes) - device.num_bytes,
            )
        )
    return shares
