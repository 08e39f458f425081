"""What `logging` hears under "hybrid_jax": nothing unless asked, then starts, compiling, refusals and preemptions."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
import weakref

import pytest

from hybrid_jax import SamplingParams, run_batch
from tests.api.fake_engine import GREEDY
from tests.batch.batch_files import line, write
from tests.exactness.engines import short_of_memory
from tests.llms import tiny_llm


def said(caplog, name):
    return [record.getMessage() for record in caplog.records if record.name == f"hybrid_jax.{name}"]


def test_kernels_that_a_cpu_interprets_are_warned_of(make_llm, caplog):
    make_llm(kernels="xla")
    assert not said(caplog, "engine")
    make_llm(kernels="pallas")
    assert said(caplog, "engine") == [
        "kernels='pallas' are interpreted on a CPU, many times slower; leave kernels out"
    ]


def test_a_start_and_a_refusal_are_heard(make_llm, caplog):
    caplog.set_level(logging.INFO, logger="hybrid_jax")
    llm = make_llm()
    assert said(caplog, "engine")[0].startswith("started LLM(llama, float32, max_model_len=200")
    with pytest.raises(ValueError):
        llm.generate("", GREEDY)
    assert said(caplog, "requests") == [
        "refused: prompt 0: is empty; a prompt needs at least one token"
    ]


def test_records_that_are_kept_hold_no_engine(make_llm, caplog):
    caplog.set_level(logging.INFO, logger="hybrid_jax")
    llm = make_llm()
    with pytest.raises(ValueError):
        llm.generate("", GREEDY)
    gone = weakref.ref(llm)
    del llm
    gc.collect()
    assert gone() is None and len(caplog.records) >= 2


def test_a_line_of_a_batch_that_gets_an_error_is_heard(make_llm, caplog, tmp_path):
    caplog.set_level(logging.INFO, logger="hybrid_jax")
    source = write(tmp_path / "in.jsonl", [line(), {"custom_id": "x"}])
    run_batch(source, tmp_path / "out.jsonl", make_llm())
    [heard] = said(caplog, "batch")
    assert heard.startswith("line 2 got an error: ")


def test_a_preemption_is_heard(caplog):
    caplog.set_level(logging.INFO, logger="hybrid_jax")
    params = SamplingParams(max_tokens=40, temperature=0.0)
    with tiny_llm(max_rows=2) as llm, short_of_memory(llm._engine, at=(6,)):
        llm.generate(["ab", "cd"], params)
        assert llm.stats()["preemptions"] == 1
    [heard] = said(caplog, "scheduler")
    assert heard.endswith("and will go on when there is room")
    assert any(words.startswith(("compiled", "loaded")) for words in said(caplog, "compiling"))


def test_warnings_are_printed_and_more_where_it_is_asked_for():
    told = "".join(f"log.{level}('{level}');" for level in ("info", "warning"))
    code = f"import hybrid_jax, logging; log = logging.getLogger('hybrid_jax.engine'); {told}"
    quiet = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (quiet.stdout, quiet.stderr) == ("", "warning\n")
    code = "import logging; logging.basicConfig(level='INFO'); " + code
    loud = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert loud.stderr == "INFO:hybrid_jax.engine:info\nWARNING:hybrid_jax.engine:warning\n"
