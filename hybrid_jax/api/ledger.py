"""What an `LLM` keeps of its requests when they are over. It knows nothing of the `LLM`, which may be dropped."""

from __future__ import annotations

from hybrid_jax.api.cache_view import SeenRequests
from hybrid_jax.api.completions import Job


class Ledger:
    """Sums over all requests, and what the cache did for the latest ones.

    Attributes:
        totals: tokens of prompts, those that came from the cache, and new ones.
        seen: for `CacheView`.
    """

    def __init__(self) -> None:
        self.totals = dict.fromkeys(("prompt_tokens", "cached_tokens", "generated_tokens"), 0)
        self.seen = SeenRequests()

    def record(self, job: Job) -> None:
        """Notes a prompt that has ended."""
        request = job.completions[0].request
        num_tokens, num_cached = len(request.prompt), request.num_cached_tokens
        self.totals["prompt_tokens"] += num_tokens
        self.totals["cached_tokens"] += num_cached
        self.totals["generated_tokens"] += job.num_tokens
        self.seen.remember(job.request_id, num_tokens, num_cached, request.look_up)
