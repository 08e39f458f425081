"""Drafts of a head on the cut that are kept unjudged: each token is the model's, or the head's where it was sure."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hybrid_jax.config import XLA, EngineConfig, SpeculationConfig
from hybrid_jax.config.sampling_params import SamplingParams
from hybrid_jax.engine.engine import Engine
from hybrid_jax.models import decoder
from hybrid_jax.models.cut import exit_params
from hybrid_jax.models.stacks import ExitStack
from hybrid_jax.schedule.request import Request
from tests.drawing import left_to_all
from tests.tiny_models import VOCAB, tiny_model

TOKENS, LIMIT = 40, 0.05
EXIT = SpeculationConfig(method="exit", num_tokens=3, unjudged_above=LIMIT, adaptive=False)


@pytest.fixture(scope="module")
def model():
    """A tiny model whose head on the cut often prefers another token than the model."""
    config, params = tiny_model("with_cut")
    head = exit_params(params, config)
    return replace(config, exit_head=True), params | {"exit": head | {"head": 3 * head["head"]}}


def made(model, speculation: SpeculationConfig, **wanted) -> list[Request]:
    """What an engine makes of 4 prompts."""
    settings = EngineConfig(max_rows=4, max_model_len=128)
    config, params = model
    engine = Engine(config, params, replace(settings, speculation=speculation))
    rng = np.random.default_rng(0)
    requests = [
        Request(
            request_id=str(number),
            prompt=rng.integers(0, VOCAB, 5 + 9 * number).tolist(),
            params=SamplingParams(temperature=0.0, **wanted),
            seed=number,
            max_tokens=TOKENS,
        )
        for number in range(4)
    ]
    for request in requests:
        engine.add(request)
    while engine.has_work:
        engine.step()
    return requests


def both(model, request: Request) -> tuple[np.ndarray, np.ndarray]:
    """Logits [tokens, V] of the model and of the head on its cut, in front of each token of an output."""
    (config, params), begin = model, len(request.prompt) - 1
    tokens = jnp.array([[*request.prompt, *request.output.token_ids]])
    valid, mix = decoder.whole_sequences(tokens, jnp.array([tokens.shape[1]]))
    stack = ExitStack(params, config)
    early = stack.logits(stack.through(tokens, None, valid, mix, XLA))
    late = decoder.forward(params, tokens, config)
    return tuple(np.asarray(x)[0, begin:-1] for x in (late, early))


def kept(model, request: Request) -> list[int]:
    """The tokens of an output that the model would not have drawn, all of which the head must have been sure of."""
    late, early = both(model, request)
    found = []
    for place, token in enumerate(request.output.token_ids):
        if token != late[place].argmax():
            assert token == early[place].argmax(), place
            assert jax.nn.softmax(early[place])[token] > LIMIT
            found.append(token)
    return found


def test_tokens_are_the_models_or_the_heads_where_it_was_sure(model):
    heads = [token for request in made(model, EXIT) for token in kept(model, request)]
    assert len(heads) > 10, "drafts were kept that the model would not have drawn"


@pytest.mark.parametrize("asked", [{"logit_bias": {3: -9.0}}, {"repetition_penalty": 1.4}])
@left_to_all("asked1")
def test_requests_whose_logits_are_adjusted_are_judged(model, asked):
    plain = made(model, replace(EXIT, unjudged_above=None), **asked)
    assert [one.output.token_ids for one in made(model, EXIT, **asked)] == [
        one.output.token_ids for one in plain
    ]


def test_a_head_that_is_never_so_sure_changes_nothing(model):
    sure = replace(EXIT, unjudged_above=1 - 1e-9)
    plain, found = made(model, replace(EXIT, unjudged_above=None)), made(model, sure)
    assert [one.output.token_ids for one in found] == [one.output.token_ids for one in plain]


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"unjudged_above": 1.5}, r"unjudged_above must be a float between 0 and 1, .* got 1\.5"),
        ({"unjudged_above": "0.9"}, r"unjudged_above must be a float between .* got '0\.9'"),
        (
            {"method": "ngram"},
            r"unjudged_above must be None, except with method 'exit' .* got 0\.05",
        ),
        ({"tree": (0, 0)}, r"unjudged_above must be None, except with method 'exit' and no tree"),
    ],
)
def test_where_drafts_cannot_be_kept_is_said(wrong, message):
    with pytest.raises(ValueError, match=message):
        replace(EXIT, **wrong)
    with pytest.raises(ValueError, match=r"without unjudged_above in exact mode, got 0\.05"):
        EngineConfig(speculation=EXIT, exact=True)
