"""Which tests a change calls for: on small trees, in repositories made for it, and on the tree at hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests import choice, chosen
from tests.choice import (
    NOWHERE,
    RECORD,
    Entry,
    Plan,
    changes,
    common_commit,
    distances,
    in_order,
    make_plan,
    read_record,
    report,
    stand_ins,
    updated,
    write_record,
)
from tests.chosen import Chosen
from tests.drawing import spine
from tests.imports import changed_names, import_graph

pytestmark = spine
TREE = {
    "hybrid_jax/__init__.py": "if TYPE_CHECKING:\n    from hybrid_jax.api.llm import LLM as LLM\n",
    "hybrid_jax/api/__init__.py": "",
    "hybrid_jax/api/llm.py": "from hybrid_jax.cache.tree import Tree\nclass LLM:\n    tree = Tree\n",
    "hybrid_jax/cache/__init__.py": "",
    "hybrid_jax/cache/tree.py": "class Tree:\n    pass\nclass Node:\n    pass\n",
    "tests/cache/pools.py": "from hybrid_jax.cache.tree import Tree\n",
    "tests/cache/test_tree.py": "from hybrid_jax.cache.tree import Tree\n",
    "tests/cache/test_nodes.py": "from hybrid_jax.cache.tree import Node\n",
    "tests/cache/test_pools.py": "from tests.cache import pools\n",
    "tests/cache/conftest.py": "@pytest.fixture\ndef frames():\n    pass\n",
    "tests/cache/test_frames.py": "def test_them(frames):\n    pass\n",
    "tests/api/test_llm.py": "from hybrid_jax import LLM\n",
    "tests/text/test_text.py": "",
}


def write(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def git(root, *words):
    identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main")
    done = subprocess.run(
        ["git", *identity, *words], cwd=root, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


@pytest.fixture
def tree(tmp_path):
    """A tree under git, with one commit."""
    write(tmp_path, TREE)
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "first")
    return tmp_path


# --- what changed ------------------------------------------------------------------------------------

CODE = '"""Doc."""\nA = 1\ndef f(x):\n    """Doc."""\n    return x + A\ndef g():\n    return 2\n'


@pytest.mark.parametrize(
    ("before", "after", "names"),
    [
        ("return 2", "return 3", {"g"}),
        ("A = 1", "A = 2", {"A", "f"}),
        ("Doc.", "Other words.", set()),
        ("def g", "# why\n\ndef g", set()),
        ("def g():\n    return 2\n", "", {"g"}),
        ("A = 1", "A = 1\nprint(A)", None),
    ],
)
def test_names_that_mean_something_else_after_a_change(before, after, names):
    assert changed_names(CODE, CODE.replace(before, after)) == names


def test_a_change_is_what_differs_from_a_commit_saved_or_not(tree):
    write(tree, {"hybrid_jax/cache/tree.py": TREE["hybrid_jax/cache/tree.py"] + "def new(): 0\n"})
    write(tree, {"README.md": "words", "tests/text/test_text.py": "# words\n"})
    (tree / "tests/cache/test_nodes.py").unlink()
    expected = {
        "hybrid_jax/cache/tree.py": {"new"},
        "README.md": None,
        "tests/cache/test_nodes.py": None,
    }
    assert changes(tree, "HEAD") == expected
    git(tree, "add", "-A")
    git(tree, "commit", "-qm", "second")
    assert changes(tree, "HEAD") == {} and changes(tree, "HEAD~1") == expected
    assert changes(tree, "HEAD~2") is None


def test_a_file_that_moved_is_a_change_of_both_names(tree):
    git(tree, "mv", "tests/cache/pools.py", "tests/cache/tubs.py")
    assert changes(tree, "HEAD") == {"tests/cache/pools.py": None}
    (tree / "tests/cache/tubs.py").write_text("from hybrid_jax.cache.tree import Node\n")
    assert changes(tree, "HEAD").keys() == {"tests/cache/pools.py", "tests/cache/tubs.py"}


def test_the_commit_of_the_record_is_there_after_a_rebase(tree):
    first = common_commit(tree)
    assert git(tree, "rev-parse", "HEAD").startswith(first)
    git(tree, "checkout", "-qb", "work")
    git(tree, "commit", "-qm", "of a branch", "--allow-empty")
    assert common_commit(tree) == first
    git(tree, "checkout", "-q", "main")
    git(tree, "commit", "-qm", "of another", "--allow-empty")
    git(tree, "rebase", "-q", "main", "work")
    assert changes(tree, first) == {}


def test_files_that_are_not_python_stand_for_those_that_read_them(tree):
    write(tree, {"hybrid_jax/api/llm.py": 'CARDS = "cards.toml"\nFOLDER = "bundled"\n'})
    write(tree, {"hybrid_jax/cache/tree.py": '"""As in cards.toml and page.md."""\n'})
    graph = import_graph(tree)
    for path in ("hybrid_jax/sizing/cards.toml", "hybrid_jax/bundled/weights"):
        assert stand_ins(tree, [path], graph) == {"hybrid_jax/api/llm.py"}
    assert stand_ins(tree, ["docs/page.md"], graph) == {"tests/docs/test_site.py"}
    assert stand_ins(tree, [RECORD, "Makefile"], graph) == set()


# --- how far a test is from it -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        # By what a test imports itself, other names count double.
        (
            {"hybrid_jax/cache/tree.py": frozenset({"Tree"})},
            {"cache/test_tree": 1, "cache/test_nodes": 2, "cache/test_pools": 1, "api/test_llm": 2},
        ),
        (
            {"hybrid_jax/cache/tree.py": None},
            {"cache/test_tree": 1, "cache/test_nodes": 1, "cache/test_pools": 1, "api/test_llm": 2},
        ),
        # A package that passes a name on is looked through.
        ({"hybrid_jax/api/llm.py": frozenset({"LLM"})}, {"api/test_llm": 1}),
        ({"tests/cache/pools.py": None}, {"cache/test_pools": 1}),
        ({"tests/text/test_text.py": None}, {"text/test_text": 0}),
        (
            {"tests/cache/conftest.py": frozenset({"frames"})},
            {"cache/test_frames": 1} | {f"cache/test_{x}": 2 for x in ("nodes", "pools", "tree")},
        ),
    ],
)
def test_distances_are_counted_in_imports(tmp_path, changed, expected):
    write(tmp_path, TREE)
    found = distances(import_graph(tmp_path), changed)
    assert found == {f"tests/{test}.py": distance for test, distance in expected.items()}


def test_near_units_come_first_and_then_the_oldest():
    distance = {"a.py": 2, "b.py": 2, "c.py": 1, "d.py": 2}
    age = {"a.py": 1.0, "b.py": 5.0, "b.py::long": 9.0, "c.py": 0.0}
    order = in_order(["a.py", "b.py", "b.py::long", "c.py", "d.py", "e.py"], distance, age)
    assert order == ["c.py", "d.py", "b.py::long", "b.py", "a.py", "e.py"]


# A mistake in the room on the left fails a test in the file on the right.
ROOMS = {
    ("hybrid_jax/cache/tree/radix.py", "RadixTree"): "tests/cache/test_radix.py",
    ("hybrid_jax/schedule/pace.py", "Pace"): "tests/schedule/test_pace.py",
    ("hybrid_jax/text/incremental.py", "StopStrings"): "tests/text/test_text.py",
    ("hybrid_jax/engine/walk.py", "chunk"): "tests/engine/test_short_chunk.py",
    ("pallas_kernels/decay.py", None): "tests/kernels/test_decay.py",
    ("hybrid_jax/api/options.py", None): "tests/api/test_options.py",
    ("hybrid_jax/schedule/scheduler.py", "Scheduler"): "tests/schedule/test_scheduler_plans.py",
    ("hybrid_jax/cli/main.py", "main"): "tests/cli/test_cli.py",
}


@pytest.fixture(scope="module")
def graph(root):
    return import_graph(root)


@pytest.mark.parametrize(("file", "name"), ROOMS)
def test_a_mistake_in_a_room_calls_for_a_test_that_sees_it(graph, file, name):
    found = distances(graph, {file: None if name is None else frozenset({name})})
    assert found[ROOMS[file, name]] <= choice.NEAR


def test_steps_that_are_compiled_for_a_gpu_are_not_far_from_the_engine(graph):
    found = distances(graph, {"hybrid_jax/engine/walk.py": None})
    assert found["tests/aot/test_steps.py"] <= 5
    assert found["tests/engine/test_donation.py"] <= 5


# --- the record ------------------------------------------------------------------------------------------


def test_a_merge_leaves_the_later_of_two_runs():
    text = "a.py quickly old 1\na.py quickly new 2\nb.py aot new 3\nb.py aot gone 4\n"
    record = read_record(text, {"old": 1, "new": 2})
    assert record == {("a.py", "quickly"): Entry("new", 2.0), ("b.py", "aot"): Entry("new", 3.0)}
    assert write_record(record) == "a.py quickly new 2\nb.py aot new 3\n"


def test_a_run_updates_what_it_ran_and_few_lines_change():
    keys = [("a.py", "aot"), ("b.py", "aot"), ("b.py::f", "aot"), ("c.py", "aot")]
    record = {key: Entry("old", 10.0) for key in keys}
    ran = {("a.py", "aot"): 11.0, ("b.py", "aot"): 31.23, ("d.py", "aot"): 0.001}
    assert updated(record, ran, "new", keep_seconds=False) == {
        ("a.py", "aot"): Entry("new", 10.0),
        ("b.py", "aot"): Entry("new", 31.0),
        ("b.py::f", "aot"): Entry("old", 10.0),  # it did not run
        ("c.py", "aot"): Entry("old", 10.0),
        ("d.py", "aot"): Entry("new", 0.1),
    }
    assert updated(record, ran, "new", keep_seconds=True)["b.py", "aot"].seconds == 10.0
    short = {("b.py", "aot"): 12.0, ("b.py::f", "aot"): 2.0}
    assert ("b.py::f", "aot") not in updated(record, short, "new", keep_seconds=False)


def test_a_plan_knows_the_change_since_each_file_ran(tree):
    first = common_commit(tree)
    write(tree, {"hybrid_jax/api/llm.py": "class LLM:\n    pass\n"})
    git(tree, "commit", "-qam", "second")
    second = common_commit(tree)
    write(tree, {"hybrid_jax/cache/tree.py": "class Tree:\n    new = 1\nclass Node:\n    pass\n"})
    lines = [f"tests/api/test_llm.py quickly {first} 3", f"tests/api/test_llm.py aot {second} 3"]
    lines += [f"tests/cache/test_tree.py quickly {'0' * 12} 3"]
    write(tree, {RECORD: "\n".join(lines)})
    git(tree, "add", "-A")
    git(tree, "commit", "-qm", "third")
    plan = make_plan(tree)
    assert plan.distance_of("tests/api/test_llm.py", "quickly") == 1
    # In this job it ran after it ceased to import the tree.
    assert plan.distance_of("tests/api/test_llm.py", "aot") == NOWHERE
    assert plan.distance_of("tests/cache/test_tree.py", "quickly") == 1  # since the last commit
    assert plan.distance_of("tests/text/test_text.py", "quickly") == NOWHERE
    assert "hybrid_jax.cache.tree" in plan.names
    assert plan.age["quickly"].keys() == {"tests/api/test_llm.py"}


def test_a_report_writes_the_record_and_names_what_did_not_run(tree):
    (tree / choice.FOLDER).mkdir(parents=True)
    result = {
        **{"job": "aot", "ran": {"tests/api/test_llm.py": 2.0, "tests/gone.py": 1.0}},
        **{"left": ["tests/text/test_text.py"], "nothing": ["a::b[c]"], "passed": 5, "spine": {}},
        **{"collected": {}, "near": []},
    }
    said = report(tree, [result], everything=False)
    assert "tests/text/test_text.py (aot)" in said
    assert "1 tests had nothing to check\n  a::b[c]" in said
    assert (tree / choice.FOLDER / "not_run.txt").read_text() == "tests/text/test_text.py (aot)\n"
    assert (tree / RECORD).read_text() == f"tests/api/test_llm.py aot {common_commit(tree)} 2\n"


def test_fewer_tests_than_there_must_be_are_named():
    enough = {"collected": choice.FLOORS, "spine": choice.SPINE_FLOORS}
    assert choice.missing([enough]) == []
    less = {"collected": choice.FLOORS | {"cache": 3}, "spine": choice.SPINE_FLOORS | {"engine": 1}}
    found = choice.missing([less])
    assert [line.split()[1] for line in found] == ["tests/cache", "tests/engine"]
    assert choice.missing([less, enough]) == []


def test_a_job_runs_what_is_near_and_leaves_a_result(root, tmp_path):
    """As pytest does it, in a process of its own."""
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps(vars(Plan(last={"tests/test_drawing.py": 1}))))
    given = {"HYBRID_JAX_PLAN": str(plan), "HYBRID_JAX_JOB": "numeric", "HYBRID_JAX_SECONDS": "0"}
    given |= {"HYBRID_JAX_TESTS": "", "HYBRID_JAX_TIME": ""}
    command = [sys.executable, "-m", "pytest", "-q", "tests/test_costs.py", "tests/test_drawing.py"]
    done = subprocess.run(command, cwd=root, env=os.environ | given, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    result = json.loads((tmp_path / "job_numeric.json").read_text())
    assert result["ran"].keys() == {"tests/test_drawing.py"} and result["passed"] >= 4
    assert (result["left"], result["job"]) == (["tests/test_costs.py"], "quickly")
    assert result["collected"]["tests"] > result["passed"] and result["spine"] == {}


# --- while it runs ---------------------------------------------------------------------------------------


def run_of(monkeypatch, far: dict[str, float], seconds: float, near=2, longest=100.0, due=()):
    """Which units a job runs whose tests take as long as the record says: near ones 30 seconds each."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(
        chosen, "time", SimpleNamespace(time=lambda: clock.now, monotonic=lambda: clock.now)
    )
    for name, value in (("SECONDS", seconds), ("LONGEST", longest), ("BEGAN", 0.0)):
        monkeypatch.setattr(chosen, name, value)
    job = Chosen(Plan(seconds={chosen.KIND: far}), made=0.0)
    job.near, job.due = [("near", 30.0)] * near, set(due)
    job.far = {unit: [(unit, took)] for unit, took in far.items()}
    ran = []
    for unit, took in job.order():
        ran.append(unit)
        clock.now += took
    return ran, list(job.far), job.left


def test_near_tests_run_whatever_the_time_and_others_while_it_lasts(monkeypatch):
    far = {"a": 20.0, "b": 50.0, "c": 15.0, "d": 1.0}
    assert run_of(monkeypatch, far, 100) == (["near", "near", "a", "c", "d"], ["b"], [])
    assert run_of(monkeypatch, far, 50) == (["near", "near"], list(far), [])
    assert run_of(monkeypatch, far, float("inf"))[1] == []


def test_the_first_of_the_others_begins_even_if_it_takes_longer_than_there_is_time(monkeypatch):
    assert run_of(monkeypatch, {"a": 500.0, "b": 1.0}, 61) == (["near", "near", "a"], ["b"], [])


def test_tests_near_what_changed_since_they_ran_have_more_time(monkeypatch):
    far = {"a": 20.0, "b": 50.0, "c": 15.0, "d": 1.0}
    assert run_of(monkeypatch, far, 50, due="ab") == (["near", "near", "a", "b"], ["c", "d"], [])


def test_near_tests_without_time_are_named(monkeypatch):
    ran, _, left = run_of(monkeypatch, {}, 50, near=6, longest=100.0)
    assert len(ran) == 4 and left == [("near", 30.0)] * 2
