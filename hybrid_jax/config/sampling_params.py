"""What a caller may ask of the sampler; field names follow vLLM."""

from __future__ import annotations

import math
import operator
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from numbers import Real

from hybrid_jax.config.checks import flags
from hybrid_jax.config.other_names import SAMPLING, refuses
from hybrid_jax.config.structured_outputs import StructuredOutputsParams

MAX_LOGPROBS = 20
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-6, 1e6  # what float32 logits bear
DEFAULT_TEMPERATURE = 1.0  # where neither the caller nor the model names one
MAX_N = 1024  # completions per prompt; each is a request of its own
INTEGERS = ("n", "top_k", "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs")
FLOATS = (
    *("temperature", "top_p", "min_p"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
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


@refuses(SAMPLING)
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
            that would complete one is not drawn.
        structured_outputs: the form the text must have; None for any.
        seed: of the sampling noise; None takes the engine's, mixed with the request's number.
        max_tokens: most tokens to generate; None goes on until a stop or the longest that fits.
        min_tokens: until so many tokens are generated nothing stops: stop tokens are not drawn, and stop
            strings that begin there pass. Only a grammar that allows nothing more ends a text before.
        stop: strings that end the text.
        stop_token_ids: token ids that end it, beside the model's own.
        ignore_eos: the model's own end tokens do not end it.
        include_stop_str_in_output: keep the stop string in the text.
        logprobs: report this many most likely tokens per position, and the chosen one; None for
            none.
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
        check = self._check
        lists = {"stop": "strings", "stop_token_ids": "token ids", "bad_words": "strings"}
        for name, what in lists.items():
            value = getattr(self, name)
            value = () if value is None else (value,) if isinstance(value, str) else value
            good = isinstance(value, Iterable) and not isinstance(value, bytes | bytearray)
            check(good, name, f"None or a list of {what}")
            object.__setattr__(self, name, tuple(value))
        # Numbers of numpy become Python's own, so that values compare, hash and print alike.
        for name in INTEGERS:
            object.__setattr__(self, name, _as_integer(getattr(self, name)))
        for name in FLOATS:
            object.__setattr__(self, name, _as_float(getattr(self, name)))
        stop_token_ids = tuple(_as_integer(token) for token in self.stop_token_ids)
        object.__setattr__(self, "stop_token_ids", stop_token_ids)
        flags(self, *FLAGS)
        self._check_tokens()
        kinds = [str(kind) for kind in RequestOutputKind]
        check(self.output_kind in kinds, "output_kind", f"one of {', '.join(kinds)}")
        object.__setattr__(self, "output_kind", RequestOutputKind(self.output_kind))
        check(_integer(self.n, 1) and self.n <= MAX_N, "n", f"an integer between 1 and {MAX_N}")
        check(
            self.temperature is None
            or _finite(self.temperature)
            and (self.temperature == 0 or MIN_TEMPERATURE <= self.temperature <= MAX_TEMPERATURE),
            "temperature",
            f"0 or a number between {MIN_TEMPERATURE:g} and {MAX_TEMPERATURE:.0f}",
        )
        check(
            _integer(self.top_k, -1) and self.top_k < 2**31,
            "top_k",
            "an integer between -1 and 2147483647",
        )
        check(
            _finite(self.top_p) and 0 < self.top_p <= 1, "top_p", "a number above 0 and at most 1"
        )
        check(
            self.seed is None or (_integer(self.seed, 0) and self.seed < 2**63),
            "seed",
            "None or an integer between 0 and 9223372036854775807",
        )
        check(
            self.max_tokens is None or _integer(self.max_tokens, 1),
            "max_tokens",
            "None or an integer of at least 1",
        )
        most = math.inf if self.max_tokens is None else self.max_tokens
        check(
            _integer(self.min_tokens, 0) and self.min_tokens <= most,
            "min_tokens",
            "an integer between 0 and max_tokens",
        )
        check(_finite(self.min_p) and 0 <= self.min_p <= 1, "min_p", "a number between 0 and 1")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            check(_finite(value) and -2 <= value <= 2, name, "a number between -2 and 2")
        check(
            _finite(self.repetition_penalty) and 0 < self.repetition_penalty <= 100,
            "repetition_penalty",
            "a number above 0, at most 100",
        )
        check(
            all(isinstance(w, str) and w for w in self.bad_words), "bad_words", "non-empty strings"
        )
        check(
            self.structured_outputs is None
            or isinstance(self.structured_outputs, StructuredOutputsParams),
            "structured_outputs",
            "None or StructuredOutputsParams",
        )
        check(all(isinstance(s, str) and s for s in self.stop), "stop", "non-empty strings")
        for name in ("stop", "bad_words"):
            check(all(map(_is_unicode, getattr(self, name))), name, "valid UTF-8")
        check(self.detokenize or not self.stop, "stop", "empty when detokenize is False")
        check(
            all(_integer(t, 0) for t in self.stop_token_ids),
            "stop_token_ids",
            "token ids >= 0",
        )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            check(
                value is None or (_integer(value, 0) and value <= MAX_LOGPROBS),
                name,
                f"None or an integer between 0 and {MAX_LOGPROBS}",
            )

    def _check_tokens(self) -> None:
        """`logit_bias` and `allowed_token_ids`, as sorted tuples."""
        bias = self.logit_bias
        if not isinstance(bias, Mapping):
            bias = () if bias is None else bias
            pairs = isinstance(bias, tuple) and all(
                isinstance(pair, tuple) and len(pair) == 2 for pair in bias
            )
            self._check(pairs, "logit_bias", "a dict from token ids to numbers")
            bias = dict(bias)
        pairs = [(_as_integer(token), _as_float(value)) for token, value in bias.items()]
        self._check(
            all(_integer(t, 0) and _finite(v) and -100 <= v <= 100 for t, v in pairs),
            "logit_bias",
            "a dict from token ids >= 0 to numbers between -100 and 100",
        )
        object.__setattr__(self, "logit_bias", tuple(sorted(pairs)))
        allowed = self.allowed_token_ids
        if allowed is None:
            return
        self._check(isinstance(allowed, Iterable), "allowed_token_ids", "None or token ids")
        allowed = [_as_integer(token) for token in allowed]
        self._check(
            bool(allowed) and all(_integer(token, 0) for token in allowed),
            "allowed_token_ids",
            "None or at least one token id >= 0",
        )
        object.__setattr__(self, "allowed_token_ids", tuple(sorted(set(allowed))))

    def _check(self, condition: bool, name: str, what: str) -> None:
        if not condition:
            got = reprlib.repr(getattr(self, name))  # short, whatever was given
            raise ValueError(f"SamplingParams: {name} must be {what}, got {got}")

    @property
    def adjusts_logits(self) -> bool:
        """Something changes the logits before the temperature does."""
        penalties = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty)
        biased = self.logit_bias or self.allowed_token_ids is not None or self.bad_words
        return penalties != (0, 0, 1) or bool(biased)

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
    try:
        return value if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return value


def _as_float(value: object) -> object:
    """A number of any kind as a float; anything else, and an integer past all floats, as it is."""
    try:
        return float(value) if isinstance(value, Real) and not isinstance(value, bool) else value
    except OverflowError:
        return value


def _is_unicode(text: str) -> bool:
    """No lone surrogates: no text could ever hold one."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _integer(value: object, low: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= low


def _finite(value: object) -> bool:
    return isinstance(value, float) and math.isfinite(value)
