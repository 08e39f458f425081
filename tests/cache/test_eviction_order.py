"""The ordered candidate set beside a plain sort."""

import random
from types import SimpleNamespace

import pytest

from hybrid_jax.cache.policy.table import make_policy
from hybrid_jax.cache.tree.eviction import LeastRecentlyUsed
from hybrid_jax.costs import Costs


class Entry(SimpleNamespace):
    __hash__ = object.__hash__

    def __eq__(self, other):
        return self is other


def test_pops_in_key_order_after_updates_and_discards():
    rng = random.Random(1)
    order, live, clock = LeastRecentlyUsed(), [], 0
    for _ in range(5000):
        clock += 1
        action = rng.random()
        if action < 0.4:
            live.append(Entry(last_use=clock))
            order.add(live[-1])
        elif action < 0.7 and live:
            node = rng.choice(live)
            node.last_use = clock
            order.add(node)
        elif action < 0.8 and live:
            order.discard(live.pop(rng.randrange(len(live))))
        elif live:
            oldest = min(live, key=lambda node: node.last_use)
            assert order.pop() is oldest
            live.remove(oldest)
        assert len(order) == len(live)
        assert len(order._heap) <= 65 + 2 * len(live)
    assert order.pop() is None or live


def test_an_empty_order_pops_none():
    order = LeastRecentlyUsed()
    node = Entry(last_use=1)
    order.add(node)
    order.discard(node)
    assert node not in order and order.pop() is None


def test_a_policy_that_does_not_exist_is_named():
    costs = Costs(flops_per_token=1, flops_per_key=0, kv_bytes=1, checkpoint_bytes=0)
    with pytest.raises(ValueError, match="^eviction: no policy 'fifo'$"):
        make_policy("fifo", costs)
