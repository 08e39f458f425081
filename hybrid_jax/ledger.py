"""What an `LLM` keeps of its requests when they are over. It knows nothing of the `LLM`, which may be dropped."""

from __future__ import annotations

from hybrid_jax.cache_view import SeenRequests
from hybrid_jax.completions import Job


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
        output = job.output()
        self.totals["prompt_tokens"] += output.metrics.num_prompt_tokens
        self.totals["cached_tokens"] += output.num_cached_tokens
        self.totals["generated_tokens"] += output.metrics.num_generation_tokens
        self.seen.remember(output, job.completions[0].request.look_up)
