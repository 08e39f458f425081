"""The processes that run one model together (`jax.distributed`). Each runs the same scheduler on the same requests.

A program with collectives waits until every process runs it, and for ever if one of them runs another program. So
before they run anything, the processes tell each other what, and stop with the difference if there is one.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax

# The key-value store of `jax.distributed` has no public name.
from jax._src import distributed

LOG = logging.getLogger("hybrid_jax.engine")
WAIT_MS = 500  # between two looks at whether to go on waiting
PATIENCE = 30.0  # seconds of waiting for another process before that is said
KEPT = 64  # rounds whose values are deleted together
PARTS = " | "  # between the parts of a text
_ENDED = "ended"
# How many groups there were of the same processes, which make them in the same order.
_made: Counter[str] = Counter()


class HostsDiffer(RuntimeError):
    """The processes that run a model together did not want the same."""


class Hosts:
    """Lets the processes that run a model together exchange short texts, in rounds.

    Args:
        processes: their indices, as jax has them. index: of this one.
        store: the key-value store that all of them see: `jax.distributed`'s client.
        name: of the group, the same in all processes, and no other group's.

    Attributes:
        stops: whether this process is to end; asked while it waits for others.
    """

    def __init__(self, processes: Sequence[int], index: int, store: Any, name: str) -> None:
        self.processes, self.index = tuple(processes), index
        self._store, self._name = store, name
        self._round = 0
        self.stops: Callable[[], bool] = lambda: False

    def exchange(self, kind: str, text: str) -> list[str]:
        """Every process's text of this round, in the order of `processes`. Waits until all have come so far.

        Args:
            kind: what the text is about, one word, which all must have alike. text: of this process.

        Raises:
            HostsDiffer: one of them has come to something else, or has closed the model.
            InterruptedError: `stops` became true.
        """
        number, self._round = self._round, self._round + 1
        own = f"{kind} {text}"
        self._store.key_value_set(self._key(self.index, number), own)
        found = [
            own if process == self.index else self._text(process, number)
            for process in self.processes
        ]
        if number % KEPT == KEPT - 1 and number > KEPT:  # all have read what came before the last
            self._store.key_value_delete(self._folder(self.index, number // KEPT - 1))
        for process, other in zip(self.processes, found, strict=True):
            if other.split(" ", 1)[0] != found[0].split(" ", 1)[0]:
                raise self.differ(found[0], process, other)
        return [other.split(" ", 1)[1] for other in found]

    def agree(self, kind: str, text: str) -> None:
        """Goes on where all processes have the same text; the arguments are those of `exchange`.

        Raises:
            HostsDiffer: they do not; names the first that differs from the first of all. Of texts in as many parts,
                divided by `PARTS`, only those that differ are named.
            InterruptedError: as `exchange`.
        """
        texts = self.exchange(kind, text)
        for process, other in zip(self.processes, texts, strict=True):
            if other != texts[0]:
                parts = texts[0].split(PARTS), other.split(PARTS)
                if len(parts[0]) == len(parts[1]):
                    unlike = [pair for pair in zip(*parts, strict=True) if pair[0] != pair[1]]
                    raise self.differ(
                        ", ".join(first for first, _ in unlike),
                        process,
                        ", ".join(second for _, second in unlike),
                    )
                raise self.differ(texts[0], process, other)

    def differ(self, first: str, process: int, other: str) -> HostsDiffer:
        """The error where a process wants something else than the first one."""
        return HostsDiffer(
            f"LLM: the processes of this model differ, so all have stopped: process {self.processes[0]} has {first}, "
            f"process {process} has {other}; make the same calls with the same arguments, in the same order, in every "
            "process"
        )

    def least(self, number: int | None) -> int | None:
        """The smallest number that a process has; None if one of them knows none."""
        found = self.exchange("least", "" if number is None else str(number))
        return None if "" in found else min(map(int, found))

    def end(self) -> None:
        """Says that this process takes part in no more rounds."""
        self._store.key_value_set(self._key(self.index, self._round), _ENDED)

    def _text(self, process: int, number: int) -> str:
        key, begun, told = self._key(process, number), time.monotonic(), False
        while True:
            try:
                found: str = self._store.blocking_key_value_get(key, WAIT_MS)
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
                if self.stops():
                    raise InterruptedError("it is to end") from None
                if not told and time.monotonic() - begun > PATIENCE:
                    told = True
                    LOG.warning(
                        "waiting for process %d: a model over several processes needs the same calls in each",
                        process,
                    )
                continue
            if found == _ENDED:
                raise HostsDiffer(
                    f"LLM: process {process} has closed this model; make the same calls in every process"
                )
            return found

    def _key(self, process: int, number: int) -> str:
        return f"{self._folder(process, number // KEPT)}{number}"

    def _folder(self, process: int, number: int) -> str:
        return f"hybrid_jax/{self._name}/{process}/{number}/"


def hosts_of(devices: Sequence[jax.Device] | None) -> Hosts | None:
    """The processes whose devices these are; None if they are this process's own.

    Raises:
        ValueError: this process has none of them.
    """
    here = jax.process_index()
    processes = sorted({device.process_index for device in devices or ()})
    if processes in ([], [here]):
        return None
    if here not in processes:
        raise ValueError(
            f"LLM: mesh has devices of processes {', '.join(map(str, processes))}, and none of this one, {here}; make "
            "the LLM in these processes, or name devices of all"
        )
    group = "-".join(map(str, processes))
    _made[group] += 1
    name = f"{group}/{_made[group]}"
    return Hosts(processes, here, distributed.global_state.client, name)
