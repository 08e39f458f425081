"""Layers that draft see what they should see: the second model its own past, the head the model's hidden states."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hybrid_jax.config import EngineConfig, SpeculationConfig
from hybrid_jax.models import decoder, mtp
from hybrid_jax.schedule.drafts import DraftCounts
from hybrid_jax.weights import BUNDLED, load_model
from tests.drawing import left_to_all
from tests.exactness.definition import Plain
from tests.exactness.engines import make_engine, one_shape
from tests.exactness.jobs import Job, drive
from tests.exactness.poison import Poison
from tests.exactness.speculation_matrix import AMPLE, ENGINES, subject_of

CHAIN = SpeculationConfig(method="mtp", num_tokens=3, adaptive=False)


@pytest.mark.parametrize("name", ["draft-jamba", "draft-qwen3_next"])
@left_to_all("draft-qwen3_next")
def test_a_second_model_like_the_first_is_always_right(name, plain_of):
    """Greedy and without penalties, in a first turn and in a second one on what windows have left."""
    maker = replace(ENGINES[name], second="")
    with subject_of(maker, plain_of(maker.model), ()) as subject:
        prompts = [tuple(range(n, n + n)) for n in (1, 31)] + [(5, 3, 8) * 15, (7,) * 64]
        first = [Job(prompt=tuple(t % 61 for t in p), max_tokens=40) for p in prompts]
        run, wrong = subject.drive(first)
        assert wrong == []
        turns = [
            replace(job, prompt=(*job.prompt, *output, *range(30)))
            for job, output in zip(first, run.outputs, strict=True)
        ]
        again, wrong = subject.drive(turns)
        assert wrong == [] and again.moved["cache_hits"] == len(turns)
        windows = sum((r.course.drafts.windows for r in run.requests + again.requests), Counter())
        assert windows[3, 3] > 40
        assert not [drafted for drafted, accepted in windows if accepted < drafted]


def test_the_head_drafts_what_its_definition_says(monkeypatch):
    """In every window of the bundled model. Entries of committed tokens are after the model's own hidden states, those
    of drafts after one another."""
    # (drafted, accepted) in order, by the counts that they enter.
    windows: dict[int, list[tuple[int, int]]] = {}
    add = DraftCounts.add

    def noted(self, judged):
        judged = list(judged)
        windows.setdefault(id(self), []).extend(judged)
        add(self, judged)

    monkeypatch.setattr(DraftCounts, "add", noted)
    config, params = load_model(BUNDLED, dtype="float32", mtp=True)
    settings = EngineConfig(
        max_rows=2, prefill_tokens=128, steps_per_dispatch=4, page_tokens=64, speculation=CHAIN
    )
    texts = (
        "def area(width, height):\n    return width * height\n",
        "import os\nimport sys\n\n\nclass ",
    )
    jobs = [Job(prompt=tuple(text.encode()), max_tokens=70) for text in texts]
    with one_shape(64):
        engine = make_engine(config, params, settings, room=AMPLE)
        poison = Poison(engine)
        poison.spread()
        run = drive(engine, jobs, poison)
        engine.close()
    assert Plain(replace(config, mtp=()), params).mismatches(run.requests) == []
    right = 0
    for request in run.requests:
        tokens, at = [*request.prompt, *request.output.token_ids], len(request.prompt)
        hidden = hidden_states(params, config, tokens)
        for count, accepted in windows[id(request.course.drafts)]:
            drafts = drafted(params, config, tokens[: at + 1], hidden[:at])
            agree = [a == b for a, b in zip(drafts[:count], tokens[at + 1 :], strict=False)]
            assert accepted == [*agree, False].index(False), (at, drafts, tokens[at : at + 4])
            at, right = at + 1 + accepted, right + accepted
        assert at == len(tokens) - 1
    assert right > 60


@functools.partial(jax.jit, static_argnames="config")
def _entries(params, tokens, hidden, length, config):
    return mtp.forward(params, tokens, hidden, length, config)


def drafted(params, config, tokens, hidden) -> list[int]:
    """Greedy drafts after tokens, of which all but the last have hidden states [n, D]. The first entry has zeros."""
    hidden, found = [np.zeros(config.width, np.float32), *hidden], []
    for _ in range(CHAIN.num_tokens):
        padded = np.zeros((1, 192), np.int32)
        padded[0, : len(tokens)] = tokens
        before = np.zeros((1, 192, config.width), np.float32)
        before[0, : len(tokens)] = hidden[: len(tokens)]
        out = _entries(params, padded, before, np.array([len(tokens)]), config)[0, len(tokens) - 1]
        found.append(int(decoder.head_logits(params, out, config).argmax()))
        tokens, hidden = [*tokens, found[-1]], [*hidden, np.asarray(out)]
    return found


def hidden_states(params, config, tokens) -> np.ndarray:
    """What the head takes of the model, [T, D]."""
    given = jnp.array([tokens])
    valid, mix = decoder.whole_sequences(given, jnp.array([len(tokens)]))
    h = decoder.walk(params, given, valid, replace(config, mtp=()), mix)
    return np.asarray(decoder.normed_hidden(params, h, config))[0]
