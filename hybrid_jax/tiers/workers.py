"""Threads that do jobs in their order, also while the program ends: what waits to be written is written then."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

Job = Callable[[], object]


class Workers:
    """Threads for jobs, which must not raise. They begin with the first job.

    Python ends the pools of `concurrent.futures` before programs have their last word (`atexit`); not these threads.
    """

    def __init__(self, name: str, number: int = 1) -> None:
        self._name, self._number = name, number
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def do(self, job: Job) -> None:
        """Has a job done soon."""
        if len(self._threads) < self._number:
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._threads.append(thread)
            thread.start()
        self._jobs.put(job)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def close(self) -> None:
        """Waits until all jobs are done, and ends the threads."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()
