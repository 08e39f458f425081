"""Cells drawn at random: a seed gives the same cell again, loads are what they say, and a file is gone on with."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest

from benchmarks.cache import drawn_cells, policies
from benchmarks.cache.drawn_cells import DRAWS, DrawnCell, draw_cell, draw_trace, draw_wide_cell
from hybrid_jax.cache.tree.node import common_prefix_len


def cell(
    *names: str, order: str = "alone", first: float = 1.0, requests: int = 60, **changes
) -> DrawnCell:
    """A cell of these loads, a few users each."""
    rng = np.random.default_rng(0)
    few = {"users": 3, "turns least": 8, "most": 32_768, "again": 0.0, "systems": 1}
    loads = []
    for name in names:
        drawn = DRAWS[name](rng)
        loads.append((name, drawn | {key: v for key, v in (few | changes).items() if key in drawn}))
    return DrawnCell(
        seed=7, loads=tuple(loads), order=order, first=first, requests=requests, spec="paper_7b", share=0.2
    )  # fmt: skip


def same(first: list, second: list) -> bool:
    pairs = zip(first, second, strict=True)
    return all((a.whole == b.whole).all() and a.arrival_s == b.arrival_s for a, b in pairs)


def sessions(trace: list) -> list[list]:
    found: dict = {}
    for request in trace:
        found.setdefault(request.session_id, []).append(request)
    return list(found.values())


@pytest.mark.parametrize("names", [("chats",), ("agents", "log"), ("documents",)])
def test_a_seed_gives_the_same_requests_again(names):
    order = "alone" if len(names) == 1 else "and"
    first, second = (draw_trace(cell(*names, order=order, first=0.5)) for _ in range(2))
    assert same(first, second)


def test_seeds_give_all_loads_all_orders_and_capacities_within_bounds():
    cells = [draw_cell(seed) for seed in range(100)]
    assert {name for one in cells for name, _ in one.loads} == set(DRAWS)
    assert {one.order for one in cells} == {"alone", "then", "and"}
    assert {one.spec for one in cells} == set(drawn_cells.SPECS)
    least, most = drawn_cells.SHARES
    assert all(least <= one.share * 1.01 and one.share <= most * 1.01 for one in cells)
    assert draw_cell(3) == draw_cell(3) != draw_cell(4)


def test_requests_are_as_many_as_asked_for_and_in_the_order_of_their_arrival():
    for order in ("then", "and"):
        trace = draw_trace(cell("chats", "documents", order=order, first=0.4))
        times = [request.arrival_s for request in trace]
        assert len(trace) == 60 and times == sorted(times)


def test_one_load_follows_the_other_or_both_come_at_once():
    alone = draw_trace(cell("chats", requests=24))
    followed = draw_trace(cell("chats", "documents", order="then", first=0.4))
    assert same(alone, followed[:24])
    mixed = draw_trace(cell("chats", "documents", order="and", first=0.4))
    of_chats = {request.prompt.tobytes() for request in alone}
    places = [number for number, one in enumerate(mixed) if one.prompt.tobytes() in of_chats]
    assert len(places) == 24 and places[-1] > 40


def test_a_chat_goes_on_from_its_history():
    trace = draw_trace(cell("chats"))
    for turns in sessions(trace):
        for earlier, later in pairwise(turns):
            assert common_prefix_len(earlier.whole, later.prompt) == len(earlier.whole)


def test_an_answer_that_is_asked_for_again_is_left_out_of_the_history():
    trace = draw_trace(cell("chats", again=1.0))
    for turns in sessions(trace):
        shared = {common_prefix_len(a.prompt, b.prompt) for a, b in pairwise(turns)}
        assert shared <= {int(cell("chats").loads[0][1]["system"])}


def test_agents_lose_their_oldest_observation_once_they_have_enough():
    trace = draw_trace(cell("agents", kept=3))
    for turns in sessions(trace):
        whole = [common_prefix_len(a.whole, b.prompt) == len(a.whole) for a, b in pairwise(turns)]
        assert all(whole[:3]) and not any(whole[4:])


def test_documents_are_shared_by_requests_and_never_gone_on_from():
    trace = draw_trace(cell("documents", documents=2, zipf=0.0))
    system = int(cell("documents").loads[0][1]["system"])
    shared = [
        max(common_prefix_len(a.prompt, b.prompt) for a in trace if a is not b) for b in trace
    ]
    assert min(shared) > system
    assert all(common_prefix_len(a.whole, b.prompt) < len(a.prompt) for a, b in pairwise(trace))


@pytest.fixture
def small(monkeypatch, tmp_path):
    """Few requests a cell; returns what a run with these arguments writes."""
    monkeypatch.setattr(drawn_cells, "REQUESTS", (20, 30))

    def run(*arguments: str) -> dict:
        path = tmp_path / "drawn.json"
        policies.main(["--drawn", "judging", "--json", str(path), *arguments])
        return json.loads(path.read_text())

    return run


def test_a_file_is_gone_on_with_and_judged_again(small, monkeypatch):
    first = small("--cells", "2")
    assert [one["seed"] for one in first["cells"]] == [1, 3]
    names = {"lru", "sglang", "marconi", "adaptive", "optimal"}
    assert all(names <= set(one) for one in first["cells"])
    more = small("--cells", "3")
    assert more["cells"][:2] == first["cells"] and more["cells"][2]["seed"] == 5
    asked = []
    monkeypatch.setattr(policies, "rates", lambda *a: asked.append(a[-1]) or {"adaptive": 0.0})
    again = small("--again")
    assert asked == [("adaptive",)] * 3
    assert [one["cells"] for one in again["attempts"]] == [2, 3, 3]
    assert again["attempts"][-1]["worst_cells"][0]["points"] <= again["attempts"][0]["worst_points"]
    assert all(one["adaptive"] == 0 and one["lru"] >= 0 for one in again["cells"])


def test_a_summary_counts_cells_by_how_far_adaptive_is_behind():
    plain = {
        "seed": 0,
        "trace": "chats",
        "spec": "paper_7b",
        "share": 0.1,
        "lru": 0.5,
        "sglang": 0.4,
    }
    gains = (0.1, -0.004, -0.007, -0.02)  # over lru, the best of the three
    cells = [plain | {"marconi": 0.45, "adaptive": 0.5 + gain, "optimal": 0.6} for gain in gains]
    cells[1]["optimal"] = cells[1]["sglang"]  # no gap
    found = policies.drawn_summary(cells)
    assert (found["within_half_a_point_%"], found["within_a_point_%"]) == (50, 75)
    assert (found["cells"], found["cells_with_a_gap"]) == (4, 3)
    assert found["within_half_a_point_with_a_gap_%"] == 33.3
    assert found["worst_points"] == -2 and found["mean_points"] == pytest.approx(1.72)
    assert [row["points"] for row in found["worst_cells"]] == [-2, -0.7, -0.4, 10]
    # (100 + 46.5 + 40) / 3
    assert found["mean_share_of_gap_closed_%"] == pytest.approx(62.17, abs=0.01)


# --- wide cells -------------------------------------------------------------------------------------


def test_wide_cells_cover_turns_spreads_arrivals_capacities_and_both_kinds_of_bytes():
    cells = [draw_wide_cell(seed) for seed in range(300)]
    assert draw_wide_cell(3) == draw_wide_cell(3) != draw_wide_cell(5)
    assert {one.spec for one in cells} == {"paper_7b", "paper_7b_real"}
    shares = [one.share for one in cells]
    assert 0.02 * 0.99 <= min(shares) < 0.03 and 0.6 < max(shares) <= 0.8 * 1.01
    chats = [drawn for one in cells for name, drawn in one.loads if name == "chats"]
    turns = [drawn["turns least"] + drawn["turns more"] for drawn in chats]
    assert 1.9 <= min(turns) < 3 and 45 < max(turns) <= 60.6
    for name in ("asked sigma", "answered sigma", "pause sigma"):
        values = [drawn[name] for drawn in chats]
        assert 0.2 <= min(values) < 0.3 and 1.9 < max(values) <= 2
    for name in ("ramp", "between"):
        values = [drawn[name] for drawn in chats]
        assert max(values) > 500 * min(values)


def test_what_a_file_lacks_of_its_cells_is_run_and_the_rest_is_kept(tmp_path, monkeypatch, capsys):
    ran = []

    def rates(trace, spec, capacity, names):
        ran.append(names)
        return {name: 0.5 for name in names}

    monkeypatch.setattr(policies, "rates", rates)
    monkeypatch.setattr(policies, "draw_trace", lambda drawn: [])
    monkeypatch.setattr(policies, "unbounded_bytes", lambda trace, spec: 10**12)
    run = ["--drawn", "judging", "--wide", "--json", str(tmp_path / "cells.json"), "--cells"]
    policies.main([*run, "1", "--policies", "lru,sglang,adaptive"])
    policies.main([*run, "2", "--policies", "lru,sglang,adaptive,optimal"])
    policies.main([*run, "2", "--policies", "lru,sglang,adaptive,optimal"])
    assert ran == [
        ("lru", "sglang", "adaptive"), ("optimal",), ("lru", "sglang", "adaptive", "optimal"),
    ]  # fmt: skip
    report = json.loads((tmp_path / "cells.json").read_text())
    assert [cell["seed"] for cell in report["cells"]] == [1, 3]
    assert len(report["attempts"]) == 3
