"""Counters of the prefix cache, and a frozen view of them."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(kw_only=True)
class CacheCounters:
    """What happened in a prefix tree since it was made; `reset` of the tree keeps them.

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
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return values | {"token_hit_rate": self.token_hit_rate, "lost_tokens": self.lost_tokens}
