"""`LLM(cache_dir=...)`: a new object finds what another one left, and what is said of it; `cache.save` and `load`."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from hybrid_jax import LLM, CacheConfig, SamplingParams
from hybrid_jax.api.stats import MEANINGS
from hybrid_jax.config import EngineConfig
from hybrid_jax.engine.programs.compiling import Compiling
from hybrid_jax.tiers import part_file
from hybrid_jax.tiers.folder import Folder, files_of
from tests.imports import ROOT
from tests.llms import tiny_llm
from tests.tiers.read_only import refuse_writing
from tests.tiny_models import redrawn

GREEDY = SamplingParams(max_tokens=6, temperature=0.0)
SMALL = {"max_rows": 2, "max_model_len": 512, "cache": CacheConfig(loads="always")}
PROMPTS = [[(7 * n + k * k) % 250 for k in range(300)] for n in range(4)]
HIT = 288


def answers(llm, prompts=PROMPTS):
    """Tokens, and how many of the prompt were cached, one prompt after the other."""
    outputs = [llm.generate([{"prompt_token_ids": ids}], GREEDY)[0] for ids in prompts]
    return [out.outputs[0].token_ids for out in outputs], [out.num_cached_tokens for out in outputs]


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A folder that one object has filled, and its answers."""
    folder = tmp_path_factory.mktemp("filled")
    with tiny_llm(cache_dir=folder, **SMALL) as llm:
        found, cached = answers(llm)
        assert cached == [0] * 4
    assert len(list(files_of(folder))) == 4 * 3
    return folder, found


@pytest.fixture
def folder(filled, tmp_path):
    """A copy of it."""
    source, _ = filled
    for file in source.rglob("*"):
        if file.is_file():
            target = tmp_path / file.relative_to(source)
            target.parent.mkdir(exist_ok=True)
            target.write_bytes(file.read_bytes())
    return tmp_path


@pytest.mark.parametrize(
    "settings",
    [{}, {"page_tokens": 16, "max_rows": 3}, {"memory": "300KB", "max_rows": 1}, {"grain": 16}],
    ids=["the same", "pages and rows", "a small arena", "grain"],
)
def test_a_new_object_hits_with_its_first_prompt(filled, folder, settings):
    with tiny_llm(cache_dir=folder, **SMALL | settings) as llm:
        found, cached = answers(llm)
        stats, described = llm.stats(), llm.describe()
        assert stats["disk_loads"] == 4 and stats["disk_loaded_tokens"] == 4 * HIT
        explained = llm.cache.explain(llm.generate([{"prompt_token_ids": PROMPTS[0]}], GREEDY)[0])
    assert (found, cached) == (filled[1], [HIT] * 4)
    group = "Tier on disk"
    assert group in str(stats)
    assert sorted(n for n in stats if n.startswith("disk_")) == sorted(MEANINGS[group])
    assert f"in {folder}; " in described and "\ndisk " in described
    if "memory" in settings:
        assert f"{HIT} of the skipped ones came from the disk" in explained.reason


def test_narrow_checkpoints_come_back_as_they_were(filled, tmp_path):
    """From disk a prompt goes on as from memory: what it goes on from was rounded once."""
    options = SMALL | {
        "cache": CacheConfig(checkpoints="int8", loads="always"),
        "cache_dir": tmp_path,
    }
    with tiny_llm(**options) as llm:
        assert answers(llm) == (filled[1], [0] * 4)
        from_memory = answers(llm)
        file = tmp_path.parent / "prefix.safetensors"
        assert llm.cache.save(PROMPTS[0], file) == HIT
    with tiny_llm(page_tokens=16, **options) as llm:
        assert answers(llm) == from_memory == (from_memory[0], [HIT] * 4)
        assert llm.stats()["disk_loads"] == 4 == llm.stats()["widened_checkpoints"]
        assert llm.cache.load(file) == HIT
    with tiny_llm(**options | {"cache": "adaptive"}) as llm:  # other checkpoints are no use to it
        assert answers(llm) == (filled[1], [0] * 4)


def test_a_narrow_checkpoint_is_saved_as_soon_as_its_prompt_has_ended(tmp_path):
    file, options = (
        tmp_path / "prefix.safetensors",
        SMALL | {"cache": CacheConfig(checkpoints="int8")},
    )
    longer = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    with tiny_llm(**options) as llm:
        [output] = llm.generate([{"prompt_token_ids": PROMPTS[0]}], longer)
        prompt = [*PROMPTS[0], *output.outputs[0].token_ids]
        assert llm.cache.save(prompt, file) == 320
        saved, from_memory = file.read_bytes(), answers(llm, [prompt])
        assert llm.cache.save(prompt, file) == 320 and file.read_bytes() == saved
    with tiny_llm(**options) as llm:
        assert llm.cache.load(file) == 320
        assert answers(llm, [prompt]) == from_memory


def test_prompts_wait_for_what_is_read_and_others_go_on(filled, folder, monkeypatch):
    """A read that takes long holds up one prompt alone."""
    gate, read, names = threading.Event(), Folder.read, []

    def slow(self, name, marks):
        names.append(name)
        assert gate.wait(60)
        return read(self, name, marks)

    monkeypatch.setattr(Folder, "read", slow)
    new = [3] * 40
    with tiny_llm(cache_dir=folder, **SMALL) as llm:
        answers(llm, [[5] * 40])  # its programs are compiled
        thread = ThreadPoolExecutor(1)
        waits = thread.submit(answers, llm, PROMPTS[:1])
        while not names:
            time.sleep(0.01)
        goes_on = llm.generate([{"prompt_token_ids": new}], GREEDY)[0]
        assert goes_on.num_cached_tokens == 0 and not waits.done()
        gate.set()
        assert waits.result(60) == (filled[1][:1], [HIT])
        thread.shutdown()


def test_an_aborted_prompt_whose_prefix_is_being_read(filled, folder, monkeypatch):
    gate, read = threading.Event(), Folder.read
    monkeypatch.setattr(Folder, "read", lambda *args: gate.wait(60) and read(*args))
    with tiny_llm(cache_dir=folder, **SMALL) as llm:
        stream = llm.stream({"prompt_token_ids": PROMPTS[0]}, GREEDY)
        stream.close()
        gate.set()
        assert answers(llm, PROMPTS[1:2])[0] == filled[1][1:2]
        llm._engine.scheduler.check_invariants()


def test_a_damaged_file_is_a_miss(filled, folder, caplog):
    for file in files_of(folder):
        if file.path.name.startswith("checkpoint"):
            data = bytearray(file.path.read_bytes())
            data[len(data) // 2] ^= 1
            file.path.write_bytes(data)
    with tiny_llm(cache_dir=folder, **SMALL) as llm:
        assert answers(llm) == (filled[1], [0] * 4)
        assert llm.stats()["disk_loads_failed"] == 4
    assert "is damaged: its checksum" in caplog.text
    with tiny_llm(cache_dir=folder, **SMALL) as llm:  # what was computed anew was written anew
        assert answers(llm) == (filled[1], [HIT] * 4)


@pytest.mark.parametrize("what", ["one value", "dtype", "fp8", "exact"])
def test_another_model_finds_nothing(folder, what):
    options = {"fp8": {"kv_cache_dtype": "fp8"}, "exact": {"exact": True}}.get(what, {})
    with tiny_llm(**SMALL) as llm:
        config, params = llm.model_config, llm._params
    if what == "one value":
        params = params | {"norm": params["norm"].at[-1].add(1e-3)}
    elif what == "dtype":
        options = {"dtype": "bfloat16"}
        params = redrawn(config, seed=0, dtype="bfloat16")
    with LLM.from_params(config, params, quiet=True, cache_dir=folder, **SMALL | options) as other:
        assert answers(other)[1] == [0] * 4
        assert other.stats()["disk_loads"] == 0


def test_a_full_disk_ends_writing_and_nothing_else(tmp_path, monkeypatch, caplog):
    def full(*args):
        raise OSError(28, "No space left on device")

    with tiny_llm(cache_dir=tmp_path, **SMALL) as llm:
        monkeypatch.setattr(part_file.os, "replace", full)
        first = answers(llm)[0]
        assert answers(llm) == (first, [HIT] * 4)
        assert llm.stats()["disk_saves"] == 0
    assert caplog.text.count("nothing more is kept in") == 1


def test_a_folder_that_cannot_be_written_is_read(filled, folder, monkeypatch, caplog):
    before = {file.path: file.path.read_bytes() for file in files_of(folder)}
    refuse_writing(monkeypatch)
    with tiny_llm(cache_dir=folder, **SMALL) as llm:
        assert answers(llm) == (filled[1], [HIT] * 4)
        answers(llm, [[9] + PROMPTS[0]])
        stats, described = llm.stats(), llm.describe()
    assert (stats["disk_loads"], stats["disk_saves"], stats["disk_loads_failed"]) == (4, 0, 0)
    assert f"only read, in {folder}; " in described
    assert caplog.text.count("nothing is kept in it") == 1 == len(caplog.records)
    assert before == {file.path: file.path.read_bytes() for file in files_of(folder)}


def test_the_folder_is_kept_below_its_limit(tmp_path):
    with tiny_llm(cache_dir=tmp_path, disk_memory="600KB", **SMALL) as llm:
        for turn in range(4):
            answers(llm, [[turn] + ids for ids in PROMPTS])
        llm.stats()  # nothing is left to be handed over
        llm._engine.disk.flush()
        stats, total = llm.stats(), sum(file.num_bytes for file in files_of(tmp_path))
        assert total == stats["disk_bytes"] <= 600_000 < stats["disk_saved_bytes"]


def test_what_a_process_wrote_is_there_for_the_next(tmp_path):
    """Also if it never closed its object."""
    program = (
        "import json, sys\n"
        "from tests.api.test_cache_dir import PROMPTS, SMALL, answers\n"
        "from tests.llms import tiny_llm\n"
        "llm = tiny_llm(cache_dir=sys.argv[1], **SMALL)\n"
        "print(json.dumps(answers(llm)))\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    runs = []
    for _ in range(2):
        command = [sys.executable, "-c", program, str(tmp_path)]
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        runs.append(json.loads(done.stdout))
    (first, cold), (second, cached) = runs
    assert first == second and cold == [0] * 4 and cached == [HIT] * 4


class TestRefusals:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"disk_memory": "1GB"}, "LLM: disk_memory must be left out without cache_dir"),
            ({"cache_dir": ""}, "LLM: cache_dir must be the path of a folder, got ''"),
            (
                {"cache_dir": "x", "cache": "off"},
                "LLM: cache_dir must be left out with cache='off'",
            ),
            ({"cache_dir": "x", "disk_memory": 0}, "disk_memory"),
            ({"cache_dir": "x", "disk_memory": "many"}, "disk_memory"),
        ],
    )
    def test_settings(self, options, message):
        with pytest.raises(ValueError, match=message):
            tiny_llm(**options)

    def test_a_file_in_its_place(self, tmp_path):
        (tmp_path / "file").write_text("x")
        with pytest.raises(ValueError, match="^LLM: cache_dir .*file is a file; give a folder"):
            tiny_llm(cache_dir=tmp_path / "file", **SMALL)

    def test_too_little_for_a_checkpoint(self, tmp_path):
        with pytest.raises(ValueError, match="must have room for a checkpoint .* at least, got"):
            tiny_llm(cache_dir=tmp_path / "new", disk_memory="1KB", **SMALL)
        assert not (tmp_path / "new").exists()

    def test_a_config_takes_it_as_well(self):
        assert EngineConfig(cache_dir="x").disk_memory is None
        with pytest.raises(TypeError, match=r"LLM\(cache_dir=...\) takes it"):
            CacheConfig(cache_dir="x")  # type: ignore[call-arg]


class TestOnePrefix:
    def test_another_engine_resumes_there(self, filled, tmp_path):
        file = tmp_path / "prefix.safetensors"
        with tiny_llm(**SMALL) as llm:
            answers(llm)
            assert llm.cache.save({"prompt_token_ids": PROMPTS[2]}, file) == HIT
            assert llm.cache.save(PROMPTS[2][:300] + [9, 9], file) == HIT
        with tiny_llm(page_tokens=16, **SMALL) as llm:
            assert llm.cache.load(file) == HIT
            assert llm.cache.load(file) == HIT
            assert answers(llm) == (filled[1], [0, 0, HIT, 0])
            llm._engine.scheduler.check_invariants()

    def test_while_others_run(self, filled, tmp_path):
        file = tmp_path / "prefix.safetensors"
        with tiny_llm(**SMALL) as llm:
            answers(llm, PROMPTS[:1])
            stream = llm.stream({"prompt_token_ids": PROMPTS[1]}, SamplingParams(max_tokens=60))
            next(stream)
            assert llm.cache.save(PROMPTS[0], file) == HIT
            assert llm.cache.load(file) == HIT
            stream.close()
            assert answers(llm)[0] == filled[1]

    def test_a_small_arena_makes_room(self, filled, tmp_path):
        file = tmp_path / "prefix.safetensors"
        with tiny_llm(memory="300KB", max_rows=1, max_model_len=512) as llm:
            answers(llm, PROMPTS[:1])
            llm.cache.save(PROMPTS[0], file)
            answers(llm, PROMPTS[1:])
            assert llm.cache.load(file) == HIT
            assert answers(llm, PROMPTS[:1]) == (filled[1][:1], [HIT])

    def test_what_is_refused(self, tmp_path, filled):
        file = tmp_path / "prefix.safetensors"
        with tiny_llm(**SMALL) as llm:
            with pytest.raises(ValueError, match="cache.save: no resume point of this prompt"):
                llm.cache.save(PROMPTS[0], file)
            assert not file.exists()
            with pytest.raises(
                FileNotFoundError, match="cache.load: .*; cache.save writes one: '"
            ) as said:
                llm.cache.load(file)
            assert said.value.filename == str(file)
            answers(llm, PROMPTS[:1])
            nowhere = tmp_path / "none" / "prefix"
            with pytest.raises(
                FileNotFoundError, match="cache.save: .*; make its folder first"
            ) as said:
                llm.cache.save(PROMPTS[0], nowhere)
            assert said.value.filename == str(nowhere)
            for call in (llm.cache.load, functools.partial(llm.cache.save, PROMPTS[0])):
                with pytest.raises(IsADirectoryError, match="cache..*; give the name of a file"):
                    call(tmp_path)
            assert list(tmp_path.iterdir()) == []
            llm.cache.save(PROMPTS[0], file)
            part = next(f.path for f in files_of(filled[0]))
            with pytest.raises(ValueError, match="cache.load: .* is no prefix that cache.save"):
                llm.cache.load(part)
            data = bytearray(file.read_bytes())
            data[-1] ^= 1
            (tmp_path / "damaged").write_bytes(data)
            with pytest.raises(ValueError, match="cache.load: .* is damaged"):
                llm.cache.load(tmp_path / "damaged")
            assert answers(llm, PROMPTS[:2])[0] == filled[1][:2]
        with tiny_llm(kv_cache_dtype="fp8", **SMALL) as llm:
            with pytest.raises(ValueError, match="was saved with another dtype, kv_cache_dtype"):
                llm.cache.load(file)
        with tiny_llm(**SMALL | {"cache": CacheConfig(checkpoints="int8")}) as llm:
            both = "saved with CacheConfig.checkpoints='float32'., and this engine has CacheConfig.*int8"
            with pytest.raises(ValueError, match=both):
                llm.cache.load(file)
        with tiny_llm(weights=1, **SMALL) as llm:
            with pytest.raises(ValueError, match="is of other weights, or one of"):
                llm.cache.load(file)
        with tiny_llm(**SMALL | {"cache": "off"}) as llm:
            with pytest.raises(ValueError, match="the cache is off"):
                llm.cache.load(file)


def test_a_single_short_request_is_kept_though_its_copies_are_not_compiled_yet(
    tmp_path, monkeypatch
):
    """`close` comes while the engine is about to compile what copies to the disk."""
    closing, compile_ = threading.Event(), Compiling.next_program

    def slowly(self, program, *rest):
        if "save_frames" in str(program._name):
            closing.wait(10)
        return compile_(self, program, *rest)

    with tiny_llm(cache_dir=tmp_path, **SMALL) as llm:
        monkeypatch.setattr(Compiling, "next_program", slowly)
        llm.generate([{"prompt_token_ids": PROMPTS[0]}], GREEDY)
        threading.Timer(0.3, closing.set).start()
    assert any(file.path.name.startswith("checkpoint") for file in files_of(tmp_path))


@pytest.mark.parametrize("folder", [5, b"folder", True])
def test_what_is_no_path_is_named(folder):
    with pytest.raises(
        TypeError, match=f"^LLM: cache_dir must be the path of a folder, got {folder!r}$"
    ):
        tiny_llm(cache_dir=folder, **SMALL)
