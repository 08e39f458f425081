"""What is in an installed package and not only in the sources: a wheel, unpacked, run from another folder."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile

import pytest

REQUEST = {"session_id": 0, "turn_id": 0, "ts": 0, "input_tokens": [1, 2], "output_tokens": [3]}


@pytest.fixture(scope="module")
def installed(root, tmp_path_factory):
    """The unpacked wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", str(root), "--no-deps", "--no-build-isolation"]
    subprocess.run([*build, "-q", "-w", str(folder)], check=True, cwd=folder)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(folder / "installed")
    return folder / "installed"


@pytest.fixture(scope="module")
def run(installed):
    """Runs a command of the unpacked wheel: its exit code, and what it wrote."""

    def command(*arguments: str) -> tuple[int, str]:
        code = f"import sys; sys.path.insert(0, {str(installed)!r})\n"
        code += "import hybrid_jax, hybrid_jax.cli.main as cli\n"
        code += "assert 'installed' in hybrid_jax.__file__, hybrid_jax.__file__\n"
        code += f"cli.main({list(arguments)!r})"
        made = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, cwd=installed.parent
        )
        return made.returncode, made.stdout + made.stderr

    return command


def test_the_small_models_are_in_it(installed, root):
    for name in ("bundled", "bundled_cut", "bundled_gated_delta"):
        packed, source = (folder / "hybrid_jax" / name for folder in (installed, root))
        assert sorted(x.name for x in packed.iterdir()) == sorted(x.name for x in source.iterdir())


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


def test_studies_of_pools_say_that_they_need_a_clone(run, installed):
    """In one line, and the help is there."""
    code, out = run("pool-sim", "--pool", "4GiB")
    where = installed / "benchmarks" / "pools"
    assert code == 2 and out == (
        f"hybrid-jax: pool-sim: the allocators must be in {where}, where an installed package has none; clone the "
        "repository and run pip install -e . in it\n"
    )
    assert run("pool-sim", "--help")[0] == 0
