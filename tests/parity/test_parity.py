"""The plain definition against transformers, in float32, on the committed goldens."""

from __future__ import annotations

import functools
import random
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hybrid_jax.models import FAMILIES
from hybrid_jax.models.decoder import forward
from hybrid_jax.weights import load_model
from tests.drawing import spine
from tests.parity.goldens import (
    COMMITTED,
    FOLDER,
    GOLDENS,
    config_of,
    load_answers,
    one_of_each_family,
    tolerance,
)
from tests.parity.random_variants import random_variant


@functools.cache
def case(golden: Path):
    """The model, its answers, and one compiled forward for prompts and continuations alike."""
    config, params = load_model(golden)
    answers = load_answers(golden)
    rows = [answer.prompt + answer.continuation for answer in answers]
    tokens = np.zeros((len(rows), max(map(len, rows))), np.int32)
    for row, known in zip(tokens, rows, strict=True):
        row[: len(known)] = known
    run = jax.jit(
        lambda tokens, lengths: forward(params, tokens, config, lengths=lengths),
    )
    return config, answers, tokens, run


@pytest.mark.skipif(FOLDER != COMMITTED, reason="HYBRID_JAX_GOLDENS names other goldens")
def test_every_family_has_goldens():
    missing = FAMILIES.keys() - {config_of(golden).family for golden in GOLDENS}
    assert not missing, (
        f"no goldens of {sorted(missing)}: add variants to golden_variants.py, then run "
        "python -m tests.parity.make_goldens --family NAME"
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_random_variants(family):
    assert random_variant(family, random.Random(0))["family"] == family


def test_a_family_without_random_variants_is_named():
    with pytest.raises(ValueError, match=r"random_variants\.py has no branch for family 'toy'"):
        random_variant("toy", random.Random(0))


@spine(*(f"{golden.name}]" for golden in one_of_each_family()))
@pytest.mark.parametrize("golden", GOLDENS, ids=lambda golden: golden.name)
def test_logits_agree_with_transformers(golden):
    config, answers, tokens, run = case(golden)
    lengths = np.array([len(answer.logits) for answer in answers], np.int32)
    logits = np.asarray(run(jnp.asarray(tokens), jnp.asarray(lengths)))
    for row, answer in zip(logits, answers, strict=True):
        difference = np.abs(row[: len(answer.logits)] - answer.logits).max()
        assert difference < tolerance(config), f"prompt of {len(answer.prompt)} tokens"


@pytest.mark.parametrize("golden", GOLDENS, ids=lambda golden: golden.name)
def test_greedy_continuations_agree_with_transformers(golden):
    _, answers, tokens, run = case(golden)
    lengths = np.array([len(answer.prompt) for answer in answers], np.int32)
    tokens = np.where(np.arange(tokens.shape[1]) < lengths[:, None], tokens, 0)
    rows = np.arange(len(answers))
    for _ in answers[0].continuation:
        logits = np.asarray(run(jnp.asarray(tokens), jnp.asarray(lengths)))
        tokens[rows, lengths] = logits[rows, lengths - 1].argmax(-1)
        lengths = lengths + 1
    for row, answer in zip(tokens, answers, strict=True):
        start = len(answer.prompt)
        assert row[start : start + len(answer.continuation)].tolist() == answer.continuation
