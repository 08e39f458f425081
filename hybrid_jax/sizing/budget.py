"""How a memory budget is split: frames, checkpoint slots, rings, tables and logits."""

from __future__ import annotations

from dataclasses import dataclass

from hybrid_jax.byte_sizes import at_least, counted
from hybrid_jax.config import XLA, Backend, EngineConfig, ModelConfig
from hybrid_jax.geometry import (
    NUM_FRAMES_LIMIT,
    Geometry,
    adjust_specs,
    drafting_specs,
    logits_bytes,
    ring_specs,
    table_specs,
)

DEFAULT_LENGTH = 4096  # tokens per row that the default memory holds
DEFAULT_CHECKPOINTS = 8  # cached checkpoints per row that the default memory holds
MIN_SLOTS, MAX_SLOTS = 2, 1 << 16  # slots of the table


@dataclass(frozen=True, kw_only=True)
class MemorySplit:
    """What `memory` is split into.

    Attributes:
        num_frames: frames of the arena, the sink included.
        max_slots: slots of the table, slot 0 included.
        max_model_len: longest sequence in tokens that model and settings allow; the arena may hold less.
        arena_bytes, ring_bytes, table_bytes: of the state.
        drafting_bytes: of what drafters keep.
        logits_bytes: of logits and similar arrays in the largest step.
        adjust_bytes: of counts and biases, which are made when the first request asks for them.
        host_frames: frames of the tier in the host's memory, one that is never used included; 0 for no such tier.
        host_bytes: that these may take at most.
    """

    num_frames: int
    max_slots: int
    max_model_len: int
    arena_bytes: int
    ring_bytes: int
    table_bytes: int
    drafting_bytes: int
    logits_bytes: int
    adjust_bytes: int
    host_frames: int = 0
    host_bytes: int = 0

    @property
    def state_bytes(self) -> int:
        """Bytes that are held as long as the engine lives."""
        return self.arena_bytes + self.ring_bytes + self.table_bytes + self.drafting_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes that depend only on the model and `max_rows`."""
        return self.ring_bytes + self.drafting_bytes + self.logits_bytes + self.adjust_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes of all parts together."""
        return self.state_bytes + self.logits_bytes + self.adjust_bytes


def split_memory(
    model: ModelConfig,
    engine: EngineConfig,
    geometry: Geometry,
    *,
    default_limit: int | None = None,
    takes_all: bool = False,
    backend: Backend = XLA,
) -> MemorySplit:
    """Splits `engine.memory`, or a default, into rings, logits, tables, and as many frames as the rest allows.

    Args:
        model, engine, geometry: what to size for.
        default_limit: the most bytes that the default may take. An explicit `engine.memory` is taken as it is.
        takes_all: the default takes all of that limit, if there is one, and not only what the rows need.
        backend: what steps are made of. Kernels hold fewer arrays of logits.

    Raises:
        ValueError: max_model_len exceeds the model's, or the memory cannot hold one short sequence.
    """
    max_model_len = model.max_position if engine.max_model_len is None else engine.max_model_len
    if max_model_len > model.max_position:
        raise ValueError(
            f"EngineConfig: max_model_len must be at most the model's {model.max_position}, "
            f"got {max_model_len}"
        )
    if (engine.page_tokens or 0) > max(model.max_position, geometry.grain):
        raise ValueError(
            f"EngineConfig: page_tokens must be at most the model's longest sequence, {model.max_position} tokens, got "
            f"{engine.page_tokens}"
        )
    rings = ring_specs(
        geometry,
        num_rows=engine.max_rows + 1,
        window=engine.decode_tokens,
        aligned=engine.exact,
    )
    ring_bytes = sum(spec.num_bytes for ring in rings for spec in ring.values())
    tables = table_specs(geometry, max_slots=MIN_SLOTS, max_rows=engine.max_rows)
    ring_bytes += tables["tokens"].num_bytes + tables["lengths"].num_bytes
    drafting = drafting_specs(model, engine, max_model_len)
    drafting_bytes = sum(spec.num_bytes for spec in drafting.values())
    step_bytes = logits_bytes(
        model,
        max_rows=engine.max_rows,
        tokens=engine.decode_tokens,
        dtype=None if backend.sampling == "xla" else engine.dtype,
    )
    adjust = adjust_specs(model, num_rows=engine.max_rows + 1)
    adjust_bytes = sum(spec.num_bytes for spec in adjust.values())
    least = _frames_for(geometry, min(2 * geometry.grain, max_model_len), 2)
    # Each frame of a checkpoint also pays for its part of a line in the slot table.
    per_frame = geometry.frame_bytes
    if geometry.has_state:
        per_frame += -(-4 * geometry.state_frames // geometry.cached_state_frames)
    fixed = ring_bytes + drafting_bytes + step_bytes + adjust_bytes + tables["slots"].num_bytes
    if engine.memory is None:
        length = min(max_model_len, DEFAULT_LENGTH)
        num_frames = 1 + engine.max_rows * _kept_frames(geometry, length)
        if default_limit is not None:
            most = (default_limit - fixed) // per_frame
            num_frames = most if takes_all else min(num_frames, most)
        num_frames = max(num_frames, least + 1)
    else:
        num_frames = (engine.memory - fixed) // per_frame
    num_frames = min(num_frames, NUM_FRAMES_LIMIT)
    if num_frames - 1 < least:
        needed = fixed + (least + 1) * per_frame
        raise ValueError(
            f"EngineConfig: memory must hold the rings and logits of {counted(engine.max_rows, 'row')} and one short "
            f"sequence, {at_least(needed, engine.memory or 0)}; raise memory or lower max_rows"
        )
    max_slots = MIN_SLOTS
    if geometry.has_state:
        most = 1 + (num_frames - 1) // geometry.cached_state_frames
        max_slots = min(max(max_slots, most), MAX_SLOTS)
    tables = table_specs(geometry, max_slots=max_slots, max_rows=engine.max_rows)
    return MemorySplit(
        num_frames=num_frames,
        max_slots=max_slots,
        max_model_len=max_model_len,
        arena_bytes=num_frames * geometry.frame_bytes,
        ring_bytes=ring_bytes,
        table_bytes=tables["slots"].num_bytes,
        drafting_bytes=drafting_bytes,
        logits_bytes=step_bytes,
        adjust_bytes=adjust_bytes,
        **_host_tier(engine, geometry),
    )


def _host_tier(engine: EngineConfig, geometry: Geometry) -> dict[str, int]:
    """What `engine.host_memory` holds.

    Raises:
        ValueError: not even the pages of one resume point, and its checkpoint.
    """
    if not engine.host_memory:
        return {}
    frames = min(engine.host_memory // geometry.frame_bytes, NUM_FRAMES_LIMIT - 1)
    least = _frames_for(geometry, geometry.grain, 1)
    if frames < least:
        raise ValueError(
            f"EngineConfig: host_memory must hold a checkpoint and the pages of {geometry.grain} tokens, "
            f"{at_least(least * geometry.frame_bytes, engine.host_memory)}; raise it, or leave it out"
        )
    return {"host_frames": frames + 1, "host_bytes": frames * geometry.frame_bytes}


def _kept_frames(geometry: Geometry, num_tokens: int) -> int:
    """Frames of a row and of what the cache keeps of its tokens: all, or of windows what is read above checkpoints."""
    pages = geometry.num_pages(num_tokens)
    found = geometry.state_frames + DEFAULT_CHECKPOINTS * geometry.cached_state_frames
    for group in geometry.page_groups:
        kept = pages
        if group.max_pages is not None and geometry.has_state:
            kept = group.max_pages + DEFAULT_CHECKPOINTS * geometry.window_pages(group)
        found += group.num_frames * min(pages, kept)
    return max(found, 1)


def _frames_for(geometry: Geometry, num_tokens: int, num_checkpoints: int) -> int:
    return max(geometry.page_frames(num_tokens) + num_checkpoints * geometry.state_frames, 1)
