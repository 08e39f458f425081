"""Workers that were stopped: processes that are there, and do nothing any more. The bundled model."""

from __future__ import annotations

import os
import re
import signal

import pytest

from hybrid_jax import LLM, SamplingParams
from hybrid_jax.api.workers import worker_loop
from tests.api.books import wait_until
from tests.drawing import left_to_all
from tests.llms import BUNDLED, HEAD

PARAMS = SamplingParams(temperature=0.8, seed=3, max_tokens=40, ignore_eos=True)
GIVEN = [f"# {n}\n" + HEAD * 3 for n in range(3)]


@pytest.fixture
def soon(monkeypatch):
    """They are given up after ten seconds."""
    monkeypatch.setattr(worker_loop, "SILENT", 10)


@pytest.fixture(scope="module")
def expected(bundled):
    return tokens(bundled.generate(GIVEN, PARAMS))


def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def processes(llm):
    threads = llm._thread._dispatcher.threads
    return [int(re.search(r"process (\d+)", thread._loop._link.about)[1]) for thread in threads]


@pytest.mark.parametrize(
    "replicas, which, more",
    [
        (2, 0, 0),
        # Far more than a pipe holds: the worker does not read it.
        pytest.param(2, 0, 3000, marks=left_to_all),
        pytest.param("prefill=1,decode=1", 0, 0, marks=left_to_all),
        pytest.param("prefill=1,decode=1", 1, 0, marks=left_to_all),
    ],
)
def test_a_worker_that_was_stopped_is_replaced(soon, expected, replicas, which, more, caplog):
    """Its prompts are computed elsewhere, or in its place, with the same tokens."""
    with LLM(**BUNDLED, replicas=replicas, quiet=True) as llm:
        assert tokens(llm.generate(GIVEN, PARAMS)) == expected
        llm.reset_prefix_cache()
        before = processes(llm)
        stream = llm.stream(GIVEN, PARAMS)
        deltas = [next(stream)] if which or not isinstance(replicas, str) else []
        os.kill(before[which], signal.SIGSTOP)
        if more:
            llm.generate([HEAD] * more, SamplingParams(max_tokens=1))
        deltas += stream
        found = [
            sum((d.token_ids for d in deltas if d.prompt_index == n), ()) for n in range(len(GIVEN))
        ]
        assert found == expected
        assert f"process {before[which]}): it has said nothing for 10 seconds: it" in caplog.text
        wait_until(lambda: not llm._thread._dispatcher.reviving, 120)
        assert llm.stats()["replicas"] == 2
        assert processes(llm)[1 - which] == before[1 - which]
        assert tokens(llm.generate(GIVEN, PARAMS)) == expected
    with pytest.raises(ProcessLookupError):
        os.kill(before[which], 0)
