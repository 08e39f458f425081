"""Layers that draft, those of a head or of a second model, change no token, and see what they should see."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from hybrid_jax.config import Attention, ModelConfig, SpeculationConfig
from hybrid_jax.models.initialize import random_params
from tests.exactness.conftest import load
from tests.exactness.engines import make_engine, one_shape, start_over
from tests.exactness.jobs import Job, drive, random_prompt
from tests.exactness.poison import Poison
from tests.exactness.test_speculation import AMPLE, SAMPLED, SETTINGS, TREE, came

CHAIN = SpeculationConfig(num_tokens=3, adaptive=False)


@functools.cache
def with_drafter(name: str, method: str, second: str = "") -> tuple[ModelConfig, dict]:
    """A tiny model with a random head, or with a second model, which by default is the model once more."""
    config, params = load(name)
    if method == "draft":
        other, weights = load(second or name)
        return replace(config, draft=other), params | {"draft": weights}
    last = [s for s in config.layers if any(isinstance(m, Attention) for m in s.mixers)][-1]
    only = tuple(m for m in last.mixers if isinstance(m, Attention))
    config = replace(config, mtp=(replace(last, mixers=only),))
    return config, params | {"mtp": random_params(config, 0)["mtp"]}


def jobs_of(vocab_size: int, rounds: int = 60) -> list[Job]:
    prompts = [random_prompt(n, n, vocab_size) for n in (1, 31, 45, 64, 70, 97)]
    jobs = [
        Job(
            prompt=prompt,
            max_tokens=rounds,
            seed=i,
            arrive=2 * i,
            repetition_penalty=1.0 + 0.3 * (i == 3),
            **(SAMPLED if i % 2 else {}),
        )
        for i, prompt in enumerate(prompts)
    ]
    return jobs + [replace(jobs[5], group="g", sample_index=i) for i in (7, 8)]


@pytest.mark.parametrize(
    ("name", "method", "second", "kind"),
    [
        ("parallel", "mtp", "", "chain"),
        ("qwen3_next", "mtp", "", "tree"),
        ("jamba", "draft", "", "chain"),
        ("qwen3_next", "draft", "parallel", "chain"),
        ("parallel", "draft", "", "tree"),
    ],
)
def test_layers_that_draft_give_plain_tokens(name, method, second, kind, plain_of):
    """In ample memory and in little, with forks and preemptions, and in a second turn on what windows have left."""
    speculation = replace(TREE if kind == "tree" else CHAIN, method=method)
    config, params = with_drafter(name, method, second)
    plain, jobs = plain_of(name), jobs_of(config.vocab_size)
    with one_shape(64, decode_rows=(1,)):
        engine = make_engine(config, params, replace(SETTINGS, speculation=speculation), room=AMPLE)
        poison = Poison(engine)
        poison.spread()
        run = drive(engine, jobs, poison)
        assert plain.mismatches(run.requests) == []
        if method == "draft" and not second:
            likely = [Job(prompt=job.prompt, max_tokens=40) for job in jobs[:6]]
            for job in (likely, [replace(j, prompt=j.prompt + (1, 2, 3) * 30) for j in likely]):
                greedy = drive(engine, job, poison)
                assert plain.mismatches(greedy.requests) == []
                assert came(greedy)[3] > 20
                wrong = [w for r in greedy.requests for w in r.drafts.windows if w[0] != w[1]]
                assert not wrong or kind == "tree", "the same layers say the same"
        start_over(engine, 1.3)
        poison.spread()
        assert drive(engine, jobs, poison).outputs == run.outputs
        start_over(engine, AMPLE)
        drive(engine, jobs, poison)
        turns = [
            Job(prompt=job.prompt + tuple(output), max_tokens=20)
            for job, output in zip(jobs[:6], run.outputs, strict=False)
        ]
        second_turn = drive(engine, turns, poison)
        assert plain.mismatches(second_turn.requests) == []
        assert second_turn.moved["cache_hits"] >= 5
        engine.close()
