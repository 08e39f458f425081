"""One plan after the other: rows, chunks, steps and folds in them, constrained rows and stop strings."""

import random

import numpy as np
import pytest

from hybrid_jax.schedule.scheduler import NEED_RESULTS
from tests.schedule.simulated_engine import Engine, tokens_of


@pytest.mark.parametrize("length", [1, 31, 32, 33, 64, 65, 127, 128, 129, 300])
@pytest.mark.parametrize("exact", [False, True])
def test_one_request_gives_the_plain_loops_tokens(length, exact):
    engine = Engine.make(exact=exact)
    engine.add(tokens_of(random.Random(length), length), max_tokens=100, stop_ids=())
    engine.run()
    engine.check()


class Anything:
    """A constraint that allows every token, `most` times."""

    def __init__(self, most=10**6):
        self.most = most

    def mask(self, output):
        return np.full(2, 0 if len(output) >= self.most else 0xFFFFFFFF, np.uint32)


def test_a_constrained_row_takes_one_step_and_waits_for_its_result():
    engine = Engine.make()
    rng = random.Random(0)
    free = engine.add(tokens_of(rng, 40), max_tokens=60, stop_ids=())
    bound = engine.add(tokens_of(rng, 90), max_tokens=20, stop_ids=(), constraint=Anything())
    while engine.step():
        flights = list(engine.pending)
        rows = [r for p in flights for r in (*p.prefill, *p.decode) if r.request is bound]
        assert len(rows) <= 1 and all(row.num_tokens <= 1 for row in rows)
    assert len(bound.output.token_ids) == 20 and len(free.output.token_ids) == 60
    engine.check()


def test_a_constraint_that_allows_nothing_more_ends_the_request():
    engine = Engine.make()
    request = engine.add([1, 2, 3], max_tokens=50, stop_ids=(), constraint=Anything(7))
    engine.run()
    assert (len(request.output.token_ids), request.output.finish_reason) == (7, "stop")


def test_a_constrained_prompt_in_the_making_slows_nobody_down():
    engine = Engine.make(steps_per_dispatch=8)
    rng = random.Random(0)
    engine.add(tokens_of(rng, 10), max_tokens=60, stop_ids=())
    engine.step()
    engine.add(tokens_of(rng, 500), max_tokens=3, stop_ids=(), constraint=Anything())
    engine.run()
    chunks = [plan for plan in engine.plans[1:] if plan.prefill and plan.decode]
    assert len(chunks) > 2 and all(plan.num_steps == 8 for plan in chunks[:3])
    engine.check()


def test_rows_with_stop_strings_take_fewer_steps_at_once():
    engine = Engine.make(steps_per_dispatch=8)
    rng = random.Random(0)
    engine.add(tokens_of(rng, 10), max_tokens=40, stop_ids=())
    engine.add(tokens_of(rng, 10), max_tokens=40, stop_ids=(), stop=("x",))
    engine.run()
    steps = [plan.num_steps for plan in engine.plans if len(plan.decode) == 2]
    assert steps[0] == max(steps) == 4  # from where the prompts end
    engine.check()


def test_a_prompt_with_stop_strings_that_ends_beside_decoding_rows_goes_along_with_them():
    engine = Engine.make(steps_per_dispatch=8)
    rng = random.Random(0)
    engine.add(tokens_of(rng, 10), max_tokens=60, stop_ids=())
    engine.step()
    engine.add(tokens_of(rng, 10), max_tokens=40, stop_ids=(), stop=("x",))
    engine.run()
    steps = [[row.num_tokens for row in p.decode] for p in engine.plans if len(p.decode) == 2]
    assert steps[0] == [8, 8] and max(map(max, steps[1:])) == 4
    engine.check()


def test_the_first_fold_after_a_prompt_takes_a_new_slot_and_later_ones_do_not():
    engine = Engine.make()
    engine.add(tokens_of(random.Random(0), 100), max_tokens=150, stop_ids=())
    engine.run()
    assert engine.device.events["folds to new"] == 1
    assert engine.device.events["folds in place"] == 3
    engine.check()


def test_a_long_prompts_chunks_write_over_their_own_slot():
    engine = Engine.make()
    engine.add(tokens_of(random.Random(0), 500))
    engine.run()
    assert engine.device.events["chunk over its own slot"] == 3
    assert engine.device.events["chunk to new"] == 1
    engine.check()


def test_short_prompts_share_a_prefill_and_long_ones_fill_it_alone():
    engine = Engine.make()
    rng = random.Random(0)
    for length in (20, 30, 25, 10):
        engine.add(tokens_of(rng, length))
    engine.step()
    assert [len(row.tokens) for row in engine.plans[0].prefill] == [20, 30, 25, 10]
    assert {row.row for row in engine.plans[0].decode} == {0, 1, 2, 3}  # decoding in the same plan
    engine.run()
    engine.check()


def test_results_must_come_in_order_and_fit():
    engine = Engine.make()
    request = engine.add(tokens_of(random.Random(0), 40), max_tokens=60, stop_ids=())
    first = engine.scheduler.plan()
    engine.device.execute(first)
    second = engine.scheduler.plan()
    assert engine.scheduler.plan() is NEED_RESULTS
    with pytest.raises(ValueError, match="not the oldest of 2 in flight"):
        engine.scheduler.receive(second)
    first.decode[0].new_tokens = []
    with pytest.raises(ValueError, match="'r0' must bring 1 to 8 tokens, got"):
        engine.scheduler.receive(first)
    engine.crash()
    engine.reported["r0"] = list(request.output.token_ids)
    engine.run()
    engine.check()


def test_an_empty_scheduler_has_nothing_to_do():
    engine = Engine.make()
    assert engine.scheduler.plan() is None and not engine.scheduler.has_work
    engine.add([1, 2, 3])
    assert engine.scheduler.has_work
    engine.run()
    assert engine.scheduler.plan() is None


def test_holes_are_closed_by_moving_the_highest_row():
    engine = Engine.make(max_rows=8)
    rng = random.Random(0)
    for index in range(8):
        engine.add(tokens_of(rng, 30), max_tokens=120 if index in (5, 7) else 10, stop_ids=())
    engine.run()
    assert engine.counters["moves"] == engine.device.events["moves"] > 0
    assert max(row.row for row in engine.plans[-1].decode) < 4
    engine.check()
