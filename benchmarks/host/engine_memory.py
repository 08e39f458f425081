"""What the engine's memory costs the host: processor time of an admission, of a decode step of 64 rows, of an end.

Only what `Memory` does is timed: look-up, pages and checkpoint of a prompt of 1,056 tokens; then step after step of
all rows, with growth and a fold every 32 tokens; then what a row leaves in the cache. Pages are one frame of 16 tokens,
a checkpoint hundreds of frames. In `full` the arena is full of cached prefixes, so that whatever is taken has to be
evicted first; in `hit` all prompts go on from one cached prefix. Needs no model and one core:

    python benchmarks/host/engine_memory.py [--policies off,lru,adaptive] [--json FILE]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # when run as a file

from benchmarks.common import header, quantiles, write_json
from benchmarks.host.radix_tree import print_table
from benchmarks.pools.model_sizes import model_sizes
from hybrid_jax.config import CacheConfig
from hybrid_jax.config.sampling_params import SamplingParams
from hybrid_jax.schedule.memory import Memory
from hybrid_jax.schedule.plan import Plan
from hybrid_jax.schedule.request import Request
from hybrid_jax.schedule.sequence import Phase, Sequence

PROMPT, OUTPUT, SHARED = 1056, 320, 1024
FULL = 400  # sequences whose cached prefixes fill the arena


class Load:
    """Rows over the memory of one engine, fed by hand: nothing else of the engine runs."""

    def __init__(self, spec: str, policy: str, *, rows: int, kind: str):
        self.geometry = geometry = model_sizes(spec).frames
        self.rows, self.kind = rows, kind
        each = geometry.num_pages(PROMPT + OUTPUT) * geometry.frames_per_page
        each += 2 * geometry.state_frames
        count = FULL if kind == "full" else 2 * rows
        self.memory = Memory(
            geometry, num_frames=count * each, max_slots=4 * count, cache=CacheConfig(policy=policy)
        )
        self.rng = np.random.default_rng(0)
        self.shared, self.num_made = self.tokens(SHARED), 0
        if kind == "hit":
            self.whole(self.sequence())
        while kind == "full" and self.memory.stats()["cache_leaf_evictions"] < rows:
            self.whole(self.sequence())

    def tokens(self, count: int) -> list[int]:
        return self.rng.integers(1, 50_000, count).tolist()

    def sequence(self) -> Sequence:
        """A request that came just now."""
        own = PROMPT - SHARED if self.kind == "hit" else PROMPT
        prompt = (self.shared if self.kind == "hit" else []) + self.tokens(own)
        request = Request(
            request_id=f"r{self.num_made}",
            prompt=prompt,
            params=SamplingParams(max_tokens=OUTPUT),
            seed=0,
            max_tokens=OUTPUT,
        )
        sequence = Sequence(request=request, arrival=self.num_made, limit=PROMPT + OUTPUT)
        self.num_made += 1
        self.memory.announce(sequence)
        return sequence

    def whole(self, sequence: Sequence) -> None:
        """A sequence from its admission to its end, alone."""
        self.look_up(sequence)
        self.admit(sequence)
        self.prefilled(sequence)
        self.memory.finish(sequence)

    def look_up(self, sequence: Sequence) -> None:
        """What of its prompt is cached."""
        tree = self.memory.tree
        self.match = None if tree is None else tree.match(sequence.prompt, sequence.owner)

    def admit(self, sequence: Sequence) -> None:
        """Shared prefix, pages, and the checkpoint of its first chunk."""
        memory = self.memory
        taken = memory.start(sequence, self.match, alone=False)
        slot = memory.slot_to_write(sequence)
        assert taken is not None and slot, "admission found no room"
        memory.advance(sequence, SHARED, slot)
        memory.end_plan(Plan())

    def prefilled(self, sequence: Sequence) -> None:
        """The rest of the prompt is computed; nothing of it is timed."""
        self.memory.withdraw(sequence)
        self.memory.publish(sequence)
        sequence.phase = Phase.DECODE
        sequence.stand_at(PROMPT)
        sequence.tokens += self.tokens(OUTPUT)

    def step(self, sequences: list[Sequence]) -> float:
        """One decode step of every row, planned and settled; microseconds of what memory does of it."""
        memory, geometry = self.memory, self.geometry
        due = [
            s for s in sequences if s.position - geometry.checkpoint(s.position) == geometry.grain
        ]

        def planned() -> None:
            for sequence in sequences:
                memory.grow(sequence, sequence.position + 1)
                sequence.position += 1
            for sequence in due:
                memory.plan_fold(sequence)
            memory.end_plan(Plan())
            for sequence in sequences:
                sequence.settle(1, 1)
                memory.settle(sequence)

        elapsed = timed(planned)
        for sequence in sequences:
            assert self.geometry.num_pages(sequence.position) <= len(sequence.held.pages), "no room"
        return elapsed


def timed(call: Callable, *args) -> float:
    """Microseconds of processor time."""
    start = time.process_time_ns()
    call(*args)
    return (time.process_time_ns() - start) / 1000


def measure(spec: str, policy: str, kind: str, *, rows: int, rounds: int) -> dict:
    """Medians and quantiles of one kind of load, over rounds of `rows` sequences from arrival to end."""
    load = Load(spec, policy, rows=rows, kind=kind)
    look_ups, admissions, steps, ends = [], [], [], []
    for _ in range(rounds):
        if kind == "free" and load.memory.tree is not None:
            load.memory.tree.reset()
        sequences = [load.sequence() for _ in range(rows)]
        for index, sequence in enumerate(sequences):
            look_ups.append(timed(load.look_up, sequence))
            admissions.append(timed(load.admit, sequence))
            load.prefilled(sequence)
            for _ in range(index % load.geometry.grain):  # so that not all rows fold at once
                load.step([sequence])
        while max(sequence.position for sequence in sequences) < PROMPT + OUTPUT - 1:
            steps.append(load.step(sequences))
        ends += [timed(load.memory.finish, sequence) for sequence in sequences]
    parts = {"look_up": look_ups, "admission": admissions, "step": steps, "end": ends}
    stats = load.memory.stats()
    return {
        "policy": policy,
        "load": kind,
        "rows": rows,
        **{
            f"{name}_us_{quantile}": value
            for name, values in parts.items()
            for quantile, value in quantiles(values).items()
        },
        "hits": stats.get("cache_hits", 0),
        "evictions": stats.get("cache_leaf_evictions", 0)
        + stats.get("cache_tombstone_evictions", 0),
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policies", default="off,lru,adaptive")
    parser.add_argument("--model-spec", default="nemotron_h_8b")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    result = header() | {"model_spec": options.model_spec, "rows": []}
    for policy in options.policies.split(","):
        for kind in ("free",) if policy == "off" else ("free", "hit", "full"):
            row = measure(
                options.model_spec, policy, kind, rows=options.rows, rounds=options.rounds
            )
            result["rows"].append(row)
    print_table([{k: v for k, v in row.items() if "_p" not in k} for row in result["rows"]])
    write_json(options.json, result)


if __name__ == "__main__":
    main()
