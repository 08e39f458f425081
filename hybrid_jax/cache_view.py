"""What the prefix cache did for each request, in words."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hybrid_jax.config import EngineConfig, ModelConfig
from hybrid_jax.outputs import RequestOutput

if TYPE_CHECKING:
    from hybrid_jax.engine.engine import Engine

REMEMBERED = 4096  # requests that can still be explained


@dataclass(frozen=True, kw_only=True)
class CacheExplanation:
    """How much of a prompt the cache spared, and why not more.

    Attributes:
        request_id: the prompt's.
        prompt_tokens: tokens of the prompt.
        hit_tokens: tokens skipped.
        possible_tokens: most that could have been skipped: the last resume point before the last token,
            which must be computed to give logits.
        reason: why the rest was computed.
    """

    request_id: str
    prompt_tokens: int
    hit_tokens: int
    possible_tokens: int
    reason: str

    def __str__(self) -> str:
        return (
            f"request {self.request_id}: {self.hit_tokens} of {self.prompt_tokens} prompt tokens came "
            f"from the prefix cache; {self.reason}"
        )


class CacheView:
    """The prefix cache as a caller sees it; made by `LLM`, reached as `llm.cache`."""

    def __init__(
        self, engine: Callable[[], Engine], model: ModelConfig, config: EngineConfig
    ) -> None:
        self._engine, self._config = engine, config
        self._recurrent = model.mamba2 is not None
        self._seen: OrderedDict[str, tuple[int, int]] = OrderedDict()

    def remember(self, output: RequestOutput) -> None:
        """Notes a request for `explain`; the oldest are forgotten."""
        self._seen[output.request_id] = len(output.prompt_token_ids), output.num_cached_tokens
        if len(self._seen) > REMEMBERED:
            self._seen.popitem(last=False)

    def explain(self, request_id: str) -> CacheExplanation:
        """Why a request's prompt hit as much of the cache as it did.

        Args:
            request_id: of a `RequestOutput` or `Delta` of this `LLM`.

        Raises:
            KeyError: no such request, or too long ago. RuntimeError: the `LLM` was closed.

        Example:
            >>> from hybrid_jax import LLM, SamplingParams
            >>> llm = LLM()
            >>> [out] = llm.generate("x = 1", SamplingParams(temperature=0.0, max_tokens=2))
            >>> explanation = llm.cache.explain(out.request_id)
            >>> explanation.prompt_tokens, explanation.hit_tokens
            (5, 0)
            >>> explanation.reason
            'a prompt of at most 32 tokens holds no resume point (they lie 32 apart)'
        """
        self._engine()  # refuses when closed, as everything else does
        if request_id not in self._seen:
            raise KeyError(f"cache.explain: no finished request {request_id!r}")
        tokens, hit = self._seen[request_id]
        grain = self._config.grain
        possible = (tokens - 1) // grain * grain
        return CacheExplanation(
            request_id=request_id,
            prompt_tokens=tokens,
            hit_tokens=hit,
            possible_tokens=possible,
            reason=self._reason(tokens, hit, possible),
        )

    def _reason(self, tokens: int, hit: int, possible: int) -> str:
        grain = self._config.grain
        if self._config.cache.policy == "off":
            return "the cache is off"
        if possible == 0:
            return (
                f"a prompt of at most {grain} tokens holds no resume point (they lie {grain} apart)"
            )
        if hit >= possible:
            return (
                f"that is all there can be: resume points lie {grain} tokens apart, and the last "
                "token must be computed"
            )
        what = "pages and state" if self._recurrent else "pages"
        return (
            f"{possible} could have: no earlier sequence left {what} further along this prompt, "
            "or they were evicted"
        )

    def describe(self) -> str:
        """The engine's memory, then the prefix tree: span, first tokens and what is cached of each node."""
        engine = self._engine()
        tree = engine.scheduler.memory.tree
        return f"{engine.describe()}\n{'the cache is off' if tree is None else tree.describe()}"

    def __repr__(self) -> str:
        return f"CacheView({self._config.cache.policy!r}, {len(self._seen)} requests remembered)"
