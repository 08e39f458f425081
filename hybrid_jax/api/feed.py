"""Prompts given to an LLM a few at a time, while earlier ones run: for more of them than fit in memory."""

from __future__ import annotations

from collections.abc import Sequence
from queue import SimpleQueue

from hybrid_jax.api.arguments import checks_arguments
from hybrid_jax.api.intake import Intake
from hybrid_jax.api.outputs import RequestOutput
from hybrid_jax.api.threads.calls import Call, News, own_error
from hybrid_jax.api.threads.front import Front
from hybrid_jax.api.threads.questions import expect_everything
from hybrid_jax.config.sampling_params import SamplingParams
from hybrid_jax.text.prompts import Prompts


class Ticket(Call):
    """Prompts that were added together; made by `Feed.add`."""

    @property
    def finished(self) -> bool:
        """Whether nothing more will come."""
        return self.over

    @property
    def num_unfinished(self) -> int:
        """Completions that still grow."""
        if self.over:
            return 0
        jobs = self.jobs
        if len(jobs) == 1 and len(jobs[0].completions) == 1:  # looked at often, of many tickets
            return 1
        return sum(job.num_unfinished for job in jobs)

    @property
    def num_tokens(self) -> int:
        """Tokens generated so far."""
        return sum(job.num_tokens for job in self.jobs)

    def outputs(self) -> list[RequestOutput]:
        """What `generate` would have returned or raised. Of an unfinished ticket, what there is so far."""
        if self.error is not None:
            raise own_error(self.error)
        return [job.output() for job in self.jobs]


class Feed:
    """Adds prompts to a running engine. Made by `LLM.feed`, and closed at the end of its `with` block.

    There is no limit on how many are under way, and each one is held in memory until it is finished.

    Args:
        thread, intake: of the LLM.
    """

    def __init__(self, thread: Front, intake: Intake) -> None:
        self._thread, self._intake = thread, intake
        self._tickets: list[Ticket] = []
        self._added: list[Ticket] = []  # since the last step
        self._arrived: SimpleQueue[News] = SimpleQueue()  # where engines go at their own pace
        self._closed = False
        self._expects_everything = False  # a prompt to come asks for more than tokens

    @checks_arguments
    def add(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Ticket:
        """Adds prompts, which the next `step` will start; the arguments are those of `LLM.generate`.

        Raises:
            ValueError: something is wrong with them. None of them will run, and earlier ones go on.
            RuntimeError: the LLM or this feed was closed.
        """
        self._check()
        jobs, stepped = self._intake.jobs(prompts, sampling_params), self._thread.is_stepped
        ticket = Ticket(jobs, stepped=stepped, send=None if stepped else self._arrived.put)
        self._tickets.append(ticket)
        self._added.append(ticket)
        return ticket

    def foresee(self, sampling_params: SamplingParams) -> None:
        """Says which parameters will be added later.

        If they request a form that is new, it is tried while other prompts run. Without this call, `add` tries it, and
        no turn is taken meanwhile. If they request log-probabilities, penalties or a form, programs that the engine
        compiles from now on can do all of this, in place of one program for each.
        """
        if sampling_params.asks_more_than_tokens and not self._expects_everything:
            self._thread.ask(expect_everything)
            self._expects_everything = True
        self._intake.foresee(sampling_params)

    def step(self) -> list[Ticket]:
        """Starts what was added, takes one turn of the engine, and returns the tickets that are finished, in order.

        While nothing else runs, the engine waits between two steps. So what runs together does not depend on the clock.
        Several replicas do not wait, neither for steps nor for each other. A step then lasts until a ticket has news.
        An error that concerns one ticket alone is raised by its `outputs`.

        Raises:
            RuntimeError: the LLM or this feed was closed. Any other error: the engine failed, and some tickets ended
                with it. The next step returns the others that are finished.
        """
        self._check()
        if self._added:
            self._thread.submit(tuple(self._added))
            self._added = []
        if self._thread.is_stepped:
            if self.num_unfinished:
                self._thread.turn()
        elif not all(ticket.finished for ticket in self._tickets):
            self._arrived.get()
            for _ in range(self._arrived.qsize()):
                self._arrived.get_nowait()
        finished = [ticket for ticket in self._tickets if ticket.finished]
        failed = [ticket for ticket in finished if ticket.engine_failed]
        for ticket in failed or finished:
            self._tickets.remove(ticket)
        if failed:
            failed[0].outputs()  # raises
        return finished

    @property
    def max_rows(self) -> int:
        """Sequences that can decode together now, in all replicas that go on from prompts."""
        thread = self._thread
        count = thread.mesh.dp
        return max(1, count) * thread.facts.engine_config.max_rows

    @property
    def num_unfinished(self) -> int:
        """Completions under way."""
        return sum(ticket.num_unfinished for ticket in self._tickets)

    @property
    def num_tokens(self) -> int:
        """Tokens generated so far by the tickets that `step` has not returned yet."""
        return sum(ticket.num_tokens for ticket in self._tickets)

    def _check(self) -> None:
        self._thread.check()
        if self._closed:
            raise RuntimeError(
                "feed: it was closed, as the end of its `with` block does; make a new one"
            )

    def close(self) -> None:
        """Ends what still runs, and refuses new prompts."""
        self._closed = True
        for ticket in self._tickets:
            self._thread.leave(ticket)
        self._tickets, self._added = [], []

    __del__ = close  # dropped without `close`

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
