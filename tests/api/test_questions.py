"""Questions to a live engine have names, and what passes either way could go to another process."""

from __future__ import annotations

import pickle
import re
import threading

import numpy as np
import pytest

from hybrid_jax import SamplingParams
from hybrid_jax.api.threads import questions
from hybrid_jax.api.threads.engine_thread import EngineThread
from hybrid_jax.api.threads.questions import LISTED, QUESTIONS, Question
from hybrid_jax.config import SpeculationConfig
from tests.api.fake_engine import GREEDY
from tests.llms import tiny_llm

SMALL = {"max_rows": 1, "max_model_len": 128, "prefill_tokens": 32}


def sent(value):
    """What arrives of a value in another process."""
    return pickle.loads(pickle.dumps(value))


@pytest.fixture
def asked(monkeypatch):
    """Has every question and every answer pass as if the engine were in another process; counts them by name."""
    ask, counts = EngineThread.ask, {}

    def asks(self, question, *args):
        counts[question.name] = counts.get(question.name, 0) + 1
        return sent(ask(self, sent(question), *sent(args)))

    monkeypatch.setattr(EngineThread, "ask", asks)
    return counts


def test_questions_and_answers_can_be_sent_to_another_process(asked, tmp_path):
    with tiny_llm(**SMALL) as llm:
        prompt = "x" * 70
        [output] = llm.generate(prompt, GREEDY)
        assert llm.stats()["prompt_tokens"] == 70 and llm.compile_s > 0
        assert "loop " not in llm.describe()  # on a CPU there is no choice
        assert llm.peak_memory_bytes > 0
        assert "70 prompt tokens" in str(llm.cache.explain(output))
        assert llm.cache.describe().splitlines()[1].startswith('[0, 64) "' + "x" * 32 + '" ...:')
        assert llm.cache.what_if(policy="lru").requests == 1
        assert llm.cache.save(prompt, tmp_path / "prefix") == llm.cache.load(tmp_path / "prefix")
        llm.reset_prefix_cache()
        assert llm.cache.nodes() == []
        [after] = llm.logprobs(prompt)
        assert np.isclose(np.exp(after).sum(), 1, atol=1e-4)
        with llm.feed() as feed:
            feed.foresee(SamplingParams(logprobs=1))
        assert llm._thread.ask(questions.where_damaged)
        assert llm._thread.ask(questions.cached, tmp_path, list(prompt.encode())) == 64
        assert llm._thread.ask(questions.cached_of, tmp_path / "prefix") == 64
        assert llm._thread.ask(questions.facts) == llm._thread.facts
        seconds = llm.warmup(threads=2)
    assert asked.keys() == QUESTIONS.keys()
    assert asked["compile_ahead"] < asked["run_program"] == len(seconds)


def test_every_question_is_in_the_table():
    made = [value for value in vars(questions).values() if isinstance(value, Question)]
    assert sorted(QUESTIONS) == sorted(question.name for question in made)
    assert len(LISTED) == len(QUESTIONS)
    assert all(sent(question) is question for question in made)


@pytest.mark.parametrize("question", [lambda engine: 1, "stats", print])
def test_what_has_no_name_in_the_table_cannot_be_asked(llm, question):
    message = f"ask: takes a question of api.questions, got {question!r}"
    with pytest.raises(TypeError, match=re.escape(message)):
        llm._thread.ask(question)


def test_only_the_engines_thread_and_the_questions_name_the_engine(root):
    """And what makes it. Whoever else needs something of it asks, or reads the facts."""
    naming = {
        path.relative_to(root / "hybrid_jax").as_posix()
        for room in ("api", "batch", "cli", "openai", "viz")
        for path in (root / "hybrid_jax" / room).rglob("*.py")
        if re.search(r"\bengine\.engine\b|lambda engine", path.read_text())
    }
    assert naming == {
        f"api/{name}.py"
        for name in (
            "starting",
            *(f"threads/{n}" for n in ("loop", "loop_of_hosts", "questions", "replicas")),
        )
    }


def test_some_questions_are_answered_while_the_engine_computes(make_llm):
    """A bar shows the seconds of compiling while a program is compiled."""
    llm = make_llm(steps_per_dispatch=1)
    computes, goes_on = threading.Event(), threading.Event()
    step = llm._engine.step

    def slow():
        computes.set()
        assert goes_on.wait(20)
        return step()

    llm._engine.step = slow
    call = threading.Thread(target=llm.generate, args=("ab", GREEDY), daemon=True)
    call.start()
    assert computes.wait(20)
    assert llm.compile_s == 0 and llm.peak_memory_bytes > 0 and llm.max_model_len == 200
    waits = threading.Thread(target=llm.reset_prefix_cache, daemon=True)
    waits.start()
    waits.join(0.2)
    assert waits.is_alive()
    goes_on.set()
    for thread in (waits, call):
        thread.join(20)
        assert not thread.is_alive()


def test_facts_hold_the_model_that_drafts():
    """The engine's model, not the caller's: overviews tell of both."""
    with tiny_llm(**SMALL, speculation=SpeculationConfig(method="ngram", num_tokens=2)) as llm:
        found = llm._thread.facts
        assert sent(found) == found
        assert found.config == llm._engine.config
        assert (found.max_model_len, found.longest_prompt) == (128, 128)
        assert "2 tokens a step" in llm.describe()
