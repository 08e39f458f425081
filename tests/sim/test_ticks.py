"""Runs in ticks: their rules by hand, beside a model that walks every tick, and what it counts as hollow."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.pools.names import make_memory, make_run, run_beside_ideal
from benchmarks.pools.rivals import Amounts, fixed_dual, ideal
from tests.sim.tiny import MODEL, pool_load

# Tokens take 5 bytes each, by 4 at once; a state 60.


def run(pool_bytes, *requests, memory=None):
    memory = memory or ideal(MODEL, pool_bytes, step_tokens=4)
    return make_run(pool_load(*requests), memory, MODEL).run(name="own", pool_bytes=pool_bytes)


def test_a_request_alone_takes_a_tick_per_token():
    found = run(200, (5, 8, 3))
    assert (found.completed, found.makespan, found.mean_latency) == (1, 3 + 13, 13)
    assert found.tokens_per_tick == 13 / 16 and found.mean_running == 13 / 16
    assert (found.preempted, found.infeasible, found.hollow, found.leaked_bytes) == (0, 0, 0, 0)
    assert found.utilisation == 0  # nobody ever waits


def test_who_does_not_fit_waits_and_holds_up_those_behind():
    # The first holds 80 + 40 of 200 bytes; the second needs 100 + 60, the third 20 + 60, which would fit.
    found = run(200, (16, 4, 0), (20, 1, 1), (4, 1, 1))
    assert found.makespan == 20 + 21 + 5  # 20 + 60 are not free beside the second either
    assert found.mean_latency == (20 + (41 - 1) + (46 - 1)) / 3
    assert found.p95_latency == pytest.approx(40 + 0.9 * 5)


def test_admission_follows_departures_of_the_same_tick():
    found = run(140, (8, 4, 0), (8, 4, 12))
    assert found.makespan == 24 and found.preempted == 0


def test_growth_without_memory_preempts_the_youngest_and_it_begins_again():
    # Both fit with 20 + 60 each. The first's fifth token takes the second's place, which has computed 3 of 8 by then.
    found = run(170, (4, 4, 0), (4, 4, 2))
    assert (found.preempted, found.recomputed_tokens, found.completed) == (1, 3, 2)
    assert found.makespan == 8 + 8


def test_who_asks_may_be_the_youngest_itself():
    # The second's fifth token finds 10 bytes, so it goes; its prompt still fits, so it is back within the tick. At 9
    # the first needs as much, and the second goes again, 4 ticks after.
    found = run(190, (8, 4, 0), (4, 4, 0))
    assert (found.preempted, found.recomputed_tokens) == (2, 5 + 4)
    assert found.makespan == 12 + 8


def test_the_last_token_needs_no_memory():
    assert run(80, (4, 1, 0)).completed == 1
    found = run(80, (4, 2, 0))
    assert (found.completed, found.infeasible, found.tokens_per_tick) == (0, 1, 0)
    assert (found.mean_latency, found.p95_latency) == (0, 0)


def test_what_the_empty_pool_cannot_hold_is_refused_on_arrival_and_delays_nobody():
    found = run(120, (4, 4, 0), (40, 4, 1), (4, 4, 2))
    assert (found.infeasible, found.completed, found.makespan) == (1, 2, 16)


def test_utilisation_is_content_over_budget_while_others_wait():
    # The second waits from 0 to 7. Until 4 the first's content is 80, then it grows by 5 a tick: 80, 85, 90.
    found = run(100, (4, 3, 0), (4, 3, 0))
    assert found.utilisation == pytest.approx((4 * 80 + 80 + 85 + 90) / 7 / 100)


def test_the_ideal_runs_beside():
    load = pool_load((8, 4, 0), (8, 4, 0))
    found = run_beside_ideal(load, MODEL, name="fixed_dual_mr05", pool_bytes=240)
    # The ideal holds both for 24 tokens in 12 ticks; half of 240 is room for two states but not for 4 x 2 pages.
    assert (found.makespan, found.ideal_infeasible, found.of_ideal) == (12, 0, 1.0)
    found = run_beside_ideal(load, MODEL, name="fixed_dual:0.7", pool_bytes=240)
    assert (found.makespan, found.of_ideal) == (24, 0.5)


class Bytes(Amounts):
    """The ideal of 100 bytes, to be changed."""

    def __init__(self):
        parts = lambda tokens: (-(-tokens // 4) * 20, 60)
        sizes = {"step_tokens": 4, "slot_bytes": 60, "reserved_bytes": 100}
        super().__init__((100,), (1,), parts, pools=(0, 0), calls=(2, 2, (1, 0)), **sizes)


class Forgetful(Bytes):
    """Takes the memory of whoever was admitted first, as the published allocators do, and says so when asked."""

    def __init__(self):
        super().__init__()
        self.victims = set()

    def admit(self, request, num_tokens):
        if super().admit(request, num_tokens):
            return True
        victim = next(iter(self._tokens))
        super().release(victim)
        self.victims.add(victim)
        return super().admit(request, num_tokens)

    def grow(self, request, num_tokens):
        return request in self.victims or super().grow(request, num_tokens)

    def release(self, request):
        if request not in self.victims:
            super().release(request)


def test_a_request_that_lost_its_memory_unawares_is_hollow():
    found = run(100, (4, 4, 0), (4, 4, 2), memory=Forgetful())
    assert (found.completed, found.hollow, found.makespan) == (2, 1, 10)


class Lossy(Bytes):
    """Loses capacity whenever a request goes."""

    def release(self, request):
        super().release(request)
        self.free[0] -= 30


def test_who_waits_for_memory_that_never_comes_back_is_given_up():
    found = run(100, (4, 2, 0), (4, 2, 0), memory=Lossy())
    assert (found.completed, found.infeasible, found.leaked_bytes) == (1, 1, 30)


def test_the_same_run_gives_the_same_result():
    requests = [(5, 9, 0), (17, 3, 1), (4, 20, 1), (9, 9, 4)]
    first, second = (run(300, *requests).as_dict() | {"cpu_seconds": 0} for _ in "ab")
    assert first == second


# --- beside a harness that walks every tick -------------------------------------------------------


def walked(pool_bytes, requests) -> dict:
    """By the rules, tick by tick, with nothing but lists."""
    needed = lambda tokens: 60 + -(-tokens // 4) * 20
    waiting, running, tick = [], [], 0  # running: [request, admitted], the youngest last
    left = set(range(len(requests)))
    counts = {"completed": 0, "infeasible": 0, "preempted": 0, "recomputed_tokens": 0}
    used = lambda: sum(needed(max(requests[r][0], held)) for r, _, held in running)
    while left:
        for row in [row for row in running if tick - row[1] == sum(requests[row[0]][:2])]:
            running.remove(row)
            left.discard(row[0])
            counts["completed"] += 1
            counts["makespan"] = tick
        for row in sorted(running):
            done = tick - row[1]
            if row not in running or done <= requests[row[0]][0] or done % 4 != 1:
                continue
            while used() + 20 > pool_bytes:
                victim = running.pop()
                counts["preempted"] += 1
                counts["recomputed_tokens"] += tick - victim[1]
                waiting.insert(0, victim[0])
                if victim is row:
                    break
            if row in running:
                row[2] = done
        for number, (prompt, gen, arrival) in enumerate(requests):
            if arrival == tick:
                if needed(prompt + gen - 1) <= pool_bytes:
                    waiting.append(number)
                else:
                    left.discard(number)
                    counts["infeasible"] += 1
        while waiting and used() + needed(requests[waiting[0]][0]) <= pool_bytes:
            running.append([waiting.pop(0), tick, 0])
        tick += 1
    return counts


REQUEST = st.tuples(st.integers(1, 30), st.integers(1, 30), st.integers(0, 20))


@given(requests=st.lists(REQUEST, min_size=1, max_size=10), pool_bytes=st.integers(80, 500))
@settings(max_examples=150, deadline=None)
def test_events_come_to_the_same_as_ticks(requests, pool_bytes):
    found, expected = run(pool_bytes, *requests).as_dict(), walked(pool_bytes, requests)
    expected.setdefault("makespan", 0)  # where all were refused
    assert {name: found[name] for name in expected} == expected


NAMES = (
    *("frames_rings@1", "frames_records", "frames_records@4", "frames_raw"),
    *("frames", "frames:3", "vllm_big_block", "two_ended", "padded_unified", "fixed_dual_mr05"),
    *("avmp_static_mr05", "avmp_dynamic_b3", "ideal:1"),
)


@pytest.mark.parametrize("name", NAMES)
@given(requests=st.lists(REQUEST, min_size=1, max_size=12))
@settings(max_examples=40, deadline=None)
def test_everyone_completes_or_is_refused_and_nothing_leaks(name, requests):
    memory = make_memory(name, MODEL, 600)
    found = run(600, *requests, memory=memory)
    assert found.completed + found.infeasible == len(requests)
    assert (found.hollow, found.leaked_bytes) == (0, 0)
    memory.check_invariants()


def test_a_share_of_the_pool_that_is_too_small_refuses():
    found = run(240, (40, 8, 0), memory=fixed_dual(MODEL, 240, 0.5))
    assert (found.infeasible, found.completed) == (1, 0)
