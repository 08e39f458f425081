"""One completion to compute, as the engine sees it: token ids in, token ids out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, Protocol

import numpy as np

from hybrid_jax.cache.tree.node import LookUp
from hybrid_jax.config.sampling_params import SamplingParams
from hybrid_jax.schedule.drafts import DraftCounts

Pooling = Literal["last", "mean", "none"]


class Constraint(Protocol):
    """Which tokens may come next: a grammar, or words that must not be completed.

    A request with a constraint takes one step at a time, and waits for its result.
    """

    def mask(self, output: Sequence[int]) -> np.ndarray:
        """uint32[ceil(V / 32)]: bit t % 32 of word t // 32 allows token t after `output`.

        If all bits are zero, the output is complete and the request ends.
        """


@dataclass(eq=False, slots=True)
class Output:
    """What has come of a request so far; it survives preemption.

    Attributes:
        token_ids: tokens generated.
        logprobs: one entry for each of these, if asked for.
        prompt_logprobs: one entry per prompt token, if asked for; None for the first token, and for those before
            `logprobs_from`.
        pooled: what `pooling` asks for of the prompt so far: the sum of its hidden states float32[D], or with "none"
            all of them float32[T, D]; None before.
        finish_reason: None while it runs, then "stop", "length", "abort", or "error" if the model's numbers for it were
            not finite.
        stop_reason: the stop token id that ended it, if that is not one of the model's own.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list = field(default_factory=list)
    pooled: np.ndarray | None = field(default=None, repr=False)
    finish_reason: str | None = None
    stop_reason: int | None = None

    def go_back(self, num_tokens: int) -> None:
        """Forgets the tokens after the first `num_tokens`, and that they ended it."""
        del self.token_ids[num_tokens:], self.logprobs[num_tokens:]
        self.finish_reason = self.stop_reason = None


@dataclass(eq=False, slots=True)
class Hit:
    """What the prefix cache had of a prompt when it was admitted for the first time; admission writes it.

    Attributes:
        num_tokens: prompt tokens that the first prefill skipped.
        look_up: what the prefix cache knew of the prompt, and why it hit no further; None without a prefix cache.
    """

    num_tokens: int = 0
    look_up: LookUp | None = None


@dataclass(eq=False, slots=True)
class Course:
    """How a request has fared in the scheduler, which writes it.

    Attributes:
        num_preemptions: how often it went back to the queue.
        drafts: counts of the drafts that were judged.
        without_drafts: numbers were not finite in a window of drafts, which may be the fault of a draft.
    """

    num_preemptions: int = 0
    drafts: DraftCounts = field(default_factory=DraftCounts)
    without_drafts: bool = False


@dataclass(eq=False, slots=True)
class EngineNotes:
    """What the engine notes of a request. Nobody else reads it.

    Attributes:
        generation: its steps run on programs of this generation or older ones (`Serving.begin`).
        num_reported: how many tokens of its output the engine's caller has been told of.
        sampling: int32[n] its sampling parameters as steps read them; None until a step has packed them.
    """

    generation: int = 0
    num_reported: int = 0
    sampling: np.ndarray | None = field(default=None, repr=False)


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Request:
    """A prompt and what to do with it; neither changes. What comes of it lies in four values with writers of their own.

    Attributes:
        request_id: unique among the engine's live requests.
        prompt: token ids.
        params: sampling parameters; n is 1 here, because the caller splits completions.
        seed: seed of the sampling noise, resolved.
        sample_index: which of the prompt's completions this is.
        sibling_group: a name that all completions of one prompt share. One of them computes the prompt, and the others
            fork from it. None for a completion without siblings.
        stop_ids: token ids that end it, the model's own included unless ignore_eos.
        max_tokens: resolved limit on the output.
        forbidden_ids: token ids that are never drawn.
        constraint: what may come next, given the tokens so far; None if anything may.
        cache_breakpoints: numbers of leading tokens that others will share, as the caller says.
        logprobs_from: of a request that asks for log-probabilities of its prompt, the first prompt token whose
            log-probability is needed. What lies before it may come from the prefix cache.
        pooling: it wants hidden states of its prompt after the last norm: that of the "last" token, the "mean", or
            all of them, with "none".
        reads_only: only numbers of its prompt are wanted. One token is drawn all the same, and needs no room.
        output: what has come of it, as the scheduler receives it.
        hit: what the prefix cache had of its prompt.
        course: how it has fared in the scheduler.
        notes: the engine's.
    """

    request_id: str
    prompt: list[int]
    params: SamplingParams
    seed: int
    sample_index: int = 0
    sibling_group: str | None = None
    stop_ids: frozenset[int] = frozenset()
    max_tokens: int = 1
    forbidden_ids: frozenset[int] = frozenset()
    constraint: Constraint | None = None
    cache_breakpoints: tuple[int, ...] = ()
    logprobs_from: int = 1
    pooling: Pooling | None = None
    reads_only: bool = False
    output: Output = field(init=False, default_factory=Output)
    hit: Hit = field(init=False, default_factory=Hit)
    course: Course = field(init=False, default_factory=Course)
    notes: EngineNotes = field(init=False, default_factory=EngineNotes)

    def __post_init__(self) -> None:
        self.output.prompt_logprobs += [None] * self.logprobs_from

    @property
    def is_new(self) -> bool:
        """Whether it was never sent back and has no tokens. What it finds of its own tokens later is no hit."""
        return not (self.course.num_preemptions or self.output.token_ids)

    @property
    def one_by_one(self) -> bool:
        """Whether each of its tokens must be known before the next one is planned, so that nothing is drafted."""
        return self.constraint is not None or self.course.without_drafts

    @property
    def adjusts_logits(self) -> bool:
        """Whether its logits are changed before sampling, other than by temperature and filters."""
        own = bool(self.forbidden_ids) or self.constraint is not None
        return own or self.params.adjusts_logits

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Whether it still needs log-probabilities of its prompt."""
        wanted = self.params.prompt_logprobs is not None
        return wanted and len(self.output.prompt_logprobs) < len(self.prompt)

    @property
    def first_read(self) -> int | None:
        """The first position of the prompt whose hidden state it still needs; None if only the last one counts.

        No hit may reach further.
        """
        if self.pooling in ("mean", "none") and not self.output.token_ids:
            return 0
        return self.logprobs_from - 1 if self.lacks_prompt_logprobs else None

    def reads_before(self, end: int) -> bool:
        """Whether it needs hidden states of the prompt before position `end`, beside that of the last one."""
        return self.first_read is not None and self.first_read < end

    def note_prompt(self, start: int, logprobs: list, hidden: np.ndarray | None) -> None:
        """Takes what a chunk of its prompt brought.

        Args:
            start: position of the chunk.
            logprobs: a `TokenLogprobs` for each token after `start`, up to the one that follows the chunk, or none.
            hidden: as `PrefillRow.hidden`.
        """
        output = self.output
        if logprobs:
            known = max(self.logprobs_from, start + 1)
            output.prompt_logprobs[known:] = logprobs[known - start - 1 :]
        if hidden is not None:
            before = None if self.pooling == "last" or start == 0 else output.pooled
            if before is None:
                output.pooled = hidden
            elif self.pooling == "none":
                output.pooled = np.concatenate([before[:start], hidden])
            else:
                output.pooled = before + hidden

    def progress(self, first: int = 0, end: int | None = None, *, whole: bool = True) -> Progress:
        """What has come of it, from output token `first` on, up to `end`. Without `whole`, nothing of its prompt."""
        output, drafts = self.output, self.course.drafts
        return Progress(
            token_ids=output.token_ids[first:end],
            logprobs=output.logprobs[first:end],
            preemptions=self.course.num_preemptions,
            without_drafts=self.course.without_drafts,
            windows=dict(drafts.windows),
            draft_depth=drafts.depth,
            of_prompt=OfPrompt(
                hit_tokens=self.hit.num_tokens,
                look_up=self.hit.look_up,
                logprobs=list(output.prompt_logprobs),
                pooled=output.pooled,
            )
            if whole
            else None,
        )

    def go_on(self, progress: Progress) -> None:
        """Takes what has come of it in an engine elsewhere."""
        self.output.token_ids.extend(progress.token_ids)
        self.output.logprobs.extend(progress.logprobs)
        course = self.course
        course.num_preemptions = progress.preemptions
        course.without_drafts = progress.without_drafts
        if progress.windows:
            course.drafts.windows = Counter(progress.windows)
        course.drafts.depth = progress.draft_depth
        if (prompt := progress.of_prompt) is not None:
            self.hit.num_tokens, self.hit.look_up = prompt.hit_tokens, prompt.look_up
            self.output.prompt_logprobs[:] = prompt.logprobs
            self.output.pooled = prompt.pooled

    def again(self, num_tokens: int) -> Request:
        """The same request with the first tokens of its output, for an engine that knows nothing of it.

        The engine that has it now may still write to this one.
        """
        new = replace(self)
        new.go_on(self.progress(end=num_tokens))
        return new

    @property
    def tokens(self) -> list[int]:
        """Prompt and output together."""
        return self.prompt + self.output.token_ids


class OfPrompt(NamedTuple):
    """What a request's prompt brought: the fields of `Hit` and `Output`."""

    hit_tokens: int
    look_up: LookUp | None
    logprobs: list[TokenLogprobs | None]
    pooled: np.ndarray | None


class Progress(NamedTuple):
    """What has come of a request, for an engine elsewhere that goes on from there.

    Attributes:
        token_ids, logprobs: of its output.
        preemptions, without_drafts, windows, draft_depth: as in `Course` and `DraftCounts`.
        of_prompt: what its prompt brought; None if that was told before.
    """

    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    preemptions: int
    without_drafts: bool
    windows: dict[tuple[int, int], int]
    draft_depth: int
    of_prompt: OfPrompt | None


@dataclass(frozen=True, kw_only=True)
class TokenLogprobs:
    """Log-probabilities at one position, from the unscaled logits.

    Attributes:
        token_id, logprob, rank: the chosen token, its log-probability, and its rank from 1.
        top: (token id, log-probability) of the most likely tokens, best first.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(kw_only=True)
class NewTokens:
    """What one plan brought to one request.

    Attributes:
        request: the request; its `output` is already up to date.
        new_token_ids: its new tokens, the stop token included.
        new_logprobs: one `TokenLogprobs` per new token if asked for, else empty.
        finished: no more tokens will come.
    """

    request: Request
    new_token_ids: list[int] = field(default_factory=list)
    new_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finished: bool = False
