"""Distillation: what its distances are, that they fall, that it goes on where it stopped, and what is written."""

from __future__ import annotations

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hybrid_jax.config import with_cut
from hybrid_jax.models import config_from_hf, decoder
from hybrid_jax.models.cut import cut_params
from hybrid_jax.models.initialize import random_params
from hybrid_jax.train import distill
from hybrid_jax.train.distillation import TEMPERATURE, Goal, adam, distances, train_step
from hybrid_jax.train.export import write_model
from hybrid_jax.weights import load_model
from hybrid_jax.weights.cut import own_tensors

FEW = {"batch": 2, "context": 64, "progress": False}


@pytest.fixture(scope="module")
def fields(small_fields):
    """config.json of a model with two layers of each kind."""
    return small_fields | {"num_hidden_layers": 4, "layer_types": ["mamba", "attention"] * 2}


@pytest.fixture(scope="module")
def model(fields, tmp_path_factory):
    """A directory with a small model of bytes."""
    folder = tmp_path_factory.mktemp("model")
    write_model(folder, random_params(config_of(fields), 0), fields)
    return folder


def config_of(fields):
    return replace(config_from_hf(fields), dtype="float32")


def test_distances_are_those_of_two_models(fields):
    base = config_of(fields)
    config = with_cut(base, 1)
    teacher = random_params(base, 0)
    params = cut_params(teacher, config)
    tensors = own_tensors(params, config)
    tokens = jax.random.randint(jax.random.key(0), (2, 13), 0, 256)
    counts = jnp.arange(12) < jnp.array([12, 7])[:, None]
    found = distances(tensors, params, teacher, tokens, counts, config, base)
    logits = [
        np.asarray(decoder.forward(weights, tokens[:, :-1], of), np.float64)
        for weights, of in ((teacher, base), (params, config))
    ]

    def log_softmax(x):
        x = x - x.max(-1, keepdims=True)
        return x - np.log(np.exp(x).sum(-1, keepdims=True))

    def kl(temperature):
        p, q = (log_softmax(x / temperature) for x in logits)
        return (np.exp(p) * (p - q)).sum(-1)[counts].mean() * temperature**2

    wanted, said = map(log_softmax, logits)
    following = np.asarray(tokens[:, 1:])[..., None]
    assert found.kl == pytest.approx(kl(1.0), rel=1e-3)
    assert found.soft_kl == pytest.approx(kl(TEMPERATURE), rel=1e-3)
    for name, values in (("nats", said), ("teacher_nats", wanted)):
        cost = -np.take_along_axis(values, following, -1)[..., 0][counts].mean()
        assert getattr(found, name) == pytest.approx(cost, rel=1e-4)
    agree = (said.argmax(-1) == wanted.argmax(-1))[counts].mean()
    assert found.agreement == pytest.approx(agree, abs=1e-6)
    assert found.hidden > 0


def test_nothing_is_lost_where_the_models_are_the_same(fields):
    """A cut in front of the last layer."""
    base = config_of(fields)
    config = with_cut(base, len(base.layers) - 1)
    teacher = random_params(base, 0)
    params = cut_params(teacher, config)
    tokens = jax.random.randint(jax.random.key(0), (2, 13), 0, 256)
    counts = jnp.ones((2, 12), bool)
    found = distances(own_tensors(params, config), params, teacher, tokens, counts, config, base)
    assert abs(float(found.kl)) < 1e-5 and found.agreement == 1.0 and found.hidden < 1e-9


@pytest.mark.parametrize(
    "goal, share",
    [(Goal(), 0.9), (Goal("lm"), 0.999), (Goal(hidden=1.0), 0.9)],  # random tokens teach little
)
def test_steps_lower_what_they_aim_at_and_leave_the_teacher(fields, goal, share):
    base = config_of(fields)
    config = with_cut(base, 1)
    teacher = random_params(base, 0)
    params = cut_params(teacher, config)
    tokens = jax.random.randint(jax.random.key(0), (2, 33), 0, 256)
    counts, kept = jnp.ones((2, 32), bool), jax.tree.map(np.array, teacher)
    tensors = jax.tree.map(jnp.array, own_tensors(params, config))
    arrays = {"params": tensors, "optimizer": adam().init(tensors)}

    def aim(tensors):
        found = distances(tensors, params, teacher, tokens, counts, config, base)
        aimed = found.soft_kl if goal.loss == "kl" else found.nats
        return float(aimed + goal.hidden * found.hidden)

    before = aim(arrays["params"])
    for _ in range(8):
        arrays, _ = train_step(
            arrays, params, teacher, tokens, jnp.float32(3e-3), config, base, goal
        )
    assert aim(arrays["params"]) < share * before
    jax.tree.map(np.testing.assert_array_equal, teacher, kept)


def test_it_goes_on_where_it_stopped_and_writes_what_it_measured(model, sources, tmp_path):
    settings = FEW | {"sources": sources, "cut": 1, "steps": 20, "eval_every": 10}
    record = distill(tmp_path / "once", model, **settings)
    distill(tmp_path / "parts", model, minutes=1e-9, **settings)
    again = distill(tmp_path / "parts", model, **settings)
    assert again["held_out"] == record["held_out"] and again["steps"] == record["steps"] == 20
    assert record["held_out"]["trained"]["kl"] < record["held_out"]["untrained"]["kl"]
    (config, one), (_, other) = (load_model(tmp_path / name) for name in ("once", "parts"))
    jax.tree.map(np.testing.assert_array_equal, one, other)
    assert config.cut == 1
    written = json.loads((tmp_path / "once" / "distillation_record.json").read_text())
    assert written["held_out"] == record["held_out"]
    assert set(written["held_out"]) == {"untrained", "trained", "recovered"}
    assert written["command"].startswith("distill(OUT, ") and written["cut"] == 1


def test_mistakes_are_named(model, sources, tmp_path, fields):
    settings = FEW | {"sources": sources, "steps": 1}
    layers = len(config_of(fields).layers)
    with pytest.raises(ValueError, match=f"cut must be below the number of layers, {layers}"):
        distill(tmp_path, model, cut=layers, **settings)
    with pytest.raises(ValueError, match="at least 1 and below the number of layers"):
        distill(tmp_path, model, cut=0, **settings)
    with pytest.raises(ValueError, match="loss must be 'kl' or 'lm', got 'mse'"):
        distill(tmp_path, model, cut=1, loss="mse", **settings)
    with pytest.raises(ValueError, match="holds a model already"):
        distill(model, model, cut=1, **settings)
