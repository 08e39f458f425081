"""Between the calls of an `LLM` and its engine: whose request is whose, and turns that serve them all."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from hybrid_jax.completions import Call, Completion, Job
from hybrid_jax.outputs import Delta

if TYPE_CHECKING:
    from hybrid_jax.engine.engine import Engine


class RunningCalls:
    """The calls that run now. There may be several: a `stream` and what is called inside its loop.

    Args:
        engine: theirs alone.
        record: called at the end of a call with each of its jobs that got a token.
    """

    def __init__(self, engine: Engine, *, record: Callable[[Job], None]) -> None:
        self._engine: Engine | None = engine
        self._record = record
        self._live: dict[str, tuple[Job, Completion]] = {}  # by the engine's request id
        self._leaving: set[str] = set()  # ids the engine may still hold for nobody
        self._behind = False  # the last turn may not have been handed on

    @property
    def num_unfinished(self) -> int:
        """Requests somebody waits for."""
        return len(self._live)

    @property
    def closed(self) -> bool:
        return self._engine is None

    @property
    def engine(self) -> Engine:
        """The engine; RuntimeError after `close`."""
        if self._engine is None:
            raise RuntimeError("LLM: this object was closed; make a new one")
        return self._engine

    @contextmanager
    def running(self, jobs: list[Job]) -> Iterator[None]:
        """Gives the jobs to the engine; whatever happens, none of them stays there afterwards."""
        try:
            self.start(jobs)
            yield
        finally:
            self.end(jobs)

    def start(self, jobs: list[Job]) -> None:
        """Gives the jobs to the engine; the caller must `end` them, also when this raises."""
        engine = self.engine
        order = engine.order([job.completions[0].request.prompt for job in jobs])
        for job in (jobs[place] for place in order):
            for completion in job.completions:
                request = completion.request
                self._live[request.request_id] = job, completion
                try:
                    engine.add(request)
                except ValueError as error:
                    raise ValueError(f"prompt {job.index}: {error}") from error

    def end(self, jobs: list[Job]) -> None:
        """Takes the jobs out of the engine, finished or not, and records them."""
        ids = [c.request.request_id for job in jobs for c in job.completions]
        self._leaving.update(ids)  # those that ended too: an interrupt may have hidden it
        for request_id in ids:
            self._live.pop(request_id, None)
        self._let_go()
        for job in jobs:
            if job.first_token_time is not None:
                self._record(job)

    def _let_go(self) -> None:
        """Ends requests whose caller went away; what an interrupt leaves is ended the next time."""
        for request_id in list(self._leaving):
            if self._engine is not None:
                self._engine.abort(request_id)
            self._leaving.discard(request_id)

    def step(self) -> None:
        """One turn of the engine; its tokens go to whoever asked for them.

        The requests themselves are the truth about what there is to hand on, so an interrupted turn loses
        nothing: the next one starts with what was left.
        """
        engine = self.engine
        self._let_go()
        if self._behind:
            left = [entry for entry in self._live.values() if entry[1].behind]
            self._deliver(engine, left, surely=True)
            self._behind = False
            if left:
                return
        if not engine.has_work:
            raise RuntimeError(f"LLM: the engine is idle while {sorted(self._live)} are unfinished")
        self._behind = True
        results = engine.step()
        found = (self._live.get(result.request.request_id) for result in results)
        # None: it ended at a stop string, or its caller went away.
        self._deliver(engine, [entry for entry in found if entry is not None])
        self._behind = False

    def _deliver(
        self, engine: Engine, entries: list[tuple[Job, Completion]], *, surely: bool = False
    ) -> None:
        """Hands on what is new; `surely`: the engine may hold requests that say they are finished."""
        now = time.perf_counter()
        for job, completion in entries:
            if completion.behind:
                job.take(completion, now)
            if completion.finish_reason is not None:
                request = completion.request
                if surely or request.finish_reason is None:
                    engine.abort(request.request_id)
                del self._live[request.request_id]

    def deltas(self, jobs: list[Job], call: Call) -> Generator[Delta, None, None]:
        """Runs the jobs of a call and yields its deltas as they come; closing it ends the jobs."""
        with self.running(jobs):
            while call.unfinished or call.deltas:
                if self.engine and call.deltas:  # .engine raises after `close`
                    yield call.deltas.popleft()
                else:
                    self.step()

    def settle(self) -> None:
        """Lets the engine end what nobody waits for, so that what it says of itself is up to date."""
        engine = self.engine
        self._let_go()
        while not self._live and engine.has_work:
            engine.step()

    def close(self) -> None:
        """Ends what still runs and closes the engine."""
        if self._engine is not None:
            self._live.clear()
            self._engine.close()
            self._engine = None
