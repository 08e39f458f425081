"""Pools after much traffic, with all they gave; and what is inside pools, to see that a failed call changed nothing."""

from __future__ import annotations

import random

import numpy as np

from hybrid_jax.cache.pools.frames import FrameAllocator
from hybrid_jax.cache.pools.slots import SlotTable


def contents(*pools) -> list:
    """All that pools keep, as plain values to compare."""
    return [plain(pool) for pool in pools]


def plain(value):
    """A copy without arrays and objects."""
    if isinstance(value, np.ndarray):
        return [str(value.dtype), *value.tolist()]
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(part) for part in value]
    if isinstance(value, bytearray):
        return bytes(value)
    return plain(vars(value)) if hasattr(value, "__dict__") else value


class WornPools:
    """Frames and slots that have had many lives, each half in use.

    Attributes:
        frames, slots: the pools.
        live_frames, live_slots: handles of what is held, as they came, with the ids.
        dead: handles that were live once.
    """

    def __init__(self, seed: int):
        self.frames = FrameAllocator(16)
        self.slots = SlotTable(self.frames, lengths=(2,), max_slots=5)
        self.live_frames: dict[int, int] = {}
        self.live_slots: dict[int, int] = {}
        self.dead: set[int] = set()
        self._rng = random.Random(seed)
        for _ in range(300):
            self._trade()
        self.dead -= self.live_frames.keys() | self.live_slots.keys()  # 64 lives later

    def _trade(self) -> None:
        rng, pages = self._rng, self._pages()
        if rng.random() < 0.5 and self.frames.num_free:
            self._name(self.frames.allocate(1).tolist())
        elif pages:
            name = rng.choice(pages)
            self.frames.release([self.live_frames[name]])
            self._forget([name])
        if rng.random() < 0.3 and self.slots.num_free and self.frames.num_free >= 2:
            slot = self.slots.allocate()
            self.live_slots[slot] = self.slots.resolve(slot)
            self._name(self.slots.frames(slot))
        elif rng.random() < 0.3 and self.live_slots:
            slot = rng.choice(list(self.live_slots))
            frames = self.slots.frames(slot)
            self._forget([n for n, frame in self.live_frames.items() if frame in frames])
            self.slots.release(slot)
            self.dead.add(slot)
            del self.live_slots[slot]

    def _pages(self) -> list[int]:
        """Handles of frames that no slot lists."""
        listed = {frame for slot in self.live_slots for frame in self.slots.frames(slot)}
        return [name for name, frame in self.live_frames.items() if frame not in listed]

    def _name(self, frames) -> None:
        self.live_frames.update(zip(self.frames.handles(frames).tolist(), frames, strict=True))

    def _forget(self, names) -> None:
        for name in names:
            del self.live_frames[name]
            self.dead.add(name)
