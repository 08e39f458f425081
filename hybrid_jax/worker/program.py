"""The program of a worker that a process of this machine has started: `api.workers.process`."""

from __future__ import annotations

import os
import sys
import threading
from multiprocessing.connection import Connection

from hybrid_jax.api.workers.process import ENDING, PipeLink, share_processors
from hybrid_jax.worker.serving import Worker


def main(arguments: list[str]) -> None:
    """Runs a worker."""
    file, number, count = map(int, arguments)
    share_processors(number, count)  # before libraries count them
    link = PipeLink(Connection(file), None, "the caller")

    def end_soon() -> None:
        """Nobody waits for it any more, but it may be compiling."""
        timer = threading.Timer(ENDING, os._exit, (1,))
        timer.daemon = True
        timer.start()

    Worker(link, end_soon).run()


if __name__ == "__main__":
    main(sys.argv[1:])
