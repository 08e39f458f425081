"""What a caller and an engine in another process tell each other. All of it can be pickled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from hybrid_jax.api.completions import Job, Update
from hybrid_jax.api.threads.questions import EngineFacts
from hybrid_jax.cluster.router import ReplicaCosts
from hybrid_jax.cluster.watch import News as CacheNews
from hybrid_jax.config.sampling_params import SamplingParams
from hybrid_jax.schedule.request import Pooling, Progress, Request
from hybrid_jax.text.prompts import Prompt
from hybrid_jax.text.thoughts import Thoughts


class Start(NamedTuple):
    """The first message to a worker: which `LLM` it should make.

    Attributes:
        model: of `LLM`. options: its options that are the engine's. own: dtype and tokenizer.
        sharing, side: as in `Link`.
    """

    model: str | None
    options: Mapping[str, Any]
    own: Mapping[str, Any]
    sharing: int = 1
    side: Literal["prefill", "decode", ""] = ""


class Ready(NamedTuple):
    """The first message of a worker.

    Attributes:
        facts: of its engine. costs: for a router.
        digest: tells its weights from others. weight_bytes, stored_dtype: as in `Started`.
        compile_seconds: of compiling so far.
    """

    facts: EngineFacts
    costs: ReplicaCosts
    digest: str
    weight_bytes: int
    stored_dtype: str
    compile_seconds: float


class NotStarted(NamedTuple):
    """In place of `Ready`: no `LLM` could be made."""

    error: BaseException


class Order(NamedTuple):
    """A prompt to compute: the arguments of `Job`, and how far it is.

    Attributes:
        request_id: that its caller sees. place: its `index`.
        token_ids: int32[n] of the prompt.
        done: for each completion what has come of it; None if it has ended already.
    """

    request_id: str
    place: int
    token_ids: np.ndarray
    cache_breakpoints: tuple[int, ...]
    thoughts: Thoughts | None
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int]
    max_tokens: int
    logprobs_from: int
    pooling: Pooling | None
    reads_only: bool
    done: tuple[Progress | None, ...]

    @classmethod
    def of(cls, job: Job) -> Order:
        """What is left of a job."""
        request = job.completions[0].request
        return cls(
            request_id=job.request_id,
            place=job.index,
            token_ids=np.asarray(job.prompt.token_ids, np.int32),
            cache_breakpoints=job.prompt.cache_breakpoints,
            thoughts=job.prompt.thoughts,
            params=job.params,
            seed=request.seed,
            stop_ids=request.stop_ids,
            max_tokens=request.max_tokens,
            logprobs_from=request.logprobs_from,
            pooling=request.pooling,
            reads_only=request.reads_only,
            done=tuple(
                None if c.finish_reason is not None else c.request.progress()
                for c in job.completions
            ),
        )

    @property
    def prompt(self) -> Prompt:
        """Without its text, which only the caller's outputs have."""
        ids = tuple(self.token_ids.tolist())
        return Prompt(None, ids, self.cache_breakpoints, self.thoughts)


class Begin(NamedTuple):
    """Computes a call.

    Attributes:
        number: of the call.
        orders: its prompts.
        streams: its caller wants to know of tokens as they come.
        keeps_errors: as in `Call`.
        whole: the same number for all parts of a call. begun: as in `Whole`.
    """

    number: int
    orders: Sequence[Order]
    streams: bool
    keeps_errors: bool
    whole: int
    begun: bool


class Leave(NamedTuple):
    """Ends a call. One that is over already is ignored."""

    number: int


class Do(NamedTuple):
    """Has the loop of the engine make a call, between two turns, as `CallLoop.later` describes."""

    number: int
    call: Callable[[Any], Any]


class Ask(NamedTuple):
    """Asks a question that may be answered while the engine computes."""

    number: int
    question: str
    args: Sequence[Any]


class Promise(NamedTuple):
    """A prefix will come from a worker that computes it, or go to one that waits for it: `HandOver.promise`."""

    tokens: np.ndarray
    position: int


class TakeBack(NamedTuple):
    """A promise is needed no longer: `HandOver.take_back`."""

    name: str


class PartCame(NamedTuple):
    """A part of a promised prefix. It goes both ways.

    Attributes:
        name: of the part.
        found: as its file would be, or what leads to that (`Link.enclose`).
    """

    name: str
    found: Any


class PromiseEnded(NamedTuple):
    """A promise was kept ("there") or broken ("failed"). It goes both ways."""

    name: str
    state: str


class Compute(NamedTuple):
    """Computes a prompt that was promised to another worker."""

    request: Request
    promise: str


class Drop(NamedTuple):
    """Nobody waits for such a prompt any more."""

    request_id: str


class Computed(NamedTuple):
    """Such a prompt has ended; what was to come of it has been said, or will not come."""

    request_id: str


class Stop(NamedTuple):
    """Ends the worker, after the turn."""


class Answered(NamedTuple):
    """What came of a `Do` or an `Ask`."""

    number: int
    answer: Any
    error: BaseException | None = None


class Told(NamedTuple):
    """What is new about a call.

    Attributes:
        number: of the call.
        updates: (prompt of the call, completion, what is new).
        failed: (prompt of the call, error) for prompts that ended with one, in a call that keeps errors.
        peak_memory_bytes: the most in use so far, as far as it is known.
        streams: its caller wants to know of tokens as they come.
        error, engine_failed: why the call ended before its prompts were done, as in `Call`; None while it has not.
    """

    number: int
    updates: Sequence[tuple[int, int, Update]] = ()
    failed: Sequence[tuple[int, BaseException]] = ()
    peak_memory_bytes: int | None = None
    streams: bool = False
    error: BaseException | None = None
    engine_failed: bool = False


class Cached(NamedTuple):
    """What is new about the cache of a worker."""

    news: CacheNews


class Compiled(NamedTuple):
    """Seconds of compiling so far."""

    seconds: float


class Alive(NamedTuple):
    """A worker that has nothing else to tell is there. It may come before any other message."""


class Ended(NamedTuple):
    """The engine has ended, and with it the worker."""

    error: BaseException
