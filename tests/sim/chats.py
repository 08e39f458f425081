"""Conversations as traces, and models of every kind in small frames."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hybrid_jax.costs import Costs
from hybrid_jax.sim.prefix_cache.traces import TraceRequest
from hybrid_jax.sim.prefix_cache.virtual_engine import FRAME_BYTES

# 16 tokens fill a frame, a checkpoint takes 2.
KV = FRAME_BYTES // 16
COSTS = Costs(flops_per_token=10**9, flops_per_key=0, kv_bytes=KV, checkpoint_bytes=32 * KV)
KINDS = {
    "hybrid": COSTS,
    "attention": replace(COSTS, checkpoint_bytes=0),
    "recurrent": replace(COSTS, kv_bytes=0),
}
PLENTY = 1000 * FRAME_BYTES


def tokens(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 1000, count).astype(np.int32)


def asked(session, arrival: float, prompt, output=()) -> TraceRequest:
    return TraceRequest(
        session_id=session, turn_id=0, arrival_s=arrival,
        prompt=np.asarray(prompt, np.int32), output=np.asarray(output, np.int32),
    )  # fmt: skip


def chat(turns: int, gap: float, session=0, sizes=(90, 45)) -> list[TraceRequest]:
    """Turns whose prompts begin with all that was said before; none ends on a multiple of 32."""
    trace, history = [], tokens(7 + session, 3)
    for turn in range(turns):
        prompt = np.concatenate((history, tokens(100 * session + 2 * turn, sizes[0])))
        output = tokens(100 * session + 2 * turn + 1, sizes[1])
        trace.append(asked(session, turn * gap, prompt, output))
        history = np.concatenate((prompt, output))
    return trace
