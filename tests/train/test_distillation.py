"""Distillation: what its distances are, that they fall, that it goes on where it stopped, and what is written."""

from __future__ import annotations

import json
import shutil
import signal
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import load_file, save_file

from hybrid_jax import LLM, SamplingParams
from hybrid_jax.config import with_cut
from hybrid_jax.models import config_from_hf, decoder
from hybrid_jax.models.cut import cut_params
from hybrid_jax.models.initialize import random_params
from hybrid_jax.text.tokenizer import Tokenizer
from hybrid_jax.train import cut_table, distill, distillation
from hybrid_jax.train.cuts import sim_scores, similarities
from hybrid_jax.train.data import TEXT, read_corpus, segments, tokenized
from hybrid_jax.train.distances import TEMPERATURE, distances, measure
from hybrid_jax.train.distillation import Goal, adam, train_step
from hybrid_jax.train.export import write_model
from hybrid_jax.weights import load_model
from hybrid_jax.weights.cut import WEIGHTS_FILE, own_tensors
from tests.drawing import left_to_all

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
@left_to_all("goal1", "goal2")
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


@left_to_all
def test_measurements_are_means_over_tokens(fields, sources):
    """Rows of different lengths, in calls of different sizes, and a last call with too few rows."""
    base = config_of(fields)
    config = with_cut(base, 1)
    teacher = random_params(base, 0)
    params = cut_params(teacher, config)
    tensors = own_tensors(params, config)
    tokens, lengths = segments(read_corpus([sources]).held_out, 64, 5)
    lengths[1] = 7
    found = measure(tensors, params, teacher, config, base, (tokens, lengths))
    sums = {"kl": 0.0, "nats": 0.0}
    for row, length in zip(tokens, lengths, strict=True):
        row, counts = row[None, : length + 1], np.ones((1, length), bool)
        one = distances(tensors, params, teacher, row, counts, config, base)
        for name in sums:
            sums[name] += float(getattr(one, name)) * length
    for name, total in sums.items():
        assert found[name] == pytest.approx(total / lengths.sum(), rel=1e-4, abs=2e-6)
    wanted = np.exp(found["nats"] - found["teacher_nats"])
    assert found["perplexity_ratio"] == pytest.approx(wanted, rel=1e-5)
    assert 0 < found["nats_error"] < 1


def test_all_later_weights_may_be_trained_and_are_kept(model, fields, sources, tmp_path):
    settings = FEW | {"sources": sources, "cut": 3, "steps": 10, "loss": "lm"}
    record = distill(tmp_path / "all", model, all_later=True, **settings)
    config, params = load_model(tmp_path / "all", dtype="float32")
    _, before = load_model(model, dtype="float32")
    later, was = params["layers"][3], before["layers"][3]
    assert np.abs(later["mlp"]["down"] - was["mlp"]["down"]).max() > 1e-4
    assert np.abs(later["norm"] - was["norm"]).max() > 1e-4
    jax.tree.map(np.testing.assert_array_equal, params["layers"][:3], before["layers"][:3])
    assert record["parameters"] > sum(leaf.size for leaf in own_tensors(params, config).values())
    rows = segments(read_corpus([sources]).held_out, 64, 64, full=True)
    found = measure({}, params, before, config, replace(config_of(fields)), rows)
    assert found["kl"] == pytest.approx(record["held_out"]["trained"]["kl"], rel=1e-3)


def test_a_stored_tensor_that_no_later_layer_has_is_named(model, sources, tmp_path):
    distill(tmp_path, model, **FEW, sources=sources, cut=2, steps=1, all_later=True)
    file = tmp_path / WEIGHTS_FILE
    tensors = load_file(file)
    save_file(tensors | {"layers.1.norm": tensors["layers.3.norm"]}, file)
    with pytest.raises(ValueError, match=r"that the model does not use, layers\.1\.norm"):
        load_model(tmp_path)


def test_a_head_on_the_cut_is_trained_and_drafts(model, sources, tmp_path):
    settings = FEW | {"sources": sources, "cut": 2, "steps": 20}
    record = distill(tmp_path / "exit", model, exit_head=True, **settings)
    before, after = (record["held_out"][name] for name in ("untrained", "trained"))
    assert after["exit_kl"] < before["exit_kl"] and 0 < after["exit_agreement"] <= 1
    plain = distill(tmp_path / "plain", model, **settings)
    assert plain["held_out"]["trained"]["kl"] == pytest.approx(after["kl"], abs=1e-5)
    config, params = load_model(tmp_path / "exit")
    assert not config.exit_head and "exit" not in params
    config, params = load_model(tmp_path / "exit", exit_head=True)
    assert config.exit_head and params["exit"]["head"].shape == (config.width, config.vocab_size)
    asked = SamplingParams(temperature=0.0, max_tokens=24)
    outputs = [
        LLM(tmp_path / "exit", speculation=how, quiet=True, max_rows=1).generate("def f(", asked)[0]
        for how in ("off", "exit")
    ]
    assert outputs[0].outputs[0].token_ids == outputs[1].outputs[0].token_ids
    assert outputs[1].metrics.num_verifications is not None
    for folder, message in (
        (tmp_path / "plain", "plain has no head on its cut that drafts; .*--exit-head` trains one"),
        (model, "was not made by `hybrid-jax distill`, so it has no head on a cut"),
    ):
        with pytest.raises(ValueError, match=message):
            LLM(folder, speculation="exit", quiet=True)


@left_to_all
def test_texts_are_read_with_the_tokenizer_of_the_model(model, sources, tmp_path):
    """A tokenizer for which four spaces are one token; files of other names than Python's."""
    folder, texts = tmp_path / "model", tmp_path / "texts"
    shutil.copytree(model, folder)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.add_tokens([tokenizers.AddedToken("    ", normalized=False)])
    four = backend.token_to_id("    ")
    values = json.loads((folder / "config.json").read_text()) | {"vocab_size": four + 1}
    params = random_params(config_of(values), 0)
    write_model(folder, params, values)
    backend.save(str(folder / "tokenizer.json"))
    texts.mkdir()
    for path in sources.iterdir():
        (texts / path.with_suffix(".md").name).write_text("é" + path.read_text() * 4)
    settings = FEW | {"sources": texts, "cut": 1, "steps": 2}
    record = distill(tmp_path / "cut", folder, **settings)
    assert record["corpus"]["held_out_files"] > 0
    corpus = tokenized(read_corpus([texts], TEXT), Tokenizer.from_directory(folder))
    for document in corpus.train:
        text = document.content.decode()
        assert list(document.ids) == [256, *backend.encode(text).ids]
        assert document.num_tokens == len(text.encode()) + 1 - 3 * text.count("    ")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="has no tokenizer.json"):
        distill(tmp_path / "other", folder, **settings)


def test_the_table_has_what_each_cut_costs_and_saves(model, fields, sources):
    base = config_of(fields)
    found = cut_table(model, sources=sources, rows=3, context=64)
    assert [each["cut"] for each in found["cuts"]] == [1, 2, 3]
    saved = [each["flops_saved"] for each in found["cuts"]]
    assert saved == sorted(saved, reverse=True) and saved[-1] > 0
    _, params = load_model(model, dtype="float32")
    config = with_cut(base, 2)
    weights = cut_params(params, config)
    rows = segments(read_corpus([sources]).held_out, 64, 3, full=True)
    far = measure({}, weights, params, config, base, rows)
    assert {name: found["cuts"][1][name] for name in far} == pytest.approx(far, rel=1e-4, abs=2e-6)
    assert found["cuts"][2]["kl"] < 1e-5 and found["cuts"][2]["sim_score"] is None
    assert found["tokens"] == 3 * 64 and found["layers"] == 4 and not found["refused"]


@pytest.mark.parametrize(
    "cuts, message",
    [
        ([4], "cut must be below the number of layers, 4, got 4"),
        ([], "cuts must have a number"),
        (4, "cuts must be a list of numbers or None, got 4"),
        (["4"], "cuts must be a whole number, got '4'"),
    ],
)
def test_a_table_of_no_cuts_is_refused(model, sources, cuts, message):
    with pytest.raises(ValueError, match=message):
        cut_table(model, cuts=cuts, sources=sources, rows=3, context=64)


def test_sim_score_is_the_mean_similarity_to_the_inputs_of_later_layers(fields):
    """Equation 1 of arXiv 2410.03960, by residual streams that are made layer by layer."""
    base = config_of(fields)
    params = random_params(base, 0)
    tokens = jax.random.randint(jax.random.key(0), (2, 12), 0, 256)
    counts = np.arange(12) < np.array([12, 5])[:, None]
    valid, mix = decoder.whole_sequences(tokens, jnp.array([12, 12]))
    inputs = []
    for end in range(len(base.layers)):
        stream = decoder.enter(params, tokens, valid, base)
        stream = decoder.through(params, stream, valid, range(end), base, mix)
        update = 0 if stream.update is None else np.asarray(stream.update, np.float64)
        inputs.append((np.asarray(stream.h, np.float64) + update)[counts])
    alike = similarities(params, tokens, counts, base)

    def similarity(one, other):
        dots = (one * other).sum(-1)
        return (dots / np.linalg.norm(one, axis=-1) / np.linalg.norm(other, axis=-1)).mean()

    for first, score in enumerate(sim_scores(np.asarray(alike))):
        later = [similarity(inputs[first], other) for other in inputs[first + 1 :]]
        assert score == (pytest.approx(np.mean(later), abs=1e-5) if later else None)


def test_cuts_that_cannot_be_are_named(model, fields, sources):
    found = cut_table(model, sources=sources, rows=1, context=64, kv_group=2)
    assert [each["cut"] for each in found["cuts"]] == [1]
    assert "kv_group must divide" in found["refused"]["2"]
    with pytest.raises(ValueError, match="kv_group must divide .*, 1, got 2"):
        cut_table(model, sources=sources, cuts=[1, 2], kv_group=2)
    with pytest.raises(ValueError, match="below the number of layers, 4, got 5"):
        cut_table(model, sources=sources, cuts=[5])
    with pytest.raises(ValueError, match="rows must be a whole number of at least 1, got 0"):
        cut_table(model, sources=sources, rows=0)


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


@pytest.mark.parametrize("wrong", [{"cut": "2"}, {"cut": True}, {"cut": 2.0}, {"kv_group": "1"}])
def test_numbers_that_are_none_are_named(model, sources, tmp_path, wrong):
    name, value = next(iter(wrong.items()))
    with pytest.raises(ValueError, match=f"distill: {name} must be a whole number, got {value!r}"):
        distill(tmp_path, model, **FEW | {"cut": 2, "sources": sources} | wrong)


def test_ctrl_c_saves_the_step_and_the_same_call_goes_on(model, sources, tmp_path, capsys):
    """SIGINT in the middle of a step: its result is not lost, and in the end all is as without."""
    settings = FEW | {"sources": sources, "cut": 2, "steps": 6}
    plain = distill(tmp_path / "plain", model, **settings)
    steps, step = [], distillation.train_step

    def interrupted(*given):
        made = step(*given)
        steps.append(1)
        if len(steps) == 3:
            signal.raise_signal(signal.SIGINT)
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distillation, "train_step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            distill(tmp_path / "stopped", model, **settings | {"progress": True})
    assert "stopped after step 3, which is saved" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(ValueError, match="a training there has not ended, and its command goes on"):
        load_model(tmp_path / "stopped")
    again = distill(tmp_path / "stopped", model, **settings)
    assert again["held_out"] == plain["held_out"] and len(again["runs"]) == 2


def test_a_record_has_the_call_that_made_it(model, sources, tmp_path):
    record = distill(tmp_path, model, **FEW | {"sources": sources, "cut": 2, "steps": 1})
    assert "cut=2, kv_group=1, state_group=1" in record["command"]
    assert "loss='kl'" in record["command"]
