"""Workers as processes of this machine: how they are started and ended."""

from __future__ import annotations

import os
import select
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

from hybrid_jax.api.workers.link import BEAT, SILENT, Link

ENDING = 10.0  # seconds that a worker has to end in after its caller has
FORCED = 60.0  # seconds that a caller waits for a worker to end, before it is killed
MODULE = "hybrid_jax.worker.program"  # that a worker runs
CARDS = "JAX_CUDA_VISIBLE_DEVICES"  # which cards jax may use, by their numbers


class PipeLink(Link):
    """A connection to another process.

    Args:
        connection: to it.
        process: at the other end; None in the worker.
        about: in words.
    """

    where = "processes of this machine"

    def __init__(
        self, connection: Connection, process: subprocess.Popen[bytes] | None, about: str
    ) -> None:
        self._connection, self._process, self.about = connection, process, about
        self._arrives = select.poll()
        self._arrives.register(connection.fileno(), select.POLLIN)

    def send(self, frame: bytes) -> None:
        """As `Link.send`."""
        self._connection.send_bytes(frame)

    def receive(self, within: float | None = None) -> bytes:
        """As `Link.receive`."""
        if within is not None and not self._arrives.poll(1000 * within):
            raise TimeoutError
        return self._connection.recv_bytes()

    def close(self) -> None:
        """As `Link.close`. What was sent is read before."""
        if self._process is not None:
            try:
                self._process.wait(FORCED)
            except subprocess.TimeoutExpired:
                self.kill()

    def kill(self) -> None:
        """As `Link.kill`."""
        if self._process is not None:
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):  # it hangs in its driver
                self._process.wait(ENDING)

    def why_lost(self) -> str:
        """How the process has ended."""
        if self._process is None:
            return super().why_lost()
        with suppress(subprocess.TimeoutExpired):
            code = self._process.wait(ENDING)
            if code < 0:
                return f"the process was ended by {signal.Signals(-code).name}"
            return f"the process has ended with exit code {code}"
        return "the process has closed its end"


def start_process(number: int, count: int, *, cards: Sequence[int]) -> PipeLink:
    """Starts a worker, whose standard output and errors are those of this process.

    Args:
        number: of this worker, from 0. count: of all on this machine, which share its processors.
        cards: which of the machine's GPUs it gets, if there are any.
    """
    ours, theirs = socket.socketpair()
    limit_waits(ours)
    command = [sys.executable, "-m", MODULE, str(theirs.fileno()), str(number), str(count)]
    process = subprocess.Popen(
        command,
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        env={**os.environ, **_own_cards(cards, os.environ), "PYTHONPATH": _python_path()},
        start_new_session=True,  # Ctrl-C in a terminal is for the caller alone
    )
    theirs.close()
    about = f"worker {number} (process {process.pid})"
    link = PipeLink(Connection(ours.detach()), process, about)
    link.sharing = count
    return link


def limit_waits(end: socket.socket) -> None:
    """Has `receive` wait no longer than a worker may be silent, if that stops in the middle of a frame."""
    seconds = struct.pack("ll", round(SILENT * BEAT), 0)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, seconds)


def _python_path() -> str:
    """Where the worker finds this package, and what the caller has added to the path by the environment."""
    own = str(Path(__file__).parents[3])
    given = os.environ.get("PYTHONPATH", "")
    return os.pathsep.join([own, *filter(None, given.split(os.pathsep))])


def _own_cards(cards: Sequence[int], environment: Mapping[str, str]) -> dict[str, str]:
    """Which cards jax may use in a worker, of those that the caller's jax may use."""
    given = environment.get(CARDS, "all")
    names = given.split(",")
    if given == "all":
        own = [str(card) for card in cards]
    else:
        own = [names[card] for card in cards if card < len(names)]
    return {CARDS: ",".join(own)}


def share_processors(number: int, count: int) -> None:
    """Leaves the other processors of this machine to the other workers."""
    if hasattr(os, "sched_setaffinity"):
        all_ = sorted(os.sched_getaffinity(0))
        share = all_[number * len(all_) // count : (number + 1) * len(all_) // count]
        os.sched_setaffinity(0, share or [all_[number % len(all_)]])
