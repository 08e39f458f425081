"""The loop of a model over several processes: threads with fake engines, which tell each other what has come."""

from __future__ import annotations

import threading

import pytest

from hybrid_jax import LLM, SamplingParams
from hybrid_jax.api import starting
from hybrid_jax.mesh.hosts import Hosts, HostsDiffer
from tests.api.books import wait_until
from tests.api.fake_engine import CONFIG, GREEDY, SCRIPT, FakeEngine, texts
from tests.api.host_store import Store
from tests.llms import engine_of

LONG = SamplingParams(max_tokens=150, temperature=0.0)


@pytest.fixture
def pair(monkeypatch, tokenizer):
    """Two LLMs that take each other for the same model in another process."""
    monkeypatch.setattr(starting, "Engine", FakeEngine)
    store, own = Store(), threading.local()
    monkeypatch.setattr(starting, "hosts_of", lambda _: Hosts((0, 1), own.index, store, "a"))

    def make(index):
        own.index = index
        return LLM.from_params(CONFIG, None, tokenizer=tokenizer, quiet=True, steps_per_dispatch=1)

    both = in_threads(make)
    yield both
    for llm in both:
        llm.close()


def in_threads(call):
    """What a call returns or raises for each of the two, both at once."""
    found = [None, None]

    def run(index):
        try:
            found[index] = call(index)
        except Exception as error:
            found[index] = error

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive(), found
    return found


def test_both_answer_and_take_the_same_turns(pair):
    found = in_threads(lambda index: texts(pair[index].generate(["ab", "cd"], GREEDY)))
    assert found[0] == found[1] and found[0][0].startswith(SCRIPT[:4])
    wait_until(lambda: not any(engine_of(llm._thread).has_work for llm in pair))
    assert len({engine_of(llm._thread).num_steps for llm in pair}) == 1
    assert pair[1].stats()["requests"] == 2  # asked by one alone


def test_a_question_of_one_beside_a_stream_that_was_left(pair):
    def leaves(index):
        stream = pair[index].stream(["ab", "cd"], LONG)
        for _ in range(5):
            next(stream)
        stream.close()
        if index == 0:
            for _ in range(20):
                pair[0].stats()
        return texts(pair[index].generate("ef", GREEDY))

    found = in_threads(leaves)
    assert found[0] == found[1] == [SCRIPT[: len(found[0][0])]]


def test_a_call_that_the_other_never_makes_ends_with_close(pair):
    errors = []

    def call():
        try:
            pair[0].generate("ab", GREEDY)
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    wait_until(lambda: pair[0]._thread._loop._waiting)
    pair[0].close()
    thread.join(20)
    assert errors == ["LLM: this object was closed; make a new one"]
    with pytest.raises(HostsDiffer, match="process 0 has closed this model"):
        pair[1].generate("ab", GREEDY)


def fed(llm, prompt):
    with llm.feed() as feed:
        ticket = feed.add(prompt, GREEDY)
        while not ticket.finished:
            feed.step()
        return texts(ticket.outputs())


def test_feeds_take_turns_together(pair):
    found = in_threads(lambda index: fed(pair[index], ["ab", "cd"]))
    assert found[0] == found[1] and len(found[0]) == 2
    assert len({engine_of(llm._thread).num_steps for llm in pair}) == 1


@pytest.mark.parametrize("differs", ["call", "plan"])
def test_what_differs_ends_both_in_a_feed_too(pair, differs):
    if differs == "plan":
        for llm in pair:
            engine_of(llm._thread).raises = HostsDiffer("the plans differ")
    prompts = ["ab", "abx" if differs == "call" else "ab"]
    found = in_threads(lambda index: fed(pair[index], prompts[index]))
    assert [type(error) for error in found] == [HostsDiffer] * 2, found
    says = "the plans differ" if differs == "plan" else "process 0 has a call with 1 prompt"
    for llm in pair:
        with pytest.raises(HostsDiffer, match=says):
            llm.generate("ab", GREEDY)


def test_streams_that_are_left_in_another_order_are_seen(pair):
    def leaves(index):
        streams = [pair[index].stream(prompt, LONG) for prompt in ("ab", "cd")]
        for stream in streams:
            next(stream)
        streams[index].close()
        return list(streams[1 - index])

    found = in_threads(leaves)
    assert [type(error) for error in found] == [HostsDiffer] * 2, found
    assert "process 0 has the end of a call with 1 prompt" in str(found[0])
