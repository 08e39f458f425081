"""The comparison of two commits says what differs, and nothing of what does not."""

from __future__ import annotations

import copy

import pytest

from tests.compare_commits import ROOT, compare, one_model, work_tree
from tests.drawing import left_to_all

RESULT = {
    "models": {
        "bamba": {
            "greedy": {"tokens": [[1, 2]], "bits": [["0x1p-1", "0x1p+0"]]},
            "stats": {"folds": 3, "num_traces": 5},
            "seconds": 1.5,
        }
    },
    "aot": {"decode 64": {"launches": 174, "temp_bytes": 1000}},
}


def changed(where: str, value) -> dict:
    result = copy.deepcopy(RESULT)
    *path, last = where.split("/")
    part = result
    for name in path:
        part = part[name]
    part[last] = value
    return result


@pytest.mark.parametrize(
    "where, value, said",
    [
        ("models/bamba/greedy/tokens", [[1, 3]], "/models/bamba/greedy/tokens: [[1, 2]] -> "),
        ("models/bamba/stats/folds", 2, "/models/bamba/stats/folds: 3 -> 2"),
        ("models/bamba/stats/num_traces", 6, "/models/bamba/stats/num_traces: 5 -> 6"),
        ("models/bamba/stats/new", 6, "/models/bamba/stats/new: only now"),
        ("models/granite", {}, "/models/granite: only now"),
        ("models/bamba/greedy/bits", [["0x1p-1", "0x1.8p+0"]], "(bits) /models/bamba/greedy/bits"),
        ("models/bamba/greedy/bits", [["0x1p-1"]], "/models/bamba/greedy/bits: another number"),
        ("aot/decode 64/launches", 175, "/aot/decode 64/launches: 174 -> 175"),
        ("aot/decode 64/temp_bytes", 1001, "/aot/decode 64/temp_bytes: 1000 -> 1001"),
    ],
)
def test_what_differs_is_said(where, value, said):
    (line,) = compare(RESULT, changed(where, value))
    assert line.startswith(said)


@pytest.mark.parametrize(
    "where, value",
    [
        ("aot/decode 64/launches", 170),
        ("models/bamba/stats/num_traces", 4),
        ("models/bamba/seconds", 2.5),
        ("aot", RESULT["aot"]),
    ],
)
def test_what_may_change_is_not_said(where, value):
    assert compare(RESULT, changed(where, value)) == []


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs the history")
def test_a_commit_s_files_are_unpacked():
    with work_tree("HEAD") as folder:
        assert (folder / "hybrid_jax/__init__.py").is_file()
    assert not folder.exists()


@pytest.mark.slow
@left_to_all
def test_one_model_goes_through_hits_forks_and_evictions():
    found = one_model("llama", "float32", exact=False)
    assert sum(found["again"]["cached"]) > 100 and found["stats"]["forks"] > 0
    assert found["stats"]["evicted_page_frames"] > 0
    assert found["plain"]["tokens"] == found["greedy"]["tokens"][:3]
    assert min(map(len, found["greedy"]["bits"])) == 800 and len(found["prompt"]["bits"][0]) > 200
    assert found == one_model("llama", "float32", exact=False)
