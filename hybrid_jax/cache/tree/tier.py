"""A tier: a place where pages and checkpoints live, such as the arena or the host's memory."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from hybrid_jax.cache.pools.counted import ByteBudget, CountedSlots
from hybrid_jax.cache.pools.frames import FrameAllocator
from hybrid_jax.cache.pools.pages import PageStore
from hybrid_jax.cache.pools.slots import SlotTable
from hybrid_jax.cache.tree.eviction import Candidates, EvictionPolicy
from hybrid_jax.cache.tree.node import ARENA, Node


@dataclass(kw_only=True)
class CacheCounters:
    """What happened in a tier of a prefix tree since it was made; `reset` of the tree keeps them.

    Attributes:
        lookups, lookup_tokens: prompts looked up at admission, and their tokens.
        hits, hit_tokens: how many resumed from a checkpoint, and the tokens that skipped.
        cached_tokens: tokens looked up whose pages were cached; the gap to hit_tokens is what no checkpoint
            covered.
        inserted_checkpoints, inserted_tokens: checkpoints adopted, and tokens whose pages were.
        leaf_evictions: nodes evicted whole, pages and checkpoint.
        tombstone_evictions: checkpoints evicted from inside a path, pages kept.
        expected_evictions: those of both that a waiting prompt would have used.
        disowned_checkpoints: checkpoints given back so that their row could fold in place.
        pruned_nodes: known but uncached spans forgotten.
    """

    lookups: int = 0
    lookup_tokens: int = 0
    hits: int = 0
    hit_tokens: int = 0
    cached_tokens: int = 0
    inserted_checkpoints: int = 0
    inserted_tokens: int = 0
    leaf_evictions: int = 0
    tombstone_evictions: int = 0
    expected_evictions: int = 0
    disowned_checkpoints: int = 0
    pruned_nodes: int = 0

    @property
    def token_hit_rate(self) -> float:
        """Tokens skipped per token looked up; 0.0 before the first look-up."""
        return self.hit_tokens / self.lookup_tokens if self.lookup_tokens else 0.0

    @property
    def evictions(self) -> int:
        """Entries evicted, whole or their checkpoint alone."""
        return self.leaf_evictions + self.tombstone_evictions

    @property
    def lost_tokens(self) -> int:
        """Tokens looked up whose pages were cached and that were computed all the same, for want of a checkpoint."""
        return self.cached_tokens - self.hit_tokens

    def as_dict(self) -> dict[str, int | float]:
        """All counters by name, with the hit rate and the lost tokens."""
        return asdict(self) | {
            "token_hit_rate": self.token_hit_rate,
            "lost_tokens": self.lost_tokens,
        }


class Tier:
    """Pools, what the nodes of one tree list of them, and the order in which that is evicted.

    Args:
        frames: what is free in it.
        slots: its checkpoints; the tree is one holder among others.
        pages: its pages as nodes list them, and the tree's own counts on `frames`.
        policy: orders the eviction candidates; least recently used when None. No other tier may have the same object.
        number: its place among the tiers of the tree; 0 is the arena, where rows work.

    Attributes:
        slot_nodes: the node of each checkpoint, by handle.
        candidates: which of its nodes may be evicted.
        counters: what happened in it.
    """

    def __init__(
        self,
        frames: FrameAllocator | ByteBudget,
        slots: SlotTable | CountedSlots,
        pages: PageStore,
        policy: EvictionPolicy | None = None,
        *,
        number: int = ARENA,
    ):
        self.frames, self.slots, self.pages, self.number = frames, slots, pages, number
        self.slot_nodes: dict[int, Node] = {}
        self.candidates = Candidates(policy, number)
        self.counters = CacheCounters()

    @property
    def policy(self) -> EvictionPolicy:
        """What orders the eviction candidates."""
        return self.candidates.evictable

    def has_free(self, num_frames: int, num_slots: int) -> bool:
        """Whether so many frames and slots are free."""
        return self.frames.num_free >= num_frames and self.slots.num_free >= num_slots

    def frees_something(self, node: Node) -> bool:
        """Whether evicting a candidate, or it and then what it shares pages with, returns memory to the pools."""
        held, checkpoint = node.held[self.number], node.has_checkpoint(self.number)
        if checkpoint and self.slots.holders(node.slots[self.number]) == 1:
            return True
        if held.num_children:
            return False
        if not len(self.pages.given(held.pages)):
            return not checkpoint  # nothing in the way of its parent
        return self.pages.only_ours(held.pages)
