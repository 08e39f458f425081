"""Points: their clock, the bins they pass, what counts as what, and how prompts relate; worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from hybrid_jax.cache.policy.points import (
    BRANCH,
    CONTINUED,
    END,
    FRESH,
    OTHER,
    PARTED,
    TYPICAL_AGE,
    Points,
    Relation,
)
from hybrid_jax.cache.policy.reuse import LIVED, LOST, STEPS, USED
from hybrid_jax.cache.tree.node import Node

NEW = Relation(kind=FRESH, run=0)


def node_at(end: int) -> Node:
    return Node(np.zeros(end, np.int32), 0)


def requests(points: Points, count: int) -> None:
    for _ in range(count):
        points.next_request()


def counts(points: Points) -> dict[str, list[int]]:
    """What was counted in the class of all points: per bin, up to the last that is not empty."""
    found = {}
    for name, what in (("used", USED), ("lived", LIVED), ("lost", LOST)):
        row = points.tables.counts()[what, 0]
        found[name] = row[: row.nonzero()[0].max(initial=-1) + 1].tolist()
    return found


@pytest.fixture
def points():
    """Time has passed already; nothing was seen yet."""
    made = Points()
    requests(made, 1)
    return made


@pytest.fixture
def end(points):
    """The end of a sequence of 100 tokens, just made."""
    node = node_at(100)
    points.add(node, NEW, END)
    return node


# --- the clock ------------------------------------------------------------------------------------


def speed(points: Points) -> float:
    """By how much the next request advances the clock."""
    before = points._clock
    points.next_request()
    return points._clock - before


def test_before_the_first_reuse_a_request_is_one_unit(points):
    assert speed(points) == 1


def test_a_request_is_the_typical_age_over_the_mean_gap_of_reuses(points, end):
    requests(points, 8)
    points.use(end)
    assert speed(points) == pytest.approx(TYPICAL_AGE / 8)
    requests(points, 1)
    points.use(end)
    assert speed(points) == pytest.approx(TYPICAL_AGE / (8 * 2) ** 0.5)  # geometric


def test_a_use_by_the_very_next_or_the_same_request_is_a_gap_of_one(points, end):
    points.use(end)
    assert speed(points) == TYPICAL_AGE


def test_gaps_of_branches_used_often_do_not_set_the_clock(points):
    branch = node_at(50)
    points.add(branch, NEW, BRANCH, share=0.5)
    for _ in range(2):
        requests(points, 4)
        points.use(branch)
    for _ in range(5):  # every request uses it
        requests(points, 1)
        points.use(branch)
    assert speed(points) == pytest.approx(TYPICAL_AGE / 4)


def test_the_gap_of_a_use_that_is_not_timed_does_not_set_the_clock(points, end):
    requests(points, 8)
    points.use(end, timed=False)
    assert speed(points) == 1 and counts(points)["used"] == [0, 0, 0, 1]


def test_old_gaps_fade_behind_the_newest_fifty(points, end):
    for _ in range(50):
        points.use(end)  # gaps of 1
    requests(points, 8)
    points.use(end)
    # The mean of logarithms moves by a fiftieth of log 8.
    assert speed(points) == pytest.approx(TYPICAL_AGE / 8 ** (1 / 50))


def test_tables_are_updated_every_thirty_two_requests(monkeypatch):
    points, updated_at = Points(), []
    monkeypatch.setattr(points.tables, "update", lambda: updated_at.append(points._request))
    requests(points, 65)
    assert updated_at == [32, 64]


# --- what is counted ------------------------------------------------------------------------------


def test_a_use_counts_in_the_bin_of_its_age_and_as_lived_in_those_before(points, end):
    requests(points, 3)  # age 4: bins of 1 and 2 are after it
    points.use(end)
    assert counts(points) == {"used": [0, 0, 1], "lived": [1, 1], "lost": []}


def test_the_first_request_finds_an_age_of_one(points, end):
    points.use(end)
    assert counts(points) == {"used": [1], "lived": [], "lost": []}


def test_an_age_of_one_stays_one_at_any_time(points, end):
    # 1 + 0.4 - 0.4 is less than 1 in floating point, and below the first bin.
    points._clock = 0.4
    assert 1 + points._clock - points._clock < 1
    points.part(end, 50)
    points.use(end)
    assert counts(points)["used"] == [1]


def test_a_clock_that_jumps_over_bins_passes_every_one_of_them_once(points, end):
    other = node_at(40)
    points.add(other, NEW, END)
    points.use(other)  # a gap of 1: 32 units a request
    requests(points, 1)  # age 33: 1, 2, 4, 8 and 16 are behind both
    assert counts(points)["lived"] == [2, 2, 2, 2, 2]
    assert end.note.step == other.note.step == 5 * STEPS  # the first part of 32 to 64
    requests(points, 1)  # age 65: in 64 to 128
    assert counts(points)["lived"] == [2] * 6
    assert end.note.step == 6 * STEPS


def test_a_point_moves_through_the_parts_of_a_bin(points, end):
    steps = []
    for _ in range(9):  # ages 2 to 10: parts of 1, of 2 and of 4
        requests(points, 1)
        steps.append(divmod(end.note.step, STEPS))
    assert steps == [(1, 0), (1, 1), (2, 0), (2, 0), (2, 1), (2, 1), (3, 0), (3, 0), (3, 0)]


def test_a_life_that_outlasts_all_bins_stays_in_the_last_step(points, end):
    points._clock += 10**6
    requests(points, 2)
    assert end.note.step == len(points.tables.steps) - 1
    assert counts(points)["lived"] == [1] * 17


def test_a_use_counts_for_the_class_that_the_point_was_in(points, end):
    before = points.tables.class_of(end.note.features)
    points.use(end)
    after = end.note.life_class
    assert after != before == points.tables.class_of(((END, 0, False), (FRESH, 0), 7))
    assert after == points.tables.class_of(((END, 1, False), (FRESH, 0), 7))
    assert points.tables.counts()[USED, [before, after], 0].tolist() == [1, 0]


def test_a_life_that_ended_never_counts_again(points, end):
    requests(points, 2)  # age 3
    points.part(end, 50)  # lost in the bin of 2; another life begins
    assert counts(points) == {"used": [], "lived": [1], "lost": [0, 1]}
    requests(
        points, 3
    )  # the first life would be 6 now and have lived through 2 to 4; the second is 4
    assert counts(points) == {"used": [], "lived": [2, 1], "lost": [0, 1]}
    assert end.note.step == 2 * STEPS


def test_what_is_forgotten_is_lost_once_and_not_counted_after(points, end):
    requests(points, 1)
    points.forget(end)
    points.forget(end)
    requests(points, 10)
    assert end.note is None
    assert counts(points) == {"used": [], "lived": [1], "lost": [0, 1]}


def test_moved_names_every_node_once_and_none_that_was_forgotten(points, end):
    other, moved, late = node_at(40), points.watch(), points.watch()
    points.add(other, NEW, END)
    requests(points, 12)
    assert list(moved) == list(late) == [other, end]
    late.clear()
    points.forget(other)
    requests(points, 12)
    assert list(moved) == list(late) == [end]


def test_entries_of_forgotten_nodes_go_as_time_passes(points, end):
    # An entry waits for the next step of an age: a quarter of the age at most, or a request.
    requests(points, 12)
    point = end.note
    points.forget(end)
    assert point.node is None  # an entry keeps no tokens
    requests(points, 4)
    assert not any(points._coming)


# --- points that are points already ---------------------------------------------------------------


def test_the_end_of_the_same_prompt_again_counts_as_used(points, end):
    point = end.note
    requests(points, 1)
    points.add(end, Relation(kind=PARTED, run=1), END)
    assert end.note is point and (point.hits, point.relation) == (1, FRESH)
    assert counts(points) == {"used": [0, 1], "lived": [1], "lost": []}


def test_an_end_where_paths_part_becomes_a_branch_and_lives_on(points, end):
    life = end.note.life
    requests(points, 1)
    points.add(end, Relation(kind=PARTED, run=1), BRANCH, share=0.7)
    assert (end.note.kind, end.note.life, end.note.hits) == (BRANCH, life, 0)
    assert counts(points)["used"] == counts(points)["lost"] == []
    points.use(end)
    assert points.tables.class_of(((BRANCH, 1, False), (FRESH, 0), 7)) == end.note.life_class


@pytest.mark.parametrize("kind", [END, BRANCH])
def test_another_point_is_replaced_when_it_is_known_what_it_is(points, kind):
    node = node_at(100)
    points.add(node, NEW, OTHER)
    before = node.note
    requests(points, 1)
    points.add(node, Relation(kind=CONTINUED, run=3), kind, share=0.5)
    assert node.note is not before and not before.life and before.node is None
    assert (node.note.kind, node.note.relation) == (kind, CONTINUED)
    assert node.note.detail == (3 if kind == END else 2)
    assert counts(points) == {"used": [], "lived": [1], "lost": [0, 1]}


def test_a_point_that_is_known_is_not_made_another(points, end):
    point = end.note
    points.add(end, NEW, OTHER)
    assert end.note is point and point.life == 1 and counts(points)["lost"] == []


@pytest.mark.parametrize(("share", "fifth"), [(0.5, 2), (0.79, 3), (0.99, 4), (1.0, 4)])
def test_a_branch_tells_the_share_of_the_prompt_above_it_in_fifths(points, share, fifth):
    node = node_at(100)
    points.add(node, NEW, BRANCH, share=share)
    assert node.note.detail == fifth


# --- where a later path parts above a point -------------------------------------------------------


@pytest.mark.parametrize(("position", "split"), [(0, 1), (19, 1), (20, 2), (50, 3), (99, 5)])
def test_a_point_notes_how_far_above_it_a_path_parted(points, end, position, split):
    points.part(end, position)
    assert end.note.split == split
    assert counts(points)["lost"] == [1]
    assert end.note.life_class == points.tables.class_of(((END, 0, True), (FRESH, split), 7))


def test_only_the_first_parting_is_noted(points, end):
    points.part(end, 50)
    life = end.note.life
    points.part(end, 90)
    assert (end.note.split, end.note.life) == (3, life)
    assert counts(points)["lost"] == [1]


def test_what_was_gone_beyond_is_dead_until_proven_alive(points, end):
    branch, used = node_at(60), node_at(80)
    points.add(branch, NEW, BRANCH)
    points.add(used, NEW, END)
    assert [n.note.prior for n in (end, branch, used)] == [1, 1, 1]
    points.use(used)
    points.use(branch)
    points.part(end, 50)
    assert [n.note.prior for n in (end, branch, used)] == [0.001, 1, 0.001]
    index = points.tables.index
    assert index[end.note.life_class, 0] < index[branch.note.life_class, 0] / 100


# --- features -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("end", "depth"), [(1, 2), (2, 2), (3, 3), (100, 7), (127, 8), (5000, 13)])
def test_depth_counts_octaves(points, end, depth):
    node = node_at(end)
    points.add(node, NEW, END)
    assert node.note.features[2] == depth


def test_a_branch_used_often_tells_how_often_in_octaves(points):
    node, details = node_at(100), []
    points.add(node, NEW, BRANCH, share=0.3)
    for _ in range(70):
        details.append(node.note.features[1][1])
        points.use(node)
    # A fifth for 0 and 1 uses, then 4 + octaves of uses, 9 at most.
    assert details[:9] == [1, 1, 5, 5, 6, 6, 6, 6, 7]
    assert details[16] == 8 and details[32] == details[69] == 9
    assert node.note.features[0] == (BRANCH, 2, False)


# --- how a prompt relates to what is known --------------------------------------------------------


def with_point(points: Points, end: int, kind: int, relation: int, run: int) -> Node:
    node = node_at(end)
    points.add(node, Relation(kind=relation, run=run), kind)
    return node


def test_a_prompt_of_which_less_than_half_is_known_is_fresh(points, end):
    assert points.relate(end, 100, 201) == NEW
    assert points.relate(end, 100, 200).kind == CONTINUED
    assert points.relate(None, 0, 5) == NEW


@pytest.mark.parametrize(("known_len", "kind"), [(100, CONTINUED), (101, CONTINUED), (103, PARTED)])
def test_going_on_from_an_end_may_start_a_little_behind_it(points, end, known_len, kind):
    # 2 % of 150 tokens are 3: a parting 3 after the end is one of its own.
    assert points.relate(end, known_len, 150).kind == kind


def test_what_parts_from_a_path_or_a_branch_is_parted(points):
    branch = with_point(points, 100, BRANCH, FRESH, 0)
    assert points.relate(branch, 100, 150) == Relation(kind=PARTED, run=1)
    assert points.relate(None, 100, 150) == Relation(kind=PARTED, run=1)


@pytest.mark.parametrize(
    ("relation", "run", "expected"),
    [(FRESH, 0, 1), (PARTED, 2, 1), (CONTINUED, 1, 2), (CONTINUED, 7, 8), (CONTINUED, 8, 8)],
)
def test_going_on_again_and_again_makes_a_run_of_eight_at_most(points, relation, run, expected):
    last = with_point(points, 100, END, relation, run)
    assert points.relate(last, 100, 150) == Relation(kind=CONTINUED, run=expected)


@pytest.mark.parametrize(
    ("relation", "expected"), [(FRESH, 1), (CONTINUED, 1), (PARTED, 2)]
)  # fmt: skip
def test_parting_from_what_had_parted_makes_a_run_of_two(points, relation, expected):
    last = with_point(points, 100, END, relation, 1)
    assert points.relate(last, 140, 200) == Relation(kind=PARTED, run=expected)
