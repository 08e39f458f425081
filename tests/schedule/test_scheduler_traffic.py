"""Random traffic in any pool and mode: the plain loop's tokens, whatever happens."""

import random
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybrid_jax.config import SpeculationConfig
from hybrid_jax.schedule.memory import Memory
from tests.schedule.simulated_engine import GRAIN, Engine, make_geometry, tokens_of
from tests.schedule.traffic import random_traffic


@pytest.mark.parametrize("kind", ["hybrid", "recurrent"])
def test_texts_that_may_be_cut_keep_a_state_more(kind):
    geometry, total = make_geometry(kind=kind), {}
    for seed in range(3):
        engine = Engine.make(geometry=geometry, num_frames=24, max_model_len=340, vocab=200)
        random_traffic(seed, engine, turns=60, abort_rate=0.2, stop="x")
        for name, count in {**engine.counters, **engine.device.events}.items():
            total[name] = total.get(name, 0) + count
    assert total["folds to new"] and total["folds in place"] and total["cache_hits"]


@pytest.mark.parametrize(
    ("kind", "page_tokens", "num_frames"),
    [  # with pages, a third more than the longest request takes alone, or so
        ("hybrid", 16, 62),
        ("hybrid", 64, 20),
        ("hybrid", 128, 13),
        ("attention", 16, 58),
        ("attention", 128, 8),
        ("recurrent", 0, 40),
    ],
)
@pytest.mark.parametrize("lag", [0, 1])
def test_random_traffic_in_a_tight_pool(kind, page_tokens, num_frames, lag):
    geometry = make_geometry(page_tokens=page_tokens, kind=kind)
    total = {}
    for seed in range(3 if page_tokens else 6):  # hardly anybody waits where there are no pages
        engine = Engine.make(
            geometry=geometry, num_frames=num_frames, max_model_len=340, lag=lag, vocab=200
        )
        random_traffic(seed, engine, turns=80)
        for name, count in {**engine.counters, **engine.device.events}.items():
            total[name] = total.get(name, 0) + count
    fired = ["cache_hits"]
    fired += ["waits"] if (kind, page_tokens) != ("attention", 128) else []  # room for one prompt
    fired += ["preemptions"] if page_tokens else ["moves"]
    fired += ["copies"] if page_tokens > GRAIN else []
    fired += ["forks", "forks into a page"] if page_tokens else ["forks"]
    fired += ["folds in place", "folds to new"] if kind != "attention" else []
    fired += ["inert rows"] if lag else []
    assert not [name for name in fired if not total.get(name)], total


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("cache", ["off", "lru", "sglang", "marconi", "alpha:1", "adaptive"])
@pytest.mark.parametrize("steps", [1, 8, 32])
def test_random_traffic_in_every_mode(exact, cache, steps):
    for seed in range(2):
        engine = Engine.make(
            exact=exact, cache=cache, steps_per_dispatch=steps, num_frames=60, max_slots=9, max_rows=5,
            max_model_len=340,
        )  # fmt: skip
        random_traffic(seed, engine, turns=60)


@pytest.mark.parametrize("drafts", [3, 4, 7])
def test_a_checkpoint_stays_where_a_plan_in_flight_puts_it(drafts):
    """Two plans reach past a grain, so the first may fold into the slot that the second would like to keep."""
    for seed in range(4):
        rng = random.Random(seed)
        engine = Engine.make(
            geometry=make_geometry(kind="hybrid"), num_frames=200, max_slots=30, max_rows=2,
            max_model_len=340, vocab=200, steps_per_dispatch=8,
            speculation=SpeculationConfig(num_tokens=drafts, adaptive=False),
            keep=lambda most, rng=rng: most if rng.random() < 0.3 else rng.randint(1, most),
        )  # fmt: skip
        random_traffic(seed, engine, turns=30, stop="x")


@pytest.mark.parametrize(
    ("kind", "page_tokens", "num_frames"),
    [("hybrid", 16, 62), ("hybrid", 128, 13), ("attention", 64, 16), ("recurrent", 0, 40)],
)
@pytest.mark.parametrize(("steps", "drafts"), [(4, 0), (32, 0), (8, 4), (8, 15)])
def test_random_traffic_of_which_some_tokens_stay(kind, page_tokens, num_frames, steps, drafts):
    """The device decides how many of a row's tokens stay, so plans run ahead of what the rows have.

    Pages and checkpoints are compared with the tokens that stayed: no other may be in what is shared.
    """
    speculation = SpeculationConfig(num_tokens=drafts, adaptive=False) if drafts else None
    total = {}
    for seed in range(3):
        rng = random.Random(seed)
        engine = Engine.make(
            geometry=make_geometry(page_tokens=page_tokens, kind=kind), num_frames=num_frames,
            max_model_len=340, vocab=200, steps_per_dispatch=steps, speculation=speculation,
            keep=lambda most, rng=rng: most if rng.random() < 0.3 else rng.randint(1, most),
        )  # fmt: skip
        random_traffic(seed, engine, turns=60, stop="x" if seed % 2 else None)
        for name, count in {**engine.counters, **engine.device.events}.items():
            total[name] = total.get(name, 0) + count
    fired = ["rows behind their plan", "cache_hits", "inert rows", "forks"]
    fired += ["preemptions"] if page_tokens else ["moves"]
    fired += ["folds in place", "folds to new"] if kind != "attention" else []
    assert not [name for name in fired if not total.get(name)], total
    for where in ("in place", "to new"):  # counted once each, however many plans ran ahead of it
        assert total[f"folds_{where.replace(' ', '_')}"] == total.get(f"folds {where}", 0)


def test_a_page_that_is_shared_before_its_last_token_stays_is_noticed():
    """The token that was drawn last is known, but the device has not computed it."""
    publish = Memory.publish

    def too_early(memory, sequence, *left):
        early = len(sequence.tokens) > sequence.real_position
        sequence.real_position += early
        try:
            return publish(memory, sequence, *left)
        finally:
            sequence.real_position -= early

    def two_turns() -> None:
        engine = Engine.make(
            geometry=make_geometry(page_tokens=64, kind="attention"), num_frames=40, max_model_len=340,
            vocab=200, steps_per_dispatch=8, keep=lambda most: 1 + most // 2,
            speculation=SpeculationConfig(num_tokens=4, adaptive=False),
        )  # fmt: skip
        first = engine.add(prompt=list(range(10)), max_tokens=118, stop_ids=())
        engine.run()
        engine.add(prompt=[*first.tokens, 7], max_tokens=4)
        engine.run()

    two_turns()
    with mock.patch.object(Memory, "publish", too_early), pytest.raises(AssertionError):
        two_turns()


@pytest.mark.slow
def test_a_long_run_of_random_traffic():
    geometry = make_geometry(page_tokens=16)
    engine = Engine.make(geometry=geometry, num_frames=56, max_rows=8, max_model_len=340, vocab=200)
    random_traffic(12, engine, turns=1000, arrivals=0.2, crash_rate=0.01)
    assert engine.counters["preemptions"] > 5 and engine.counters["cache_leaf_evictions"] > 100


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_traffic_in_any_pool_gives_the_plain_loops_tokens(data):
    draw = data.draw
    kind = draw(st.sampled_from(["hybrid", "hybrid", "attention", "recurrent"]))
    geometry = make_geometry(page_tokens=draw(st.sampled_from([16, 64, 128])), kind=kind)
    alone = geometry.num_pages(240) * geometry.frames_per_page + geometry.state_frames
    engine = Engine.make(
        geometry=geometry, max_model_len=240, lag=draw(st.integers(0, 1)),
        num_frames=alone + 1 + draw(st.integers(0, 40)), max_slots=draw(st.integers(2, 12)),
        max_rows=draw(st.integers(1, 5)), exact=draw(st.booleans()),
        cache=draw(st.sampled_from(["lru", "off", "sglang", "alpha:0.5", "adaptive"])),
        steps_per_dispatch=draw(st.sampled_from([1, 3, 8])),
        prefill_tokens=draw(st.sampled_from([32, 96, 256])),
    )  # fmt: skip
    trunk = tokens_of(random.Random(draw(st.integers(0, 5))), 150)
    actions = st.one_of(
        st.tuples(st.integers(0, 150), st.integers(0, 60), st.integers(1, 30)), st.just("step"),
        st.just("step"), st.just("abort"),
    )  # fmt: skip
    for action in draw(st.lists(actions, max_size=40)):
        if action == "step":
            engine.step()
        elif action == "abort" and engine.scheduler._sequences:
            names = sorted(engine.scheduler._sequences)
            engine.scheduler.abort(names[draw(st.integers(0, len(names) - 1))])
            engine.scheduler.check_invariants()
        elif action != "abort":
            shared, own, max_tokens = action
            tail = tokens_of(random.Random(draw(st.integers(0, 2))), own)
            if shared + own:
                prompt = trunk[:shared] + tail
                engine.add_siblings(draw(st.integers(1, 3)), prompt, max_tokens=max_tokens)
    engine.run()
    engine.check()
