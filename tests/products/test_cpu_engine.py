"""An engine whose products of few rows are our own, beside one with those of XLA."""

from __future__ import annotations

import numpy as np
import pytest

from hybrid_jax.config import MLP, Attention, EngineConfig, Mamba2, ModelConfig, residual_layer
from hybrid_jax.engine.engine import Engine
from hybrid_jax.products.cpu import calls
from hybrid_jax.products.xla import __name__ as xla_products
from tests.exactness.engines import one_shape
from tests.exactness.jobs import Job, Run
from tests.products.cpu_code import best
from tests.tiny_models import redrawn

VOCAB = 96
SETTINGS = {"max_rows": 4, "prefill_tokens": 64, "steps_per_dispatch": 4, "max_model_len": 128}
# Log-probabilities of two engines whose products round in another order.
NEAR = {"float32": 3e-4, "bfloat16": 0.25}


@pytest.fixture(autouse=True)
def compiler():
    best()


def engine(kernels: str, dtype: str = "float32", exact: bool = False) -> Engine:
    """An engine of a model that is wide enough for our own products, with a head that is its embedding."""
    mamba = Mamba2(num_heads=8, head_dim=16, state_size=16)
    attention = Attention(num_heads=4, num_kv_heads=2, head_dim=16)
    config = ModelConfig(
        family="bamba",
        width=64,
        vocab_size=VOCAB,
        max_position=256,
        layers=tuple(
            residual_layer(mixers=(mixer,), mlp=MLP(width=96)) for mixer in (mamba, attention)
        ),
        tie_embeddings=True,
    )
    settings = EngineConfig(kernels=kernels, dtype=dtype, exact=exact, **SETTINGS)
    return Engine(config, redrawn(config, seed=5, dtype=dtype), settings)


def jobs() -> list[Job]:
    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(0, VOCAB, n).tolist()) for n in (5, 40, 33)]
    return [Job(prompt=prompt, max_tokens=12) for prompt in (*prompts, prompts[1] + (3, 4))]


def answers(engine: Engine, jobs: list[Job]) -> Run:
    """What an engine makes of requests that all come at once."""
    requests = [job.request(str(number)) for number, job in enumerate(jobs)]
    for request in requests:
        engine.add(request)
    while engine.has_work:
        engine.step()
    return Run(requests, {})


@pytest.mark.parametrize("dtype", NEAR)
def test_answers_are_those_of_xlas_products(dtype, monkeypatch):
    called, call = set(), calls.call

    def noted(version, target, *arrays):
        called.add(target.name)
        return call(version, target, *arrays)

    monkeypatch.setattr(calls, "call", noted)
    with one_shape():
        other_engine, own_engine = (engine(kernels, dtype) for kernels in ("xla", "auto"))
        other = answers(other_engine, jobs())
        assert called == set()
        own = answers(own_engine, jobs())
    assert own_engine.about_products.startswith("our own for up to 32 rows")
    assert (other_engine.backend.products, other_engine.about_products) == (xla_products, "")
    short = {"float32": "f32", "bfloat16": "bf16"}[dtype]
    assert called == {f"columns_{short}", f"rows_{short}"}
    for mine, theirs in zip(own.requests, other.requests, strict=True):
        both = list(zip(mine.output.logprobs, theirs.output.logprobs, strict=True))
        if dtype == "bfloat16":  # later tokens may be others
            both = both[:1]
        else:
            assert mine.output.token_ids == theirs.output.token_ids
        assert max(abs(a.logprob - b.logprob) for a, b in both) < NEAR[dtype]


@pytest.mark.as_users
def test_exact_mode_has_the_same_bits_alone_and_among_others():
    with one_shape():
        own = engine("auto", exact=True)
    alone = [answers(own, [job]).bits[0] for job in jobs()]
    assert answers(own, jobs()).bits == alone
