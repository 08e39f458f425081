"""What the thread of an engine runs: the commands of other threads, and the engine's turns."""

from __future__ import annotations

import atexit
import functools
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hybrid_jax.api.completions import Completion, Job
from hybrid_jax.api.outputs import Delta
from hybrid_jax.api.progress_bar import show_compiling
from hybrid_jax.api.threads.call_loop import CallLoop
from hybrid_jax.api.threads.calls import CLOSED, Call
from hybrid_jax.api.threads.commands import Command
from hybrid_jax.api.threads.questions import Answer, EngineFacts, Question, facts
from hybrid_jax.schedule.request import Request
from hybrid_jax.tiers.hand_over import Sender

if TYPE_CHECKING:
    from hybrid_jax.engine.engine import Engine


class Loop(CallLoop):
    """What the engine's thread runs: commands, then a turn of the engine, again and again.

    Args:
        engine: used only by the thread from now on.
        record: as in `CallLoop`.
        quiet: what is compiled is said in a bar only.
    """

    def __init__(
        self, engine: Engine, *, record: Callable[[Job], None], quiet: bool = False
    ) -> None:
        super().__init__(record)
        self.engine, self._quiet = engine, quiet
        self._calls: dict[Call, None] = {}  # those that run
        self._live: dict[str, tuple[Call, Job, Completion]] = {}  # by the engine's request id
        # Requests that the engine may still hold, but nobody waits for.
        self._leaving: set[str] = set()
        self._stuck = False  # the last turn failed while no call was waiting
        # What is computed for other engines: what is told when it ends, by the engine's request id.
        self._prefixes: dict[str, Callable[[], None]] = {}
        # Those of them that ended, whose copies may not be made yet.
        self._computed: list[Callable[[], None]] = []
        # When the current turn began, or the last compiling in it; None between turns. Read by other threads.
        self._since: float | None = None
        engine.watch_compiling(self._compiling)

    @property
    def facts(self) -> EngineFacts:
        """As `CallLoop.facts`."""
        return facts.answer(self.engine)

    def compile_seconds(self) -> float:
        """As `CallLoop.compile_seconds`."""
        return self.engine.compile_seconds()

    def peak_memory_bytes(self) -> int | None:
        """As `CallLoop.peak_memory_bytes`."""
        return self.engine.peak_memory_bytes()

    def later(
        self, call: Callable[[Loop], Answer], tell: Callable[[Any, BaseException | None], object]
    ) -> None:
        """Has the thread make a call between two turns, and tell what it returned or raised."""
        do = lambda: tell(call(self), None)
        self.give(Command(do, lambda error: tell(None, error), about=about_call(call)))

    def now(self, question: Question[Answer], args: Sequence[Any]) -> Answer:
        """Answers at once, in whatever thread."""
        return question.answer(self.engine, *args)

    def discard(self) -> None:
        """As `CallLoop.discard`."""
        self.engine.close()

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
                if self._is_over:
                    break
                if self._goes_on:
                    self.turn()
        except BaseException as mistake:  # a bug here; callers must not wait for ever
            error = mistake
        self._give_prefixes_up()
        self.on_end(error)  # first, so that who is refused finds what it brought about
        self._ended = error
        for call in list(self._calls):
            call.lost(error)
        self._calls.clear()
        self._live.clear()
        self._cancel_commands(error)
        self.engine.close()
        atexit.unregister(self.at_exit)

    @property
    def _is_over(self) -> bool:
        """Whether to end now."""
        return self._stopping

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

    def turn(self) -> None:
        """Takes one turn of the engine, and hands what it brought to the callers."""
        try:
            self._let_go()
            if not (self.engine.has_work or self.engine.has_saves):
                self._tell_computed()
                if self._calls:
                    raise RuntimeError("LLM: the engine is idle while requests are unfinished")
                return
            self._since = time.monotonic()
            results = self.engine.step()
        except BaseException as error:
            self._fail_turn(error)
            return
        finally:
            self._since = None
        now = time.perf_counter()
        news: dict[Call, list[Delta]] = {}
        for result in results:
            request_id = result.request.request_id
            if result.finished and (told := self._prefixes.pop(request_id, None)):
                self._computed.append(told)
            entry = self._live.get(request_id)
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
        if self._computed and not self.engine.has_saves:
            self._tell_computed()

    @property
    def turn_seconds(self) -> float:
        """How long the current turn, or the last compiling in it, has gone on; any thread may ask."""
        since = self._since
        return 0.0 if since is None else time.monotonic() - since

    def _tell_computed(self) -> None:
        """Tells of prefixes whose copies were handed over, or that will never come."""
        told, self._computed = self._computed, []
        for tell in told:
            tell()

    def _hand_on(
        self, call: Call, job: Job, completion: Completion, deltas: list[Delta], now: float
    ) -> None:
        self._take(call, job, completion, deltas, now)
        if completion.finish_reason is None:
            return
        request = completion.request
        del self._live[request.request_id]
        # It may have ended at a stop string, of which the engine knows nothing.
        if request.output.finish_reason is None:
            self._leaving.add(request.request_id)
        if job.finished:
            self._finish(call, job)

    def _fail_prompt(self, call: Call, job: Job, error: BaseException) -> None:
        """Ends a prompt with an error. That concerns its call, unless that keeps errors, and no other call."""
        if not call.keeps_errors:
            self.end_call(call, error)
            return
        self._let_leave(job)
        self._give_up(call, job)
        job.error = error
        call.num_finished += 1

    def _let_leave(self, job: Job) -> None:
        """Has the engine end what it still computes for a prompt that nobody waits for."""
        for completion in job.completions:
            if self._live.pop(completion.request.request_id, None) is not None:
                self._leaving.add(completion.request.request_id)

    def _tell(self, call: Call, deltas: list[Delta]) -> None:
        if call.num_finished == len(call.jobs):
            self._calls.pop(call, None)
        if not call.reaches(deltas):
            self.end_call(call)

    def _fail_turn(self, error: BaseException) -> None:
        """A turn failed, and device memory is lost. Which request caused it cannot be known.

        Most likely it was a new kind of request, which met a program or a size of its own. So calls without a token are
        ended, and the others start again from the tokens they have. If all calls have tokens, those are ended that have
        none here; if all have some here, all are ended.
        """
        if self._stopping:
            return  # what ends all calls comes next
        had_prefixes = bool(self._prefixes)
        self._give_prefixes_up()
        if not self._calls:
            if had_prefixes:
                return
            # The next call ends what is left, and gets the error if that fails.
            self._stuck = True
            return
        new = [call for call in self._calls if not call.whole.begun]
        new = new or [call for call in self._calls if call.is_untouched]
        for call in new or list(self._calls):
            self.end_call(call, error, engine_failed=True)

    def _give_prefixes_up(self) -> None:
        """Nothing of what is computed for other engines will come."""
        self._leaving |= self._prefixes.keys()
        self._computed += self._prefixes.values()
        self._prefixes.clear()
        self._tell_computed()

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
        order = self.engine.order([job.prompt.token_ids for job in call.jobs])
        for job in (call.jobs[index] for index in order):
            try:
                for completion in job.unfinished:
                    self._live[completion.request.request_id] = call, job, completion
                    self.engine.add(completion.request)
            except ValueError as error:
                own = ValueError(f"prompt {job.index}: {error}")
                if not call.keeps_errors:
                    raise own from error
                self._fail_prompt(call, job, own)

    def compute_prefix(
        self, request: Request, promise: str, told: Callable[[BaseException | None], object]
    ) -> None:
        """As `CallLoop.compute_prefix`."""
        try:
            self._let_go()
            self.engine.add(request)
        except BaseException as error:
            told(error)
            return

        def ended() -> None:
            assert isinstance(self.engine.disk, Sender), self.engine.disk
            self.engine.disk.settle(promise)
            told(None)

        self._prefixes[request.request_id] = ended

    def drop_prefix(self, request_id: str) -> None:
        """Nobody waits for a prompt any more that is computed for another engine. Unknown ids are ignored."""
        if (told := self._prefixes.pop(request_id, None)) is not None:
            self._leaving.add(request_id)
            told()

    def _withdraw(self, call: Call) -> bool:
        """As `CallLoop._withdraw`."""
        had = call in self._calls
        self._calls.pop(call, None)
        for job in call.jobs:
            self._let_leave(job)
        return had

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
        if self._since is not None:
            self._since = time.monotonic()
        if count is None or not any(call.has_shown_text for call in self._calls):
            kept = self.engine.keeps_programs
            show_compiling(what, count, kept=kept, quiet=self._quiet)


def settled(loop: Loop) -> None:
    """As `Loop.settle`, of whatever loop it is. For `Loop.later`."""
    loop.settle()


def about_call(call: Callable[[Loop], Any]) -> Callable[[], str] | None:
    """As `Command.about`, of what `Loop.later` has called."""
    if call is Loop.turn:
        return lambda: "a turn"
    if isinstance(call, functools.partial) and call.func is Loop.now:
        question, args = call.keywords["question"], call.keywords["args"]
        if question.together:
            return lambda: f"{question.name}{_short(args)}"
    return None


def _short(args: Sequence[Any]) -> str:
    """Arguments of a question in words, each cut where it is long."""
    return f"({', '.join(repr(arg)[:80] for arg in args)})"
