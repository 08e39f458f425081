"""A pool that is short: preemption, admission, the last frame, and what can never fit."""

import random

import pytest

from hybrid_jax.schedule.scheduler import NEED_RESULTS
from tests.schedule.simulated_engine import Engine, make_geometry, tokens_of


def test_preemption_resumes_as_a_prefix_hit():
    engine = Engine.make(num_frames=26, max_rows=2)
    rng = random.Random(0)
    requests = [engine.add(tokens_of(rng, 100), max_tokens=200, stop_ids=()) for _ in range(2)]
    engine.run()
    assert requests[1].course.num_preemptions > 0 and requests[0].course.num_preemptions == 0
    assert engine.counters["cache_hits"] > 0
    assert requests[1].hit.num_tokens == 0  # what its first prefill skipped
    engine.check()


def test_a_row_that_is_short_drains_the_flights_before_anyone_is_preempted():
    engine = Engine.make(num_frames=26, max_rows=2)
    rng = random.Random(0)
    for _ in range(2):
        engine.add(tokens_of(rng, 100), max_tokens=200, stop_ids=())
    answers = []
    plan = engine.scheduler.plan

    def watched():
        answers.append(
            (plan(), engine.scheduler.num_flights, engine.scheduler.counters.preemptions)
        )
        return answers[-1][0]

    engine.scheduler.plan = watched
    engine.run()
    assert any(answer is NEED_RESULTS for answer, _, _ in answers)
    first = next(i for i, (_, _, preemptions) in enumerate(answers) if preemptions)
    assert answers[first - 1][0] is NEED_RESULTS


def test_a_request_that_cannot_be_admitted_yet_costs_no_cached_prefix():
    engine = Engine.make(num_frames=34, max_rows=2)
    rng = random.Random(0)
    cached = tokens_of(rng, 200)
    engine.add(cached, max_tokens=2, stop_ids=())
    engine.run()
    engine.add(
        tokens_of(rng, 300), max_tokens=40, stop_ids=()
    )  # 5 pages and a checkpoint, then more
    engine.step()
    engine.add(tokens_of(rng, 550), max_tokens=10, stop_ids=())  # more than is left beside it
    kept = engine.scheduler.stats()["cached_frames"]
    for _ in range(3):
        engine.step()
    stats = engine.scheduler.stats()
    assert stats["waiting"] == 1 and kept > 0
    assert stats["cached_frames"] >= kept and stats["cache_leaf_evictions"] == 0
    engine.run()
    engine.check()


def test_a_hit_that_leaves_no_room_for_the_rest_costs_no_cached_prefix():
    """Its own prefix would become live: what is left then is too little, whatever else is evicted."""
    engine = Engine.make(num_frames=36, max_rows=2)
    rng = random.Random(0)
    other, mine = tokens_of(rng, 66), tokens_of(rng, 322)
    for prompt in (other, mine):
        engine.add(prompt, max_tokens=2, stop_ids=())
        engine.run()
    engine.add(tokens_of(rng, 200), max_tokens=300, stop_ids=())
    engine.step()
    evictions = engine.counters["cache_leaf_evictions"]
    request = engine.add(mine + tokens_of(rng, 220), max_tokens=2, stop_ids=())
    engine.step()
    stats = engine.counters
    assert stats["waiting"] == 1 and stats["cache_leaf_evictions"] == evictions
    engine.run()
    assert request.hit.num_tokens >= 320
    engine.check()


def test_one_request_gets_the_whole_pool_to_its_last_frame():
    geometry = make_geometry(page_tokens=64)
    for frames in (12, 14, 20):
        engine = Engine.make(num_frames=frames, geometry=geometry)
        longest = engine.scheduler.max_output(100)
        request = engine.add(tokens_of(random.Random(0), 100), max_tokens=longest, stop_ids=())
        engine.run()
        assert len(request.output.token_ids) == longest == (frames - 1 - 3) // 2 * 64 + 1 - 100
        assert (
            request.course.num_preemptions == 0
        )  # it takes its checkpoint back from the tree instead
        engine.check()


def test_output_without_an_explicit_limit_ends_where_the_pool_does():
    engine = Engine.make(num_frames=12)
    request = engine.add(
        tokens_of(random.Random(0), 100), max_tokens=5000, explicit=False, stop_ids=()
    )
    engine.run()
    assert (
        request.output.finish_reason == "length"
        and len(request.output.token_ids) == 4 * 64 + 1 - 100
    )
    engine.check()


def test_what_can_never_fit_is_refused_with_the_numbers():
    engine = Engine.make(num_frames=12, max_model_len=600)
    engine.add([1, 2], name="a")
    for prompt, max_tokens, message in [
        ([1] * 700, 1, r"prompt of 700 tokens and 1 to generate need 701, the model holds 600"),
        ([1] * 100, 501, r"prompt of 100 tokens and 501 to generate need 601, the model holds 600"),
        (
            [1] * 300,
            1,
            r"prompt of 300 tokens and 1 to generate need 301, the pool holds 257.*raise memory",
        ),
        ([1] * 100, 158, r"need 258, the pool holds 257"),
        ([], 1, r"prompt must hold at least one token, got 0"),
    ]:
        with pytest.raises(ValueError, match=message):
            engine.add(prompt, max_tokens=max_tokens, name="b")
    with pytest.raises(ValueError, match="request 'a': request_id must be unique"):
        engine.add([3], name="a")
    engine.run()
    assert engine.requests["a"].output.finish_reason


@pytest.mark.parametrize(("num_frames", "seated"), [(17, 2), (16, 1)])
def test_a_hit_whose_memory_is_live_already_is_not_counted_again(num_frames, seated):
    """The prefix has 5 frames, and what may go has 5; either row takes 5 more and asks for 2 beyond."""
    engine = Engine.make(num_frames=num_frames + 1, cache="lru")
    rng = random.Random(0)
    prefix, other = tokens_of(rng, 64), tokens_of(rng, 64)
    engine.add([*other, 1], max_tokens=2, stop_ids=())  # 5 frames that may go
    engine.run()
    for last in (1, 2):
        engine.add([*prefix, last], max_tokens=2, stop_ids=())
        engine.run()
    for last in (3, 4):
        engine.add([*prefix, *[last] * 5], max_tokens=60, stop_ids=())
    engine.step()
    assert len(engine.scheduler.seats.running) == seated
    engine.run()
    engine.check()


def test_patience_begins_anew_after_a_preemption():
    engine = Engine.make(num_frames=26, max_rows=2)
    rng = random.Random(0)
    requests = [engine.add(tokens_of(rng, 100), max_tokens=200, stop_ids=()) for _ in range(2)]
    second = engine.scheduler._sequences[requests[1].request_id]
    second.queued.num_overtaken = 7
    while not requests[1].course.num_preemptions:
        assert engine.step()
    assert second.queued.num_overtaken == 0
