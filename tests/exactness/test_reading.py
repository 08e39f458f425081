"""Log-probabilities of the end of a prompt, and hidden states: the definition's, with and without hits."""

from __future__ import annotations

import pytest

from tests.exactness.jobs import Job

NAMES = ("qwen3_next", "jamba", "with_cut", "llama")


def scored(bench, length, first, **more):
    """A prompt whose tokens from `first` on are scored, and nobody draws more than one after it."""
    prompt = bench.prompt(length, seed=7)
    return Job(
        prompt=prompt, max_tokens=1, prompt_logprobs=0, logprobs_from=first, logprobs=None, **more
    )


def pooled(bench, length, pooling):
    return Job(prompt=bench.prompt(length, seed=7), max_tokens=1, logprobs=None, pooling=pooling)


@pytest.mark.parametrize("settings", ["fine", "padded"])
@pytest.mark.parametrize("name", NAMES)
def test_the_end_of_a_prompt_is_scored_behind_a_hit(bench_of, name, settings):
    bench = bench_of(name, settings)
    cold = bench.check([scored(bench, 150, 1)])
    assert cold.cached == [0]
    firsts = (1, 32, 33, 65, 100, 128, 149)
    warm = bench.check([scored(bench, 150, first) for first in firsts])
    grain = bench.engine.geometry.grain
    most = [(first - 1) // grain * grain for first in firsts]
    # Resume points are where earlier prompts parted or ended; those of the first run end at 128.
    assert all(cached <= limit for cached, limit in zip(warm.cached, most, strict=True))
    assert warm.cached[-1] == 128 and warm.cached[0] == 0


@pytest.mark.parametrize("name", NAMES)
def test_a_declared_end_of_a_shared_prompt_is_where_scores_resume(bench_of, name):
    bench = bench_of(name, "fine")
    shared = bench.prompt(70, seed=9)
    jobs = [
        Job(
            prompt=(*shared, *bench.prompt(20, seed=100 + k)),
            max_tokens=1,
            prompt_logprobs=0,
            logprobs_from=70,
            logprobs=None,
            cache_breakpoints=(70,),
        )
        for k in range(5)
    ]
    assert bench.check(jobs).cached == [0, 64, 64, 64, 64]


@pytest.mark.parametrize("settings", ["fine", "padded"])
@pytest.mark.parametrize("name", NAMES)
def test_hidden_states_of_prompts(bench_of, name, settings):
    bench = bench_of(name, settings)
    jobs = [pooled(bench, n, how) for n in (1, 31, 32, 64, 100, 150) for how in ("last", "mean")]
    run = bench.check([*jobs, pooled(bench, 150, "last"), pooled(bench, 150, "mean")])
    assert run.cached[-2:] == [128, 0]
    assert all(run.cached[index] == 0 for index in range(1, len(jobs), 2))


def test_exact_mode_gives_the_same_bits_with_and_without_hits(bench_of):
    bench = bench_of("qwen3_next", "exact")
    jobs = [scored(bench, 150, 140), pooled(bench, 150, "last"), pooled(bench, 150, "mean")]

    def bits(run):
        scores, *hidden = run.requests
        values = [entry.logprob.hex() for entry in scores.output.prompt_logprobs[140:]]
        return values, [request.output.pooled.tobytes() for request in hidden]

    cold = []
    for job in jobs:
        bench.forget()
        cold.append(bench.check([job]).requests[0])
    warm = bench.check(jobs)
    assert warm.cached == [128, 128, 0]
    cold_run = type(warm)(cold, {})
    assert bits(warm) == bits(cold_run)


def test_a_prompt_that_is_begun_again_is_summed_once(bench_of):
    bench = bench_of("jamba", "fine")
    [request] = [pooled(bench, 150, "mean").request("mean")]
    engine = bench.engine
    with bench.shapes():
        engine.add(request)
        engine.step()
        engine.step()
        assert request.output.pooled is not None  # of a part of the prompt
        engine._books_open = True  # as after a turn that failed
        while engine.has_work:
            engine.step()
    assert bench.plain.mismatches([request]) == []
