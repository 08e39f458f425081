"""What `LLM` says of itself: the cache, the memory, counters and progress."""

from __future__ import annotations

import re

import pytest

from hybrid_jax import LLM, SamplingParams
from hybrid_jax.api.overview import overview
from hybrid_jax.api.threads import questions
from hybrid_jax.machine import peak_resident_bytes
from tests.api.fake_engine import GREEDY
from tests.tiny_models import tiny_engine


def test_progress_is_told_only_when_a_prompt_is_done(make_llm):
    llm, seen = make_llm(steps_per_dispatch=1), []
    params = [SamplingParams(max_tokens=n) for n in (3, 9, 9)]
    llm.generate(["a", "b", "c"], params, progress=lambda *counts: seen.append(counts))
    assert seen == [(1, 3), (3, 3)]


def test_the_cache_explains_itself(make_llm):
    llm = make_llm(grain=16)
    prompt = "x" * 50
    first, second = llm.generate(prompt, GREEDY)[0], llm.generate(prompt, GREEDY)[0]
    short = llm.generate("x", GREEDY)[0]
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 48)
    explain = llm.cache.explain
    assert "; 48 were possible" in str(explain(first.request_id))
    assert explain(second.request_id).hit_tokens == explain(second.request_id).possible_tokens == 48
    assert "48 of 50 prompt tokens" in str(explain(second.request_id))
    assert "holds no resume point" in explain(short.request_id).reason
    assert explain(second) == explain(second.request_id) != explain(first)
    *_, delta = llm.stream(prompt, GREEDY)
    assert explain(delta) == explain(delta.output) == explain(delta.request_id)
    aligned = llm.generate("y" * 48, GREEDY)[0]
    assert explain(aligned.request_id).possible_tokens == 32  # the last token must be computed
    assert llm.cache.describe() == 'a fake engine\n[0, 2) "ab": known'
    with pytest.raises(KeyError, match="no finished request '99'"):
        explain("99")
    llm.reset_prefix_cache()
    assert llm.generate(prompt, GREEDY)[0].num_cached_tokens == 0
    off = make_llm(cache="off")
    assert off.cache.describe() == "a fake engine\nthe cache is off"
    assert "the cache is off" in str(off.cache.explain(off.generate("a", GREEDY)[0].request_id))


def test_describe_says_where_the_memory_goes(make_llm):
    llm = make_llm(max_rows=3)
    llm._weight_bytes = 5 << 20
    assert llm.describe().splitlines() == [
        "model     llama, 1 layer of width 8",
        "device    cpu; weights and memory take 10 MiB of 1 GiB",
        "weights   5 MiB float32",
        "arena     3 MiB in 7 frames",
        "rings     2 KiB for 3 rows",
        "tables    64 B for 5 checkpoints",
        "logits    4 KiB during a step, 512 B for penalties and biases",
        "sequences up to 200 tokens, 3 at a time",
        "steps     chunks of up to 512 prompt tokens, 8 tokens a row and dispatch, compiled by XLA",
        "cache     adaptive; prompts resume at multiples of 32 tokens, 64 B of KV a token",
        "sampling  temperature 1 unless a request gives one; the model names none",
    ]


def test_describe_counts_one_of_a_thing_as_one(make_llm):
    said = make_llm(max_rows=1, steps_per_dispatch=1).describe()
    assert " for 1 row\n" in said and ", 1 token a row and dispatch" in said
    assert not re.search(r"\b1 (layers|rows|tokens|frames|checkpoints|steps)\b", said)


def test_describe_says_what_rows_hold_of_layers_with_a_window():
    engine = tiny_engine("windowed")
    try:
        found = questions.facts.answer(engine)
        lines = overview(found, weight_bytes=1, sampling=SamplingParams()).splitlines()
    finally:
        engine.close()
    (pages,) = (group.max_pages for group in engine.geometry.windowed)
    assert f"windows   of 37 tokens: a row holds at most {pages} pages of these layers" in lines


@pytest.mark.parametrize(
    "content, said",
    [
        ('{"temperature": 0.6}', "temperature 0.6 unless a request gives one; from generation_con"),
        ('{"do_sample": false}', "temperature 0 unless a request gives one; from generation_confi"),
        ('{"top_k": 3}', "temperature 1 unless a request gives one; the model names none"),
    ],
)
def test_describe_says_what_a_request_without_a_temperature_gets(fake_model, content, said):
    (fake_model / "generation_config.json").write_text(content)
    assert f"sampling  {said}" in LLM(fake_model, quiet=True).describe()


def test_a_new_object_prints_what_it_is_and_nothing_else(make_llm, capfd):
    llm = make_llm(max_rows=3)
    assert capfd.readouterr() == ("", llm.describe() + "\n")
    llm.generate("ab", GREEDY)
    make_llm(quiet=True)
    assert capfd.readouterr() == ("", "")


def test_stats_count_what_was_done(llm):
    llm.generate(["ab", "cde"], GREEDY)
    assert llm.stats() == {
        "requests": 2,
        "replicas": 1,
        "prompt_tokens": 5,
        "cached_tokens": 0,
        "generated_tokens": 24,
        "engine_steps": 2,
        "compile_s": 0.0,
        "peak_memory_bytes": pytest.approx(peak_resident_bytes(), rel=0.1),
    }


def test_an_output_has_the_peak_at_its_end_which_is_read_once(llm, monkeypatch):
    reads = iter(range(100, 200))
    monkeypatch.setattr(llm._engine, "peak_memory_bytes", lambda: next(reads))
    lengths = [SamplingParams(max_tokens=n, n=2) for n in (30, 3, 17)]
    outputs = llm.generate(["a", "b", "c"], lengths)
    assert [output.metrics.peak_memory_bytes for output in outputs] == [102, 100, 101]
    with llm.feed() as feed:
        ticket = feed.add("a", GREEDY)
        feed.step()
        [unfinished] = ticket.outputs()
    assert unfinished.outputs[0].token_ids
    assert unfinished.metrics.peak_memory_bytes is None
    assert next(reads) == 103


def test_progress_is_reported(llm, capsys):
    seen = []
    llm.generate(["a", "b"], GREEDY, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (2, 2)
    steps = []
    llm.warmup(progress=lambda done, total: steps.append((done, total)))
    assert steps == [(0, 3), (1, 3), (2, 3), (3, 3)]
    llm.generate("a", GREEDY, use_tqdm=True)
    assert capsys.readouterr().out == ""
