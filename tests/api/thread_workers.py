"""Workers in threads of this process: all that workers do, but for their processes."""

from __future__ import annotations

import functools
import threading
from queue import Empty, SimpleQueue

from hybrid_jax import LLM
from hybrid_jax.api.workers.link import Link
from hybrid_jax.api.workers.messages import Start
from hybrid_jax.api.workers.starting import Links, Workers, ready_workers
from hybrid_jax.config.sampling_params import SamplingParams
from hybrid_jax.worker.serving import Worker, loaded


class MemoryLink(Link):
    """One end of two queues. `spoil` changes what is received: it returns the frames that come in place of one."""

    def __init__(self, about, incoming, outgoing):
        self.about, self.incoming, self.outgoing = about, incoming, outgoing
        self.worker = self.thread = None
        self.spoil = lambda frame: [frame]
        self.left = []
        self.is_cut = False

    def send(self, frame):
        if self.is_cut:
            raise BrokenPipeError("nobody is there")
        self.outgoing.put(bytes(frame))

    def receive(self, within=None):
        while not self.left:
            try:
                frame = self.incoming.get(timeout=within)
            except Empty:
                raise TimeoutError from None
            if frame is None:
                raise EOFError
            self.left += self.spoil(frame)
        return self.left.pop(0)

    def close(self):
        self.thread.join(30)
        assert not self.thread.is_alive()
        self.incoming.put(None)

    def kill(self):
        """As if its process were gone: nothing comes from it any more, and it hears nothing."""
        self.is_cut = True
        self.incoming.put(None)
        self.outgoing.put(None)


def start_worker(number, make=loaded):
    """A link to a new worker, whose `LLM` is made by `make`, as in `Worker`."""
    there, back = SimpleQueue(), SimpleQueue()
    link = MemoryLink(f"worker {number}", back, there)
    own = MemoryLink("the caller", there, back)
    link.worker = Worker(own, make=make)
    link.thread = threading.Thread(target=link.worker.run, name=f"worker {number}", daemon=True)
    link.thread.start()
    return link


def no_more(number):
    raise OSError(f"no room for worker {number}")


def llm_of_workers(make, count, tokenizer, *, again=False):
    """An LLM of so many workers, which may be started `again` where they have ended."""
    link = functools.partial(start_worker, make=lambda start, hand_over: make())
    start = Start(None, {}, {})
    ready = ready_workers([link(number) for number in range(count)], start, False)
    workers = Workers(ready, link if again else no_more, start)
    llm = LLM.__new__(LLM)
    llm._begin(workers, tokenizer, SamplingParams(), quiet=True)
    return llm


class ThreadWorkers(Links):
    """Starts threads in place of processes."""

    def first(self):
        return [self.another(number) for number in range(self.mesh.num_replicas)]

    def another(self, number):
        link = start_worker(number)
        link.side = self.side(number)
        return link
