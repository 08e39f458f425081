"""Requests that are read ahead, so that those with the same beginning run one after the other."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from hybrid_jax.batch.requests import BatchRequest
from hybrid_jax.batch.responses import AnswerIds
from hybrid_jax.cache.tree.prefix_order import prefix_order

MAX_LINES = 16_384  # read and not started
MAX_BYTES = 64 << 20  # of those lines, as text or as token ids, whichever is more


@dataclass(eq=False, kw_only=True)
class Entry:
    """One line between reading and writing.

    Attributes:
        index: of the line among those that are not blank, from 0.
        number: of the line in the file, from 1, with blank lines counted.
        num_bytes: bytes of the line.
        ids: the ids in its answer.
        custom_id: None while it is not known.
        request: what the line asks for; set once that has been read.
    """

    index: int
    number: int
    num_bytes: int
    ids: AnswerIds
    custom_id: str | None = None
    request: BatchRequest = field(init=False)


class Ahead:
    """Lines that were read and not started, handed out a block at a time.

    A block holds what was read while the block before it was handed out, in the order of the tree of prefixes. So the
    first blocks are small, and nobody waits for them. Later ones are as large as the limits allow.

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
        """Whether no more lines should be read for now."""
        return len(self) >= MAX_LINES or self._num_bytes >= MAX_BYTES

    def add(self, entry: Entry) -> None:
        """Takes a line whose request is known."""
        self._read.append(entry)
        self._num_bytes += _held_bytes(entry)

    def pop(self) -> Entry:
        """Hands out the next line. There must be one."""
        if not self._block:
            self._block.extend(self._ordered())
            self._read = []
        entry = self._block.popleft()
        self._num_bytes -= _held_bytes(entry)
        return entry

    def _ordered(self) -> list[Entry]:
        """What was read, in the order of the tree. A line of several prompts goes where its first prompt belongs."""
        if self._grain is None:
            return self._read
        prompts = [entry.request.prompts[0] for entry in self._read]
        return [self._read[index] for index in prefix_order(prompts, self._grain)]


def _held_bytes(entry: Entry) -> int:
    return max(entry.num_bytes, sum(int(prompt.nbytes) for prompt in entry.request.prompts))
