"""The models in the package: small, documented, loadable, and they write something like Python."""

from __future__ import annotations

import json
import sysconfig
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from hybrid_jax.config import with_cut
from hybrid_jax.models import config_from_hf, files
from hybrid_jax.models.checkpoint import base_of
from hybrid_jax.models.decoder import forward
from hybrid_jax.models.files import BUNDLED, CONFIG_FILE, PACKED, model_folder
from hybrid_jax.text.tokenizer import Tokenizer
from hybrid_jax.train.data import END, Document, is_held_out, segments
from hybrid_jax.train.distances import measure
from hybrid_jax.train.distillation import RECORD_FILE
from hybrid_jax.train.evaluate import bits_per_byte
from hybrid_jax.train.loop import tiny_fields
from hybrid_jax.weights import load_model

FOLDERS = {  # the model's config for `train_tiny`, and its parameters
    BUNDLED: (None, 4_108_332),
    PACKED["tiny_gated_delta"]: (
        str(files.KNOWN_MODELS / "tiny_gated_delta" / CONFIG_FILE),
        4_116_616,
    ),
}
# Modules that is_held_out keeps from every training, in every Python since 3.11.
HELD_OUT = ("sched.py", "copyreg.py", "xml/sax/xmlreader.py", "multiprocessing/connection.py")


@pytest.fixture(scope="module", params=FOLDERS, ids=lambda folder: folder.name)
def folder(request):
    return request.param


@pytest.fixture(scope="module")
def model(folder):
    return load_model(folder, dtype="float32")


@pytest.fixture(scope="module")
def record(folder):
    return json.loads((folder / "training_record.json").read_text())


def test_it_takes_at_most_16_megabytes(folder):
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 16e6


def test_it_is_the_model_that_train_tiny_makes(folder, model):
    config, params = model
    source, count = FOLDERS[folder]
    assert replace(config_from_hf(tiny_fields(config=source)), dtype="float32") == config
    assert config_from_hf(tiny_fields(8192, source)).max_position == 8192
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == count


def test_a_packed_model_is_loaded_by_its_name(tmp_path, monkeypatch):
    """A directory of that name comes first."""
    assert model_folder("tiny_gated_delta") == PACKED["tiny_gated_delta"]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny_gated_delta").mkdir()
    assert model_folder("tiny_gated_delta") == Path("tiny_gated_delta")


def test_the_one_with_a_cut_holds_what_differs_from_the_bundled_one():
    folder = PACKED["tiny_cut"]
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 6e6
    assert base_of(folder) == BUNDLED
    config, params = load_model("tiny_cut", exit_head=True)
    base, plain = load_model(BUNDLED)
    assert config == replace(with_cut(base, 4), exit_head=True)
    for index in range(4):
        jax.tree.map(np.testing.assert_array_equal, params["layers"][index], plain["layers"][index])


def test_the_one_with_a_cut_is_as_near_to_the_bundled_one_as_its_record_says():
    """On modules of this Python that no training has seen."""
    record = json.loads((PACKED["tiny_cut"] / RECORD_FILE).read_text())
    assert set(HELD_OUT) <= set(record["corpus"]["held_out_names"])
    config, params = load_model("tiny_cut", dtype="float32", exit_head=True)
    base, plain = load_model(BUNDLED, dtype="float32")
    library = Path(sysconfig.get_paths()["stdlib"])
    texts = [Document(name, (library / name).read_bytes()[:2048]) for name in HELD_OUT]
    found = measure({}, params, plain, config, base, segments(texts, 512, None))
    before, after = (record["held_out"][name] for name in ("untrained", "trained"))
    for name in ("kl", "exit_kl"):
        assert found[name] < (before[name] + after[name]) / 2
    for name in ("agreement", "exit_agreement"):
        assert found[name] > after[name] - 0.05


def test_the_record_names_the_held_out_files_and_a_good_result(record):
    assert set(HELD_OUT) <= set(record["corpus"]["held_out_names"])
    assert all(is_held_out(name) for name in record["corpus"]["held_out_names"])
    assert record["held_out"]["context_2048"]["bits_per_byte"] <= 1.35
    assert record["bytes_seen"] == record["steps"] * 4096


def test_the_record_shows_that_more_context_costs_fewer_bits(record):
    full = record["held_out"]["context_2048_full_rows"]
    costs = list(full["by_position"].values())
    assert full["bytes"] % 2048 == 0 and len(costs) == 5
    assert costs == sorted(costs, reverse=True)


def test_held_out_modules_of_this_python_cost_what_the_record_says(model, record):
    """The other way round too: a wrong tensor or tokenizer costs bits."""
    config, params = model
    library = Path(sysconfig.get_paths()["stdlib"])
    texts = [Document(name, (library / name).read_bytes()[:2048]) for name in HELD_OUT]
    measured = bits_per_byte(params, config, texts, 512, rows=4)["bits_per_byte"]
    assert measured < record["held_out"]["context_2048"]["bits_per_byte"] + 0.4


@pytest.mark.parametrize(
    ("prompt", "start"),
    [
        (
            "import unittest\n\nclass T(unittest.TestCase):\n\n    def test_put(self",
            "):\n        self.",
        ),
        (
            "def main(argv):\n    parser = argparse.ArgumentParser()\n    parser.add_",
            "argument('",
        ),
    ],
)
def test_it_continues_code_with_code(folder, model, prompt, start):
    config, params = model
    tokenizer = Tokenizer.from_directory(folder)
    prompt_ids = [END, *tokenizer.encode(prompt)]
    tokens = np.zeros((1, 96), np.int32)
    tokens[0, : len(prompt_ids)] = prompt_ids
    run = jax.jit(forward, static_argnames="config")
    for position in range(len(prompt_ids), len(prompt_ids) + len(start)):
        tokens[0, position] = run(params, tokens, config)[0, position - 1].argmax()
    written = tokens[0, len(prompt_ids) : len(prompt_ids) + len(start)].tolist()
    assert tokenizer.decode(written) == start
