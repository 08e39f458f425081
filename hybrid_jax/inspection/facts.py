"""What a model costs and what fits, from its config alone, as plain data."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hybrid_jax.byte_sizes import format_size
from hybrid_jax.config import EngineConfig, ModelConfig, regrouped
from hybrid_jax.costs import prefill_flops, share_saved, weight_count
from hybrid_jax.geometry import (
    Geometry,
    cached_checkpoint_bytes,
    checkpoint_bytes,
    checkpoint_padding,
    kv_bytes_per_token,
    make_geometry,
    page_padding,
)
from hybrid_jax.kinds.quantize import bytes_by_format
from hybrid_jax.sizing.budget import MemorySplit
from hybrid_jax.sizing.devices import Device, cards
from hybrid_jax.sizing.room import (
    Choose,
    Room,
    backend_on,
    find_room,
    largest,
    left_to_xla,
    scanned_by_triton,
)
from pallas_kernels.plan import cause

CONTEXTS = (512, 2048, 8192, 32768, 131072)
MAX_ROWS_SHOWN = 65536
RoomOf = Callable[[int], Room | None]


def model_facts(
    config: ModelConfig, engine: EngineConfig, device: Device, choose: Choose | None = None
) -> dict[str, Any]:
    """Works out what a model costs under the given engine settings, and what fits.

    Args:
        config: the model.
        engine: dtype, grain, rows, lengths; `memory` None stands for the engine's default.
        device: what would run it, which bounds that default. It is an answer, not a mistake, that a model does not fit.
        choose: as in `Room`.

    Returns:
        Plain data, for JSON. Sizes are bytes, lengths are tokens. Keys that need a word:
            dtype, stored_dtype: of weights and activations here; of the weights in the checkpoint.
            kv_dtype: of keys and values in pages.
            layers: how many blocks there are of each kind. num_layers: of layers.
            codes: bytes of matrices that are kept as codes, by their formats in words; empty without any.
            flops_per_token: of prefill at the start of a sequence, without logits.
            cut_saves: as `costs.share_saved`.
            kv_bytes_per_token: with the scales of FP8; 0 without attention.
            cut: layers that the tokens of a prompt go through; None for all.
            kv_group, state_group: how many layers after the cut share keys and values, or a state.
            groups: bytes of a token's KV ("kv_group") and of a checkpoint ("state_group") for each number of layers
                that may share after the cut; empty without a cut.
            checkpoint_tokens: tokens whose KV costs as much as one checkpoint; None without attention or state.
            frame_bytes, page_tokens, frames_per_page, frames_per_checkpoint: the units of the arena.
            windows: what rows hold of layers with a sliding window, in words.
            cached_checkpoint_bytes: of one in the prefix cache, which may keep it as int8.
            page_padding, checkpoint_padding: share of their frames that holds nothing.
            ring_bytes_per_row: outside the arena.
            grain: tokens between resume points.
            max_rows, max_model_len, prefill_tokens, steps_per_dispatch: engine settings. Those that were not given are
                as the engine chooses them for the device.
            default_memory: `memory` of the engine if it is given none and the device has enough.
            default_fits: whether the device has that beside weights and temporaries; None if that is not known.
            fit: how `memory` is split, and what it holds: see `_fit`. If none is given and the device does not have
                enough for the model, this is the default of a device that has.
            platform, device: "cpu" or "gpu", and the card's name if that is known.
            capability, architecture, num_sms: compute capability, its name and multiprocessors of a GPU, as far as
                known.
            card_bytes: all memory that a card of this name has, whatever was given; None for others.
            machine_bytes, total_bytes: memory of the device that a model may take, and all memory of a card; None if
                they are not known.
            kernels: what steps are made of: "xla", or "pallas", where Triton kernels may take a part.
            left_to_xla: operations that XLA does although kernels do the rest, and why.
            runs_kernels, fp8_pages: whether the device runs Pallas kernels, and whether it takes FP8 pages unless
                `kernels` is "xla"; None if that is not known.
            runs_triton: whether the device runs Triton kernels if jax-triton is installed; None if that is not known.
            scanned_by_triton: whether these then scan prompts.
            shares: for some lengths, where the device's memory goes: see `_shares`. Empty if the model does not fit.
            shards: devices that divide the model; all sizes are those of each.
            temporary_bytes: of the largest step, an estimate.
            needed_bytes, needs: of weights, `memory` and temporaries together, and the parts in words. If the model
                does not fit and no budget is given, this is with the least `memory` that serves these rows.
            fits: whether the device has them; None if that is not known.
            remedy: what to do if the model does not fit; else None.
            cache: what the prefix cache can do for this model, in a few words.

    Raises:
        ValueError: a setting does not fit the model, or the memory cannot hold one short sequence.

    Example:
        >>> from hybrid_jax.config import Attention, EngineConfig, Layer, residual_layer, ModelConfig
        >>> attention = Attention(num_heads=4, num_kv_heads=2, head_dim=64)
        >>> config = ModelConfig(
        ...     family="llama", vocab_size=256, width=256, layers=(residual_layer(mixers=(attention,)),)
        ... )
        >>> found = model_facts(config, EngineConfig(max_rows=4), Device())
        >>> found["kv_bytes_per_token"], found["fit"]["longest_context"]
        (1024, 4096)
    """
    geometry = make_geometry(config, engine)
    backend = backend_on(device, engine, config)
    room = find_room(config, engine, device, choose=choose)
    default_room = find_room(config, replace(engine, memory=None), device)
    default = default_room.sizes
    if device.is_host or not default_room.fits:
        unbounded = Device(
            platform=device.platform,
            capability=device.capability,
            num_sms=device.num_sms,
            shared_bytes=device.shared_bytes,
        )
        default = find_room(config, replace(engine, memory=None), unbounded).sizes
    sizes = default if engine.memory is None and room.fits is False else room.sizes
    engine = replace(engine, memory=engine.memory or sizes.total_bytes)
    room_of = _rooms(config, engine, device)
    known, listed = device.is_host or device.capability is not None, cards().get(device.name or "")
    per_token, checkpoint = kv_bytes_per_token(geometry), checkpoint_bytes(geometry)
    found = {
        "family": config.family,
        "max_position": config.max_position,
        "width": config.width,
        "vocab_size": config.vocab_size,
        "dtype": engine.dtype,
        "kv_dtype": engine.kv_dtype,
        "stored_dtype": config.dtype,
        "layers": _count_blocks(config),
        "num_layers": len(config.layers),
        "parameters": weight_count(config),
        "shards": config.shards,
        "replicas": 1,
        "prefill_replicas": 0,
        "weight_bytes": room.weight_bytes,
        "codes": bytes_by_format(config, engine.dtype),
        "flops_per_token": prefill_flops(config, 1),
        "cut_saves": share_saved(config),
        "kv_bytes_per_token": per_token,
        "checkpoint_bytes": checkpoint,
        "checkpoint_tokens": checkpoint / per_token if checkpoint and per_token else None,
        "cut": config.cut,
        "kv_group": config.kv_group,
        "state_group": config.state_group,
        "groups": _groups(config, engine),
        "frame_bytes": geometry.frame_bytes,
        "page_tokens": geometry.page_tokens,
        "frames_per_page": geometry.frames_per_page,
        "frames_per_checkpoint": geometry.state_frames,
        "cached_checkpoint_bytes": cached_checkpoint_bytes(geometry),
        "windows": geometry.about_windows,
        "page_padding": page_padding(geometry),
        "checkpoint_padding": checkpoint_padding(geometry),
        "ring_bytes_per_row": default.ring_bytes // (engine.max_rows + 1),
        "grain": geometry.grain,
        "max_rows": engine.max_rows,
        "max_model_len": default.max_model_len,
        "prefill_tokens": engine.prefill_tokens,
        "steps_per_dispatch": engine.steps_per_dispatch,
        "default_memory": default.total_bytes,
        "default_fits": default_room.fits,
        "fit": _fit(geometry, sizes, engine, room_of),
        "platform": device.platform,
        "device": device.name,
        "capability": device.capability,
        "architecture": device.architecture,
        "num_sms": device.num_sms,
        "card_bytes": listed.num_bytes if listed else None,
        "machine_bytes": device.num_bytes,
        "total_bytes": device.total_bytes,
        "kernels": backend.name,
        "left_to_xla": {
            name: cause(why) for name, why in left_to_xla(config, engine, backend).items()
        },
        "runs_kernels": device.runs_kernels if known else None,
        "fp8_pages": device.converts_fp8 if known else None,
        "runs_triton": device.is_hopper if known else None,
        "scanned_by_triton": scanned_by_triton(config, engine),
        "shares": _shares(geometry, sizes, device, room_of) if room.fits else [],
        "temporary_bytes": room.temporary_bytes,
        "needed_bytes": room.needed_bytes,
        "fits": room.fits,
        "remedy": room.remedy if room.fits is False else None,
        "needs": room.parts(),
    }
    return found | {"cache": _cache(found)}


def _fit(
    geometry: Geometry, sizes: MemorySplit, engine: EngineConfig, room_of: RoomOf
) -> dict[str, Any]:
    """How `memory` is split, and what it holds.

    That is: frames (with the sink), slots for checkpoints, the longest sequence that has the arena to itself, the most
    sequences that fit together by their length, and the most cached prefixes and tokens if nothing else is in the
    arena. Where a cached prefix has few pages of layers with a window, it counts with its checkpoint, and is as long as
    can be.
    """
    frames = sizes.num_frames - 1  # the sink holds nothing
    pages = frames // geometry.frames_per_page if geometry.has_pages else 0
    cached_tokens = pages * geometry.page_tokens
    if geometry.windowed and geometry.has_state:
        longest = sizes.max_model_len
        prefixes, rest = divmod(frames, geometry.cached_frames(longest))
        fits = largest(lambda n: geometry.cached_frames(n) <= rest, longest)
        cached_tokens = prefixes * longest + fits
    limit = max(MAX_ROWS_SHOWN, engine.max_rows)
    rows = {n: _most_rows(geometry, n, limit, room_of) for n in _lengths(sizes.max_model_len)}
    return {
        "memory": engine.memory,
        "arena_bytes": sizes.arena_bytes,
        "ring_bytes": sizes.ring_bytes,
        "table_bytes": sizes.table_bytes,
        "logits_bytes": sizes.logits_bytes,
        "adjust_bytes": sizes.adjust_bytes,
        "num_frames": sizes.num_frames,
        "num_slots": sizes.max_slots,
        # the last token is never fed, so nothing of it is kept
        "longest_context": largest(
            lambda n: geometry.row_frames(n - 1) < sizes.num_frames, sizes.max_model_len
        ),
        "rows": {n: count for n, count in rows.items() if count},
        "cached_prefixes": frames // geometry.cached_state_frames if geometry.has_state else 0,
        "cached_tokens": cached_tokens,
    }


def _cache(found: dict[str, Any]) -> str:
    """What the prefix cache can do for a model, in a few words."""
    if not found["frames_per_checkpoint"]:
        return (
            f"A prompt can resume at any multiple of {found['grain']} tokens whose KV is cached; "
            "there is no recurrent state."
            + " The cache keeps all pages, those behind windows too."
            * bool(found["windows"])
        )
    size = found["checkpoint_bytes"]
    cost = f"A checkpoint takes {format_size(size)}"
    if found["checkpoint_tokens"]:
        cost += f", as much as the KV of {found['checkpoint_tokens']:,.0f} tokens"
    if found["cached_checkpoint_bytes"] < size:
        cost += f"; as int8 in the cache it takes {format_size(found['cached_checkpoint_bytes'])}"
    return (
        f"A prompt can resume where a checkpoint stands, at multiples of {found['grain']} tokens: at the "
        f"end of prompts and outputs, and where prompts part. {cost}."
    )


def _groups(config: ModelConfig, engine: EngineConfig) -> dict[str, dict[str, int]]:
    """What a token or a checkpoint takes by how many layers share after the cut, where more than one can."""
    if config.cut is None:
        return {}
    found: dict[str, dict[str, int]] = {}
    for name, size in (("kv_group", kv_bytes_per_token), ("state_group", checkpoint_bytes)):
        taken = {}
        for group in range(1, len(config.later) + 1):
            try:
                changed = regrouped(config, **{name: group})
            except ValueError:  # it does not divide, or such layers share nothing
                continue
            taken[str(group)] = size(make_geometry(changed, engine))
        if len(set(taken.values())) > 1:
            found[name] = taken
    return found


def _count_blocks(config: ModelConfig) -> dict[str, int]:
    kinds: Counter[str] = Counter()
    for layer in config.layers:
        kinds.update(type(part).__name__ for part in layer.parts)
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


def _shares(
    geometry: Geometry, sizes: MemorySplit, device: Device, room_of: RoomOf
) -> list[dict[str, int]]:
    """Where the device's memory goes if as many sequences of one length run as fit, for some lengths.

    Returns:
        For each length, numbers by name. The bytes add up to all of the memory.

        - tokens, rows: the length of each sequence, and how many there are.
        - weight_bytes: the weights.
        - sequence_bytes: frames of the sequences, for KV and a checkpoint each.
        - row_bytes: rings, logits and the like, and tables.
        - temporary_bytes: what the layers of a step hold.
        - cache_bytes: frames left for cached prefixes; on a host also `host_memory`.
        - free_bytes: what nothing takes.
        - reserved_bytes: what jax leaves to CUDA; 0 on a host.
    """
    shares, has = [], device.num_bytes or 0
    for tokens in _lengths(sizes.max_model_len):
        rows = _most_rows(geometry, tokens, MAX_ROWS_SHOWN, room_of, on_device=True)
        room = room_of(rows) if rows else None
        if room is None:
            continue
        sequences = rows * geometry.row_frames(tokens) * geometry.frame_bytes
        shares.append(
            {
                "tokens": tokens,
                "rows": rows,
                "weight_bytes": room.weight_bytes,
                "sequence_bytes": sequences,
                "row_bytes": room.sizes.row_bytes + room.sizes.table_bytes,
                "temporary_bytes": room.temporary_bytes,
                "cache_bytes": room.sizes.arena_bytes - sequences + room.host_bytes,
                "free_bytes": has - room.taken_bytes,
                "reserved_bytes": (device.total_bytes or has) - has,
            }
        )
    return shares
