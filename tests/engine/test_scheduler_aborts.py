"""Requests aborted at any moment, and a dispatch that fails: the others go on, nothing is left behind."""

import random

from tests.engine.simulated_device import plain_loop
from tests.engine.simulated_engine import Engine, tokens_of


def test_siblings_whose_first_one_is_aborted_compute_their_prompt_themselves():
    engine = Engine.make()
    siblings = engine.add_siblings(3, tokens_of(random.Random(0), 300), max_tokens=9, stop_ids=())
    engine.step()
    engine.scheduler.abort(siblings[0].request_id)
    engine.run()
    assert engine.counters["forks"] == 1
    assert all(len(sibling.output) == 9 for sibling in siblings[1:])
    engine.check()


def test_a_waiting_request_goes_on_when_the_one_it_waits_for_is_aborted():
    engine = Engine.make()
    prompt = tokens_of(random.Random(0), 500)
    engine.add(prompt)
    engine.step()
    second = engine.add(prompt)
    engine.step()
    assert engine.scheduler.num_waiting == 1
    assert engine.scheduler.abort("r0") and not engine.scheduler.abort("r0")
    engine.run()
    assert second.finish_reason in ("stop", "length")
    engine.check()


def test_a_failed_dispatch_requeues_everyone_from_their_tokens():
    engine = Engine.make()
    rng = random.Random(0)
    for _ in range(6):
        engine.add(tokens_of(rng, 60), max_tokens=60, stop_ids=())
    for _ in range(4):
        engine.step()
    engine.crash()
    assert engine.counters["free_frames"] == 399 and engine.scheduler.num_waiting == 6
    assert engine.counters["restarts"] == 1 and engine.counters["plans"] >= 4
    engine.scheduler.abort("r0")
    engine.run()
    engine.check()


def test_an_abort_with_plans_in_flight_reports_nothing_more_and_frees_everything():
    engine = Engine.make()
    requests = [
        engine.add(tokens_of(random.Random(i), 60), max_tokens=200, stop_ids=()) for i in range(3)
    ]
    for _ in range(5):
        engine.step()
    before = len(requests[1].output)
    assert engine.scheduler.abort("r1")
    engine.run()
    assert len(requests[1].output) == before and requests[1].finish_reason == "abort"
    assert not engine.scheduler.abort("r1") and not engine.scheduler.abort("nobody")
    engine.check()


def test_an_abort_while_a_fold_is_in_flight_leaves_no_wrong_checkpoint():
    engine = Engine.make()
    first = engine.add(tokens_of(random.Random(0), 100), max_tokens=300, stop_ids=())
    while not any(
        row.fold_slot and row.fold_slot == row.read_slot for p in engine.pending for row in p.decode
    ):
        engine.step()
    engine.scheduler.abort("r0")
    engine.run()
    output = plain_loop(first.prompt, vocab=50, stop_ids=frozenset(), limit=300)
    again = engine.add(first.prompt + output)
    engine.run()
    assert again.num_cached_tokens >= 160
    engine.check()
