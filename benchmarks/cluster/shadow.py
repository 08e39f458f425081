"""A million requests before 64 replicas, of which only caches and queues are simulated.

    python benchmarks/cluster/shadow.py [--json benchmarks/results/cluster/shadow.json] [--requests 1000000]
                                        [--replicas 64] [--routers own,fewest] [--smoke]

Half of the requests are turns of chats with one of 64 assistants, a quarter are questions about 2,000 documents, a
quarter have nothing in common. Positions count blocks of 16 tokens, and prompts resume at multiples of 32. The model is
`hybrid_7b` on H200s, so times to the first token are computed; they have no decode steps in them. The time of a
decision is measured on the machine that runs this. Requests come so fast that the router with the fewest hits keeps the
replicas busy for 70 % of their time.
"""

from __future__ import annotations

import argparse
import heapq
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # when run as a file

from benchmarks.common import header, write_json
from hybrid_jax.cluster.router import ReplicaCosts
from hybrid_jax.sim.model_specs import load_spec
from hybrid_jax.sim.prefix_cache.timing import DeviceModel
from hybrid_jax.sim.routing.own import OwnRouting
from hybrid_jax.sim.routing.rivals import (
    ApproximateTree,
    ExploitOrExplore,
    LeastLoaded,
    PrefixHash,
    RoundRobin,
)
from hybrid_jax.sim.routing.shadow import ShadowReplica, ShadowRequest, run_shadow

MODEL, CAPACITY, BLOCK, GRAIN = "hybrid_7b", 40 * 10**9, 16, 2
STEP_S = 0.009  # from one token to the next
ASSISTANTS, DOCUMENTS = 64, 2000


def draw(requests: int, per_second: float, seed: int) -> Iterator[ShadowRequest]:
    """Requests of three kinds, in the order of their times."""
    rng, new = np.random.default_rng(seed), count(1)

    def blocks(number: int) -> np.ndarray:
        first = next(new) * 4096
        return np.arange(first, first + number, dtype=np.int64).astype(np.int32)

    systems = [blocks(int(rng.integers(20, 120))) for _ in range(ASSISTANTS)]
    texts = [blocks(int(rng.integers(60, 700))) for _ in range(DOCUMENTS)]
    weights = np.arange(1.0, DOCUMENTS + 1) ** -0.8
    picks = rng.choice(DOCUMENTS, size=requests, p=weights / weights.sum())
    later: list[
        tuple[float, int, np.ndarray, int]
    ] = []  # turns to come: time, order, history, turns left
    now, order = 0.0, count()
    for number in range(requests):
        now += rng.exponential(1 / per_second)
        kind = rng.random()
        if kind < 0.5:
            if later and later[0][0] <= now:
                _, _, history, left = heapq.heappop(later)
            else:
                history, left = systems[rng.integers(ASSISTANTS)], int(rng.geometric(0.15))
            prompt = np.concatenate((history, blocks(int(rng.integers(2, 20)))))
            whole = np.concatenate((prompt, blocks(int(rng.integers(4, 30)))))
            if left > 1 and len(whole) < 1500:
                pause = float(rng.exponential(15.0))
                heapq.heappush(later, (now + pause, next(order), whole, left - 1))
        else:
            text = texts[picks[number]] if kind < 0.75 else blocks(int(rng.integers(10, 300)))
            prompt = np.concatenate((text, blocks(int(rng.integers(2, 20)))))
            whole = np.concatenate((prompt, blocks(int(rng.integers(2, 15)))))
        yield ShadowRequest(now, prompt, whole)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--replicas", type=int, default=64)
    parser.add_argument("--routers", default="turns,fewest,hash,own")
    parser.add_argument("--smoke", action="store_true", help="a few requests")
    args = parser.parse_args()
    requests, replicas = (200, 4) if args.smoke else (args.requests, args.replicas)
    spec, device = load_spec(MODEL), DeviceModel()
    costs = spec.costs.per_block(BLOCK)
    model = ReplicaCosts(
        costs=costs,
        grain=GRAIN,
        max_rows=1 << 30,
        steps=0,
        flops_per_byte=0.0,
    )
    routers: dict[str, Callable[[], Any]] = {
        "turns": RoundRobin,
        "fewest": LeastLoaded,
        "hash": lambda: PrefixHash(tokens=64, grain=GRAIN),
        "tree": lambda: ApproximateTree(grain=GRAIN),
        "explore": lambda: ExploitOrExplore(costs),
        "own": lambda: OwnRouting(model),
    }

    def run(name: str, number: int, per_second: float) -> dict[str, Any]:
        fleet = [
            ShadowReplica(costs, CAPACITY, flops_per_second=device.flops_per_second, step_s=STEP_S)
            for _ in range(replicas)
        ]
        found = run_shadow(draw(number, per_second, 1), routers[name](), fleet, block_tokens=BLOCK)
        return asdict(found)

    tried = run("turns", min(requests, 500 * replicas), 1.0)
    per_second = 0.7 / float(tried["busy"])
    report = header() | {"replicas": replicas, "per_second": per_second, "routers": {}}
    if args.json is not None and args.json.exists():
        report = json.loads(args.json.read_text())
    for name in args.routers.split(","):
        if name in report["routers"]:
            continue
        found = report["routers"][name] = run(name, requests, per_second)
        print(name, json.dumps(found), flush=True)
        write_json(args.json, report)


if __name__ == "__main__":
    main()
