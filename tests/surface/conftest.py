"""A byte-level model directory without weights, an LLM over the fake engine, and the files of a batch."""

from __future__ import annotations

import json

import pytest
import tokenizers
from tokenizers import decoders, models

from hybrid_jax import llm as llm_module
from hybrid_jax.tokenizer import Tokenizer
from tests.surface.batch_files import line, write
from tests.surface.fake_engine import CONFIG, FakeEngine

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ mood }}"


def byte_tokenizer():
    """Token id = byte value."""
    names = {f"<0x{byte:02X}>": byte for byte in range(256)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=names, merges=[], byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return Tokenizer(backend, chat_templates={"default": TEMPLATE})


@pytest.fixture
def tokenizer():
    return byte_tokenizer()


@pytest.fixture
def make_llm(monkeypatch, tokenizer):
    """LLM.from_params over the fake engine; the engine is at `llm._engine`."""
    monkeypatch.setattr(llm_module, "Engine", FakeEngine)

    def make(**options):
        return llm_module.LLM.from_params(CONFIG, None, **{"tokenizer": tokenizer} | options)

    return make


@pytest.fixture
def llm(make_llm):
    return make_llm()


@pytest.fixture
def fake_model(monkeypatch, tmp_path, tokenizer):
    """A directory that LLM loads without weights; returns its path."""
    monkeypatch.setattr(llm_module, "Engine", FakeEngine)
    monkeypatch.setattr(llm_module, "load_config", lambda path: CONFIG)
    monkeypatch.setattr(llm_module, "load_model", lambda path, dtype, progress: (CONFIG, None))
    tokenizer.backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return tmp_path


@pytest.fixture
def files(tmp_path):
    """Paths of an input with one line, and of an output."""
    folder = tmp_path / "batch"
    folder.mkdir()
    return write(folder / "in.jsonl", [line()]), folder / "out.jsonl"
