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
    readers_of,
    report,
    updated,
    write_record,
)
from tests.chosen import Chosen
from tests.drawing import spine
from tests.imports import Unreadable, changed_names, import_graph

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
    assert changed_names(CODE.encode(), CODE.replace(before, after).encode()) == names


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
        assert readers_of(tree, {path: None}, graph) == {"hybrid_jax/api/llm.py"}
    for path in ("docs/page.md", "docs/site.css", "mkdocs.yml"):
        assert readers_of(tree, {path: None}, graph) == {"tests/docs/test_site.py"}
    assert readers_of(tree, {RECORD: None, "Makefile": None}, graph) == set()


def test_a_folder_named_like_a_room_is_looked_for_with_the_folder_above_it(tree):
    write(tree, {"tests/text/test_text.py": 'JOB, DATA = "cache", "x/text/"\n'})
    graph = import_graph(tree)
    assert readers_of(tree, {"benchmarks/y/cache/a.json": None}, graph) == set()
    assert readers_of(tree, {"benchmarks/x/text/a.json": None}, graph) == {
        "tests/text/test_text.py"
    }


def test_a_program_is_near_to_what_runs_it_by_name(tree):
    write(tree, {"tests/api/program.py": "", "docs/pages.py": "", "hybrid_jax/cache/tree.py": ""})
    write(tree, {"tests/text/test_text.py": 'RUN = "-m tests.api.program", "tree.py"\n'})
    write(tree, {"tests/api/test_llm.py": 'RUN = Path(__file__).with_name("program.py")\n'})
    graph = import_graph(tree)
    expected = {"tests/text/test_text.py", "tests/api/test_llm.py"}
    assert readers_of(tree, {"tests/api/program.py": None}, graph) == expected
    assert readers_of(tree, {"docs/pages.py": None}, graph) == {"tests/docs/test_site.py"}
    assert readers_of(tree, {"hybrid_jax/cache/tree.py": None}, graph) == set()


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["LLM"], {"tests/api/test_llm.py"}),
        (["Other"], set()),
        (["_HOMES"], {"tests/api/test_llm.py"}),
    ],
)
def test_a_package_is_near_to_what_takes_the_changed_names_from_it(tree, names, expected):
    changed = {"hybrid_jax/__init__.py": frozenset(names)}
    assert expected <= readers_of(tree, changed, import_graph(tree))
    assert "hybrid_jax/api/llm.py" not in readers_of(tree, changed, import_graph(tree))
    assert bool(expected) == (
        "tests/api/test_llm.py" in readers_of(tree, changed, import_graph(tree))
    )


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


CONFTEST = """
@pytest.fixture
def frames(): pass
@pytest.fixture(autouse=True)
def quiet(frames, noise): pass
@pytest.fixture
def noise(): pass
def pytest_configure(): pass
print(1)
"""


@pytest.mark.parametrize(
    ("before", "after", "all_below"),
    [
        ("def frames(): pass", "def frames(): 1", True),  # `quiet` asks for it
        ("def noise(): pass", "def noise(): 1", True),
        ("def pytest_configure(): pass", "def pytest_configure(): 1", True),
        ("print(1)", "print(2)", True),
        ("def noise(): pass", "def noise(): pass\ndef more(): pass", False),
    ],
)
def test_what_a_conftest_does_unasked_is_imported_by_all_tests_below_it(
    tree, before, after, all_below
):
    write(tree, {"tests/cache/conftest.py": CONFTEST.replace(before, after)})
    names = changed_names(CONFTEST.encode(), CONFTEST.replace(before, after).encode())
    found = distances(import_graph(tree), {"tests/cache/conftest.py": names})
    assert found.keys() == {
        f"tests/cache/test_{x}.py" for x in ("tree", "nodes", "pools", "frames")
    }
    assert (set(found.values()) == {1}) == all_below


def test_a_conftest_without_fixtures_or_that_is_gone_is_imported_as_well(tree):
    write(tree, {"tests/api/conftest.py": "print(1)"})
    assert distances(import_graph(tree), {"tests/api/conftest.py": None}) == {
        "tests/api/test_llm.py": 1
    }
    gone = "tests/text/conftest.py"
    assert distances(import_graph(tree, gone=[gone]), {gone: None}) == {
        "tests/text/test_text.py": 1
    }


# --- what is damaged or missing ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"def f(:\n", "tree.py:1: "),
        (b"A = 1\nB = '\xff'\n", "tree.py:[12]: .*utf-8"),
        (b"A = '\0'\n", "tree.py:1: .*null bytes"),
        (b"A = 1\nfrom . import b\n", "tree.py:2: a relative import; write the whole name"),
    ],
)
def test_a_file_that_is_no_python_ends_the_choice_in_one_line(tree, monkeypatch, text, words):
    (tree / "hybrid_jax/cache/tree.py").write_bytes(text)
    with pytest.raises(Unreadable, match=words):
        make_plan(tree)
    monkeypatch.setattr(choice, "ROOT", tree)
    with pytest.raises(SystemExit, match=f"^make: which tests are near .* told: .*{words}"):
        choice.main(["plan"])
    assert not list((tree / choice.FOLDER).glob("*.json"))


def test_a_file_that_was_no_python_before_has_changed_as_a_whole(tree):
    file = "hybrid_jax/cache/tree.py"
    (tree / file).write_bytes(b"A = '\xff'\ndef f(:\n")
    git(tree, "commit", "-qam", "second")
    write(tree, {file: TREE[file]})
    assert changes(tree, "HEAD") == {file: None}
    assert make_plan(tree).last.get("tests/cache/test_tree.py") is None  # as two commits ago
    git(tree, "commit", "-qam", "third")
    assert make_plan(tree).last["tests/cache/test_tree.py"] == 1


def test_files_and_names_in_any_alphabet_are_compared(tree):
    texts = {"tests/cache/größe.py": "A = 'ü'\n", "hybrid_jax/cache/tree.py": "A = 'öö'\nB = 1\n"}
    write(tree, texts | {"tests/cache/latin.py": ""})
    (tree / "tests/cache/latin.py").write_bytes("# coding: latin-1\nA = 'ü'\n".encode("latin-1"))
    git(tree, "add", "-A")
    git(tree, "commit", "-qm", "second")
    for file in (*texts, "tests/cache/latin.py"):
        with (tree / file).open("ab") as stream:
            stream.write(b"C = 1\n")
    write(tree, {"tests/cache/neu ß.txt": ""})
    assert changes(tree, "HEAD") == {
        **dict.fromkeys(("tests/cache/latin.py", *texts), frozenset("C")),
        "tests/cache/neu ß.txt": None,
    }
    assert make_plan(tree).notes


def test_in_a_folder_of_a_larger_repository_paths_begin_at_the_folder(tmp_path):
    root = tmp_path / "below"
    write(root, TREE)
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "first")
    write(root, {"hybrid_jax/cache/tree.py": TREE["hybrid_jax/cache/tree.py"] + "new = 1\n"})
    write(root, {"tests/new.py": ""})
    expected = {"hybrid_jax/cache/tree.py": {"new"}, "tests/new.py": None}
    assert changes(root, "HEAD") == expected


def test_a_link_of_an_editor_is_no_file_of_python(tree):
    (tree / "tests/cache/.#test_tree.py").symlink_to("me@machine.1")
    assert make_plan(tree).last == {}


def test_what_still_imports_a_file_that_is_gone_is_near(tree):
    late = "def test_late():\n    from hybrid_jax.cache.tree import Tree\n"
    write(tree, {"tests/text/test_text.py": late})
    git(tree, "commit", "-qam", "second")
    git(tree, "commit", "-qm", "third", "--allow-empty")
    (tree / "hybrid_jax/cache/tree.py").unlink()
    assert make_plan(tree).last["tests/text/test_text.py"] == 1
    git(tree, "checkout", "hybrid_jax/cache/tree.py")
    git(tree, "mv", "hybrid_jax/cache/tree.py", "hybrid_jax/cache/wood.py")
    assert make_plan(tree).last["tests/text/test_text.py"] == 1


def noted(plan: Plan, *words: str) -> bool:
    """Whether one line says all of it, and no other line speaks of something else than the record's files."""
    others = [x for x in plan.notes if "have no line in" not in x]
    return len(others) == 1 and all(word in others[0] for word in words)


def test_without_git_one_line_says_so_and_nothing_is_near(tmp_path):
    write(tmp_path, TREE | {RECORD: "tests/api/test_llm.py quickly abc 3\n"})
    plan = make_plan(tmp_path)
    assert plan.last == {} and plan.seconds == {"quickly": {"tests/api/test_llm.py": 3.0}}
    assert [x for x in plan.notes if "git does not say what changed" in x and "TIME=all" in x]
    assert common_commit(tmp_path) is None
    (tmp_path / choice.FOLDER).mkdir(parents=True)
    assert "no commit, so tests/record.txt stays as it is" in report(tmp_path, [], everything=False)


def test_of_a_shallow_clone_what_is_not_committed_is_near_and_a_line_says_what_is_missing(
    tree, tmp_path_factory
):
    first = common_commit(tree)
    write(tree, {RECORD: f"tests/api/test_llm.py quickly {first} 3\n"})
    git(tree, "add", "-A")
    git(tree, "commit", "-qm", "second")
    clone = tmp_path_factory.mktemp("clone")
    git(clone, "clone", "-q", "--depth=1", f"file://{tree}", ".")
    write(clone, {"hybrid_jax/cache/tree.py": "class Tree:\n    new = 1\nclass Node:\n    pass\n"})
    plan = make_plan(clone)
    assert plan.last["tests/cache/test_tree.py"] == 1 and "tests/text/test_text.py" not in plan.last
    assert plan.age == {} and plan.distance_of("tests/api/test_llm.py", "quickly") == 2
    missing = [x for x in plan.notes if "git fetch --deepen=1" in x or first in x]
    assert len(missing) == 2 and "1 of its lines count as of tests that never ran" in missing[0]


DAMAGED = {
    "<<<<<<< HEAD": "got '<<<<<<< HEAD'",
    "a.py quickly abc": "got 'a.py quickly abc'",
    "a.py quickly abc soon": "got 'a.py quickly abc soon'",
    "a.py quickly abc nan": "nan",
    "a.py quickly --all 3": "--all",
    "\0\ufffd": "got ",
}


@pytest.mark.parametrize("line", DAMAGED)
def test_a_damaged_line_of_the_record_is_left_out_and_named(tree, line):
    first = common_commit(tree)
    good = f"tests/api/test_llm.py quickly {first} 3"
    write(tree, {RECORD: f"{good}\n{line}\n"})
    git(tree, "add", "-A")
    git(tree, "commit", "-qm", "second")
    plan = make_plan(tree)
    assert plan.seconds == {"quickly": {"tests/api/test_llm.py": 3.0}}
    assert noted(plan, f"{RECORD}:2: ", DAMAGED[line], "1 such lines are left out")
    (tree / choice.FOLDER).mkdir(parents=True)
    report(tree, [], everything=False)
    assert (tree / RECORD).read_text() == good + "\n"


def test_an_empty_record_is_said(tree):
    for text in ("", "\n"):
        write(tree, {RECORD: text})
        git(tree, "add", "-A")
        git(tree, "commit", "-qm", "more")
        assert any("have no line in tests/record.txt" in note for note in make_plan(tree).notes)


def test_a_change_of_what_is_installed_is_said(tree):
    write(tree, {"pyproject.toml": ""})
    git(tree, "add", "-A")
    git(tree, "commit", "-qm", "second")
    assert noted(make_plan(tree), "pyproject.toml changed, and all tests run with what it installs")


def test_of_a_changed_file_that_no_test_imports_the_nearest_tests_run_whole(tree, monkeypatch):
    write(tree, {"hybrid_jax/cache/deep.py": "A = 1\n", "hybrid_jax/cache/lone.py": "A = 1\n"})
    write(
        tree, {"hybrid_jax/cache/tree.py": "from hybrid_jax.cache.deep import A\nclass Tree: A\n"}
    )
    git(tree, "add", "-A")
    git(tree, "commit", "-qm", "second")
    git(tree, "commit", "-qm", "third", "--allow-empty")
    write(tree, {"hybrid_jax/cache/deep.py": "A = 2\n"})
    plan = make_plan(tree)
    assert plan.last["tests/cache/test_tree.py"] == 1 and plan.last["tests/api/test_llm.py"] == 3
    monkeypatch.setattr(choice, "FEW", 0)
    plan = make_plan(tree)
    assert plan.last["tests/cache/test_tree.py"] == 2
    assert noted(
        plan, "no test file imports hybrid_jax/cache/deep.py", "2 test files at distance 2"
    )
    write(
        tree, TREE | {"hybrid_jax/cache/deep.py": "A = 1\n", "hybrid_jax/cache/lone.py": "A = 2\n"}
    )
    assert any(
        "lone.py, which changed; there are none at any distance" in x for x in make_plan(tree).notes
    )


def test_a_result_that_is_no_json_is_named_and_fails(tree, monkeypatch, capsys):
    monkeypatch.setattr(choice, "ROOT", tree)
    monkeypatch.setattr(choice, "FLOORS", {})
    monkeypatch.setattr(choice, "SPINE_FLOORS", {})
    write(tree, {f"{choice.FOLDER}/job_aot.json": "{"})
    with pytest.raises(SystemExit, match="True"):
        choice.main(["report"])
    assert "job_aot.json: a job left no whole result" in capsys.readouterr().out
    (tree / choice.FOLDER / "job_aot.json").unlink()
    with pytest.raises(SystemExit, match="False"):
        choice.main(["report", "all", "one_python"])
    with pytest.raises(SystemExit, match="usage: python -m tests.choice plan"):
        choice.main(["reprot"])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"HYBRID_JAX_PLAN": "gone.json"},
            "gone.json must be a plan .* run python -m tests.choice plan",
        ),
        ({"HYBRID_JAX_PLAN": "plan.json"}, "plan.json must be a plan"),
        (
            {"HYBRID_JAX_SECONDS": "soon"},
            "HYBRID_JAX_SECONDS must be a number of seconds, got 'soon'",
        ),
    ],
)
def test_a_job_without_a_plan_ends_in_one_line(tmp_path, monkeypatch, given, words):
    write(tmp_path, {"plan.json": '{"nothing": 1}'})
    monkeypatch.chdir(tmp_path)
    plan = given.get("HYBRID_JAX_PLAN")
    with pytest.raises(pytest.UsageError, match=words):
        chosen.read_plan(plan) if plan else chosen.seconds_in(given)


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
    files = {
        unit.partition("::")[0] for unit in result["ran"]
    }  # a long test has an entry of its own
    assert files == {"tests/test_drawing.py"} and result["passed"] >= 4
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
