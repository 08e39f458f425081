"""What the scheduler asks of the runner and tells its caller: plain data, no device arrays."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from hybrid_jax.schedule.request import Request

Page = tuple[int, ...]  # frame ids, one per layer group


def as_page(frames: np.ndarray) -> Page:
    """One row of a sequence's pages."""
    return tuple(frames.tolist())


@dataclass(kw_only=True)
class PrefillRow:
    """One prompt chunk of one row.

    Attributes:
        request: the request of this chunk; its sampling parameters are used if `samples` is set.
        row: ring row.
        tokens: token ids of the chunk.
        start: absolute position of the first one, a multiple of grain.
        read_slot: slot of the checkpoint at `start`; 0 if start is 0.
        write_slot: slot for the checkpoint at start + state_len; 0 if state_len is 0. It may equal read_slot if the row
            is the only holder of that slot.
        state_len: how many tokens of the chunk the new checkpoint covers, a multiple of grain.
        pages: int32[n, frames_per_page] frame ids of the row's pages, at least from position 0 to the chunk's end.
        copies: (source, target) pages copied before anything is written.
        samples: the chunk ends the prompt, so the next token is sampled.
    """

    request: Request
    row: int
    tokens: list[int]
    start: int
    read_slot: int
    write_slot: int
    state_len: int
    pages: np.ndarray
    copies: list[tuple[Page, Page]] = field(default_factory=list)
    samples: bool = False


@dataclass(kw_only=True)
class ForkRow:
    """A row that goes on behind a prompt that another row computes in the same plan.

    It gets a copy of that row's ring, and draws its first token from that row's logits.

    Attributes:
        request: the request of this row.
        row: ring row.
        source: the ring row whose prompt ends in this plan.
        line: index of that row's chunk among the plan's prefill rows.
        position: tokens of the prompt.
        copies: (source, target) of the page in which the prompt ends, if it ends inside one.
    """

    request: Request
    row: int
    source: int
    line: int
    position: int
    copies: list[tuple[Page, Page]] = field(default_factory=list)


@dataclass(kw_only=True)
class DecodeRow:
    """Up to `num_steps` new tokens of one row. They start at the committed length, which the device knows.

    Attributes:
        request: the request of this row.
        row: ring row.
        position: the most tokens that the row may have when the plan starts. It has fewer if a plan in flight brings
            fewer than it may.
        checkpoint_position: where the row's checkpoint stood after the plans received.
        read_slot: slot of that checkpoint; 0 if checkpoint_position is 0.
        fold_slot: slot of every later checkpoint of the row, into which its ring folds when it is full. 0 if that
            cannot happen. It equals read_slot if the row is the only holder of that slot.
        num_steps: the most tokens that may come; the device stops the row earlier at a stop token.
        pages: int32[n, frames_per_page] frame ids of the row's pages, enough for all these tokens.
    """

    request: Request
    row: int
    position: int
    checkpoint_position: int
    read_slot: int
    fold_slot: int
    num_steps: int
    pages: np.ndarray


@dataclass(kw_only=True)
class Plan:
    """One turn of the engine: prefill, fork and decode dispatches in this order. Each may be empty.

    Attributes:
        new_slots: (slot, frames int32[state_frames]) pairs to write to the device table first.
        moves: (source, target) ring rows to move before any dispatch.
        prefill, forks, decode: rows of the dispatches. A row may decode in the same plan in which its prompt ends or in
            which it forks.
        num_steps: steps of the decode dispatch's loop, at least as many as any row has.
    """

    new_slots: list[tuple[int, np.ndarray]] = field(default_factory=list)
    moves: list[tuple[int, int]] = field(default_factory=list)
    prefill: list[PrefillRow] = field(default_factory=list)
    forks: list[ForkRow] = field(default_factory=list)
    decode: list[DecodeRow] = field(default_factory=list)
    num_steps: int = 0


@dataclass(kw_only=True)
class Tokens:
    """What one plan produced.

    Attributes:
        prefill: the sampled token of each prefill row (meaningless if `samples` is false).
        forks: the first token of each fork row.
        decode: the tokens of each decode row: 1 to num_steps of them, and nothing after a stop token; no tokens for a
            row that had stopped before.
        prefill_logprobs, fork_logprobs, decode_logprobs: the matching `TokenLogprobs`, or empty lists.
        prompt_logprobs: for rows that asked for them, by index among the prefill rows: entries for the prompt tokens
            after the chunk's first one, and for the token behind the chunk.
    """

    prefill: list[int]
    decode: list[list[int]]
    forks: list[int] = field(default_factory=list)
    prefill_logprobs: list = field(default_factory=list)
    fork_logprobs: list = field(default_factory=list)
    decode_logprobs: list = field(default_factory=list)
    prompt_logprobs: dict[int, list] = field(default_factory=dict)

    @classmethod
    def blank(cls, plan: Plan) -> Tokens:
        """Tokens with an empty place for each row of a plan."""
        return cls(
            prefill=[-1] * len(plan.prefill),
            decode=[[] for _ in plan.decode],
            forks=[-1] * len(plan.forks),
            prefill_logprobs=[None] * len(plan.prefill),
            fork_logprobs=[None] * len(plan.forks),
            decode_logprobs=[[] for _ in plan.decode],
        )


# --- told to the caller ---------------------------------------------------------------------------


class NeedResults:
    """What `Scheduler.plan` returns when a plan in flight must be received first; it is false."""

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return "NEED_RESULTS"


NEED_RESULTS = NeedResults()


@dataclass(kw_only=True)
class Progress:
    """What one plan brought to one request.

    Attributes:
        request: the request; its `output`, and its `finish_reason` if it is finished, are already up to date.
        new_token_ids: its new tokens, the stop token included.
        new_logprobs: one `TokenLogprobs` per new token if asked for, else empty.
        finished: no more tokens will come.
    """

    request: Request
    new_token_ids: list[int] = field(default_factory=list)
    new_logprobs: list = field(default_factory=list)
    finished: bool = False


@dataclass(kw_only=True)
class SchedulerCounters:
    """What the scheduler has done.

    Attributes:
        plans: plans made.
        prefill_rows, prefill_tokens: chunks and their tokens.
        decode_rows, decode_steps: decode rows and the steps planned for them.
        folds_in_place, folds_to_new: folds planned over the row's own slot, and into another slot.
        forks: rows that started behind a sibling's prompt.
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
    folds_in_place: int = 0
    folds_to_new: int = 0
    forks: int = 0
    copies: int = 0
    moves: int = 0
    preemptions: int = 0
    waits: int = 0
    restarts: int = 0
