"""A training on a toy: it learns, it resumes to the bit, and it ends with a model that loads."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hybrid_jax.models import config_from_hf
from hybrid_jax.models.decoder import forward
from hybrid_jax.models.initialize import random_params
from hybrid_jax.train import evaluate, loop, state, train_tiny
from hybrid_jax.train.data import Document, read_corpus
from hybrid_jax.train.evaluate import bits_per_byte
from hybrid_jax.train.export import rounded, write_model
from hybrid_jax.train.loop import (
    DECAY_FROM,
    STATE_FILE,
    TrainOptions,
    progress_of,
    rate_factor,
    row_length,
    tiny_fields,
    train,
)
from hybrid_jax.weights import load_model

CONFIGS = Path(__file__).parents[2] / "configs" / "models"


def options(**changes) -> TrainOptions:
    return TrainOptions(**{"steps": 4, "batch": 8, "context": 64, "eval_every": 2} | changes)


def run(folder, sources, fields, **changes):
    resume = changes.pop("resume", True)
    return train(
        folder, options(**changes), resume=resume, sources=[sources], progress=False, fields=fields
    )


def read_state(folder):
    with np.load(folder / STATE_FILE) as file:
        return {name: file[name] for name in file if name != "progress"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory, sources, small_fields):
    """The folder and record of 4 steps in one run."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, run(folder, sources, small_fields)


def test_two_steps_and_two_more_equal_four(trained, tmp_path, sources, small_fields, monkeypatch):
    class Stop(Exception):
        pass

    def save_and_stop(path, arrays, at):
        save(path, arrays, at)
        if at.step == 2:
            raise Stop

    save = state.save
    monkeypatch.setattr(state, "save", save_and_stop)
    with pytest.raises(Stop):
        run(tmp_path, sources, small_fields, save_minutes=1e-9, eval_every=100)
    monkeypatch.undo()
    assert run(tmp_path, sources, small_fields, eval_every=100)["steps"] == 4
    whole, parts = read_state(trained[0]), read_state(tmp_path)
    assert whole.keys() == parts.keys()
    differing = [name for name in whole if not np.array_equal(whole[name], parts[name])]
    assert differing == []


def test_a_state_of_another_training_is_refused_by_name(trained, sources, small_fields):
    with pytest.raises(ValueError, match="was made with seed 0, this run has 1"):
        run(trained[0], sources, small_fields, seed=1)
    with pytest.raises(ValueError, match="was made with context 64, this run has 32"):
        run(trained[0], sources, small_fields, context=32)


def test_a_training_that_is_done_only_exports(trained, tmp_path, sources, small_fields):
    whole, record = trained
    folder = shutil.copytree(whole, tmp_path / "again")
    before = read_state(folder)
    (folder / "model.safetensors").unlink()
    again = run(folder, sources, small_fields)
    assert again["steps"] == record["steps"]
    assert again["held_out"] == record["held_out"]
    after = read_state(folder)
    assert all(np.array_equal(before[name], after[name]) for name in before)
    load_model(folder)


def test_training_learns(tmp_path, sources, small_config, small_fields):
    record = run(tmp_path, sources, small_fields, steps=60, eval_every=59)
    start = bits_per_byte(
        random_params(small_config, 0), small_config, read_corpus([sources]).held_out, 64
    )
    assert start["bits_per_byte"] > 7.9
    assert record["held_out"]["context_64"]["bits_per_byte"] < 4.5


def test_the_record_says_what_was_done(trained, sources):
    folder, record = trained
    assert json.loads((folder / "training_record.json").read_text()) == record
    assert record["tokens_seen"] == 4 * 8 * 64
    assert [entry["step"] for entry in record["history"]] == [2, 4]
    assert "seed=0" in record["command"] and "steps=4" in record["command"]
    assert str(sources.parent) not in json.dumps(record)
    corpus = read_corpus([sources])
    assert record["corpus"]["held_out_names"] == [d.name for d in corpus.held_out]
    assert record["held_out"]["context_64"]["bytes"] == sum(len(d.content) for d in corpus.held_out)


def test_another_model_is_trained_by_its_config(tmp_path, sources):
    """Gated delta nets: their tensors are written as their family reads them."""
    fields = json.loads((CONFIGS / "tiny_gated_delta" / "config.json").read_text())
    fields |= {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    fields |= {"layer_types": ["linear_attention", "full_attention"], "head_dim": 8}
    fields |= {"linear_key_head_dim": 4, "linear_value_head_dim": 4}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(fields))
    given = {"steps": 2, "batch": 2, "context": 64, "sources": [sources], "progress": False}
    record = train_tiny(tmp_path / "out", config=file, **given)
    assert record["config"]["pattern"] == "GA" and record["config"]["gated_delta"]["key_dim"] == 4
    assert all(0 < each["bits_per_byte"] < 20 for each in record["held_out"].values())
    config = config_from_hf(fields)
    params = random_params(config, seed=3)
    write_model(tmp_path / "out", params, fields)
    _, loaded = load_model(tmp_path / "out", dtype="float32")
    for a, b in zip(jax.tree.leaves(loaded), jax.tree.leaves(rounded(params, config)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.parametrize("name, value", [("vocab_size", 300), ("pad_token_id", None)])
def test_a_config_whose_tokens_are_not_bytes_is_refused(tmp_path, name, value):
    fields = tiny_fields() | {name: value}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=f"tiny_fields: {name} of .* must be .*, got {value}"):
        train_tiny(tmp_path / "out", config=file, steps=1, progress=False)


def test_a_failed_save_leaves_the_old_state(tmp_path, monkeypatch):
    path = tmp_path / "state.npz"
    state.save(path, {"a": jnp.arange(3)}, state.TrainProgress(step=1))

    def fail(file, **arrays):
        file.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(np, "savez", fail)
    with pytest.raises(OSError, match="disk full"):
        state.save(path, {"a": jnp.arange(4)}, state.TrainProgress(step=2))
    monkeypatch.undo()
    arrays, at = state.load(path, {"a": jnp.zeros(3, jnp.int32)}, {})
    assert at.step == 1 and arrays["a"].tolist() == [0, 1, 2]


def test_options_out_of_range_are_named():
    with pytest.raises(ValueError, match="steps must be positive, got 0"):
        options(steps=0)
    with pytest.raises(ValueError, match="minutes must be positive, got nan"):
        options(minutes=math.nan)
    with pytest.raises(ValueError, match="minutes must be positive, got inf"):
        options(minutes=math.inf)
    with pytest.raises(ValueError, match="context must be between 16 and 32768, got 1000000000"):
        options(context=10**9)
    with pytest.raises(ValueError, match=r"batch must be an integer, got 2\.5"):
        options(batch=2.5)
    with pytest.raises(ValueError, match=r"seed must be in \[0, 2\*\*32\), got -1"):
        options(seed=-1)
    with pytest.raises(ValueError, match="minutes must be positive, got -1"):
        options(minutes=-1)


def test_matrices_go_to_muon_and_the_rest_to_adam(small_config):
    """Muon's update of a matrix has singular values near 1; Adam's has entries near its share."""
    params = random_params(small_config, 0)
    rng = np.random.default_rng(0)
    gradients = jax.tree.map(lambda p: jnp.asarray(rng.standard_normal(p.shape), p.dtype), params)
    optimizer = loop.muon_and_adam()
    updates, _ = jax.jit(optimizer.update)(gradients, optimizer.init(params), params)
    mamba = updates["layers"][0]["mixers"][0]
    # out_proj [32, 16]; rows > columns, so no widening factor
    assert np.allclose(np.linalg.svd(mamba["out_proj"], compute_uv=False), 1, atol=0.4)
    for leaf in (updates["embed"], mamba["conv"], mamba["A_log"], updates["norm"]):
        size = np.abs(leaf)  # the first step of Adam: all entries alike
        assert np.allclose(size, size.max(), rtol=1e-3)
        assert loop.ADAM_SHARE <= size.max() < 2 * loop.ADAM_SHARE


# --- schedule ---------------------------------------------------------------------------------------


def test_rate_rises_stays_and_falls_to_zero():
    factors = [rate_factor(p) for p in np.linspace(0, 1, 1001)]
    assert 0 < factors[0] < 0.1
    assert max(factors) == rate_factor(0.05) == rate_factor(DECAY_FROM) == 1.0
    assert factors[-1] == 0.0
    assert all(a >= b for a, b in zip(factors[200:], factors[201:], strict=False))


def test_rows_grow_to_the_context():
    lengths = [row_length(p, 2048) for p in (0.0, 0.79, 0.81, 0.91, 0.93, 1.0)]
    assert lengths == [512, 512, 1024, 1024, 2048, 2048]
    assert row_length(0.0, 64) == 64


def test_progress_is_that_of_the_nearer_end():
    assert progress_of(10, 30, steps=100, minutes=1) == 0.5
    assert progress_of(80, 30, steps=100, minutes=1) == 0.8
    assert progress_of(500, 30, steps=100, minutes=None) == 1.0


# --- measuring --------------------------------------------------------------------------------------


def test_bits_per_byte_equals_the_sum_written_out(small_config, monkeypatch):
    params = random_params(small_config, 1)
    texts = (Document("a", b"import this, and that\n" * 3), Document("b", b"pass"))
    total, count = 0.0, 0
    run = jax.jit(forward, static_argnames="config")
    for text in texts:
        tokens = text.tokens().astype(np.int32)
        for start in range(0, len(tokens) - 1, 32):
            piece = tokens[start : start + 33]
            inputs = np.pad(piece[:-1], (0, 33 - len(piece)))[None]
            scores = run(params, inputs, small_config)[0, : len(piece) - 1]
            scores = np.asarray(scores, np.float64)
            logs = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
            cost = -logs[np.arange(len(piece) - 1), piece[1:]] / math.log(2)
            total, count = total + cost.sum(), count + len(cost)
    lines: list[str] = []
    monkeypatch.setattr(evaluate, "SAY_SECONDS", -1)  # a line before each call of the model
    measured = bits_per_byte(params, small_config, texts, 32, rows=3, say=lines.append)
    assert lines == ["measured 0 of 4 rows of 32 tokens", "measured 3 of 4 rows of 32 tokens"]
    assert measured["bytes"] == count == 70
    assert measured["bits_per_byte"] == pytest.approx(total / count, abs=2e-4)
    assert list(measured["by_position"]) == ["0-31"]


def test_positions_are_counted_within_their_row(small_config):
    texts = (Document("a", bytes(range(200))),)
    measured = bits_per_byte(random_params(small_config, 1), small_config, texts, 128)
    assert list(measured["by_position"]) == ["0-63", "64-127"]
    whole = measured["bits_per_byte"]
    first, second = measured["by_position"].values()
    assert whole == pytest.approx((first * 128 + second * 72) / 200, abs=1e-3)


def test_an_output_that_cannot_be_written_is_named_before_any_source_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "read_corpus", lambda sources: pytest.fail("read the sources"))
    (tmp_path / "file").write_text("")
    for folder, reason in (
        (tmp_path / "file", "File exists"),
        (tmp_path / "file" / "x", "Not a dir"),
    ):
        with pytest.raises(ValueError, match=f"check_writable: cannot write to {folder}: {reason}"):
            train(folder, options(), resume=True, sources=None, progress=False)
