"""Requests and costs small enough to work out by hand: a token is a letter."""

from __future__ import annotations

import numpy as np

from benchmarks.pools.loads import PoolLoad
from benchmarks.pools.model_sizes import LayerSizes, ModelSizes
from hybrid_jax.costs import Costs
from hybrid_jax.geometry import sized_geometry
from hybrid_jax.sim.prefix_cache.caches import make_cache
from hybrid_jax.sim.prefix_cache.traces import TraceRequest

# One byte a token, ten a checkpoint, one FLOP a token.
COSTS = Costs(flops_per_token=1, flops_per_key=0, kv_bytes=1, checkpoint_bytes=10)
# Two layers of each kind; a page of ten bytes, a state of thirty.
POOL = LayerSizes(
    name="tiny", page_tokens=4, page_bytes=10, num_pages_each=2, state_bytes=30, num_states=2
)
# The same in frames of 20 bytes: a page of four tokens takes one, a state three.
FRAMES = sized_geometry(
    frame_words=5, page_tokens=4, frames_per_page=1, token_words=2, state_frames=3, grain=8
)
MODEL = ModelSizes(layers=POOL, frames=FRAMES, column_bytes=6, record_bytes=2, raw_bytes=4)
# A line of a trace in each of its forms.
SEGMENTS = {"session_id": 7, "turn_id": 2, "ts": 1.5, "in": [[5, 3], [9, 2, 4]], "out": [[6, 1]]}
TOKENS = {"session_id": "a", "turn_id": 0, "ts": 2, "input_tokens": [3, 1, 2], "output_tokens": [9]}
BLOCKS = {"timestamp": 2500, "input_length": 700, "output_length": 5, "hash_ids": [8, 3]}


def pool_load(*requests) -> PoolLoad:
    """Of (prompt, gen, arrival)."""
    prompt, gen, arrivals = np.array(requests, np.int64).T
    return PoolLoad(workload="own", seed=0, prompt_lens=prompt, gen_lens=gen, arrivals=arrivals)


def tokens(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("ascii"), np.uint8).astype(np.int32)


def request(prompt: str, output: str = "") -> TraceRequest:
    return TraceRequest(
        session_id=0, turn_id=0, arrival_s=0.0, prompt=tokens(prompt), output=tokens(output)
    )


def hits(policy: str, capacity: int, *pairs, costs: Costs = COSTS, grain: int = 1) -> list[int]:
    """Tokens that each of these (prompt, output) pairs skips, one after the other."""
    trace = [request(*pair) for pair in pairs]
    cache = make_cache(policy, costs, capacity, trace, grain=grain)
    return [cache.request(r.prompt, r.whole) for r in trace]
