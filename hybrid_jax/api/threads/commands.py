"""A loop that a thread runs, and the commands that other threads give it.

They go through a queue that is written in C, so an interrupt cannot leave it half changed, and whatever the garbage
collector runs may give a command, too.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue


@dataclass(frozen=True)
class Command:
    """What a loop should do between two turns. If it fails or the loop has ended, `cancel` is called.

    Attributes:
        about: what it is, in words, if it changes what the engine computes; "" once nothing is left to do. Processes
            that run a model together do such commands in the same order.
    """

    do: Callable[[], object]
    cancel: Callable[[BaseException], object] = lambda error: None
    about: Callable[[], str] | None = None


class CommandLoop:
    """Does commands one after the other. `run` of its subclasses is what the thread runs."""

    def __init__(self) -> None:
        self._commands: SimpleQueue[Command] = SimpleQueue()
        self._stopping = False
        # The error for commands that come after the thread has ended.
        self._ended: BaseException | None = None
        # Ends the thread at the end of the program.
        self.at_exit: Callable[[], object] = lambda: None

    def give(self, command: Command) -> None:
        """Has a command done after those before it. Any thread may call this, and even from within a call of it."""
        self._commands.put(command)
        if self._ended is not None:  # the thread may not have seen it
            self._cancel_commands(self._ended)

    def stop(self) -> None:
        """Ends the thread after the current turn."""
        self._stopping = True
        self.give(Command(lambda: None))  # the thread may be waiting for one

    def _do(self, command: Command) -> None:
        try:
            command.do()
        except BaseException as error:  # it concerns only what the command was about
            command.cancel(error)

    def _cancel_commands(self, error: BaseException) -> None:
        with suppress(Empty):
            while True:
                self._commands.get_nowait().cancel(error)
