"""The exactness matrix: in float32, the same tokens whatever the cache, chunks, batch, memory and pages.

Every cell runs on poisoned memory, is compared with the definition, and asserts that what it is about has
happened. "padded" covers every kind of model; "fine" is short chunks, pages of 16 and single steps through the real
shapes, "coarse" is long chunks, pages of 128 and eight steps.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hybrid_jax.config.arrays import FP8
from tests.drawing import EVERYTHING, left_to_all, nothing_to_check
from tests.exactness.conftest import NAMES
from tests.exactness.engines import short_of_memory
from tests.exactness.jobs import Job

# This one has attention, Mamba-1 and experts. The others are compiled quickly in `make test`.
AS_USERS = ("jamba",)
QUICKLY = tuple(name for name in NAMES if name not in AS_USERS)
OTHERWISE = [("nemotron_h_moe", "fine"), ("windowed", "coarse")]
if EVERYTHING:
    OTHERWISE.append(("windowed", "fine"))
left = () if EVERYTHING else [name for name, _ in OTHERWISE]
BENCHES = [(name, "padded") for name in QUICKLY if name not in left] + OTHERWISE
FP8_NAMES = ("with_cut", "windowed", "qwen3_next") if EVERYTHING else ("with_cut",)
BENCHES += [(name, "fp8") for name in FP8_NAMES]
BENCHES += [pytest.param((name, "padded"), marks=pytest.mark.as_users) for name in AS_USERS]
EDGES = (1, 31, 32, 33, 63, 64, 65, 127, 128, 129)
SAMPLED = {"temperature": 0.8, "top_k": 20, "top_p": 0.9}


# What changes logits knows no layers, and means more programs to compile.
ADJUSTED = BENCHES if EVERYTHING else [("mamba2", "padded"), ("windowed", "coarse"), BENCHES[-1]]


def ids(names: tuple[str, str]) -> str:
    return "-".join(names)


ENOUGH = 1500  # tokens that a model must have judged


@pytest.fixture(params=BENCHES, ids=ids)
def bench(request, bench_of):
    return bench_of(*request.param)


@pytest.fixture(params=ADJUSTED, ids=ids)
def adjusted_bench(request, bench_of):
    return bench_of(*request.param)


def test_the_definition_is_the_plain_loop(bench_of):
    bench = bench_of("bamba", "padded")
    prompt = bench.prompt(45, seed=1)
    run = bench.check([Job(prompt=prompt, max_tokens=24)])
    assert run.outputs == [bench.plain.greedy_loop(prompt, 24)]


def test_prompts_around_every_edge(bench):
    jobs = [Job(prompt=bench.prompt(n, seed=n)) for n in EDGES]
    run = bench.check(jobs)
    assert run.folds >= len(jobs) or not bench.config.recurrent
    assert run.cached == [0] * len(jobs)
    assert len({tuple(output) for output in run.outputs}) == len(jobs)


@pytest.mark.parametrize("length", (33, 64, 65, 97, 128, 129))
def test_the_same_prompt_again(bench, length):
    job = Job(prompt=bench.prompt(length, seed=length))
    cold, again, third = (bench.check([job]) for _ in range(3))
    assert cold.cached == [0]
    assert again.cached == [(length - 1) // 32 * 32]
    assert cold.outputs == again.outputs
    assert again.bits == third.bits  # the same executables at the same lengths: to the last bit
    inside = again.cached[0] % bench.engine.geometry.page_tokens if bench.config.attention else 0
    assert again.moved["copies"] == bool(inside)


def test_without_a_cache(bench):
    prompt = bench.prompt(70, seed=2)
    jobs = [Job(prompt=prompt, arrive=3 * i) for i in range(3)]
    cached = bench.check(jobs)
    assert max(cached.cached) == 64
    bench.start_over(policy="off")
    plain = bench.check(jobs)
    assert plain.cached == [0, 0, 0]
    assert plain.outputs == cached.outputs


def test_without_log_probabilities(bench_of):
    bench = bench_of("bamba", "padded")
    jobs = [Job(prompt=bench.prompt(n, seed=n), seed=n, **SAMPLED) for n in (20, 64, 65, 90)]
    expected = bench.check(jobs).outputs
    bench.forget()
    bare = bench.check([replace(job, logprobs=None) for job in jobs])
    assert bare.outputs == expected
    assert not any(request.output.logprobs for request in bare.requests)


def test_outputs_cross_several_folds_and_pages(bench):
    run = bench.check([Job(prompt=bench.prompt(17, seed=3), max_tokens=150)])
    assert run.folds >= 4 or not bench.config.recurrent


def test_a_long_prompt_in_chunks(bench):
    prompt = bench.prompt(190, seed=4)
    run = bench.check([Job(prompt=prompt, max_tokens=20)])
    longest = {32: 32, 128: 64, 512: 256}[bench.engine.engine_config.prefill_tokens]
    assert run.moved["prefill_rows"] >= -(-190 // longest)
    again = bench.check([Job(prompt=prompt[:150] + (1, 2, 3), max_tokens=20)])
    if bench.config.attention and not bench.config.recurrent:
        assert again.cached == [128]


def test_prefixes_shared_and_waited_for(bench):
    shared = bench.prompt(100, seed=6)
    tails = [bench.prompt(n, seed=60 + n) for n in (5, 20, 33)]
    jobs = [Job(prompt=shared + tail, max_tokens=24) for tail in tails]
    run = bench.check(jobs)
    assert run.moved["cache_hit_tokens"] >= 2 * 96
    if (
        bench.engine.engine_config.prefill_tokens > 32
    ):  # else there is room for one row's chunk a turn
        assert run.moved["waits"] >= 1


def test_a_conversation_resumes_where_it_stopped(bench):
    first = bench.check([Job(prompt=bench.prompt(50, seed=7), max_tokens=60)])
    history = tuple(first.requests[0].tokens) + bench.prompt(9, seed=8)
    second = bench.check([Job(prompt=history, max_tokens=30)])
    assert second.cached == [96]  # 50 + 60 - 1 tokens processed


def test_alone_and_in_any_order(bench):
    jobs = [
        Job(
            prompt=bench.prompt(n, seed=90 + n), max_tokens=30, seed=n, **(SAMPLED if n % 2 else {})
        )
        for n in (70, 9, 33, 96, 41)
    ]
    alone = []
    for job in jobs:
        alone += bench.check([job]).outputs
    bench.forget()
    order = np.random.default_rng(1)
    for _ in range(3):
        arrivals = [replace(job, arrive=int(order.integers(0, 12))) for job in jobs]
        assert bench.check(arrivals).outputs == alone
        bench.forget()


def test_samples_of_one_prompt(bench):
    prompt = bench.prompt(77, seed=11)
    jobs = [
        Job(prompt=prompt, max_tokens=30, seed=(5 << 32) + 1, sample_index=i, arrive=i, **SAMPLED)
        for i in range(4)
    ]
    run = bench.check(jobs)
    assert len({tuple(output) for output in run.outputs}) == len(jobs)
    assert run.moved["cache_hit_tokens"] >= 3 * 64
    backwards = bench.check([replace(job, arrive=0) for job in reversed(jobs)])
    assert backwards.outputs == run.outputs[::-1]


def test_stop_tokens_wait_for_the_least_length(bench):
    stops = frozenset(range(6))
    jobs = [
        Job(prompt=bench.prompt(40, seed=5), min_tokens=least, stop_ids=stops, min_p=0.01, seed=i)
        for i, least in enumerate((0, 25, 40))
    ]
    jobs[1] = replace(jobs[1], temperature=1.0)
    run = bench.check(jobs)
    assert all(
        len(r.output.token_ids) >= job.min_tokens for job, r in zip(jobs, run.requests, strict=True)
    )
    assert run.requests[2].output.finish_reason == "length"


def test_log_probabilities_of_prompts(bench):
    """Whole prompts, whatever the cache holds; in chunks, beside others, and of forks' parents."""
    prompt = bench.prompt(150, seed=40)
    bench.check([Job(prompt=prompt[:100])])
    jobs = [
        Job(prompt=prompt, prompt_logprobs=3, group="g", max_tokens=20),
        Job(prompt=prompt, group="g", sample_index=1, max_tokens=20),
        Job(prompt=prompt[:77], prompt_logprobs=0, max_tokens=20),
        Job(prompt=prompt[:1], prompt_logprobs=1, max_tokens=20),
    ]
    run = bench.check([Job(prompt=prompt[:100], max_tokens=20), *jobs])
    assert run.cached[0] == 96 and len(run.requests[1].output.prompt_logprobs[9].top) == 3
    assert [len(r.output.prompt_logprobs) for r in run.requests] == [1, 150, 1, 77, 1]


PENALTIES = {"presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.3}


class Steps:
    """Only tokens that are the last one's remainder modulo 5 plus one, `most` times; starts with any."""

    def __init__(self, vocab: int, most: int = 10**6):
        self.vocab, self.most = vocab, most

    def mask(self, output) -> np.ndarray:
        allowed = np.zeros(-(-self.vocab // 32) * 32, np.uint8)
        if not output:
            allowed[: self.vocab] = 1
        elif len(output) < self.most:
            allowed[(output[-1] + 1) % 5 : self.vocab : 5] = 1
        return np.packbits(allowed, bitorder="little").view(np.uint32)


@left_to_all("jamba")
def test_penalties_bias_and_allowed_tokens(adjusted_bench):
    bench = adjusted_bench
    """In one batch with a row that asks for none of it, and forks; some draw, some do not."""
    vocab = bench.config.vocab_size
    some = tuple(range(0, vocab, 2))
    prompt = bench.prompt(50, seed=30)
    jobs = [
        Job(prompt=prompt, seed=1, group="g", allowed_token_ids=some, **PENALTIES, **SAMPLED),
        Job(prompt=prompt, seed=1, group="g", sample_index=1, **PENALTIES, **SAMPLED),
        Job(prompt=prompt, max_tokens=70, **PENALTIES),
        Job(prompt=bench.prompt(9, seed=31), max_tokens=30),
        Job(prompt=bench.prompt(40, seed=32), logit_bias=((3, 60.0), (4, -60.0))),
    ]
    run = bench.check(jobs)
    plain = bench.check(
        [replace(jobs[2], **dict.fromkeys(PENALTIES, 0.0) | {"repetition_penalty": 1.0})]
    )
    assert run.moved["forks"] >= 1
    assert run.outputs[2] != plain.outputs[0]
    assert set(run.outputs[0]) <= set(some)
    assert set(run.outputs[4]) == {3}
    alone = [bench.check([replace(job, group=None)]).outputs[0] for job in jobs]
    assert alone == run.outputs


def test_constrained_rows_beside_free_ones(adjusted_bench):
    bench = adjusted_bench
    vocab = bench.config.vocab_size
    jobs = [
        Job(prompt=bench.prompt(n, seed=n), constraint=constraint, max_tokens=25, seed=n, **SAMPLED)
        for n, constraint in ((40, Steps(vocab)), (20, None), (70, Steps(vocab, 9)))
    ]
    run = bench.check(jobs)
    for request in (run.requests[0], run.requests[2]):
        remainders = np.array(request.output.token_ids) % 5
        assert ((remainders[1:] - remainders[:-1]) % 5 == 1).all()
    assert run.requests[2].output.finish_reason == "stop" and len(run.outputs[2]) == 9


def test_penalties_survive_preemption(bench_of):
    bench = bench_of("bamba", "padded")
    bench.start_over(1.2)
    jobs = [
        Job(prompt=bench.prompt(60, seed=n), max_tokens=90, constraint=constraint, **PENALTIES)
        for n, constraint in ((1, None), (2, Steps(bench.config.vocab_size)), (3, None))
    ]
    run = bench.check(jobs)
    assert sum(request.course.num_preemptions for request in run.requests) > 0


def test_forks_of_a_constrained_prompt_survive_preemption(bench_of):
    bench = bench_of("bamba", "padded")
    bench.start_over(1.2)
    asked = {"max_tokens": 90, **PENALTIES, **SAMPLED}
    prompt, steps = bench.prompt(60, seed=1), Steps(bench.config.vocab_size)
    jobs = [
        Job(prompt=prompt, group="g", sample_index=i, constraint=steps, **asked) for i in (0, 1)
    ]
    jobs.append(Job(prompt=bench.prompt(50, seed=2), seed=2, arrive=4, **asked))
    run = bench.check(jobs)
    assert run.moved["forks"] == 1 and run.requests[1].course.num_preemptions >= 1
    assert run.outputs[0] != run.outputs[1]
    bench.start_over()
    alone = [bench.check([replace(job, group=None)]).outputs[0] for job in jobs]
    assert alone == run.outputs


@pytest.mark.parametrize("length", (7, 32, 64, 77, 128))
def test_forks_of_one_prompt(bench, length):
    """Inside a page, at its end, with a full ring, without a checkpoint; one of them ends with the prompt."""
    prompt = bench.prompt(length, seed=length)
    jobs = [
        Job(prompt=prompt, max_tokens=count, seed=9, sample_index=i, group="g", **SAMPLED)
        for i, count in enumerate((36, 1, 30))
    ]
    run = bench.check(jobs)
    assert run.moved["forks"] == 2 and run.moved["prefill_tokens"] == length
    inside = bench.config.attention and length % bench.engine.geometry.page_tokens
    assert run.moved["copies"] == (2 if inside else 0)
    assert run.outputs[0][:30] != run.outputs[2]
    bench.forget()
    alone = [bench.check([replace(job, group=None)]).outputs[0] for job in jobs]
    assert alone == run.outputs


def test_a_fork_of_the_second_prompt_in_a_dispatch(bench_of):
    bench = bench_of("bamba", "padded")
    jobs = [
        Job(prompt=bench.prompt(n, seed=n), group=group, sample_index=i, seed=3, **SAMPLED)
        for n, group, i in ((40, None, 0), (50, "g", 0), (50, "g", 1))
    ]
    run = bench.check(jobs)
    assert run.moved["forks"] == 1 and run.moved["prefill_tokens"] == 90


def test_stop_tokens_end_a_row_on_the_device(bench):
    stops = frozenset(range(4))
    jobs = [
        Job(prompt=bench.prompt(n, seed=n), max_tokens=60, seed=n, stop_ids=stops, **SAMPLED)
        for n in range(20, 34)
    ]
    run = bench.check(jobs)
    reasons = {request.output.finish_reason for request in run.requests}
    assert reasons >= {"stop"}
    lengths = {len(output) for output in run.outputs}
    assert len(lengths) > 4, "stops at different steps of a dispatch"


def test_aborted_batch_mates_leave_no_trace(bench):
    jobs = [
        Job(prompt=bench.prompt(n, seed=n), max_tokens=50, abort_at=abort, arrive=i)
        for i, (n, abort) in enumerate([(40, None), (66, 7), (33, 20), (21, None), (34, 1)])
    ]
    run = bench.check(jobs)
    assert [request.output.finish_reason for request in run.requests] == [
        "abort" if job.abort_at else "length" for job in jobs
    ]


@pytest.mark.parametrize("name, settings", [("bamba", "padded"), ("windowed", "coarse")])
def test_a_stop_string_in_mid_flight_leaves_no_trace(bench_of, name, settings):
    """To the last bit. Of eight steps at a time there are four while its row runs."""
    bench = bench_of(name, settings)
    jobs = [
        Job(prompt=bench.prompt(20, seed=1), max_tokens=60),
        Job(prompt=bench.prompt(40, seed=2), max_tokens=60, seed=2, **SAMPLED),
        Job(prompt=bench.prompt(20, seed=3), max_tokens=60, stop=("x",), abort_at=13),  # at a fold
        *(Job(prompt=bench.prompt(n, seed=n), max_tokens=30) for n in (35, 50)),  # for its row
    ]
    stopped = bench.check(jobs)
    reasons = [request.output.finish_reason for request in stopped.requests]
    assert reasons == ["length", "length", "abort", "length", "length"]
    assert len(stopped.outputs[2]) == 13, "more than four steps at a time"
    planned, used = stopped.moved["decode_steps"], sum(len(o) - 1 for o in stopped.outputs)
    assert planned > used, "no step was in flight when the row was ended"
    bench.forget()
    free = bench.check([replace(job, stop=(), abort_at=None) for job in jobs])
    assert free.bits[:2] == stopped.bits[:2]
    assert free.requests[2].output.logprobs[:13] == stopped.requests[2].output.logprobs


def test_preempted_rows_resume(bench):
    bench.start_over(1.5)
    jobs = [
        Job(
            prompt=bench.prompt(n, seed=200 + n),
            max_tokens=150,
            seed=n,
            **(SAMPLED if n % 2 else {}),
        )
        for n in (25, 20, 31)
    ]
    with short_of_memory(bench.engine, at=(45, 80)):
        run = bench.check(jobs)
    assert run.moved["preemptions"] >= 2
    alone = []
    for job in jobs:
        bench.forget()
        single = bench.check([job])
        assert single.moved["preemptions"] == 0
        alone += single.outputs
    assert run.outputs == alone


@pytest.mark.parametrize("names", [QUICKLY, pytest.param(AS_USERS, marks=pytest.mark.as_users)])
def test_excused_mismatches_are_rare(plain_of, names):
    """Over all cells above, tokens that only rounding could explain."""
    excused = [mismatch for name in names for mismatch in plain_of(name).excused]
    assert len(excused) <= 1, excused
    if few := [name for name in names if plain_of(name).num_tokens <= ENOUGH]:
        nothing_to_check(f"too few cells ran of {', '.join(few)}")


@pytest.mark.parametrize("name", FP8_NAMES)
def test_excused_mismatches_with_fp8_are_few(plain_of, name):
    """Likewise; two executables may round a key to neighbouring FP8 numbers."""
    plain = plain_of(name, FP8)
    assert len(plain.excused) <= 3, plain.excused
    if plain.num_tokens <= ENOUGH:
        nothing_to_check("too few cells ran")


@pytest.mark.parametrize(
    "name, few, many",
    [
        ("bamba", "padded", "many_rows"),
        ("windowed", "padded", "many_rows"),
        ("nemotron_h_moe", "exact", "exact_many_rows"),
    ],
)
@left_to_all("bamba", "windowed")
def test_few_rows_and_many_give_the_same_tokens(bench_of, name, few, many):
    """Other shapes, so other executables: where they differ, the definition finds a near tie there."""
    benches = [bench_of(name, settings) for settings in (few, many)]
    prompts = [benches[0].prompt(n, seed=n) for n in (5, 32, 33, 64, 100, 129, 140)] * 2
    jobs = [
        Job(prompt=prompt, max_tokens=40, seed=n, **(SAMPLED if n % 3 == 2 else {}))
        for n, prompt in enumerate(prompts)
    ]
    excused = len(benches[0].plain.excused)
    runs = [bench.check(jobs) for bench in benches]
    shapes = [key[1] for key in benches[1].engine.runner.programs.made if len(key) == 3]
    assert max(shape.rows for shape in shapes) == 24
    differ = sum(a != b for a, b in zip(runs[0].outputs, runs[1].outputs, strict=True))
    assert differ <= len(benches[0].plain.excused) - excused
