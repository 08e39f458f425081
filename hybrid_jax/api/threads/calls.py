"""Prompts that came together, and their news.

Threads share only two kinds of queues. They are written in C, so an interrupt cannot leave them half changed. Ctrl-C,
which Python hands to the main thread, therefore ends a wait and never falls into the engine's bookkeeping.
"""

from __future__ import annotations

import copy
import itertools
import logging
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue

from hybrid_jax.api.completions import Completion, Job
from hybrid_jax.api.outputs import Delta

LOG = logging.getLogger("hybrid_jax.engine")
CLOSED = "LLM: this object was closed; make a new one"


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


_numbers = itertools.count()


class Whole:
    """What the parts of a call have in common.

    Attributes:
        number: no other has it in this process. begun: one of its prompts has a token.
    """

    def __init__(self) -> None:
        self.number, self.begun = next(_numbers), False


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
        whole: of it, and of others if it is a part.
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
        self.whole = Whole()

    def tell(self, deltas: Sequence[Delta]) -> None:
        """Sends what a turn brought, if the caller wants to know. Raises if the caller cannot be reached."""
        self.over = self.num_finished == len(self.jobs)
        if self.over or self.streams or self.num_finished != self._num_told:
            self._num_told = self.num_finished
            self.has_shown_text = self.has_shown_text or bool(deltas)
            self._send(News(deltas=deltas, num_finished=self.num_finished, over=self.over))

    def reaches(self, deltas: Sequence[Delta]) -> bool:
        """As `tell`; returns whether the caller can still be reached."""
        try:
            self.tell(deltas)
        except RuntimeError:  # its event loop is closed
            return False
        except Exception:
            LOG.exception("a call is ended, because its news cannot be told")
            return False
        return True

    @property
    def all_told(self) -> bool:
        """Whether the caller has been told of all prompts that are done."""
        return self._num_told == self.num_finished

    def took(self, job: Job, completion: Completion) -> None:
        """A completion has taken what is new about it."""

    def began(self, job: Job) -> None:
        """A prompt has its first token."""

    def ended(self, job: Job) -> None:
        """A prompt has ended, or its caller has left."""

    def lost(self, error: BaseException, *, engine_failed: bool = True) -> None:
        """The engine's thread has ended, and nothing more will come from it."""
        self.fail(error, engine_failed=engine_failed)

    @property
    def is_untouched(self) -> bool:
        """Whether nothing has come of it yet."""
        if self.over or self.num_finished:
            return False
        return all(job.first_token_time is None and job.error is None for job in self.jobs)

    def given_back(self) -> None:
        """The engine has it no longer, as was asked of it."""

    def kept(self) -> None:
        """The engine was asked to give it back, and has begun it."""

    def fail(self, error: BaseException, *, engine_failed: bool = False) -> None:
        """Ends it with an error."""
        self.error, self.engine_failed = error, engine_failed
        self.over = True  # last, because a feed reads it in its own thread
        with suppress(Exception):  # the caller cannot be reached
            self._send(News(num_finished=self.num_finished, over=True, error=error))


def own_error(error: BaseException) -> BaseException:
    """A copy of an error, for each of several callers. A raised error holds the frames that it went through."""
    try:
        own = copy.copy(error)
    except Exception:  # it cannot be made of its arguments alone
        return error
    return own.with_traceback(error.__traceback__) if type(own) is type(error) else error


def about_calls(calls: Sequence[Call]) -> str:
    """Calls in words, with a checksum of all that they ask for."""
    jobs = [job for call in calls for job in call.jobs]
    crc = 0
    for job in jobs:
        crc = zlib.crc32(repr((job.request_id, job.prompt.token_ids, job.params)).encode(), crc)
    return f"a call with {len(jobs)} prompt{'s' * (len(jobs) != 1)} [{crc:08x}]"
