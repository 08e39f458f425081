"""A model's directory is opened once: config.json, and the headers of its weights."""

from __future__ import annotations

import sys
from collections import Counter

import pytest

from hybrid_jax import LLM, load_model
from hybrid_jax.models import weight_files
from hybrid_jax.models.checkpoint import open_checkpoint
from hybrid_jax.weights import save_orbax
from hybrid_jax.weights.load import open_with_drafter
from tests.weights.checkpoints import GOLDEN, same_bits

NAME = "granite_moe_nope_tied"
PLAIN = GOLDEN[NAME]
SETTINGS = {"max_rows": 1, "max_model_len": 64, "quiet": True}


class Opens:
    """Counts how often files are opened, by path, while it is the latest one."""

    latest: Opens | None = None

    def __init__(self):
        self.counts = Counter()
        if Opens.latest is None:
            sys.addaudithook(Opens.note)
        Opens.latest = self

    @staticmethod
    def note(event, arguments):
        if event == "open":
            Opens.latest.counts[str(arguments[0])] += 1


@pytest.fixture
def headers(monkeypatch):
    """Counts how often headers are read, by file."""
    counts, read = Counter(), weight_files.read_header

    def counted(file):
        counts[file] += 1
        return read(file)

    monkeypatch.setattr(weight_files, "read_header", counted)
    return counts


@pytest.mark.parametrize("drafts", [False, True])
def test_a_load_reads_each_config_and_each_header_once(edit, headers, drafts):
    second = edit(NAME)
    opens = Opens()
    with LLM(PLAIN, speculation=f"draft:{second}" if drafts else "off", **SETTINGS):
        counted = dict(opens.counts)
    for folder in [PLAIN, second] if drafts else [PLAIN]:
        assert counted[str(folder / "config.json")] == 1
        assert headers.pop(folder / "model.safetensors") == 1
    assert not headers


def test_a_stored_model_is_opened_once_too(tmp_path):
    save_orbax(tmp_path / "stored", *load_model(PLAIN))
    opens = Opens()
    with LLM(tmp_path / "stored", **SETTINGS):
        counted = dict(opens.counts)
    assert counted[str(tmp_path / "stored" / "model_config.json")] == 1


def test_what_was_opened_loads_what_a_load_by_path_does():
    opened = open_with_drafter(PLAIN, None)
    config, params = opened.load(dtype="bfloat16")
    again, others = load_model(PLAIN, dtype="bfloat16")
    assert config == again and same_bits(params, others)
    assert opened.config.dtype == open_checkpoint(PLAIN).config.dtype == "float32"


def test_weights_that_are_wrong_show_when_they_are_loaded(edit):
    folder = edit(NAME)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    opened = open_checkpoint(folder)
    assert opened.config.dtype == "float32" and opened.family is not None
    with pytest.raises(ValueError, match=f"{file} is truncated"):
        load_model(folder)
