"""What must be left of calls that have ended: nothing, wherever they were computed."""

from __future__ import annotations

import threading
import time

from tests.llms import engine_of


def wait_until(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def own_threads():
    return {thread for thread in threading.enumerate() if thread.name.startswith("hybrid_jax")}


def is_idle(llm):
    """Nothing is left, neither in an engine nor in the books of the thread that decides, nor in those of workers."""
    return left_in_the_end(llm) == []


def left_in_the_end(llm, seconds=5):
    """What books still have, in words. Threads may still be telling each other of what has ended, but not for long."""
    deadline = time.monotonic() + seconds
    while True:
        llm.stats()
        left = left_of(llm)
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.002)


def left_of(llm):
    """What books have now, in words."""
    dispatcher, found = llm._thread._dispatcher, {}
    for name in ("_joints", "_where", "_moving", "_homeless", "_suspects", "on_trial"):
        found[name] = getattr(dispatcher, name)
    found["movable"] = [part for parts in dispatcher._movable.values() for part in parts]
    found["live in the router"] = dispatcher._router.num_live
    if dispatcher.prefill is not None:
        found["promises"] = dispatcher.prefill.num_promises
        found["live in the router of prompts"] = dispatcher.prefill._router.num_live
    for replica in dispatcher.present:
        thread = dispatcher.threads[replica]
        loop = thread._loop
        for name in ("_calls", "_live", "_numbers", "_asked", "_prefixes"):
            found[f"{name} of replica {replica}"] = getattr(loop, name, None)
        if (link := getattr(loop, "_link", None)) is not None:
            found[f"calls of worker {replica}"] = link.worker._calls
        found[f"requests of engine {replica}"] = engine_of(thread).has_work
    return [f"{name}: {left!r}" for name, left in found.items() if left]
