"""What an `LLM` keeps of its finished requests. It holds no reference to the `LLM`, which may be dropped."""

from __future__ import annotations

from collections import Counter, OrderedDict

from hybrid_jax.api.cache_view import REMEMBERED, SeenRequest
from hybrid_jax.api.completions import Job


class Ledger:
    """Sums over all finished requests, and what the cache did for the latest ones.

    Attributes:
        totals: tokens of prompts, those of them that came from the cache, and new ones.
        seen: for `CacheView`.
    """

    def __init__(self) -> None:
        self.totals = Counter(prompt_tokens=0, cached_tokens=0, generated_tokens=0)
        self.seen: OrderedDict[str, SeenRequest] = OrderedDict()

    def record(self, job: Job) -> None:
        """Notes a prompt that has ended, and forgets the oldest one if there are too many."""
        request = job.completions[0].request
        num_tokens, num_cached = len(request.prompt), request.num_cached_tokens
        self.totals.update(
            prompt_tokens=num_tokens, cached_tokens=num_cached, generated_tokens=job.num_tokens
        )
        self.seen[job.request_id] = num_tokens, num_cached, request.look_up
        if len(self.seen) > REMEMBERED:
            self.seen.popitem(last=False)
