"""Prompts given to an LLM a few at a time, while earlier ones run: for more of them than fit in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from hybrid_jax.completions import Call, Job
from hybrid_jax.outputs import RequestOutput
from hybrid_jax.prompts import PromptLike
from hybrid_jax.running_calls import RunningCalls
from hybrid_jax.sampling_params import SamplingParams

Accept = Callable[
    [PromptLike | Iterable[PromptLike], SamplingParams | Sequence[SamplingParams] | None, Call],
    list[Job],
]


class Ticket:
    """Prompts that were added together; made by `Feed.add`."""

    def __init__(self, jobs: list[Job], call: Call) -> None:
        self.jobs, self._call = jobs, call

    @property
    def finished(self) -> bool:
        return not self._call.unfinished

    @property
    def num_unfinished(self) -> int:
        """Completions that still grow."""
        return sum(c.finish_reason is None for job in self.jobs for c in job.completions)

    @property
    def num_tokens(self) -> int:
        """Tokens generated so far."""
        return sum(len(c.token_ids) for job in self.jobs for c in job.completions)

    def outputs(self) -> list[RequestOutput]:
        """What `generate` would have returned."""
        return [job.output() for job in self.jobs]


class Feed:
    """Adds prompts to a running engine; made by `LLM.feed`, and closed by leaving its `with` block.

    How many may be under way is the caller's business: each one added is held until it is finished.

    Args:
        calls: the LLM's.
        accept: turns prompts and parameters into jobs of a call, or raises.
    """

    def __init__(self, calls: RunningCalls, accept: Accept) -> None:
        self._calls, self._accept = calls, accept
        self._tickets: list[Ticket] = []

    def add(
        self,
        prompts: PromptLike | Iterable[PromptLike],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Ticket:
        """Starts prompts, as `LLM.generate` would.

        Raises:
            ValueError: something is wrong with them; none of them runs then, and the others go on.
        """
        call = Call()
        ticket = Ticket(self._accept(prompts, sampling_params, call), call)
        self._tickets.append(ticket)
        try:
            self._calls.start(ticket.jobs)
        except Exception:
            self._end(ticket)
            raise
        return ticket

    def step(self) -> list[Ticket]:
        """One turn of the engine; returns the tickets that are finished, in the order they were added."""
        if self.num_unfinished:
            self._calls.step()
        finished = [ticket for ticket in self._tickets if ticket.finished]
        for ticket in finished:
            self._end(ticket)
        return finished

    @property
    def num_unfinished(self) -> int:
        """Completions under way."""
        return sum(ticket.num_unfinished for ticket in self._tickets)

    @property
    def num_tokens(self) -> int:
        """Tokens generated so far by the tickets that `step` has not returned yet."""
        return sum(ticket.num_tokens for ticket in self._tickets)

    def _end(self, ticket: Ticket) -> None:
        self._calls.end(ticket.jobs)
        self._tickets.remove(ticket)

    def close(self) -> None:
        """Ends what still runs."""
        for ticket in list(self._tickets):
            self._end(ticket)

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
