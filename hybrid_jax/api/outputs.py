"""What `generate` and `stream` return: small frozen dataclasses with vLLM's field names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from typing import Any

from hybrid_jax.display import MARK, PALE, text_block

SHOWN_CHARACTERS = 60
SHOWN_PROMPT = 400  # characters of a prompt in a notebook, its end


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
    """Times and rates of one prompt. Clock times count from an arbitrary start.

    Rates and `ttft_s` leave out the time of compiling, so they tell how fast later prompts are. `total_s` includes it.

    Attributes:
        arrival_time: when the prompt was given to the engine. For a stream that is when it is first read.
        first_token_time: when its first token was known; None if there was none.
        finished_time: when its last completion ended.
        compile_s: seconds between arrival and end in which the engine compiled programs, for any prompt.
        first_token_compile_s: those of them before the first token.
        num_prompt_tokens, num_cached_tokens: tokens of the prompt, and those of them that came from the prefix cache.
        num_loaded_tokens: those of the cached ones that the arena did not have.
        loaded_from: where these were copied from: "the host's memory", "the disk", or "another engine", which computed
            them for this one; "" for none.
        num_generation_tokens: tokens generated, in all completions together.
        num_first_tokens: those of them that came together with the first one, since a dispatch brings several.
        num_preemptions: how often it gave its memory back and started again.
        num_verifications: passes over the weights that judged drafts, of all completions together; each yielded one
            token and the drafts that were accepted. 0 without speculation.
        num_draft_tokens, num_accepted_tokens: draft tokens that were judged, and those that became output.
        accepted_by_position: how many drafts were accepted in the first, second, ... place after the row's own token;
            in a tree these are depths.
        peak_memory_bytes: the most memory in use at one time between the start of the process and `finished_time`,
            including weights, compiling and other requests. On a CPU that is the process's resident memory. On an
            accelerator it is what jax held of the first device, without the driver's own share. None if the system does
            not tell, or nothing has ended yet.

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
    num_loaded_tokens: int = 0
    loaded_from: str = ""
    num_generation_tokens: int = 0
    num_first_tokens: int = 0
    num_preemptions: int = 0
    num_verifications: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_by_position: tuple[int, ...] = ()
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
        """New tokens per second, of all completions together, without those that came first.

        None if all tokens came at once, because that tells nothing about the time between tokens.
        """
        if self.first_token_time is None:
            return None
        later = self.num_generation_tokens - self.num_first_tokens
        compiling = self.compile_s - self.first_token_compile_s
        return _rate(later, self.finished_time - self.first_token_time - compiling)

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token, without those that came first. None if all tokens came at once."""
        rate = self.decode_tokens_per_s
        return 1 / rate if rate else None

    @property
    def tokens_per_verification(self) -> float | None:
        """New tokens of each pass that judged drafts; None if there was none."""
        if not self.num_verifications:
            return None
        return 1 + self.num_accepted_tokens / self.num_verifications

    def in_words(self) -> str:
        """The numbers that people ask for first, as a sentence.

        Example:
            >>> RequestMetrics(
            ...     arrival_time=0.0, first_token_time=0.5, finished_time=1.5, num_prompt_tokens=100,
            ...     num_cached_tokens=64, num_generation_tokens=11, num_first_tokens=1,
            ... ).in_words().partition("; ")[2]
            '11 new ones, the first after 500 ms, then 10 tokens/s'
        """
        first = "" if self.ttft_s is None else f", the first after {1000 * self.ttft_s:.0f} ms"
        rate = self.decode_tokens_per_s
        below = f" ({self.num_loaded_tokens} from {self.loaded_from})" * bool(self.loaded_from)
        return (
            f"{self.num_prompt_tokens} tokens of prompt, {self.num_cached_tokens} of them from the prefix cache"
            f"{below}; {self.num_generation_tokens} new ones{first}"
            + ("" if rate is None else f", then {rate:,.0f} tokens/s")
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers, rates included, for JSON."""
        names = (
            "num_prompt_tokens num_cached_tokens num_loaded_tokens loaded_from "
            "num_generation_tokens num_preemptions num_verifications "
            "num_draft_tokens num_accepted_tokens accepted_by_position tokens_per_verification "
            "ttft_s total_s compile_s prefill_tokens_per_s decode_tokens_per_s tpot_s peak_memory_bytes"
        )
        return {name: getattr(self, name) for name in names.split()}


@dataclass(frozen=True, kw_only=True)
class CompletionOutput:
    """One completion of a prompt.

    Attributes:
        index: which of the prompt's `n` completions.
        text: the new text; empty without a tokenizer, or with `detokenize=False`.
        token_ids: the new tokens, a stop token included.
        cumulative_logprob: sum over the chosen tokens; None unless logprobs were requested.
        logprobs: per token a dict from token id to `Logprob`; None unless requested.
        finish_reason: "stop", "length" or "abort".
        stop_reason: the stop string, or the caller's stop token id, that ended it; None for the model's own. With
            "abort", why the text could not continue in the requested form.

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

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        logprobs = self.logprobs and [_plain(position) for position in self.logprobs]
        return vars(self) | {"token_ids": list(self.token_ids), "logprobs": logprobs}


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """A prompt and its completions.

    Attributes:
        request_id: of the prompt, for `llm.cache.explain`.
        prompt: its text; None if it came as token ids.
        prompt_token_ids: its tokens.
        outputs: `n` completions, by index.
        finished: always true for what `generate` returns.
        metrics: times and rates.
        num_cached_tokens: prompt tokens of the first completion that came from the prefix cache.
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

    def _repr_html_(self) -> str:
        prompt = f"({len(self.prompt_token_ids)} token ids)" if self.prompt is None else self.prompt
        shown = prompt if len(prompt) <= SHOWN_PROMPT else f"... {prompt[-SHOWN_PROMPT:]}"
        blocks = [text_block((shown, PALE), (output.text, MARK)) for output in self.outputs]
        return "".join(blocks) + f"<small>{escape(self.metrics.in_words())}</small>"

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        logprobs = self.prompt_logprobs
        return vars(self) | {
            "prompt_token_ids": list(self.prompt_token_ids),
            "outputs": [output.as_dict() for output in self.outputs],
            "metrics": self.metrics.as_dict(),
            "prompt_logprobs": logprobs
            and [position and _plain(position) for position in logprobs],
        }


@dataclass(frozen=True, kw_only=True)
class Delta:
    """What `LLM.stream` yields: what is new about one completion, or all of it, as `output_kind` says.

    Attributes:
        request_id: of the prompt.
        prompt_index: which of the prompts given to `stream`.
        index: which of the prompt's `n` completions.
        text: new text; empty while a character or a possible stop string is incomplete.
        token_ids: new tokens.
        logprobs: of the new tokens, as in `CompletionOutput`; None unless requested.
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


def _plain(position: Mapping[int, Logprob]) -> dict[str, Any]:
    """One position's log-probabilities as JSON has them."""
    return {str(token): vars(found).copy() for token, found in position.items()}


def _rate(count: int, seconds: float | None) -> float | None:
    return count / seconds if seconds and count > 0 else None


def _shown(text: str | None) -> str:
    if text is None or len(text) <= SHOWN_CHARACTERS:
        return repr(text)
    return repr(text[: SHOWN_CHARACTERS - 3] + "...")
