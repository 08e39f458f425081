"""Which replicas can resume a prompt, and where: what their caches told of their resume points."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from hybrid_jax.cache.pools.recount import agree

FEW = 4  # replicas that are named one by one


class Mark(NamedTuple):
    """A resume point of a prompt.

    Attributes:
        length: tokens up to there.
        places: bit `tier * replicas + replica` is set for each place that has it and has no later one.
    """

    length: int
    places: int


class Marks:
    """What every tier of every replica can resume from, by the names of prefixes.

    A resume point is a checkpoint with all pages that are read there, so a mark never stands for pages whose state is
    gone.

    Args:
        grain: tokens between resume points. replicas: how many there are.
    """

    def __init__(self, grain: int, replicas: int) -> None:
        self.grain, self.replicas = grain, replicas
        self._places: dict[int, int] = {}

    def __len__(self) -> int:
        """Different resume points."""
        return len(self._places)

    def add(self, replica: int, tier: int, names: Iterable[int]) -> None:
        """A tier of a replica has these resume points now."""
        bit, places = self._bit(replica, tier), self._places
        for name in names:
            places[name] = places.get(name, 0) | bit

    def remove(self, replica: int, tier: int, names: Iterable[int]) -> None:
        """A tier of a replica has these resume points no longer."""
        bit, places = self._bit(replica, tier), self._places
        for name in names:
            left = places.get(name, 0) & ~bit
            if left:
                places[name] = left
            else:
                places.pop(name, None)

    def forget(self, replica: int, tiers: Sequence[int]) -> None:
        """These tiers of a replica have nothing any more."""
        gone = 0
        for tier in tiers:
            gone |= self._bit(replica, tier)
        self._places = {name: left for name, all_ in self._places.items() if (left := all_ & ~gone)}

    def found(self, names: Sequence[int], limit: int) -> Iterator[Mark]:
        """The resume points of a prompt, the deepest of each place, the deepest of all first.

        Args:
            names: as `prefix_names` gives them. limit: the most tokens that may be skipped.
        """
        places, grain, seen = self._places, self.grain, 0
        for index in range(min(len(names), limit // grain) - 1, -1, -1):
            there = places.get(names[index])
            if there is not None and (new := there & ~seen):
                seen |= new
                yield Mark((index + 1) * grain, new)

    def of(self, replica: int, tier: int) -> set[int]:
        """The names that a tier of a replica has, for comparisons."""
        bit = self._bit(replica, tier)
        return {name for name, places in self._places.items() if places & bit}

    def check(self, replica: int, tier: int, names: np.ndarray) -> None:
        """Compares the marks of a tier with what is there; raises AssertionError with both where they differ."""
        agree(
            f"marks: replica {replica}, tier {tier}",
            names=(self.of(replica, tier), set(names.tolist())),
        )

    def _bit(self, replica: int, tier: int) -> int:
        return 1 << (tier * self.replicas + replica)

    def each_place(self, places: int) -> Iterator[tuple[int, int | np.ndarray]]:
        """(tier, replica) of a mark's places, or where a tier has many, bool[replicas] of them."""
        while places:
            low = places & -places
            tier, replica = divmod(low.bit_length() - 1, self.replicas)
            first = tier * self.replicas
            here = (places >> first) & ((1 << self.replicas) - 1)
            if here.bit_count() <= FEW:
                places ^= low
                yield tier, replica
            else:
                places ^= here << first
                packed = here.to_bytes(-(-self.replicas // 8), "little")
                bits = np.unpackbits(np.frombuffer(packed, np.uint8), bitorder="little")
                yield tier, bits[: self.replicas].view(np.bool_)
