"""What each policy hits on traces of letters: a token takes 1 byte, a checkpoint 10; the sums stand beside them."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest

from hybrid_jax.sim.prefix_cache.caches import NAMES, make_cache
from tests.sim.tiny import COSTS, hits, request

PLENTY = 10_000
CHECKPOINTS = ("sglang", "lru", "alpha:0", "alpha:1", "marconi", "marconi-code")


# --- room for everything --------------------------------------------------------------------------


@pytest.mark.parametrize("policy", CHECKPOINTS)
def test_a_conversation_resumes_at_the_end_of_its_last_turn(policy):
    seen = [("hello", "you"), ("helloyou how", " fine"), ("helloyou how fine!", "")]
    assert hits(policy, PLENTY, *seen) == [0, 8, 17]


@pytest.mark.parametrize("policy", CHECKPOINTS)
def test_a_shared_prefix_is_hit_from_its_third_prompt_on(policy):
    # The second shows that it is shared, and leaves a checkpoint where the two part.
    assert hits(policy, PLENTY, ("systemA",), ("systemB",), ("systemC",), ("sysX",)) == [0, 0, 6, 0]


@pytest.mark.parametrize("policy", CHECKPOINTS)
def test_the_same_prompt_again_hits_nothing_where_its_only_checkpoint_is_its_end(policy):
    assert hits(policy, PLENTY, ("same",), ("same",), ("same+",)) == [0, 0, 4]


@pytest.mark.parametrize("policy", CHECKPOINTS)
def test_prompts_that_part_inside_an_answer_share_the_answers_beginning(policy):
    seen = [("ask", "answer"), ("askanswxyz",), ("askansw!",)]
    assert hits(policy, PLENTY, *seen) == [0, 0, 7]


def test_with_a_grain_checkpoints_stand_on_its_multiples():
    # 11 tokens leave one at 8; "abcdefgh" parts at 5, and leaves one at 4.
    seen = [("abcdefgh", "ijk"), ("abcdefghijkl",), ("abcdeXXX",), ("abcdeYY",)]
    assert hits("lru", PLENTY, *seen, grain=4) == [0, 8, 0, 4]
    assert hits("lru", PLENTY, *seen) == [0, 11, 0, 5]


def test_without_recurrent_layers_any_cached_prefix_is_hit():
    attention = replace(COSTS, checkpoint_bytes=0)
    seen = [("systemA", "yes"), ("systemB",), ("systemAyesno",), ("systemB",)]
    assert hits("lru", PLENTY, *seen, costs=attention) == [0, 6, 10, 6]
    assert hits("lru", PLENTY, *seen, costs=attention, grain=4) == [0, 4, 8, 4]


def test_without_attention_checkpoints_alone_take_memory():
    recurrent = replace(COSTS, kv_bytes=0)
    long = "x" * 1000
    seen = [(long,), (long + "y",), (long + "yz",)]
    assert hits("lru", 30, *seen, costs=recurrent) == [0, 1000, 1001]
    assert hits("lru", 30, *seen) == [0, 0, 0]


def test_no_cache_hits_nothing():
    assert hits("none", 1, ("abc",), ("abcd",), ("abcd",)) == [0, 0, 0]


@pytest.mark.parametrize("seed", range(5))
def test_the_endless_cache_hits_the_longest_prefix_of_any_earlier_request(seed):
    rng = random.Random(seed)
    draw = lambda most: "".join(rng.choice("ab") for _ in range(rng.randrange(most)))
    earlier, seen, expected = [], [], []
    for _ in range(150):
        old = rng.choice(earlier)[: rng.randrange(40)] if earlier and rng.random() < 0.7 else ""
        prompt, output = (old + draw(12)) or "c", draw(6)
        shared = max((common(prompt, text) for text in earlier), default=0)
        expected.append(min(shared, len(prompt) - 1))  # one token is left to compute
        earlier.append(prompt + output)
        seen.append((prompt, output))
    assert hits("infinite", 1, *seen) == expected
    assert sum(expected) > 500


def common(a: str, b: str) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


# --- memory runs out ------------------------------------------------------------------------------

# Two turns leave checkpoints at 8 and 12: 8 + 10 + 4 + 10 = 32 bytes. A stranger needs 11, 8 of 40 are free.
TURNS = [("pppp", "qqqq"), ("ppppqqqqrr", "ss"), ("z",)]


def test_lru_drops_the_checkpoint_inside_a_conversation_first():
    # It was used before the end was made. Its pages stay, and the third turn resumes at the end.
    assert hits("lru", 40, *TURNS, ("ppppqqqqrrssT",)) == [0, 8, 0, 12]


def test_sglang_drops_the_end_of_a_conversation_and_keeps_its_middle():
    assert hits("sglang", 40, *TURNS, ("ppppqqqqrrssT",)) == [0, 8, 0, 8]


@pytest.mark.parametrize("policy", ["sglang", "lru"])
def test_a_use_keeps_a_prompt_longer_than_one_that_came_later(policy):
    # 13 bytes each of aaa and bbb, 11 more of A: 37. ccc needs 13, 3 are free.
    seen = [("aaa",), ("bbb",), ("aaaA",), ("ccc",)]
    assert hits(policy, 40, *seen, ("aaaAX",)) == [0, 0, 3, 0, 4]
    assert hits(policy, 40, *seen, ("bbbX",)) == [0, 0, 3, 0, 0]


# FLOPs are tokens here, so the efficiency of an end is n / (10 + n): 20 / 30 for the old long one, 2 / 12 for the
# new short one; both together take 42 bytes. Scaled over the two: 1 and 0; recency: 0 and 1. So S(long) = alpha and
# S(short) = 1. A third of 13 bytes arrives, 3 of 45 are free: the one with the least S goes.
LONG, SHORT = ("l" * 18, "LL"), ("s", "S")
THEN = [("ttt",), ("l" * 18 + "LL" + "more",)]


@pytest.mark.parametrize(
    ("alpha", "expected"),
    [(0, 0), (0.5, 0), (1, 0), (1.1, 20), (2, 20)],  # at 1 they are equal: the older goes
)
def test_alpha_weighs_flops_per_byte_against_age(alpha, expected):
    assert hits(f"alpha:{alpha}", 45, LONG, SHORT, *THEN) == [0, 0, 0, expected]


@pytest.mark.parametrize(("policy", "expected"), [("alpha:20", 0), ("alpha-code:20", 5)])
def test_the_published_code_charges_an_end_for_all_before_it(policy, expected):
    # The end after 30 a spares 10 more than the one after 20: 10 / (10 + 10) by its own bytes, 10 / (10 + 30) by
    # all; c spares 5 / (10 + 5) either way. 5 of 70 bytes are free when d asks for 15.
    seen = [("a" * 20,), ("a" * 30,), ("ccccc",), ("ddddd",), ("cccccx",)]
    assert hits(policy, 70, *seen) == [0, 20, 0, 0, expected]


def test_alpha_0_is_least_recently_used():
    rng = random.Random(3)
    seen = [("".join(rng.choice("ab") for _ in range(rng.randrange(1, 14))),) for _ in range(400)]
    assert hits("alpha:0", 100, *seen) == hits("lru", 100, *seen)
    assert hits("alpha:0", 100, *seen) != hits("alpha:2", 100, *seen)


def test_what_is_larger_than_the_cache_evicts_nothing():
    seen = [("abc",), ("x" * 31,), ("abcd",)]
    assert hits("lru", 40, *seen) == [0, 0, 3]


# --- mistakes -------------------------------------------------------------------------------------


def make(policy: str, capacity: int = 100):
    return make_cache(policy, COSTS, capacity, [request("abc")])


@pytest.mark.parametrize("policy", ["fifo", "alpha", "alpha:", "alpha-code", "lru:3", "LRU", ""])
def test_an_unknown_policy_is_an_error_with_the_known_ones(policy):
    known = ", ".join(NAMES)
    with pytest.raises(
        ValueError,
        match=re.escape(
            f"simulate: no policy {policy!r}; known are {known}, and alpha:X or alpha-code:X with a number X"
        ),
    ):
        make(policy)


@pytest.mark.parametrize("value", ["-1", "-0.001", "nan", "inf"])
def test_an_alpha_below_0_or_without_end_is_an_error(value):
    with pytest.raises(
        ValueError, match=rf"^FlopAware: alpha must be .* at least 0, got {float(value)}$"
    ):
        make(f"alpha:{value}")


def test_an_alpha_that_is_no_number_is_an_error():
    with pytest.raises(ValueError, match=r"^simulate: alpha must be .* at least 0, got 'high'$"):
        make("alpha:high")


@pytest.mark.parametrize("policy", ["vllm", *CHECKPOINTS])
def test_a_capacity_below_one_checkpoint_is_an_error(policy):
    make(policy, 10)
    with pytest.raises(
        ValueError, match=r"^simulate: capacity must hold one checkpoint, 10 B at least, got 9 B$"
    ):
        make(policy, 9)


@pytest.mark.parametrize("policy", NAMES)
def test_every_policy_says_what_a_simulation_reports(policy):
    cache = make(policy)
    cache.request(request("abc").prompt, request("abc").prompt)
    assert cache.evictions == 0 and 0 <= cache.peak <= 100
    assert cache.alpha == (0 if policy.startswith("marconi") else None)
