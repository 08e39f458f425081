"""One `LLM` used by many threads and tasks at once: each gets the tokens of a call on its own.

HYBRID_JAX_THREADS=all runs 200 rounds instead of 20.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import select
import signal
import threading
import time
import warnings

import pytest

from hybrid_jax import SamplingParams, StructuredOutputsParams
from tests.api.fake_engine import GREEDY, SCRIPT, texts
from tests.llms import HEAD, tiny_llm

ROUNDS = 200 if os.environ.get("HYBRID_JAX_THREADS") == "all" else 20
PROMPTS = [HEAD, HEAD + "    def read(self):\n", "def f(x):\n", "import math\n", "x", HEAD * 2]
FORM = StructuredOutputsParams(regex="[a-z]{4,8}")
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=12),
    SamplingParams(temperature=0.9, seed=3, max_tokens=20, n=2),
    SamplingParams(temperature=0.0, max_tokens=9, detokenize=False),
    SamplingParams(temperature=1.0, seed=5, max_tokens=10, structured_outputs=FORM),
    SamplingParams(temperature=0.0, max_tokens=60, stop=["return", ":"]),
    SamplingParams(temperature=0.7, seed=8, max_tokens=16, repetition_penalty=1.3),
]
JOBS = [(prompt, params) for prompt in PROMPTS for params in PARAMS]
LONG = SamplingParams(temperature=0.0, max_tokens=600)


@pytest.fixture(scope="module")
def llm():
    with tiny_llm() as llm:
        yield llm


@pytest.fixture(scope="module")
def alone(llm):
    """What each job gives on its own, by its place."""
    return [tokens(llm.generate(prompt, params)[0]) for prompt, params in JOBS]


def tokens(output):
    return [completion.token_ids for completion in output.outputs]


# --- what one caller does, `pick` choosing among the jobs; returns (job, tokens) pairs ----------------


def generates(llm, pick):
    places = [pick() for _ in range(3)]
    prompts, params = zip(*(JOBS[place] for place in places), strict=True)
    return zip(places, map(tokens, llm.generate(list(prompts), list(params))), strict=True)


def streams(llm, pick):
    place = pick()
    return [(place, tokens(list(llm.stream(*JOBS[place]))[-1].output))]


def leaves_a_stream(llm, pick):
    deltas = llm.stream(JOBS[pick()][0], LONG)
    for _ in range(pick() % 4):
        next(deltas)
    deltas.close()
    return streams(llm, pick)


def feeds(llm, pick):
    places = [pick() for _ in range(3)]
    with llm.feed() as feed:
        tickets = {feed.add(*JOBS[place]): place for place in places}
        found = []
        while len(found) < len(places):
            found += feed.step()
    return [(tickets[ticket], tokens(ticket.outputs()[0])) for ticket in found]


def awaits(llm, pick):
    """Three tasks of one loop: one is cancelled, one leaves early, one reads to its end."""

    async def reads(place):
        return [delta async for delta in llm.astream(*JOBS[place])][-1].output

    async def leaves():
        async with contextlib.aclosing(llm.astream("def ", LONG)) as deltas:
            async for _ in deltas:
                break

    async def main():
        cancelled = asyncio.create_task(reads_long())
        place = pick()
        output, _ = await asyncio.gather(reads(place), leaves())
        cancelled.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await cancelled
        return [(place, tokens(output))]

    async def reads_long():
        return [delta async for delta in llm.astream("class ", LONG)]

    return asyncio.run(main())


def fails(llm, pick):
    with pytest.raises(ValueError, match="prompt 1: is empty"):
        llm.generate(["x", ""], GREEDY)

    class Stop(Exception):
        pass

    def stop(done, total):
        raise Stop

    with pytest.raises(Stop):
        llm.generate(["x", "def "], [PARAMS[0], LONG], progress=stop)
    return generates(llm, pick)


def asks(llm, pick):
    for _ in range(5):
        assert llm.stats()["running"] <= 4
        assert isinstance(str(llm.cache.tree()), str)
    llm.reset_prefix_cache()
    return streams(llm, pick)


CALLERS = [generates, streams, leaves_a_stream, feeds, awaits, fails, asks, generates]


def test_eight_threads_and_an_interrupted_one_get_what_each_would_alone(llm, alone):
    problems = []

    def call(index, seed):
        choose = random.Random(seed)
        pick = lambda: choose.randrange(len(JOBS))
        try:
            for place, found in CALLERS[index](llm, pick):
                if found != alone[place]:
                    problems.append((seed, CALLERS[index].__name__, place, found))
        except BaseException as error:
            problems.append((seed, CALLERS[index].__name__, error))

    interrupted = 0
    for number in range(ROUNDS):
        threads = [
            threading.Thread(target=call, args=(index, 8 * number + index)) for index in range(8)
        ]
        timer = threading.Timer(0.02 + 0.01 * (number % 9), os.kill, (os.getpid(), signal.SIGINT))
        for thread in threads:
            thread.start()
        try:  # Ctrl-C goes to the main thread, which has a call of its own
            timer.start()
            llm.generate(["def main():\n"] * 2, LONG)
            timer.join()
            time.sleep(0.1)  # its call was over before
        except KeyboardInterrupt:
            interrupted += 1
        for thread in threads:
            thread.join(timeout=120)
            assert not thread.is_alive()
        assert problems == [], number
    assert interrupted == ROUNDS
    stats = llm.stats()
    assert stats["running"] == stats["waiting"] == 0 and stats["restarts"] == 0
    llm._engine.scheduler.check_invariants()


def test_calls_of_several_threads_share_the_engines_turns(make_llm):
    llm = make_llm(max_rows=8, steps_per_dispatch=1)
    llm._engine.pause = 0.005
    threads = [
        threading.Thread(target=llm.generate, args=("ab", SamplingParams(max_tokens=100)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert llm._engine.num_steps < 300  # 800 one after the other
    assert llm.stats()["generated_tokens"] == 800


def test_a_fork_is_told_to_be_spawned(make_llm):
    llm = make_llm()
    deltas = llm.stream("ab", SamplingParams(max_tokens=60))
    next(deltas)
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # jax's own about forks
        child = os.fork()
    if child == 0:
        told = []
        for use in (
            lambda: llm.generate("ab", GREEDY),
            lambda: list(deltas),
            lambda: llm.stats(),
            lambda: llm.cache.describe(),
            lambda: llm.feed().step(),
            lambda: llm.reset_prefix_cache(),
            lambda: llm.warmup(),
            lambda: asyncio.run(anext(llm.astream("ab", GREEDY))),
            make_llm,
        ):
            try:
                use()
                told.append("nothing")
            except RuntimeError as error:
                told.append(str(error))
        llm.close()
        os.write(writer, "\n".join(told).encode())
        os._exit(0)
    os.close(writer)
    if not select.select([reader], [], [], 60)[0]:
        os.kill(child, signal.SIGKILL)
    with open(reader) as pipe:
        told = pipe.read().splitlines()
    os.waitpid(child, 0)
    assert len(told) == 9
    assert all("get_context('spawn')" in text and "is a fork" in text for text in told), told
    assert "".join(delta.text for delta in deltas).endswith((SCRIPT * 2)[:60][-9:])
    assert texts(llm.generate("ab", GREEDY)) == [SCRIPT[:12]]
