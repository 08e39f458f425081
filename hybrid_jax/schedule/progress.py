"""What the scheduler tells its caller: results per request, counters, and "not before the next results"."""

from __future__ import annotations

from dataclasses import dataclass, field

from hybrid_jax.schedule.request import Request


class NeedResults:
    """What `Scheduler.plan` returns when a plan in flight must be received first; it is false."""

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return "NEED_RESULTS"


NEED_RESULTS = NeedResults()


@dataclass(kw_only=True)
class Progress:
    """What one plan brought one request.

    Attributes:
        request: with `output`, and when finished `finish_reason`, already up to date.
        tokens: its new token ids, the stop token included.
        logprobs: one `TokenLogprobs` per new token when asked for, else empty.
        finished: no more will come.
    """

    request: Request
    tokens: list[int] = field(default_factory=list)
    logprobs: list = field(default_factory=list)
    finished: bool = False


@dataclass(kw_only=True)
class SchedulerCounters:
    """What the scheduler has done.

    Attributes:
        plans: plans made.
        prefill_rows, prefill_tokens: chunks and their tokens.
        decode_rows, decode_steps: decode rows and the steps planned for them.
        folds_in_place, folds_to_new: folds planned over the row's own slot, and into another.
        forks: rows that began behind a sibling's prompt.
        copies: pages copied because a row resumed or forked inside them.
        moves: ring rows moved to close holes.
        preemptions: sequences sent back to the queue for want of memory.
        waits: times a request was held back for a checkpoint that another was computing.
        restarts: times memory was lost and every live request started over.
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
