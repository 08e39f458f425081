"""What callers of an `LLM` start from: LLMs over the fake engine, a tiny model, the bundled one, and their batches.

A plugin of pytest: every test may ask for its fixtures.
"""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import tokenizers
from tokenizers import decoders, models

from hybrid_jax import LLM, run_batch
from hybrid_jax.api import llm as llm_module
from hybrid_jax.api import progress_bar, starting
from hybrid_jax.cli import main as cli
from hybrid_jax.text.tokenizer import Tokenizer
from tests.api.fake_engine import CONFIG, FakeEngine
from tests.batch.batch_files import line, read, write
from tests.tiny_models import redrawn, tiny_model

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ mood }}"
# Settings of the bundled model for which few programs are compiled.
BUNDLED = {"max_rows": 4, "max_model_len": 512, "prefill_tokens": 32}
# How prompts for the bundled model begin.
HEAD = "import os\nimport sys\n\n\nclass Reader:\n    def __init__(self, path):\n        self.path = path\n\n"

# Tests look into the engine of an LLM. The package itself asks it by name (`api/threads/questions.py`).
LLM._engine = property(lambda self: engines_of(self)[0])
LLM._params = property(lambda self: self._digest.args[1])  # of `weights_digest`


def engines_of(llm):
    """The engine of each replica."""
    threads = (
        llm._thread._dispatcher.threads if hasattr(llm._thread, "_dispatcher") else [llm._thread]
    )
    return [engine_of(thread) for thread in threads]


def engine_of(thread):
    """The engine of a replica, which may be a worker in a thread of this process."""
    loop = thread._loop
    return loop.engine if hasattr(loop, "engine") else engine_of(loop._link.worker._thread)


def byte_tokenizer():
    """Token id = byte value."""
    names = {f"<0x{byte:02X}>": byte for byte in range(256)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=names, merges=[], byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return Tokenizer(backend, chat_templates={"default": TEMPLATE})


def tiny_llm(*, weights=0, **options):
    """An LLM of a tiny model over bytes, with few shapes to compile. `weights` is the seed of its weights."""
    config = replace(tiny_model("bamba")[0], vocab_size=256, max_position=1024)
    options = {"max_rows": 4, "prefill_tokens": 32, "tokenizer": byte_tokenizer()} | options
    return LLM.from_params(config, redrawn(config, seed=weights), quiet=True, **options)


def opened(config):
    """What is opened of a model without weights."""
    return SimpleNamespace(config=config, load=lambda **_: (config, None))


@pytest.fixture(scope="session")
def bundled():
    """The bundled model, for all tests that need no settings of their own: its programs are compiled once."""
    with LLM(**BUNDLED) as llm:
        yield llm


@pytest.fixture
def tokenizer():
    return byte_tokenizer()


@pytest.fixture
def make_llm(monkeypatch, tokenizer):
    """LLM.from_params over the fake engine; the engine is at `llm._engine`."""
    monkeypatch.setattr(starting, "Engine", FakeEngine)

    def make(**options):
        return llm_module.LLM.from_params(CONFIG, None, **{"tokenizer": tokenizer} | options)

    return make


@pytest.fixture(autouse=True)
def no_plain_lines(monkeypatch):
    """Nothing that a test reads from stderr depends on how long the machine takes."""
    monkeypatch.setattr(progress_bar._lines, "look", lambda: None)


@pytest.fixture
def llm(make_llm):
    return make_llm()


@pytest.fixture
def fake_model(monkeypatch, tmp_path, tokenizer):
    """A directory that LLM loads without weights; returns its path."""
    monkeypatch.setattr(starting, "Engine", FakeEngine)
    monkeypatch.setattr(starting, "open_with_drafter", lambda *_: opened(CONFIG))
    tokenizer.backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return tmp_path


@pytest.fixture
def run_command(capsys):
    """Runs a command; returns (exit code, stdout, stderr)."""

    def run(*arguments):
        with pytest.raises(SystemExit) as exit:
            cli.main([str(a) for a in arguments])
        captured = capsys.readouterr()
        return exit.value.code, captured.out, captured.err

    return run


@pytest.fixture
def files(tmp_path):
    """Paths of an input with one line, and of an output."""
    folder = tmp_path / "batch"
    folder.mkdir()
    return write(folder / "in.jsonl", [line()]), folder / "out.jsonl"


@pytest.fixture
def ask(llm, files):
    """The output lines of request objects, or of lines as they stand."""
    source, output = files

    def ask(*lines, llm=llm):
        text = [entry if isinstance(entry, str) else json.dumps(entry) for entry in lines]
        source.write_text("\n".join(text), encoding="utf-8")
        output.unlink(missing_ok=True)
        run_batch(source, output, llm)
        return read(output)

    return ask


@pytest.fixture
def body_of(ask):
    """The body of the answer to one line; fails on an error line."""

    def body_of(*arguments, llm=None, **body):
        [answer] = ask(line(*arguments, **body), **{"llm": llm} if llm else {})
        assert (answer["error"], answer["response"]["status_code"]) == (None, 200)
        return answer["response"]["body"]

    return body_of


@pytest.fixture
def error_of(ask):
    """The error of one line."""

    def error_of(entry):
        [answer] = ask(entry)
        error = answer["response"]["body"]["error"]
        assert answer["response"]["status_code"] == 400
        assert answer["error"] == {"code": error["code"], "message": error["message"]}
        assert error["type"] == "invalid_request_error"
        assert error["message"].startswith("line 1: ")
        return error

    return error_of
