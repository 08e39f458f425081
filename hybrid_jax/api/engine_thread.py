"""The thread that owns an engine. All other threads send it commands, and each call gets news through its own queue.

Threads share only two kinds of queues. They are written in C, so an interrupt cannot leave them half changed. Ctrl-C,
which Python hands to the main thread, therefore ends a wait and never falls into the engine's bookkeeping.
"""

from __future__ import annotations

import asyncio
import atexit
import copy
import functools
import os
import threading
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from concurrent.futures import Executor
from contextlib import closing, suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from hybrid_jax.api.completions import Completion, Job
from hybrid_jax.api.outputs import Delta
from hybrid_jax.api.progress_bar import show_compiling
from hybrid_jax.api.questions import Answer, EngineFacts, Question, facts
from hybrid_jax.process.ending import wait_for

if TYPE_CHECKING:
    from hybrid_jax.engine.engine import Engine

CLOSED = "LLM: this object was closed; make a new one"
MAX_WAITING = (
    16_384  # streams for `async for` without a token; nothing else limits how many there are
)
# The one that made an engine's thread, and with it jax's own threads.
_first_process: int | None = None
# Threads of dropped objects that still hold memory. The set belongs to the process, as the memory does.
_ending: set[threading.Thread] = set()


@dataclass(frozen=True, kw_only=True)
class News:
    """What one turn of the engine brought one call.

    Attributes:
        deltas: what its stream will yield.
        num_finished: prompts that are done.
        over: nothing more will come.
        error: why the call ended before its prompts were done; None otherwise.
    """

    deltas: Sequence[Delta] = ()
    num_finished: int = 0
    over: bool = False
    error: BaseException | None = None


class Call:
    """Prompts that came together. After `EngineThread.submit` only the engine's thread writes to it.

    Args:
        jobs: its prompts.
        send: called with its news in the engine's thread. It must not block, and raises if the caller can no longer be
            reached. None for a queue of its own.
        streams: it gets news, with deltas, after every turn that brought it tokens. Other calls get news only after
            turns that finished a prompt.
        stepped: the engine takes no turn for it unasked; its caller asks with `EngineThread.turn`.
        keeps_errors: an error of one prompt ends that prompt alone, and stays with its job.

    Attributes:
        num_finished: prompts that are done.
        over: nothing more will come. The other attributes are then final.
        error: why it ended before its prompts were done.
        engine_failed: the engine failed, not the prompts of this call.
        has_shown_text: its stream has yielded something.
    """

    def __init__(
        self,
        jobs: list[Job],
        *,
        send: Callable[[News], None] | None = None,
        streams: bool = False,
        stepped: bool = False,
        keeps_errors: bool = False,
    ) -> None:
        self.news: SimpleQueue[News] = SimpleQueue()
        self.jobs, self.streams, self.stepped = jobs, streams, stepped
        self.keeps_errors = keeps_errors
        self._send = send or self.news.put
        self.num_finished, self.over = 0, False
        self._num_told = 0  # of the finished prompts
        self.error: BaseException | None = None
        self.engine_failed = False
        self.has_shown_text = False

    def tell(self, deltas: Sequence[Delta]) -> None:
        """Sends what a turn brought, if the caller wants to know. Raises if the caller cannot be reached."""
        self.over = self.num_finished == len(self.jobs)
        if self.over or self.streams or self.num_finished != self._num_told:
            self._num_told = self.num_finished
            self.has_shown_text = self.has_shown_text or bool(deltas)
            self._send(News(deltas=deltas, num_finished=self.num_finished, over=self.over))

    def fail(self, error: BaseException, *, engine_failed: bool = False) -> None:
        """Ends it with an error."""
        self.error, self.engine_failed = error, engine_failed
        self.over = True  # last, because a feed reads it in its own thread
        with suppress(Exception):  # the caller cannot be reached
            self._send(News(num_finished=self.num_finished, over=True, error=error))


@dataclass(frozen=True)
class Command:
    """What the engine's thread should do between two turns. If it fails or the thread has ended, `cancel` is called."""

    do: Callable[[], object]
    cancel: Callable[[BaseException], object] = lambda error: None


class EngineThread:
    """An engine in a thread of its own, as the threads that use it see it.

    The thread ends with `close`, with this object, or with the program.

    Args:
        engine: used only by the thread from now on.
        record: called there with each prompt that has ended, or was given up after its first token. It must not hold a
            reference to this object, which could then never be dropped.
        quiet: what is compiled is said in a bar only.

    Attributes:
        closed: `close` was called.
    """

    def __init__(
        self, engine: Engine, *, record: Callable[[Job], None], quiet: bool = False
    ) -> None:
        global _first_process
        _first_process = _first_process or os.getpid()
        self._loop, self._pid, self.closed = _Loop(engine, record, quiet), os.getpid(), False
        self._facts = facts.answer(engine)
        self._waiting: set[Call] = set()  # calls of `adeltas` without a token
        self._thread = threading.Thread(target=self._loop.run, name="hybrid_jax", daemon=True)
        self._thread.start()
        # The garbage collector may drop this object in any thread, so that must not wait.
        weakref.finalize(self, _drop, self._loop, self._thread).atexit = False
        # What is registered later runs earlier: before jax closes its devices.
        self._loop.at_exit = functools.partial(_join_at_exit, self._loop, self._thread)
        atexit.register(self._loop.at_exit)

    @property
    def facts(self) -> EngineFacts:
        """What never changes about the engine. For anything else use `ask`."""
        self.check()
        return self._facts

    def check(self) -> None:
        """RuntimeError if nothing can run: after `close`, and in a fork of the process that made this object."""
        if self.closed:
            raise RuntimeError(CLOSED)
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"LLM: made in process {self._pid}, of which this one ({os.getpid()}) is a fork: it has neither the "
                "engine's thread nor its device; start workers by multiprocessing.get_context('spawn') and make the "
                "LLM inside them"
            )

    def _check_caller(self) -> None:
        """As `check`. Also RuntimeError in the engine's own thread."""
        self.check()
        if threading.current_thread() is self._thread:
            raise RuntimeError(
                "LLM: called in the engine's own thread, where it would wait for itself: the garbage collector ran a "
                "__del__, or the finally of a generator, that calls the LLM; close such objects yourself"
            )

    def submit(self, calls: Sequence[Call]) -> None:
        """Starts calls together, before the engine's next turn. Each must be ended with `leave`, whatever happens."""
        self._check_caller()
        compile_s = self._loop.engine.compile_seconds()
        for call in calls:
            for job in call.jobs:
                job.arrive(compile_s)

        def cancel(error: BaseException) -> None:
            for call in calls:
                call.fail(error)

        self._loop.give(Command(functools.partial(self._loop.start, calls), cancel))

    def leave(self, call: Call) -> None:
        """Ends a call unless it is over. Returns at once, so any thread may do it at any time."""
        if not call.over:
            self._loop.give(Command(functools.partial(self._loop.end_call, call)))

    def ask(self, question: Question[Answer], *args: Any) -> Answer:
        """Has the engine answer a question, between two turns unless that is not needed; see `api.questions`.

        Returns or raises what the question does.
        """
        if not isinstance(question, Question):
            raise TypeError(f"ask: takes a question of api.questions, got {question!r}")
        if question.at_once:
            self.check()
            return question.answer(self._loop.engine, *args)
        return self._do(functools.partial(question.answer, self._loop.engine, *args))

    def _do(self, call: Callable[[], Answer]) -> Answer:
        """Has the engine's thread make a call between two turns; returns or raises what it does."""
        self._check_caller()
        answers: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        do = lambda: answers.put((call(), None))
        self._loop.give(Command(do, lambda error: answers.put((None, error))))
        answer, error = answers.get()
        if error is not None:
            raise own_error(error)
        return answer

    def turn(self) -> None:
        """Has the engine take one turn, for calls that are `stepped`, and waits for it."""
        self._do(self._loop.turn)

    def settle(self) -> None:
        """Has the engine end what nobody waits for, so that its counters and its cache are up to date."""
        self._do(self._loop.settle)

    def run(self, call: Call) -> Generator[News, None, None]:
        """Runs a call and yields its news. Closing the generator ends the call.

        Raises:
            RuntimeError: the LLM was closed. Any other error that ended the call before its prompts were done.
        """
        try:
            self.submit([call])
            while True:
                self.check()
                news = call.news.get()
                if news.error is not None:
                    raise own_error(news.error)
                yield news
                if news.over:
                    return
        finally:
            self.leave(call)

    def deltas(self, jobs: list[Job]) -> Generator[Delta, None, None]:
        """Runs prompts and yields their deltas as they come. Closing the generator ends the prompts."""
        with closing(self.run(Call(jobs, streams=True))) as all_news:
            for news in all_news:
                for delta in news.deltas:
                    self.check()
                    yield delta

    async def adeltas(
        self, make: Callable[[], list[Job]], pool: Executor | None
    ) -> AsyncGenerator[Delta, None]:
        """`deltas` for `async for`. Other tasks go on while `make` makes the jobs in a thread of the pool.

        Raises:
            RuntimeError: as `deltas`, or too many other calls wait for their first token.
        """
        self.check()
        if len(self._waiting) >= MAX_WAITING:
            raise RuntimeError(
                f"LLM: {len(self._waiting)} streams wait for their first token, the most that may; begin more once "
                "some of them have one, as an asyncio.Semaphore does"
            )
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[News] = asyncio.Queue()

        def send(news: News) -> None:
            loop.call_soon_threadsafe(arrived.put_nowait, news)

        call = Call([], send=send, streams=True)
        self._waiting.add(call)
        try:
            call.jobs = await loop.run_in_executor(pool, make)
            self.submit([call])
            while True:
                news = await arrived.get()
                self._waiting.discard(call)
                if news.error is not None:
                    raise own_error(news.error)
                for delta in news.deltas:
                    self.check()
                    yield delta
                if news.over:
                    return
        finally:
            self._waiting.discard(call)
            self.leave(call)

    def close(self, *, wait: bool = True) -> None:
        """Ends what still runs, closes the engine, and waits until that is done, or has it done soon."""
        self.closed = True
        if os.getpid() != self._pid:
            return
        if not wait:
            _drop(self._loop, self._thread)
            return
        self._loop.stop()
        if threading.current_thread() is not self._thread:
            self._thread.join()


def check_process() -> None:
    """RuntimeError in a fork of a process that has run an engine, because jax would wait there for ever."""
    if _first_process not in (None, os.getpid()):
        raise RuntimeError(
            f"LLM: this process ({os.getpid()}) is a fork of process {_first_process}, which has used an LLM, and jax "
            "does not work in a fork; start workers by multiprocessing.get_context('spawn')"
        )


def own_error(error: BaseException) -> BaseException:
    """A copy of an error, for each of several callers. A raised error holds the frames that it went through."""
    try:
        own = copy.copy(error)
    except Exception:  # it cannot be made of its arguments alone
        return error
    return own.with_traceback(error.__traceback__) if type(own) is type(error) else error


def _join_at_exit(loop: _Loop, thread: threading.Thread) -> None:
    """Ends the thread with the program, and waits for that."""
    loop.stop()
    wait_for([thread])


def _drop(loop: _Loop, thread: threading.Thread) -> None:
    """Has the thread of a dropped object end soon."""
    _ending.add(thread)
    loop.stop()


def wait_for_dropped(timeout: float) -> None:
    """Waits until dropped objects have freed their memory, at most `timeout` seconds."""
    deadline = time.monotonic() + timeout
    for thread in list(_ending):
        if thread is not threading.current_thread():
            thread.join(max(0.0, deadline - time.monotonic()))
        if not thread.is_alive():
            _ending.discard(thread)


class _Loop:
    """What the engine's thread runs: commands, then a turn of the engine, again and again."""

    def __init__(self, engine: Engine, record: Callable[[Job], None], quiet: bool) -> None:
        self.engine, self._record, self._quiet = engine, record, quiet
        self._commands: SimpleQueue[Command] = SimpleQueue()
        self._calls: dict[Call, None] = {}  # those that run
        self._live: dict[str, tuple[Call, Job, Completion]] = {}  # by the engine's request id
        # Requests that the engine may still hold, but nobody waits for.
        self._leaving: set[str] = set()
        self._stopping = False
        # The error for calls that come after the thread has ended.
        self._ended: BaseException | None = None
        self._stuck = False  # the last turn failed while no call was waiting
        # Ends the thread at the end of the program.
        self.at_exit: Callable[[], object] = lambda: None
        engine.watch_compiling(self._compiling)

    # --- for other threads ------------------------------------------------------------------------

    def give(self, command: Command) -> None:
        """Has a command done after those before it. Any thread may call this, and even from within a call of it."""
        self._commands.put(command)
        if self._ended is not None:  # the thread may not have seen it
            self._cancel_commands(self._ended)

    def stop(self) -> None:
        """Ends the thread after the current turn."""
        self._stopping = True
        self.give(Command(lambda: None))  # the thread may be waiting for one

    # --- the thread -------------------------------------------------------------------------------

    def run(self) -> None:
        """Runs until `stop` is called."""
        with self.engine.own_settings():
            self._run()

    def _run(self) -> None:
        error: BaseException = RuntimeError(CLOSED)
        try:
            while True:
                self._do_commands()
                if self._stopping:
                    break
                if self._goes_on:
                    self.turn()
        except BaseException as mistake:  # a bug here; callers must not wait for ever
            error = mistake
        self._ended = error
        for call in list(self._calls):
            call.fail(error, engine_failed=True)
        self._calls.clear()
        self._live.clear()
        self._cancel_commands(error)
        self.engine.close()
        atexit.unregister(self.at_exit)

    @property
    def _goes_on(self) -> bool:
        """Whether to take a turn unasked: for a call that is not stepped, or to end what nobody waits for."""
        if self._stuck:
            return False
        if self._calls:
            return not all(call.stepped for call in self._calls)
        return self.engine.has_work or self.engine.has_saves

    def _do_commands(self) -> None:
        """Does the commands that are there. Waits for one if there is nothing else to do.

        Commands that come meanwhile wait until after the next turn, so they cannot keep the engine from its turns.
        """
        if not self._goes_on:
            self._do(self._commands.get())
            self._stuck = False
        for _ in range(self._commands.qsize()):
            self._do(self._commands.get_nowait())

    def _do(self, command: Command) -> None:
        try:
            command.do()
        except BaseException as error:  # it concerns only what the command was about
            command.cancel(error)

    def _cancel_commands(self, error: BaseException) -> None:
        with suppress(Empty):
            while True:
                self._commands.get_nowait().cancel(error)

    def turn(self) -> None:
        """Takes one turn of the engine, and hands what it brought to the callers."""
        try:
            self._let_go()
            if not (self.engine.has_work or self.engine.has_saves):
                if self._calls:
                    raise RuntimeError("LLM: the engine is idle while requests are unfinished")
                return
            results = self.engine.step()
        except BaseException as error:
            self._fail_turn(error)
            return
        now = time.perf_counter()
        news: dict[Call, list[Delta]] = {}
        for result in results:
            entry = self._live.get(result.request.request_id)
            if entry is None:  # it ended at a stop string, or its caller has left
                continue
            call, job, completion = entry
            deltas = news.setdefault(call, [])
            try:
                self._hand_on(call, job, completion, deltas, now)
            except FloatingPointError as error:
                text = f"prompt {job.index}: {error}; {self.engine.where_damaged()}"
                self._fail_prompt(call, job, FloatingPointError(text))
            except BaseException as error:  # its tokens cannot become text
                self._fail_prompt(call, job, error)
            if call.over:
                news.pop(call, None)
        try:
            self._let_go()  # first, so that a prompt that goes on from there finds what was computed
        except BaseException as error:
            self._fail_turn(error)
        for call, deltas in news.items():
            if not call.over:
                self._tell(call, deltas)

    def _hand_on(
        self, call: Call, job: Job, completion: Completion, deltas: list[Delta], now: float
    ) -> None:
        delta = job.take(completion, now, self.engine, streamed=call.streams)
        if delta is not None:
            deltas.append(delta)
        if completion.finish_reason is None:
            return
        request = completion.request
        del self._live[request.request_id]
        # It may have ended at a stop string, of which the engine knows nothing.
        if request.output.finish_reason is None:
            self._leaving.add(request.request_id)
        if job.finished:
            call.num_finished += 1
            self._record(job)

    def _fail_prompt(self, call: Call, job: Job, error: BaseException) -> None:
        """Ends a prompt with an error. That concerns its call, unless that keeps errors, and no other call."""
        if not call.keeps_errors:
            self.end_call(call, error)
            return
        self._let_leave(job)
        job.error = error
        call.num_finished += 1

    def _let_leave(self, job: Job) -> None:
        """Has the engine end what it still computes for a prompt that nobody waits for."""
        for completion in job.completions:
            if self._live.pop(completion.request.request_id, None) is not None:
                self._leaving.add(completion.request.request_id)
        if job.first_token_time is not None and job.num_unfinished and job.error is None:
            self._record(job)

    def _tell(self, call: Call, deltas: list[Delta]) -> None:
        if call.num_finished == len(call.jobs):
            self._calls.pop(call, None)
        try:
            call.tell(deltas)
        except Exception:  # its event loop is closed
            self.end_call(call)

    def _fail_turn(self, error: BaseException) -> None:
        """A turn failed, and device memory is lost. Which request caused it cannot be known.

        Most likely it was a new kind of request, which met a program or a size of its own. So calls without a token are
        ended, and the others start again from the tokens they have. If all calls have tokens, all are ended.
        """
        if not self._calls:
            # The next call ends what is left, and gets the error if that fails.
            self._stuck = True
            return
        new = [c for c in self._calls if all(job.first_token_time is None for job in c.jobs)]
        for call in new or list(self._calls):
            self.end_call(call, error, engine_failed=True)

    def _let_go(self) -> None:
        """Takes requests that nobody waits for out of the engine."""
        while self._leaving:
            request_id = next(iter(self._leaving))
            self.engine.abort(request_id)
            self._leaving.discard(request_id)

    # --- commands ---------------------------------------------------------------------------------

    def start(self, calls: Sequence[Call]) -> None:
        """Gives the prompts of calls to the engine, those of each call in the order of the tree of their prefixes."""
        for call in calls:
            if call.over or call in self._calls:  # after Ctrl-C its caller may submit it again
                continue
            self._calls[call] = None
            try:
                self._let_go()
                self._add(call)
            except BaseException as error:
                lost = isinstance(error, RuntimeError | MemoryError)  # how a device reports it
                self.end_call(call, error, engine_failed=lost)
            else:
                if call.num_finished == len(call.jobs):
                    self._tell(call, [])

    def _add(self, call: Call) -> None:
        order = self.engine.order([job.completions[0].request.prompt for job in call.jobs])
        for job in (call.jobs[index] for index in order):
            try:
                for completion in job.completions:
                    self._live[completion.request.request_id] = call, job, completion
                    self.engine.add(completion.request)
            except ValueError as error:
                own = ValueError(f"prompt {job.index}: {error}")
                if not call.keeps_errors:
                    raise own from error
                self._fail_prompt(call, job, own)

    def end_call(
        self, call: Call, error: BaseException | None = None, *, engine_failed: bool = False
    ) -> None:
        """Takes the prompts of a call out of the engine, unless it is over. With an error, the caller is told."""
        if call.over:
            return
        self._calls.pop(call, None)
        for job in call.jobs:
            self._let_leave(job)
        if error is None:
            call.over = True
        else:
            call.fail(error, engine_failed=engine_failed)

    def settle(self) -> None:
        """As `EngineThread.settle`."""
        self._let_go()
        while not self._calls and self.engine.has_work:
            self.engine.step()

    def _compiling(self, what: str, count: Callable[[], tuple[int, int]] | None) -> None:
        """Shows which program is compiled, but not in the middle of a line that a stream is writing.

        Raises:
            RuntimeError: the thread is to end, so nothing more should be compiled for calls. What copies prefixes to
                the disk is compiled still.
        """
        if count is not None and self._stopping and self._calls:
            raise RuntimeError(CLOSED)
        if count is None or not any(call.has_shown_text for call in self._calls):
            kept = self.engine.keeps_programs
            show_compiling(what, count, kept=kept, quiet=self._quiet)
