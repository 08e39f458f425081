"""Several engines behind one LLM: who gets what, how their news become one, and what becomes of a replica that left."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import re
import signal
import threading
import weakref
from contextlib import suppress

import pytest

from hybrid_jax import LLM, SamplingParams
from hybrid_jax.api import starting
from hybrid_jax.api.threads import questions
from hybrid_jax.api.threads.calls import Call, News
from hybrid_jax.api.threads.dispatcher import Joint, Part
from hybrid_jax.api.threads.joining import joined_stats
from hybrid_jax.text.given_tokenizer import as_tokenizer
from tests.api.books import is_idle, own_threads, wait_until
from tests.api.fake_engine import CONFIG, GREEDY, SCRIPT, FakeEngine, texts
from tests.api.thread_workers import llm_of_workers
from tests.llms import engines_of

LONG = SamplingParams(temperature=0.0, max_tokens=150)
PROMPTS = [letter * 2 for letter in "abcdefg"]


class Broken:
    """A result that cannot be read, so that the engine's thread ends by a mistake."""

    @property
    def request(self):
        raise ZeroDivisionError("a mistake of the engine")


class Engine(FakeEngine):
    """It breaks once it is told to."""

    broken = False

    def step(self):
        return [Broken()] if self.broken else super().step()

    def cached_tokens(self, tokens):
        return self.config.vocab_size if tuple(tokens) in self.seen else 0

    def save_prefix(self, file, tokens):
        return self.cached_tokens(tokens)


@pytest.fixture(params=["engines here", "workers"])
def make(request, monkeypatch, tokenizer):
    """An LLM of so many fake engines."""
    monkeypatch.setattr(starting, "Engine", Engine)

    def make(count=3, *, pause=0.0, **options):
        options = {"steps_per_dispatch": 1, "quiet": True, "tokenizer": tokenizer} | options
        one = lambda: LLM.from_params(CONFIG, None, **options)
        if request.param == "workers" and count > 1:
            llm = llm_of_workers(one, count, as_tokenizer(tokenizer))
        else:
            monkeypatch.setattr(starting.Sides, "devices", lambda *_: [None] * count)
            options["mesh"] = f"dp={count}"
            llm = one()
        for engine in engines_of(llm):
            engine.pause = pause
        return llm

    return make


# --- results --------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 3, 5])
def test_results_are_those_of_one_engine(make, count):
    found = []
    for number in (1, count):
        with make(number) as llm:
            several = SamplingParams(temperature=0.0, max_tokens=9, n=3)
            found.append([texts(llm.generate(PROMPTS, GREEDY)), texts(llm.generate("ab", several))])
            outputs = llm.generate(PROMPTS, several)
            found[-1].append([[one.text for one in out.outputs] for out in outputs])
            found[-1].append([out.request_id for out in outputs])
            mixed = llm.generate(
                ["ab", b"\xffx".decode("latin1"), [255, 1], "", "cd"], errors="return"
            )
            found[-1].append([type(out).__name__ for out in mixed])
            found[-1].append(str(mixed[2]))
            found[-1].append(llm.generate([]))
    assert found[0] == found[1] and found[0][0] == [SCRIPT[:12]] * len(PROMPTS)
    assert "prompt 2: the engine refuses byte 255" in found[0][5]


def test_prompts_go_to_all_replicas_and_completions_of_one_prompt_to_the_same(make):
    with make(3) as llm:
        llm.generate(PROMPTS[:6], SamplingParams(temperature=0.0, max_tokens=5, n=2))
        added = [[request.request_id for request in e.added] for e in engines_of(llm)]
        assert added == [[f"{p}.{s}" for p in (n, n + 3) for s in (0, 1)] for n in range(3)]
        assert is_idle(llm)


def test_a_stream_has_every_delta_once(make):
    with make(3) as llm:
        deltas = list(llm.stream(PROMPTS, LONG))
        for index in range(len(PROMPTS)):
            own = [delta for delta in deltas if delta.prompt_index == index]
            assert "".join(delta.text for delta in own) == own[-1].output.outputs[0].text
            assert sum(delta.output is not None for delta in own) == 1
            assert len(own[-1].output.outputs[0].token_ids) == 150
        assert is_idle(llm)


def test_streams_of_tasks(make):
    async def one(llm, prompt):
        return "".join([delta.text async for delta in llm.astream(prompt, LONG)])

    async def main(llm):
        return await asyncio.gather(*(one(llm, prompt) for prompt in PROMPTS))

    with make(3) as llm:
        assert len(set(asyncio.run(main(llm)))) == 1
        assert is_idle(llm)


def test_a_bar_counts_the_prompts_of_all_replicas(make):
    with make(3) as llm:
        counts = []
        llm.generate(PROMPTS, LONG, progress=lambda done, total: counts.append((done, total)))
    assert counts == sorted(counts) and counts[-1] == (7, 7)


def test_a_feed_waits_for_news_of_replicas_that_go_at_their_own_pace(make):
    with make(3, pause=0.001) as llm, llm.feed() as feed:
        assert feed.max_rows == 3 * llm.engine_config.max_rows
        tickets = [
            feed.add(prompt, SamplingParams(max_tokens=n)) for n, prompt in enumerate(PROMPTS, 1)
        ]
        finished = []
        while feed.num_unfinished:
            finished += [tickets.index(ticket) for ticket in feed.step()]
            llm.stats()
        assert sorted(finished + [tickets.index(ticket) for ticket in feed.step()]) == [*range(7)]
        assert feed.step() == [] and is_idle(llm)
    assert [len(t.outputs()[0].outputs[0].token_ids) for t in tickets] == [*range(1, 8)]


def test_prompts_that_wait_are_moved_to_a_replica_with_free_rows(make):
    """What was sent last goes, and nothing that has begun. Every prompt ends once, wherever it is."""
    long, short = LONG, SamplingParams(temperature=0.0, max_tokens=2)
    with make(2, pause=0.002, max_rows=2) as llm, llm.feed() as feed:
        # The router gives prompts to both in turns, so one gets all the long ones.
        tickets = [feed.add("ab", [long, short][n % 2]) for n in range(24)]
        while feed.num_unfinished:
            feed.step()
        one, other = ([len(r.prompt) and r.max_tokens for r in e.added] for e in engines_of(llm))
        assert len(one) + len(other) > 24  # some were given to both
        assert min(one.count(150), other.count(150)) >= 3
        assert is_idle(llm)
        counts = [len(ticket.outputs()[0].outputs[0].token_ids) for ticket in tickets]
        assert counts == [150, 2] * 12
        for engine in engines_of(llm):
            begun = [r for r in engine.added if r.request_id in engine.aborted]
            assert all(not request.output.token_ids for request in begun)


def test_the_last_prompts_of_a_call_with_many_are_moved_too(make):
    """As many for each replica as it has rows. The others stay together."""
    with make(2, pause=0.0005, max_rows=4) as llm:
        slow, other = engines_of(llm)
        slow.pause = 0.01
        prompts = [letter * 2 for letter in "abcdefghijklmnopqrstuvwx"]
        found = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=20))
        assert [len(output.outputs[0].token_ids) for output in found] == [20] * 24
        assert [output.prompt for output in found] == prompts
        assert 12 < len(other.added) <= 16
        assert is_idle(llm)


def test_a_turn_that_fails_ends_no_part_of_a_large_call_that_has_begun(make):
    """The prompts that are sent one by one have no token yet, and belong to a call that has some."""
    with make(2, pause=0.001, max_rows=2) as llm:
        for engine in engines_of(llm):
            engine.raises_for = (b"zz", RuntimeError("lost"))
        prompts = [letter * 2 for letter in "abcdefghijklmnopqrst"]
        stream = llm.stream(prompts, LONG)
        deltas = [next(stream) for _ in range(20)]
        for _ in range(2):
            with pytest.raises(RuntimeError, match="lost"):
                llm.generate("zz", GREEDY)
        deltas += stream
        assert sum(len(delta.token_ids) for delta in deltas) == 150 * len(prompts)
        assert is_idle(llm)


@pytest.mark.parametrize("seed", range(4))
def test_moves_beside_callers_and_replicas_that_leave(make, seed):
    draw = random.Random(seed)
    llm = make(3, pause=0.0005, max_rows=2)
    counts = [draw.choice([1, 2, 100]) for _ in range(40)]
    with llm.feed() as feed:
        tickets = [feed.add("ab", SamplingParams(max_tokens=count)) for count in counts]
        leaving = draw.randrange(40)
        while feed.num_unfinished:
            feed.step()
            if leaving is not None and feed.num_unfinished < leaving:
                llm._thread.take_out(draw.randrange(3))
                leaving = None
            if draw.random() < 0.2:
                next(llm.stream(PROMPTS[:2], LONG))
    assert [len(t.outputs()[0].outputs[0].token_ids) for t in tickets] == counts
    gc.collect()
    assert is_idle(llm)
    llm.close()


def test_metrics_do_not_tell_of_other_engines(make):
    with make(2) as llm:
        engines_of(llm)[0].compiled, engines_of(llm)[1].compiled = 100.0, 7.0
        llm.stats()  # workers tell with what they say
        outputs = llm.generate(PROMPTS, GREEDY)
        assert {out.metrics.compile_s for out in outputs} == {0.0}
        assert all(out.metrics.arrival_time <= out.metrics.first_token_time for out in outputs)
        assert llm.compile_s == 100.0  # they compile at the same time


# --- who leaves, and what fails -------------------------------------------------------------------


def test_a_caller_that_leaves_ends_its_prompts_on_all_replicas(make):
    with make(3, pause=0.002) as llm:
        stream = llm.stream(PROMPTS, LONG)
        next(stream)
        stream.close()
        with llm.feed() as feed:
            feed.add(PROMPTS, LONG)
            feed.step()
        assert is_idle(llm)
        assert all(engine.aborted for engine in engines_of(llm))


@pytest.mark.parametrize("delay", [0.0, 0.005, 0.02])
@pytest.mark.parametrize("call", ["generate", "stream", "feed", "stats"])
def test_ctrl_c_ends_the_call_of_the_main_thread_alone(make, call, delay):
    llm = make(3, pause=0.001)
    beside = []
    other = threading.Thread(target=lambda: beside.extend(llm.generate(PROMPTS, LONG)))
    other.start()
    timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        timer.start()
        try:
            while call == "generate":
                llm.generate(PROMPTS, GREEDY)
            while call == "stats":
                llm.stats()
            while call == "stream":
                list(llm.stream(PROMPTS, GREEDY))
            with llm.feed() as feed:
                while True:
                    feed.add(PROMPTS, GREEDY)
                    feed.step()
        finally:
            timer.join()
    other.join()
    assert [len(out.outputs[0].token_ids) for out in beside] == [150] * 7
    assert is_idle(llm)
    llm.close()


def test_an_error_of_a_prompt_ends_its_call_on_all_replicas(make):
    with make(3, pause=0.001) as llm:
        with pytest.raises(ValueError, match="prompt 4: the engine refuses byte 255"):
            llm.generate([*PROMPTS[:4], [255, 1]], LONG)
        assert is_idle(llm)


@pytest.mark.parametrize("has_begun", [False, True], ids=["nowhere", "on another replica"])
def test_a_turn_that_fails_ends_the_calls_of_that_replica_that_are_new(make, has_begun):
    """The call that is new has a token of its other prompt, or has none."""
    with make(2, pause=0.001) as llm:
        watched = llm.stream(PROMPTS[:2], LONG)
        found = [next(watched)]
        while len({delta.prompt_index for delta in found}) < 2:
            found.append(next(watched))
        failed = threading.Event()
        for engine in engines_of(llm):  # whichever gets it
            fails_beside(engine, engines_of(llm), has_begun, failed)
        with pytest.raises(RuntimeError, match="no room for it"):
            llm.generate(["ww", "yy"], LONG)
        for engine in engines_of(llm):
            del engine.step
        found += watched
        assert sum(len(delta.token_ids) for delta in found) == 300
        assert is_idle(llm)


def fails_beside(engine, engines, has_begun, failed):
    """Has an engine fail in a turn with `ww`, after another one has told of tokens of `yy`, or before it has any."""
    step = engine.step

    def failing():
        prompts = {bytes(request.prompt) for request in engine.requests.values()}
        if b"ww" in prompts:
            if has_begun:  # a second token, because the first one may not be told yet
                wait_until(lambda: max(num_tokens(other, b"yy") for other in engines) > 1)
            failed.set()
            raise RuntimeError("no room for it")
        if b"yy" in prompts and not has_begun:
            assert failed.wait(20)
        return step()

    engine.step = failing


def num_tokens(engine, prompt):
    requests = list(engine.requests.values())
    return sum(len(r.output.token_ids) for r in requests if bytes(r.prompt) == prompt)


def test_a_router_that_fails_ends_the_call_and_forgets_its_prompts(make, monkeypatch):
    with make(3) as llm:
        router = llm._thread._dispatcher._router
        choose, asked = router._choose, []

        def fails(owner, tokens, *rest):
            asked.append(tokens.tokens.tolist())
            if len(asked) == 3:
                raise ZeroDivisionError("a mistake of the router")
            return choose(owner, tokens, *rest)

        monkeypatch.setattr(router, "_choose", fails)
        with pytest.raises(ZeroDivisionError, match="a mistake of the router"):
            llm.generate(PROMPTS, GREEDY)
        assert asked == [[97, 97], [98, 98], [99, 99]]
        assert is_idle(llm)
        assert texts(llm.generate(PROMPTS, GREEDY)) == [SCRIPT[:12]] * 7


def test_many_callers_that_come_and_go(make):
    """Nothing is lost or left behind, whatever the threads do."""
    llm, found, errors = make(4, pause=0.0002), [], []

    def calls(seed):
        draw = random.Random(seed)
        try:
            for _ in range(8):
                prompts = draw.choices(PROMPTS, k=draw.randrange(6))
                params = SamplingParams(max_tokens=draw.randrange(1, 20), n=draw.randrange(1, 3))
                if draw.random() < 0.5:
                    outputs = llm.generate(prompts, params)
                    found.extend(
                        len(one.token_ids) == params.max_tokens
                        for out in outputs
                        for one in out.outputs
                    )
                else:
                    stream = llm.stream(prompts, params)
                    for _ in range(draw.randrange(8)):
                        next(stream, None)
                    stream.close()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=calls, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors and found and all(found)
    assert is_idle(llm)
    llm.close()


# --- replicas that leave --------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_requests_of_a_replica_that_left_go_on_elsewhere(make, seed):
    """Two of three leave, at any moment. Some completions of a prompt end before others."""
    draw = random.Random(seed)
    params = [
        SamplingParams(
            max_tokens=draw.randrange(1, 120),
            n=draw.randrange(1, 4),
            stop=draw.choice([None, "lazy"]),
        )
        for _ in PROMPTS
    ]
    with make(1) as llm:
        expected = llm.generate(PROMPTS, params)
    llm = make(3, pause=0.0005)
    left = draw.sample(range(3), 2)
    moments = sorted(draw.randrange(300) for _ in left)
    deltas = []
    for number, delta in enumerate(llm.stream(PROMPTS, params)):
        deltas.append(delta)
        while moments and number >= moments[0]:
            moments.pop(0)
            llm._thread.take_out(left[len(moments)])
    for index, out in enumerate(expected):
        outputs = [d.output for d in deltas if d.prompt_index == index and d.output is not None]
        assert [found.outputs for found in outputs] == [out.outputs]
        for one in out.outputs:
            mine = [d for d in deltas if (d.prompt_index, d.index) == (index, one.index)]
            assert "".join(d.text for d in mine) == one.text
            assert sum((d.token_ids for d in mine), ()) == one.token_ids
            assert sum(d.finish_reason is not None for d in mine) == 1
    assert is_idle(llm)
    llm.close()


def test_a_replica_that_leaves_while_it_compiles_gives_its_requests_back(make):
    """What it compiles is given up, which is no error of the requests."""
    llm = make(2)
    slow, compiles, goes_on = engines_of(llm)[1], threading.Event(), threading.Event()
    step = slow.step

    def compiling():
        compiles.set()
        assert goes_on.wait(20)
        slow.listener("a program", lambda: (1, 2))
        return step()

    slow.step, found = compiling, []
    call = threading.Thread(target=lambda: found.extend(llm.generate(PROMPTS, LONG)))
    call.start()
    assert compiles.wait(20)
    llm._thread.take_out(1)
    goes_on.set()
    call.join(30)
    assert texts(found) == [(SCRIPT * 9)[:150]] * 7
    llm.close()


def test_a_joint_says_nothing_after_its_end():
    """Also if several parts fail, or one goes on after another has failed."""
    call, over = Call([object(), object()], streams=True), []
    joint = Joint(call, over.append)
    first, second = (Part(joint, [job], n, None, None) for n, job in enumerate(call.jobs))
    first.num_finished = 1
    first.tell(["a"])
    second.fail(ValueError("one"))
    first.fail(ValueError("two"))
    joint.arrived(second, News(deltas=["b"], num_finished=1))
    joint.fail(ValueError("three"))
    told = [call.news.get_nowait() for _ in range(call.news.qsize())]
    assert [(n.deltas, n.num_finished, n.over, str(n.error)) for n in told] == [
        (["a"], 1, False, "None"), ((), 1, True, "one")
    ]  # fmt: skip
    assert over == [call]


def test_calls_of_all_kinds_survive_a_replica(make):
    llm, found = make(3, pause=0.001), {}

    async def task():
        return "".join([delta.text async for delta in llm.astream(PROMPTS, LONG)])

    def feed():
        with llm.feed() as feed:
            ticket = feed.add(PROMPTS, LONG)
            while not ticket.finished:
                feed.step()
            return texts(ticket.outputs())

    kinds = {
        "generate": lambda: texts(llm.generate(PROMPTS, LONG)),
        "feed": feed,
        "task": lambda: len(asyncio.run(task())),
    }
    threads = [
        threading.Thread(target=lambda name=name, run=run: found.update({name: run()}))
        for name, run in kinds.items()
    ]
    for thread in threads:
        thread.start()
    wait_until(lambda: all(e.num_steps > 5 for e in engines_of(llm)))
    llm._thread.take_out(1)
    for thread in threads:
        thread.join(30)
    whole = (SCRIPT * 9)[:150]
    assert found == {"generate": [whole] * 7, "feed": [whole] * 7, "task": 7 * 150}
    assert llm.stats()["replicas"] == 2 and is_idle(llm)
    before = engines_of(llm)[1].added
    assert before
    after = {id(request) for n in (0, 2) for request in engines_of(llm)[n].added}
    assert not after & set(map(id, before)), "the old engine may still write to what it had"
    llm.close()


def test_a_thread_that_ends_by_a_mistake_gives_its_requests_back(make, caplog):
    llm = make(2, pause=0.001)
    stream = llm.stream(PROMPTS, LONG)
    deltas = [next(stream)]
    engines_of(llm)[0].broken = True
    deltas += stream
    assert sum(len(delta.token_ids) for delta in deltas) == 150 * len(PROMPTS)
    assert llm.stats()["replicas"] == 1
    assert (
        "replica 0 has ended: ZeroDivisionError('a mistake of the engine'); its requests go to 1 other"
        in caplog.text
    )
    assert texts(llm.generate(PROMPTS, GREEDY)) == [SCRIPT[:12]] * 7
    llm.close()


def test_a_prompt_that_ends_replicas_does_not_end_them_all(make):
    llm = make(4, pause=0.001)
    for engine in engines_of(llm):
        step = engine.step
        engine.step = lambda engine=engine, step=step: (
            [Broken()] if any(r.prompt == [122] for r in engine.requests.values()) else step()
        )
    with pytest.raises(
        RuntimeError, match="3 replicas have ended .* had this prompt.*a mistake of"
    ):
        llm.generate("z")
    assert llm.stats()["replicas"] == 1
    assert texts(llm.generate(PROMPTS, GREEDY)) == [SCRIPT[:12]] * 7
    assert is_idle(llm)
    llm.close()


def test_the_last_replica_ends_all_calls_with_one_clear_error(make):
    llm = make(2, pause=0.001)
    stream = llm.stream(PROMPTS, LONG)
    next(stream)
    for engine in engines_of(llm):
        engine.broken = True
    message = (
        "LLM: no replica is left; the last one ended with ZeroDivisionError('a mistake of the engine'); "
        "make a new one"
    )
    for call in (lambda: list(stream), lambda: llm.generate("ab"), llm.stats):
        with pytest.raises(RuntimeError, match=re.escape(message)):
            call()
    llm.close()


def test_a_replica_may_leave_while_questions_are_asked(make):
    llm = make(3, pause=0.0005)
    calls = threading.Thread(target=llm.generate, args=(PROMPTS, LONG))
    calls.start()
    for _ in range(20):
        llm.stats()
    llm._thread.take_out(0)
    for _ in range(20):
        llm.stats()
        assert llm.compile_s == 0.0
    calls.join()
    assert llm.stats()["replicas"] == 2
    llm.close()


# --- the end --------------------------------------------------------------------------------------


def test_close_ends_all_threads(make):
    before = own_threads()
    llm = make(3, pause=0.001)
    stream = llm.stream(PROMPTS, LONG)
    next(stream)
    assert len(own_threads() - before) >= 4
    llm.close()
    assert {t for t in own_threads() - before if "tokenize" not in t.name} == set()
    with pytest.raises(RuntimeError, match="this object was closed"):
        list(stream)
    with pytest.raises(RuntimeError, match="this object was closed"):
        llm.generate("ab")


def test_calls_that_run_end_when_the_llm_is_closed(make):
    llm, errors = make(3, pause=0.001), []

    def call():
        try:
            llm.generate(PROMPTS, LONG)
        except RuntimeError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    wait_until(lambda: all(engine.num_steps > 3 for engine in engines_of(llm)))
    llm.close()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert errors == ["LLM: this object was closed; make a new one"] * 4


@pytest.mark.parametrize("failed", ["nothing", "a replica", "a stream is left", "it is closed"])
def test_an_llm_that_nobody_holds_ends_its_threads_and_is_forgotten(make, failed):
    before = own_threads()
    llm = make(3)
    llm.generate(PROMPTS, GREEDY)
    held = [weakref.ref(thread._loop) for thread in llm._thread._dispatcher.threads]
    held.append(weakref.ref(llm._thread._dispatcher))
    if failed == "a replica":
        engines_of(llm)[1].broken = True
        llm.generate(PROMPTS, GREEDY)
    if failed == "a stream is left":
        next(llm.stream(PROMPTS, LONG))
    if failed == "it is closed":
        llm.close()
    del llm
    gc.collect()
    wait_until(lambda: not own_threads() - before)
    for _ in range(2):  # a thread that is dropped lets its loop go
        gc.collect()
    assert [kept for kept in (reference() for reference in held) if kept is not None] == []


@pytest.mark.parametrize("make", ["engines here"], indirect=True)
def test_calls_in_threads_of_its_own_are_refused(make):
    llm = make(2)
    errors = []

    def call(*_):
        with suppress(ZeroDivisionError):
            try:
                llm.generate("ab")
            except RuntimeError as error:
                errors.append(str(error))
        return 1

    llm._thread._each(call)
    llm._thread._decided(call)
    assert len(errors) == 3 and all("called in the engine's own thread" in e for e in errors)
    llm.close()


# --- questions ------------------------------------------------------------------------------------


def test_stats_are_sums(make):
    with make(3) as llm:
        llm.generate(PROMPTS, GREEDY)
        found = llm.stats()
        assert found["engine_steps"] == sum(e.num_steps for e in engines_of(llm)) > 12
        assert (found["requests"], found["replicas"]) == (7, 3)
        assert (found["prompt_tokens"], found["generated_tokens"]) == (14, 84)


def test_rates_are_made_anew_and_what_is_shared_counts_once():
    one = {
        "cache_hit_tokens": 0, "cache_lookup_tokens": 100, "cache_token_hit_rate": 0.0,
        "verifications": 10, "accepted_draft_tokens": 5, "tokens_per_verification": 1.5,
        "decode_steps": 30, "drafting_share": 0.1, "disk_files": 4, "peak_live_frames": 7,
    }  # fmt: skip
    two = {
        "cache_hit_tokens": 30, "cache_lookup_tokens": 50, "cache_token_hit_rate": 0.6,
        "verifications": 30, "accepted_draft_tokens": 55, "tokens_per_verification": 85 / 30,
        "decode_steps": 10, "drafting_share": 0.5, "disk_files": 4, "peak_live_frames": 5,
    }  # fmt: skip
    assert joined_stats([one, two]) == {
        "cache_hit_tokens": 30, "cache_lookup_tokens": 150, "cache_token_hit_rate": 0.2,
        "verifications": 40, "accepted_draft_tokens": 60, "tokens_per_verification": 2.5,
        "decode_steps": 40, "drafting_share": pytest.approx(0.2), "disk_files": 4,
        "peak_live_frames": 12,
    }  # fmt: skip


def test_a_prefix_is_saved_from_the_replica_that_has_it(make, tmp_path):
    with make(3) as llm:
        llm.generate(PROMPTS[:3], GREEDY)
        asked = []
        for number, engine in enumerate(engines_of(llm)):
            engine.save_prefix = lambda file, tokens, number=number: asked.append(number) or 5
        for prompt in PROMPTS[:3]:
            assert llm.cache.save(prompt, tmp_path / "prefix") == 5
        assert asked == [0, 1, 2]


def test_a_reset_and_a_warm_up_reach_all(make):
    with make(3) as llm:
        llm.generate(PROMPTS, GREEDY)
        llm.reset_prefix_cache()
        assert [engine.seen for engine in engines_of(llm)] == [set()] * 3
        run = []
        for engine in engines_of(llm):
            listed = engine.warm_ups
            engine.warm_ups = lambda listed=listed, **named: [
                program._replace(run=lambda: run.append(1)) for program in listed(**named)
            ]
            engine.warm_ups_listed = engine.warm_ups
        assert set(llm.warmup()) == {"a program"}
        with llm.feed() as feed:
            feed.foresee(SamplingParams(logprobs=1))
        assert all(engine.expects_everything for engine in engines_of(llm))


def test_the_cache_says_who_answered(make):
    with make(2) as llm:
        outputs = llm.generate(PROMPTS[:2], GREEDY)
        told = [llm.cache.explain(out) for out in outputs]
        assert [each.replica for each in told] == [0, 1]
        assert str(told[1]).endswith(
            ". Replica 1 answered: it had nothing of the prompt, and nothing waited there"
        )
        assert llm.cache.describe().splitlines()[0] == "a fake engine, on each of 2 replicas"
        assert len(llm.cache.nodes()) == 2
        assert llm._thread.ask(questions.facts) == llm._thread.facts
    with make(1) as llm:
        assert "eplica" not in str(llm.cache.explain(llm.generate("ab", GREEDY)[0]))


@pytest.mark.parametrize("make", ["engines here"], indirect=True)
def test_the_overview_counts_replicas(make):
    with make(3) as llm:
        line = "mesh      dp=3: 3 replicas of 1 device each; sizes are those of one device"
        assert line in llm.describe().splitlines()
