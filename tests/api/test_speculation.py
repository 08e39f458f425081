"""Speculation as callers ask for it, what they are told of it, and what is refused."""

from __future__ import annotations

import pytest

from hybrid_jax import LLM, SamplingParams, SpeculationConfig
from hybrid_jax.weights import BUNDLED
from tests.drawing import left_to_all

TREE = (0, 0, 1, 2, 3)  # of depth 3


@pytest.mark.as_users
def test_what_was_accepted_is_counted_by_depth():
    """Of one request, and of all; a tree of five drafts has three places."""
    llm = LLM(speculation=SpeculationConfig(method="mtp", tree=TREE, adaptive=False))
    params = SamplingParams(temperature=0.0, max_tokens=24)
    outputs = llm.generate(["import os\nimport ", "def area(width"], params)
    stats = llm.stats()
    for output in outputs:
        metrics = output.metrics
        places = metrics.accepted_by_position
        assert len(places) == 3 and list(places) == sorted(places, reverse=True) and places[0] > 0
        assert metrics.num_accepted_tokens == sum(places)
        assert metrics.num_draft_tokens > 3 * metrics.num_verifications
    for place in range(3):
        total = sum(output.metrics.accepted_by_position[place] for output in outputs)
        assert stats[f"accepted_at_{place + 1}"] == total
    assert "accepted_at_4" not in stats
    assert stats["verifications"] == sum(output.metrics.num_verifications for output in outputs)
    assert 0.05 < stats["drafting_share"] < 0.95
    llm.close()


@pytest.mark.as_users
@pytest.mark.parametrize("method", ["ngram", "suffix", "mtp"])
@left_to_all("ngram", "suffix", "mtp")
def test_one_draft_at_a_time_is_enough(method):
    params = SamplingParams(temperature=0.0, max_tokens=20)
    prompt = "for i in range(10):\n    print(i)\nfor i in range(10):\n"
    settings = SpeculationConfig(method=method, num_tokens=1, adaptive=False)
    plain, drafting = LLM(max_rows=2), LLM(max_rows=2, speculation=settings)
    (want,), (got,) = (llm.generate(prompt, params) for llm in (plain, drafting))
    assert got.outputs[0].token_ids == want.outputs[0].token_ids
    assert want.metrics.accepted_by_position == ()
    (accepted,) = got.metrics.accepted_by_position
    assert 0 < accepted <= got.metrics.num_draft_tokens <= got.metrics.num_verifications
    plain.close()
    drafting.close()


def test_suffix_compares_as_many_tokens_as_it_finds():
    assert SpeculationConfig(method="suffix", ngram_min=5).ngram_min == 5


@pytest.mark.parametrize(
    "settings, message",
    [
        (
            {"method": "draft:models/small"},
            "method must be 'draft', with model='models/small', got",
        ),
        ({"method": "draft", "model": 5}, "model must be a directory, got 5"),
        ({"method": "ngram", "model": "x"}, "model must be None with method 'ngram', got 'x'"),
        ({"num_tokens": 31}, "num_tokens must be at most 30, got 31"),
        ({"num_tokens": 0}, "num_tokens must be positive, got 0"),
        ({"tree": "abc"}, "tree must be a tuple of integers, one for each draft token, got 'abc'"),
        ({"tree": ()}, "tree must be 1 to 15 numbers, got 0"),
        ({"tree": (0,) * 16}, "tree must be 1 to 15 numbers, got 16"),
        ({"tree": (0, 2)}, "for draft token 2 the number of a token before it, 0 to 1, got 2"),
        ({"tree": (0, 1), "method": "suffix"}, "tree must be None with method 'suffix', got"),
        ({"ngram_min": 5}, "ngram_max must be at least ngram_min 5, got 4"),
        ({"ngram_max": 100_000}, "ngram_max must be at most 64, got 100000"),
        ({"ngram_min": 3, "method": "mtp"}, "ngram_min must be left out with method 'mtp', got 3"),
        ({"shared": True}, "shared must be False with method 'ngram', got True"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(ValueError, match=f"SpeculationConfig: .*{message}"):
        SpeculationConfig(**settings)


def test_what_is_missing_to_draft_is_named():
    with pytest.raises(ValueError, match="the second model: load_model: .*gone"):
        LLM(speculation="draft:gone")
    with pytest.raises(ValueError, match=r"tree in exact mode, got \(0, 0, 1, 2, 3\)"):
        LLM(BUNDLED, speculation=SpeculationConfig(tree=TREE), exact=True)
