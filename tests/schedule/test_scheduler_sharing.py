"""What requests share: prefixes in the cache, prompts that one of them computes, forks of siblings."""

import random

import pytest

from tests.schedule.simulated_engine import Engine, make_geometry, tokens_of


def test_the_same_prompt_again_skips_all_but_its_tail():
    engine = Engine.make()
    prompt = tokens_of(random.Random(0), 200)
    engine.add(prompt)
    engine.run()
    again = engine.add(prompt)
    engine.run()
    assert again.hit.num_tokens == 192 and engine.counters["cache_hit_tokens"] == 192
    engine.check()


def test_identical_prompts_wait_for_the_first_one():
    engine = Engine.make(prefill_tokens=512)
    prompt = tokens_of(random.Random(0), 100)
    requests = [engine.add(prompt) for _ in range(3)]
    engine.run()
    assert [r.hit.num_tokens for r in requests] == [0, 96, 96]
    assert engine.counters["waits"] == 2
    engine.check()


@pytest.mark.parametrize("kind", ["hybrid", "attention", "recurrent"])
@pytest.mark.parametrize("cache", ["lru", "off"])
@pytest.mark.parametrize("length", [5, 32, 64, 65, 100, 128, 300])
def test_siblings_compute_their_prompt_once(kind, cache, length):
    engine = Engine.make(geometry=make_geometry(kind=kind), cache=cache)
    prompt = tokens_of(random.Random(0), length)
    requests = engine.add_siblings(4, prompt, max_tokens=70, stop_ids=())
    engine.run()
    assert engine.counters["prefill_tokens"] == length and engine.counters["forks"] == 3
    assert engine.counters["copies"] == (3 if length % 64 and kind != "recurrent" else 0)
    assert [r.hit.num_tokens for r in requests] == [0] * 4
    engine.check()


def test_forks_share_the_first_ones_hit():
    engine = Engine.make()
    prompt = tokens_of(random.Random(0), 200)
    engine.add(prompt)
    engine.run()
    requests = engine.add_siblings(3, prompt)
    engine.run()
    assert [r.hit.num_tokens for r in requests] == [192] * 3
    assert engine.counters["prefill_tokens"] == 208 and engine.counters["cache_hits"] == 1
    engine.check()


def test_siblings_beyond_the_rows_fork_from_the_next_that_has_one():
    engine = Engine.make(max_rows=4)
    engine.add_siblings(7, tokens_of(random.Random(0), 100), max_tokens=50, stop_ids=())
    engine.run()
    assert engine.counters["forks"] == 5 and engine.counters["prefill_tokens"] == 104
    engine.check()


def test_a_row_is_kept_for_a_sibling_while_its_prompt_is_computed():
    engine = Engine.make(max_rows=3)
    rng = random.Random(0)
    siblings = engine.add_siblings(2, tokens_of(rng, 500), max_tokens=50, stop_ids=())
    others = [engine.add(tokens_of(rng, 10), max_tokens=3, stop_ids=()) for _ in range(9)]
    while not siblings[1].output.token_ids:
        engine.step()
    assert engine.counters["forks"] == 1 and any(not other.output.token_ids for other in others)
    engine.run()
    engine.check()


def test_exact_mode_never_forks():
    engine = Engine.make(exact=True)
    engine.add_siblings(3, tokens_of(random.Random(0), 100))
    engine.run()
    assert engine.counters["forks"] == 0
    engine.check()


def test_a_checkpoint_is_made_where_known_prompts_part():
    engine = Engine.make()
    rng = random.Random(0)
    shared = tokens_of(rng, 80)
    requests = [engine.add(shared + tokens_of(rng, 50)) for _ in range(3)]
    engine.run()
    assert [r.hit.num_tokens for r in requests] == [0, 64, 64]
    engine.check()


@pytest.mark.parametrize("declared, hit", [((), 0), ((100,), 96), ((40, 100), 96), ((31,), 0)])
def test_a_declared_breakpoint_leaves_a_checkpoint_for_the_second_prompt(declared, hit):
    engine = Engine.make()
    shared = tokens_of(random.Random(0), 100)
    engine.add([*shared, *tokens_of(random.Random(1), 60)], cache_breakpoints=declared)
    engine.run()
    second = engine.add([*shared, *tokens_of(random.Random(2), 60)])
    engine.run()
    assert second.hit.num_tokens == hit
    engine.check()


def test_prompts_that_come_together_wait_for_a_declared_breakpoint():
    engine = Engine.make(prefill_tokens=512)
    shared = tokens_of(random.Random(0), 100)
    tails = [tokens_of(random.Random(n), 60) for n in (1, 2)]
    requests = [engine.add([*shared, *tail], cache_breakpoints=(64,)) for tail in tails]
    engine.run()
    # Where they part is deeper than what was declared.
    assert [request.hit.num_tokens for request in requests] == [0, 96]
    assert [row.state_len for plan in engine.plans for row in plan.prefill][:2] == [64, 32]
    engine.check()


def test_a_prompt_that_arrives_while_its_prefix_is_computed_waits_for_it():
    engine = Engine.make()
    rng = random.Random(0)
    prompt = tokens_of(rng, 500)
    engine.add(prompt)
    engine.step()
    late = engine.add(prompt[:400] + tokens_of(rng, 30))
    engine.run()
    assert late.hit.num_tokens == 384
    engine.check()


def test_a_shorter_prompt_on_the_path_gets_its_own_checkpoint():
    engine = Engine.make()
    prompt = tokens_of(random.Random(0), 300)
    engine.add(prompt)
    short = engine.add(prompt[:150])
    engine.run()
    assert short.hit.num_tokens == 128
    engine.check()


def test_a_later_request_overtakes_one_that_waits_but_not_for_ever():
    engine = Engine.make(max_rows=1, max_model_len=2000, num_frames=2000)
    engine.scheduler.admission.patience = 2
    rng = random.Random(0)
    prompt = tokens_of(rng, 40)
    tree = engine.scheduler.memory.tree
    tree.promise("never kept", tree.announce(prompt), 32)
    waiting = engine.add(prompt, max_tokens=1)
    others = [engine.add(tokens_of(rng, 10), max_tokens=1) for _ in range(5)]
    engine.run()
    assert engine.ended == [r.request_id for r in [*others[:2], waiting, *others[2:]]]


def test_a_row_resuming_inside_a_page_copies_it():
    engine = Engine.make(geometry=make_geometry(page_tokens=128))
    rng = random.Random(0)
    shared = tokens_of(rng, 40)
    for _ in range(3):
        engine.add(shared + tokens_of(rng, 20))
        engine.run()
    assert engine.device.events["copies"] == engine.counters["copies"] == 2
    engine.check()


def test_without_a_cache_nothing_is_matched_or_kept():
    engine = Engine.make(cache="off")
    prompt = tokens_of(random.Random(0), 100)
    for _ in range(2):
        assert engine.add(prompt).hit.num_tokens == 0
        engine.run()
    assert engine.counters["free_frames"] == 399 and "cache_hits" not in engine.counters
    engine.check()


def test_resetting_the_cache_leaves_running_requests_alone():
    engine = Engine.make()
    prompt = tokens_of(random.Random(0), 400)
    for _ in range(3):
        engine.add(prompt, max_tokens=60)
    for _ in range(12):
        engine.step()
        engine.scheduler.reset_prefix_cache()
        engine.scheduler.check_invariants()
    engine.run()
    engine.check()
