"""What a generation returns: small frozen dataclasses with vLLM's field names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

SHOWN_CHARACTERS = 60


@dataclass(frozen=True, kw_only=True)
class Logprob:
    """Log-probability of one token at one position.

    Attributes:
        logprob: natural logarithm, of the unscaled distribution.
        rank: 1 for the most likely token.
        decoded_token: the token as text; None without a tokenizer.

    Example:
        >>> Logprob(logprob=-0.1, rank=1, decoded_token=" the")
        Logprob(logprob=-0.1, rank=1, decoded_token=' the')
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(frozen=True, kw_only=True)
class RequestMetrics:
    """Times and rates of one prompt; clock seconds count from an arbitrary start.

    Rates and `ttft_s` leave compiling out, `total_s` has it in: so the first prompt of a program shows how fast the
    next ones will be.

    Attributes:
        arrival_time: when the prompt was given to the engine; of a stream, when it was first read from.
        first_token_time: when its first token was known; None when it gave none.
        finished_time: when its last completion ended.
        compile_s: seconds between arrival and end in which the engine compiled programs, for this prompt or another.
        first_token_compile_s: those of them before the first token.
        num_prompt_tokens, num_cached_tokens: tokens of the prompt, and those the prefix cache spared.
        num_generation_tokens: tokens generated, all completions together.
        num_first_tokens: of these, tokens that came together with the first one: a dispatch brings several.
        num_preemptions: times it gave its memory back and started again.
        peak_memory_bytes: the most memory in use at one time from the start of the process to `finished_time`,
            by everything it did until then, weights, compiling and other requests included. On a CPU that is
            the process's resident memory; on an accelerator what jax held of the first device, without the
            driver's own share. None when the system does not say, or nothing has ended yet.

    Example:
        >>> metrics = RequestMetrics(
        ...     arrival_time=10.0, first_token_time=10.5, finished_time=12.5,
        ...     num_prompt_tokens=100, num_cached_tokens=50, num_generation_tokens=21,
        ...     num_first_tokens=1,
        ... )
        >>> metrics.ttft_s, metrics.prefill_tokens_per_s, metrics.decode_tokens_per_s
        (0.5, 100.0, 10.0)
    """

    arrival_time: float
    first_token_time: float | None = None
    finished_time: float
    compile_s: float = 0.0
    first_token_compile_s: float = 0.0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generation_tokens: int = 0
    num_first_tokens: int = 0
    num_preemptions: int = 0
    peak_memory_bytes: int | None = None

    @property
    def ttft_s(self) -> float | None:
        """Seconds from arrival to the first token, waiting included and compiling left out."""
        if self.first_token_time is None:
            return None
        return self.first_token_time - self.arrival_time - self.first_token_compile_s

    @property
    def total_s(self) -> float:
        """Seconds from arrival to the end, compiling included."""
        return self.finished_time - self.arrival_time

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """Prompt tokens computed (not cached) per second before the first token."""
        return _rate(self.num_prompt_tokens - self.num_cached_tokens, self.ttft_s)

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Tokens after those that came first, per second after them, all completions together.

        None when everything came at once, so that nothing is known about the time between.
        """
        if self.first_token_time is None:
            return None
        later = self.num_generation_tokens - self.num_first_tokens
        compiling = self.compile_s - self.first_token_compile_s
        return _rate(later, self.finished_time - self.first_token_time - compiling)

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token after those that came first; None when everything came at once."""
        rate = self.decode_tokens_per_s
        return 1 / rate if rate else None

    def as_dict(self) -> dict:
        """Plain numbers, rates included, for JSON."""
        names = (
            "num_prompt_tokens num_cached_tokens num_generation_tokens num_preemptions "
            "ttft_s total_s compile_s prefill_tokens_per_s decode_tokens_per_s tpot_s peak_memory_bytes"
        )
        return {name: getattr(self, name) for name in names.split()}


@dataclass(frozen=True, kw_only=True)
class CompletionOutput:
    """One completion of a prompt.

    Attributes:
        index: which of the prompt's `n` completions.
        text: the new text; empty without a tokenizer or with `detokenize=False`.
        token_ids: the new tokens, a stop token included.
        cumulative_logprob: sum over the chosen tokens; None unless logprobs were asked for.
        logprobs: per token a dict from token id to `Logprob`; None unless asked for.
        finish_reason: "stop", "length" or "abort".
        stop_reason: the stop string or the caller's stop token id that ended it; None for the model's own. With
            "abort", why the text could not go on in the form that was asked for.

    Example:
        >>> CompletionOutput(index=0, text=" the", token_ids=(262,), finish_reason="length")
        CompletionOutput(index=0, text=' the', 1 tokens, finish_reason='length')
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    cumulative_logprob: float | None = None
    logprobs: tuple[Mapping[int, Logprob], ...] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        """Whether nothing more will come."""
        return self.finish_reason is not None

    def __repr__(self) -> str:
        return (
            f"CompletionOutput(index={self.index}, text={_shown(self.text)}, "
            f"{len(self.token_ids)} tokens, finish_reason={self.finish_reason!r}"
            + (f", stop_reason={self.stop_reason!r})" if self.stop_reason is not None else ")")
        )

    def as_dict(self) -> dict:
        """Plain data, for JSON."""
        logprobs = self.logprobs and [_plain(position) for position in self.logprobs]
        return {
            "index": self.index,
            "text": self.text,
            "token_ids": list(self.token_ids),
            "cumulative_logprob": self.cumulative_logprob,
            "logprobs": logprobs,
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
        }


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """A prompt and its completions.

    Attributes:
        request_id: names the prompt in `llm.cache.explain`.
        prompt: its text; None when it came as token ids.
        prompt_token_ids: its tokens.
        outputs: `n` completions, by index.
        finished: always true for what `generate` returns.
        metrics: times and rates.
        num_cached_tokens: prompt tokens the prefix cache spared the first completion.
        prompt_logprobs: per prompt token a dict from token id to `Logprob`, None for the first; None unless
            asked for.

    Example:
        >>> completion = CompletionOutput(index=0, text="b", token_ids=(98,), finish_reason="length")
        >>> RequestOutput(
        ...     request_id="0", prompt="a", prompt_token_ids=(97,), outputs=(completion,),
        ...     metrics=RequestMetrics(arrival_time=0.0, finished_time=1.0),
        ... ).outputs[0].text
        'b'
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool = True
    metrics: RequestMetrics
    num_cached_tokens: int = 0
    prompt_logprobs: tuple[Mapping[int, Logprob] | None, ...] | None = None

    def __repr__(self) -> str:
        return (
            f"RequestOutput(request_id={self.request_id!r}, prompt={_shown(self.prompt)}, "
            f"{len(self.prompt_token_ids)} tokens, {self.num_cached_tokens} cached, "
            f"outputs={list(self.outputs)})"
        )

    def as_dict(self) -> dict:
        """Plain data, for JSON."""
        return {
            "request_id": self.request_id,
            "prompt": self.prompt,
            "prompt_token_ids": list(self.prompt_token_ids),
            "outputs": [output.as_dict() for output in self.outputs],
            "finished": self.finished,
            "metrics": self.metrics.as_dict(),
            "num_cached_tokens": self.num_cached_tokens,
            "prompt_logprobs": self.prompt_logprobs
            and [position and _plain(position) for position in self.prompt_logprobs],
        }


@dataclass(frozen=True, kw_only=True)
class Delta:
    """What `LLM.stream` yields: the news of one completion, or all of it, as `output_kind` says.

    Attributes:
        request_id: the prompt's.
        prompt_index: which of the prompts given to `stream`.
        index: which of the prompt's `n` completions.
        text: new text; empty while a character or a possible stop string is incomplete.
        token_ids: new tokens.
        logprobs: theirs, as in `CompletionOutput`; None unless asked for.
        finish_reason, stop_reason: set on the completion's last delta.
        output: on the prompt's last delta, everything `generate` would have returned; None before.

    Example:
        >>> Delta(request_id="0", text="b", token_ids=(98,)).finished()
        False
    """

    request_id: str
    prompt_index: int = 0
    index: int = 0
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[Mapping[int, Logprob], ...] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    output: RequestOutput | None = None

    def finished(self) -> bool:
        """Whether this completion ends here."""
        return self.finish_reason is not None


def _plain(position: Mapping[int, Logprob]) -> dict:
    """One position's log-probabilities as JSON has them."""
    return {
        str(token): {"logprob": p.logprob, "rank": p.rank, "decoded_token": p.decoded_token}
        for token, p in position.items()
    }


def _rate(count: int, seconds: float | None) -> float | None:
    return count / seconds if seconds and count > 0 else None


def _shown(text: str | None) -> str:
    if text is None or len(text) <= SHOWN_CHARACTERS:
        return repr(text)
    return repr(text[: SHOWN_CHARACTERS - 3] + "...")
