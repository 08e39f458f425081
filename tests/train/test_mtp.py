"""Training of a head: what its loss is, that it falls, that it goes on where it stopped, and what is written."""

from __future__ import annotations

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hybrid_jax.models import config_from_hf, decoder
from hybrid_jax.models import mtp as heads
from hybrid_jax.models.initialize import random_params
from hybrid_jax.train import mtp, train_mtp
from hybrid_jax.train.export import write_model
from hybrid_jax.weights import load_config, load_model


@pytest.fixture(scope="module")
def model(small_fields, tmp_path_factory):
    """A directory with a small model of bytes."""
    folder = tmp_path_factory.mktemp("model")
    config = replace(heads_config(small_fields), mtp=())
    write_model(folder, random_params(config, 0), small_fields)
    return folder


def heads_config(fields):
    config = replace(config_from_hf(fields), dtype="float32")
    return replace(config, mtp=(config.layers[-1],))


def test_the_loss_follows_the_chain_that_drafts(small_fields):
    """By the definition, one entry behind the other: at depth d, entry p is behind that of p - 1 at depth d - 1."""
    config = heads_config(small_fields)
    params = random_params(config, 0)
    tokens = jax.random.randint(jax.random.key(0), (2, 20), 0, 256)
    lengths = jnp.full(2, 20)
    losses, agreed = mtp.depth_losses(params["mtp"], params, tokens, config)
    teacher = jax.nn.log_softmax(decoder.forward(params, tokens, replace(config, mtp=())))
    hidden = hidden_states(params, tokens, config)
    for depth in range(1, mtp.DEPTH + 1):
        own = tokens[:, depth:]
        hidden = heads.forward(params, own, hidden[:, :-1], lengths - depth, config)
        said = jax.nn.log_softmax(decoder.head_logits(params, hidden, config))
        wanted = np.asarray(teacher[:, depth:], np.float64)
        distance = (np.exp(wanted) * (wanted - np.asarray(said, np.float64))).sum(-1).mean()
        assert float(losses[depth - 1]) == pytest.approx(distance, rel=1e-3)
        assert float(agreed[depth - 1]) == pytest.approx(
            np.mean(np.asarray(said).argmax(-1) == wanted.argmax(-1)), abs=1e-6
        )


def hidden_states(params, tokens, config):
    """What a head takes of the model's own layers, [B, T, D]."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    lengths = jnp.full(len(tokens), tokens.shape[1])

    def mix(weights, normed, spec, where):
        return decoder.MIXERS[type(spec)](weights, normed, positions, lengths, spec)

    h = decoder.walk(params, tokens, positions >= 0, replace(config, mtp=()), mix)
    return heads.normed_hidden(params, h, config)


def test_a_head_is_trained_and_written_beside_its_model(model, sources, tmp_path):
    given = {"sources": [sources], "batch": 2, "context": 32, "seed": 0, "progress": False}
    whole = train_mtp(tmp_path / "whole", model, steps=30, eval_every=10, **given)
    train_mtp(tmp_path / "parts", model, steps=30, eval_every=10, minutes=1e-9, **given)
    again = train_mtp(tmp_path / "parts", model, steps=30, eval_every=10, **given)
    assert again["steps"] == whole["steps"] == 30
    assert again["held_out"] == whole["held_out"]
    first, last = whole["history"][0]["agreement"][0], whole["history"][-1]["agreement"][0]
    assert last > first
    assert json.loads((tmp_path / "whole" / mtp.RECORD_FILE).read_text()) == whole
    assert whole["command"].startswith("train_mtp(OUT, steps=30,")

    config, params = load_model(tmp_path / "whole", dtype="float32", mtp=True)
    assert config.mtp == (load_config(model).layers[-1],)
    _, alone = load_model(tmp_path / "whole", dtype="float32")
    _, before = load_model(model, dtype="float32")
    assert "mtp" not in alone
    jax.tree.map(np.testing.assert_array_equal, alone, before)
    for one, other in zip(
        jax.tree.leaves(params["mtp"]),
        jax.tree.leaves(load_model(tmp_path / "parts", dtype="float32", mtp=True)[1]["mtp"]),
        strict=True,
    ):
        np.testing.assert_array_equal(one, other)


def test_another_vocabulary_is_refused(model, tmp_path):
    fields = json.loads((model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields | {"vocab_size": 300}))
    with pytest.raises(ValueError, match="vocab_size of .* must be 260, because tokens are bytes"):
        train_mtp(tmp_path / "out", tmp_path, steps=1, progress=False)
