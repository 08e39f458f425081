"""What a thread runs that has calls computed by one engine, wherever that engine is."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hybrid_jax.api.completions import Completion, Job, Update
from hybrid_jax.api.outputs import Delta
from hybrid_jax.api.threads.calls import Call
from hybrid_jax.api.threads.commands import CommandLoop
from hybrid_jax.api.threads.questions import Answer, EngineFacts, Question
from hybrid_jax.schedule.request import Request

if TYPE_CHECKING:
    from hybrid_jax.api.threads.loop import Loop


class CallLoop(CommandLoop):
    """Has calls computed by one engine. Only `give`, `later`, `now` and the properties are for other threads.

    Args:
        record: called in the thread with each prompt that has ended, or was given up after its first token. It must not
            hold a reference to the `LLM`, which could then never be dropped.

    Attributes:
        where: the engine is, in words, if it is not in this process.
        on_end: called in the thread when it ends, with the reason, before its calls are told.
    """

    where = ""

    def __init__(self, record: Callable[[Job], None]) -> None:
        super().__init__()
        self._record = record
        self.on_end: Callable[[BaseException], None] = lambda error: None

    @property
    @abstractmethod
    def facts(self) -> EngineFacts:
        """What never changes about the engine."""

    @abstractmethod
    def compile_seconds(self) -> float:
        """Seconds of compiling so far; any thread may ask, also after the end."""

    @abstractmethod
    def peak_memory_bytes(self) -> int | None:
        """The most memory in use so far, as far as it is known."""

    @abstractmethod
    def run(self) -> None:
        """Runs until `stop` is called."""

    @abstractmethod
    def discard(self) -> None:
        """Ends an engine that no thread was started for."""

    @abstractmethod
    def start(self, calls: Sequence[Call]) -> None:
        """Begins calls, before the engine's next turn."""

    @abstractmethod
    def _withdraw(self, call: Call) -> bool:
        """Has the engine end what it computes for a call; returns whether it had the call."""

    def end_call(
        self, call: Call, error: BaseException | None = None, *, engine_failed: bool = False
    ) -> None:
        """Takes the prompts of a call out of the engine, unless it is over. With an error, the caller is told."""
        if call.over:
            return
        self._withdraw(call)
        for job in call.jobs:
            self._give_up(call, job)
        if error is None:
            call.over = True
        else:
            call.fail(error, engine_failed=engine_failed)

    def give_back(self, call: Call) -> None:
        """Gives a call back whose prompts have no tokens yet, by `Call.given_back`; tells `Call.kept` of any other."""
        if not call.is_untouched or not self._withdraw(call):
            call.kept()
            return
        call.over = True
        call.given_back()

    def _give_up(self, call: Call, job: Job) -> None:
        """Nobody waits for a prompt any more, which may have ended already."""
        if job.first_token_time is not None and job.num_unfinished and job.error is None:
            self._record(job)
        call.ended(job)

    def _take(
        self,
        call: Call,
        job: Job,
        completion: Completion,
        deltas: list[Delta],
        now: float,
        update: Update | None = None,
    ) -> None:
        """Hands on what is new about a completion; the last two arguments are those of `Job.take`."""
        is_first = job.first_token_time is None
        delta = job.take(completion, now, self, streamed=call.streams, update=update)
        call.took(job, completion)
        if is_first and job.first_token_time is not None:
            call.whole.begun = True
            call.began(job)
        if delta is not None:
            deltas.append(delta)

    def _finish(self, call: Call, job: Job) -> None:
        """A prompt has ended as it should."""
        call.num_finished += 1
        self._record(job)
        call.ended(job)

    @abstractmethod
    def compute_prefix(
        self, request: Request, promise: str, told: Callable[[BaseException | None], object]
    ) -> None:
        """Computes a prompt for another engine.

        Args:
            request: reads only.
            promise: the name of what was promised of it, which is settled when the prompt has ended.
            told: called once what was to come of it is on its way, or will not come; with an error if the engine does
                not take such a prompt, or has ended.
        """

    @abstractmethod
    def drop_prefix(self, request_id: str) -> None:
        """Nobody waits for such a prompt any more. Unknown ids are ignored."""

    def promise(self, tokens: np.ndarray, position: int) -> None:
        """As `HandOver.promise`, for an engine that does not share it."""

    def take_back(self, name: str) -> None:
        """As `HandOver.take_back`, for an engine that does not share it."""

    def bring_part(self, name: str, found: Any) -> None:
        """A part has come that was promised to such an engine: as its file would be, or what leads to that."""

    def end_promise(self, name: str, state: str) -> None:
        """A promise to such an engine was kept or broken."""

    @abstractmethod
    def later(
        self, call: Callable[[Loop], Answer], tell: Callable[[Any, BaseException | None], object]
    ) -> None:
        """Has the loop that owns the engine make a call between two turns, and tell what it returned or raised.

        Args:
            call: a function of a module or a method of `Loop`, or a `functools.partial` of one, because the engine may
                be in another process.
            tell: called with the answer, or with the error.
        """

    @abstractmethod
    def now(self, question: Question[Answer], args: Sequence[Any]) -> Answer:
        """The answer to a question that may be asked while the engine computes. Returns or raises what it does."""
