"""Engines with room for so many sequences, and few shapes to compile."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Protocol, TypeVar
from unittest import mock

from hybrid_jax.config import CacheConfig, EngineConfig, ModelConfig
from hybrid_jax.costs import model_costs
from hybrid_jax.engine.engine import Engine
from hybrid_jax.geometry import Geometry, make_geometry
from hybrid_jax.schedule import bucket
from hybrid_jax.schedule.scheduler import Scheduler
from hybrid_jax.schedule.sequence import Sequence
from hybrid_jax.schedule.turn import Turn
from hybrid_jax.sizing.budget import split_memory


def frames_for(geometry: Geometry, room: float) -> int:
    """Frames, the sink included, for `room` sequences of 192 tokens with two checkpoints each."""
    sequence = geometry.num_pages(192) * geometry.frames_per_page + 2 * geometry.state_frames
    return 1 + int(room * sequence)


def make_engine(
    config: ModelConfig,
    params: dict,
    settings: EngineConfig,
    *,
    room: float,
    below: float = 0,
    folder: Path | None = None,
    side: Callable | None = None,
) -> Engine:
    """An engine with an arena of `frames_for(room)`, as many frames for `below` in the host's memory, and a folder,
    or one end of a hand-over."""
    geometry = make_geometry(config, settings)
    fixed = split_memory(config, replace(settings, memory=None), geometry).row_bytes
    fixed += 8 * max(geometry.state_frames, 1)
    per_frame = geometry.frame_bytes + (4 if geometry.has_state else 0)
    memory = fixed + frames_for(geometry, room) * per_frame
    host = (frames_for(geometry, below) - 1) * geometry.frame_bytes
    cache = replace(settings.cache, loads="always")
    settings = replace(settings, memory=memory, host_memory=host, cache=cache)
    if folder is not None:
        settings = replace(settings, cache_dir=str(folder), disk_memory=1 << 30)
    return Engine(config, params, settings, side=side)


def start_over(engine: Engine, room: float, *, policy: str = "adaptive") -> None:
    """An empty cache and room for so much: the scheduler is told of a part of the arena only.

    No other shape is compiled for it.
    """
    geometry, sizes = engine.geometry, engine.sizes
    num_frames = frames_for(geometry, room)
    assert not engine.has_work and num_frames <= sizes.num_frames
    slots = 1 + num_frames // geometry.state_frames if geometry.has_state else 2
    engine.scheduler = Scheduler(
        geometry,
        replace(
            engine.engine_config,
            cache=CacheConfig(policy=policy),
            host_memory=0,
            cache_dir=None,
            disk_memory=None,
        ),
        disk=engine.disk if policy != "off" else None,
        num_frames=num_frames,
        max_slots=max(2, min(slots, sizes.max_slots)),
        max_model_len=sizes.max_model_len,
        host_frames=sizes.host_frames if policy != "off" else 0,
        costs=model_costs(engine.config, geometry),
    )


class Worker(Protocol):
    """An engine, or what has one."""

    @property
    def has_work(self) -> bool: ...


W = TypeVar("W", bound=Worker)


def kept_by_arguments(make: Callable[..., W]) -> Callable[..., W]:
    """`make`, whose engines serve several tests; one that a test broke off is made anew."""
    made: dict[tuple, W] = {}

    @functools.wraps(make)
    def get(*arguments: object) -> W:
        found = made.get(arguments)
        if found is None or found.has_work:
            found = made[arguments] = make(*arguments)
        return found

    return get


@contextlib.contextmanager
def one_shape(tokens: int = 64, *, decode_rows: tuple[int, ...] = ()) -> Iterator[None]:
    """One prefill shape of [2, tokens] and one decode shape: less to compile, more padding to survive.

    For making an engine and for running it. Decode has these further row counts.
    """

    class OneShape(bucket.FineShapes):
        def __init__(self, engine: EngineConfig) -> None:
            bucket.Shapes.__init__(self, engine, [(2, tokens)], {*decode_rows, engine.max_rows})

    bucket.shapes_of.cache_clear()
    try:
        with mock.patch.object(bucket, "FineShapes", OneShape):
            yield
    finally:
        bucket.shapes_of.cache_clear()


@contextlib.contextmanager
def short_of_memory(engine: Engine, *, at: tuple[int, ...]) -> Iterator[None]:
    """The oldest row finds no memory for its next steps when it gets to these positions, until a row is preempted.

    Rows of a recurrent model hold all they need from the start if they share nothing: only this preempts one.
    """
    scheduler, decode = engine.scheduler, Turn.decode
    before = scheduler.counters.preemptions

    def refused(turn: Turn, sequence: Sequence) -> bool:
        running = scheduler.seats.running
        oldest_of_many = sequence is running[0] and len(running) > 1
        past = sum(position <= sequence.position for position in at)
        if oldest_of_many and scheduler.counters.preemptions - before < past:
            return False
        return decode(turn, sequence)

    with mock.patch.object(Turn, "decode", refused):
        yield
