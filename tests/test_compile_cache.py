"""The folder of compiled programs: one for each processor, card and driver."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import pytest

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
