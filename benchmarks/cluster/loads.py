"""Loads of a fleet: many users at once, of five classes, drawn from a seed."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import numpy as np

from benchmarks.cache.drawn_cells import LOADS, sessions_of
from hybrid_jax.sim.prefix_cache.traces import Segments, TraceRequest

# What the lists of `drawn_cells` are called, and their numbers. Lengths are in tokens, times in seconds.
CLASSES: dict[str, tuple[str, dict[str, float]]] = {
    # Talks with one of twelve assistants, whose instructions differ.
    "chats": (
        "chats",
        {"users": 400, "ramp": 100, "between": 20, "turns least": 3, "turns more": 8.0,
         "asked": 80, "asked sigma": 1.0, "answered": 250, "answered sigma": 0.8,
         "session sigma": 0.6, "pause sigma": 0.8, "most": 16000, "systems": 12, "system": 800, "again": 0.05},
    ),
    # Agents with one long instruction, that keep all they saw.
    "agents": (
        "agents",
        {"users": 160, "ramp": 60, "between": 10, "pause": 8, "system": 2500, "issue": 1500,
         "observed": 700, "observed sigma": 0.8, "written": 150, "turns least": 8, "turns more": 10.0, "kept": 1000},
    ),
    # Agents that keep their last five observations: prompts part in the middle.
    "forgetful agents": (
        "agents",
        {"users": 160, "ramp": 60, "between": 10, "pause": 8, "system": 2500, "issue": 1500,
         "observed": 700, "observed sigma": 0.8, "written": 150, "turns least": 8, "turns more": 10.0, "kept": 5},
    ),
    # Questions about 400 documents, a few of which are asked about most.
    "documents": (
        "documents",
        {"users": 300, "ramp": 60, "between": 5, "documents": 400, "zipf": 0.8, "document": 5000,
         "document sigma": 0.7, "questions": 2.0, "asked": 60, "answered": 150, "system": 300},
    ),
    # Single requests to one of forty templates with examples.
    "templates": (
        "documents",
        {"users": 300, "ramp": 60, "between": 2, "documents": 40, "zipf": 1.0, "document": 1500,
         "document sigma": 0.5, "questions": 0.01, "asked": 400, "answered": 150, "system": 20},
    ),
    # Single requests that share twenty tokens, and almost never more.
    "strangers": (
        "documents",
        {"users": 300, "ramp": 60, "between": 2, "documents": 50_000, "zipf": 0.0, "document": 2000,
         "document sigma": 0.7, "questions": 0.01, "asked": 400, "answered": 150, "system": 20},
    ),
}  # fmt: skip


def draw(name: str, requests: int, seed: int) -> list[TraceRequest]:
    """Requests of a class, in order of their times."""
    kind, numbers = CLASSES[name]
    rng = np.random.default_rng([seed, 7])
    return sessions_of(
        LOADS[kind](rng, numbers, count(1 << 30)), rng, numbers, requests, Segments()
    )


def at_speed(trace: list[TraceRequest], factor: float) -> list[TraceRequest]:
    """The same requests, with every time between them so many times as long."""
    first = trace[0].arrival_s
    return [replace(one, arrival_s=(one.arrival_s - first) * factor) for one in trace]
