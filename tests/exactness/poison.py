"""NaN bits in an engine's state, wherever nothing may be read."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from hybrid_jax.engine.engine import Engine
from hybrid_jax.geometry import Geometry
from hybrid_jax.schedule.sequence import Phase
from hybrid_jax.schedule.tiers.below import HOST
from hybrid_jax.state import State

_KEEP = np.int32(1 << 30)
# The second overflows where somebody rounds bits up. The upper half of each is a NaN in bfloat16.
BITS = (np.uint32(0x7FC07FC0), np.uint32(0x7FFFFFFF))


class Poison:
    """Writes NaN bits wherever nothing may be read: now everywhere that is free, then at random moments.

    Free frames, the sink, the tails of pages, the ring rows of nobody, and the records past the last one a
    row was planned to write. `BITS` take turns.

    Args:
        engine: whose state is poisoned.
        seed: of the random moments.
        rate: share of the calls of `sometimes` that spread poison.
    """

    def __init__(self, engine: Engine, seed: int = 0, rate: float = 0.4):
        self.engine, self.rate = engine, rate
        self.rng = np.random.default_rng(seed)
        self.num_spread = 0
        self.spread()

    def sometimes(self) -> None:
        if self.rng.random() < self.rate:
            self.spread()

    def spread(self) -> None:
        """Poisons the state between two dispatches, unless a plan is made that is still to be dispatched.

        Such a plan may read what the host has given away already. Nothing is written before it, except here.
        """
        if self.engine._next:
            return
        engine, geometry = self.engine, self.engine.geometry
        scheduler, frames = engine.scheduler, engine.scheduler.memory.frames
        num_frames = engine.runner.state.arena.shape[0]  # the scheduler may know of fewer
        whole = np.ones(num_frames, bool)
        tails, which = np.full(num_frames, _KEEP), np.zeros(num_frames, np.int32)
        for frame in range(frames.num_frames):
            whole[frame] = frames.holders(frame) == 0
        num_rows = engine.engine_config.max_rows + 1
        records, columns = np.zeros(num_rows, np.int32), np.zeros(num_rows, np.int32)
        lengths = np.asarray(engine.runner.state.lengths)
        for row, sequence in enumerate(scheduler.seats.rows):
            if sequence is None:
                continue
            if sequence.phase is not Phase.PREFILL:  # a chunk starts from the checkpoint alone
                records[row] = lengths[row] - geometry.checkpoint(int(lengths[row]))
                committed = records[row] if engine.engine_config.exact else 0
                columns[row] = committed
            prefills = sequence.phase is Phase.PREFILL
            num_tokens = sequence.position if prefills else lengths[row]
            for index, page in enumerate(sequence.held.pages):
                for place, frame in enumerate(page):
                    which[frame] = place
                    if frames.holders(frame) == 1:
                        tails[frame] = max(num_tokens - index * geometry.page_tokens, 0)
        history = tuple(group.layout.columns for group in geometry.groups)
        bits = BITS[self.num_spread % len(BITS)]
        if scheduler.memory.below is not None:
            self._spread_below(bits)
        engine.runner.state = _fill(
            engine.runner.state,
            whole,
            tails,
            records,
            columns,
            which,
            tokens_in_page(geometry),
            bits,
            history=history,
        )
        self.num_spread += 1

    def _spread_below(self, bits: np.uint32) -> None:
        """Poisons the frames of the tier below that nobody holds."""
        memory, kept = self.engine.scheduler.memory, self.engine.runner.host_frames
        frames = memory.tree.tiers[HOST].frames
        for number, words in kept.frames.items():
            if frames.holders(number) == 0:
                bad = np.full(words.shape, bits)
                kept.frames[number] = jax.device_put(bad, words.sharding)


def tokens_in_page(geometry: Geometry) -> np.ndarray:
    """int32[frames of a page, W]: of which of the page's tokens each word is; words of none follow the last."""
    found = np.full((max(geometry.frames_per_page, 1), geometry.frame_words), geometry.page_tokens)
    for place in geometry.kv:
        offset = place.offset
        for size in filter(None, (place.token_words, place.scale_words)):
            words = np.arange(geometry.page_tokens * size)
            found[place.frame, offset + words] = words // size
            offset += len(words)
    return found.astype(np.int32)


@functools.partial(jax.jit, donate_argnums=0, static_argnames="history")
def _fill(state: State, whole, tails, records, columns, which, tokens, bits, *, history) -> State:
    """Poison past what is kept.

    Args:
        whole: bool[U] frames that nobody holds. tails: int32[U] first token of each that is free.
        which: int32[U] which frame of its page each is. tokens: int32[P, W] token of each word of a page's frames.
        bits: uint32 of the poison.
        records, columns: int32[B] entries of the rings to keep; of the columns, beside those of the history.
        history: columns before the window, of each group.
    """
    bad = whole[:, None] | (tokens[which] >= tails[:, None])
    arena = jnp.where(bad, bits, state.arena)

    def ring(array, past):  # [L, B, S, C], [B, S]
        own = {4: bits, 2: (bits >> 16).astype(jnp.uint16)}[array.dtype.itemsize]
        nan = jax.lax.bitcast_convert_type(own, array.dtype)
        return jnp.where(past[None, :, :, None], nan, array)

    def unread(name, array, before):
        """bool[B, S] entries that nothing may read: all but one copy of a state that a row carries."""
        place = jnp.arange(array.shape[2])
        if name == "state":
            return (records[:, None] == 0) | (place != (state.lengths % len(place))[:, None])
        return place >= (columns + before if name == "conv" else records)[:, None]

    rings = tuple(
        {name: ring(array, unread(name, array, before)) for name, array in arrays.items()}
        for arrays, before in zip(state.rings, history, strict=True)
    )
    return state.replace(arena=arena, rings=rings)
