"""What is in an installed package and not only in the sources: a wheel, unpacked, run from another folder."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

REQUEST = {"session_id": 0, "turn_id": 0, "ts": 0, "input_tokens": [1, 2], "output_tokens": [3]}


def unpacked(source: Path, folder: Path) -> Path:
    """A wheel built from sources, unpacked."""
    build = [sys.executable, "-m", "pip", "wheel", str(source), "--no-deps", "--no-build-isolation"]
    subprocess.run([*build, "-q", "-w", str(folder)], check=True, cwd=folder)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(folder / "installed")
    return folder / "installed"


@pytest.fixture(scope="module")
def installed(root, tmp_path_factory):
    """The unpacked wheel, built from a copy: what an earlier build has left in a clone would be packed, too."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("hybrid_jax", "pallas_kernels"):
        shutil.copytree(root / name, folder / "clone" / name)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(root / name, folder / "clone")
    return unpacked(folder / "clone", folder)


@pytest.fixture(scope="module")
def more_models(root, tmp_path_factory):
    """The unpacked wheel of hybrid-jax-models."""
    folder = tmp_path_factory.mktemp("more")
    shutil.copytree(root / "models", folder / "clone")
    return unpacked(folder / "clone", folder)


@pytest.fixture(scope="module")
def run(installed):
    """Runs a command of the unpacked wheel, perhaps with another one beside it: its exit code, and what it wrote."""

    def command(*arguments: str, beside: Path | None = None) -> tuple[int, str]:
        code = f"import sys; sys.path[:0] = {[str(x) for x in (installed, beside) if x]!r}\n"
        code += "import hybrid_jax, hybrid_jax.cli.main as cli\n"
        code += "assert 'installed' in hybrid_jax.__file__, hybrid_jax.__file__\n"
        code += f"cli.main({list(arguments)!r})"
        made = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, cwd=installed.parent
        )
        return made.returncode, made.stdout + made.stderr

    return command


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_one_small_model_is_in_it_and_two_in_the_other(installed, more_models, root):
    assert names_in(installed / "hybrid_jax" / "bundled") == names_in(root / "hybrid_jax/bundled")
    weights = sorted(path.parent.name for path in installed.rglob("*.safetensors"))
    assert weights == ["bundled"]
    for name in ("tiny_cut", "tiny_gated_delta"):
        source = root / "models" / "hybrid_jax_models" / name
        assert names_in(more_models / "hybrid_jax_models" / name) == names_in(source)


@pytest.mark.slow
def test_the_model_in_it_writes_and_can_be_distilled(run):
    asked = ("for i in range(", "--max-tokens", "4", "--temperature", "0", "--max-rows", "1")
    code, out = run("generate", *asked)
    assert code == 0 and out.strip(), out
    assert run("distill", "--help")[0] == 0


@pytest.mark.parametrize(
    "command", [("generate", "x", "--model"), ("distill", "--table", "--model"), ("inspect",)]
)
def test_a_model_of_the_other_distribution_is_named_with_it(run, command):
    code, out = run(*command, "tiny_cut")
    assert code == 2 and out.count("\n") == 1, out
    assert (
        "tiny_cut is a model of hybrid-jax-models, which is not installed; run pip install" in out
    )


def test_the_other_distribution_is_found_beside_it(run, more_models):
    code, out = run("inspect", "tiny_cut", "--json", beside=more_models)
    assert code == 0 and json.loads(out)["cut"] == 4, out


@pytest.mark.parametrize("name", ["qwen3_next_80b", "Qwen/Qwen3-Next-80B-A3B-Instruct"])
def test_known_models_are_inspected_by_name(run, name):
    code, out = run("inspect", name, "--device", "h200", "--json")
    found = json.loads(out)
    assert code == 0 and found["layers"] == {"GatedDelta": 36, "MoE": 48, "Attention": 12}
    assert found["kv_bytes_per_token"] == 24 * 1024 and found["fits"] is False


def test_simulators_take_known_models_and_those_that_are_none(run, tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text(json.dumps(REQUEST) + "\n")
    for name in ("qwen3_5_9b", "paper_7b"):
        given = ("--model-spec", name, "--capacity", "2GB", "--trace", str(trace), "--json")
        code, out = run("simulate", *given)
        assert code == 0 and json.loads(out)["model_spec"] == name, out


def test_studies_of_pools_say_that_they_need_a_clone(run):
    """In one line, and the help is there."""
    code, out = run("pool-sim", "--pool", "4GiB")
    assert code == 2 and out == (
        "hybrid-jax: pool-sim: works only in a clone of the repository, because its allocators are in "
        "benchmarks/pools; clone it and run pip install -e . there\n"
    )
    code, out = run("pool-sim", "--help")
    assert code == 0 and "Works only in a clone" in out
