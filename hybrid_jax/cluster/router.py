"""Which replica gets a request: the one that answers soonest, given what each has cached and has to do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Where a request goes, and why.

    Attributes:
        replica: its number.
        hit_len: tokens of the prompt that the replica is thought to have.
        why: in words.
    """

    replica: int
    hit_len: int
    why: str


class Router:
    """Stands in for the real one until that is here.

    Args:
        count: replicas.
        grain: tokens between resume points.
    """

    def __init__(self, count: int, *, grain: int) -> None:
        self.count, self.grain = count, grain
        self._at: dict[str, int] = {}
        self._load = [0] * count
        self._present = set(range(count))

    def choose(self, owner: str, tokens: np.ndarray) -> Decision:
        """Sends a request to a replica, and counts it there until `ended`.

        Args:
            owner: its name. tokens: int32[n] prompt, and output so far if it comes back from a replica that left.
        """
        replica = min(self._present, key=lambda r: (self._load[r], r))
        self._at[owner] = replica
        self._load[replica] += 1
        return Decision(replica=replica, hit_len=0, why="least loaded")

    def computed(self, owner: str) -> None:
        """A request has its first token."""

    def ended(self, owner: str) -> None:
        """A request has ended, or was taken back."""
        replica = self._at.pop(owner, None)
        if replica is not None:
            self._load[replica] -= 1

    def came(self, replica: int, tier: int, names: Iterable[int]) -> None:
        """A tier of a replica has these resume points now."""

    def went(self, replica: int, tier: int, names: Iterable[int]) -> None:
        """A tier of a replica has these resume points no longer."""

    def leave(self, replica: int) -> list[str]:
        """A replica is gone; returns whose requests it had. Each can be given to `choose` again."""
        self._present.discard(replica)
        found = [owner for owner, at in self._at.items() if at == replica]
        for owner in found:
            self.ended(owner)
        return found
