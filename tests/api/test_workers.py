"""Engines in other processes behind one LLM: the bundled model, and what links may do."""

from __future__ import annotations

import gc
import pickle
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest

import hybrid_jax
from hybrid_jax import LLM, SamplingParams, StructuredOutputsParams
from hybrid_jax.api import starting
from hybrid_jax.api.threads import dispatcher, questions
from hybrid_jax.api.threads.calls import Call
from hybrid_jax.api.threads.commands import Command
from hybrid_jax.api.workers import link as link_module
from hybrid_jax.api.workers import starting as workers_starting
from hybrid_jax.api.workers import worker_loop
from hybrid_jax.api.workers.link import Frames, WorkerLost, as_bytes, portable
from hybrid_jax.api.workers.messages import Start
from hybrid_jax.api.workers.starting import ready_workers
from hybrid_jax.sizing.devices import Device
from hybrid_jax.text.given_tokenizer import as_tokenizer
from hybrid_jax.worker import serving
from tests.api.books import left_in_the_end, wait_until
from tests.api.fake_engine import CONFIG, GREEDY, SCRIPT, FakeEngine, texts
from tests.api.thread_workers import llm_of_workers, start_worker
from tests.drawing import spine
from tests.llms import BUNDLED, HEAD, engines_of

LONG = SamplingParams(temperature=0.0, max_tokens=150)
PROMPTS = [letter * 2 for letter in "abcdefg"]


# --- frames ---------------------------------------------------------------------------------------


def frames(count=3):
    """What one end sent, and the other end."""
    one, other = Frames("one"), Frames("worker 3")
    return [
        one.pack([as_bytes(("message", n)), as_bytes(np.arange(n))]) for n in range(count)
    ], other


@spine
def test_frames_bring_messages_in_order():
    sent, other = frames()
    found = [other.unpack(frame) for frame in sent]
    assert [message for message, _ in found] == [("message", n) for n in range(3)]
    assert [array.tolist() for _, array in found] == [[], [0], [0, 1]]
    assert Frames("one").pack([]) and other.unpack(frames(4)[0][3])


def changed(frame, place):
    return frame[:place] + bytes([frame[place] ^ 1]) + frame[place + 1 :]


@pytest.mark.parametrize(
    "spoilt, says",
    [
        (lambda sent: [sent[0][:20]], "a message of 20 bytes is cut"),
        (lambda sent: [sent[0][:-1]], "message 0 was cut or changed on the way"),
        (lambda sent: [changed(sent[0], len(sent[0]) - 2)], "message 0 was cut or changed"),
        (lambda sent: [b"x" + sent[0][1:]], "what came is no message of hybrid_jax"),
        (lambda sent: [sent[0], sent[0]], "message 0 came where 1 was due: one was lost, or came"),
        (lambda sent: [sent[1]], "message 1 came where 0 was due"),
        (lambda sent: [sent[0], sent[2]], "message 2 came where 1 was due"),
    ],
)
def test_frames_that_were_spoilt_are_refused(spoilt, says):
    sent, other = frames()
    with pytest.raises(WorkerLost, match=f"worker 3: .*{says}|worker 3: {says}"):
        for frame in spoilt(sent):
            other.unpack(frame)


def test_frames_of_another_version_are_refused(monkeypatch):
    monkeypatch.setattr(link_module, "__version__", "9.9.9")
    [frame], other = frames(1)
    monkeypatch.undo()
    says = f"worker 3 runs hybrid_jax 9.9.9, and this process {hybrid_jax.__version__}; install the same"
    with pytest.raises(WorkerLost, match=says):
        other.unpack(frame)


class Odd(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def test_errors_that_cannot_travel_say_the_same():
    assert portable(error := ValueError("plain")) is error
    assert repr(portable(Odd(1, 2))) == "RuntimeError('Odd: 1 and 2')"
    with pytest.raises(TypeError):
        pickle.loads(pickle.dumps(Odd(1, 2)))


# --- links that fail, over the fake engine ---------------------------------------------------------


@pytest.fixture
def one(monkeypatch, tokenizer):
    """An LLM with a fake engine."""
    monkeypatch.setattr(starting, "Engine", FakeEngine)

    def one():
        options = {"steps_per_dispatch": 1, "quiet": True, "tokenizer": tokenizer}
        llm = LLM.from_params(CONFIG, None, **options)
        llm._engine.pause = 0.0005
        return llm

    return one


@pytest.fixture
def make(one, tokenizer):
    """An LLM of workers with fake engines, and the links to them."""

    def make(count, **options):
        llm = llm_of_workers(one, count, as_tokenizer(tokenizer), **options)
        return llm, [thread._loop._link for thread in llm._thread._dispatcher.threads]

    return make


SPOILS = {
    "cut": lambda frame: [frame[:-3]],
    "changed": lambda frame: [changed(frame, len(frame) - 5)],
    "twice": lambda frame: [frame, frame],
    "lost": lambda frame: [],
    "gone": None,
}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("spoilt", SPOILS)
def test_a_link_that_fails_at_any_moment_loses_and_doubles_nothing(make, one, spoilt, seed):
    draw = random.Random(f"{spoilt} {seed}")
    params = [
        SamplingParams(max_tokens=draw.randrange(1, 120), n=draw.randrange(1, 4), logprobs=1)
        for _ in PROMPTS
    ]
    with one() as llm:
        expected = [out.outputs for out in llm.generate(PROMPTS, params)]
    llm, links = make(3)
    moments = sorted(draw.randrange(1, 200) for _ in range(2))
    left = draw.sample(range(3), 2)
    deltas = []
    for number, delta in enumerate(llm.stream(PROMPTS, params)):
        deltas.append(delta)
        while moments and number >= moments[0]:
            moments.pop(0)
            link = links[left[len(moments)]]
            if spoilt == "gone":
                link.kill()
                continue
            once = [SPOILS[spoilt]]
            link.spoil = lambda frame, once=once: once.pop()(frame) if once else [frame]
    for index, out in enumerate(expected):
        [output] = [d.output for d in deltas if d.prompt_index == index and d.output is not None]
        assert output.outputs == out
        for one in output.outputs:
            mine = [d for d in deltas if (d.prompt_index, d.index) == (index, one.index)]
            assert "".join(d.text for d in mine) == one.text
            assert sum((d.token_ids for d in mine), ()) == one.token_ids
            assert len(one.logprobs) == len(one.token_ids)
    assert llm.stats()["replicas"] >= 1
    assert texts(llm.generate(PROMPTS, GREEDY)) == [SCRIPT[:12]] * 7
    for link in links:
        link.spoil = lambda frame: [frame]
    llm.close()


@pytest.mark.parametrize("spoilt", ["cut", "changed", "twice"])
def test_what_a_worker_cannot_read_is_told_and_lost_nowhere(make, caplog, spoilt):
    llm, links = make(2)
    once = [SPOILS[spoilt]]
    links[0].worker._link.spoil = lambda frame: once.pop()(frame) if once else [frame]
    assert texts(llm.generate(PROMPTS, GREEDY)) == [SCRIPT[:12]] * 7
    wait_until(lambda: llm.stats()["replicas"] == 1)
    assert not once and "WorkerLost('the caller: message " in caplog.text
    llm.close()


def test_a_worker_that_cannot_read_who_it_is_to_be_says_why():
    link = start_worker(0, None)
    link.send(b"x" * 10)
    [told] = Frames(link.about).unpack(link.receive())
    assert "the caller: a message of 10 bytes is cut" in str(told.error)
    link.close()


def test_calls_that_are_not_streamed_go_on_from_what_was_told(make, monkeypatch):
    monkeypatch.setattr(serving, "TOLD_EVERY", 0.005)
    llm, links = make(2)
    other, known = engines_of(llm)[1], []
    add = other.add
    other.add = lambda request: (known.append(len(request.output.token_ids)), add(request))
    with llm.feed() as feed:
        ticket = feed.add(PROMPTS, LONG)

        def steps():
            while not ticket.finished:
                feed.step()

        call = threading.Thread(target=steps)
        call.start()
        while ticket.num_tokens < 140:
            time.sleep(0.001)
        links[0].kill()
        call.join(30)
    assert texts(ticket.outputs()) == [(SCRIPT * 9)[:150]] * 7
    assert len(known) == 7 and known[:3] == [0] * 3 and all(known[3:])
    llm.close()


def links_of(llm):
    return [thread._loop._link for thread in llm._thread._dispatcher.threads]


@pytest.mark.parametrize("count", [1, 3])
def test_a_worker_that_ended_is_started_again(make, count, caplog):
    """As often as `MAX_STARTS` says. Meanwhile its prompts go on elsewhere, or wait for it where there is no other."""
    others = set(threading.enumerate())
    llm, links = make(count, again=True)
    for kill in range(dispatcher.MAX_STARTS + 1):
        before = links_of(llm)
        stream = llm.stream(PROMPTS, LONG)
        deltas = [next(stream)]
        before[0].kill()
        if kill == dispatcher.MAX_STARTS and count == 1:
            with pytest.raises(RuntimeError, match="no replica is left; the last one ended with W"):
                list(stream)
            break
        deltas += stream
        assert sum(len(delta.token_ids) for delta in deltas) == 150 * len(PROMPTS)
        wait_until(lambda: not llm._thread._dispatcher.reviving)
        left = count - (kill == dispatcher.MAX_STARTS)
        assert llm.stats()["replicas"] == left and (links_of(llm)[0] is before[0]) == (left < count)
    assert caplog.text.count("it is started again") == dispatcher.MAX_STARTS
    assert caplog.text.count("it is left out") == 1 and "replica 0 is there again" in caplog.text
    llm.close()
    wait_until(lambda: not set(threading.enumerate()) - others)  # of workers that were killed, too


@pytest.mark.parametrize("fails", [1, dispatcher.MAX_STARTS])
def test_a_start_that_fails_is_tried_again(make, monkeypatch, caplog, fails):
    monkeypatch.setattr(dispatcher, "RETRY_AFTER", 0.01)
    llm, links = make(2, again=True)
    deciding, tries = llm._thread._dispatcher, []
    revive = deciding._revive

    def fail(replica):
        tries.append(replica)
        if len(tries) <= fails:
            raise OSError("no room")
        return revive(replica)

    monkeypatch.setattr(deciding, "_revive", fail)
    links[0].kill()
    wait_until(lambda: tries and not deciding.reviving)
    assert caplog.text.count("could not be started again: no room; it is tried once more") == min(
        fails, dispatcher.MAX_STARTS - 1
    )
    there = fails < dispatcher.MAX_STARTS
    assert ("it is left out" in caplog.text) != there
    assert llm.stats()["replicas"] == 1 + there and set(tries) == {0}
    llm.close()


def test_a_prompt_that_ends_workers_does_not_end_them_for_good(make, one):
    """It ends with an error, and other prompts beside it do not, for they get on between two ends."""
    llm, _ = make(2, again=True)

    def breaks(engine):
        step = engine.step

        def broken():
            if any(request.prompt == [122] for request in engine.requests.values()):
                return [None]  # which ends its loop
            return step()

        engine.step = broken

    made = FakeEngine.__init__

    def __init__(self, *args, **kwargs):
        made(self, *args, **kwargs)
        breaks(self)

    for engine in engines_of(llm):
        breaks(engine)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeEngine, "__init__", __init__)
        found = []
        beside = threading.Thread(target=lambda: found.extend(llm.generate(PROMPTS, LONG)))
        beside.start()
        with pytest.raises(RuntimeError, match="3 replicas have ended one after the other while"):
            llm.generate("z")
        beside.join(30)
    assert texts(found) == [(SCRIPT * 9)[:150]] * 7
    llm.close()


def test_what_cannot_travel_is_refused_and_ends_nothing(make):
    class Local(SamplingParams):
        """No other process can read it."""

    llm, _ = make(2)
    with pytest.raises((AttributeError, pickle.PicklingError)):
        llm._thread._each(lambda loop: 1)
    with pytest.raises((AttributeError, pickle.PicklingError)):
        llm.generate(PROMPTS, Local(max_tokens=2))
    assert texts(llm.generate(PROMPTS, GREEDY)) == [SCRIPT[:12]] * 7
    assert llm.stats()["replicas"] == 2
    llm.close()


# --- what others do just when a worker ends ---------------------------------------------------------


def test_a_question_is_answered_although_a_worker_was_started_again_meanwhile(make):
    llm, links = make(2, again=True)
    goes_on, found = threading.Event(), []
    links[1].spoil = lambda frame: [frame] if goes_on.wait(20) else []
    asked = threading.Thread(target=lambda: found.append(llm.stats()))
    asked.start()
    links[0].kill()
    wait_until(lambda: links_of(llm)[0] is not links[0])
    goes_on.set()
    asked.join(20)
    assert found[0]["replicas"] == 2
    llm.close()


def test_a_worker_that_nobody_knows_to_have_ended_is_no_error_of_a_question(make):
    llm, links = make(2)
    with ThreadPoolExecutor(1) as pool, held_up(llm):
        links[0].kill()
        ended(llm, 0)
        found = pool.submit(lambda: llm.compile_s)
        time.sleep(0.02)
    assert found.result(20) == 0.0
    llm.close()


def test_an_error_that_a_question_met_does_not_keep_what_asked_it(make):
    others = set(threading.enumerate())
    llm, links = make(2)

    def ask(llm):
        with pytest.raises(WorkerLost):
            llm._thread._dispatcher.threads[0].ask(questions.compile_seconds)

    links[0].kill()
    ended(llm, 0)
    ask(llm)
    del llm, links
    gc.collect()
    wait_until(lambda: not set(threading.enumerate()) - others)


def test_calls_that_no_worker_has_end_when_the_llm_is_closed(make, monkeypatch):
    """One waits for a worker to be started again."""
    llm, links = make(1, again=True)
    dispatcher, goes_on = llm._thread._dispatcher, threading.Event()
    revive = dispatcher._revive
    monkeypatch.setattr(dispatcher, "_revive", lambda n: goes_on.wait(20) and revive(n))
    call = submitted(llm)
    links[0].kill()
    wait_until(lambda: dispatcher._homeless)
    llm._thread.close(wait=False)
    assert "this object was closed" in str(call.news.get(timeout=20).error)
    goes_on.set()


@pytest.fixture
def silent(monkeypatch):
    """Engines from which no token comes, until this is called."""
    step, silent = FakeEngine.step, [True]
    monkeypatch.setattr(
        FakeEngine, "step", lambda self: (time.sleep(0.001), [])[1] if silent else step(self)
    )
    return silent.clear


def with_suspects(make):
    """An LLM of one worker, and two calls that had it when it ended twice: the first one is on trial now."""
    llm, _ = make(1, again=True)
    calls = [submitted(llm), submitted(llm)]
    for _ in range(2):
        before = ended_by_force(llm)
        wait_until(lambda before=before: links_of(llm)[0] is not before)
    dispatcher = llm._thread._dispatcher
    wait_until(lambda: dispatcher._suspects)
    assert dispatcher.on_trial is calls[0].jobs[0]
    return llm, calls


def test_calls_that_wait_for_their_trial_end_when_the_llm_is_closed(make, silent):
    llm, calls = with_suspects(make)
    llm.close()
    for call in calls:
        assert "this object was closed" in str(call.news.get(timeout=20).error)


def test_a_trial_ends_although_its_caller_left_just_when_its_worker_ended(make, silent):
    llm, (first, second) = with_suspects(make)
    with held_up(llm):
        llm._thread.leave(first)
        ended_by_force(llm)
        silent()
    news = second.news.get(timeout=20)
    assert news.over and news.error is None
    assert left_in_the_end(llm) == []
    llm.close()


def test_what_a_worker_that_has_ended_is_asked_to_give_back_is_not_waited_for(make):
    """It had ended before, and the worker knew of it no longer."""
    llm, links = make(2)
    links[0].kill()
    ended(llm, 0)
    call, told = Call([]), []
    call.kept = lambda: told.append("kept")
    llm._thread._dispatcher.threads[0].give_back(call)
    assert told == ["kept"]
    llm.close()


def test_a_worker_that_is_taken_out_while_it_is_started_again_does_not_come_back(make, monkeypatch):
    others = set(threading.enumerate())
    llm, links = make(2, again=True)
    dispatcher, goes_on = llm._thread._dispatcher, threading.Event()
    revive = dispatcher._revive
    monkeypatch.setattr(dispatcher, "_revive", lambda n: goes_on.wait(20) and revive(n))
    links[0].kill()
    wait_until(lambda: dispatcher.reviving)
    llm._thread.take_out(0)
    goes_on.set()
    wait_until(lambda: not dispatcher.reviving)
    assert llm.stats()["replicas"] == 1 and dispatcher.present == (1,)
    llm.close()
    wait_until(lambda: not set(threading.enumerate()) - others)


def test_a_worker_that_comes_back_just_when_the_llm_is_closed_ends_too(make, monkeypatch):
    others = set(threading.enumerate())
    llm, links = make(2, again=True)
    add, front = llm._thread._dispatcher.add, llm._thread
    monkeypatch.setattr(
        llm._thread._dispatcher, "add", lambda *args: (front.close(wait=False), add(*args))
    )
    links[0].kill()
    wait_until(lambda: not set(threading.enumerate()) - others)


@contextmanager
def held_up(llm):
    """The thread that decides does nothing meanwhile."""
    goes_on = threading.Event()
    llm._thread._dispatcher.give(Command(lambda: goes_on.wait(20)))
    try:
        yield
    finally:
        goes_on.set()


def ended(llm, replica):
    """Waits until the thread of a worker knows that it has ended."""
    llm._thread._dispatcher.threads[replica].join()


def ended_by_force(llm):
    """Ends the only worker; returns the link to it."""
    [thread] = llm._thread._dispatcher.threads
    thread._loop._link.kill()
    thread.join()
    return thread._loop._link


def submitted(llm):
    """A call of one prompt, for which nobody waits."""
    call = Call(llm._intake.jobs("ab", GREEDY))
    llm._thread.submit([call])
    return call


# --- workers that hang ------------------------------------------------------------------------------


@pytest.fixture
def soon(monkeypatch):
    """Workers say often that they are there, and are given up soon if they do not."""
    for module in (link_module, serving):
        monkeypatch.setattr(module, "BEAT", 0.02)
    monkeypatch.setattr(worker_loop, "SILENT", 25)
    monkeypatch.setattr(workers_starting, "STARTING", 25)


def nothing(frame):
    return []


@pytest.mark.parametrize("asks", [lambda llm: llm.stats()["replicas"], lambda llm: None])
def test_a_worker_that_says_nothing_any_more_is_given_up(make, soon, caplog, asks):
    """Whoever waits for an answer of it gets those of the others."""
    llm, links = make(2, again=True)
    stream = llm.stream(PROMPTS, LONG)
    deltas = [next(stream)]
    links[0].spoil = nothing
    asks(llm)
    deltas += stream
    assert sum(len(delta.token_ids) for delta in deltas) == 150 * len(PROMPTS)
    assert "worker 0: it has said nothing for 0.5 seconds: it was stopped, or hangs" in caplog.text
    wait_until(lambda: not llm._thread._dispatcher.reviving)
    assert llm.stats()["replicas"] == 2
    llm.close()


def test_a_worker_that_has_nothing_to_do_is_kept(make, soon, caplog):
    llm, _ = make(2)
    time.sleep(1.5)
    assert llm.stats()["replicas"] == 2 and "said nothing" not in caplog.text
    llm.close()


def test_a_worker_may_take_long_to_start_but_not_say_nothing(one, soon):
    """What it makes takes three times as long as it may say nothing."""

    def make(start, hand_over):
        time.sleep(1.5)
        return one()

    link = start_worker(0, make)
    [worker] = ready_workers([link], Start(None, {}, {}), False)
    assert worker.ready.facts.config == CONFIG
    link.kill()
    link, beats = start_worker(1, make), []
    link.spoil = lambda frame: [] if beats else beats.append(frame) or [frame]
    with pytest.raises(WorkerLost, match="LLM: worker 1 did not start: it has said nothing for 0"):
        ready_workers([link], Start(None, {}, {}), False)
    link.kill()


@pytest.mark.parametrize("on_card", [True, False])
def test_a_card_that_hangs_ends_its_worker(make, soon, monkeypatch, caplog, on_card):
    """A turn of a CPU may take any time."""
    step, goes_on, hangs = FakeEngine.step, threading.Event(), [True]

    def hang(engine):
        if hangs:
            hangs.clear()
            goes_on.wait(20 if on_card else 1)
        return step(engine)

    monkeypatch.setattr(FakeEngine, "step", hang)
    monkeypatch.setattr(serving, "TURN_LIMIT", 0.3)
    monkeypatch.setattr(Device, "is_host", not on_card)
    llm, _ = make(2)
    assert texts(llm.generate(PROMPTS, GREEDY)) == [SCRIPT[:12]] * 7
    assert llm.stats()["replicas"] == 2 - on_card
    assert ("its engine has been at one turn for 0 seconds" in caplog.text) == on_card
    goes_on.set()
    llm.close()


# --- the bundled model in processes ----------------------------------------------------------------


@pytest.fixture(scope="module")
def workers():
    with LLM(**BUNDLED, replicas=2, quiet=True) as llm:
        yield llm


def processes(llm):
    return [thread._loop._link._process for thread in llm._thread._dispatcher.threads]


WRITTEN = [HEAD + f"    def read{n}(self):\n" for n in range(4)] + ["import ", "def add(a, b):\n"]


def shown(output):
    return [(c.text, c.token_ids, c.finish_reason, c.stop_reason) for c in output.outputs]


def likelihoods(output):
    entries = [*(output.prompt_logprobs or ()), *(output.outputs[0].logprobs or ())]
    return [found.logprob for entry in entries if entry for found in entry.values()]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0, max_tokens=9),
        SamplingParams(temperature=0.9, top_p=0.9, max_tokens=9, n=2),
        SamplingParams(temperature=0.7, seed=3, max_tokens=9, stop=["self", "(a"], logprobs=2),
        SamplingParams(temperature=0.0, max_tokens=5, prompt_logprobs=1),
        SamplingParams(temperature=0.8, max_tokens=9, presence_penalty=0.5),
        SamplingParams(
            max_tokens=12, structured_outputs=StructuredOutputsParams(regex=r"[0-9]{3}x")
        ),
    ],
)
def test_workers_give_what_one_engine_gives(workers, bundled, params):
    if params.seed is None:
        for llm in (workers, bundled):
            llm._intake.num_requests = 0
    want, found = bundled.generate(WRITTEN, params), workers.generate(WRITTEN, params)
    assert [shown(out) for out in found] == [shown(out) for out in want]
    for one, other in zip(found, want, strict=True):  # they may run beside other prompts
        assert likelihoods(one) == pytest.approx(likelihoods(other), abs=1e-4)
    assert {str(workers.cache.explain(out)).split("Replica ")[1][0] for out in found} == {"0", "1"}


def test_reading_and_looking(workers, bundled):
    for llm in (workers, bundled):
        llm.reset_prefix_cache()
    assert workers.score("import ", ["os", "sys"]) == bundled.score("import ", ["os", "sys"])
    np.testing.assert_array_equal(workers.embed("import os"), bundled.embed("import os"))
    assert workers.fingerprint() == bundled.fingerprint()
    first = workers.generate(WRITTEN[0], GREEDY)[0]
    again = workers.generate(WRITTEN[0], GREEDY)[0]
    assert first.num_cached_tokens == 0 < again.num_cached_tokens
    assert workers.stats()["cache_hits"] >= 1
    assert (
        "\nreplicas  2 in processes of this machine; sizes are those of one\n" in workers.describe()
    )
