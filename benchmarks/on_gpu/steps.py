"""Decode steps again and again from the same memory, which is drawn: no prompt is read."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from hybrid_jax.config import EngineConfig, ModelConfig
from hybrid_jax.config.sampling_params import SamplingParams
from hybrid_jax.engine.engine import Engine
from hybrid_jax.schedule.plan import DecodeRow
from hybrid_jax.schedule.request import Request
from hybrid_jax.schedule.sequence import Sequence as Tokens
from hybrid_jax.state import State

DRAWN_FRAMES = 61  # of the arena; the others repeat them


def checksum(array, skip: int = 0):
    """uint32[2] of an array's bits and where they are, those of the first `skip` rows left out."""
    kind = {2: jnp.uint16, 4: jnp.uint32}[array.dtype.itemsize]
    words = jax.lax.bitcast_convert_type(array, kind).astype(jnp.uint32)
    words = jnp.where(jax.lax.broadcasted_iota(jnp.int32, words.shape, 0) < skip, 0, words)
    place = jnp.zeros(words.shape, jnp.uint32)
    for axis, size in enumerate(words.shape):
        place = place * size + jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
    mixed = (words ^ (words >> 15)) * jnp.uint32(0x2C1B3C6D)
    sums = [jnp.sum(x * (2 * place + 1), dtype=jnp.uint32) for x in (words, mixed ^ (mixed >> 12))]
    return jnp.stack(sums)


@jax.jit
def sums(state: State) -> list[jax.Array]:
    """Checksums of what steps leave. Frame 0 takes what padding writes, in any order, and is left out."""
    return [checksum(state.arena, 1), *map(checksum, jax.tree.leaves(state.rings))]


def decode_row(
    engine: Engine, row: int, *, position: int, checkpoint: int, room: int, **sampling
) -> DecodeRow:
    """A row that decodes, with a slot and pages of its own.

    Args:
        position: how many tokens it has. checkpoint: how many of them its checkpoint has; its ring has the others.
        room: tokens that its pages hold.
    """
    memory, geometry = engine.scheduler.memory, engine.geometry
    params = SamplingParams(ignore_eos=True, **sampling)
    request = Request(request_id=str(row), prompt=[1] * 8, params=params, seed=row, max_tokens=room)
    slot = memory.slots.resolve(memory.holds.allocate_slot())
    frames = memory.holds.allocate_frames(geometry.num_pages(room) * geometry.frames_per_page)
    return DecodeRow(
        sequence=Tokens(request=request, arrival=row, limit=room),
        row=row,
        position=position,
        checkpoint=checkpoint,
        read_slot=slot if checkpoint else 0,
        fold_slot=slot,
        num_tokens=1,
        num_steps=1,
        pages=np.asarray(frames, np.int32).reshape(-1, geometry.frames_per_page),
    )


class Steps:
    """Dispatches of decode steps of all rows of an engine.

    Args:
        config, params, settings: of the engine.
        make_row: makes a row from the engine and the row's number.

    Attributes:
        runner: of the engine. kind, shape, variant: name the program.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: dict,
        settings: EngineConfig,
        make_row: Callable[[Engine, int], DecodeRow],
    ) -> None:
        self.engine = Engine(config, params, settings)
        self.runner = runner = self.engine.runner
        self._rows = [make_row(self.engine, row) for row in range(settings.max_rows)]
        runner._write_slots(self.engine.scheduler.memory.slots.take_new())
        self.kind = next(kind for kind in runner.kinds if kind.name == "decode")
        self.shape, self.variant = self.kind.bucket(self._rows, None), self.kind.variant(self._rows)
        self._lengths = np.array([row.position for row in self._rows] + [0], np.int32)
        self._drawn = jax.jit(drawing(runner.state, self._lengths))

    def rows(self, num_steps: int) -> list[DecodeRow]:
        """The rows of a dispatch of so many steps."""
        return [replace(row, num_tokens=num_steps, num_steps=num_steps) for row in self._rows]

    def draw(self) -> None:
        """Fills all memory, with the same numbers each time."""
        self.runner.state = None  # there is no room for two of them
        self.runner.state = self._drawn()

    def lengths(self, count: int) -> list[jax.Array]:
        """So many arrays for `rewind`."""
        return [jnp.asarray(self._lengths.copy()) for _ in range(count)]

    def rewind(self, lengths: jax.Array) -> None:
        """Makes the rows as long as they were. The device does nothing for it, and the array is used up."""
        self.runner.state = self.runner.state.replace(lengths=lengths)

    def run(self, rows: Sequence[DecodeRow]) -> list[jax.Array]:
        """Dispatches steps; the tokens of each program, int32[steps, B]."""
        made = self.runner._run_all(self.kind, self.shape, self.variant, rows, None)
        return [part.sampled.tokens for part in made]

    def bits(self, num_steps: int) -> str:
        """A digest of what steps draw and leave, from the memory that `draw` makes."""
        self.draw()
        tokens = all_tokens(self.run(self.rows(num_steps)), num_steps)
        digest = hashlib.blake2b(tokens.tobytes(), digest_size=8)
        for part in sums(self.runner.state):
            digest.update(np.asarray(part).tobytes())
        return digest.hexdigest()

    def close(self) -> None:
        """Frees the engine's memory."""
        self.engine.close()


def all_tokens(parts: list[jax.Array], num_steps: int) -> np.ndarray:
    """The tokens of a dispatch, int32[steps, B], when they are there.

    Raises:
        RuntimeError: rows stopped on their way, so fewer steps were run than it seems.
    """
    tokens = np.concatenate([np.asarray(part) for part in parts])[:num_steps]
    if (tokens < 0).any():
        drawn = int((tokens >= 0).sum())
        raise RuntimeError(f"{tokens.size} tokens should have come, {drawn} came")
    return tokens


def drawing(like: State, lengths: np.ndarray) -> Callable[[], State]:
    """A function that makes a state like a given one: slots as they are, other numbers drawn, rows that are so long."""
    shapes = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), like)
    slots, tokens = np.asarray(like.slots), np.arange(1, len(lengths) + 1, dtype=np.int32)

    def bits(values: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
        kind = {2: jnp.bfloat16, 4: jnp.float32}[like.dtype.itemsize]
        return jax.lax.bitcast_convert_type(values.astype(kind), like.dtype)

    def ring(number: int, like: jax.ShapeDtypeStruct) -> jax.Array:
        values = 1.7 * noise(number, like.shape)
        return jnp.abs(values) * 0.1 if like.dtype == jnp.float32 else bits(values, like)

    def frames(like: jax.ShapeDtypeStruct) -> jax.Array:
        # Two bfloat16 numbers a word are keys and values. As one float32 a word is nearly the second of them, a state.
        halves = 1.7 * noise(0, (min(DRAWN_FRAMES, like.shape[0]), like.shape[1], 2))
        few = jax.lax.bitcast_convert_type(halves.astype(jnp.bfloat16), like.dtype)
        return few[jnp.arange(like.shape[0]) % len(few)]

    def draw() -> State:
        arrays, form = jax.tree.flatten(shapes.rings)
        rings = [ring(number, like) for number, like in enumerate(arrays, 1)]
        return State(
            arena=frames(shapes.arena),
            rings=jax.tree.unflatten(form, rings),
            slots=jnp.asarray(slots),
            tokens=jnp.asarray(tokens),
            lengths=jnp.asarray(lengths),
            drafting=jax.tree.map(lambda one: jnp.zeros(one.shape, one.dtype), shapes.drafting),
        )

    return draw


def noise(number: int, shape: tuple[int, ...]) -> jax.Array:
    """float32 between -1 and 1, others for each number; mixed from places, since jax's own take seconds to compile."""
    x = jax.lax.iota(jnp.uint32, math.prod(shape)) + jnp.uint32(number * 0x9E3779B9 % 2**32)
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return (x ^ (x >> 16)).reshape(shape).astype(jnp.int32).astype(jnp.float32) * 2.0**-31
