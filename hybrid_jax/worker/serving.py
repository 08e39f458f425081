"""The worker's side: an `LLM` that computes what comes through a link, and tells what is new."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from hybrid_jax.api.completions import Completion, Job
from hybrid_jax.api.llm import LLM
from hybrid_jax.api.options import options_of_prefill
from hybrid_jax.api.outputs import Delta
from hybrid_jax.api.threads.calls import Call, News, Whole
from hybrid_jax.api.threads.engine_thread import EngineThread
from hybrid_jax.api.threads.loop import Loop
from hybrid_jax.api.threads.questions import named
from hybrid_jax.api.threads.replicas import costs_of, tell_cache
from hybrid_jax.api.workers.link import BEAT, Frames, Link, WorkerLost, as_bytes, portable
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
    NotStarted,
    Order,
    PartCame,
    Promise,
    PromiseEnded,
    Ready,
    Start,
    Stop,
    TakeBack,
    Told,
)
from hybrid_jax.api.workers.starting import ROOT
from hybrid_jax.process.ending import pool_of_threads
from hybrid_jax.tiers.hand_over import ENDS, HandOver
from hybrid_jax.tiers.part_file import Damaged, Part, part_of_bytes, part_to_bytes

LOG = logging.getLogger("hybrid_jax.engine")
Say = Callable[[Any], None]  # puts a message on its way
# Seconds between two times at which a caller that waits for finished prompts is told of tokens, after the first ones.
# If the worker is lost, others go on from there.
TOLD_EVERY = 0.5
TOGETHER = (
    0.005  # seconds that messages wait for others of the same turn, unless they are of a stream
)
# Seconds that a turn on a card may take, or one compiling in it. Those of a CPU may take any time.
TURN_LIMIT = 600.0
ASKING = 8  # threads that answer questions while the engine computes; some compile


class SentCall(Call):
    """A call of another process.

    Args:
        begin: what that process asks for.
        jobs: made of it. whole: of all parts of the call that are here.
        say: puts a message on its way.
        peak: the most memory in use so far.
        forget: called when it is over.
    """

    def __init__(
        self,
        begin: Begin,
        jobs: list[Job],
        whole: Whole,
        say: Say,
        peak: Callable[[], int | None],
        forget: Callable[[], object],
    ) -> None:
        super().__init__(jobs, send=self._failed, keeps_errors=begin.keeps_errors)
        self.whole = whole
        self._number, self._tells_all = begin.number, begin.streams
        self._say, self._peak, self._forget = say, peak, forget
        self._places = {id(job): place for place, job in enumerate(jobs)}
        self._known = {  # tokens and characters that the other process knows of
            completion: (len(completion.token_ids), len(completion.text))
            for job in jobs
            for completion in job.completions
        }
        self._changed: dict[Completion, Job] = {}
        self._begun: set[Completion] = set()  # they have got a token here
        self._over: list[Job] = []  # since it was told last
        self._told_at = 0.0

    def took(self, job: Job, completion: Completion) -> None:
        self._changed[completion] = job
        if completion not in self._begun:
            self._begun.add(completion)
            self._told_at = 0.0

    def ended(self, job: Job) -> None:
        self._over.append(job)

    def tell(self, deltas: list[Delta] | tuple[()] = ()) -> None:  # type: ignore[override]
        """Tells what is new, if that is wanted now."""
        now = time.monotonic()
        self.over = self.num_finished == len(self.jobs)
        if self._tells_all or self._over or self.over or now - self._told_at >= TOLD_EVERY:
            self._told_at = now
            self._say(self._news())
        if self.over:
            self._forget()

    def _news(self) -> Told:
        changed, self._changed = self._changed, {}
        over, self._over = self._over, []
        updates = []
        for completion, job in changed.items():
            place = self._places[id(job)]
            updates.append((place, completion.request.sample_index, self._update(completion)))
        failed = [
            (self._places[id(job)], portable(job.error)) for job in over if job.error is not None
        ]
        peak = self._peak() if over else None
        return Told(self._number, updates, failed, peak, streams=self._tells_all)

    def _update(self, completion: Completion) -> Any:
        update = completion.update(*self._known[completion])
        self._known[completion] = len(completion.token_ids), len(completion.text)
        return update

    def _failed(self, news: News) -> None:
        """It has ended with an error."""
        assert news.error is not None, news
        self._forget()
        told = self._news()
        self._say(told._replace(error=portable(news.error), engine_failed=self.engine_failed))

    def lost(self, error: BaseException, *, engine_failed: bool = True) -> None:
        """The engine has ended, which the worker tells of."""


def loaded(start: Start, hand_over: HandOver) -> LLM:
    """The `LLM` that a caller wants. Raises as `LLM` does.

    Args:
        start: says which. hand_over: of the worker, if it is on one side of one.
    """
    llm = LLM.__new__(LLM)
    side = functools.partial(ENDS[start.side], hand_over) if start.side else None
    options = {**start.options, "prefill_options": None}
    if start.side == "prefill":
        options = options_of_prefill(start.options)
    llm._load(start.model, options, sharing=start.sharing, side=side, **start.own)
    return llm


def _is_urgent(message: Any) -> bool:
    """Whether it goes at once."""
    return not (isinstance(message, Cached) or (isinstance(message, Told) and not message.streams))


class Worker:
    """Serves a link until its other end closes it.

    Args:
        link: to the caller.
        left: called when the caller has ended, before what runs is ended.
        make: makes the `LLM`.
    """

    def __init__(
        self,
        link: Link,
        left: Callable[[], object] = lambda: None,
        make: Callable[[Start, HandOver], LLM] = loaded,
    ) -> None:
        self._left, self._make = left, make
        self._link, self._frames = link, Frames(link.about)
        self._out: SimpleQueue[Any] = SimpleQueue()
        self._calls: dict[int, Call] = {}  # those that run
        # As long as one of its parts is there.
        self._wholes: WeakValueDictionary[int, Whole] = WeakValueDictionary()
        self._llm: LLM
        self._thread: EngineThread  # of the LLM
        self._hand_over = HandOver(ROOT)
        self._compile_seconds: Callable[[], float] = lambda: 0.0
        self._turn_seconds: Callable[[], float] = lambda: 0.0  # of a card
        self._asking = pool_of_threads(ASKING, "hybrid_jax-asked")
        # Parts may come from another machine, and calls must not wait for that. One thread: their order matters.
        self._fetching = pool_of_threads(1, "hybrid_jax-fetch")

    def run(self) -> None:
        """Makes the `LLM` and serves."""
        with ExitStack() as ends:
            ends.callback(self._asking.shutdown, wait=False)
            ends.callback(self._fetching.shutdown, wait=False, cancel_futures=True)
            try:
                frame = self._link.receive()
                try:
                    [start] = self._frames.unpack(frame)
                    with self._beating():
                        ready = self._start(start)
                except BaseException as error:
                    self._link.send(self._frames.pack_one(NotStarted(portable(error))))
                    return
                self._link.send(self._frames.pack_one(ready))
                sender = threading.Thread(target=self._send, name="hybrid_jax-send", daemon=True)
                sender.start()
                ends.callback(sender.join)
                ends.callback(self._out.put, None)
                ends.enter_context(self._llm)  # which ends first, and may say so
                self._serve()
            except (EOFError, OSError):
                self._left()  # the caller has ended
            except WorkerLost as error:  # what came cannot be read
                self._say(Ended(error))

    @contextmanager
    def _beating(self) -> Generator[None]:
        """Says each `BEAT` that it is there, until the thread that sends can do that."""
        over = threading.Event()

        def beat() -> None:
            try:
                while not over.wait(BEAT):
                    self._link.send(self._frames.pack_one(Alive()))
            except OSError:
                self._left()  # the caller has ended

        thread = threading.Thread(target=beat, name="hybrid_jax-beat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _start(self, start: Start) -> Ready:
        """Makes the `LLM`, and has its cache and its end told of."""
        if start.side == "prefill":
            self._hand_over = HandOver(ROOT, came=self._part_came, ended=self._promise_ended)
        self._llm = llm = self._make(start, self._hand_over)
        assert isinstance(llm._thread, EngineThread), "it has one replica"
        self._thread = llm._thread
        found: SimpleQueue[tuple[Ready, BaseException | None]] = SimpleQueue()
        begin = functools.partial(self._begin_telling, llm)
        self._thread.later(begin, lambda ready, error: found.put((ready, error)))
        ready, error = found.get()
        if error is not None:
            raise error
        return ready

    def _begin_telling(self, llm: LLM, loop: Loop) -> Ready:
        """In the engine's thread."""
        engine, costs = loop.engine, costs_of(loop.engine)
        self._compile_seconds = loop.compile_seconds
        if not engine.device.is_host:
            self._turn_seconds = lambda: loop.turn_seconds
        loop.on_end = lambda error: self._say(Ended(portable(error)))
        tell_cache(engine, lambda news: self._say(Cached(news)))
        return Ready(
            facts=loop.facts,
            costs=costs,
            digest=llm._digest(),
            weight_bytes=llm._weight_bytes,
            stored_dtype=llm._stored_dtype,
            compile_seconds=loop.compile_seconds(),
        )

    def _serve(self) -> None:
        while True:
            for message in self._frames.unpack(self._link.receive()):
                match message:
                    case Stop():
                        return
                    case Begin():
                        self._begin(message)
                    case Leave():
                        if (call := self._calls.pop(message.number, None)) is not None:
                            self._thread.leave(call)
                    case Do():
                        tell = functools.partial(self._answered, message.number)
                        self._thread.later(message.call, tell)
                    case Ask():
                        self._asking.submit(self._ask, message)
                    case Promise():
                        self._hand_over.promise(message.tokens, message.position)
                    case TakeBack():
                        self._hand_over.take_back(message.name)
                    case PartCame():
                        found = self._link.disclose(message.found)
                        self._fetching.submit(self._take_part, message.name, found)
                    case PromiseEnded():  # after its parts
                        promise = self._hand_over.known(message.name)
                        if message.state == "failed":
                            self._hand_over.fail(message.name)
                        elif promise is not None:
                            end = message.name, message.state, promise
                            self._fetching.submit(self._hand_over.end, *end)
                    case Compute():
                        told = functools.partial(self._computed, message)
                        self._thread.compute_prefix(message.request, message.promise, told)
                    case Drop():
                        self._thread.drop_prefix(message.request_id)
                    case _:
                        raise AssertionError(message)

    def _begin(self, begin: Begin) -> None:
        """Has a call computed. Its prompts were checked where they came from."""
        try:
            jobs = [self._job(order) for order in begin.orders]
        except Exception as error:
            self._say(Told(begin.number, error=portable(error)))
            return
        forget = functools.partial(self._calls.pop, begin.number, None)
        whole = self._wholes.setdefault(begin.whole, Whole())
        whole.begun |= begin.begun
        peak = lambda: self._llm.peak_memory_bytes
        call = SentCall(begin, jobs, whole, self._say, peak, forget)
        self._calls[begin.number] = call
        self._thread.begin([call])

    def _job(self, order: Order) -> Job:
        job = self._llm._intake.ordered(
            order.prompt,
            order.params,
            request_id=order.request_id,
            index=order.place,
            seed=order.seed,
            stop_ids=order.stop_ids,
            max_tokens=order.max_tokens,
            logprobs_from=order.logprobs_from,
            pooling=order.pooling,
            reads_only=order.reads_only,
        )
        for completion, progress in zip(job.completions, order.done, strict=True):
            completion.go_on(progress)
        return job

    def _take_part(self, name: str, found: Any) -> None:
        """Keeps a part. One that is damaged or has no room is as one that never came: the prefix is computed here."""
        try:
            part = part_of_bytes(np.frombuffer(self._link.read(found), np.uint8), name)
            self._hand_over.folder.put(name, part)
        except Exception as error:
            expected = isinstance(error, Damaged | OSError | MemoryError)
            LOG.warning(
                "a part of a prompt that was computed elsewhere is left out: %s",
                error if expected else repr(error),
            )

    def _computed(self, compute: Compute, error: BaseException | None) -> None:
        """What was to come of a prompt is on its way, or will not come."""
        if error is not None:
            self._hand_over.fail(compute.promise)
        self._say(Computed(compute.request.request_id))

    def _part_came(self, name: str, part: Part) -> None:
        """In the thread that copies: a part is there. Only its name is of use here from now on."""
        found = self._link.store(part_to_bytes(part))
        self._say(PartCame(name, self._link.enclose(found)))
        part.arrays.clear()

    def _promise_ended(self, name: str, state: str) -> None:
        self._say(PromiseEnded(name, state))

    def _ask(self, ask: Ask) -> None:
        """In a thread of the pool."""
        try:
            self._answered(ask.number, self._thread.ask(named(ask.question), *ask.args), None)
        except BaseException as error:
            self._answered(ask.number, None, error)

    def _answered(self, number: int, answer: Any, error: BaseException | None) -> None:
        self._say(Answered(number, answer, None if error is None else portable(error)))

    def _say(self, message: Any) -> None:
        self._out.put(message)

    @staticmethod
    def _travelling(message: Any) -> bytes:
        try:
            return as_bytes(message)
        except Exception as error:
            if not isinstance(message, Answered):
                raise
            return as_bytes(message._replace(answer=None, error=portable(error)))

    def _send(self) -> None:
        """Sends what is put on its way, until the end or until nobody listens any more."""
        try:
            self._send_all()
        except OSError:
            pass
        except BaseException as error:  # a bug here; the caller must not wait for ever
            self._link.send(self._frames.pack_one(Ended(portable(error))))

    def _waiting(self) -> list[Any]:
        """The next messages: all that are there, and if nobody waits for them, those that come in the next moment."""
        try:
            messages, begun = [self._out.get(timeout=BEAT)], time.monotonic()
        except Empty:
            return [Alive()]
        while True:
            for _ in range(self._out.qsize()):
                messages.append(self._out.get_nowait())
            left = begun + TOGETHER - time.monotonic()
            if left <= 0 or any(map(_is_urgent, messages)):
                return messages
            with suppress(Empty):
                messages.append(self._out.get(timeout=left))

    def _send_all(self) -> None:
        compiled = 0.0
        while True:
            messages = self._waiting()
            if (seconds := self._turn_seconds()) > TURN_LIMIT:
                raise RuntimeError(
                    f"its engine has been at one turn for {seconds:.0f} seconds: the card hangs"
                )
            over = None in messages  # an answer may come after it
            said = [self._travelling(message) for message in messages if message is not None]
            if (seconds := self._compile_seconds()) != compiled:
                compiled = seconds
                said.insert(0, as_bytes(Compiled(seconds)))
            self._link.send(self._frames.pack(said))
            if over:
                return
