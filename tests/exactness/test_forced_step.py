"""Windows of which the device decides how many tokens stay, as speculation needs them: plain decoding's tokens.

Two plans are in flight, so the host never knows where a row stands when it plans the next. The kind of step is in
tests/kinds/forced.py.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from hybrid_jax.config import EngineConfig
from tests.drawing import EVERYTHING
from tests.exactness.conftest import FORCED_NAMES, ROOM, load
from tests.exactness.engines import make_engine, one_shape, start_over
from tests.exactness.jobs import Job, drive, random_prompt
from tests.exactness.poison import Poison
from tests.exactness.test_random_traffic import ROOMS, random_jobs
from tests.kinds.forced import TOKENS, Told, decoding_by

AMPLE = 8.0
SETTINGS = EngineConfig(max_rows=3, prefill_tokens=128, steps_per_dispatch=TOKENS, page_tokens=64)
SAMPLED = {"temperature": 0.8, "top_k": 20, "top_p": 0.9}


@contextlib.contextmanager
def forced_engine(name: str, **shapes):
    """An engine whose rows decode by windows, and its kind of step; options as in `one_shape`."""
    forced = Told(SETTINGS.max_rows)
    with decoding_by(forced), one_shape(64, **shapes):
        engine = make_engine(*load(name), SETTINGS, room=AMPLE)
        yield engine, forced
        engine.close()


def planted(tokens: Sequence[int], rng: np.random.Generator, share: float) -> list[int]:
    """Tokens of which a share is wrong."""
    wrong = rng.random(len(tokens)) < share
    return [int(t) if not w else (int(t) + 1) % 61 for t, w in zip(tokens, wrong, strict=True)]


def test_random_traffic_by_windows_gives_plain_tokens(plain_of):
    """Arrivals, aborts, forks, preemptions and rows that move, while plans run ahead of what the rows have."""
    name = "parallel"
    config, _ = load(name)
    plain, seen = plain_of(name), Counter()
    prompt = lambda length, *, seed: random_prompt(length, seed, config.vocab_size)  # noqa: E731
    with forced_engine(name, decode_rows=(1,)) as (engine, forced):
        poison = Poison(engine)
        for seed in range(100 if EVERYTHING else 4):
            rng = np.random.default_rng(seed)
            start_over(engine, ROOMS[seed % len(ROOMS)])
            poison.spread()
            longest = engine.scheduler.max_output(0)
            jobs = random_jobs(prompt, longest, int(rng.integers(3, 9)), rng)
            forced.guesses = {job.prompt: [0] for job in jobs}
            for _ in range(2):  # without a right guess, and with many
                run = drive(engine, jobs, poison)
                assert plain.mismatches(run.requests) == []
                seen.update({name: int(count) for name, count in run.moved.items()})
                for job, output in zip(jobs, run.outputs, strict=True):
                    forced.guesses[job.prompt] = planted(output, rng, 0.2)
                engine.reset_prefix_cache()
    assert set(forced.came) >= {1, 2, 3, 4}
    wanted = ("cache_hits", "preemptions", "forks", "folds_in_place", "folds_to_new", "moves")
    assert not [name for name in wanted if not seen[name]], seen


@pytest.mark.parametrize("name", FORCED_NAMES)
def test_windows_of_which_some_tokens_stay_give_plain_tokens(name, plain_of):
    config, _ = load(name)
    plain, rng = plain_of(name), np.random.default_rng(0)
    prompts = [random_prompt(n, n, config.vocab_size) for n in (1, 31, 45, 64, 70, 97)]
    options = [SAMPLED if i % 2 else {} for i in range(len(prompts))]
    jobs = [
        Job(prompt=prompt, max_tokens=70, seed=i, arrive=2 * i, **options[i])
        for i, prompt in enumerate(prompts)
    ]
    with forced_engine(name) as (engine, forced):
        forced.guesses = {prompt: [0] * 80 for prompt in prompts}
        poison = Poison(engine)
        blind = drive(engine, jobs, poison)  # no guess is right but by luck
        assert plain.mismatches(blind.requests) == []
        few = np.mean(forced.came)
        for share, room in ((0.0, ROOM), (0.3, AMPLE)):
            for prompt, output in zip(prompts, blind.outputs, strict=True):
                forced.guesses[prompt] = planted(output, rng, share)
            forced.came.clear()
            start_over(engine, room)
            poison.spread()
            run = drive(engine, jobs, poison)
            assert run.outputs == blind.outputs
            assert plain.mismatches(run.requests) == []
            assert set(forced.came) >= {1, 2, 3, 4} and np.mean(forced.came) > few + 0.3
            assert run.folds >= 8 or not config.recurrent
        longer = [
            prompt + tuple(output) for prompt, output in zip(prompts, run.outputs, strict=True)
        ]
        forced.guesses |= dict.fromkeys(longer, [0] * 80)
        turns = [Job(prompt=prompt, max_tokens=20) for prompt in longer]
        second = drive(engine, turns, poison)  # from checkpoints and pages that windows have left
        assert plain.mismatches(second.requests) == []
        assert second.moved["cache_hit_tokens"] >= sum((len(p) - 1) // 32 * 32 for p in longer) - 64
