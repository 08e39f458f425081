"""The caller's side of an engine in another process: what its thread runs."""

from __future__ import annotations

import atexit
import functools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

import numpy as np

from hybrid_jax.api.completions import Job
from hybrid_jax.api.outputs import Delta
from hybrid_jax.api.threads.call_loop import CallLoop
from hybrid_jax.api.threads.calls import CLOSED, Call, own_error
from hybrid_jax.api.threads.commands import Command
from hybrid_jax.api.threads.loop import Loop
from hybrid_jax.api.threads.prefill_side import Travelling
from hybrid_jax.api.threads.questions import Answer, EngineFacts, Question
from hybrid_jax.api.workers.link import (
    SILENT,
    Frames,
    Link,
    WorkerLost,
    as_bytes,
    receive_from_worker,
)
from hybrid_jax.api.workers.messages import (
    Alive,
    Answered,
    Ask,
    Begin,
    Cached,
    Compiled,
    Compute,
    Computed,
    Do,
    Drop,
    Ended,
    Leave,
    Order,
    PartCame,
    Promise,
    PromiseEnded,
    Ready,
    Stop,
    TakeBack,
    Told,
)
from hybrid_jax.cluster.watch import News
from hybrid_jax.schedule.request import Request
from hybrid_jax.tiers.hand_over import HandOver

LOG = logging.getLogger("hybrid_jax.engine")
Tell = Callable[[Any, BaseException | None], object]


class WorkerLoop(CallLoop):
    """Has calls computed by the engine of another process.

    Args:
        link, frames: to the process, which has sent its `Ready`.
        ready: that message.
        record: as in `CallLoop`.

    Attributes:
        tell_cache: takes what is new about the engine's cache, in the thread.
    """

    def __init__(
        self, link: Link, frames: Frames, ready: Ready, record: Callable[[Job], None]
    ) -> None:
        super().__init__(record)
        self._link, self._frames, self._ready = link, frames, ready
        self.where = link.where
        self.tell_cache: Callable[[News], object] = lambda news: None
        self._out: list[bytes] = []  # to send after the commands that are there
        self._calls: dict[int, Call] = {}  # those that run
        self._numbers: dict[Call, int] = {}
        self._next = 0  # number of a call or a question
        self._asked: dict[int, Tell] = {}
        self._prefixes: dict[str, Callable[[BaseException | None], object]] = {}
        # What is between the sides, if the worker is on one.
        self.hand_over: HandOver | None = None
        self._compile_seconds = ready.compile_seconds
        self._peak: int | None = None
        self._lost: BaseException | None = None

    @property
    def facts(self) -> EngineFacts:
        """As of the start."""
        return self._ready.facts

    def compile_seconds(self) -> float:
        """As far as the worker has told."""
        return self._compile_seconds

    def peak_memory_bytes(self) -> int | None:
        """As far as the worker has told."""
        return self._peak

    def discard(self) -> None:
        """As `CallLoop.discard`."""
        self._link.kill()

    # --- the thread -------------------------------------------------------------------------------

    def run(self) -> None:
        """Runs until `stop` is called or the worker ends."""
        reader = threading.Thread(target=self._read, name="hybrid_jax-receive", daemon=True)
        reader.start()
        error: BaseException = RuntimeError(CLOSED)
        try:
            while not self._stopping and self._lost is None:
                self._do(self._commands.get())
                for _ in range(self._commands.qsize()):
                    self._do(self._commands.get_nowait())
                self._flush()
        except BaseException as mistake:  # a bug here, or nobody listens
            error = mistake
        if not self._stopping:
            error = self._lost or error
            self._link.kill()  # before another one is started, which may need its card
        self.on_end(error)  # first, so that who is refused finds what it brought about
        self._ended = error
        for call in list(self._calls.values()):
            call.lost(error)
        self._calls.clear()
        self._numbers.clear()
        asked, self._asked = self._asked, {}
        for tell in asked.values():
            tell(None, error)
        prefixes, self._prefixes = self._prefixes, {}
        for told in prefixes.values():
            told(error)
        self._cancel_commands(error)
        self._end_link()
        reader.join()
        atexit.unregister(self.at_exit)

    def _read(self) -> None:
        """In a thread of its own: hands on what the worker says, until it says no more."""
        while True:
            try:
                frame = receive_from_worker(self._link, SILENT)
            except TimeoutError as error:
                self._lose(WorkerLost(f"{self._link.about}: {error}"))
                self.give(Command(lambda: None))
                self._link.kill()  # which also ends a `send` that waits for it
                return
            except (EOFError, OSError):
                self.give(Command(functools.partial(self._lose, self._gone())))
                return
            self.give(Command(functools.partial(self._receive, frame), self._lose))

    def _lose(self, error: BaseException) -> None:
        """What the worker says is no longer to be had, or cannot be read."""
        self._lost = self._lost or error

    def _gone(self) -> WorkerLost:
        """What is to be said of a worker that nothing comes from any more."""
        return WorkerLost(f"{self._link.about}: {self._link.why_lost()}")

    def _flush(self) -> None:
        if self._out:
            said, self._out = self._out, []
            try:
                self._link.send(self._frames.pack(said))
            except OSError as error:
                raise self._gone() from error

    def _end_link(self) -> None:
        try:
            self._link.send(self._frames.pack_one(Stop()))
        except OSError:
            pass  # nobody is there
        self._link.close()

    def _receive(self, frame: bytes) -> None:
        for message in self._frames.unpack(frame):
            match message:
                case Told():
                    self._hear(message)
                case Answered():
                    if (tell := self._asked.pop(message.number, None)) is not None:
                        tell(message.answer, message.error)
                case Cached():
                    self.tell_cache(message.news)
                case PartCame():
                    if self.hand_over is not None:
                        self._pass_on(self.hand_over, message)
                case PromiseEnded():
                    if self.hand_over is not None:
                        self.hand_over.end(message.name, message.state)
                case Computed():
                    if (told := self._prefixes.pop(message.request_id, None)) is not None:
                        told(None)
                case Alive():
                    pass
                case Compiled():
                    self._compile_seconds = message.seconds
                case Ended():
                    self._lose(message.error)
                case _:
                    raise AssertionError(message)

    def _pass_on(self, hand_over: HandOver, came: PartCame) -> None:
        """Takes a part for the other side. One that has no room is as one that never came."""
        try:
            hand_over.folder.put(came.name, Travelling(found=self._link.disclose(came.found)))
        except (OSError, MemoryError) as error:
            LOG.warning("a part of a prompt that was computed elsewhere is left out: %s", error)

    # --- calls ------------------------------------------------------------------------------------

    def _hear(self, told: Told) -> None:
        """Hands on what is new about a call."""
        call = self._calls.get(told.number)
        if call is None or call.over:
            return
        if told.peak_memory_bytes is not None:
            self._peak = told.peak_memory_bytes
        now, deltas = time.perf_counter(), list[Delta]()
        for place, sample, update in told.updates:
            job = call.jobs[place]
            completion = job.completions[sample]
            self._take(call, job, completion, deltas, now, update)
            if completion.finish_reason is not None and job.finished:
                self._finish(call, job)
        for place, error in told.failed:
            job = call.jobs[place]
            self._give_up(call, job)
            job.error = error
            call.num_finished += 1
        if told.error is not None:
            self.end_call(call, told.error, engine_failed=told.engine_failed)
            return
        if not call.reaches(deltas):
            self.end_call(call)
        if call.over:
            self._forget(call)

    def _forget(self, call: Call) -> int | None:
        number = self._numbers.pop(call, None)
        if number is not None:
            del self._calls[number]
        return number

    def start(self, calls: Sequence[Call]) -> None:
        """Sends calls to the worker."""
        for call in calls:
            if call.over or call in self._numbers:  # after Ctrl-C its caller may submit it again
                continue
            number = self._next = self._next + 1
            orders = [Order.of(job) for job in call.jobs]
            begin = Begin(
                number,
                orders,
                call.streams,
                call.keeps_errors,
                whole=call.whole.number,
                begun=call.whole.begun,
            )
            try:
                self._out.append(as_bytes(begin))
            except Exception as error:  # parameters that cannot travel
                self.end_call(call, error)
                continue
            self._numbers[call], self._calls[number] = number, call

    def _withdraw(self, call: Call) -> bool:
        """As `CallLoop._withdraw`. What the worker tells of the call from now on is not heard."""
        if (number := self._forget(call)) is None:
            return False
        self._out.append(as_bytes(Leave(number)))
        return True

    # --- hand-overs -------------------------------------------------------------------------------

    def compute_prefix(
        self, request: Request, promise: str, told: Callable[[BaseException | None], object]
    ) -> None:
        """As `CallLoop.compute_prefix`."""
        self._out.append(as_bytes(Compute(request, promise)))
        self._prefixes[request.request_id] = told

    def drop_prefix(self, request_id: str) -> None:
        """As `CallLoop.drop_prefix`."""
        if (told := self._prefixes.pop(request_id, None)) is not None:
            self._out.append(as_bytes(Drop(request_id)))
            told(None)

    def promise(self, tokens: np.ndarray, position: int) -> None:
        """As `CallLoop.promise`."""
        self._out.append(as_bytes(Promise(tokens[:position], position)))

    def take_back(self, name: str) -> None:
        """As `CallLoop.take_back`."""
        self._out.append(as_bytes(TakeBack(name)))

    def bring_part(self, name: str, found: Any) -> None:
        """As `CallLoop.bring_part`."""
        self._out.append(as_bytes(PartCame(name, self._link.enclose(found))))

    def end_promise(self, name: str, state: str) -> None:
        """As `CallLoop.end_promise`."""
        self._out.append(as_bytes(PromiseEnded(name, state)))

    # --- questions --------------------------------------------------------------------------------

    def later(self, call: Callable[[Loop], Answer], tell: Tell) -> None:
        """Has the worker's loop make a call, and tell what it returned or raised."""

        self._ask(lambda number: Do(number, call), tell)

    def _ask(self, asked: Callable[[int], Do | Ask], tell: Tell) -> None:
        """Sends what will be answered, once it has a number."""

        def send() -> None:
            number = self._next = self._next + 1
            self._out.append(as_bytes(asked(number)))
            self._asked[number] = tell

        self.give(Command(send, lambda error: tell(None, error)))

    def now(self, question: Question[Answer], args: Sequence[Any]) -> Answer:
        """Asks the worker, and waits for its answer."""
        answers: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        asked = functools.partial(Ask, question=question.name, args=tuple(args))
        self._ask(asked, lambda answer, error: answers.put((answer, error)))
        answer, error = answers.get()
        if error is not None:
            raise own_error(error)
        return answer
