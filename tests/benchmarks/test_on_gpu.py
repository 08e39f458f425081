"""The scripts for a GPU: they run whole on a CPU, name what is wrong with a command line, and fail where a check
does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.on_gpu import anatomy, checks, repeats, report, steps
from tests.drawing import left_to_all

SCRIPTS = ("first.sh", "second.sh", "call_1.sh")


def run(root, script: str, *arguments) -> subprocess.CompletedProcess:
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHON": sys.executable}
    command = [str(root / "benchmarks/on_gpu" / script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=env)


@pytest.fixture(scope="module")
def smoke(root, tmp_path_factory):
    """A folder with the results of all scripts' smoke runs."""
    folder = tmp_path_factory.mktemp("on_gpu")
    for script in SCRIPTS:
        done = run(root, script, folder, "--smoke")
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder


@pytest.mark.slow
@left_to_all
def test_all_scripts_leave_their_few_files(smoke):
    names = {path.name for path in smoke.iterdir()}
    first = {
        "checks.json",
        "engines.json",
        "answers.json",
        "repeats.json",
        "kernels.json",
        "first.log",
    }
    second = {"engine.json", "trace.tar.gz", "second.log"}
    third = {"anatomy.json", "profiles.tar.gz", "call_1.log"}
    assert first | second | third <= names and len(names - first - third) <= 8
    found = json.loads((smoke / "checks.json").read_text())
    assert len(found["passed"]) >= 12 and not found["failed"]
    found = json.loads((smoke / "engines.json").read_text())
    assert len(found["passed"]) == 2 and not found["failed"] + found["running"]
    for case in json.loads((smoke / "answers.json").read_text())["cases"]:
        assert case["different"] == [0, 0, 0] and case["cached"] > 1000
    (case,) = json.loads((smoke / "repeats.json").read_text())["cases"]
    assert case["fine"] and {run["different"] for run in case["runs"].values()} == {1}
    assert "first_s" in json.dumps(json.loads((smoke / "engine.json").read_text())["decode"])
    found = json.loads((smoke / "anatomy.json").read_text())
    assert list(found["forms"].keys()) == list(anatomy.FORMS) and anatomy.same_bits(found["forms"])
    assert not any("running" in form for form in found["forms"].values())


@pytest.mark.slow
@left_to_all
def test_the_report_holds_every_table(smoke, capsys):
    assert report.main([str(smoke)]) == 0
    page = capsys.readouterr().out
    assert "2 tests of engines passed, 0 failed" in page
    assert "tiny_gated_delta, float32: answers that differ: [0, 0, 0] of 8" in page
    assert "kernel tests passed, 0 failed" in page and "| 2 | bfloat16 | 2 | yes |" in page
    assert "| row_product | smoke_300x70 |" in page and "decode 2 rows" in page
    for form in anatomy.FORMS.values():
        assert page.count(f"| {form.name} | ") == 2


def test_a_report_of_nothing_says_what_to_run(tmp_path):
    with pytest.raises(
        SystemExit, match="none of checks.json, .* run first.sh, second.sh or call_1.sh"
    ):
        report.main([str(tmp_path)])


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "name a folder for the results"),
        (["a", "b"], "one folder, got 'a' and 'b'"),
        (["a", "--fast"], "unknown option '--fast'"),
        (["a", "--peers", "nowhere"], "--peers must name a folder of wheels, got 'nowhere'"),
        (["a", "--peers"], "--peers must name a folder of wheels, got ''"),
        (["/dev/null/x"], "cannot write to '/dev/null/x'"),
    ],
)
def test_a_wrong_command_line_is_one_line(root, tmp_path, script, arguments, message):
    arguments = [tmp_path / "out" if word == "a" else word for word in arguments]
    done = run(root, script, *arguments)
    message = message.replace("'a'", f"'{tmp_path}/out'")
    assert done.returncode == 2 and done.stderr.splitlines()[-1].endswith(f"; {message}")


@pytest.mark.parametrize("script", SCRIPTS)
def test_without_a_gpu_nothing_is_begun(root, tmp_path, script):
    done = run(root, script, tmp_path / "a folder")
    assert done.returncode == 2 and done.stdout == ""
    assert "no GPU that jax can use with JAX_PLATFORMS=cpu" in done.stderr
    assert list((tmp_path / "a folder").iterdir()) == []


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_says_how_it_is_called(root, script):
    done = run(root, script, "--help")
    said = " ".join(done.stdout.split())
    assert done.returncode == 0 and "OUT [--peers FOLDER] [--smoke]" in said
    assert "OUT: a folder for the results" in said and "set -uo" not in said


def test_bits_that_differ_between_repeats_or_runs_are_seen(tmp_path, monkeypatch):
    answers = {flags.partition("=")[0]: ["a", "a"] for flags in repeats.RUNS.values()}

    def fake(command, env=None, **_):
        if env is None:  # git, for the header
            return SimpleNamespace(returncode=1, stdout="", stderr="")
        cases = command[command.index("--cases") + 1 :]
        (bits,) = [bits for flag, bits in answers.items() if flag in env["XLA_FLAGS"]][-1:]
        lines = [[int(rows), dtype, bits] for rows, dtype in (case.split(",") for case in cases)]
        out = "\n".join(["XLA says", *(repeats.ANSWER + json.dumps(line) for line in lines)])
        return SimpleNamespace(returncode=0, stdout=out, stderr="")

    monkeypatch.setattr(repeats.subprocess, "run", fake)
    out = ["--out", str(tmp_path / "repeats.json")]
    assert repeats.main(out) == 0
    for flags, bits in zip(answers, (["a", "b"], ["b", "b"]), strict=True):
        good, answers[flags] = answers[flags], bits
        assert repeats.main(out) == 1
        answers[flags] = good
    assert repeats.main(out) == 0
    cases = json.loads((tmp_path / "repeats.json").read_text())["cases"]
    assert [(case["rows"], case["dtype"]) for case in cases] == [
        *((64, "bfloat16"), (1, "bfloat16"), (64, "float32"), (1, "float32"))
    ]
    assert not repeats.judged((1, "float32"), {"none": {(1, "float32"): {"different": 1}}})["fine"]


def test_a_process_that_lost_its_device_starts_again_behind_the_test_that_did_it(
    tmp_path, monkeypatch
):
    """Three tests of which the second one takes the process with it."""
    tests, started = ["first", "second", "third"], []

    class Process:
        def __init__(self, command, **_):
            path = Path(command[command.index("--out") + 1])
            known = json.loads(path.read_text()) if path.exists() else {"failed": [], "passed": []}
            if last := known.pop("running", None):
                known["failed"].append({"test": last, "why": "its process ended"})
            left = tests[len(known["passed"]) + len(known["failed"]) :]
            started.append(left)
            self.code = 0
            for test in left:
                if test == "second":
                    self.code, known["running"] = checks.LOST, test
                    break
                known["passed"].append({"test": test})
            path.write_text(json.dumps(known | {"skipped": [], "seconds": 1.0}))

        def poll(self):
            return self.code

    monkeypatch.setattr(checks.subprocess, "Popen", Process)
    monkeypatch.setattr(checks, "header", dict)
    out = tmp_path / "checks.json"
    assert checks.main(["--out", str(out)]) == 1
    found = json.loads(out.read_text())
    assert started == [tests, ["third"]] and found["running"] == []
    assert [entry["test"] for entry in found["passed"]] == ["first", "third"]
    assert [entry["test"] for entry in found["failed"]] == ["second"]


def test_a_checksum_sees_a_bit_and_where_it_is():
    drawn = np.random.default_rng(0).integers(0, 2**32, (40, 3, 7), np.uint32)
    sums = {tuple(map(int, steps.checksum(jnp.asarray(drawn))))}
    for change in range(3):
        other = drawn.copy()
        if change == 0:
            other[17, 2, 3] ^= 1 << 31
        elif change == 1:
            other[[4, 5]] = other[[5, 4]]
        else:
            other[0, 0, [1, 2]] = other[0, 0, [2, 1]]
        sums.add(tuple(map(int, steps.checksum(jnp.asarray(other)))))
    assert len(sums) == 4
    other = drawn.copy()
    other[0] = 0
    assert (steps.checksum(other, 1) == steps.checksum(drawn, 1)).all()
    assert (steps.checksum(other, 0) != steps.checksum(drawn, 0)).all()


class Item:
    """A test that pytest has found."""

    def __init__(self, line: str) -> None:
        self.nodeid = line

    @property
    def file(self) -> str:
        return self.nodeid.partition("::")[0]


def listed(*arguments) -> list[Item]:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *map(str, arguments)]
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "HYBRID_JAX_TESTS": "all"}
    found = subprocess.run(command, capture_output=True, text=True, env=env).stdout
    return [Item(line) for line in found.splitlines() if "::" in line]


def chosen(items: list[Item], path) -> list[Item]:
    items = list(items)
    left = SimpleNamespace(hook=SimpleNamespace(pytest_deselected=lambda items: None))
    checks.Recorder(path / "x.json", few=False).pytest_collection_modifyitems(left, items)
    return items


def test_some_hundred_tests_are_chosen_and_every_file_has_one(tmp_path):
    every = listed(checks.TESTS, "-k", "pallas")
    items = chosen(every, tmp_path)
    assert 80 <= len(items) <= 120
    assert {item.file for item in items} == {item.file for item in every}
    names = [item.nodeid.partition("[")[0] for item in items]
    assert len(set(names[: len(set(names))])) == len(set(names)) < len(names)  # one of each first
    text = " ".join(item.nodeid for item in items)
    assert all(dtype in text for dtype in ("float32", "bfloat16"))


def test_every_kind_of_test_of_triton_kernels_is_chosen(tmp_path):
    """But those of an engine, and of what no device changes."""
    every = listed(checks.TRITON_TESTS)  # some files have none where Triton is missing
    items = chosen(every, tmp_path)
    kinds = {item.nodeid.partition("[")[0] for item in every}
    missing = kinds - {item.nodeid.partition("[")[0] for item in items}
    assert all(any(word in name for word in checks.LEFT_OUT) for name in missing)
    assert len(missing) == 3 < len(items) <= 30
    names = ("test_states_go_from_frames", "test_padding_changes", "test_the_trial_of_sampling")
    assert all(any(name in item.nodeid for item in items) for name in names)


def test_kernels_that_are_not_there_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(checks.jax_triton, "why_unavailable", lambda: "needs the package triton")
    found = checks.Recorder(tmp_path / "checks.json", few=True).report
    page = report.markdown({"checks.json": found})
    assert "- Triton kernels: not there: needs the package triton" in page
    there = report.markdown({"checks.json": found | {"no_triton": None}})
    assert "Triton" not in there


def test_a_damaged_file_is_named(tmp_path):
    (tmp_path / "checks.json").write_text('{"header": ')
    with pytest.raises(SystemExit, match=r"checks\.json is damaged: .*; run its script again"):
        report.read([tmp_path])


@pytest.mark.parametrize(("device", "says"), [("cpu, x86_64", True), ("NVIDIA H200", False)])
def test_a_report_of_a_run_on_a_cpu_says_so(device, says):
    header = {"header": {"device": device, "jax": "0.11.2"}}
    checks = header | {"passed": [], "failed": [], "skipped": []}
    page = report.markdown({"checks.json": checks})
    assert ("says nothing about a GPU" in page) is says


def test_no_smoke_run_is_among_the_results(root):
    for path in (root / "benchmarks/results").rglob("*.json"):
        assert '"smoke": true' not in path.read_text(), path
