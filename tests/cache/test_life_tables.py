"""Life tables: hazards from counts, the index from hazards, classes under classes; worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from hybrid_jax.cache.policy import reuse
from hybrid_jax.cache.policy.reuse import LIVED, LOST, STEPS, USED, LifeTables, age_edges

FIRST = 0  # bin


def filled(tables: LifeTables, number: int, used: int, lived: int, lost: int, age_bin=FIRST):
    for what, count in ((USED, used), (LIVED, lived), (LOST, lost)):
        for _ in range(count):
            tables.count(number, age_bin, what)


@pytest.fixture
def two_bins(monkeypatch):
    """Tables over the ages 1 to 2 and 2 to 4."""
    monkeypatch.setattr(reuse, "age_edges", lambda: np.array([1.0, 2.0, 4.0]))
    return LifeTables()


# --- bins -----------------------------------------------------------------------------------------


def test_bins_double_and_reach_the_greatest_age():
    assert age_edges().tolist() == [2.0**power for power in range(19)]
    assert LifeTables().num_bins == 18


@pytest.mark.parametrize(
    ("age", "age_bin"), [(1, 0), (1.99, 0), (2, 1), (3.9, 1), (4, 2), (131_072, 17), (10**9, 17)]
)
def test_an_age_is_in_the_bin_whose_bounds_enclose_it_and_the_last_has_no_end(age, age_bin):
    assert LifeTables().bin_of(age) == age_bin


def test_steps_are_two_equal_parts_of_every_bin(two_bins):
    assert two_bins.steps == [1, 1.5, 2, 3]


# --- hazards --------------------------------------------------------------------------------------


def test_a_hazard_is_the_share_that_was_used_shrunk_towards_the_prior():
    # Lost ones count half: (6 + 24 * 0.2) / (6 + 4 + 4 / 2 + 24) = 10.8 / 36. In other bins nothing was seen.
    tables = LifeTables()
    filled(tables, 0, used=6, lived=4, lost=4)
    assert tables._hazards()[0, :2] == pytest.approx([0.3, 0.2])


def test_a_class_shrinks_towards_its_parent():
    # The parent has another child's counts as well: (6 + 12 + 4.8) / (12 + 12 + 24) = 0.475. The class itself:
    # (6 + 24 * 0.475) / (12 + 24) = 17.4 / 36; one of which nothing was seen is as its parent.
    tables = LifeTables()
    a, b, c = (tables.class_of((name,)) for name in "abc")
    filled(tables, a, used=6, lived=4, lost=4)
    filled(tables, b, used=12, lived=0, lost=0)
    assert tables._hazards()[[0, a, c], FIRST] == pytest.approx([0.475, 17.4 / 36, 0.475])


def test_a_prior_scales_the_parents_hazard_at_the_first_level_alone():
    # A thousandth of 0.2 at the first level; below it the parent's own.
    tables = LifeTables()
    deep = tables.class_of(("gone", "x", "y"), 0.001)
    parents = [tables.class_of(("gone", "x", "y")[:count]) for count in (1, 2)]
    assert tables._hazards()[[*parents, deep], FIRST] == pytest.approx([0.0002] * 3)
    filled(tables, deep, used=6, lived=6, lost=0)
    top = (6 + 24 * 0.2) / 36  # 0.3
    first = (6 + 24 * 0.001 * top) / 36
    second = (6 + 24 * first) / 36
    assert tables._hazards()[[0, *parents, deep], FIRST] == pytest.approx(
        [top, first, second, (6 + 24 * second) / 36]
    )


def test_no_hazard_is_above_its_bound():
    tables = LifeTables()
    filled(tables, 0, used=10_000, lived=0, lost=0)
    assert tables._hazards()[0, FIRST] == 0.98


def test_an_update_lets_counts_fade():
    tables = LifeTables()
    filled(tables, 0, used=1, lived=0, lost=0)
    for _ in range(2):
        tables.update()
    faded = 0.996**2
    assert tables._hazards()[0, FIRST] == pytest.approx((faded + 4.8) / (faded + 24))


# --- the index ------------------------------------------------------------------------------------


def test_the_index_is_the_best_ratio_of_uses_to_time(two_bins):
    # Hazards 0.2 and 0.5, widths 1 and 2; who is used in a bin spends half of it there.
    #   first bin, giving up at its end: 0.2 / (1 * 0.9) = 0.222
    #   giving up at the second's: (0.2 + 0.8 * 0.5) / (0.9 + 0.8 * 2 * 0.75) = 0.6 / 2.1, better
    #   second bin: 0.5 / (2 * 0.75)
    index = two_bins._indices(np.array([[0.2, 0.5]]))[0]
    first, second = 0.6 / 2.1, 0.5 / 1.5
    parts = np.array([1, 3]) / 4  # middles of the steps
    assert index[:STEPS] == pytest.approx((1 - parts) * first + parts * second)
    assert index[STEPS:] == pytest.approx([second] * STEPS)


def test_giving_up_early_is_an_option(two_bins):
    # 0.8 / (1 * 0.6) at the end of the first bin; (0.8 + 0.2 * 0.2) / (0.6 + 0.2 * 2 * 0.9) = 0.875 at the second's.
    index = two_bins._indices(np.array([[0.8, 0.2]]))[0]
    first, second = 0.8 / 0.6, 0.2 / 1.8
    assert index[0] == pytest.approx(first * 3 / 4 + second / 4)
    assert index[-1] == pytest.approx(second)


def test_an_index_is_as_of_the_last_update():
    tables = LifeTables()
    before = tables.index[0].copy()
    filled(tables, 0, used=50, lived=0, lost=0)
    assert (tables.index[0] == before).all()
    tables.update()
    assert tables.index[0, 0] > 2 * before[0]


def best_ratios(hazards: np.ndarray, widths: np.ndarray) -> list[float]:
    """The Gittins index of every bin, by loops."""
    best = []
    for first in range(len(hazards)):
        alive, uses, time, ratios = 1.0, 0.0, 0.0, []
        for hazard, width in zip(hazards[first:], widths[first:], strict=True):
            uses += alive * hazard
            time += alive * width * (1 - hazard / 2)
            alive *= 1 - hazard
            ratios.append(uses / time)
        best.append(max(ratios))
    return best


@pytest.mark.parametrize("seed", range(10))
def test_behind_its_peak_an_index_never_rises_and_before_it_is_the_gittins_ratio(seed):
    tables, rng = LifeTables(), np.random.default_rng(seed)
    hazards = rng.random(tables.num_bins) ** 3 * 0.98
    plain = best_ratios(hazards, np.diff(tables.edges))
    peak = int(np.argmax(plain))
    expected = [*plain[: peak + 1], *(max(plain[k:]) for k in range(peak + 1, len(plain)))]
    index = tables._indices(hazards[None])[0].reshape(-1, STEPS)
    following = [*expected[1:], expected[-1]]
    for part in range(STEPS):
        share = (part + 0.5) / STEPS
        mixed = [(1 - share) * a + share * b for a, b in zip(expected, following, strict=True)]
        assert index[:, part] == pytest.approx(mixed)
    assert (np.diff(index[peak:].reshape(-1)) <= 1e-12).all()


def test_a_late_second_wave_raises_what_comes_before_it_to_its_own_height():
    # Used at once, or between the ages of 8 and 16: the two bins before are worth as much as that one.
    tables = LifeTables()
    hazards = np.full((1, tables.num_bins), 0.001)
    hazards[0, [0, 3]] = 0.98
    plain = best_ratios(hazards[0], np.diff(tables.edges))
    assert plain[1] < plain[2] < plain[3] < plain[0]
    index = tables._indices(hazards)[0]
    assert index[STEPS : 3 * STEPS] == pytest.approx([plain[3]] * 2 * STEPS)


# --- classes --------------------------------------------------------------------------------------


def test_every_prefix_of_the_features_is_a_class_and_counts_what_its_children_count():
    tables = LifeTables()
    deep, other = tables.class_of(("a", "b", "c")), tables.class_of(("a", "b", "d"))
    both, one = tables.class_of(("a", "b")), tables.class_of(("a",))
    assert len(tables) == 5  # all points, a, ab, abc, abd
    tables.count(deep, 2, USED)
    tables.count(other, 2, USED)
    tables.count(one, 2, USED)
    assert tables.counts()[USED, [deep, other, both, one, 0], 2].tolist() == [1, 1, 2, 3, 3]


def test_the_same_features_are_the_same_class():
    tables = LifeTables()
    assert tables.class_of(("a", 1)) == tables.class_of(("a", 1)) != tables.class_of(("a", 2))
    assert tables.class_of(()) == 0


def test_more_classes_than_there_was_room_for_keep_what_was_counted():
    tables = LifeTables()
    numbers = [tables.class_of((name,)) for name in range(15)]
    for number in numbers:
        filled(tables, number, used=number, lived=0, lost=0)
    tables.update()
    before = tables.index[:16].copy()
    more = [tables.class_of((name,)) for name in range(15, 60)]
    assert len(tables) == 61 and len(tables.index) >= 61
    assert more == list(range(16, 61))
    assert (tables.index[:16] == before).all()
    assert tables.counts()[USED, numbers, FIRST] == pytest.approx(0.996 * np.array(numbers))
    # A new one is as its parent from its first moment on.
    tables.update()
    assert tables.index[60] == pytest.approx(tables.index[0])
    assert tables.index[60].min() > 0
