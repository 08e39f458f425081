"""The folder of compiled programs: one for each processor, card and driver."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import platformdirs
import pytest
from jax._src.lru_cache import LRUCache
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from hybrid_jax.engine.programs import compile_cache


def device(platform="gpu", kind="NVIDIA H200", driver="cuda 12.8, driver 570.1"):
    client = SimpleNamespace(platform_version=driver)
    return SimpleNamespace(platform=platform, device_kind=kind, client=client)


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """The folder's name for a device, where nobody has said anything to jax."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def folder(device) -> str:
        jax.config.update("jax_compilation_cache_dir", None)
        return compile_cache.enable_compile_cache("xla", device).name

    monkeypatch.delenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", raising=False)
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    yield folder
    for name, value in before.items():
        jax.config.update(name, value)


def test_programs_are_kept_apart_by_card_and_driver(folder):
    names = [
        folder(device()),
        folder(device(kind="NVIDIA H100")),
        folder(device(driver="cuda 12.9, driver 575.1")),
        folder(device(platform="cpu")),
    ]
    assert len(set(names)) == 4
    assert folder(device()) == names[0]
    assert folder(None) == folder(device(platform="cpu", kind="another")) == names[3]


def test_jax_itself_keeps_programs_of_a_cpu_only(folder):
    """A GPU's are in the program store, which cannot keep what jax took from its own cache."""
    for platform, kept in (("gpu", False), ("cpu", True)):
        folder(device(platform=platform))
        assert (jax.config.jax_persistent_cache_min_compile_time_secs < 600) is kept


def test_jax_keeps_what_was_tuned_beside_the_programs():
    wanted = jax.config.jax_persistent_cache_enable_xla_caches
    assert "xla_gpu_per_fusion_autotune_cache_dir" in wanted


def no_home(*_, **__):
    raise RuntimeError("Could not determine home directory.")


@pytest.mark.parametrize("found", [no_home, lambda *_, **__: Path("~/.cache/hybrid_jax")])
def test_without_a_home_folder_no_programs_are_kept(folder, monkeypatch, caplog, found):
    monkeypatch.setattr(platformdirs, "user_cache_path", found)
    jax.config.update("jax_compilation_cache_dir", None)
    assert compile_cache.enable_compile_cache(device=device(platform="cpu")) is None
    assert jax.config.jax_compilation_cache_dir is None
    [line] = caplog.messages
    assert "not kept" in line and "no home folder" in line and "XDG_CACHE_HOME" in line


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES])
def test_a_folder_without_room_is_left_alone(folder, monkeypatch, caplog, number):
    def refuse(**_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(compile_cache.tempfile, "TemporaryFile", refuse)
    jax.config.update("jax_compilation_cache_dir", None)
    assert compile_cache.enable_compile_cache(device=device(platform="cpu")) is None
    assert jax.config.jax_compilation_cache_dir is None
    [line] = caplog.messages
    assert "not kept" in line and line.endswith(os.strerror(number))


@pytest.fixture
def own_cache(folder, tmp_path):
    """jax's cache in a folder of this test, for every program."""
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    reset_cache()
    yield tmp_path
    compile_cache._refused.discard(str(tmp_path))
    reset_cache()


def lowered(number):
    return jax.jit(lambda x: x * number + 1).lower(jax.ShapeDtypeStruct((3,), np.float32))


@pytest.mark.filterwarnings("error")
def test_a_folder_that_fills_up_costs_one_line(own_cache, monkeypatch, caplog):
    tries = []

    def full(self, key, data):
        tries.append(key)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(LRUCache, "put", full)
    for number in (2.0, 3.0):
        assert (
            compile_cache.compiled(lowered(number))(np.ones(3, np.float32)).tolist()
            == [number + 1] * 3
        )
    assert len(tries) == 1 and caplog.messages == [
        f"compiled programs are not kept for the next process: {own_cache}: No space left on device"
    ]


@pytest.mark.filterwarnings("error")
def test_a_damaged_program_is_compiled_again(own_cache, caplog):
    compile_cache.compiled(lowered(5.0))
    [file] = own_cache.glob("*-cache")
    file.write_bytes(file.read_bytes()[:100])
    assert compile_cache.compiled(lowered(5.0))(np.ones(3, np.float32)).tolist() == [6.0] * 3
    [line] = caplog.messages
    assert line.startswith(f"a program kept in {own_cache} cannot be used")


def test_a_mistake_in_a_program_is_raised_as_it_is(own_cache, monkeypatch):
    def fails():
        raise ValueError("no such thing")

    with pytest.raises(ValueError, match="no such thing"):
        compile_cache.compiled(SimpleNamespace(compile=fails))
