"""What the scheduler asks of the runner and tells its caller: plain data, no device arrays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from hybrid_jax.schedule.request import Request, TokenLogprobs
from hybrid_jax.schedule.sequence import NO_PAGES, Page, Sequence


@dataclass(kw_only=True, eq=False)
class Row:
    """What a plan does for one sequence, and what came of it once the results are read.

    Attributes:
        sequence: the sequence.
        row: ring row.
        samples: whether the row draws tokens.
        pages: int32[n, frames_per_page] frame ids of the row's pages, at least from position 0 to the last that it
            writes.
        copies: (source, target) pages copied before anything is written.
        num_tokens: how many tokens it feeds at most that it has drawn itself; 0 for a chunk of a prompt and for a fork.
        new_tokens: the tokens that it drew, up to a stop token.
        new_logprobs: one `TokenLogprobs` for each of them if asked for, else empty.
        not_finite: the model's numbers for it were NaN or infinite, so there is no token, or what is reported of it
            means nothing.
    """

    sequence: Sequence = field(repr=False)
    row: int
    pages: np.ndarray = field(default_factory=lambda: NO_PAGES)
    copies: list[tuple[Page, Page]] = field(default_factory=list)
    new_tokens: list[int] = field(default_factory=list, init=False)
    new_logprobs: list[TokenLogprobs] = field(default_factory=list, init=False)
    not_finite: bool = field(default=False, init=False)
    samples = True
    num_tokens = 0

    @property
    def request(self) -> Request:
        """The request of the sequence."""
        return self.sequence.request

    @property
    def begins(self) -> bool:
        """Whether it draws the first token after a prompt."""
        return self.samples and not self.num_tokens

    @property
    def most_tokens(self) -> int:
        """How many tokens it may bring at most."""
        return self.num_tokens or int(self.samples)


@dataclass(kw_only=True, eq=False)
class PrefillRow(Row):
    """One prompt chunk of one row.

    Attributes:
        tokens: token ids of the chunk.
        start: absolute position of the first one, a multiple of grain.
        read_slot: slot of the checkpoint at `start`; 0 if start is 0.
        write_slot: slot for the checkpoint at start + state_len; 0 if state_len is 0. It may equal read_slot if the row
            is the only holder of that slot.
        state_len: how many tokens of the chunk the new checkpoint covers, a multiple of grain.
        samples: the chunk ends the prompt, so the next token is sampled.
        prompt_logprobs: for a request that asks for them, entries for the prompt tokens after the chunk's first one,
            and for the token after the chunk.
        hidden: of the hidden states that the request's pooling asks for, their sum float32[D], or all of them
            float32[length, D] with pooling "none"; None for other requests.
    """

    tokens: list[int]
    start: int
    read_slot: int
    write_slot: int
    state_len: int
    samples: bool = False
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list, init=False)
    hidden: np.ndarray | None = field(default=None, init=False)

    @property
    def length(self) -> int:
        """Tokens of the chunk."""
        return len(self.tokens)

    @property
    def reads(self) -> bool:
        """Whether hidden states of its tokens are needed, beside that of a prompt's last token."""
        return self.request.reads_before(self.start + self.length)

    @property
    def pooled(self) -> range:
        """The tokens of the chunk whose hidden states the request wants."""
        match self.request.pooling:
            case "mean" | "none":
                return range(self.length)
            case "last" if self.samples:
                return range(self.length - 1, self.length)
        return range(0)


@dataclass(kw_only=True, eq=False)
class ForkRow(Row):
    """A row that goes on after a prompt that another row computes in the same plan.

    It gets a copy of that row's ring, and draws its first token from that row's logits.

    Attributes:
        source: the ring row whose prompt ends in this plan.
        line: index of that row's chunk among the plan's prefill rows.
        position: tokens of the prompt.
    """

    source: int
    line: int
    position: int


@dataclass(kw_only=True, eq=False)
class DecodeRow(Row):
    """Up to `num_tokens` new tokens of one row. They start at the committed length, which the device knows.

    Attributes:
        position: upper bound of the row's length when the plan starts. The true length is known once earlier plans are
            received.
        checkpoint: where the row's checkpoint stood after the plans received.
        read_slot: slot of that checkpoint; 0 if checkpoint is 0.
        fold_slot: slot of every later checkpoint of the row, into which its ring folds when it is full. 0 if that
            cannot happen. It equals read_slot if the row is the only holder of that slot.
        num_tokens: the most tokens that may come; the device stops the row earlier at a stop token.
        num_steps: the most steps that they may take: as many, or fewer where a step judges drafts.
        drafts: tokens that the host expects after the row's own.
        verified: for each window of drafts that was judged, how many drafts it had and how many were right.
    """

    position: int
    checkpoint: int
    read_slot: int
    fold_slot: int
    num_tokens: int
    num_steps: int
    drafts: list[int] = field(default_factory=list)
    verified: list[tuple[int, int]] = field(default_factory=list, init=False)


@dataclass(frozen=True, kw_only=True, eq=False)
class Transfer:
    """Frames that a plan copies between the arena and another tier.

    Attributes:
        tier: number of the other tier.
        arena, other: int32[n] frame ids here and there, in the same order.
    """

    tier: int
    arena: np.ndarray
    other: np.ndarray


@dataclass(frozen=True, kw_only=True, eq=False)
class Outgoing:
    """Frames that a plan copies out of the arena for somebody who keeps the copies.

    Attributes:
        arena: int32[n] frame ids.
        give: is given the copies, n arrays uint32[frame_words], which may still be being computed.
    """

    arena: np.ndarray
    give: Callable[[list[Any]], None]


@dataclass(frozen=True, kw_only=True, eq=False)
class Incoming:
    """Frames that a plan writes into the arena.

    Attributes:
        arena: int32[n] frame ids. words: what goes there, n arrays uint32[frame_words].
    """

    arena: np.ndarray
    words: list[np.ndarray]


@dataclass(frozen=True, kw_only=True, eq=False)
class Recast:
    """A checkpoint that a plan reads in one form and writes in another.

    Attributes:
        source, target: int32[n] and int32[m] frame ids of the arena. A frame may be in both.
    """

    source: np.ndarray
    target: np.ndarray


@dataclass(kw_only=True)
class Plan:
    """One turn of the engine: prefill, fork and decode dispatches in this order. Each may be empty.

    Attributes:
        narrowed: checkpoints that the cache takes as int8, in this order, before all else. What they are read from may
            belong to the plan's own rows already.
        saves, to_disk: what is copied out of the arena before anything is written. It may have been evicted while the
            plan was made, so the plan's own rows may have its frames.
        loads, from_disk: what is copied into the arena next. No tier evicts any of it until the plan is made, so no
            save of the same plan reads it, or is written over what it is copied from.
        widened: checkpoints of the cache that rows go on from. They come after the loads, which may have brought them.
        new_slots: (slot, frames int32[state_frames]) pairs to write to the device table before any row runs.
        moves: (source, target) ring rows to move before any dispatch.
        prefill, forks, decode: rows of the dispatches. A row may decode in the same plan in which its prompt ends or in
            which it forks.
        window: tokens of a row in one decode step: 1, or 1 + the drafts that a step judges.
    """

    narrowed: list[Recast] = field(default_factory=list)
    saves: list[Transfer] = field(default_factory=list)
    loads: list[Transfer] = field(default_factory=list)
    to_disk: list[Outgoing] = field(default_factory=list)
    from_disk: list[Incoming] = field(default_factory=list)
    widened: list[Recast] = field(default_factory=list)
    new_slots: list[tuple[int, np.ndarray]] = field(default_factory=list)
    moves: list[tuple[int, int]] = field(default_factory=list)
    prefill: list[PrefillRow] = field(default_factory=list)
    forks: list[ForkRow] = field(default_factory=list)
    decode: list[DecodeRow] = field(default_factory=list)
    window: int = 1

    @property
    def num_steps(self) -> int:
        """Steps of the decode dispatch's loop at most."""
        return max((row.num_steps for row in self.decode), default=0)

    @property
    def rows(self) -> list[Row]:
        """All rows, in the order in which their results count."""
        return [*self.prefill, *self.forks, *self.decode]

    @property
    def sequences(self) -> list[Sequence]:
        """Every sequence that the plan names, once."""
        return list(dict.fromkeys(row.sequence for row in self.rows))


# --- told to the caller ---------------------------------------------------------------------------


class NeedResults:
    """What `Scheduler.plan` returns when a plan in flight must be received first; it is false."""

    def __bool__(self) -> Literal[False]:
        return False

    def __repr__(self) -> str:
        return "NEED_RESULTS"


NEED_RESULTS = NeedResults()


@dataclass(kw_only=True)
class SchedulerCounters:
    """What the scheduler has done.

    Attributes:
        plans: plans made.
        prefill_rows, prefill_tokens: chunks and their tokens.
        decode_rows, decode_steps: decode rows and the steps planned for them.
        forks: rows that started after a sibling's prompt.
        copies: pages copied because a row resumed or forked inside them.
        moves: ring rows moved to close holes.
        preemptions: sequences sent back to the queue because memory ran out.
        waits: how often a request was held back for a checkpoint that another one was computing.
        restarts: how often device memory was lost and every live request started over.
    """

    plans: int = 0
    prefill_rows: int = 0
    prefill_tokens: int = 0
    decode_rows: int = 0
    decode_steps: int = 0
    forks: int = 0
    copies: int = 0
    moves: int = 0
    preemptions: int = 0
    waits: int = 0
    restarts: int = 0
