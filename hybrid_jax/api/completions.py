"""Turns the engine's tokens into texts, deltas and outputs: the caller's side of each request."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple, Protocol

from hybrid_jax.api.outputs import CompletionOutput, Delta, Logprob, RequestMetrics, RequestOutput
from hybrid_jax.cluster.router import Decision
from hybrid_jax.config.sampling_params import RequestOutputKind, SamplingParams
from hybrid_jax.constraints import TokenConstraint, TokenLimits
from hybrid_jax.schedule.drafts import DraftCounts
from hybrid_jax.schedule.request import Pooling, Progress, Request, TokenLogprobs
from hybrid_jax.text.incremental import IncrementalDecoder, StopStrings
from hybrid_jax.text.prompts import Prompt
from hybrid_jax.text.tokenizer import Tokenizer


def derive_seed(seed: int, name: int | str) -> int:
    """The seed, in [0, 2**63), of a request of an LLM that has the given seed.

    Args:
        seed: of the LLM.
        name: tells the request from others: its number, or a name for it that does not depend on the order.

    Example:
        >>> derive_seed(0, 1) == derive_seed(0, 1) != derive_seed(0, 2)
        True
    """
    data = f"{seed}/{name}".encode(errors="surrogatepass")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 1


def logprob_entries(found: TokenLogprobs, tokenizer: Tokenizer | None) -> dict[int, Logprob]:
    """The log-probability of the chosen token, then those of the most likely ones."""

    def entry(token: int, logprob: float, rank: int) -> Logprob:
        decoded = None
        if tokenizer is not None:
            decoded = tokenizer.decode([token], skip_special_tokens=False)
        return Logprob(logprob=logprob, rank=rank, decoded_token=decoded)

    entries = {found.token_id: entry(found.token_id, found.logprob, found.rank)}
    for rank, (token, logprob) in enumerate(found.top, start=1):
        entries.setdefault(token, entry(token, logprob, rank))
    return entries


class Update(NamedTuple):
    """What is new about a completion that another process computes.

    Attributes:
        progress: of its request, with the new tokens.
        text: new.
        finish_reason, stop_reason: of the completion.
    """

    progress: Progress
    text: str
    finish_reason: str | None
    stop_reason: int | str | None


class Completion:
    """One completion while it grows. It takes tokens, makes text of them, and looks for stop strings."""

    def __init__(self, request: Request, tokenizer: Tokenizer | None) -> None:
        params = request.params
        self.request = request
        self.text = ""
        self.token_ids: list[int] = []
        self.logprobs: list[Mapping[int, Logprob]] | None = None if params.logprobs is None else []
        self.cumulative_logprob = 0.0
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self._tokenizer = tokenizer
        self._decoder = None
        if tokenizer is not None and params.detokenize:
            skip = params.skip_special_tokens
            self._decoder = IncrementalDecoder(
                lambda ids: tokenizer.decode(ids, skip_special_tokens=skip), request.prompt
            )
        self._stops = StopStrings(params.stop or (), include=params.include_stop_str_in_output)
        # The text of special tokens is left out, but a stop string may name one.
        self._hides_special = bool(params.stop) and params.skip_special_tokens

    def take(self) -> None:
        """Takes the tokens that are new. Sets `finish_reason` if the completion ends with them.

        Tokens after a stop string are dropped, because their number depends on the engine's step size.

        Raises:
            FloatingPointError: the model's numbers for it are not finite.
        """
        request, output = self.request, self.request.output
        ready = len(output.token_ids)
        if self.logprobs is not None:  # a token waits for its log-probabilities
            ready = min(ready, len(output.logprobs))
        for index in range(len(self.token_ids), ready):
            token = output.token_ids[index]
            self._add(index)
            if token not in request.stop_ids and self._decoder is not None:
                self._push(token)
            if self.finish_reason is not None:
                return
        if output.finish_reason == "error":
            raise FloatingPointError(
                "the model's numbers are not finite (NaN or infinity) after "
                f"{len(request.prompt)} tokens of prompt and {len(output.token_ids)} new ones"
            )
        if output.finish_reason is not None:
            self._finish()

    def _add(self, index: int) -> None:
        """Takes a token of the output, without its text."""
        output = self.request.output
        self.token_ids.append(output.token_ids[index])
        if self.logprobs is not None:
            found = output.logprobs[index]
            self.logprobs.append(logprob_entries(found, self._tokenizer))
            self.cumulative_logprob += found.logprob

    def update(self, num_tokens: int, num_characters: int) -> Update:
        """What is new to somebody who knows of so many tokens and characters."""
        return Update(
            self.request.progress(num_tokens, len(self.token_ids), whole=not num_tokens),
            self.text[num_characters:],
            self.finish_reason,
            self.stop_reason,
        )

    def receive(self, update: Update) -> None:
        """Takes what is new about it in another process, which makes its text."""
        self.request.go_on(update.progress)
        for index in range(len(self.token_ids), len(self.request.output.token_ids)):
            self._add(index)
        self.text += update.text
        self.finish_reason, self.stop_reason = update.finish_reason, update.stop_reason

    def _push(self, token: int) -> None:
        """Makes text of a token, and searches it unless it comes before `min_tokens`."""
        assert self._decoder is not None and self._tokenizer is not None, "it makes text"
        piece = self._decoder.push(token)
        if len(self.token_ids) <= self.request.params.min_tokens:
            self.text += piece
            return
        self._show(piece)
        if self._hides_special and self.finish_reason is None:
            self._show(self._tokenizer.hidden_text(token), hidden=True)

    def _show(self, piece: str, *, hidden: bool = False) -> None:
        shown, stop = self._stops.push(piece, hidden=hidden)
        self.text += shown
        if stop is not None:
            self.finish_reason, self.stop_reason = "stop", stop

    def _finish(self) -> None:
        if self._decoder is not None:
            self._show(self._decoder.finish())
        if self.finish_reason is None:
            self.text += self._stops.finish()
            self.finish_reason = self.request.output.finish_reason
            self.stop_reason = self.request.output.stop_reason
            limit = self.request.constraint
            if self.finish_reason == "stop" and isinstance(limit, TokenConstraint) and limit.stuck:
                self.finish_reason, self.stop_reason = "abort", limit.stuck

    def go_elsewhere(self) -> None:
        """Goes on in an engine that knows nothing of it, after the tokens that were taken."""
        self.request = self.request.again(len(self.token_ids))

    def go_on(self, progress: Progress | None) -> None:
        """Goes on where it was in another process; None if it has ended there."""
        if progress is None:
            self.finish_reason = "elsewhere"
        else:
            self.request.go_on(progress)
            self.take()

    def output(self) -> CompletionOutput:
        """Everything so far, as the caller gets it."""
        return CompletionOutput(
            index=self.request.sample_index,
            text=self.text,
            token_ids=tuple(self.token_ids),
            cumulative_logprob=None if self.logprobs is None else self.cumulative_logprob,
            logprobs=None if self.logprobs is None else tuple(self.logprobs),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )


class Measured(Protocol):
    """What computes, as far as metrics are about it."""

    def compile_seconds(self) -> float:
        """Seconds of compiling so far."""

    def peak_memory_bytes(self) -> int | None:
        """The most memory in use so far."""


class Job:
    """One prompt while it runs: its completions and its times.

    Args:
        request_id: the id that the caller sees; the engine's ids are made from it.
        index: among the prompts of the call.
        prompt, params, tokenizer: what to do.
        seed: of the sampling noise, for parameters without one.
        stop_ids: token ids that end a completion.
        max_tokens: limit on the tokens of each completion.
        limits: what limits the choice of tokens in each completion.
        logprobs_from, pooling, reads_only: as in `Request`.

    Attributes:
        error: why it ended early, if its call keeps errors.
        decision: which replica computes it, and why; None where there is one engine.
    """

    def __init__(
        self,
        request_id: str,
        index: int,
        prompt: Prompt,
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        *,
        seed: int,
        stop_ids: frozenset[int],
        max_tokens: int,
        limits: TokenLimits,
        logprobs_from: int = 1,
        pooling: Pooling | None = None,
        reads_only: bool = False,
    ) -> None:
        self.request_id, self.index, self.prompt, self.params = request_id, index, prompt, params
        self._tokenizer = tokenizer
        # Only the first completion reports log-probabilities of the prompt.
        others = params if params.n == 1 else replace(params, prompt_logprobs=None)
        self.first_token_time: float | None = None
        self.num_first_tokens = 0  # those that came together with the first token
        self.finished_time: float | None = None
        self.error: BaseException | None = None
        self.decision: Decision | None = None
        self.peak_memory_bytes: int | None = None
        self.arrive(0.0)
        self.completions = [
            Completion(
                Request(
                    request_id=request_id if params.n == 1 else f"{request_id}.{sample}",
                    prompt=list(prompt.token_ids),
                    params=others if sample else params,
                    seed=seed if params.seed is None else params.seed,
                    sample_index=sample,
                    sibling_group=None if params.n == 1 else request_id,
                    stop_ids=stop_ids,
                    max_tokens=max_tokens,
                    forbidden_ids=limits.forbidden_ids,
                    constraint=limits.constraints[sample] if limits.constraints else None,
                    cache_breakpoints=prompt.cache_breakpoints,
                    logprobs_from=logprobs_from,
                    pooling=pooling,
                    reads_only=reads_only,
                ),
                tokenizer,
            )
            for sample in range(params.n)
        ]

    def arrive(self, compile_s: float, at: float | None = None) -> None:
        """Starts its clock, just before it is given to an engine that has compiled so many seconds.

        Args:
            compile_s: these seconds.
            at: when it came, if that was not now.
        """
        self.arrival_time = time.perf_counter() if at is None else at
        self._compiled_at_start = self._compiled_by_first = self._compiled_by_end = compile_s

    def go_elsewhere(self, compile_s: float) -> None:
        """Leaves an engine that has compiled so many seconds; `reach` says where it goes on."""
        self._compiled_by_end = compile_s
        for completion in self.unfinished:
            completion.go_elsewhere()

    def reach(self, compile_s: float) -> None:
        """Goes on in another engine, which has compiled so many seconds."""
        shift = compile_s - self._compiled_by_end
        self._compiled_at_start += shift
        self._compiled_by_first += shift
        self._compiled_by_end = compile_s

    @property
    def unfinished(self) -> list[Completion]:
        """Completions that still grow, or have ended with an error."""
        return [c for c in self.completions if c.finish_reason is None]

    @property
    def num_unfinished(self) -> int:
        """How many are `unfinished`."""
        if len(self.completions) == 1:  # callers with thousands of prompts look often
            return int(self.completions[0].finish_reason is None)
        return len(self.unfinished)

    @property
    def finished(self) -> bool:
        """Whether all its completions have ended as they should."""
        return not self.num_unfinished

    @property
    def num_tokens(self) -> int:
        """Tokens generated so far."""
        return sum(len(completion.token_ids) for completion in self.completions)

    def take(
        self,
        completion: Completion,
        now: float,
        engine: Measured,
        *,
        streamed: bool,
        update: Update | None = None,
    ) -> Delta | None:
        """Takes what is new about one of its completions, and returns what a stream should yield, if anything.

        Args:
            completion: one of its own.
            now: clock seconds at which the news were known.
            engine: tells how long it has compiled, and the most memory in use.
            streamed: there is a stream.
            update: what is new, if another process computes it; None where it stands in its request.
        """
        text_before, tokens_before = len(completion.text), len(completion.token_ids)
        if update is None:
            completion.take()
        else:
            completion.receive(update)
        self._compiled_by_end = engine.compile_seconds()
        if completion.token_ids and self.first_token_time is None:
            self.first_token_time, self._compiled_by_first = now, self._compiled_by_end
        if self.first_token_time == now:
            self.num_first_tokens += len(completion.token_ids) - tokens_before
        finished = self.finished
        if finished:
            self.finished_time, self.peak_memory_bytes = now, engine.peak_memory_bytes()
        kind = self.params.output_kind
        early = kind is RequestOutputKind.FINAL_ONLY and completion.finish_reason is None
        if early or not streamed:
            return None
        if kind is not RequestOutputKind.DELTA:
            text_before = tokens_before = 0
        news = completion.logprobs
        return Delta(
            request_id=self.request_id,
            prompt_index=self.index,
            index=completion.request.sample_index,
            text=completion.text[text_before:],
            token_ids=tuple(completion.token_ids[tokens_before:]),
            logprobs=None if news is None else tuple(news[tokens_before:]),
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
            output=self.output() if finished else None,
        )

    def _prompt_logprobs(self) -> tuple[Mapping[int, Logprob] | None, ...] | None:
        if self.params.prompt_logprobs is None:
            return None
        entries = self.completions[0].request.output.prompt_logprobs
        return tuple(found and logprob_entries(found, self._tokenizer) for found in entries)

    def output(self) -> RequestOutput:
        """Everything so far, as the caller gets it."""
        requests = [c.request for c in self.completions]
        drafts = DraftCounts(depth=requests[0].course.drafts.depth)
        for request in requests:
            drafts.windows += request.course.drafts.windows
        hit = requests[0].hit
        loaded = (0, "") if hit.look_up is None else (hit.look_up.loaded, hit.look_up.loaded_from)
        metrics = RequestMetrics(
            arrival_time=self.arrival_time,
            first_token_time=self.first_token_time,
            finished_time=self.finished_time or self.arrival_time,
            compile_s=self._compiled_by_end - self._compiled_at_start,
            first_token_compile_s=self._compiled_by_first - self._compiled_at_start,
            num_prompt_tokens=len(self.prompt.token_ids),
            num_cached_tokens=hit.num_tokens,
            num_loaded_tokens=loaded[0],
            loaded_from=loaded[1],
            num_generation_tokens=self.num_tokens,
            num_first_tokens=self.num_first_tokens,
            num_preemptions=sum(r.course.num_preemptions for r in requests),
            num_verifications=drafts.verifications,
            num_draft_tokens=drafts.draft_tokens,
            num_accepted_tokens=drafts.accepted_tokens,
            accepted_by_position=drafts.accepted_by_position,
            peak_memory_bytes=self.peak_memory_bytes,
        )
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt.text,
            prompt_token_ids=self.prompt.token_ids,
            outputs=tuple(c.output() for c in self.completions),
            finished=self.finished,
            metrics=metrics,
            num_cached_tokens=metrics.num_cached_tokens,
            prompt_logprobs=self._prompt_logprobs(),
        )
