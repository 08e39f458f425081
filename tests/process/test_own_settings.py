"""jax's settings inside this package's code, and those of the caller behind it."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import config as jax_config
from jax._src import mesh as jax_mesh

from hybrid_jax.process.own_settings import BLOCKS, CALLERS, OWN, own_settings


@pytest.fixture
def process():
    """Sets settings of the process, until the end of the test."""
    before = {}

    def change(**settings):
        for name, value in settings.items():
            before.setdefault(name, jax.config.values[name])
            jax.config.update(name, value)

    yield change
    for name, value in before.items():
        jax.config.update(name, value)


def test_every_setting_of_jax_is_ours_or_the_callers():
    unknown = [n for n in jax_config.config_states if n not in OWN and not n.startswith(CALLERS)]
    assert not unknown, f"decide whether {unknown} change programs: OWN or CALLERS"


def test_what_jax_keeps_for_blocks_is_known():
    """Each has another value inside of its block, and programs are traced under that."""
    kept = {
        name
        for module in (jax_config, jax_mesh)
        for name, value in vars(module).items()
        if isinstance(value, jax_config.config_ext.Config)
    }
    states = {id(state) for state in jax_config.config_states.values()}
    assert kept
    unknown = [
        name
        for name in sorted(kept - set(BLOCKS))
        if id(getattr(jax_config, name, None)) not in states
    ]
    assert not unknown, f"decide whether a block of {unknown} changes programs: BLOCKS"


def test_own_values_are_those_of_jax():
    """Read in a process without settings. A guard that is not set allows everything."""
    code = (
        "import jax; from hybrid_jax.process.own_settings import OWN\n"
        "for name, own in OWN.items():\n"
        "    value = jax.config.values.get(name, own)\n"
        "    value = value.name.lower() if hasattr(value, 'name') else value\n"
        "    if value != own: print(name, value, own)"
    )
    clean = {n: v for n, v in os.environ.items() if not n.startswith(("JAX_", "XLA_"))}
    run = subprocess.run([sys.executable, "-c", code], env=clean, capture_output=True, text=True)
    assert not run.stderr
    differ = [line.split() for line in run.stdout.splitlines()]
    assert all("guard" in name and told == ["None", "allow"] for name, *told in differ), differ


def test_own_values_hold_inside_and_those_of_the_process_behind(process):
    process(jax_enable_x64=True, jax_numpy_rank_promotion="raise")
    with own_settings():
        assert jnp.arange(3).dtype == jnp.int32
        assert (jnp.ones((2, 1, 2)) + jnp.ones(2)).shape == (2, 1, 2)
        process(jax_default_matmul_precision="bfloat16")
        assert jax.config.jax_default_matmul_precision is None
    assert jnp.arange(3).dtype == jnp.int64
    assert jax.config.jax_default_matmul_precision == "bfloat16"
    with pytest.raises(ValueError, match="rank_promotion"):
        jnp.ones((2, 1, 2)) + jnp.ones(2)


def test_own_values_hold_inside_those_of_a_thread():
    with jax.enable_x64(True), jax.transfer_guard("disallow_explicit"):
        with own_settings():
            assert np.asarray(jax.device_put(np.arange(3)) + 1).dtype == np.int32
        with pytest.raises(RuntimeError, match="[Dd]isallowed"):
            jax.device_put(np.arange(3))


def test_a_mesh_around_reaches_no_array_of_ours():
    with jax.set_mesh(jax.make_mesh((1,), ("x",))):
        outside = jnp.ones(3).sharding
        with own_settings():
            assert isinstance(jnp.ones(3).sharding, jax.sharding.SingleDeviceSharding)
        assert jnp.ones(3).sharding == outside


@pytest.mark.parametrize("name", ["jax_debug_nans", "jax_debug_infs"])
def test_a_caller_who_looks_for_nan_still_finds_them_behind(process, name):
    process(**{name: True})
    with own_settings():
        jnp.log(jnp.zeros(2)) * 0
    with pytest.raises(FloatingPointError):
        jnp.log(jnp.zeros(2)) * 0
    process(**{name: False})
    with getattr(jax, name.removeprefix("jax_"))(True):
        with own_settings():
            jnp.log(jnp.zeros(2)) * 0
        with pytest.raises(FloatingPointError):
            jnp.log(jnp.zeros(2)) * 0


def test_numpy_raises_for_the_caller_alone():
    with np.errstate(all="raise"):
        with own_settings():
            assert np.isinf(np.float32(1) / np.float32(0))
        with pytest.raises(FloatingPointError):
            np.float32(1) / np.float32(0)


def test_a_function_may_have_own_settings_and_an_error_ends_them():
    @own_settings(jax_enable_checks=True)
    def fails():
        assert jax.config.jax_enable_checks
        raise ValueError("a mistake")

    with jax.enable_x64(True):
        with pytest.raises(ValueError, match="a mistake"):
            fails()
        assert jax.config.jax_enable_x64 and not jax.config.jax_enable_checks
