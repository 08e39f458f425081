"""Calls, workers that end, and workers that are slow, drawn at random: every prompt ends once, and nothing is left."""

from __future__ import annotations

import gc
import random
import threading
import time
import weakref
from collections import Counter

import pytest

from hybrid_jax import LLM, SamplingParams
from hybrid_jax.api import starting
from hybrid_jax.api.threads import dispatcher
from hybrid_jax.api.threads.dispatcher import Joint, Part
from hybrid_jax.cluster.watch import resume_points
from hybrid_jax.text.given_tokenizer import as_tokenizer
from hybrid_jax.worker.serving import SentCall, Worker
from tests.api.books import left_in_the_end, wait_until
from tests.api.fake_engine import CONFIG
from tests.api.thread_workers import llm_of_workers
from tests.api.tree_engine import TreeEngine, said
from tests.drawing import left_to_all
from tests.llms import engine_of

SETTINGS = {"steps_per_dispatch": 1, "prefill_tokens": 32, "max_rows": 2, "quiet": True}
STARTED = 3  # workers
OF_CALLS = (Joint, Part, SentCall, Worker)


class Asked:
    """Prompts that a caller waits for, and what has come of them."""

    def __init__(self, draw: random.Random, prompts: list[list[int]]):
        self.prompts, self.error = prompts, None
        self.params = SamplingParams(
            max_tokens=draw.choice([1, 2, 5, 20, 60]), temperature=0.0, n=draw.choice([1, 1, 2, 3])
        )
        self.given = [{"prompt_token_ids": prompt} for prompt in prompts]

    def check_output(self, prompt: list[int], output) -> None:
        assert [list(one.token_ids) for one in output.outputs] == [
            said(prompt, sample, self.params.max_tokens) for sample in range(self.params.n)
        ]


class Streamed(Asked):
    """A stream. Its caller takes deltas when it likes."""

    def begin(self, llm: LLM) -> None:
        self.stream, self.left = llm.stream(self.given, self.params), False
        self.tokens, self.ends, self.outputs = {}, Counter(), Counter()
        self.take(1)

    def take(self, count: int) -> bool:
        """Takes so many deltas; returns whether there are more."""
        for _ in range(count):
            try:
                delta = next(self.stream, None)
            except RuntimeError as error:
                self.error = error
                return False
            if delta is None:
                return False
            place = delta.prompt_index, delta.index
            assert not self.ends[place], "a completion goes on after its end"
            self.tokens.setdefault(place, []).extend(delta.token_ids)
            self.ends[place] += delta.finish_reason is not None
            if delta.output is not None:
                self.outputs[delta.prompt_index] += 1
                self.check_output(self.prompts[delta.prompt_index], delta.output)
        return True

    def leave(self) -> None:
        self.stream.close()
        self.left = True

    def wait(self) -> None:
        while not self.left and self.take(1):
            pass

    def check(self) -> None:
        for (place, sample), tokens in self.tokens.items():
            whole = said(self.prompts[place], sample, self.params.max_tokens)
            assert tokens == whole[: len(tokens)]
        if not (self.left or self.error):
            count = len(self.prompts)
            assert self.outputs == Counter(range(count))
            assert sum(self.ends.values()) == len(self.ends) == count * self.params.n


class Generated(Asked):
    """A call in a thread of its own, which gets outputs or an error."""

    def begin(self, llm: LLM) -> None:
        self.outputs = None
        self.thread = threading.Thread(target=self.run, args=(llm,), name="a caller")
        self.thread.start()

    def run(self, llm: LLM) -> None:
        try:
            self.outputs = llm.generate(self.given, self.params)
        except RuntimeError as error:
            self.error = error

    def wait(self) -> None:
        self.thread.join(30)
        assert not self.thread.is_alive(), "its caller waits for ever"

    def check(self) -> None:
        assert (self.outputs is None) == (self.error is not None)
        for prompt, output in zip(self.prompts, self.outputs or (), strict=self.error is None):
            self.check_output(prompt, output)


class Walk:
    """Workers behind a router, and rules that change them at random."""

    def __init__(self, make, seed: int, *, again: bool):
        self.draw, self.again = random.Random(seed), again
        self.llm = make(STARTED, again=again)
        self.dispatcher = self.llm._thread._dispatcher
        self.stems = [self.tokens(120) for _ in range(4)]
        self.asked = []
        self.kills, self.out = Counter(), set()

    def tokens(self, count: int) -> list[int]:
        return [self.draw.randrange(1, 250) for _ in range(count)]

    def prompt(self) -> list[int]:
        stem = self.draw.choice(self.stems)[: self.draw.randrange(1, 120)]
        return stem + self.tokens(self.draw.randrange(1, 15))

    def links(self):
        return [thread._loop._link for thread in list(self.dispatcher.threads)]

    # --- rules --------------------------------------------------------------------------------

    def submit(self) -> None:
        kind = self.draw.choice([Streamed, Generated])
        one = kind(self.draw, [self.prompt() for _ in range(self.draw.randrange(1, 6))])
        self.asked.append(one)
        one.begin(self.llm)

    def submit_many(self) -> None:
        """Calls of one prompt each, more than there are rows: some of them are moved."""
        for _ in range(10):
            self.asked.append(one := Generated(self.draw, [self.prompt()]))
            one.begin(self.llm)

    def take(self) -> None:
        if found := [one for one in self.asked if isinstance(one, Streamed) and not one.left]:
            self.draw.choice(found).take(self.draw.randrange(1, 30))

    def leave(self) -> None:
        if found := [one for one in self.asked if isinstance(one, Streamed)]:
            self.draw.choice(found).leave()

    def ask(self) -> None:
        """Others may end meanwhile, and that is no error of a question."""
        assert 1 <= self.llm.stats()["replicas"] <= STARTED
        assert self.llm.compile_s == 0.0

    def kill(self) -> None:
        """Ends a worker, or spoils what it says next. None so often that it is left out and no other is there."""
        often = dispatcher.MAX_STARTS if self.again else 1
        found = [n for n in range(STARTED) if self.kills[n] < often]
        if not found or (not self.again and self.kills):
            return
        self.kills[killed := self.draw.choice(found)] += 1
        link = self.links()[killed]
        # A frame that is lost is noticed at the next one, and perhaps none comes.
        spoils = [lambda frame: [frame[:-1]], lambda frame: [frame, frame]]
        if self.draw.random() < 0.5:
            link.kill()
            return
        once = [self.draw.choice(spoils)]
        link.spoil = lambda frame: once.pop()(frame) if once else [frame]

    def take_out(self) -> None:
        """At most one, which may have ended before, or be about to be started again."""
        if not self.out:
            self.out.add(replica := self.draw.randrange(STARTED))
            self.llm._thread.take_out(replica)

    def slow_down(self) -> None:
        """A worker whose answers come late, from now on, or no longer."""
        link = self.draw.choice(self.links())
        link.spoil = late(self.draw.choice([0.0, 0.002, 0.01]))

    def reset(self) -> None:
        self.llm.reset_prefix_cache()

    def settle(self) -> None:
        """Waits for all callers, and looks at everything."""
        for one in self.asked:
            one.wait()
            one.check()
            self.allow(one.error)
        self.asked.clear()
        wait_until(lambda: not self.dispatcher.reviving)
        assert left_in_the_end(self.llm) == []
        assert self.out.isdisjoint(self.dispatcher.present)
        self.check_marks()

    # --- checks -------------------------------------------------------------------------------

    def allow(self, error: BaseException | None) -> None:
        """A prompt fails only if three workers have ended that had it."""
        if error is not None:
            assert "3 replicas have ended one after the other" in str(error), repr(error)
            assert self.kills.total() >= 3

    def check_marks(self) -> None:
        """The router knows what is in the tree of each worker's engine. Of those that are gone it knows nothing."""
        router, present = self.dispatcher._router, self.dispatcher.present
        router.read_news()
        router.check_invariants()
        assert sorted(router.present) == sorted(present)
        for replica, thread in enumerate(self.dispatcher.threads):
            tree = engine_of(thread).tree
            for tier in tree.tiers:
                there = resume_points(tree, tier.number)
                router.marks.check(replica, tier.number, there if replica in present else there[:0])

    def run(self, steps: int) -> None:
        rules = {
            self.submit: 20, self.submit_many: 4, self.take: 20, self.leave: 5, self.ask: 6,
            self.kill: 3, self.take_out: 1, self.slow_down: 3, self.reset: 1, self.settle: 2,
        }  # fmt: skip
        for rule in self.draw.choices([*rules], [*rules.values()], k=steps):
            rule()


@pytest.fixture
def make(monkeypatch, tokenizer):
    """An LLM of so many workers, with engines that have trees."""
    monkeypatch.setattr(starting, "Engine", TreeEngine)

    def one():
        llm = LLM.from_params(CONFIG, None, tokenizer=tokenizer, **SETTINGS)
        llm._engine.pause = 0.0003
        return llm

    return lambda count, **options: llm_of_workers(one, count, as_tokenizer(tokenizer), **options)


def of_calls():
    return {id(found) for found in gc.get_objects() if isinstance(found, OF_CALLS)}


FEW = 3  # seeds that run always
SEEDS = [*range(FEW), *(pytest.param(n, marks=left_to_all) for n in range(FEW, 60))]
ENDS = ("closed", "closed while calls run", "dropped")


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("again", [True, False], ids=["again", "once"])
def test_every_prompt_ends_once_and_nothing_is_left(make, again, seed):
    others, known = set(threading.enumerate()), of_calls()
    held = walked(make, seed, again=again, end=ENDS[seed % len(ENDS)])
    gc.collect()
    wait_until(lambda: not set(threading.enumerate()) - others)
    for _ in range(2):  # a thread that is dropped lets its loop go
        gc.collect()
    assert [kept for kept in (reference() for reference in held) if kept is not None] == []
    assert of_calls() <= known


def walked(make, seed: int, *, again: bool, end: str) -> list[weakref.ref]:
    """A walk up to its end; returns what must be forgotten after it."""
    walk = Walk(make, seed, again=again)
    threads = walk.dispatcher.threads
    held = [weakref.ref(walk.dispatcher), *(weakref.ref(thread._loop) for thread in threads)]
    walk.run(80)
    if end == "closed while calls run":
        walk.submit_many()
    else:
        walk.settle()
    if end != "dropped":
        walk.llm.close()
    for one in walk.asked:
        one.wait()
        one.check()
        if one.error is not None and "this object was closed" not in str(one.error):
            walk.allow(one.error)
    return held


def test_prompts_that_wait_for_a_slow_worker_are_moved(make):
    """It takes long, and what it says comes late. The other one gets what waits there."""
    llm, draw = make(2), random.Random(0)
    threads = llm._thread._dispatcher.threads
    slow, other = map(engine_of, threads)
    slow.pause, threads[0]._loop._link.spoil = 0.005, late(0.02)
    calls = [Generated(draw, [[draw.randrange(1, 250) for _ in range(40)]]) for _ in range(24)]
    for call in calls:
        call.begin(llm)
    for call in calls:
        call.wait()
        call.check()
        assert call.error is None
    assert left_in_the_end(llm) == []
    first, second = ({request.request_id for request in e.added} for e in (slow, other))
    assert first & second, "none was moved"
    assert len(second) > 12  # half of them
    llm.close()


def late(seconds: float):
    """What comes so late of a worker, as `MemoryLink.spoil`."""
    return lambda frame: time.sleep(seconds) or [frame]
