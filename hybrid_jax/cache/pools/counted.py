"""Pages and checkpoints that are only counted, in bytes of one budget: the pools of a cache on virtual time.

They stand where `FrameAllocator`, `SlotTable` and `PageHolds` stand in an engine, under the same tree and the same
policies. Pages are ranges, of one token each; rows hold nothing of their own.
"""

from __future__ import annotations

from collections.abc import Sequence

from hybrid_jax.cache.pools.frames import OutOfFrames
from hybrid_jax.cache.pools.pages import PageStore, RowPages
from hybrid_jax.cache.pools.recount import agree


class ByteBudget:
    """A budget that is never exceeded; free bytes are what frames are elsewhere.

    Attributes:
        capacity, used, peak: bytes; the most that was ever used.
    """

    def __init__(self, capacity: int):
        self.capacity, self.used, self.peak = capacity, 0, 0
        self._lent = 0

    @property
    def num_free(self) -> int:
        """Bytes that may still be counted."""
        return self.capacity - self.used

    def lend(self, num_bytes: int) -> None:
        """Lets that much more be counted: memory of the request at hand, which is not the cache's yet."""
        self._lent += num_bytes

    def settle(self) -> None:
        """Ends all lending; what is counted fits the capacity again."""
        assert self.used <= self.capacity, f"budget: {self.used} of {self.capacity} bytes used"
        self._lent = 0
        self.peak = max(self.peak, self.used)

    def take(self, num_bytes: int) -> None:
        """Counts bytes as used.

        Raises:
            OutOfFrames: fewer are free; nothing was taken.
        """
        if self.used + num_bytes > self.capacity + self._lent:
            raise OutOfFrames(
                f"ByteBudget: needs {num_bytes} bytes, {self.num_free} of {self.capacity} free"
            )
        self.used += num_bytes
        if not self._lent:
            self.peak = max(self.peak, self.used)

    def give(self, num_bytes: int) -> None:
        """Counts bytes as free again."""
        self.used -= num_bytes

    def retain(self, pages: RowPages) -> None:
        """A row's hold on pages: nothing to count, the tree alone holds bytes."""

    def __repr__(self) -> str:
        return f"ByteBudget({self.used} of {self.capacity} bytes used)"


class CountedPages(PageStore):
    """Pages of one token, as ranges whose length counts; no pages if a token takes no bytes."""

    none = range(0)

    def __init__(self, budget: ByteBudget, token_bytes: int):
        self._budget, self._token_bytes = budget, token_bytes
        self.page_tokens = 1 if token_bytes else 0
        self.num_frames = 0  # a page of one token is its own frame

    def _take(self, row: range) -> range:
        """Takes the bytes of these tokens.

        Raises:
            OutOfFrames: the budget does not have them.
        """
        self._budget.take(len(row) * self._token_bytes)
        self.num_frames += len(row)
        return row

    def _share(self, pages: range) -> None:
        self._take(pages)

    def release(self, pages: range) -> None:
        self._budget.give(len(pages) * self._token_bytes)
        self.num_frames -= len(pages)

    def _joined(self, upper: range, lower: range) -> range:
        return range(len(upper) + len(lower))

    def only_ours(self, pages: range) -> bool:
        return True

    def _row(self, parts: Sequence[range], length: int) -> range:
        return range(sum(map(len, parts)))

    def check_invariants(self, listed: Sequence[range]) -> None:
        agree("counted pages", tokens=(self.num_frames, sum(map(len, listed))))


class CountedSlots:
    """Checkpoints as numbers with counted holders; 0 stands for none."""

    num_free = 1 << 62  # what runs out is the budget

    def __init__(self, budget: ByteBudget, checkpoint_bytes: int):
        self._budget, self._checkpoint_bytes = budget, checkpoint_bytes
        self._holders: dict[int, int] = {}
        self._sizes: dict[int, int] = {}
        self._last = 0

    @property
    def num_held(self) -> int:
        """Checkpoints that somebody holds."""
        return len(self._holders)

    @property
    def num_bytes(self) -> int:
        """Bytes of all of them."""
        return sum(self._sizes.values())

    def allocate(self, more: int = 0) -> int:
        """A new checkpoint with one holder, the caller.

        Args:
            more: bytes that come and go with it, beside its own.

        Raises:
            OutOfFrames: the budget does not have its bytes.
        """
        size = self._checkpoint_bytes + more
        self._budget.take(size)
        self._last += 1
        self._holders[self._last], self._sizes[self._last] = 1, size
        return self._last

    def holders(self, slot: int) -> int:
        """How many hold a checkpoint; KeyError if nobody does."""
        return self._holders[slot]

    def retain(self, slot: int) -> None:
        """Adds a holder."""
        self._holders[slot] += 1

    def release(self, slot: int) -> None:
        """Drops a holder; the last one gives the bytes back."""
        self._holders[slot] -= 1
        if not self._holders[slot]:
            del self._holders[slot]
            self._budget.give(self._sizes.pop(slot))
