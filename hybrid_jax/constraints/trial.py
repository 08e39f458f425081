"""Tries grammars in a process of its own before they are compiled here. The process runs `trial_worker.py`.

Nothing in Python bounds what native code does once it is called: it cannot be interrupted, it may take all memory, and
if its stack overflows, the process ends. Threads share all of that, so only another process helps.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hybrid_jax.constraints import trial_worker
from hybrid_jax.constraints.trial_worker import read_frame, write_frame

LOG = logging.getLogger("hybrid_jax.requests")
SECONDS = 3  # of processor time for a grammar, its walks included
DEADLINE = 60.0  # seconds by the clock, where processor time is not limited or the process waits for something
MEMORY_BYTES = 1 << 30  # for a grammar, beside what the vocabulary takes
VERDICTS_KEPT = 4096
# What a grammar does to its process. Another signal came from outside.
ITS_OWN_SIGNALS = ("SIGSEGV", "SIGBUS", "SIGABRT", "SIGILL", "SIGFPE", "SIGXCPU", "SIGTRAP")
SMALLER = "lower its counts, or leave out alternatives"  # what helps a form that costs too much
TOO_LATE, EXIT = "the deadline", "exit code"  # how else a process ends

Process = Any  # a subprocess.Popen whose pipes are there


class NoTrial(Exception):
    """No process can be started here. The message says why."""


def _nobody() -> Trial | None:
    """A vocabulary that is not there."""
    return None


class Worker:
    """The process that runs `trial_worker.py`. Threads may share it.

    It is started when it is needed, and again if a grammar ended it. One is enough for all vocabularies of a program:
    it holds the one that was used last.
    """

    def __init__(self) -> None:
        self._one_at_a_time = threading.Lock()
        self._process: Process | None = None
        self._pid = os.getpid()
        # Calling it gives the vocabulary that the process holds, or reads unless it is ready.
        self._vocabulary: Callable[[], Trial | None] = _nobody
        self._ready = False
        self._missing: str | None = None  # why there is no process and will be none
        self._users: weakref.WeakSet[Trial] = weakref.WeakSet()

    def start(self, vocabulary: Trial) -> None:
        """Has the process read a vocabulary, and does not wait for that.

        Raises:
            NoTrial: there is no process.
        """
        with self._one_at_a_time:
            self._users.add(vocabulary)
            self._running(vocabulary)

    def ask(self, vocabulary: Trial, source: bytes) -> str | None:
        """Why a grammar must not be compiled; None if it may be.

        Raises:
            NoTrial: there is no process.
        """
        with self._one_at_a_time:
            self._users.add(vocabulary)
            for _ in range(2):
                answer, how = self._asked(vocabulary, source)
                if answer is not None:
                    return json.loads(answer)
                if how in (*ITS_OWN_SIGNALS, TOO_LATE):
                    break
            return _what_happened(how)

    def leave(self, vocabulary: Trial) -> None:
        """Ends the process unless it is needed."""
        self._users.discard(vocabulary)
        if not self._users and self._one_at_a_time.acquire(blocking=False):
            try:
                self._stop()
            finally:
                self._one_at_a_time.release()

    def _asked(self, vocabulary: Trial, source: bytes) -> tuple[bytes | None, str]:
        """The answer of the process, or None and how it ended."""
        process, answer = self._running(vocabulary), None
        try:
            with _deadline(process) as too_late, suppress(OSError):  # it has ended
                self._ready = self._ready or read_frame(process.stdout) is not None
                if self._ready:
                    _write(process, b"{}", source)
                    answer = read_frame(process.stdout)
        except BaseException:
            # An interrupt: the answer would be taken for the one to the next grammar.
            self._stop()
            raise
        if answer is not None:
            return answer, ""
        was_ready = self._ready
        self._stop()
        how = TOO_LATE if too_late.is_set() else _how(process.returncode)
        if not was_ready and how.startswith(EXIT):
            raise self._never(f"the process that would try them ended with {how}")
        return None, how

    def _running(self, vocabulary: Trial) -> Process:
        """The process with a vocabulary, which it may still be reading."""
        if self._missing is not None:
            raise NoTrial(self._missing)
        if self._pid != os.getpid():
            # A fork: the process belongs to the one that it was forked from.
            self._process, self._pid = None, os.getpid()
        is_other = self._vocabulary() is not vocabulary
        if self._process is not None and (
            self._process.poll() is not None or (is_other and not self._ready)
        ):
            self._stop()
        try:
            if self._process is None:
                self._process, is_other = _started(vocabulary.folder), True
            if is_other:
                self._ready, self._vocabulary = False, weakref.ref(vocabulary)
                # If it has ended, that shows when it is read from.
                with _deadline(self._process), suppress(BrokenPipeError):
                    _write(self._process, vocabulary.settings, vocabulary.tokenizer)
        except (OSError, ValueError) as error:
            self._stop()
            raise self._never(str(error)) from error
        except BaseException:
            self._stop()
            raise
        return self._process

    def _never(self, why: str) -> NoTrial:
        """Notes that there will be no process."""
        self._missing = why
        LOG.warning("forms are compiled without a trial, and must be smaller: %s", why)
        return NoTrial(why)

    def _stop(self) -> None:
        process, self._process, self._vocabulary = self._process, None, _nobody
        self._ready = False
        if process is not None and self._pid == os.getpid():
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with suppress(OSError):  # what was not written is lost
                    pipe.close()

    def stop(self) -> None:
        """Ends the process, at the end of the program."""
        if self._one_at_a_time.acquire(timeout=1.0):
            self._stop()


# The process belongs to this one, as its memory does.
_worker = Worker()
atexit.register(_worker.stop)


class Trial:
    """Says whether grammars can be compiled for a vocabulary. Threads may share it.

    Args:
        library: llguidance.
        tokenizer: the text of a tokenizer.json.
        vocab_size: of the vocabulary that llguidance makes of it.
        end: the token that ends a text.
        limits: arguments of llguidance's `LLParserLimits`.
    """

    def __init__(
        self,
        library: Any,
        tokenizer: str,
        *,
        vocab_size: int,
        end: int,
        limits: Mapping[str, int | bool],
    ) -> None:
        settings = {"vocab_size": vocab_size, "end": end, "limits": dict(limits)}
        settings |= {"memory_bytes": MEMORY_BYTES, "seconds": SECONDS}
        self.settings, self.tokenizer = json.dumps(settings).encode(), tokenizer.encode()
        self.folder = str(Path(library.__file__).resolve().parent.parent)
        self._worker = _worker
        self._verdicts: OrderedDict[bytes, str | None] = OrderedDict()
        self._looking = threading.Lock()

    def start(self) -> None:
        """Has the process read the vocabulary while others go on. Without it the first grammar waits for that.

        Raises:
            NoTrial: there is no process.
        """
        self._worker.start(self)

    def refusal(self, source: str) -> str | None:
        """Why a grammar must not be compiled here; None if it may be. Both answers are kept.

        Args:
            source: in llguidance's own notation.

        Raises:
            NoTrial: there is no process.
        """
        data = source.encode()
        digest = hashlib.sha256(data).digest()
        with self._looking:
            if digest in self._verdicts:
                self._verdicts.move_to_end(digest)
                return self._verdicts[digest]
        verdict = self._worker.ask(self, data)
        with self._looking:
            self._verdicts[digest] = verdict
            while len(self._verdicts) > VERDICTS_KEPT:
                self._verdicts.popitem(last=False)
        return verdict

    def close(self) -> None:
        """Says that no more grammars will come."""
        self._worker.leave(self)


def _started(folder: str) -> Process:
    """A new process of the worker, which finds llguidance in a folder. OSError or ValueError if there can be none."""
    program = Path(sys.executable or "").name
    if getattr(sys, "frozen", False) or not program.startswith(("python", "pypy")):
        raise ValueError(f"sys.executable is {sys.executable!r}, which is no Python")
    # Alone in a session of its own it gets no Ctrl-C. -I and -S keep out what the user's Python loads at its start.
    command = [sys.executable, "-I", "-S", trial_worker.__file__, folder]
    # One arena and no threads, so that the limit of memory is about what the grammar takes.
    settings = {"MALLOC_ARENA_MAX": "1", "RAYON_NUM_THREADS": "1"}
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | settings,
        start_new_session=True,
    )


@contextmanager
def _deadline(process: Process) -> Iterator[threading.Event]:
    """Ends a process that needs too long for what is in the block; the event tells whether it did."""
    too_late = threading.Event()

    def end() -> None:
        too_late.set()
        process.kill()

    clock = threading.Timer(DEADLINE, end)
    clock.daemon = True
    clock.start()
    try:
        yield too_late
    finally:
        clock.cancel()


def _write(process: Process, head: bytes, body: bytes) -> None:
    write_frame(process.stdin, head)
    write_frame(process.stdin, body)


def _how(returncode: int) -> str:
    """The name of the signal that ended a process, or its exit code in words."""
    try:
        return signal.Signals(-returncode).name
    except ValueError:
        return f"{EXIT} {returncode}"


def _what_happened(how: str) -> str:
    if how == "SIGXCPU":
        return f"compiling it takes more than {SECONDS} seconds; {SMALLER}"
    if how == TOO_LATE:
        return f"compiling it takes more than {DEADLINE:.0f} seconds; {SMALLER}"
    if how == "SIGABRT":
        return f"compiling it takes more than {MEMORY_BYTES >> 20} MiB, or fails inside llguidance; {SMALLER}"
    if how == "SIGKILL":
        return f"compiling it takes the memory of the whole system; {SMALLER}"
    return f"compiling it ends llguidance's process with {how}, as when too much is nested in it; nest less"
