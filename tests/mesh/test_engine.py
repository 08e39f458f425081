"""All that requests may ask for, on two devices beside one: speculation, forks, preemption, exact bits, scores."""

from __future__ import annotations

import jax
import numpy as np

from hybrid_jax import SamplingParams
from tests.exactness.engines import start_over
from tests.llms import engine_of
from tests.mesh.running import GREEDY, PROMPTS, answers, make, of_one_device

NAME = "mixed"
SAMPLED = SamplingParams(
    n=2, max_tokens=12, temperature=0.9, top_p=0.9, top_k=20, seed=5, repetition_penalty=1.1,
    logprobs=3, ignore_eos=True,
)  # fmt: skip


def texts(outputs):
    return [[one.token_ids for one in out.outputs] for out in outputs]


def test_drafts_are_judged_alike():
    with make(NAME, 2, speculation="ngram") as llm:
        assert answers(llm) == of_one_device(NAME)[0]
        assert llm.stats()["verifications"] > 0


def test_forks_penalties_and_log_probabilities():
    prompts, found = [{"prompt_token_ids": ids} for ids in PROMPTS], {}
    for count in (1, 2):
        with make(NAME, count) as llm:
            found[count] = llm.generate(prompts, SAMPLED)
            assert llm.stats()["forks"] > 0
    assert texts(found[1]) == texts(found[2])
    for one, two in zip(found[1], found[2], strict=True):
        for mine, other in zip(one.outputs, two.outputs, strict=True):
            for known, own in zip(mine.logprobs, other.logprobs, strict=True):
                assert known.keys() == own.keys()
                gaps = [abs(known[t].logprob - own[t].logprob) for t in known]
                assert max(gaps) < 3e-4


def test_rows_that_lose_their_memory():
    """There is room for little more than one sequence, which has no window."""
    prompts = [ids[:60] for ids in PROMPTS[1:]]
    long = SamplingParams(max_tokens=90, temperature=0.0, ignore_eos=True)
    with make("parallel") as llm:
        expected = answers(llm, long, prompts)[0]
    with make("parallel", 2, page_tokens=16) as llm:
        start_over(llm._engine, 1.2)
        assert answers(llm, long, prompts)[0] == expected
        assert llm.stats()["preemptions"] > 0


def test_exact_mode_has_the_same_bits_whatever_runs_beside():
    params = SamplingParams(max_tokens=6, temperature=0.0, logprobs=2, ignore_eos=True)
    with make(NAME, 2, exact=True) as llm:
        prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
        together = llm.generate(prompts, params)
        alone = [llm.generate([prompt], params)[0] for prompt in prompts]  # hits
        assert alone[0].num_cached_tokens > 0
        llm.reset_prefix_cache()
        cold = [llm.generate([prompt], params)[0] for prompt in prompts]
    for others in (alone, cold):
        for out, other in zip(together, others, strict=True):
            assert repr(out.outputs[0].logprobs) == repr(other.outputs[0].logprobs)


def test_scores_and_vectors():
    found = {}
    for count in (1, 2):
        with make(NAME, count) as llm:
            found[count] = (
                llm.logprobs([{"prompt_token_ids": PROMPTS[2]}])[0],
                llm.embed([{"prompt_token_ids": PROMPTS[2]}])[0],
            )
    for one, two in zip(found[1], found[2], strict=True):
        assert np.allclose(np.asarray(one), np.asarray(two), atol=3e-4)


def test_an_engine_that_lost_its_memory_goes_on():
    with make(NAME, 2) as llm:
        assert answers(llm) == of_one_device(NAME)[0]
        engine = llm._engine
        engine._start_over()
        assert answers(llm) == of_one_device(NAME)[0]


def test_bfloat16_repeats_itself_and_is_as_near_to_one_device_as_that_to_float32():
    given = [{"prompt_token_ids": ids} for ids in PROMPTS]
    read = lambda llm: np.concatenate(
        [np.asarray(one) for one in llm.logprobs(given, positions="all")]
    )
    with make(NAME) as exact, make(NAME, dtype="bfloat16") as one:
        found = read(one)
        rounding = np.abs(found - read(exact)).max()
    assert 0.01 < rounding
    for count in (2, 4):
        with make(NAME, count, dtype="bfloat16") as llm:
            weights = jax.tree.leaves(engine_of(llm._thread).runner.params)
            assert sum(leaf.dtype == "bfloat16" for leaf in weights) > len(weights) / 2
            first = answers(llm)
            llm.reset_prefix_cache()
            assert answers(llm) == first and len(first[0][0]) == GREEDY.max_tokens
            assert np.abs(read(llm) - found).max() < 1.5 * rounding


def test_a_warm_up_compiles_all():
    with make(NAME, 2, max_model_len=128, max_rows=1, prefill_tokens=32) as llm:
        llm.warmup()
        before = llm.stats()["num_traces"]
        answers(llm, prompts=[PROMPTS[1][:60]])
        assert llm.stats()["num_traces"] == before
