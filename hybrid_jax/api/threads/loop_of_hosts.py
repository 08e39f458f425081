"""The loop of a model that several processes run together: they do the same commands between the same turns."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from hybrid_jax.api.completions import Job
from hybrid_jax.api.threads.commands import Command
from hybrid_jax.api.threads.loop import Loop
from hybrid_jax.mesh.hosts import Hosts, HostsDiffer

if TYPE_CHECKING:
    from hybrid_jax.engine.engine import Engine


class LoopOfHosts(Loop):
    """As `Loop`. Commands that change what the engine computes wait until every process has them.

    Args:
        hosts: these processes. The others are as in `Loop`.
    """

    def __init__(
        self, engine: Engine, hosts: Hosts, *, record: Callable[[Job], None], quiet: bool = False
    ) -> None:
        super().__init__(engine, record=record, quiet=quiet)
        self._hosts = hosts
        self._waiting: deque[Command] = deque()  # until all processes have them
        hosts.stops = lambda: self._breaks_off

    def run(self) -> None:
        """As `Loop.run`. The others are told when it has ended."""
        try:
            super().run()
        finally:
            with suppress(Exception):  # the others are gone
                self._hosts.end()

    @property
    def _breaks_off(self) -> bool:
        """Whether it is to end in the middle of calls, and leaves the others alone with them."""
        return self._stopping and bool(self._calls or self._waiting)

    @property
    def _is_over(self) -> bool:
        """Whether to end now: after the last call not before the turns to which the others may have come."""
        return self._stopping and (self._breaks_off or not self._goes_on)

    def _do_commands(self) -> None:
        """As of `Loop`. What concerns this process alone is done at once."""
        while True:
            idle = not (self._goes_on or self._waiting or self._stopping)
            for _ in range(max(self._commands.qsize(), idle)):
                command = self._commands.get()
                if command.about is None:
                    self._do(command)
                else:
                    self._waiting.append(command)
            self._forget_done()
            if self._goes_on or self._waiting or self._stopping:
                break
        if not self._is_over:
            self._do_together()

    def _forget_done(self) -> None:
        """Forgets commands of which nothing is left to do. What is left follows from the turns, so all agree on it."""
        self._waiting = deque(command for command in self._waiting if _words(command))

    def _do_together(self) -> None:
        """Does the commands that all processes have by now.

        Raises:
            HostsDiffer: they have others, or one has closed the model.
        """
        try:
            texts = self._hosts.exchange("calls", json.dumps([*map(_words, self._waiting)]))
        except InterruptedError:
            return
        lists = [json.loads(text) for text in texts]
        count = min(map(len, lists))
        for process, found in zip(self._hosts.processes, lists, strict=True):
            for first, other in zip(lists[0], found, strict=False):
                if other != first:
                    raise self._hosts.differ(first, process, other)
        for _ in range(count):
            self._stuck = False
            self._do(self._waiting.popleft())

    def _do(self, command: Command) -> None:
        try:
            command.do()
        except BaseException as error:
            command.cancel(error)
            if isinstance(error, HostsDiffer):  # it concerns all
                raise

    def settle(self) -> None:
        """As `Loop.settle`, by turns that the others take as well."""
        while not self._calls and self.engine.has_work:
            self._do_together()
            self.turn()

    def _fail_turn(self, error: BaseException) -> None:
        if isinstance(error, HostsDiffer):
            raise error
        super()._fail_turn(error)

    def _cancel_commands(self, error: BaseException) -> None:
        while self._waiting:
            self._waiting.popleft().cancel(error)
        super()._cancel_commands(error)


def _words(command: Command) -> str:
    return "" if command.about is None else command.about()
