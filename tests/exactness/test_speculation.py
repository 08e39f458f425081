"""Drafts change no token: right and wrong ones, many and none, wherever memory is short or rows come and go.

Two plans are in flight, so the host never knows where a row stands when it plans the next.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from hybrid_jax.config import EngineConfig, SpeculationConfig
from tests.drawing import EVERYTHING, left_to_all
from tests.exactness.conftest import EXACT_NAMES, load
from tests.exactness.engines import make_engine, one_shape, start_over
from tests.exactness.jobs import Job, drive, random_prompt
from tests.exactness.planted import Planted, planting, with_mistakes
from tests.exactness.poison import Poison
from tests.exactness.random_traffic import ROOMS, random_jobs

AMPLE = 8.0
SPECULATION = SpeculationConfig(num_tokens=3, adaptive=False)
SETTINGS = EngineConfig(
    max_rows=3, prefill_tokens=128, steps_per_dispatch=4, page_tokens=64, speculation=SPECULATION
)
SAMPLED = {"temperature": 0.8, "top_k": 20, "top_p": 0.9}


@contextlib.contextmanager
def planted_engine(name: str, **shapes):
    """An engine that drafts what is planted, its memory poisoned; options as in `one_shape`."""
    planted = Planted()
    with planting(planted), one_shape(64, **shapes):
        engine = make_engine(*load(name), SETTINGS, room=AMPLE)
        yield engine, planted
        engine.close()


def came(run) -> Counter:
    """How many windows had so many drafts accepted."""
    found: Counter = Counter()
    for request in run.requests:
        for (_, accepted), windows in request.course.drafts.windows.items():
            found[accepted] += windows
    return found


@left_to_all
def test_random_traffic_gives_plain_tokens(plain_of):
    """Arrivals, aborts, forks, preemptions and rows that move, while plans run ahead of what the rows have."""
    name = "parallel"
    config, _ = load(name)
    plain, seen, right = plain_of(name), Counter(), Counter()
    prompt = lambda length, *, seed: random_prompt(length, seed, config.vocab_size)  # noqa: E731
    with planted_engine(name, decode_rows=(1,)) as (engine, planted):
        poison = Poison(engine)
        for seed in range(100 if EVERYTHING else 4):
            rng = np.random.default_rng(seed)
            start_over(engine, ROOMS[seed % len(ROOMS)])
            poison.spread()
            longest = engine.scheduler.max_output(0)
            jobs = random_jobs(prompt, longest, int(rng.integers(3, 9)), rng)
            planted.outputs.clear()
            for _ in range(2):  # without a right draft, and with many
                run = drive(engine, jobs, poison)
                assert plain.mismatches(run.requests) == []
                seen.update({name: int(count) for name, count in run.moved.items()})
                right += came(run)
                for job, output in zip(jobs, run.outputs, strict=True):
                    planted.outputs[job.prompt] = with_mistakes(output, rng, 0.2)
                engine.reset_prefix_cache()
    assert set(right) == {0, 1, 2, 3}
    wanted = ("cache_hits", "preemptions", "forks", "folds_in_place", "folds_to_new", "moves")
    assert not [name for name in wanted if not seen[name]], seen


def test_drafts_of_texts_that_a_stop_string_may_cut(plain_of):
    """Such a row keeps its checkpoint longer, while two plans in flight together reach past a grain."""
    name = "bamba"
    config, params = load(name)
    settings = replace(SETTINGS, speculation=SpeculationConfig(num_tokens=7, adaptive=False))
    prompts = [random_prompt(n, n, config.vocab_size) for n in (20, 33, 40)]
    jobs = [Job(prompt=prompt, max_tokens=150, stop=("x",)) for prompt in prompts]
    planted, rng = Planted(), np.random.default_rng(0)
    with planting(planted), one_shape(64, decode_rows=(1,)):
        engine = make_engine(config, params, settings, room=AMPLE)
        poison = Poison(engine)
        for share in (1.0, 0.2, 0.0):
            run = drive(engine, jobs, poison)
            assert plain_of(name).mismatches(run.requests) == []
            for prompt, output in zip(prompts, run.outputs, strict=True):
                planted.outputs[prompt] = with_mistakes(output, rng, share)
            engine.reset_prefix_cache()
            poison.spread()
        assert came(run)[7] and run.moved["folds_to_new"] and run.moved["folds_in_place"]
        engine.close()


EXACT = replace(SETTINGS, exact=True, prefill_tokens=64)


@pytest.mark.as_users
@pytest.mark.parametrize("name", EXACT_NAMES)
@left_to_all("mamba2", "qwen3_next", "windowed", "with_unknown_kind", "jamba")
def test_in_exact_mode_drafts_change_no_bit(name, plain_of):
    """No drafts, wrong ones and right ones of one engine, whose one program judges them all."""
    config, _ = load(name)
    plain, rng = plain_of(name), np.random.default_rng(0)
    prompts = [random_prompt(n, n, config.vocab_size) for n in (1, 31, 45, 64, 70)]
    jobs = [
        Job(
            prompt=prompt,
            max_tokens=50,
            seed=i,
            arrive=2 * i,
            logprobs=5,
            **(SAMPLED if i % 2 else {}),
        )
        for i, prompt in enumerate(prompts)
    ]
    planted = Planted()
    with planting(planted):
        engine = make_engine(*load(name), EXACT, room=AMPLE)
        poison = Poison(engine)
        without = drive(engine, [replace(job, arrive=0) for job in jobs], poison)
        assert plain.mismatches(without.requests) == []
        for share in (1.0, 0.3, 0.0):
            for prompt, output in zip(prompts, without.outputs, strict=True):
                planted.outputs[prompt] = with_mistakes(output, rng, share)
            engine.reset_prefix_cache()
            poison.spread()
            run = drive(engine, jobs, poison)
            assert run.bits == without.bits
            if share < 0.5:
                assert set(came(run)) == {0, 1, 2, 3}
        again = drive(engine, jobs, poison)
        assert again.cached == [0, 0, 32, 32, 64] and again.bits == without.bits
        engine.close()


def test_as_many_tokens_are_hit_as_without_speculation(plain_of):
    """One conversation after the other, each with a second turn on what its first turn wrote."""
    name, cached = "parallel", []
    config, params = load(name)
    shared = random_prompt(70, 1, config.vocab_size)
    firsts = [shared[:n] + random_prompt(30, n, config.vocab_size) for n in (40, 64, 70)]
    with planted_engine(name) as (engine, planted):
        plain_engine = make_engine(config, params, replace(SETTINGS, speculation=None), room=AMPLE)
        for one in (plain_engine, engine):
            hits = []
            for prompt in firsts:
                first = drive(one, [Job(prompt=prompt, max_tokens=50)])
                planted.outputs[prompt] = first.outputs[0]
                turn = (*prompt, *first.outputs[0], *shared[:9])
                second = drive(one, [Job(prompt=turn, max_tokens=20)])
                again = drive(one, [Job(prompt=prompt, max_tokens=50)])
                assert plain_of(name).mismatches(second.requests + again.requests) == []
                hits += second.cached + again.cached
            cached.append(hits)
        assert came(again)[3] > 5
        plain_engine.close()
    assert cached[0] == cached[1] and min(cached[0][::2]) >= 96, cached
