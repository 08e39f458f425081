"""What type checkers and editors see of the package: mypy's reports, jedi's completions and signatures."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args, get_type_hints

import jedi
import pytest

import hybrid_jax
from hybrid_jax import LLM, EngineConfig
from hybrid_jax.api import options
from hybrid_jax.config import BACKENDS
from hybrid_jax.config.formats import QUANTIZED
from tests.drawing import left_to_all

ROOT = Path(__file__).resolve().parents[2]
WRONG_CALLS = Path(__file__).with_name("wrong_calls.py")


def test_checkers_read_the_names_that_are_loaded_on_first_use():
    tree = ast.parse(Path(hybrid_jax.__file__).read_text())
    [block] = [
        node
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    imported = {
        alias.name: node.module.removeprefix("hybrid_jax.")
        for node in block.body
        for alias in node.names
    }
    assert imported == {n: home for home, names in hybrid_jax._HOMES.items() for n in names}
    assert hybrid_jax.__all__ == sorted(imported)


def test_the_options_that_checkers_read_are_those_that_exist():
    fields = EngineConfig.__dataclass_fields__.keys() - {"dtype", "tp"}
    fields |= {"mesh", "prefill_options"}  # which tell tp, and fields of some replicas
    assert options.EngineOptions.__annotations__.keys() == fields
    written = LLM.__init__.__annotations__.keys() & fields
    assert options.RareOptions.__annotations__.keys() == fields - written
    own = options.LLMOptions.__annotations__.keys() - options.EngineOptions.__annotations__.keys()
    assert own | {"model", "progress"} == {*options.OWN_OPTIONS}
    assert {*options.OWN_OPTIONS} < LLM.__init__.__annotations__.keys()


def test_kernels_have_the_same_choices_everywhere():
    field = get_type_hints(EngineConfig)["kernels"]
    assert get_args(field) == ("auto", *BACKENDS)
    assert get_type_hints(options.RareOptions)["kernels"] == field | None


def test_ways_to_quantise_have_the_same_choices_everywhere():
    field = get_type_hints(EngineConfig)["quantize"]
    assert get_args(get_args(field)[0]) == (*QUANTIZED,)
    assert get_type_hints(options.RareOptions)["quantize"] == field


def mypy(*arguments: str | Path, folder: Path = ROOT) -> str:
    """What it says, and nothing if it is content."""
    command = [sys.executable, "-m", "mypy", "--no-error-summary", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert done.stderr == "" and done.returncode == (1 if done.stdout else 0), done
    return done.stdout


def test_mypy_reports_every_wrong_call_and_no_right_one():
    assert mypy() == ""
    marks = re.findall(r"# type: ignore\[", WRONG_CALLS.read_text())
    assert len(marks) >= 40


def test_mypy_reports_a_right_call_that_is_marked_as_wrong(tmp_path):
    path = tmp_path / "marked.py"
    path.write_text(
        "from hybrid_jax import SamplingParams\n"
        "SamplingParams(max_tokens=3)  # type: ignore[call-arg]\n"
        "SamplingParams(max_token=3)\n"
    )
    reports = re.findall(r"marked\.py:(\d): error: .*\[([\w-]+)\]$", mypy(path), re.MULTILINE)
    assert reports == [("2", "unused-ignore"), ("3", "call-arg")]


@left_to_all
def test_mypy_finds_the_installed_package_from_anywhere(tmp_path):
    """As a user's does, who has no settings of ours."""
    (tmp_path / "own.py").write_text("from hybrid_jax import LLM\nLLM(modle=1)\nreveal_type(LLM)\n")
    said = mypy("own.py", "--config-file=", folder=tmp_path)
    assert 'own.py:2: error: Unexpected keyword argument "modle" for "LLM"' in said
    assert 'Revealed type is "def (model: str' in said.replace("builtins.", "")


def editor(code: str) -> jedi.Script:
    """An editor in this repository, with the cursor at the end of the code."""
    project = jedi.Project(ROOT, load_unsafe_extensions=False)
    return jedi.Script(code, project=project, environment=jedi.InterpreterEnvironment())


@pytest.mark.parametrize(
    "code, name",
    [
        ("from hybrid_jax import LLM\nllm = LLM()\nllm.gen", "generate"),
        ("from hybrid_jax import LL", "LLM"),
        ("import hybrid_jax\nhybrid_jax.Samp", "SamplingParams"),
        ("from hybrid_jax import LLM\nLLM(max_mo", "max_model_len="),
        ("from hybrid_jax import SamplingParams\nSamplingParams(max_", "max_tokens="),
        ("from hybrid_jax import LLM\nLLM().generate('x')[0].num_c", "num_cached_tokens"),
        ("from hybrid_jax import LLM\nfor delta in LLM().stream('x'):\n    delta.fini", "finished"),
    ],
)
def test_an_editor_completes(code, name):
    assert name in [completion.name for completion in editor(code).complete()]


def test_an_editor_shows_the_fields_of_sampling_params():
    [signature] = editor("from hybrid_jax import SamplingParams\nSamplingParams(").get_signatures()
    assert [parameter.name for parameter in signature.params] == list(
        hybrid_jax.SamplingParams.__dataclass_fields__
    )
