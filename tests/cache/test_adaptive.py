"""`adaptive`: what it evicts beside a search over all candidates, and what it notes of prompts and their ends."""

from __future__ import annotations

import pytest

from hybrid_jax.cache.policy.adaptive import Adaptive
from hybrid_jax.cache.policy.points import BRANCH, CONTINUED, END, FRESH, OTHER, PARTED
from hybrid_jax.cache.policy.simulated import SimulatedCache
from hybrid_jax.cache.tree.node import ARENA, Held, Node
from tests.cache.pools import is_stored
from tests.cache.traffic import ask, text, tokens, traffic
from tests.cache.weighed import COSTS, checked


def points(cache: SimulatedCache) -> dict:
    """Points of the tree, by the prefix that they stand for."""
    return {text(node): node.note for node in cache.tree.root.walk() if node.note is not None}


def checkpoints(cache: SimulatedCache) -> set[str]:
    return {text(node) for node in cache.tree.root.walk() if node.has_checkpoint(ARENA)}


# --- beside a search over all candidates ----------------------------------------------------------


@pytest.mark.parametrize("kind", COSTS)
@pytest.mark.parametrize("history", [10**6, 300])
@pytest.mark.parametrize("grain", [1, 8])
def test_the_victim_is_worth_the_least_of_all_candidates(kind, history, grain):
    num_victims = 0
    for seed, capacity in enumerate((60, 250, 600)):
        cache = checked(kind, capacity, history=history, grain=grain)
        for pair in traffic(seed, 150):
            ask(cache, *pair)
            cache.check_invariants()
            cache.tree.policy.check()
        num_victims += len(cache.tree.policy.victims)
    assert num_victims > 200


def test_an_empty_one_has_no_victim():
    order = Adaptive(COSTS["hybrid"])
    assert order.pop() is None and len(order) == 0


def test_when_all_are_gone_there_is_no_victim():
    cache = checked("hybrid", 1000)
    for prompt in ("abc", "abcd", "x"):
        ask(cache, prompt)
    assert len(cache.tree.policy) == 3
    assert not cache.tree.make_room(1001)
    assert len(cache.tree.policy) == 0 and cache.tree.policy.pop() is None


def test_of_equals_the_one_that_came_first_goes_first():
    # Two requests apart: at ages 34 and 36 both are in the first part of 32 to 64, 8 wide.
    cache = checked("hybrid", 10_000)
    for prompt in ("aaaa", "x", "bbbb", *map(str, range(10, 43))):
        ask(cache, prompt)
    order = cache.tree.policy
    order.catch_up()
    nodes = {text(node): node for node in order.candidates}
    row = order.candidates[nodes["aaaa"]]
    assert list(order._members[row]) == [nodes["aaaa"], nodes["bbbb"]]
    for prompt in nodes.keys() - {"aaaa", "bbbb"}:
        order.discard(nodes[prompt])
    assert Adaptive.pop(order) is nodes["aaaa"] and Adaptive.pop(order) is nodes["bbbb"]


# --- groups ---------------------------------------------------------------------------------------


def key(cache: SimulatedCache, prefix: str) -> tuple[int, int, int]:
    """Class, step and level of the queue that a prefix's node is in."""
    order = cache.tree.policy
    order.catch_up()
    (node,) = (n for n in order.candidates if text(n) == prefix)
    return order._keys[order.candidates[node]]


def test_a_node_changes_its_group_when_its_point_is_of_another_class():
    cache = checked("hybrid", 1000)
    ask(cache, "a" * 40)
    before = key(cache, "a" * 40)
    ask(cache, "a" * 40 + "b")  # uses it: a class of its own, and a new life
    assert key(cache, "a" * 40)[0] != before[0] and key(cache, "a" * 40)[1] == 0


def test_a_node_changes_its_group_as_its_point_grows_older():
    cache = checked("hybrid", 1000)
    ask(cache, "a" * 40)
    steps = []
    for letter in "bcde":
        steps.append(key(cache, "a" * 40)[1])
        ask(cache, letter)
    assert steps == [0, 2, 3, 4]  # ages 1, 2, 3 and 4


def test_a_node_changes_its_group_when_the_bytes_it_frees_change():
    # 40 tokens for 10 + 40 bytes, level 8 * log2(0.8) = -3; inside a path for the 10 alone: 8 * log2(4) = 16.
    cache = checked("hybrid", 1000)
    ask(cache, "a" * 40)
    assert key(cache, "a" * 40)[2] == -3
    ask(cache, "a" * 40 + "b" * 20)
    assert key(cache, "a" * 40)[2] == 16


def test_a_node_changes_its_group_when_the_tokens_it_spares_change():
    # 20 tokens for 30 bytes below the other: 8 * log2(2 / 3) = -5; without it 60 for 70: 8 * log2(6 / 7) = -2.
    cache = checked("hybrid", 1000)
    ask(cache, "a" * 40)
    ask(cache, "a" * 40 + "b" * 20)
    assert key(cache, "a" * 40 + "b" * 20)[2] == -5
    cache.tree.disown(next(n for n in cache.tree.root.walk() if n.end == 40).slots[ARENA])
    assert key(cache, "a" * 40 + "b" * 20)[2] == -2


def test_cached_nodes_without_a_checkpoint_get_no_point_where_one_is_needed():
    node = Node(tokens("abc"), 0, parent=Node(tokens(""), 0), held={ARENA: Held(range(3))})
    order = Adaptive(COSTS["hybrid"])
    order.add(node)
    assert node in order and node.note is None
    order = Adaptive(COSTS["attention"])
    order.add(node)
    assert node.note.kind == OTHER


# --- what it notes --------------------------------------------------------------------------------

LINE = "s" * 40


def test_the_end_of_prompt_and_output_is_a_point():
    cache = checked("hybrid", 1000)
    ask(cache, "abc", "de")
    found = points(cache)
    assert found.keys() == {"abcde"}
    assert (found["abcde"].kind, found["abcde"].relation) == (END, FRESH)


def test_where_a_prompt_parts_a_branch_is_noted_and_the_path_it_parted_from_is_marked():
    cache = checked("hybrid", 1000)
    ask(cache, LINE + "aa")
    ask(cache, LINE + "aa" + "bb")  # goes on from the first
    ask(cache, LINE + "cc")
    found = points(cache)
    assert found.keys() == {LINE, LINE + "aa", LINE + "aabb", LINE + "cc"}
    assert (found[LINE].kind, found[LINE].detail) == (BRANCH, 4)  # 40 of 42 tokens
    # 40 / 42 and 40 / 44 lie in the last fifth. The first was gone on from before.
    assert {name: point.split for name, point in found.items()} == {
        LINE: 0, LINE + "aa": 5, LINE + "aabb": 5, LINE + "cc": 0,
    }  # fmt: skip
    assert found[LINE + "aa"].hits == 1
    assert (found[LINE + "cc"].relation, found[LINE + "aabb"].relation) == (PARTED, CONTINUED)


def test_only_the_first_parting_at_a_place_marks_a_path():
    cache = checked("hybrid", 1000)
    for tail in ("aa", "bb", "aadd", "cc"):
        ask(cache, LINE + tail)
    found = points(cache)
    assert [found[LINE + tail].split for tail in ("aa", "bb", "aadd", "cc")] == [5, 0, 0, 0]


def test_below_the_next_branch_nothing_is_marked():
    cache = checked("hybrid", 1000)
    for prompt in (LINE + "aa", LINE + "bb", LINE[:20] + "cc"):
        ask(cache, prompt)
    found = points(cache)
    # The third parts at 20, above the branch at 40: that is marked, what hangs below it is not again.
    assert found[LINE].split == 1 + 2  # 20 of 40
    assert found[LINE + "bb"].split == 0


def test_a_branch_lies_on_the_grain_at_or_above_the_parting():
    cache = checked("hybrid", 1000, grain=16)
    ask(cache, "s" * 45 + "a" * 20)
    ask(cache, "s" * 45 + "b" * 20)
    assert {"s" * 32} == {name for name, point in points(cache).items() if point.kind == BRANCH}
    assert "s" * 32 in checkpoints(cache)


def test_where_prompts_part_before_the_first_grain_there_is_no_branch():
    cache = checked("hybrid", 1000, grain=16)
    for letter in "ab":
        ask(cache, "s" * 15 + letter * 20)
    assert BRANCH not in {point.kind for point in points(cache).values()}


@pytest.mark.parametrize(("shared", "made"), [(31, False), (32, True)])
def test_a_branch_gets_a_checkpoint_where_it_spares_enough(shared, made):
    cache = checked("hybrid", 1000)
    ask(cache, "s" * shared + "a")
    ask(cache, "s" * shared + "b")
    assert ("s" * shared in checkpoints(cache)) == made
    assert points(cache)["s" * shared].kind == BRANCH


@pytest.mark.parametrize(("between", "made"), [(31, False), (32, True)])
def test_what_a_branch_spares_is_counted_from_the_hit_above_it(between, made):
    cache = checked("hybrid", 1000)
    ask(cache, "h" * 50)
    branch = "h" * 50 + "s" * between
    assert ask(cache, branch + "a") == 50 == ask(cache, branch + "b")
    assert (branch in checkpoints(cache)) == made


def test_going_on_from_a_known_end_makes_no_branch():
    cache = checked("hybrid", 1000)
    ask(cache, LINE)
    ask(cache, LINE + "more")
    assert {point.kind for point in points(cache).values()} == {END}


def test_a_prompt_uses_the_deepest_point_that_leaves_a_token_to_compute():
    cache = checked("hybrid", 1000)
    for prompt in (LINE, LINE + "ab", LINE + "ab"):
        ask(cache, prompt)
    found = points(cache)
    # The third is the second again: it uses the one above, and its own end counts as used as well.
    assert (found[LINE].hits, found[LINE + "ab"].hits) == (2, 1)


def without(cache: SimulatedCache, prefix: str) -> None:
    """Evicts the checkpoint of a prefix; it stays known."""
    (node,) = (n for n in cache.tree.root.walk() if n.has_checkpoint(ARENA) and text(n) == prefix)
    cache.tree._evict(node)


def test_a_prompt_whose_point_was_evicted_uses_the_branch_it_resumes_from_as_well():
    cache = checked("hybrid", 1000)
    for prompt in (LINE + "aa", LINE + "bb"):
        ask(cache, prompt)
    without(cache, LINE + "aa")
    found = points(cache)
    before = (found[LINE].hits, found[LINE + "aa"].hits)
    assert ask(cache, LINE + "aacc") == 40
    assert (found[LINE].hits, found[LINE + "aa"].hits) == (before[0] + 1, before[1] + 1)


def test_a_prompt_whose_point_was_evicted_does_not_use_an_end_that_it_resumes_from():
    cache = checked("hybrid", 1000)
    for prompt in (LINE, LINE + "aa"):
        ask(cache, prompt)
    without(cache, LINE + "aa")
    assert ask(cache, LINE + "aabb") == 40
    found = points(cache)
    assert (found[LINE].hits, found[LINE + "aa"].hits) == (1, 1)


@pytest.mark.parametrize("kind", COSTS)
def test_a_point_above_a_cached_one_is_not_used(kind):
    cache = checked(kind, 1000)
    for prompt in (LINE + "aa", LINE + "bb"):
        ask(cache, prompt)
    found = points(cache)
    before = found[LINE].hits
    assert ask(cache, LINE + "aacc") == 42
    assert (found[LINE].hits, found[LINE + "aa"].hits) == (before, 1)


@pytest.mark.parametrize("capacity", [60, 80, 100])
def test_the_beginning_that_all_chats_share_stays_when_no_chat_does(capacity):
    # The line takes 50 bytes. Twenty chats take turns, so the end of each is evicted before it is asked for again.
    cache, chats = checked("hybrid", capacity), [LINE + letter for letter in "abcdefghijklmnopqrst"]
    hits = []
    for turn in range(300):
        chats[turn % 20] += f"{turn:03}"
        hits.append(ask(cache, chats[turn % 20]))
    assert min(hits[100:]) == len(LINE)


# --- history --------------------------------------------------------------------------------------


def test_points_survive_their_eviction_and_count_as_used_after_it():
    cache = checked("hybrid", 1000)
    ask(cache, LINE)
    point = points(cache)[LINE]
    cache.tree.make_room(1000)
    assert checkpoints(cache) == set() and points(cache) == {LINE: point} and point.life
    assert ask(cache, LINE + "b") == 0
    assert points(cache)[LINE] is point and point.hits == 1


def test_a_prompt_that_parts_from_an_evicted_one_is_seen():
    cache = checked("hybrid", 1000)
    ask(cache, LINE + "aa")
    cache.tree.make_room(1000)
    ask(cache, LINE + "bb")
    assert checkpoints(cache) == {LINE, LINE + "bb"}
    assert points(cache)[LINE + "aa"].split == 5


def test_points_die_with_their_tokens():
    # 60 tokens beyond those that are cached are known: of two ends of 40, evicted, one.
    cache = checked("hybrid", 1000, history=60)
    ask(cache, "a" * 40)
    point = points(cache)["a" * 40]
    ask(cache, "b" * 40)
    cache.tree.make_room(1000)
    assert points(cache).keys() == {"b" * 40} and not point.life


def test_a_reset_leaves_no_trace_of_the_tree():
    cache = checked("hybrid", 300)
    for pair in traffic(0, 60):
        ask(cache, *pair)
    order, old = cache.tree.policy, list(cache.tree.root.walk())
    cache.tree.reset()
    assert all(node.note is None for node in old)
    assert (len(order), order.moved, order._rows) == (0, {}, {})
    assert not any(order._members)
    order.check()
    # What was learned stays; entries in the queues of ages are outdated, and count nothing.
    lived = order.points.tables.counts()[:2].copy()
    for _ in range(5):
        order.points.next_request()
    assert (order.points.tables.counts()[:2] <= lived).all()
    ask(cache, "abc")
    assert points(cache).keys() == {"abc"}


def test_what_is_new_and_worth_least_goes_itself():
    # The line takes 50 bytes, a tail of one token 11: of 60 both do not fit. The line is what all prompts share.
    cache, letters = checked("hybrid", 60), "abcdefghijklmnop"
    stored = []
    for letter in letters:
        ask(cache, LINE + letter)
        stored.append(is_stored(cache, tokens(LINE + letter)))
    assert not any(stored[2:])
    assert checkpoints(cache) == {LINE}
    assert len(points(cache)) == 1 + len(letters)


def test_what_is_larger_than_the_cache_evicts_nothing_but_is_known():
    cache = checked("hybrid", 60)
    ask(cache, LINE)
    ask(cache, "x" * 51)
    assert checkpoints(cache) == {LINE} and "x" * 51 in points(cache)
