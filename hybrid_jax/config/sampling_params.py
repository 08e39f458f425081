"""What a caller may ask of the sampler; field names follow vLLM."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from numbers import Real
from typing import Any

from hybrid_jax.config.checks import flags, is_integer, is_unicode, must
from hybrid_jax.config.other_names import refuses_other_names
from hybrid_jax.config.structured_outputs import StructuredOutputsParams

MAX_LOGPROBS = 20
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-6, 1e6  # what float32 logits bear
DEFAULT_TEMPERATURE = 1.0  # where neither the caller nor the model names one
MAX_N = 1024  # completions per prompt; each is a request of its own
# The most strings, and the characters of all of them.
MAX_STRINGS = {"stop": (1000, 1 << 16), "bad_words": (10_000, 1 << 18)}
INTEGERS = ("n", "top_k", "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs")
FLOATS = (
    *("temperature", "top_p", "min_p"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
# Least and most; `OPTIONAL` ones may be None.
RANGES: dict[str, tuple[int, int]] = {
    "n": (1, MAX_N),
    "top_k": (-1, 2**31 - 1),
    "min_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "seed": (0, 2**63 - 1),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
}
# What else there is for those who want more.
REMEDIES = dict.fromkeys(("logprobs", "prompt_logprobs"), " (LLM.logprobs reports all tokens)")
OPTIONAL = ("seed", "logprobs", "prompt_logprobs")
FLAGS = ("ignore_eos", "include_stop_str_in_output", "detokenize", "skip_special_tokens")


class RequestOutputKind(StrEnum):
    """What `LLM.stream` yields for a completion: its news, all of it each time, or only its end.

    Example:
        >>> SamplingParams(output_kind="final_only").output_kind
        <RequestOutputKind.FINAL_ONLY: 'final_only'>
    """

    DELTA = "delta"
    CUMULATIVE = "cumulative"
    FINAL_ONLY = "final_only"


@refuses_other_names
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop.

    Attributes:
        n: completions per prompt, at most 1024; at temperature 0 all of them are the same.
        temperature: 0 is greedy; otherwise logits are divided by it, between 1e-6 and 1e6. None takes the model's
            own: what its generation_config.json says, or 1.0 if that says nothing.
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches it.
        min_p: keep tokens of at least this share of the likeliest one's probability; filters before top_k and
            top_p.
        presence_penalty, frequency_penalty: taken from the logits of tokens generated before, once, and once per
            time; between -2 and 2.
        repetition_penalty: divides positive and multiplies negative logits of tokens in the prompt or
            generated before.
        logit_bias: {token id: number between -100 and 100} added to the logits; kept as sorted pairs.
        allowed_token_ids: no other token is drawn; None allows all.
        bad_words: texts that are not generated as the tokenizer writes them, alone or after a space: the token
            that would complete one is not drawn. At most 10000 of 262144 characters together.
        structured_outputs: the form the text must have; None for any.
        seed: of the sampling noise; None takes the engine's, mixed with the request's number.
        max_tokens: most tokens to generate; None goes on until a stop or the longest that fits.
        min_tokens: until so many tokens are generated nothing stops: stop tokens are not drawn, and stop
            strings that begin there pass. Only a grammar that allows nothing more ends a text before.
        stop: strings that end the text, at most 1000 of 65536 characters together. They may name special tokens, also
            where these are left out of the text.
        stop_token_ids: token ids that end it, beside the model's own.
        ignore_eos: the model's own end tokens do not end it.
        include_stop_str_in_output: keep the stop string in the text.
        logprobs: report this many most likely tokens per position, and the chosen one, at most 20; None for none.
            `LLM.logprobs` reports all tokens.
        prompt_logprobs: the same for every token of the prompt; it is then computed whole, whatever the
            prefix cache holds.
        detokenize: turn tokens into text.
        skip_special_tokens: leave special tokens out of the text.
        output_kind: what `stream` yields; a `RequestOutputKind` or its value.

    Example:
        >>> SamplingParams(temperature=0.0, max_tokens=8).greedy
        True
    """

    n: int = 1
    temperature: float | None = None
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] | None = None
    allowed_token_ids: tuple[int, ...] | list[int] | None = None
    bad_words: tuple[str, ...] | list[str] | None = None
    structured_outputs: StructuredOutputsParams | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] | list[str] | str | None = None
    stop_token_ids: tuple[int, ...] | list[int] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    output_kind: RequestOutputKind | str = RequestOutputKind.DELTA

    def __post_init__(self) -> None:
        lists = {"stop": "strings", "stop_token_ids": "token ids", "bad_words": "strings"}
        for name, what in lists.items():
            value = getattr(self, name)
            value = () if value is None else (value,) if isinstance(value, str) else value
            good = isinstance(value, Iterable) and not isinstance(value, bytes | bytearray)
            must(self, name, good, f"None or a list of {what}")
            object.__setattr__(self, name, tuple(value))
        # Numbers of numpy become Python's own, so that values compare, hash and print alike.
        for name in INTEGERS:
            object.__setattr__(self, name, _as_integer(getattr(self, name)))
        for name in FLOATS:
            object.__setattr__(self, name, _as_float(getattr(self, name)))
        flags(self, *FLAGS)
        kinds = [str(kind) for kind in RequestOutputKind]
        must(self, "output_kind", self.output_kind in kinds, f"one of {', '.join(kinds)}")
        object.__setattr__(self, "output_kind", RequestOutputKind(self.output_kind))
        self._check_numbers()
        self._check_tokens()
        self._check_texts()

    def _check_numbers(self) -> None:
        for name, (low, high) in RANGES.items():
            value, whole, optional = getattr(self, name), name in INTEGERS, name in OPTIONAL
            good = (_integer(value, low) if whole else _finite(value)) and low <= value <= high
            what = f"{'an integer' if whole else 'a number'} between {low} and {high}"
            what += REMEDIES.get(name, "")
            good, what = (good or value is None, f"None or {what}") if optional else (good, what)
            must(self, name, good, what)
        heat: Any = self.temperature
        good = _finite(heat) and (heat == 0 or MIN_TEMPERATURE <= heat <= MAX_TEMPERATURE)
        what = f"0 or a number between {MIN_TEMPERATURE:g} and {MAX_TEMPERATURE:.0f}"
        must(self, "temperature", heat is None or good, what)
        good = _finite(self.top_p) and 0 < self.top_p <= 1
        must(self, "top_p", good, "a number above 0 and at most 1")
        good = _finite(self.repetition_penalty) and 0 < self.repetition_penalty <= 100
        must(self, "repetition_penalty", good, "a number above 0, at most 100")
        good = self.max_tokens is None or _integer(self.max_tokens, 1)
        must(self, "max_tokens", good, "None or an integer of at least 1")
        most = math.inf if self.max_tokens is None else self.max_tokens
        good = _integer(self.min_tokens, 0) and self.min_tokens <= most
        must(self, "min_tokens", good, "an integer between 0 and max_tokens")

    def _check_tokens(self) -> None:
        """Token ids become sorted tuples, but for `stop_token_ids`, which keep their order."""
        ids: Any = self.stop_token_ids
        stop = tuple(_as_integer(token) for token in ids)
        object.__setattr__(self, "stop_token_ids", stop)
        must(self, "stop_token_ids", all(_integer(token, 0) for token in stop), "token ids >= 0")
        bias: Any = () if self.logit_bias is None else self.logit_bias
        if not isinstance(bias, Mapping):
            good = isinstance(bias, tuple) and all(
                isinstance(pair, tuple) and len(pair) == 2 for pair in bias
            )
            must(self, "logit_bias", good, "a dict from token ids to numbers")
            bias = dict(bias)
        pairs: Any = [(_as_integer(token), _as_float(value)) for token, value in bias.items()]
        good = all(_integer(t, 0) and _finite(v) and -100 <= v <= 100 for t, v in pairs)
        what = "a dict from token ids >= 0 to numbers between -100 and 100"
        must(self, "logit_bias", good, what)
        object.__setattr__(self, "logit_bias", tuple(sorted(pairs)))
        allowed: Any = self.allowed_token_ids
        if allowed is None:
            return
        must(self, "allowed_token_ids", isinstance(allowed, Iterable), "None or token ids")
        allowed = [_as_integer(token) for token in allowed]
        good = bool(allowed) and all(_integer(token, 0) for token in allowed)
        must(self, "allowed_token_ids", good, "None or at least one token id >= 0")
        object.__setattr__(self, "allowed_token_ids", tuple(sorted(set(allowed))))

    def _check_texts(self) -> None:
        for name in ("stop", "bad_words"):
            texts = getattr(self, name)
            good = all(isinstance(text, str) and text for text in texts)
            must(self, name, good, "non-empty strings")
            must(self, name, all(map(is_unicode, texts)), "valid UTF-8")
            most, characters = MAX_STRINGS[name]
            good = len(texts) <= most and sum(map(len, texts)) <= characters
            what = f"at most {most} strings of {characters} characters together"
            got = f"{len(texts)} of {sum(map(len, texts))}"
            must(self, name, good, what, got)
        must(self, "stop", self.detokenize or not self.stop, "empty when detokenize is False")
        form = self.structured_outputs
        good = form is None or isinstance(form, StructuredOutputsParams)
        must(self, "structured_outputs", good, "None or StructuredOutputsParams")

    @property
    def adjusts_logits(self) -> bool:
        """Something changes the logits before the temperature does."""
        penalties = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty)
        biased = self.logit_bias or self.allowed_token_ids is not None or self.bad_words
        return penalties != (0, 0, 1) or bool(biased)

    @property
    def asks_more_than_tokens(self) -> bool:
        """A step has to report log-probabilities of the output, or to change logits."""
        grammar = self.structured_outputs is not None
        return self.logprobs is not None or self.adjusts_logits or grammar

    @property
    def engine_temperature(self) -> float:
        """What the engine draws at: `temperature`, or 1.0 if that is None and no model's own has replaced it."""
        return DEFAULT_TEMPERATURE if self.temperature is None else self.temperature

    @property
    def greedy(self) -> bool:
        """Whether `temperature` is 0. A temperature of None is not, whatever the model's own is."""
        return self.temperature == 0


def _as_integer(value: object) -> object:
    """An integer of any kind as Python's; anything else, booleans too, as it is."""
    return operator.index(value) if is_integer(value) else value  # type: ignore[arg-type]


def _as_float(value: object) -> object:
    """A number of any kind as a float; anything else, and an integer past all floats, as it is."""
    try:
        return float(value) if isinstance(value, Real) and not isinstance(value, bool) else value
    except OverflowError:
        return value


def _integer(value: object, low: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= low


def _finite(value: object) -> bool:
    return isinstance(value, float) and math.isfinite(value)
