"""When drafts are judged: while they pay, and now and then when they do not."""

from types import SimpleNamespace

import pytest

from hybrid_jax.config import SpeculationConfig
from hybrid_jax.costs import StepCosts
from hybrid_jax.schedule.pace import FIRST_WINDOWS, ONE_TOKEN, Pace, Stride

SPECULATION = SpeculationConfig(num_tokens=4)


def costs(price: float) -> StepCosts:
    """Of steps whose five tokens of a row cost `price` times one."""
    flops = 1000 * (price - 1) / (5 - price)
    found = StepCosts(
        weight_bytes=1000, row_bytes=0, kv_bytes=0, token_flops=flops, flops_per_byte=1
    )
    assert found.ratio(rows=1, tokens=5, context=0) == pytest.approx(price, abs=0.01)
    return found


def sequence(one_by_one=False):
    return SimpleNamespace(
        position=50, accepted_drafts=None, request=SimpleNamespace(one_by_one=one_by_one)
    )


def drive(pace: Pace, row, accepted, turns: int) -> list[tuple[int, int | None]]:
    """The windows of so many turns; a window of drafts gets `accepted(turn)` of them right."""
    found = []
    for turn in range(turns):
        stride = pace.stride([row])
        found.append((stride.window, stride.max_steps))
        if stride.window > 1:
            pace.learn(row, [(4, accepted(turn))] * (stride.max_steps or 6))
    return found


def test_nothing_is_drafted_without_a_drafter_or_for_grammars_alone():
    assert Pace(None, costs(1.5), 8).stride([sequence()]) is ONE_TOKEN
    pace = Pace(SPECULATION, costs(1.5), 8)
    assert pace.stride([sequence(one_by_one=True)]) is ONE_TOKEN
    assert pace.stride([sequence(one_by_one=True), sequence()]).window == 5


def test_without_costs_or_when_told_so_drafts_are_always_judged():
    for pace in (
        Pace(SPECULATION, None, 8),
        Pace(SpeculationConfig(num_tokens=4, adaptive=False), costs(4.9), 8),
    ):
        assert set(drive(pace, sequence(), lambda turn: 0, 50)) == {(5, None)}


def test_drafts_that_are_accepted_are_judged_in_every_step():
    found = drive(Pace(SPECULATION, costs(1.5), 8), sequence(), lambda turn: 2, 50)
    assert found[:FIRST_WINDOWS] == [(5, 1)] * FIRST_WINDOWS
    assert set(found[FIRST_WINDOWS:]) == {(5, None)}


@pytest.mark.parametrize("plain_steps", [1, 4, 8, 32])
@pytest.mark.parametrize("price", [1.005, 1.06, 1.5, 3.0])
def test_drafts_that_are_not_accepted_cost_little(price, plain_steps):
    pace = Pace(SPECULATION, costs(price), plain_steps)
    found = drive(pace, sequence(), lambda turn: 0, 2000)
    later = found[FIRST_WINDOWS:]
    trials = sum(window > 1 for window, _ in later)
    assert 0 < trials and all(steps == 1 for window, steps in later if window > 1)
    plain = plain_steps * (len(later) - trials)
    assert trials * (price - 1) <= 0.025 * plain
    assert trials <= len(later) / 10


def test_what_changes_is_noticed():
    """Text that begins to repeat itself, and text that ceases to."""
    found = drive(Pace(SPECULATION, costs(1.3), 8), sequence(), lambda turn: 4 * (turn > 100), 200)
    assert (5, None) not in found[20:100]
    assert {window for window, _ in found[140:]} == {5}
    found = drive(Pace(SPECULATION, costs(1.3), 8), sequence(), lambda turn: 4 * (turn < 50), 200)
    assert {window for window, _ in found[10:50]} == {5}
    assert (5, None) not in found[80:]


def test_nothing_is_tried_where_it_cannot_pay():
    pace = Pace(SpeculationConfig(num_tokens=1), costs(1.2), 8)
    expensive = StepCosts(weight_bytes=0, row_bytes=0, kv_bytes=0, token_flops=1, flops_per_byte=1)
    assert pace.stride([sequence()]).window == 2
    assert Pace(SPECULATION, expensive, 8).stride([sequence()]) is ONE_TOKEN
    flat = SpeculationConfig(tree=(0,) * 4)  # of which one draft can be accepted
    assert Pace(flat, costs(2.5), 8).stride([sequence()]) is ONE_TOKEN


def test_a_new_row_is_judged_by_what_others_brought():
    pace = Pace(SPECULATION, costs(1.5), 8)
    drive(pace, sequence(), lambda turn: 3, 40)
    assert pace.stride([sequence()]) == Stride(window=5)
    pace = Pace(SPECULATION, costs(1.5), 8)
    drive(pace, sequence(), lambda turn: 0, 40)
    assert pace.stride([sequence()]) is ONE_TOKEN
