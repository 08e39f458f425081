"""A cache of fixed blocks with a state each: how vLLM caches hybrids when told to keep every block."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from hybrid_jax.cache.policy.simulated import Outcome
from hybrid_jax.costs import Costs

BLOCK_TOKENS = 32


class BlockCache:
    """Blocks of some tokens, each with its KV and the recurrent state at its end; LRU goes first.

    A block is known by its own tokens and all before it. Of a sequence the last blocks are used first, so they go
    first; a request that does not fit stores its beginning.

    Args:
        costs: bytes of a token and of a checkpoint.
        capacity: bytes, never exceeded.
        block_tokens: of one block.

    Attributes:
        reused, resumed: names of the blocks whose KV some later request hit, and whose state one resumed from.
    """

    alpha: float | None = None

    def __init__(self, costs: Costs, capacity: int, *, block_tokens: int = BLOCK_TOKENS):
        self.capacity, self.block_tokens = capacity, block_tokens
        self._block_bytes = costs.checkpoint_bytes + block_tokens * costs.kv_bytes
        self._most = capacity // self._block_bytes
        self._blocks: OrderedDict[int, bool] = OrderedDict()  # by name; whether it was ever hit
        self._names: dict[tuple[int, bytes], int] = {}  # (name of the block before, tokens) -> name
        self.evictions = self.num_stored = self.num_reused = 0
        self.reused: set[int] = set()
        self.resumed: set[int] = set()
        self.peak = 0

    @property
    def num_known(self) -> int:
        """Different blocks seen so far, cached now or not."""
        return len(self._names)

    def request(self, prompt: np.ndarray, whole: np.ndarray) -> Outcome:
        names = self._path(whole)
        limit = (len(prompt) - 1) // self.block_tokens
        hits = 0
        while hits < min(limit, len(names)) and names[hits] in self._blocks:
            self.num_reused += not self._blocks[names[hits]]
            self._blocks[names[hits]] = True
            hits += 1
        self.reused.update(names[:hits])
        self.resumed.update(names[hits - 1 : hits])
        for name in reversed(names[: self._most]):
            if name in self._blocks:
                self._blocks.move_to_end(name)
        keep = set(names[: self._most])
        for name in reversed(names[: self._most]):
            if name not in self._blocks:
                self._make_room(keep)
                self._blocks[name] = False
                self.num_stored += 1
        for name in reversed(names[: self._most]):  # old and new ones in one order, the last first
            self._blocks.move_to_end(name)
        self.peak = max(self.peak, len(self._blocks) * self._block_bytes)
        hit_len = hits * self.block_tokens
        return Outcome(
            num_tokens=len(prompt),
            hit_len=hit_len,
            match_len=hit_len,
            cached_len=hit_len,
            stored=len(names) <= self._most,
        )

    def _path(self, tokens: np.ndarray) -> list[int]:
        names, name, size = [], 0, self.block_tokens
        for start in range(0, len(tokens) - size + 1, size):
            key = (name, tokens[start : start + size].tobytes())
            name = self._names.setdefault(key, len(self._names) + 1)
            names.append(name)
        return names

    def _make_room(self, keep: set[int]) -> None:
        if len(self._blocks) < self._most:
            return
        name = next(iter(self._blocks))
        assert name not in keep, "block cache: a block of the request at hand would go"
        del self._blocks[name]
        self.evictions += 1
