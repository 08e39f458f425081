"""What the prefix cache costs the host: processor time of look-ups, of a request's whole cycle, of evictions.

A cycle is what a request does to the tree: match, pin, announce (which finds where it parts from others), match again,
make room, take pages, cache the prompt where it parts and the whole sequence at its end, unpin. Sequences have 1 to 8
thousand tokens, half of them shared with others; pages have 64 tokens. Runs on one core, needs no model:

    python benchmarks/host/radix_tree.py [--nodes 1000,10000,100000] [--policies lru,adaptive] [--json FILE]
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # when run as a file

from benchmarks.common import header, write_json
from hybrid_jax.cache.policy.table import make_policy
from hybrid_jax.cache.pools.frames import FrameAllocator
from hybrid_jax.cache.pools.pages import PageHolds
from hybrid_jax.cache.pools.slots import SlotTable
from hybrid_jax.cache.tree.radix import RadixTree
from hybrid_jax.cache.tree.tier import Tier
from hybrid_jax.costs import Costs

GRAIN = PAGE_TOKENS = 64
STATE_FRAMES = 8
SHARED_STEP = 256  # tokens between the places where sequences part
COSTS = Costs(
    flops_per_token=1e10, flops_per_key=1e4, kv_bytes=4096, checkpoint_bytes=STATE_FRAMES << 18
)


class Load:
    """A tree of so many nodes in a pool that is full, and sequences to ask it for."""

    def __init__(self, num_nodes: int, policy: str, seed: int = 0):
        self.rng = np.random.default_rng(seed)
        sequences = max(32, num_nodes // 2)
        self.frames = FrameAllocator(min(1 << 24, sequences * (2 * STATE_FRAMES + 45)))
        self.slots = SlotTable(self.frames, lengths=(STATE_FRAMES,), max_slots=4 * num_nodes)
        pages = PageHolds(self.frames, PAGE_TOKENS)
        self.tree = RadixTree(
            [Tier(self.frames, self.slots, pages, make_policy(policy, COSTS))],
            grain=GRAIN,
            needs_slots=True,
            max_known_nodes=num_nodes // 4,
        )
        self.policy = self.tree.policy
        self.shared = [self.tokens(8192) for _ in range(max(8, num_nodes // 100))]
        while self.evictions < 64:
            self.cycle(*self.sequence())

    @property
    def evictions(self) -> int:
        counters = self.tree.counters
        return counters.leaf_evictions + counters.tombstone_evictions

    def tokens(self, count: int) -> np.ndarray:
        return self.rng.integers(0, 32_000, count).astype(np.int32)

    def sequence(self) -> tuple[np.ndarray, np.ndarray]:
        """A prompt, half of it shared, and the prompt with an output."""
        count = int(self.rng.integers(1000, 8000))
        known = count // 2 // SHARED_STEP * SHARED_STEP
        beginning = self.shared[self.rng.integers(len(self.shared))][:known]
        prompt = np.concatenate((beginning, self.tokens(count - known)))
        return prompt, np.concatenate((prompt, self.tokens(100)))

    def cycle(self, prompt: np.ndarray, whole: np.ndarray) -> None:
        tree, frames, slots = self.tree, self.frames, self.slots
        match = tree.match(prompt)
        if match.hit_len:
            tree.pin(match.node)
        end_node = tree.announce(prompt)
        relation = None
        if hasattr(self.policy, "asked"):
            relation = self.policy.asked(tree, end_node, match.match_len)
        match = tree.match(prompt)
        branches = [b // GRAIN * GRAIN for b in tree.branch_points(end_node)[0]]
        branches = sorted({b for b in branches if b > match.hit_len})
        end = len(whole) // GRAIN * GRAIN
        fresh = end // PAGE_TOKENS - match.hit_len // PAGE_TOKENS
        num_slots = len(branches) + 1
        if not tree.make_room(fresh + num_slots * STATE_FRAMES, num_slots):
            raise SystemExit("radix_tree: the pool is too small for one sequence")
        held, slot = tree.acquire(match)
        pages = frames.allocate(fresh).reshape(-1, 1)
        pages = np.concatenate((held, pages)) if len(held) else pages
        for branch in branches:
            new = slots.allocate()
            tree.fill(prompt[:branch], pages, new)
            slots.release(new)
        tree.conclude(end_node)
        new = slots.allocate()
        node = tree.fill(whole[:end], pages, new)
        if relation is not None:
            self.policy.ended(node, relation)
        frames.release(pages)
        slots.release(new)
        if slot:
            slots.release(slot)
            tree.unpin(match.node)
        slots.take_new()


def microseconds(calls: list, repeat: int = 1) -> tuple[float, float]:
    """Median and mean processor time of calls, each made `repeat` times in a row."""
    times = []
    for call in calls:
        start = time.process_time_ns()
        for _ in range(repeat):
            call()
        times.append((time.process_time_ns() - start) / 1000 / repeat)
    return float(np.median(times)), float(np.mean(times))


def measure_cycles(num_nodes: int, policy: str, count: int) -> dict:
    """A cycle in a full pool, and one eviction."""
    load = Load(num_nodes, policy)
    before = load.evictions
    asked = [load.sequence() for _ in range(count)]
    median, mean = microseconds([lambda s=s: load.cycle(*s) for s in asked])
    evicted = load.evictions - before
    one = [lambda: load.tree.make_room(load.frames.num_free + 1)] * min(count, num_nodes // 4)
    _, eviction = microseconds(one)
    load.tree.check_invariants()
    return {
        "policy": policy,
        "nodes": load.tree.num_nodes,
        "cycle_us_median": median,
        "cycle_us_mean": mean,
        "evictions_per_cycle": evicted / count,
        "eviction_us_mean": eviction,
    }


def measure_look_ups(count: int) -> list[dict]:
    """Hits of long prompts, over few and many nodes."""
    rows = []
    for num_tokens, num_nodes in ((10_000, 1), (10_000, 20), (30_000, 50), (120_000, 50)):
        load = Load(1000, "lru")
        load.tree.reset()
        prompt = load.tokens(num_tokens)
        step = num_tokens // num_nodes
        for end in range(num_tokens // GRAIN * GRAIN, 0, -(step // GRAIN * GRAIN)):
            pages = load.frames.allocate(end // PAGE_TOKENS).reshape(-1, 1)
            slot = load.slots.allocate()
            load.tree.fill(prompt[:end], pages, slot)
            load.frames.release(pages)
            load.slots.release(slot)
        asked = np.concatenate((prompt, load.tokens(5)))
        match = load.tree.match(asked)
        median, _ = microseconds([lambda a=asked, t=load.tree: t.match(a)] * count, repeat=10)
        rows.append(
            {
                "tokens": num_tokens,
                "nodes_on_path": len(match.node.path()),
                "hit_len": match.hit_len,
                "us_median": median,
                "tokens_per_s": num_tokens / median * 1e6,
            }
        )
    return rows


def print_table(rows: list[dict]) -> None:
    """Rows under their keys."""
    print("  ".join(f"{name:>18}" for name in rows[0]))
    for row in rows:
        cells = (f"{v:,.1f}" if isinstance(v, float) else f"{v}" for v in row.values())
        print("  ".join(f"{cell:>18}" for cell in cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", default="1000,10000,100000")
    parser.add_argument("--policies", default="lru,alpha:1,adaptive")
    parser.add_argument("--count", type=int, default=1000, help="cycles that are timed")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result = header() | {"look_ups": measure_look_ups(min(options.count, 200)), "cycles": []}
    print_table(result["look_ups"])
    for nodes in map(int, options.nodes.split(",")):
        for policy in options.policies.split(","):
            result["cycles"].append(measure_cycles(nodes, policy, options.count))
    print_table(result["cycles"])
    write_json(options.json, result)


if __name__ == "__main__":
    main()
