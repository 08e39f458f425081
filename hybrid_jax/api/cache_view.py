"""What the prefix cache did for each request, in words."""

from __future__ import annotations

import reprlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hybrid_jax.api.outputs import Delta, RequestOutput
from hybrid_jax.cache.tree.reasons import LookUp, Why
from hybrid_jax.config import CacheConfig, EngineConfig, ModelConfig
from hybrid_jax.sizes import format_size, parse_size

if TYPE_CHECKING:
    from hybrid_jax.engine.engine import Engine
    from hybrid_jax.schedule.history import History

REMEMBERED = 4096  # requests that can still be explained


@dataclass(frozen=True, kw_only=True)
class CacheExplanation:
    """How much of a prompt the cache spared, and why not more.

    Attributes:
        request_id: the prompt's.
        prompt_tokens: tokens of the prompt.
        matched_tokens: leading tokens that earlier requests had as well, cached or not.
        hit_tokens: tokens skipped.
        possible_tokens: most that could have been skipped: the last resume point before the last token,
            which must be computed to give logits.
        reason: why the rest was computed.
    """

    request_id: str
    prompt_tokens: int
    matched_tokens: int
    hit_tokens: int
    possible_tokens: int
    reason: str

    def __str__(self) -> str:
        return (
            f"request {self.request_id}: {self.hit_tokens} of {self.prompt_tokens} prompt tokens came "
            f"from the prefix cache; {self.reason}"
        )


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """What a replay of the latest requests hit.

    Attributes:
        policy, memory: that were tried; memory in bytes.
        requests: replayed.
        hit_rate: tokens skipped per token of the prompts, with these settings.
        present_hit_rate: the same replay with the settings that the engine has.
        measured_hit_rate: what really was skipped.
    """

    policy: str
    memory: int
    requests: int
    hit_rate: float
    present_hit_rate: float
    measured_hit_rate: float

    def __str__(self) -> str:
        return (
            f"{self.policy} with {format_size(self.memory)}: {100 * self.hit_rate:.1f} % of "
            f"{self.requests} requests' prompt tokens would come from the cache, "
            f"{100 * self.present_hit_rate:.1f} % with the present settings"
        )


class Picture(str):
    """Text that shows itself as it stands where a notebook or a shell shows a value."""

    __slots__ = ()
    __repr__ = str.__str__


class SeenRequests:
    """What the cache did for the latest requests, for `CacheView.explain`; kept by whoever keeps the engine."""

    def __init__(self) -> None:
        self._seen: OrderedDict[str, tuple[int, int, LookUp | None]] = OrderedDict()

    def remember(self, request_id: str, tokens: int, hit: int, look_up: LookUp | None) -> None:
        """Notes a request as `find` tells it; the oldest are forgotten."""
        self._seen[request_id] = tokens, hit, look_up
        if len(self._seen) > REMEMBERED:
            self._seen.popitem(last=False)

    def find(self, request_id: str) -> tuple[int, int, LookUp | None] | None:
        """Tokens of the prompt, tokens that were skipped, and the look-up; None for a request that is not known."""
        return self._seen.get(request_id)

    def __len__(self) -> int:
        return len(self._seen)


class CacheView:
    """The prefix cache as a caller sees it; made by `LLM`, reached as `llm.cache`.

    Args:
        ask: calls a function of the engine between two turns, and returns what it returns.
        seen: kept up to date where the engine runs.
        model, config: of the engine.
    """

    def __init__(
        self,
        ask: Callable[[Callable[[Engine], Any]], Any],
        seen: SeenRequests,
        model: ModelConfig,
        config: EngineConfig,
    ) -> None:
        self._ask, self._seen, self._config = ask, seen, config
        self._recurrent = bool(model.recurrent)

    def explain(self, request: RequestOutput | Delta | str) -> CacheExplanation:
        """Why a request's prompt hit as much of the cache as it did.

        Args:
            request: a `RequestOutput` or `Delta` of this `LLM`, or its `request_id`.

        Raises:
            KeyError: no such request, or too long ago. TypeError: it is something else. RuntimeError: the `LLM` was
                closed.

        Example:
            >>> from hybrid_jax import LLM, SamplingParams
            >>> llm = LLM()
            >>> [out] = llm.generate("x = 1", SamplingParams(temperature=0.0, max_tokens=2))
            >>> explanation = llm.cache.explain(out)
            >>> explanation.prompt_tokens, explanation.hit_tokens
            (5, 0)
            >>> explanation.reason
            'a prompt of at most 32 tokens holds no resume point (they lie 32 apart)'
        """
        request_id = request.request_id if isinstance(request, RequestOutput | Delta) else request
        if not isinstance(request_id, str):
            raise TypeError(
                "cache.explain: takes a RequestOutput, a Delta or the request_id of one, got "
                f"{type(request).__name__} {reprlib.repr(request)}"
            )
        found = self._ask(lambda engine: self._seen.find(request_id))
        if found is None:
            raise KeyError(
                f"cache.explain: no finished request {request_id!r} among the latest {REMEMBERED}; pass an "
                "output of this LLM, or its request_id"
            )
        tokens, hit, look_up = found
        possible = (tokens - 1) // self._config.grain * self._config.grain
        return CacheExplanation(
            request_id=request_id,
            prompt_tokens=tokens,
            matched_tokens=hit if look_up is None else max(hit, look_up.match_len),
            hit_tokens=hit,
            possible_tokens=possible,
            reason=self._reason(hit, possible, look_up),
        )

    def _reason(self, hit: int, possible: int, look_up: LookUp | None) -> str:
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
        if look_up is None:
            return (
                f"{possible} could have: no earlier sequence left {what} further along this prompt"
            )
        return f"{possible} could have: {self._missing(look_up, what)}"

    def _missing(self, look_up: LookUp, what: str) -> str:
        """What kept a prompt from resuming at its last resume point."""
        match look_up.why:
            case Why.EVICTED:
                gone = what if look_up.pages else "the state"
                return (
                    f"{gone} at {look_up.position} had been evicted {look_up.ago} "
                    f"request{'s' * (look_up.ago != 1)} before, by "
                    f"policy {look_up.policy}; more memory would have kept it"
                )
            case Why.NOT_ADMITTED:
                return (
                    f"its first {look_up.match_len} tokens were known, but none of the requests that had them "
                    f"left {what} between {look_up.hit_len} and {look_up.position}"
                )
            case Why.NO_ROOM:
                return f"{what} at {look_up.position} were there, and had to make room for this request itself"
            case Why.ASKED_FOR:
                return (
                    "the log-probabilities of the prompt were asked for, so all of it was computed"
                )
        if not look_up.match_len:
            return "no earlier request that is still known began like it"
        return (
            f"no earlier request that is still known had more than the first {look_up.match_len} of its "
            "tokens"
        )

    def describe(self) -> str:
        """The engine's memory, then the prefix tree: span, first tokens and what is cached of each node."""
        tree = self._tree()
        said = "the cache is off" if tree is None else tree
        return f"{self._ask(lambda engine: engine.describe())}\n{said}"

    def tree(self) -> Picture:
        """The prefix tree alone: one line a node, indented below its parent; empty without a cache."""
        return Picture(self._tree() or "")

    def _tree(self) -> str | None:
        def picture(engine: Engine) -> str | None:
            tree = engine.scheduler.memory.tree
            return None if tree is None else tree.describe()

        return self._ask(picture)

    def what_if(self, *, policy: str | None = None, memory: int | str | None = None) -> WhatIf:
        """What the requests so far would have hit under another policy, or with another amount of memory.

        Replays the latest requests (8192 at most), one after the other, by the blocks of tokens that resume points
        are made of. Memory of running requests and breakpoints that callers declared are not part of it, so the
        present settings are replayed beside the others: compare `hit_rate` with `present_hit_rate`.

        Args:
            policy: as of `CacheConfig`, but not "off"; None for the present one.
            memory: bytes of the arena, 5GB or 5GiB; None for what it is.

        Raises:
            ValueError: an unknown policy or size, or no request has finished yet.
        """
        history = self._ask(_history_so_far)
        if history is None:
            raise ValueError("cache.what_if: the cache is off, so nothing was logged; turn it on")
        if not len(history.log):
            raise ValueError("cache.what_if: no request has finished yet")
        present = self._config.cache.policy
        policy = present if policy is None else CacheConfig(policy=policy).policy
        if policy == "off":
            raise ValueError("cache.what_if: policy must keep something, got 'off'")
        arena = history.capacity
        size = arena if memory is None else parse_size(memory, name="memory")
        return WhatIf(
            policy=policy,
            memory=size,
            requests=len(history.log),
            hit_rate=history.replay(policy, size),
            present_hit_rate=history.replay(present, arena),
            measured_hit_rate=history.log.hit_rate,
        )

    def __repr__(self) -> str:
        return f"CacheView({self._config.cache.policy!r}, {len(self._seen)} requests remembered)"


def _history_so_far(engine: Engine) -> History | None:
    """A copy, so that a replay of it keeps nobody waiting."""
    history = engine.scheduler.memory.history
    return None if history is None else history.so_far()
