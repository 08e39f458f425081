"""`hybrid-jax doctor`, `bench` and `convert`: what is installed, how fast it is, and a model in another form."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from hybrid_jax import LLM, SamplingParams, load_model
from hybrid_jax.cli import doctor
from hybrid_jax.engine import this_device
from hybrid_jax.machine import Nvidia
from hybrid_jax.models.files import BUNDLED
from hybrid_jax.sizing.devices import SHARE_VARIABLES

HOPPER = Nvidia(total_bytes=80 << 30, used_bytes=0, capability="9.0")


@pytest.fixture
def run(run_command):
    return run_command


def test_the_doctor_finds_nothing_wrong_here(run, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    (tmp_path / "hybrid_jax").mkdir()
    (tmp_path / "hybrid_jax" / "program").write_bytes(b"x" * 2048)
    code, out, err = run("doctor")
    assert (code, err) == (0, "")
    lines = dict(re.split(r"  +", line, maxsplit=1) for line in out.splitlines() if "  " in line)
    assert lines["jax sees"] == "cpu:0 cpu"
    assert lines["cache of compiled programs"] == f"{tmp_path / 'hybrid_jax'}: 2 KiB in 1 files"
    assert lines["JAX_PLATFORMS"] == "cpu"
    assert "problem:" not in out or "GPU" in out
    found = json.loads(run("doctor", "--json")[1])
    assert found["packages"]["jax"] and found["cache"]["num_files"] == 1


@pytest.mark.parametrize("place", ["a file", "no disk"])
def test_the_doctor_tries_to_write_into_the_cache_folder(run, monkeypatch, tmp_path, place):
    (tmp_path / "file").touch()
    home = tmp_path / "file" if place == "a file" else Path("/proc")
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    code, out, err = run("doctor")
    assert (code, err) == (0, "")
    assert f"problem: {home / 'hybrid_jax'} cannot be written" in out


def test_the_doctor_says_of_a_platform_what_a_start_says(monkeypatch):
    told = "JAX_PLATFORMS=foo asks for a device that jax cannot use here; leave it out"

    def fails():
        raise ValueError(f"LLM: {told}")

    monkeypatch.setattr(this_device, "first_device", fails)
    found = doctor.examine()
    assert (found["devices"], found["devices_error"]) == ([], told)
    assert f"jax cannot start: {told}" in list(doctor.problems(found, None))


def test_the_doctor_shows_no_variable_that_it_sets_itself(monkeypatch):
    for name in SHARE_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert not doctor.examine()["environment"].keys() & set(SHARE_VARIABLES)


@pytest.fixture
def healthy():
    """What `examine` finds where nothing is wrong."""
    cache = {"path": "/cache", "writable": True, "free_bytes": 1 << 40}
    packages = dict.fromkeys(doctor.PACKAGES, "1.0")
    return {
        "python": "3.12.1",
        "devices": ["gpu:0 NVIDIA H100"],
        "devices_error": None,
        "packages": packages,
        "environment": {},
        "cache": cache,
    }


@pytest.mark.parametrize(
    "change, gpu, said",
    [
        ({}, HOPPER, ""),
        ({"devices_error": "no plugin"}, HOPPER, "jax cannot start: no plugin"),
        (
            {"devices": ["cpu:0 cpu"], "environment": {"JAX_PLATFORMS": "cpu"}},
            HOPPER,
            "JAX_PLATFORMS=cpu hides it; unset it",
        ),
        ({"devices": ["cpu:0 cpu"]}, HOPPER, "pip install 'hybrid_jax[cuda12]'"),
        (
            {"devices": ["cpu:0 cpu"], "environment": {"JAX_PLATFORMS": "cuda"}},
            None,
            "JAX_PLATFORMS=cuda asks for a GPU, and there is none",
        ),
        ({"packages": {"jax-triton": None}}, HOPPER, "pip install 'hybrid_jax[cuda12,triton]'"),
        ({"environment": {"LD_LIBRARY_PATH": "/usr/local/cuda/lib64"}}, HOPPER, "LD_LIBRARY_PATH"),
        (
            {"cache": {"path": "/c", "writable": False, "free_bytes": 0}},
            HOPPER,
            "/c cannot be w",
        ),
        (
            {"cache": {"path": "/c", "writable": True, "free_bytes": 9}},
            HOPPER,
            "only 9 B are",
        ),
        ({"cache": None}, HOPPER, "there is no home folder for compiled programs"),
        ({"cache": None, "environment": {"JAX_COMPILATION_CACHE_DIR": "gs://b"}}, HOPPER, ""),
        (
            {"environment": {"JAX_ENABLE_COMPILATION_CACHE": "false"}},
            HOPPER,
            "JAX_ENABLE_COMPILATION_CACHE turns the cache off",
        ),
    ],
)
def test_each_problem_is_said_with_its_remedy(healthy, change, gpu, said, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", change.get("environment", {}).get("JAX_PLATFORMS", ""))
    found = list(doctor.problems(healthy | change, gpu))
    assert len(found) == bool(said) and said in "".join(found)


def test_a_missing_package_is_a_problem(healthy, monkeypatch):
    monkeypatch.setattr(doctor, "_wanted", lambda: {"no-such-package": "no-such-package>=2"})
    [problem] = doctor.problems(healthy, HOPPER)
    assert problem == "no-such-package is not installed; pip install 'no-such-package>=2'"


def test_a_bench_measures_prefill_hits_and_decoding(run):
    options = ("--prompt-tokens", 80, "--new-tokens", 24, "--max-rows", 2, "--max-model-len", 512)
    code, out, err = run("bench", "--json", *options)
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["cached_tokens"] == 64 and found["prompt_tokens"] == 80
    assert found["ttft_ms"] > found["cached_ttft_ms"] > 0
    assert [entry["rows"] for entry in found["decode"]] == [1, 2]
    assert found["ttft_ms_min"] <= found["ttft_ms"] <= found["ttft_ms_max"]
    assert all(entry["tokens_per_s"] > 0 for entry in found["decode"])
    assert found["settings"]["speculation"] == "off"
    code, out, _ = run("bench", *options)
    lines = out.splitlines()
    assert lines[0] == "model        the bundled model, float32, cache adaptive"
    assert lines[-3].split() == ["rows", "tokens/s", "ms", "a", "token"]


def test_a_bench_that_does_not_fit_says_so(run):
    code, out, err = run("bench", "--prompt-tokens", 600, "--max-model-len", 512)
    assert (code, out) == (2, "")
    assert "--prompt-tokens 600 and --new-tokens 64 need sequences of 601 tokens" in err
    code, out, err = run("bench", "--new-tokens", 2, "--max-model-len", 1024)
    assert (code, out) == (2, "") and "--new-tokens must be at least" in err


def test_a_converted_model_is_the_same_model(run, tmp_path):
    code, out, err = run("convert", BUNDLED, tmp_path / "out", "--json")
    assert code == 0 and f"the model is in {tmp_path / 'out'}; hybrid-jax generate" in err
    assert json.loads(out)["dtype"] == "bfloat16"
    config, params = load_model()
    again, converted = load_model(tmp_path / "out")
    assert config == again
    assert np.array_equal(params["embed"], converted["embed"])
    with LLM(tmp_path / "out", max_rows=1, max_model_len=64, quiet=True) as llm:
        [output] = llm.generate("import ", SamplingParams(max_tokens=4, temperature=0.0))
        assert len(output.outputs[0].text) == 4
    code, _, err = run("convert", BUNDLED, tmp_path)
    assert (code, "exists and is not a saved model; choose another path" in err) == (2, True)


def test_a_converted_model_is_replaced_only_if_that_is_asked_for(run, tmp_path):
    out, file = tmp_path / "out", tmp_path / "file"
    out.mkdir()
    file.touch()
    assert run("convert", BUNDLED, out, "--dtype", "float32")[0] == 0  # an empty directory is free
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    code, _, err = run("convert", BUNDLED, out)
    assert code == 2 and err.count("\n") == 1
    assert f"{out} holds a model already; give --overwrite to replace it" in err
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before
    code, _, err = run("convert", BUNDLED, file)
    assert (code, f"{file} is a file; choose another path" in err) == (2, True)
    assert run("convert", BUNDLED, out, "--overwrite")[0] == 0
    assert load_model(out)[0].dtype == "bfloat16"


def test_a_dtype_is_stored_and_a_relative_path_is_found(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run("convert", BUNDLED, "out", "--dtype", "float32")
    assert load_model("out")[0].dtype == "float32"
