"""`LLM.feed`: prompts added while others run, and none left behind."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from hybrid_jax import SamplingParams
from hybrid_jax.api.overview import fingerprint
from hybrid_jax.weights.digest import SAMPLES, weights_digest
from tests.api.fake_engine import CONFIG, SCRIPT, texts
from tests.llms import byte_tokenizer


def params(num_tokens):
    return SamplingParams(max_tokens=num_tokens)


def test_prompts_added_later_run_beside_the_earlier_ones(make_llm):
    llm = make_llm(steps_per_dispatch=1)
    with llm.feed() as feed:
        first = feed.add("ab", params(12))
        assert [feed.step() for _ in range(4)] == [[]] * 4
        second = feed.add(["cd", "ef"], params(3))
        assert (feed.num_unfinished, feed.num_tokens) == (3, 4)
        assert [feed.step() for _ in range(3)] == [[], [], [second]]
        assert (feed.num_unfinished, feed.num_tokens) == (1, 7)
        while not first.finished:
            found = feed.step()
        assert found == [first]
        assert feed.step() == []
    assert texts(second.outputs()) == [SCRIPT[:3]] * 2
    assert first.outputs()[0].outputs[0].text == SCRIPT[:12]
    assert llm.stats()["generated_tokens"] == 18


def test_a_prompt_the_engine_refuses_leaves_the_others_running(llm):
    with llm.feed() as feed:
        ticket = feed.add("ab", params(9))
        refused = feed.add(["x", {"prompt_token_ids": [255]}], params(9))
        assert feed.step() == [refused] and refused.finished
        with pytest.raises(ValueError, match="prompt 1: the engine refuses byte 255"):
            refused.outputs()
        with pytest.raises(ValueError, match="prompt 0: has 200 tokens"):
            feed.add("x" * 200, params(9))
        assert feed.num_unfinished == len(llm._engine.requests) == 1
        while not ticket.finished:
            feed.step()
    assert len(llm._engine.aborted) == 1  # the "x" beside the refused one


def test_leaving_the_block_ends_what_still_runs(llm):
    with pytest.raises(KeyboardInterrupt), llm.feed() as feed:
        feed.add(["ab", "cd"], params(50))
        feed.step()
        raise KeyboardInterrupt
    llm.stats()  # comes after what was left behind is ended
    assert not llm._engine.has_work


def test_a_feed_that_is_dropped_ends_what_still_runs(llm):
    feed = llm.feed()
    feed.add(["ab", "cd"], params(50))
    feed.step()
    assert llm._engine.has_work
    del feed
    llm.stats()
    assert not llm._engine.has_work


def test_the_engine_waits_for_a_feed_only_while_that_is_alone(make_llm):
    llm = make_llm(steps_per_dispatch=1)
    with llm.feed() as feed:
        ticket = feed.add("ab", params(60))
        feed.step()
        llm.stats()
        assert llm._engine.num_steps == 1
        llm.generate("cd", params(30))
        assert llm._engine.num_steps > 30 and 30 <= ticket.num_tokens < 60
        while not ticket.finished:
            feed.step()
    assert texts(ticket.outputs()) == [(SCRIPT * 2)[:60]]


def test_a_fingerprint_tells_models_apart():
    weights = {"a": jnp.arange(3.0), "b": jnp.zeros((4 * SAMPLES, 2))}
    same = {"a": jnp.arange(3.0), "b": jnp.zeros((4 * SAMPLES, 2))}
    other = {"a": jnp.arange(3.0), "b": jnp.zeros((4 * SAMPLES, 2)).at[SAMPLES].set(1)}
    moved = {"b": jnp.arange(3.0), "a": jnp.zeros((4 * SAMPLES, 2))}
    template = byte_tokenizer()
    template.chat_templates["default"] += "."
    own = weights_digest(CONFIG, weights)
    known = fingerprint(own, byte_tokenizer())
    assert known == fingerprint(weights_digest(CONFIG, same), byte_tokenizer())
    others = [
        *(fingerprint(weights_digest(CONFIG, w), byte_tokenizer()) for w in (other, moved)),
        fingerprint(own, None),
        fingerprint(own, template),
    ]
    assert len({known, *others}) == 5


def test_a_closed_feed_says_so(llm):
    with llm.feed() as feed:
        ticket = feed.add("ab")
    for use in (feed.step, lambda: feed.add("ab")):
        with pytest.raises(RuntimeError, match="feed: it was closed, .* make a new one"):
            use()
    assert ticket.num_tokens == 0
