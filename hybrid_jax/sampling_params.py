"""What a caller may ask of the sampler; field names follow vLLM."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

MAX_LOGPROBS = 20


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop.

    Attributes:
        n: completions per prompt.
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches it.
        seed: of the sampling noise; None takes the engine's, mixed with the request's number.
        max_tokens: most tokens to generate; None goes on until a stop or the longest that fits.
        stop: strings that end the text.
        stop_token_ids: token ids that end it, beside the model's own.
        ignore_eos: the model's own end tokens do not end it.
        include_stop_str_in_output: keep the stop string in the text.
        logprobs: report this many most likely tokens per position, and the chosen one; None for
            none.
        detokenize: turn tokens into text.
        skip_special_tokens: leave special tokens out of the text.

    Example:
        >>> SamplingParams(temperature=0.0, max_tokens=8).greedy
        True
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] | list[str] | str | None = None
    stop_token_ids: tuple[int, ...] | list[int] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        check = self._check
        for name, what in (("stop", "strings"), ("stop_token_ids", "token ids")):
            value = getattr(self, name)
            value = () if value is None else (value,) if isinstance(value, str) else value
            check(isinstance(value, Iterable), name, f"None or a list of {what}")
            object.__setattr__(self, name, tuple(value))
        check(_integer(self.n, 1), "n", "an integer of at least 1")
        check(
            _finite(self.temperature) and self.temperature >= 0,
            "temperature",
            "a finite number >= 0",
        )
        check(_integer(self.top_k, -1), "top_k", "an integer >= -1")
        check(_finite(self.top_p) and 0 < self.top_p <= 1, "top_p", "a number in (0, 1]")
        check(
            self.seed is None or (_integer(self.seed, 0) and self.seed < 2**63),
            "seed",
            "None or an integer in [0, 2**63)",
        )
        check(
            self.max_tokens is None or _integer(self.max_tokens, 1),
            "max_tokens",
            "None or an integer of at least 1",
        )
        check(all(isinstance(s, str) and s for s in self.stop), "stop", "non-empty strings")
        check(self.detokenize or not self.stop, "stop", "empty when detokenize is False")
        check(
            all(_integer(t, 0) for t in self.stop_token_ids),
            "stop_token_ids",
            "token ids >= 0",
        )
        check(
            self.logprobs is None or (_integer(self.logprobs, 0) and self.logprobs <= MAX_LOGPROBS),
            "logprobs",
            f"None or an integer between 0 and {MAX_LOGPROBS}",
        )

    def _check(self, condition: bool, name: str, what: str) -> None:
        if not condition:
            raise ValueError(f"SamplingParams: {name} must be {what}, got {getattr(self, name)!r}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


def _integer(value: object, low: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= low


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
