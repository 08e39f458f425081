"""The program of a worker that a process of this machine has started: `api.workers.process`."""

from __future__ import annotations

import os
import sys
import threading
from multiprocessing.connection import Connection

from hybrid_jax.api.workers.process import ENDING, PipeLink
from hybrid_jax.worker.serving import Worker


def _share_processors(number: int, count: int) -> None:
    """Leaves the other processors of this machine to the other workers."""
    if hasattr(os, "sched_setaffinity"):
        all_ = sorted(os.sched_getaffinity(0))
        share = all_[number * len(all_) // count : (number + 1) * len(all_) // count]
        os.sched_setaffinity(0, share or [all_[number % len(all_)]])


def main(arguments: list[str]) -> None:
    """Runs a worker."""
    file, number, count = map(int, arguments)
    _share_processors(number, count)  # before libraries count them
    link = PipeLink(Connection(file), None, "the caller")

    def end_soon() -> None:
        """Nobody waits for it any more, but it may be compiling."""
        timer = threading.Timer(ENDING, os._exit, (1,))
        timer.daemon = True
        timer.start()

    Worker(link, end_soon).run()


if __name__ == "__main__":
    main(sys.argv[1:])
