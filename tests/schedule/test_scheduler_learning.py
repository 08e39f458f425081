"""What a policy that learns is told by the engine: each prompt once, and nothing left of it after a reset."""

import random

import pytest

from hybrid_jax.cache.policy.points import DECLARED, END, OTHER
from tests.schedule.simulated_engine import Engine, tokens_of


def watched(engine):
    """Lengths of the prompts that the policy was asked about, and of the sequences that ended."""
    asked, ended, policy = [], [], engine.scheduler.memory.tree.policy
    ask, end = policy.asked, policy.ended

    def note_asked(tree, end_node, known_len, declared):
        asked.append((end_node.end, known_len))
        return ask(tree, end_node, known_len, declared)

    def note_ended(node, relation):
        ended.append(node.end)
        end(node, relation)

    policy.asked, policy.ended = note_asked, note_ended
    return asked, ended


def points(engine):
    tree = engine.scheduler.memory.tree
    return [node for node in tree.root.walk() if node.note is not None]


def test_siblings_ask_once_and_end_once():
    engine = Engine.make(cache="adaptive")
    asked, ended = watched(engine)
    prompt = tokens_of(random.Random(0), 100)
    for index in range(4):
        engine.add(prompt, sibling_group="g", sample_index=index, max_tokens=40, stop_ids=())
    engine.run()
    assert asked == [(100, 0)]
    assert ended == [128]  # 139 tokens were processed
    engine.check()


def test_a_preempted_sequence_asks_once_and_ends_once():
    engine = Engine.make(cache="adaptive", num_frames=26, max_rows=2)
    asked, ended = watched(engine)
    rng = random.Random(0)
    requests = [engine.add(tokens_of(rng, 100), max_tokens=200, stop_ids=()) for _ in range(2)]
    engine.run()
    assert sum(request.course.num_preemptions for request in requests) > 0
    assert asked == [(100, 0)] * 2 and ended == [288] * 2  # 299 tokens were processed
    engine.check()


def test_the_next_turn_asks_with_what_is_known_of_it():
    engine = Engine.make(cache="adaptive")
    asked, _ = watched(engine)
    rng = random.Random(0)
    first = engine.add(tokens_of(rng, 100), max_tokens=40, stop_ids=())
    engine.run()
    engine.add(
        first.prompt + first.output.token_ids + tokens_of(rng, 10), max_tokens=5, stop_ids=()
    )
    engine.run()
    assert asked == [(100, 0), (150, 128)]
    engine.check()


def test_a_reset_leaves_no_points():
    engine = Engine.make(cache="adaptive")
    rng = random.Random(0)
    shared = tokens_of(rng, 80)
    for _ in range(4):
        engine.add(shared + tokens_of(rng, 50))
    engine.run()
    policy = engine.scheduler.memory.tree.policy
    assert len(points(engine)) >= 4 and len(policy) > 0
    engine.scheduler.reset_prefix_cache()
    assert points(engine) == [] and len(policy) == 0 and policy.moved == {}
    engine.check()


def test_a_reset_while_requests_run_asks_none_of_them_again():
    engine = Engine.make(cache="adaptive")
    asked, _ = watched(engine)
    prompt = tokens_of(random.Random(0), 400)
    for _ in range(3):
        engine.add(prompt, max_tokens=60)
    for _ in range(12):
        engine.step()
        engine.scheduler.reset_prefix_cache()
        engine.scheduler.check_invariants()
    engine.run()
    assert [length for length, _ in asked] == [400] * 3
    engine.check()


@pytest.mark.parametrize("frames", [26, 60, 200])
def test_random_traffic_is_computed_as_without_a_cache(frames):
    engine = Engine.make(cache="adaptive", num_frames=frames, max_rows=3)
    rng = random.Random(frames)
    shared = tokens_of(rng, 120)
    for _ in range(25):
        prompt = shared[: rng.randrange(1, 120)] + tokens_of(rng, rng.randrange(1, 60))
        engine.add(prompt, max_tokens=rng.randrange(1, 40))
        for _ in range(rng.randrange(6)):
            engine.step()
    engine.run()
    engine.check()


def test_what_a_caller_declares_is_a_class_of_its_own():
    engine = Engine.make(cache="adaptive")
    shared = tokens_of(random.Random(0), 100)
    engine.add([*shared, *tokens_of(random.Random(1), 60)], cache_breakpoints=(20, 100))
    engine.run()
    found = {node.end: node.note.kind for node in points(engine)}
    assert found == {96: DECLARED, 128: OTHER, 160: END}  # 20 lies before the first grain
    engine.check()


def test_a_prompt_that_is_aborted_half_way_is_no_end():
    engine = Engine.make(cache="adaptive", prefill_tokens=64)
    asked, ended = watched(engine)
    engine.add(tokens_of(random.Random(0), 300), name="a")
    engine.step()
    engine.scheduler.abort("a")
    engine.run()
    assert asked == [(300, 0)] and ended == []
    assert len(engine.scheduler.memory.history.log) == 0
    engine.check()
