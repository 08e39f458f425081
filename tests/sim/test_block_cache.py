"""The cache of fixed blocks on traces worked out by hand; a block of 32 equal letters takes 42 bytes."""

from __future__ import annotations

import random

import pytest

from hybrid_jax.sim.prefix_cache.caches import BlockCache
from tests.sim.tiny import COSTS, hits, tokens

A, B, C, D = (letter * 32 for letter in "ABCD")
BLOCK = 42


def test_a_prompt_hits_whole_blocks_from_its_beginning():
    seen = [(A + B, C), (A + B + C + D,), (A + B + D + C,), (B + A,), (A + B[:31],)]
    assert hits("vllm", 20 * BLOCK, *seen) == [0, 96, 64, 0, 32]


def test_one_token_at_least_is_left_to_compute():
    assert hits("vllm", 20 * BLOCK, (A + B,), (A + B,), (A + B + "x",)) == [0, 32, 64]


def test_what_does_not_fill_a_block_is_not_cached():
    assert hits("vllm", 20 * BLOCK, (A + B[:31],), (A + B + C,)) == [0, 32]


def test_the_same_tokens_behind_others_are_another_block():
    assert hits("vllm", 20 * BLOCK, (A + C,), (B + C,), (B + A + C,), (A + C + D,)) == [
        0,
        0,
        32,
        64,
    ]


def test_the_block_used_longest_ago_goes_first():
    # Room for three. B is used again, so A goes for D.
    seen = [(A,), (B,), (C,), (A + "x",), (B + "x",), (D,), (C + "x",)]
    assert hits("vllm", 3 * BLOCK, *seen) == [0, 0, 0, 32, 32, 0, 0]
    seen[-1] = (A + "x",)
    assert hits("vllm", 3 * BLOCK, *seen)[-1] == 32


def test_of_a_sequence_the_last_block_goes_first():
    assert hits("vllm", 3 * BLOCK, (A + B,), (C,), (D,), (A + B + "x",)) == [0, 0, 0, 32]


def test_the_beginning_of_a_sequence_that_went_on_stays_longer_than_its_end():
    assert hits("vllm", 3 * BLOCK, (A,), (A + B,), (C,), (D,), (A + B + "x",)) == [0, 32, 0, 0, 32]


def test_of_a_request_that_does_not_fit_the_beginning_is_stored():
    cache = BlockCache(COSTS, 2 * BLOCK)
    cache.request(tokens(A + B), tokens(A + B + C + D))
    assert (len(cache._blocks), cache.peak) == (2, 2 * BLOCK)
    assert cache.request(tokens(A + B + C), tokens(A + B + C)) == 64


def test_a_capacity_below_one_block_stores_nothing():
    assert hits("vllm", BLOCK - 1, (A,), (A + B,)) == [0, 0]


def test_evictions_are_counted():
    cache = BlockCache(COSTS, 2 * BLOCK)
    for text in (A, B, A + "x", A + "x", C, D):
        cache.request(tokens(text), tokens(text))
    assert cache.evictions == 2


def test_of_a_hit_all_blocks_kv_is_reused_and_the_last_ones_state_resumed_from():
    cache = BlockCache(COSTS, 20 * BLOCK)
    for text in (A + B + C + D, A + B + C + "x", A + B + C + "y"):
        cache.request(tokens(text), tokens(text))
    assert (cache.num_known, len(cache.reused), len(cache.resumed)) == (4, 3, 1)


def test_blocks_have_the_size_that_is_asked_for():
    cache = BlockCache(COSTS, 1000, block_tokens=8)
    cache.request(tokens(A), tokens(A + B))
    assert cache.request(tokens(A + "x"), tokens(A + "x")) == 32
    assert cache.request(tokens(A[:20]), tokens(A[:20])) == 16
    assert (cache.num_known, cache.peak) == (8, 8 * 18)


@pytest.mark.parametrize("blocks", [1, 3, 10])
def test_the_budget_is_never_exceeded(blocks):
    rng = random.Random(blocks)
    cache = BlockCache(COSTS, blocks * BLOCK + BLOCK // 2)
    for _ in range(300):
        prompt = "".join(rng.choice((A, B, C)) for _ in range(rng.randrange(1, 5)))
        cache.request(tokens(prompt), tokens(prompt + rng.choice(("", D))))
        assert cache.peak <= blocks * BLOCK
    assert cache.peak == blocks * BLOCK
