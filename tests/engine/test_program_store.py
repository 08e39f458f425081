"""Programs on disk: the same answers without tracing, and nothing else is taken for one."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from hybrid_jax.config import EngineConfig
from hybrid_jax.engine.engine import Engine
from hybrid_jax.engine.programs import store as program_store
from hybrid_jax.engine.programs.compiling import Compiling, Program
from hybrid_jax.engine.programs.store import ProgramStore, open_store
from tests.drawing import left_to_all
from tests.exactness.jobs import generate
from tests.tiny_models import tiny_model

pytestmark = pytest.mark.usefixtures("no_compile_cache")
SETTINGS = EngineConfig(max_rows=2, prefill_tokens=32, steps_per_dispatch=4)


@pytest.fixture
def store(tmp_path) -> ProgramStore:
    return ProgramStore(tmp_path / "programs", jax.devices()[0])


def engine(store: ProgramStore | None, name: str = "bamba", **settings) -> Engine:
    config, params = tiny_model(name)
    return Engine(config, params, replace(SETTINGS, **settings), store)


def test_a_second_process_traces_nothing_and_says_the_same(store, caplog):
    caplog.set_level(logging.INFO, "hybrid_jax.compiling")
    first, second = engine(store), engine(store)
    want = [generate(first, length=40, count=2), generate(first, length=40, count=2)]
    assert first.stats()["num_traces"] > 2 and "loaded" not in caplog.text
    assert [generate(second, length=40, count=2), generate(second, length=40, count=2)] == want
    assert second.stats()["num_traces"] == 0 and second.compile_seconds() > 0
    assert "loaded DecodeBucket(" in caplog.text
    assert want == [generate(engine(None), length=40, count=2)] * 2


def test_loaded_programs_take_their_arguments_memory(store):
    generate(engine(store))
    loaded = engine(store)
    before = loaded.runner.state.arena
    generate(loaded)
    assert before.is_deleted()


@left_to_all
def test_another_engine_or_model_has_programs_of_its_own(store):
    generate(engine(store))
    for change in ({"max_rows": 3}, {"memory": 1 << 20}, {"grain": 16}, {"name": "granite"}):
        other = engine(store, **change)
        generate(other)
        # The smallest programs may be the same: what writes a line of the slot table knows no model.
        assert other.stats()["num_traces"] >= 2, change


def arguments(name: str = "x", size: int = 3, dtype=np.int16) -> tuple:
    return {name: np.zeros(size, dtype)}, np.int32(1)


OTHER_ARGUMENTS = {
    "length": arguments(size=4),
    "name": arguments("y"),
    "dtype": arguments(dtype=np.float32),
    "place": jax.device_put(arguments(), jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])),
}
PACKAGES = ("jax", "jaxlib", "jax-cuda12-plugin", "jax_triton", "triton", "nvidia-cublas-cu12")
DEVICE = {"platform": "gpu", "device_kind": "H200", "version": "cuda 12090", "id": 0}


def device(**changed) -> SimpleNamespace:
    given = DEVICE | changed
    given["client"] = SimpleNamespace(platform_version=given.pop("version"))
    return SimpleNamespace(**given)


def installed(**versions: str) -> list[SimpleNamespace]:
    known = dict.fromkeys(PACKAGES, "1.0") | {"numpy": "1.0"} | versions
    return [SimpleNamespace(name=name, version=version) for name, version in known.items()]


@pytest.fixture
def fresh_name(monkeypatch):
    """The name of a program, nothing of it remembered."""

    def name(identity: str = "step", given=None, **changed) -> str:
        program_store._versions.cache_clear()
        program_store._driver.cache_clear()
        store = ProgramStore(Path("anywhere"), device(**changed))
        return store.name_of(identity, arguments() if given is None else given)

    monkeypatch.setattr(program_store.metadata, "distributions", installed)
    yield name
    program_store._versions.cache_clear()
    program_store._driver.cache_clear()


@pytest.mark.parametrize("change", OTHER_ARGUMENTS)
def test_arguments_are_in_a_program_s_name(fresh_name, change):
    assert fresh_name(given=OTHER_ARGUMENTS[change]) != fresh_name() == fresh_name()


@pytest.mark.parametrize("field", DEVICE)
def test_the_device_is_in_a_program_s_name(fresh_name, field):
    assert fresh_name(**{field: "another"}) != fresh_name()


@pytest.mark.parametrize("package", PACKAGES)
def test_what_compiles_is_in_a_program_s_name(fresh_name, monkeypatch, package):
    name = fresh_name()
    changed = lambda **versions: installed(**{package: "1.1"})
    monkeypatch.setattr(program_store.metadata, "distributions", changed)
    assert fresh_name() != name


def test_other_packages_are_not_in_a_program_s_name(fresh_name, monkeypatch):
    name = fresh_name()
    monkeypatch.setattr(program_store.metadata, "distributions", lambda: installed(numpy="2.0"))
    assert fresh_name() == name


def test_the_driver_is_in_a_program_s_name(fresh_name, monkeypatch, tmp_path):
    name = fresh_name()
    (tmp_path / "version").write_text("NVRM version: 570.86")
    monkeypatch.setattr(program_store, "DRIVER", tmp_path / "version")
    assert fresh_name() != name


def test_settings_and_source_are_in_a_program_s_name(fresh_name, monkeypatch):
    names = [fresh_name(), fresh_name("other")]
    with monkeypatch.context() as patch:
        patch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
        names.append(fresh_name())
    with jax.default_matmul_precision("float32"):
        names.append(fresh_name())
    with monkeypatch.context() as patch:
        patch.setattr(program_store, "_source", lambda: "another release")
        names.append(fresh_name())
    assert len(set(names)) == len(names) == 5


def program(store: ProgramStore, function) -> Program:
    return Program(function, (), Compiling(), "cpu", "a program", store, "identity")


def test_a_damaged_file_is_compiled_again_and_replaced(store, tmp_path, caplog):
    assert program(store, lambda x: x + 1)(np.float32(1)) == 2
    (path,) = (tmp_path / "programs").iterdir()
    good = path.read_bytes()
    flipped = bytearray(good)
    flipped[len(good) // 2] ^= 1
    for damaged in (good[: len(good) // 2], bytes(flipped), b""):
        caplog.clear()
        path.write_bytes(damaged)
        assert program(store, lambda x: x + 1)(np.float32(1)) == 2
        assert f"could not load the program {path.name}" in caplog.text
    # Loaded at last: the function itself is not looked at.
    assert program(store, lambda x: x + 5)(np.float32(1)) == 2


def test_a_loaded_program_runs_on_one_device_of_several(tmp_path):
    """jax would hand it to all of them."""
    script = textwrap.dedent(
        """
        import sys, jax, numpy as np
        from pathlib import Path
        from hybrid_jax.engine.programs.compiling import Compiling, Program
        from hybrid_jax.engine.programs.store import ProgramStore
        assert len(jax.devices()) == 4
        jax.config.update("jax_enable_compilation_cache", False)
        for number in range(2):
            store = ProgramStore(Path(sys.argv[1]), jax.devices()[0])
            args = (lambda x: x + 1 + number, (), Compiling(), "cpu", "a program", store, "identity")
            assert Program(*args)(np.float32(1)) == 2  # the second is loaded
        """
    )
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", script, str(tmp_path)]
    done = subprocess.run(command, env=os.environ | flags, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_folder_that_cannot_be_written_costs_nothing_else(tmp_path, caplog):
    caplog.set_level(logging.INFO, "hybrid_jax.compiling")
    (tmp_path / "programs").write_text("a file")
    blocked = ProgramStore(tmp_path / "programs", jax.devices()[0])
    assert program(blocked, lambda x: x + 1)(np.float32(1)) == 2
    assert "could not keep" in caplog.text


def test_a_program_that_calls_back_is_not_kept(store, tmp_path):
    def calls(x):
        jax.debug.callback(lambda x: None, x)
        return x + 1

    for _ in range(2):
        assert program(store, calls)(np.float32(1)) == 2
    assert not list((tmp_path / "programs").glob("*"))


def test_what_nobody_used_for_long_is_deleted(store, tmp_path):
    program(store, lambda x: x + 1)(np.float32(1))
    (old,) = (tmp_path / "programs").iterdir()
    past = time.time() - program_store.UNUSED_SECONDS - 60
    os.utime(old, (past, past))
    program(store, lambda x: x + 1)(np.float32(1))  # a use
    program(store, lambda x: x + 1)(np.int16(1))
    assert old.exists()
    os.utime(old, (past, past))
    program(store, lambda x: x + 1)(np.int32(1))
    assert not old.exists()


def test_what_jax_had_in_its_own_cache_is_not_written_out_again(store, tmp_path, monkeypatch):
    lowered = jax.jit(lambda x: x + 1).lower(np.float32(1))
    compile_it = lowered.compile

    def found_in_the_cache():
        jax.monitoring.record_event("/jax/compilation_cache/cache_hits")
        return compile_it()

    with monkeypatch.context() as patch:
        patch.setattr(lowered, "compile", found_in_the_cache)
        assert store.compiled("a", lowered)(np.float32(1)) == 2
    assert not (tmp_path / "programs").exists()
    store.compiled("a", lowered)
    assert store.load("a")(np.float32(1)) == 2


def test_jax_says_when_it_had_a_program(tmp_path):
    """The event that `compiled` goes by."""
    hits = program_store._hits()
    settings = {
        "jax_enable_compilation_cache": True,
        "jax_compilation_cache_dir": str(tmp_path),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
    }
    old = {name: getattr(jax.config, name) for name in settings}
    try:
        for name, value in settings.items():
            jax.config.update(name, value)
        reset_cache()
        for expected in (0, 1):
            jax.clear_caches()
            jax.jit(lambda x: x * 3 + 1).lower(np.float32(1)).compile()
            assert program_store._hits() == hits + expected
    finally:
        for name, value in old.items():
            jax.config.update(name, value)
        reset_cache()


def test_a_folder_that_others_may_write_to_is_not_used(tmp_path, caplog):
    gpu = device()
    folder = tmp_path / "programs"
    assert open_store(tmp_path, gpu) is not None
    folder.mkdir(mode=0o700)
    assert open_store(tmp_path, gpu) is not None and not caplog.text
    folder.chmod(0o770)
    assert open_store(tmp_path, gpu) is None
    assert f"others may write to {folder}" in caplog.text and "chmod go-w" in caplog.text


def test_only_a_gpu_with_a_folder_has_a_store(tmp_path):
    gpu = SimpleNamespace(
        platform="gpu", device_kind="H200", client=SimpleNamespace(platform_version="12"), id=0
    )
    assert isinstance(open_store(tmp_path, gpu), ProgramStore)
    assert open_store(None, gpu) is None and open_store(tmp_path, jax.devices()[0]) is None
