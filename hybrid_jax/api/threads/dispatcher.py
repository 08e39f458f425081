"""Who gets which prompt, where there are several engines: a thread that decides, and what joins the news of the parts.

The thread waits for no engine, so it answers at once. It alone asks the router; threads of engines tell the router what
their caches have, and tell this thread by commands what began and what ended. They join their news themselves, behind a
lock that no caller takes: a caller may be interrupted, and may be the garbage collector.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import numpy as np

from hybrid_jax.api.completions import Job
from hybrid_jax.api.threads.calls import CLOSED, Call, News
from hybrid_jax.api.threads.commands import Command, CommandLoop
from hybrid_jax.api.threads.engine_thread import EngineThread
from hybrid_jax.api.threads.prefill_side import PrefillSide
from hybrid_jax.cluster.router import Router

LOG = logging.getLogger("hybrid_jax.engine")
# Replicas that may end by a mistake while they have a prompt. Perhaps the prompt caused it, and would end all.
MAX_MISTAKES = 2


class Joint:
    """A call whose prompts several replicas have.

    Args:
        call: the caller's. Only this object writes to it from now on.
        over: told when nothing more will come.

    Attributes:
        parts: what each replica has, and had. The dispatcher's thread writes it.
        owners: the router's names of the prompts.
        mistakes: how many replicas ended by a mistake while they had a prompt.
    """

    def __init__(self, call: Call, over: Callable[[Call], object]) -> None:
        self.call, self._over = call, over
        self.parts: list[Part] = []
        self.owners: dict[Job, str] = {}
        self.mistakes: Counter[Job] = Counter()
        # The garbage collector may run the end of a call inside of another one.
        self._lock = threading.RLock()
        # What parts have told, and not what they know: their last deltas may still be on the way.
        self._counts: dict[Part, int] = {}

    def arrived(self, part: Part, news: News) -> None:
        """Hands the news of a part to the caller."""
        with self._lock:
            if self.call.over:
                return
            if news.error is not None:
                self.call.fail(news.error, engine_failed=part.engine_failed)
            else:
                self._counts[part] = news.num_finished
                self.call.num_finished = sum(self._counts.values())
                try:
                    self.call.tell(news.deltas)
                except Exception:  # its event loop is closed
                    self.call.over = True
        if self.call.over:
            self._over(self.call)

    def fail(self, error: BaseException, *, engine_failed: bool = True) -> None:
        """Ends the call with an error, unless it is over."""
        with self._lock:
            if self.call.over:
                return
            self.call.fail(error, engine_failed=engine_failed)
        self._over(self.call)

    def end(self) -> None:
        """Ends the call, whose caller has left or knows that it is over."""
        with self._lock:
            self.call.over = True


class Part(Call):
    """The prompts of a call that one replica has.

    Args:
        joint: the whole call.
        jobs: the prompts.
        replica: its number.
        dispatcher: told what begins and ends.
    """

    def __init__(self, joint: Joint, jobs: list[Job], replica: int, dispatcher: Dispatcher) -> None:
        call = joint.call
        super().__init__(
            jobs,
            send=self._send_on,
            streams=call.streams,
            stepped=call.stepped,
            keeps_errors=call.keeps_errors,
        )
        self.joint, self.replica, self._dispatcher = joint, replica, dispatcher

    def _send_on(self, news: News) -> None:
        self.joint.arrived(self, news)

    def began(self, job: Job) -> None:
        self._dispatcher.note_computed(self.joint.owners[job])

    def ended(self, job: Job) -> None:
        self._dispatcher.note_ended(self.joint.owners[job])

    def lost(self, error: BaseException, *, engine_failed: bool = True) -> None:
        """Gives the prompts back, each with the tokens that its caller has been told of."""
        self.over = True
        self._dispatcher.take_back(self, error)


class Dispatcher(CommandLoop):
    """Gives prompts to replicas, and those of a replica that left to the others.

    Args:
        router: chooses.
        prefill: has prompts computed by replicas that do nothing else; None if there are none.

    Attributes:
        threads: those of the replicas, also of those that left.
        gone: why each of the others ended, the last one last; None if it was taken out.
        present: the numbers of those that are there. Replaced as a whole, so that any thread may read it.
    """

    def __init__(self, router: Router, prefill: PrefillSide | None = None) -> None:
        super().__init__()
        self._router, self.prefill = router, prefill
        self.threads: list[EngineThread] = []
        self.present: tuple[int, ...] = ()
        self._joints: dict[Call, Joint] = {}
        self._where: dict[str, int] = {}  # the replica that each prompt was sent to, by its owner
        self._numbers = itertools.count()
        self.gone: dict[int, BaseException | None] = {}

    def run(self) -> None:
        """Runs until `stop` is called."""
        while not self._stopping:
            self._do(self._commands.get())
        self._ended = RuntimeError(CLOSED)
        self._joints.clear()  # the engines, as they end, tell these calls
        self._cancel_commands(self._ended)
        atexit.unregister(self.at_exit)

    # --- for other threads ------------------------------------------------------------------------

    def note_computed(self, owner: str) -> None:
        """A prompt has its first token."""
        self.give(Command(functools.partial(self._computed, owner)))

    def note_ended(self, owner: str) -> None:
        """A prompt has ended, or its caller has left."""
        self.give(Command(functools.partial(self._let_end, owner)))

    def note_gone(self, replica: int, error: BaseException) -> None:
        """The thread of a replica has ended."""
        self.give(Command(functools.partial(self._gone, replica, error)))

    def take_back(self, part: Part, error: BaseException) -> None:
        """The thread of a replica has ended, which had these prompts. It gives them away itself: nobody else has them.

        Args:
            part: the prompts.
            error: why it ended.
        """
        compile_s = self.threads[part.replica].compile_seconds
        left = [job for job in part.jobs if not job.finished and job.error is None]
        for job in left:
            job.go_elsewhere(compile_s)
        send = functools.partial(self._send_again, part, left, error)
        self.give(Command(send, part.joint.fail))

    # --- the thread -------------------------------------------------------------------------------

    def start(self, calls: Sequence[Call], arrived: float) -> None:
        """Gives the prompts of calls, which came at that time, to replicas."""
        for call in calls:
            if call.over or call in self._joints:  # after Ctrl-C its caller may submit it again
                continue
            joint = Joint(call, self._forget_soon)
            self._joints[call] = joint
            if not call.jobs:
                with suppress(Exception):  # its event loop is closed
                    call.tell([])
                self.end(call)
                continue
            for job in call.jobs:
                job.arrive(0.0, arrived)
                joint.owners[job] = f"{job.request_id}/{next(self._numbers)}"
            self._send(joint, call.jobs)

    def _send(self, joint: Joint, jobs: Sequence[Job]) -> None:
        try:
            parted = self._parted(joint, jobs)
        except BaseException as error:
            for job in jobs:  # those that had a place already
                self._let_end(joint.owners[job])
            joint.fail(error)
            return
        for replica, own in parted.items():
            thread = self.threads[replica]
            for job in own:
                job.reach(thread.compile_seconds)
            if self.prefill is not None:
                for job in own:
                    hit_len = 0 if job.decision is None else job.decision.hit_len
                    self.prefill.ask(joint.owners[job], job, hit_len)
            part = Part(joint, own, replica, self)
            joint.parts.append(part)
            thread.begin([part])

    def _parted(self, joint: Joint, jobs: Sequence[Job]) -> dict[int, list[Job]]:
        """Prompts by the replicas that get them, in the order in which replicas get their first one."""
        if not self._router.present:
            raise none_left(self.gone)
        prompts = {joint.owners[job]: np.asarray(_tokens(job), np.int32) for job in jobs}
        by_owner = {joint.owners[job]: job for job in jobs}
        found: dict[int, list[Job]] = {}
        for owner, decision in self._router.choose_all(prompts).items():
            job = by_owner[owner]
            job.decision = decision
            self._where[owner] = decision.replica
            found.setdefault(decision.replica, []).append(job)
        return found

    def end(self, call: Call) -> None:
        """Takes what is left of a call out of all replicas."""
        joint = self._joints.pop(call, None)
        if joint is None:
            call.over = True
            return
        joint.end()
        for part in joint.parts:
            self.threads[part.replica].leave(part)

    def _forget_soon(self, call: Call) -> None:
        self.give(Command(functools.partial(self.end, call)))

    def _computed(self, owner: str) -> None:
        if owner in self._where:
            self._router.computed(owner)
        self._let_prefix_go(owner)

    def _let_prefix_go(self, owner: str) -> None:
        if self.prefill is not None:
            self.prefill.let_go(owner)

    def _let_end(self, owner: str) -> None:
        self._let_prefix_go(owner)
        if self._where.pop(owner, None) is not None:
            self._router.ended(owner)

    # --- replicas that leave ----------------------------------------------------------------------

    def take_out(self, replica: int) -> None:
        """Takes a replica out for good. What it has comes back after its turn, and goes to the others."""
        self._gone(replica, None)
        self.threads[replica].close(wait=False)

    def _gone(self, replica: int, error: BaseException | None) -> None:
        if replica not in self.present or self._stopping:
            return
        self.present = tuple(other for other in self.present if other != replica)
        self.gone[replica] = error
        if self.prefill is not None:
            self.prefill.gone(replica)
        for owner in self._router.leave(replica):
            self._where.pop(owner, None)
            self._let_prefix_go(owner)
        LOG.warning(
            "replica %d has ended%s; its requests go to those that are left: %d",
            replica,
            "" if error is None else f": {error!r}",
            len(self.present),
        )

    def _send_again(self, part: Part, jobs: Sequence[Job], error: BaseException) -> None:
        self._gone(part.replica, error)
        joint = part.joint
        if joint.call.over:
            return
        if self.gone.get(part.replica) is not None:
            joint.mistakes.update(jobs)
        if self._stopping or any(joint.mistakes[job] > MAX_MISTAKES for job in jobs):
            joint.fail(error)
            return
        if not part.all_told:  # it ended in the middle of a turn
            joint.arrived(part, News(num_finished=part.num_finished))
        if jobs:
            self._send(joint, jobs)


def none_left(gone: Mapping[int, BaseException | None]) -> RuntimeError:
    """What callers get where all replicas have ended, each for its reason."""
    error = [*gone.values()][-1] if gone else None
    why = "" if error is None else f"; the last one ended with {error!r}"
    found = RuntimeError(f"LLM: no replica is left{why}; make a new one")
    found.__cause__ = error
    return found


def _tokens(job: Job) -> Sequence[int]:
    """What a replica will have of a prompt: with the output so far, if it comes back from another one."""
    first = next(iter(job.unfinished))
    return (*job.prompt.token_ids, *first.token_ids)
