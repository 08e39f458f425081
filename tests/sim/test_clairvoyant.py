"""The clairvoyant policy: what it knows of the future, beside plain loops, and what it evicts, by hand."""

from __future__ import annotations

import math
import random

import pytest

from hybrid_jax.costs import Costs
from hybrid_jax.sim.prefix_cache.caches import make_cache
from hybrid_jax.sim.prefix_cache.clairvoyant import Clairvoyant, Future
from tests.cache.pools import evict
from tests.sim.tiny import COSTS, hits, request

KINDS = {
    "hybrid": COSTS,
    "attention": Costs(flops_per_token=1, flops_per_key=0, kv_bytes=1, checkpoint_bytes=0),
    "recurrent": Costs(flops_per_token=1, flops_per_key=0, kv_bytes=0, checkpoint_bytes=10),
}


def texts(seed: int, count: int = 60) -> list[tuple[str, str]]:
    """Prompts of two letters that often go on from each other, or part inside each other; and outputs."""
    rng = random.Random(seed)
    draw = lambda least, most: "".join(rng.choice("ab") for _ in range(rng.randrange(least, most)))
    pairs: list[tuple[str, str]] = []
    for _ in range(count):
        old = "".join(rng.choice(pairs))[: rng.randrange(120)] if pairs else ""
        pairs.append(((old if rng.random() < 0.8 else "") + draw(1, 60), draw(0, 5)))
    return pairs


def text(node) -> str:
    return "".join(chr(token) for part in node.path() for token in part.tokens.tolist())


# --- what it knows --------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_uses_are_the_requests_whose_prompts_go_on_behind_a_node(seed):
    pairs = texts(seed)
    future = Future([request(*pair) for pair in pairs])
    assert len(future.uses) > 50
    for node, uses in future.uses.items():
        prefix = text(node)
        assert uses == [
            number
            for number, (prompt, _) in enumerate(pairs)
            if prompt.startswith(prefix) and len(prompt) > len(prefix)
        ]


def test_every_branch_and_end_that_a_later_prompt_passes_has_uses():
    # "ab" is where the first two part, "abc" an end that the third goes on from; nothing goes on from the rest.
    future = Future([request("abc"), request("abd"), request("abce")])
    assert {text(node): uses for node, uses in future.uses.items()} == {
        "ab": [0, 1, 2], "abc": [2],
    }  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(15))
def test_a_node_is_found_in_the_future_on_whichever_path_it_lies(kind, seed):
    # A branch may become a candidate while a request of another path is at hand, that path being shorter too.
    trace = [request(*pair) for pair in texts(seed)]
    order = Clairvoyant(trace, KINDS[kind])
    cache = make_cache("optimal", KINDS[kind], 300, trace)
    cache.tree.arena.candidates.evictable = cache._policy = order
    for asked in trace:
        cache.request(asked.prompt, asked.whole)
        cache.check_invariants()
        for node, place in order._place.items():
            assert text(place).startswith(text(node)) and place.start < node.end <= place.end


@pytest.mark.parametrize("seed", range(5))
def test_nothing_is_kept_of_a_node_that_left_the_tree(seed):
    # Without recurrent layers the end of a prompt is a node of its own until its answer stands too.
    costs = KINDS["attention"]
    trace = [request(*pair) for pair in texts(seed)]
    cache = make_cache("optimal", costs, 300, trace)
    for asked in trace:
        cache.request(asked.prompt, asked.whole)
    order, nodes = cache.tree.policy, set(cache.tree.root.walk())
    assert order._place and set(order._place) <= nodes
    assert set(order._here.values()) <= nodes and set(order._next) <= nodes


# --- what it does ---------------------------------------------------------------------------------

# An entry of 4 tokens takes 14 bytes: of 30 bytes, two fit.
A, B, C = ("aaaa",), ("bbbb",), ("cccc",)


def test_the_entry_that_is_not_asked_for_again_goes():
    # When C comes, A was used longest ago; but A is what comes next.
    asked = (A, B, C, ("aaaaX",), ("ccccX",))
    assert hits("optimal", 30, *asked) == [0, 0, 0, 4, 4]
    assert hits("lru", 30, *asked) == [0, 0, 0, 0, 4]


def test_of_equal_entries_the_one_that_is_asked_for_last_goes():
    # 28 bytes, and 14 more when C comes: the waits are 1, 2 and 3 requests. Each end of five letters takes 11
    # bytes more and is of no use to anyone, so it goes at once.
    for first, second, third in ("abc", "acb", "bca", "cba"):
        later = [(letter * 4 + "X",) for letter in (first, second, third)]
        assert hits("optimal", 30, A, B, C, *later) == [0, 0, 0, 4, 4, 0]


def test_what_is_new_goes_itself_where_nobody_asks_for_it():
    strangers = [(letter * 4,) for letter in "uvwxyz"]
    assert hits("optimal", 14, A, *strangers, ("aaaaX",)) == [0] * 7 + [4]
    assert hits("lru", 14, A, *strangers, ("aaaaX",)) == [0] * 8


def test_without_checkpoints_a_path_that_will_be_left_half_way_is_kept():
    # Four bytes an entry, eight in all: when C comes, of A half will be used, of B nothing.
    asked = (A, B, C, ("aaX",))
    assert hits("optimal", 8, *asked, costs=KINDS["attention"]) == [0, 0, 0, 2]


@pytest.mark.parametrize(("strangers", "expected"), [(1, [0, 20]), (3, [2, 0])])
def test_tokens_per_byte_are_weighed_against_the_wait(strangers, expected):
    # L spares 20 tokens for 30 bytes, S 2 for 12; of 31 bytes one of them fits. S is asked for in 1 request:
    # 2 / 12 / 1 = 0.167. L in 3: 20 / 30 / 3 = 0.222; or in 5: 0.133.
    long, short, again = ("l" * 20,), ("ss",), [("ssX",), ("l" * 20 + "X",)]
    asked = (long, short, again[0], *[(letter,) for letter in "tuv"[:strangers]], again[1])
    found = hits("optimal", 31, *asked)
    assert [found[2], found[-1]] == expected


def test_a_checkpoint_whose_uses_fall_to_a_deeper_one_goes_first():
    # pppp and ppppqqqq stand, 28 bytes, and both lie on the last prompt's path. z takes 11 more, of 38: the
    # checkpoint at 4 goes, as that at 8 serves its only use.
    asked = (("pppp",), ("ppppqqqq",), ("z",), ("zX",), ("ppppqqqqr",))
    assert hits("optimal", 38, *asked) == [0, 4, 0, 1, 8]
    assert hits("sglang", 38, *asked) == [0, 4, 0, 1, 4]


def test_once_the_deeper_checkpoint_is_gone_the_one_above_has_its_uses():
    trace = [request(prompt) for prompt in ("pppp", "ppppqqqq", "ppppqqqqr")]
    cache = make_cache("optimal", COSTS, 100, trace)
    for asked in trace[:2]:
        cache.request(asked.prompt, asked.whole)
    order = cache.tree.policy
    upper, lower = sorted(order.candidates, key=lambda node: node.end)
    assert (order._next_use(upper), order._next_use(lower)) == (math.inf, 2)
    order.discard(upper)  # so that the lower one is all there is to evict
    assert evict(cache.tree, 1) == 4 + 10
    assert order._next_use(upper) == 2
