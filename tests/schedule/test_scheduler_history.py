"""What the cache learns and tells: why a prompt hit no further, the log of requests, alpha tuned on it."""

import random
from dataclasses import replace

import numpy as np
import pytest

from hybrid_jax.cache.policy.request_log import RequestLog, block_hashes
from hybrid_jax.cache.policy.tuner import ALPHAS
from hybrid_jax.cache.tree.node import Why
from tests.schedule.simulated_engine import Engine, make_geometry, tokens_of


def asked(engine, prompt, **options):
    request = engine.add(prompt, **options)
    engine.run()
    engine.scheduler.check_invariants()
    return request.hit.look_up


def test_a_prompt_nobody_had_is_told_so():
    found = asked(Engine.make(), tokens_of(random.Random(0), 100))
    assert (found.why, found.match_len, found.hit_len) == (Why.NEVER_SEEN, 0, 0)


def test_a_prompt_that_hits_all_it_can_is_complete():
    engine, prompt = Engine.make(), tokens_of(random.Random(0), 100)
    asked(engine, prompt)
    found = asked(engine, prompt)
    assert (found.why, found.hit_len, found.match_len) == (Why.COMPLETE, 96, 100)


def test_a_prefix_that_no_checkpoint_was_made_for_is_named():
    # The first prompt's checkpoint is at 192; the second leaves it at 70, so the deepest that could be is 64.
    engine, prompt = Engine.make(), tokens_of(random.Random(0), 200)
    asked(engine, prompt)
    found = asked(engine, prompt[:70] + tokens_of(random.Random(1), 60))
    assert (found.why, found.match_len, found.hit_len) == (Why.NOT_ADMITTED, 70, 0)
    assert found.position == 64
    third = asked(engine, prompt[:70] + tokens_of(random.Random(2), 60))
    assert third.hit_len == 64  # the second one left it


@pytest.mark.parametrize("window", [40, None])
def test_pages_that_a_text_gave_back_behind_a_window_are_named(window):
    geometry = make_geometry(kind="attention", page_tokens=16, windows=(None, window))
    engine, prompt = Engine.make(geometry=geometry), tokens_of(random.Random(0), 100)
    asked(engine, prompt, max_tokens=300, stop_ids=())
    text = prompt + engine.requests["r0"].output.token_ids
    early = text[:260] + tokens_of(random.Random(1), 20)
    found = asked(engine, early)
    if window is None:
        assert (found.why, found.hit_len) == (Why.COMPLETE, 256)
        return
    assert (found.why, found.position) == (Why.GIVEN_BACK, 256)
    assert found.hit_len == 96 and found.match_len >= 260
    assert asked(engine, early).why is Why.COMPLETE  # it has left them
    late = asked(engine, text + [3])
    assert (late.why, late.hit_len) == (Why.COMPLETE, 384)


def test_what_is_evicted_beyond_pages_that_were_given_back_counts_as_evicted():
    geometry = make_geometry(kind="attention", page_tokens=16, windows=(None, 40))
    engine, prompt = Engine.make(geometry=geometry), tokens_of(random.Random(0), 100)
    tree = engine.scheduler.memory.tree
    asked(engine, prompt, max_tokens=300, stop_ids=())
    text = prompt + engine.requests["r0"].output.token_ids
    node = tree.match(np.array(text)).reached
    tree.boundary(node, 256)
    tree.policy.discard(node)
    tree._evict(node)
    found = asked(engine, text + [3])
    assert (found.why, found.position) == (Why.EVICTED, 384) and found.hit_len < 256


@pytest.mark.parametrize("policy", ["lru", "adaptive"])
def test_what_was_evicted_is_named_with_its_time(policy):
    # 60 frames: a prompt of 200 tokens takes 4 pages of 2 frames, its two checkpoints 6.
    engine = Engine.make(num_frames=60, max_slots=30, cache=policy)
    prompt = tokens_of(random.Random(0), 200)
    asked(engine, prompt, max_tokens=1)
    strangers = 0
    while engine.scheduler.memory.tree.match(np.array(prompt)).hit_len:
        asked(engine, tokens_of(random.Random(10 + strangers), 200), max_tokens=1)
        strangers += 1
    found = asked(engine, prompt, max_tokens=1)
    assert (found.why, found.policy, found.match_len) == (Why.EVICTED, policy, 200)
    assert found.position == 192 and found.pages and 0 < found.ago <= strangers


def test_log_probabilities_of_a_prompt_need_all_of_it():
    engine, prompt = Engine.make(), tokens_of(random.Random(0), 100)
    asked(engine, prompt)
    request = engine.requests["r0"]
    params = request.params.__class__(max_tokens=3, temperature=0.0, prompt_logprobs=1)
    again = replace(request, request_id="lp", params=params, max_tokens=3)
    engine.scheduler.add(again)
    assert engine.scheduler.plan()
    assert again.hit.look_up.why is Why.ASKED_FOR
    assert (again.hit.look_up.match_len, again.hit.look_up.hit_len) == (100, 0)


def test_log_probabilities_of_an_end_need_only_that():
    engine, prompt = Engine.make(), tokens_of(random.Random(0), 100)
    found = []
    for name in "abc":
        request = engine.add(
            prompt, name=name, logprobs_from=70, cache_breakpoints=(70,), max_tokens=1,
            prompt_logprobs=0,
        )  # fmt: skip
        engine.run()
        look_up = request.hit.look_up
        found.append((look_up.why, look_up.match_len, look_up.hit_len))
    # Up to 64 it may come from the cache, and the first one has left a state there.
    assert found == [(Why.NEVER_SEEN, 0, 0), *[(Why.ASKED_FOR, 100, 64)] * 2]


def test_a_checkpoint_that_leaves_no_room_for_its_own_request_is_named():
    # 13 frames: 300 tokens take 5 pages of 2 and a checkpoint of 3, not the one they would resume from as well.
    engine, prompt = Engine.make(num_frames=14, max_slots=30), tokens_of(random.Random(0), 300)
    asked(engine, prompt[:200], max_tokens=1)
    found = asked(engine, prompt, max_tokens=1)
    assert (found.why, found.position, found.hit_len) == (Why.NO_ROOM, 192, 0)


@pytest.mark.parametrize("policy", ["marconi", "marconi-code"])
def test_alpha_is_tuned_on_the_log(policy):
    engine = Engine.make(num_frames=60, max_slots=30, cache=policy)
    history, tree = engine.scheduler.memory.history, engine.scheduler.memory.tree
    order = random.Random(3)
    bases = [tokens_of(random.Random(n), 150) for n in range(6)]
    for _ in range(150):
        prompt = bases[order.randrange(6)][: order.randrange(40, 150)]
        asked(engine, prompt + tokens_of(order, 20), max_tokens=2)
        if history.tuner.tuned:
            break
    assert history.tuner.tuned and tree.policy.alpha == history.tuner.policy.alpha in ALPHAS


def test_a_replay_of_the_log_hits_what_the_engine_hit():
    # One request at a time, nothing evicted; the engine's checkpoints at the ends of prompts make no difference here.
    engine = Engine.make()
    conversation = tokens_of(random.Random(0), 100)
    for _ in range(4):
        request = engine.add(conversation, max_tokens=40)
        engine.run()
        conversation = request.tokens + tokens_of(random.Random(len(conversation)), 10)
    past = engine.scheduler.memory.history.so_far()
    hit_rate = past.log.hit_rate
    assert len(past.log) == 4 and hit_rate > 0.5
    assert past.replay("lru", 1 << 30) == pytest.approx(hit_rate)
    assert past.replay("adaptive", 1 << 30) == pytest.approx(hit_rate)


def test_of_siblings_one_is_logged():
    engine, prompt = Engine.make(), tokens_of(random.Random(0), 100)
    for index in range(4):
        engine.add(prompt, sibling_group="g", sample_index=index, max_tokens=3, stop_ids=())
    engine.run()
    history = engine.scheduler.memory.history
    assert engine.counters["prefill_tokens"] == 100 and len(history.log) == 1
    assert history.log.hit_rate == history.so_far().replay("lru", 1 << 30) == 0


def test_the_log_forgets_the_oldest():
    log = RequestLog(4, max_requests=3, max_blocks=12)
    for number in range(5):
        log.note(np.arange(number, number + 9), 6, 4)
    assert len(log) == 3 and [r.hit_len for r in log] == [4, 4, 4]
    log.note(np.arange(32), 30, 0)  # 8 blocks of the prompt, 8 of the whole: more than 12
    assert len(log) == 0 and log.hit_rate == 0


def test_names_of_blocks_differ_where_tokens_do():
    tokens = np.random.default_rng(0).integers(0, 3, 64_000)
    names = block_hashes(tokens, 8)
    texts = {}
    for name, block in zip(names.tolist(), tokens.reshape(-1, 8).tolist(), strict=True):
        assert texts.setdefault(name, block) == block
    assert len(texts) > 3000 and names.dtype == np.int32 and names.min() >= 0
    assert (block_hashes(tokens[:70], 32) == block_hashes(tokens[:64], 32)).all()


def test_a_request_of_one_token_is_remembered():
    engine = Engine.make()
    engine.add(tokens_of(random.Random(0), 100), max_tokens=1, stop_ids=())
    engine.run()
    assert len(engine.scheduler.memory.history.log) == 1
