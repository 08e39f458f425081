"""Training of a head: what its loss is, that it falls, that it goes on where it stopped, and what is written."""

from __future__ import annotations

import functools
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
from tests.drawing import left_to_all


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


@left_to_all
def test_the_loss_follows_the_chain_that_drafts(small_fields):
    """Entry by entry: at depth d, the one of token p stands after that of token p - 1 at depth d - 1."""
    config, length = heads_config(small_fields), 6
    params = random_params(config, 0)
    tokens = jax.random.randint(jax.random.key(0), (2, length), 0, 256)
    losses, agreed = mtp.depth_losses(params["mtp"], params, tokens, config)
    forward = functools.partial(decoder.forward, config=replace(config, mtp=()))
    before = {0: list(jnp.moveaxis(hidden_states(params, tokens, config), 1, 0))}  # by depth
    for depth in range(1, mtp.DEPTH + 1):
        before[depth], found = [None] * length, []
        for p in range(depth, length):
            behind = jnp.stack([before[depth - 1][q - 1] for q in range(depth, p + 1)], axis=1)
            lengths = jnp.full(2, p + 1 - depth)
            entry = heads.forward(params, tokens[:, depth : p + 1], behind, lengths, config)[:, -1]
            before[depth][p] = entry
            said = log_softmax(decoder.head_logits(params, entry, config))
            wanted = log_softmax(forward(params, tokens[:, : p + 1])[:, -1])
            found.append(
                (
                    np.exp(wanted) * (wanted - said),
                    said.argmax(-1) == wanted.argmax(-1),
                )
            )
        distances, same = zip(*found, strict=True)
        assert float(losses[depth - 1]) == pytest.approx(np.sum(distances, -1).mean(), rel=1e-3)
        assert float(agreed[depth - 1]) == pytest.approx(np.mean(same), abs=1e-6)


def log_softmax(logits):
    return np.asarray(jax.nn.log_softmax(logits), np.float64)


def hidden_states(params, tokens, config):
    """What a head takes of the model's own layers, [B, T, D]."""
    valid, mix = decoder.whole_sequences(tokens, jnp.full(len(tokens), tokens.shape[1]))
    h = decoder.walk(params, tokens, valid, replace(config, mtp=()), mix)
    return decoder.normed_hidden(params, h, config)


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


def test_a_head_of_another_model_is_not_gone_on_with(model, small_fields, sources, tmp_path):
    """The other model has the same shape."""
    other = tmp_path / "other"
    write_model(other, random_params(replace(heads_config(small_fields), mtp=()), 1), small_fields)
    given = {"sources": sources, "batch": 2, "context": 32, "progress": False, "minutes": 1e-9}
    train_mtp(tmp_path / "out", model, **given)
    with pytest.raises(ValueError, match="state.npz was made with other weights of the model"):
        train_mtp(tmp_path / "out", other, **given)


def test_a_directory_without_a_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match="load_model: .* has no config.json"):
        train_mtp(tmp_path / "out", tmp_path, steps=1)
    assert not (tmp_path / "out").exists()


def test_a_model_is_not_overwritten(model):
    before = (model / "model.safetensors").read_bytes()
    with pytest.raises(ValueError, match="holds a model already, which would be overwritten"):
        train_mtp(model, steps=1)
    with pytest.raises(ValueError, match="holds the model, which would be overwritten"):
        train_mtp(model, model, steps=1)
    assert (model / "model.safetensors").read_bytes() == before
