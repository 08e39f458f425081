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
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from hybrid_jax.api.completions import Completion, Job
from hybrid_jax.api.threads.call_loop import CallLoop
from hybrid_jax.api.threads.calls import CLOSED, Call, News
from hybrid_jax.api.threads.commands import Command, CommandLoop
from hybrid_jax.api.threads.engine_thread import EngineThread
from hybrid_jax.api.threads.prefill_side import PrefillSide
from hybrid_jax.byte_sizes import counted
from hybrid_jax.cluster.router import Router

LOG = logging.getLogger("hybrid_jax.engine")
# Replicas that may end by a mistake while they have a prompt, without a new token of it. Perhaps the prompt caused it,
# and would end all. Before the last of them, prompts that may have caused it are tried one at a time.
MAX_MISTAKES = 2
# How often a replica is started again. One that ends more often is left out.
MAX_STARTS = 3
RETRY_AFTER = 2.0  # seconds after a start that failed, times the starts so far


class Joint:
    """A call whose prompts several replicas have.

    Args:
        call: the caller's. Only this object writes to it from now on.
        over: told when nothing more will come.

    Attributes:
        parts: what each replica has, and had. The dispatcher's thread writes it.
        owners: the router's names of the prompts.
        mistakes: for each prompt, its tokens when a replica that had it ended by a mistake, and how many did so since
            it has got a new one.
    """

    def __init__(self, call: Call, over: Callable[[Call], object]) -> None:
        self.call, self._over = call, over
        self.parts: list[Part] = []
        self.owners: dict[Job, str] = {}
        self.mistakes: dict[Job, tuple[int, int]] = {}
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
                self.call.num_finished += news.num_finished - self._counts.get(part, 0)
                self._counts[part] = news.num_finished
                if not self.call.reaches(news.deltas):
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

    def note_mistake(self, job: Job) -> int:
        """A replica that had a prompt has ended by a mistake; returns how many did so without a new token of it."""
        tokens, count = self.mistakes.get(job, (0, 0))
        count = count + 1 if tokens == job.num_tokens else 1
        self.mistakes[job] = job.num_tokens, count
        return count

    def end(self) -> None:
        """Ends the call, whose caller has left or knows that it is over."""
        with self._lock:
            self.call.over = True


class Part(Call):
    """The prompts of a call that one replica has.

    Args:
        joint: the whole call.
        jobs: the prompts.
        replica, thread: its number, and its thread.
        dispatcher: told what begins and ends.
    """

    def __init__(
        self,
        joint: Joint,
        jobs: list[Job],
        replica: int,
        thread: EngineThread,
        dispatcher: Dispatcher,
    ) -> None:
        call = joint.call
        super().__init__(
            jobs,
            send=self._send_on,
            streams=call.streams,
            stepped=call.stepped,
            keeps_errors=call.keeps_errors,
        )
        self.joint, self.replica, self.thread, self._dispatcher = joint, replica, thread, dispatcher
        self.whole = call.whole

    def _send_on(self, news: News) -> None:
        self.joint.arrived(self, news)

    def took(self, job: Job, completion: Completion) -> None:
        if job is self._dispatcher.on_trial:
            self._dispatcher.note_innocent(job)

    def began(self, job: Job) -> None:
        self._dispatcher.note_computed(self.joint.owners[job])

    def ended(self, job: Job) -> None:
        self._dispatcher.note_ended(self.joint.owners[job], job)

    def given_back(self) -> None:
        """It may go to another replica."""
        self._dispatcher.note_given_back(self)

    def kept(self) -> None:
        """It stays where it is."""
        self._dispatcher.note_kept(self)

    def lost(self, error: BaseException, *, engine_failed: bool = True) -> None:
        """Gives the prompts back, each with the tokens that its caller has been told of."""
        self.over = True
        self._dispatcher.take_back(self, error)


class Dispatcher(CommandLoop):
    """Gives prompts to replicas, and those of a replica that left to the others.

    Args:
        router: chooses.
        prefill: has prompts computed by replicas that do nothing else; None if there are none.
        revive: starts a replica that has ended by a mistake again, which may take long; None where none can be.

    Attributes:
        threads: those of the replicas, also of those that left.
        gone: why each of the others ended, the last one last; None if it was taken out.
        present: the numbers of those that are there. Replaced as a whole, so that any thread may read it.
    """

    def __init__(
        self,
        router: Router,
        prefill: PrefillSide | None = None,
        revive: Callable[[int], CallLoop] | None = None,
    ) -> None:
        super().__init__()
        self._router, self.prefill, self._revive = router, prefill, revive
        self._starts = Counter[int]()  # how often each replica was started again
        self.reviving: frozenset[int] = frozenset()  # those that are being started again
        self._taken_out: set[int] = set()
        self._homeless: list[tuple[Joint, Sequence[Job]]] = []  # they wait for one of these
        self._suspects: deque[tuple[Joint, Job]] = deque()  # they wait until they may be tried
        self.on_trial: Job | None = None
        self.threads: list[EngineThread] = []
        self.present: tuple[int, ...] = ()
        self._joints: dict[Call, Joint] = {}
        self._where: dict[str, Part | None] = {}  # what each prompt was sent in, by owner
        # Parts of one prompt, by replica, in the order in which they were sent; some may have begun or ended.
        self._movable: dict[int, dict[Part, None]] = defaultdict(dict)
        self._moving: dict[Part, int] = {}  # what was asked back, and the replica that will get it
        self._numbers = itertools.count()
        self._over = threading.Event()  # nothing is started any more
        self.gone: dict[int, BaseException | None] = {}

    def run(self) -> None:
        """Runs until `stop` is called."""
        while not self._stopping:
            self._do(self._commands.get())
        self._over.set()
        self._ended = RuntimeError(CLOSED)
        for joint, _ in (*self._homeless, *self._suspects):  # no engine has these
            joint.fail(self._ended, engine_failed=False)
        self._homeless.clear()
        self._suspects.clear()
        self._joints.clear()  # the engines, as they end, tell the other calls
        self._cancel_commands(self._ended)
        atexit.unregister(self.at_exit)

    # --- for other threads ------------------------------------------------------------------------

    def note_computed(self, owner: str) -> None:
        """A prompt has its first token."""
        self.give(Command(functools.partial(self._computed, owner)))

    def note_ended(self, owner: str, job: Job) -> None:
        """A prompt has ended, or its caller has left."""
        self.give(Command(functools.partial(self._let_end, owner, job)))

    def note_innocent(self, job: Job) -> None:
        """A prompt that was on trial has a new token."""
        self.give(Command(functools.partial(self._end_trial, job)))

    def note_given_back(self, part: Part) -> None:
        """A replica has given prompts back, as it was asked to."""
        self.give(Command(functools.partial(self._move, part), part.joint.fail))

    def note_kept(self, part: Part) -> None:
        """A replica has begun prompts that it was asked to give back."""
        self.give(Command(functools.partial(self._moving.pop, part, None)))

    def note_gone(self, replica: int, loop: CallLoop, error: BaseException) -> None:
        """The loop of a replica has ended."""
        self.give(Command(functools.partial(self._gone_if, replica, loop, error)))

    def take_back(self, part: Part, error: BaseException) -> None:
        """The thread of a replica has ended, which had these prompts. It gives them away itself: nobody else has them.

        Args:
            part: the prompts.
            error: why it ended.
        """
        compile_s = part.thread.compile_seconds
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
                call.reaches([])
                self.end(call)
                continue
            for job in call.jobs:
                job.arrive(0.0, arrived)
                joint.owners[job] = f"{job.request_id}/{next(self._numbers)}"
            self._send(joint, call.jobs)

    def _send(self, joint: Joint, jobs: Sequence[Job], only: int | None = None) -> None:
        if not self._router.present and self.reviving:
            self._homeless.append((joint, jobs))
            return
        try:
            for replica, own in self._parted(joint, jobs, only).items():
                self._give(joint, own, replica)
        except BaseException as error:
            joint.fail(error)
            for job in jobs:  # those that had a place already
                self._let_end(joint.owners[job], job)

    def _give(self, joint: Joint, jobs: list[Job], replica: int) -> None:
        """Has a replica compute prompts."""
        thread = self.threads[replica]
        for job in jobs:
            job.reach(thread.compile_seconds)
            if self.prefill is not None:
                hit_len = 0 if job.decision is None else job.decision.hit_len
                self.prefill.ask(joint.owners[job], job, hit_len, thread)
        parts = [Part(joint, own, replica, thread, self) for own in self._movable_apart(jobs)]
        for part in parts:
            joint.parts.append(part)
            self._where.update(dict.fromkeys((joint.owners[job] for job in part.jobs), part))
            if len(part.jobs) == 1:
                self._movable[replica][part] = None
        thread.begin(parts)

    def _movable_apart(self, jobs: list[Job]) -> list[list[Job]]:
        """Prompts of one call for one replica, as they are sent: many together, but the last ones, which will wait for
        rows, one by one, so that each may be moved."""
        rows = self._router.model.max_rows
        alone = max(0, min(rows, len(jobs) - rows))
        together = jobs[: len(jobs) - alone]
        return [together, *([job] for job in jobs[len(together) :])]

    def _parted(self, joint: Joint, jobs: Sequence[Job], only: int | None) -> dict[int, list[Job]]:
        """Prompts by the replicas that get them, in the order in which replicas get their first one."""
        if not self._router.present:
            raise none_left(self.gone)
        prompts = {joint.owners[job]: np.asarray(_tokens(job), np.int32) for job in jobs}
        by_owner = {joint.owners[job]: job for job in jobs}
        found: dict[int, list[Job]] = {}
        for owner, decision in self._router.choose_all(prompts, only=only).items():
            job = by_owner[owner]
            job.decision = decision
            self._where[owner] = None
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
            part.thread.leave(part)

    def _forget_soon(self, call: Call) -> None:
        self.give(Command(functools.partial(self.end, call)))

    def _computed(self, owner: str) -> None:
        if owner in self._where:
            self._stays(self._where[owner])
            self._router.computed(owner)
        self._let_prefix_go(owner)

    def _let_prefix_go(self, owner: str) -> None:
        if self.prefill is not None:
            self.prefill.let_go(owner)

    def _let_end(self, owner: str, job: Job | None = None) -> None:
        if job is not None and job is self.on_trial:
            self._end_trial(job)
        self._let_prefix_go(owner)
        if owner in self._where:
            self._stays(self._where.pop(owner))
            self._router.ended(owner)
            self._even_out()

    def _stays(self, part: Part | None) -> None:
        """A part is not moved any more."""
        if part is not None:
            self._movable[part.replica].pop(part, None)

    # --- prompts that are moved -------------------------------------------------------------------

    def _even_out(self) -> None:
        """Asks prompts back that wait for rows of one replica, while another one has free rows: those sent last."""
        if self._moving or len(self.present) < 2 or (found := self._router.uneven()) is None:
            return
        movable = self._movable[found.busy]
        while movable and len(self._moving) < found.requests:
            part, _ = movable.popitem()  # the one that was sent last
            if part.is_untouched:
                self._moving[part] = found.idle
                part.thread.give_back(part)

    def _move(self, part: Part) -> None:
        """Sends prompts that were given back to another replica."""
        replica, joint = self._moving.pop(part), part.joint
        for job in part.jobs:
            self._let_prefix_go(joint.owners[job])
            self._where.pop(joint.owners[job], None)
            self._router.ended(joint.owners[job])
        joint.parts.remove(part)
        if joint.call.over:
            self._end_trials(part.jobs)
            return
        compile_s = part.thread.compile_seconds
        for job in part.jobs:
            job.go_elsewhere(compile_s)
        self._send(joint, part.jobs, replica if replica in self._router.present else None)

    # --- replicas that leave ----------------------------------------------------------------------

    def take_out(self, replica: int) -> None:
        """Takes a replica out for good. What it has comes back after its turn, and goes to the others."""
        self._taken_out.add(replica)
        self._gone(replica, None)
        self.threads[replica].close(wait=False)

    def _gone_if(self, replica: int, loop: CallLoop, error: BaseException) -> None:
        """A replica is gone, unless another one was started in its place."""
        if self.threads[replica].runs(loop):
            self._gone(replica, error)

    def _gone(self, replica: int, error: BaseException | None) -> None:
        if replica not in self.present or self._stopping:
            return
        self.present = tuple(other for other in self.present if other != replica)
        self.gone[replica] = error
        if self.prefill is not None:
            self.prefill.gone(replica)
        self._movable.pop(replica, None)
        for owner in self._router.leave(replica):
            self._where.pop(owner, None)
            self._let_prefix_go(owner)
        again = (
            error is not None and self._revive is not None and self._starts[replica] < MAX_STARTS
        )
        if left := len(self._router.present):
            then = f"go to {counted(left, 'other')}"
        else:
            then = "wait" if again or self.reviving else "end with an error"
        LOG.warning(
            "replica %d has ended%s; its requests %s%s",
            replica,
            "" if error is None else f": {error!r}",
            then,
            "; it is started again" * again
            + "; it is left out" * (self._starts[replica] >= MAX_STARTS),
        )
        if again:
            self._begin_start(replica)
        else:
            self._house_or_fail()

    def _begin_start(self, replica: int, wait: float = 0.0) -> None:
        """Has a replica started again, after so many seconds."""
        self._starts[replica] += 1
        self.reviving |= {replica}
        start = functools.partial(self._start_again, replica, wait)
        threading.Thread(target=start, name="hybrid_jax-revive", daemon=True).start()

    def _is_wanted(self, replica: int) -> bool:
        """Whether it may be started again."""
        return replica not in self._taken_out and not self._stopping

    def _start_again(self, replica: int, wait: float) -> None:
        """In a thread of its own."""
        assert self._revive is not None
        self._over.wait(wait)
        try:
            if not self._is_wanted(replica):
                raise RuntimeError(CLOSED)
            loop = self._revive(replica)
        except BaseException as error:
            self.give(Command(functools.partial(self._come_back, replica, None, error)))
        else:
            come = functools.partial(self._come_back, replica, loop, None)
            self.give(Command(come, lambda _: loop.discard()))

    def _come_back(self, replica: int, loop: CallLoop | None, error: BaseException | None) -> None:
        """A replica is there again, or could not be started."""
        self.reviving -= {replica}
        if not self._is_wanted(replica):
            if loop is not None:
                loop.discard()
        elif loop is None:
            again = self._starts[replica] < MAX_STARTS
            # As text: an error leads to all that was there when it was raised, and handlers may keep what they get.
            LOG.warning(
                "replica %d could not be started again: %s; it is %s",
                replica,
                str(error),
                "tried once more" if again else "left out",
            )
            if again:
                self._begin_start(replica, RETRY_AFTER * self._starts[replica])
        else:
            self.add(replica, loop)
            if self._stopping:  # whoever said so may not have seen its thread
                self.threads[replica].close(wait=False)
            if self.prefill is None or not self.prefill.back(replica):
                self._router.join(replica)
            LOG.warning("replica %d is there again", replica)
        self._house_or_fail()

    def add(self, replica: int, loop: CallLoop) -> None:
        """A replica begins."""
        loop.on_end = functools.partial(self.note_gone, replica, loop)
        self.threads[replica : replica + 1] = [EngineThread(loop)]
        self.gone.pop(replica, None)
        self.present = tuple(sorted({*self.present, replica}))

    def _house_or_fail(self) -> None:
        """Sends prompts again that waited for a replica, or fails them if none will come."""
        if self._router.present or not self.reviving:
            homeless, self._homeless = self._homeless, []
            for joint, jobs in homeless:
                if not joint.call.over:
                    self._send(joint, jobs)
                else:
                    self._end_trials(jobs)

    def _send_again(self, part: Part, jobs: Sequence[Job], error: BaseException) -> None:
        replica, joint = part.replica, part.joint
        self._moving.pop(part, None)
        if self.threads[replica] is part.thread:
            self._gone(replica, error)
        if joint.call.over:
            self._end_trials(jobs)
            return
        counts = dict.fromkeys(jobs, 0)
        if replica not in self._taken_out:
            counts = {job: joint.note_mistake(job) for job in jobs}
        if self._stopping:
            joint.fail(error)
        elif max(counts.values(), default=0) > MAX_MISTAKES:
            joint.fail(_ends_replicas(error), engine_failed=False)
        else:
            if not part.all_told:  # it ended in the middle of a turn
                joint.arrived(part, News(num_finished=part.num_finished))
            self._suspects += [(joint, job) for job in jobs if counts[job] == MAX_MISTAKES]
            if innocent := [job for job in jobs if counts[job] < MAX_MISTAKES]:
                self._send(joint, innocent)
        self._end_trials(jobs)

    def _end_trials(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            self._end_trial(job)

    def _end_trial(self, job: Job) -> None:
        """Goes on to the next prompt that may end replicas, once the one on trial has a token or has ended."""
        if self.on_trial not in (None, job):
            return
        self.on_trial = None
        while self._suspects and self.on_trial is None:
            joint, suspect = self._suspects.popleft()
            if not joint.call.over:
                self.on_trial = suspect
                self._send(joint, [suspect])


class NoReplicas(RuntimeError):
    """All replicas have ended."""


def none_left(gone: Mapping[int, BaseException | None]) -> NoReplicas:
    """What callers get where all replicas have ended, each for its reason."""
    error = [*gone.values()][-1] if gone else None
    why = "" if error is None else f"; the last one ended with {error!r}"
    found = NoReplicas(f"LLM: no replica is left{why}; make a new one")
    found.__cause__ = error
    return found


def _ends_replicas(error: BaseException) -> RuntimeError:
    """What the caller of a prompt gets that seems to end every replica that has it."""
    found = RuntimeError(
        f"LLM: {MAX_MISTAKES + 1} replicas have ended one after the other while they had this prompt; the last one: "
        f"{error!r}"
    )
    found.__cause__ = error
    return found


def _tokens(job: Job) -> Sequence[int]:
    """What a replica will have of a prompt: with the output so far, if it comes back from another one."""
    first = next(iter(job.unfinished))
    return (*job.prompt.token_ids, *first.token_ids)
