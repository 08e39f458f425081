"""Which replica a request goes to: what is cached, what waits, what was promised; replicas that leave; threads."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from hybrid_jax.cache.tree.node import ARENA
from hybrid_jax.cluster.names import prefix_names
from hybrid_jax.cluster.partition import part
from hybrid_jax.cluster.router import PROMISED, ReplicaCosts, Router
from hybrid_jax.cluster.watch import News
from hybrid_jax.costs import Costs
from tests.sim.chats import tokens

GRAIN, HOST = 32, 1
COSTS = Costs(flops_per_token=10**9, flops_per_key=0, kv_bytes=1000, checkpoint_bytes=100_000)


def router(count: int = 3, **changes) -> Router:
    given = {
        "costs": COSTS, "grain": GRAIN, "max_rows": 8, "steps": 8, "flops_per_byte": 100.0,
        "flops_per_loaded_byte": (1000.0,),
    }  # fmt: skip
    return Router(count, ReplicaCosts(**given | changes))


def has(router: Router, replica: int, prompt, length: int, tier: int = ARENA) -> None:
    name = int(prefix_names(np.asarray(prompt), GRAIN)[length // GRAIN - 1])
    router.tell(replica, News("came", tier, [name]))


def finish(router: Router, *owners: str) -> None:
    for owner in owners:
        router.computed(owner)
        router.ended(owner)


# --- what counts ------------------------------------------------------------------------------------


def test_without_anything_cached_requests_spread():
    found = router(4)
    prompts = [tokens(n, 300) for n in range(8)]
    chosen = [found.choose(str(n), prompt).replica for n, prompt in enumerate(prompts)]
    assert sorted(chosen[:4]) == sorted(chosen[4:]) == [0, 1, 2, 3]


def test_the_replica_with_the_longest_resume_point_gets_it():
    found, prompt = router(), tokens(0, 300)
    has(found, 1, prompt, 96)
    has(found, 2, prompt, 192)
    has(found, 0, prompt, 64)
    decision = found.choose("a", prompt)
    assert (decision.replica, decision.hit_len, decision.tier) == (2, 192, ARENA)
    assert decision.own == COSTS.flops(300, start=192) and decision.queued == 0
    found.tell(2, News("went", ARENA, [int(prefix_names(prompt, GRAIN)[5])]))
    finish(found, "a")
    found.leave(2)
    assert found.choose("b", prompt).replica == 1


def test_no_hit_reaches_the_last_token_or_past_a_limit():
    found, prompt = router(), tokens(0, 96)
    has(found, 1, prompt, 96)
    assert found.choose("a", prompt).hit_len == 0
    finish(found, "a")
    has(found, 2, prompt, 64)
    assert found.choose("b", prompt, limit=63).hit_len == 0
    finish(found, "b")
    assert found.choose("c", prompt, limit=64)[:3] == (2, 96, 64)


def test_what_waits_outweighs_a_hit_once_it_is_more():
    found, prompt = router(2), tokens(0, 400)
    has(found, 0, prompt, 320)
    sent = []
    for number in range(12):
        other = np.concatenate((prompt[:320], tokens(50 + number, 80)))
        sent.append(found.choose(str(number), other).replica)
    assert sent[:3] == [0, 0, 0] and 1 in sent, sent
    first = sent.index(1)
    # 80 tokens are left of each; going elsewhere costs 320 more, and loses a home.
    assert 320 // 80 <= first <= 2 * (320 // 80) + 2


def test_a_tier_below_counts_with_what_it_takes_to_load():
    prompt = tokens(0, 300)
    slow, fast = router(flops_per_loaded_byte=(1e9,)), router(flops_per_loaded_byte=(1.0,))
    for found in (slow, fast):
        has(found, 1, prompt, 256, HOST)
        has(found, 2, prompt, 128)
    assert slow.choose("a", prompt)[:4] == (2, 300, 128, ARENA)
    decision = fast.choose("a", prompt)
    assert decision[:4] == (1, 300, 256, HOST)
    assert decision.own == COSTS.flops(300, start=256) + COSTS.prefix_bytes(256)


def test_a_prompt_under_way_counts_as_what_it_will_leave():
    found, prompt = router(), tokens(0, 600)
    first = found.choose("a", prompt)
    for number in range(2):
        found.choose(f"x{number}", tokens(100 + number, 600))
    again = found.choose("b", np.concatenate((prompt, tokens(1, 40))))
    assert (again.replica, again.tier, again.hit_len) == (first.replica, PROMISED, 512)
    assert "it was computing 512 of 640 tokens" in again.why
    found.ended("a")  # its caller has left; the other one is computing the same
    found.check_invariants()
    assert len(found.marks.of(first.replica, PROMISED)) == 2
    finish(found, "b")
    found.check_invariants()
    assert not found.marks.of(first.replica, PROMISED)


def test_prompts_go_back_to_where_their_beginning_went_though_it_is_gone():
    found, prompt = router(4), tokens(0, 600)
    for number in range(7):  # so that the next in turn is another
        found.choose(f"x{number}", tokens(100 + number, 500))
    home = found.choose("a", prompt).replica
    finish(found, "a", *(f"x{number}" for number in range(7)))
    assert found.choose("b", np.concatenate((prompt, tokens(1, 40)))).replica == home


def test_a_full_replica_is_passed_over():
    found = router(2, max_rows=2)
    prompt = tokens(0, 64)
    has(found, 0, prompt, 32)
    for number in range(2):
        assert found.choose(str(number), prompt).replica == 0
        found.computed(str(number))
    assert found.choose("2", prompt).replica == 1


def test_a_decision_says_why():
    found, prompt = router(2), tokens(0, 300)
    has(found, 1, prompt, 256)
    assert found.choose("a", prompt).why == ("it had 256 of 300 tokens, and nothing waited there")
    assert found.choose("b", tokens(5, 2000)).why.startswith("it had nothing of the prompt")
    busy = found.choose("c", np.concatenate((prompt[:256], tokens(1, 10))))
    assert "0.044 TFLOP waited there" in busy.why, busy.why


# --- many at once -----------------------------------------------------------------------------------


def whole(parts: list[list[int]]) -> list[int]:
    return sorted(index for one in parts for index in one)


@pytest.mark.parametrize("count", [1, 2, 4, 8])
@pytest.mark.parametrize("seed", range(6))
def test_parts_hold_every_prompt_once_and_are_even_in_flops(count, seed):
    rng = np.random.default_rng(seed)
    stems = [tokens(n, 600) for n in range(60)]
    prompts = [
        np.concatenate(
            (stems[rng.integers(60)][: rng.integers(1, 600)], tokens(1000 + n, rng.integers(1, 90)))
        )
        for n in range(1500)
    ]
    parts = part(prompts, count, COSTS, GRAIN)
    assert len(parts) == count and whole(parts) == list(range(1500))

    def cost(indices: list[int]) -> float:
        """What a part costs that computes every shared token once: counted over a set of prefixes."""
        seen, tokens_computed = set(), 0
        for index in indices:
            names = prefix_names(prompts[index], GRAIN).tolist()
            new = [name for name in names if name not in seen]
            tokens_computed += len(new) * GRAIN + len(prompts[index]) % GRAIN
            seen.update(names)
        return tokens_computed

    costs = [cost(indices) for indices in parts]
    assert max(costs) <= 1.1 * np.mean(costs)
    assert sum(costs) <= 1.05 * cost(list(range(1500)))


def test_few_or_no_prompts_leave_parts_empty():
    assert part([], 3, COSTS, GRAIN) == [[], [], []]
    assert whole(part([tokens(0, 50)], 3, COSTS, GRAIN)) == [0]
    same = [tokens(0, 64)] * 5
    assert whole(part(same, 2, COSTS, GRAIN)) == list(range(5))


def test_many_that_come_together_go_where_their_beginnings_are():
    found = router(3)
    stems = [tokens(n, 320) for n in range(3)]
    for replica, stem in enumerate(stems):
        has(found, 2 - replica, stem, 320)
    prompts = {
        f"{stem}.{n}": np.concatenate((stems[stem], tokens(100 + 10 * stem + n, 40)))
        for n in range(8)
        for stem in range(3)
    }
    chosen = found.choose_all(prompts)
    assert chosen.keys() == prompts.keys()
    assert {(name[0], decision.replica) for name, decision in chosen.items()} == {
        ("0", 2), ("1", 1), ("2", 0)
    }  # fmt: skip
    assert all(decision.hit_len >= 320 for decision in chosen.values())
    found.check_invariants()
    with pytest.raises(ValueError, match=r"'0\.0' is live already"):
        found.choose_all({"new": tokens(9, 50), "0.0": tokens(8, 50)})
    assert found.num_live == len(prompts)
    finish(found, *prompts)
    found.choose("new", tokens(9, 50))  # nothing of the refused ones was sent


def test_sessions_that_come_together_go_back_each_to_its_own_replica():
    found, rng = router(3), np.random.default_rng(0)
    where = {f"{n}": int(rng.integers(3)) for n in range(30)}
    prompts = {name: tokens(int(name), 200 + 7 * int(name)) for name in where}
    for name, replica in where.items():
        has(found, replica, prompts[name], len(prompts[name]) // 32 * 32 - 32)
    chosen = found.choose_all(prompts)
    assert {name: decision.replica for name, decision in chosen.items()} == where


# --- the same again ---------------------------------------------------------------------------------


def test_the_same_calls_choose_the_same():
    def run() -> list[int]:
        found, rng = router(5), np.random.default_rng(7)
        stems, live, chosen = [tokens(n, 500) for n in range(6)], [], []
        for number in range(300):
            stem = stems[rng.integers(6)][: rng.integers(1, 500)]
            chosen.append(
                found.choose(str(number), np.concatenate((stem, tokens(number, 30)))).replica
            )
            live.append(str(number))
            has(found, chosen[-1], stem, max(32, len(stem) // 32 * 32)) if len(stem) >= 32 else None
            if rng.random() < 0.7:
                finish(found, live.pop(rng.integers(len(live))))
            found.check_invariants()
        return chosen

    first = run()
    assert first == run() and set(first) == set(range(5))


# --- coming and going ---------------------------------------------------------------------------------


def test_a_replica_that_leaves_gives_its_requests_back_and_gets_none():
    found = router(3)
    at = {str(n): found.choose(str(n), tokens(n, 200)).replica for n in range(9)}
    has(found, 1, tokens(50, 300), 256)
    back = found.leave(1)
    assert back == [name for name, replica in at.items() if replica == 1] and back
    assert found.present == [0, 2]
    has(found, 1, tokens(51, 300), 256)  # told too late
    assert {found.choose(name, tokens(int(name), 230)).replica for name in back} <= {0, 2}
    assert found.choose("x", tokens(50, 300)).replica != 1
    assert found.choose("y", tokens(51, 300)).replica != 1
    found.check_invariants()
    assert not found.marks.of(1, ARENA) and found.leave(1) == []
    found.join(1)
    assert 1 in {found.choose(f"z{n}", tokens(60 + n, 200)).replica for n in range(3)}


def test_without_a_replica_nothing_can_be_sent():
    found = router(1)
    found.leave(0)
    with pytest.raises(RuntimeError, match="no replica is left"):
        found.choose("a", tokens(0, 9))


def test_a_name_that_is_live_is_refused_and_unknown_ends_are_ignored():
    found = router()
    found.choose("a", tokens(0, 50))
    with pytest.raises(ValueError, match="'a' is live already"):
        found.choose("a", tokens(1, 50))
    finish(found, "b")
    finish(found, "a")
    finish(found, "a")
    found.check_invariants()


def test_threads_may_tell_choose_and_end_at_once():
    found, errors = router(4), []

    def work(seed: int) -> None:
        try:
            rng = np.random.default_rng(seed)
            for number in range(200):
                name, prompt = f"{seed}.{number}", tokens(int(rng.integers(5)), 200)
                replica = found.choose(name, prompt).replica
                names = prefix_names(prompt, GRAIN).tolist()
                found.tell(replica, News("came", ARENA, names))
                found.tell(replica, News("went", ARENA, names[1:]))
                finish(found, name)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    found.check_invariants()
    found.leave(3)
    assert not found.marks.of(3, ARENA)
