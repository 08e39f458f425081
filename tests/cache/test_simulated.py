"""The cache without memory behind it: what it stores, what it refuses, what it knows of what it dropped."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from hybrid_jax.cache.policy.simulated import SimulatedCache
from hybrid_jax.cache.tree.eviction import LeastRecentlyUsed
from hybrid_jax.cache.tree.node import ARENA
from hybrid_jax.costs import Costs
from tests.cache.pools import is_stored

COSTS = Costs(flops_per_token=1, flops_per_key=0, kv_bytes=1, checkpoint_bytes=10)


def tokens(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


def simulated(capacity: int = 1000, *, leaves_only: bool = False, **options) -> SimulatedCache:
    return SimulatedCache(COSTS, capacity, LeastRecentlyUsed(leaves_only=leaves_only), **options)


def ask(cache: SimulatedCache, prompt: str, output: str = "") -> SimpleNamespace:
    """Tokens that were skipped, and whether prompt and output are cached now."""
    hit_len = cache.request(tokens(prompt), tokens(prompt + output))
    cache.check_invariants()
    stored = is_stored(cache, tokens(prompt + output))
    return SimpleNamespace(hit_len=hit_len, stored=stored)


def checkpoints(cache: SimulatedCache) -> list[int]:
    return sorted(node.end for node in cache.tree.root.walk() if node.has_checkpoint(ARENA))


def test_an_outcome_tells_what_was_skipped_and_stored():
    cache = simulated()
    ask(cache, "system: a", "bc")
    match = cache.tree.match(tokens("system: ax"))
    assert (match.num_tokens, match.match_len, match.cached_len) == (10, 9, 9)
    found = ask(cache, "system: ax")
    assert (found.hit_len, found.stored) == (0, True)


def test_a_request_leaves_a_checkpoint_at_its_end_and_where_it_parts():
    cache = simulated()
    ask(cache, "system: a", "bc")
    assert checkpoints(cache) == [11]
    ask(cache, "system: xy")
    assert checkpoints(cache) == [8, 10, 11]
    assert cache.budget.used == 11 + 2 + 3 * 10


def test_with_a_grain_checkpoints_stand_on_its_multiples_alone():
    cache = simulated(grain=4)
    ask(cache, "system: a", "bc")
    ask(cache, "system xyz!!!")
    assert checkpoints(cache) == [4, 8, 12]
    assert (
        cache.budget.used == 8 + 6 + 3 * 10
    )  # they share 6 tokens, the checkpoint of both is at 4


def test_what_stands_already_takes_no_more_bytes():
    cache = simulated()
    ask(cache, "hello", "you")
    used = cache.budget.used
    assert ask(cache, "hello", "you").stored
    assert (cache.budget.used, checkpoints(cache)) == (used, [8])


def test_a_prompt_shorter_than_the_grain_stores_nothing():
    cache = simulated(grain=8)
    assert not ask(cache, "short").stored
    assert (cache.budget.used, checkpoints(cache)) == (0, [])


@pytest.mark.parametrize(("capacity", "stored"), [(30, True), (29, False)])
def test_a_sequence_is_stored_where_it_fits_to_the_byte(capacity, stored):
    cache = simulated(capacity)
    assert ask(cache, "x" * 15, "y" * 5).stored is stored
    assert cache.budget.used == (30 if stored else 0)


def test_what_is_larger_than_the_cache_leaves_the_rest_in_place():
    cache = simulated(40)
    ask(cache, "abc")
    assert not ask(cache, "x" * 31).stored
    assert checkpoints(cache) == [3]


def test_the_beginning_that_two_share_is_stored_where_the_second_is_too_large():
    cache = simulated(40)
    ask(cache, "system: a")
    assert not ask(cache, "system: " + "b" * 30).stored
    assert checkpoints(cache) == [8, 9]


def test_the_path_that_a_request_resumes_from_stays_while_it_is_stored():
    # 8 + 10 bytes; 18 more tokens and a checkpoint fit beside the beginning's pages but not its checkpoint, which
    # is in use meanwhile: nothing can go.
    cache = simulated(40)
    ask(cache, "eight888")
    found = ask(cache, "eight888", "x" * 18)
    assert (found.hit_len, found.stored, checkpoints(cache)) == (0, True, [26])
    cache = simulated(40)
    ask(cache, "eight888")
    found = ask(cache, "eight888x", "x" * 17)
    assert (found.hit_len, found.stored, checkpoints(cache)) == (8, False, [8])


@pytest.mark.parametrize(("leaves_only", "refreshed"), [(True, [5, 8, 10]), (False, [8])])
def test_a_use_refreshes_the_path_or_the_resume_point_alone(leaves_only, refreshed):
    cache = simulated(leaves_only=leaves_only)
    for text in ("chain", "chain678", "chain67890", "other"):
        ask(cache, text)
    before = {node: node.last_use for node in cache.tree.root.walk()}
    cache.tree.use(cache.tree.match(tokens("chain678+" if not leaves_only else "chain67890+")))
    assert sorted(n.end for n, use in before.items() if n.last_use != use) == refreshed


# --- what is known of what is gone ----------------------------------------------------------------


def test_tokens_that_are_known_beyond_what_is_cached_show_where_prompts_part():
    seen = ["system: a", "x" * 25, "system: b", "system: c"]  # the second pushes the first out
    for history, expected in ((0, 0), (100, 8)):
        cache = simulated(40, history_tokens=history)
        assert [ask(cache, text).hit_len for text in seen] == [0, 0, 0, expected]


def test_no_more_is_known_than_asked_for():
    rng = np.random.default_rng(2)
    cache = simulated(100, history_tokens=50)
    for _ in range(100):
        cache.request(*[rng.integers(0, 4, rng.integers(1, 40), np.int32)] * 2)
        cache.check_invariants()
        cache.tree.make_room(0)  # what the last request made known is needed no more
        assert cache.tree.num_known_tokens <= 50
    assert cache.tree.counters.pruned_nodes > 0
