"""Requests that are read before their turn comes, so that they can be computed along the tree of their prefixes."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from hybrid_jax.batch.requests import BatchRequest
from hybrid_jax.batch.responses import Names
from hybrid_jax.cache.tree.prefix_order import prefix_order

MAX_LINES = 16_384  # read and not started
MAX_BYTES = 64 << 20  # of them, as text or as token ids, whichever is more


@dataclass(eq=False, kw_only=True)
class Entry:
    """One line between reading and writing.

    Attributes:
        place: the line's among those that are not blank, from 0.
        number: in the file, from 1, blank lines counted.
        num_bytes: of the line.
        names: the ids in its answer.
        custom_id: None while it is not known.
        request: what it asks for, once that is known.
    """

    place: int
    number: int
    num_bytes: int
    names: Names
    custom_id: str | None = None
    request: BatchRequest | None = None


class Ahead:
    """Lines that were read and not started, handed out a block at a time.

    A block is what was read while the one before was handed out, in the order of the tree of prefixes. So the
    first ones are small, and nobody waits for them; later ones are as large as the limits.

    Args:
        grain: tokens between resume points; None to keep the order of the file.
    """

    def __init__(self, grain: int | None) -> None:
        self._grain = grain
        self._block: deque[Entry] = deque()
        self._read: list[Entry] = []
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._block) + len(self._read)

    @property
    def full(self) -> bool:
        return len(self) >= MAX_LINES or self._num_bytes >= MAX_BYTES

    def add(self, entry: Entry) -> None:
        """Takes in a line with a request."""
        self._read.append(entry)
        self._num_bytes += _held_bytes(entry)

    def pop(self) -> Entry:
        """Hands out the next line; there must be one."""
        if not self._block:
            self._block.extend(self._ordered())
            self._read = []
        entry = self._block.popleft()
        self._num_bytes -= _held_bytes(entry)
        return entry

    def _ordered(self) -> list[Entry]:
        """What was read, along the tree; several prompts of one line go where the first one belongs."""
        if self._grain is None:
            return self._read
        prompts = [entry.request.prompts[0] for entry in self._read]
        return [self._read[index] for index in prefix_order(prompts, self._grain)]


def _held_bytes(entry: Entry) -> int:
    return max(entry.num_bytes, sum(prompt.nbytes for prompt in entry.request.prompts))
