"""Requests that end early, and a dispatch that fails: the others go on, nothing is left behind."""

import random

import pytest

from hybrid_jax.config import SpeculationConfig
from tests.schedule.damaged_devices import DAMAGED, DamagedDevice, SpoilingDevice
from tests.schedule.simulated_device import plain_loop
from tests.schedule.simulated_engine import Engine, make_geometry, tokens_of


def test_siblings_whose_first_one_is_aborted_compute_their_prompt_themselves():
    engine = Engine.make()
    siblings = engine.add_siblings(3, tokens_of(random.Random(0), 300), max_tokens=9, stop_ids=())
    engine.step()
    engine.scheduler.abort(siblings[0].request_id)
    engine.run()
    assert engine.counters["forks"] == 1
    assert all(len(sibling.output.token_ids) == 9 for sibling in siblings[1:])
    engine.check()


def test_a_waiting_request_goes_on_when_the_one_it_waits_for_is_aborted():
    engine = Engine.make()
    prompt = tokens_of(random.Random(0), 500)
    engine.add(prompt)
    engine.step()
    second = engine.add(prompt)
    engine.step()
    assert len(engine.scheduler.admission.waiting) == 1
    assert engine.scheduler.abort("r0") and not engine.scheduler.abort("r0")
    engine.run()
    assert second.output.finish_reason in ("stop", "length")
    engine.check()


def test_a_failed_dispatch_requeues_everyone_from_their_tokens():
    engine = Engine.make()
    rng = random.Random(0)
    for _ in range(6):
        engine.add(tokens_of(rng, 60), max_tokens=60, stop_ids=())
    for _ in range(4):
        engine.step()
    engine.crash()
    assert engine.counters["free_frames"] == 399 and engine.counters["waiting"] == 6
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
    before = len(requests[1].output.token_ids)
    assert engine.scheduler.abort("r1")
    engine.run()
    assert (
        len(requests[1].output.token_ids) == before and requests[1].output.finish_reason == "abort"
    )
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
    assert again.hit.num_tokens >= 160
    engine.check()


@pytest.mark.parametrize("kind", ["hybrid", "recurrent", "attention"])
@pytest.mark.parametrize("seed", range(3))
def test_sequences_that_are_not_finite_end_alone(seed, kind):
    rng = random.Random(seed)
    engine = Engine.make(num_frames=120, geometry=make_geometry(kind=kind))
    engine.device.__class__ = DamagedDevice
    shared = tokens_of(rng, 100, vocab=DAMAGED)
    for _ in range(24):
        prompt = shared[: rng.randrange(1, 100)] + tokens_of(rng, rng.randrange(1, 90), vocab=50)
        engine.add_siblings(rng.choice([1, 1, 3]), prompt, max_tokens=rng.randrange(1, 60))
        for _ in range(rng.randrange(3)):
            engine.step()
    engine.run()
    for request in engine.requests.values():
        fed = request.prompt + plain_loop(
            request.prompt, vocab=50, stop_ids=request.stop_ids, limit=len(request.prompt) + request.max_tokens
        )[:-1]  # fmt: skip
        assert (request.output.finish_reason == "error") == (DAMAGED in fed)
        if DAMAGED in fed:
            assert len(request.prompt + request.output.token_ids) == max(
                len(request.prompt), fed.index(DAMAGED) + 1
            )
    ends = [request.output.finish_reason for request in engine.requests.values()]
    assert 3 < ends.count("error") < len(ends) - 3
    engine.check()


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("kind", ["hybrid", "recurrent", "attention"])
def test_a_sequence_whose_window_a_draft_has_spoilt_goes_on_without_drafts(kind, lag):
    rng = random.Random(0)
    engine = Engine.make(
        num_frames=120,
        lag=lag,
        geometry=make_geometry(kind=kind),
        keep=lambda planned: rng.randrange(1, planned + 1),
        speculation=SpeculationConfig(num_tokens=3, adaptive=False),
    )
    engine.device.__class__, engine.device.spoils = SpoilingDevice, random.Random(1)
    shared = tokens_of(rng, 100)
    for number in range(24):
        prompt = shared[: rng.randrange(1, 100)] + tokens_of(rng, rng.randrange(1, 90))
        engine.add_siblings(rng.choice([1, 1, 3]), prompt, max_tokens=rng.randrange(1, 60))
        for _ in range(rng.randrange(3)):
            engine.step()
        if number % 4 == 0:
            engine.scheduler.abort(rng.choice([*engine.requests]))
    engine.run()
    over = [
        request for request in engine.requests.values() if request.output.finish_reason != "abort"
    ]
    for request in over:
        limit = len(request.prompt) + request.max_tokens
        want = plain_loop(request.prompt, vocab=50, stop_ids=request.stop_ids, limit=limit)
        assert request.output.token_ids == want and request.output.finish_reason in (
            "stop",
            "length",
        )
    assert 3 < sum(request.course.without_drafts for request in over) < len(over) - 3
    engine.check()
