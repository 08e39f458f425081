"""Numbers of others: the paper's, those of its plotting scripts, and what its simulator gives for our traces."""

from __future__ import annotations

from benchmarks.cache.figures.loads import COMMITTED, Load
from benchmarks.cache.figures.runs import Place

# Fig. 3a: percent of the blocks of so many tokens whose KV is reused, and whose state; 25.0, 0.4 and 3.3 in the text.
REUSE = {32: (25.0, 0.38), 64: (28.9, 1.03), 128: (36.3, 3.3), 256: (53.0, 9.5)}
# Fig. 3b
BLOCKS_OF_16_GB, OVER_TRANSFORMER = 17.4, 3.3
# Fig. 7: mean of Marconi's hit rate over vLLM+'s, by workload.
OVER_VLLM = {"chat": 4.5, "short": 7.3, "agents": 34.4}
# Fig. 8: 95th percentile of what Marconi hits more than SGLang+, in percent.
OVER_SGLANG_P95 = {"chat": 45.6, "short": 19.0, "agents": 219.7}
# Fig. 9: most that Marconi takes off the P95 TTFT: (percent, ms) by what it is compared with.
TTFT_CUT = {
    "none": {"chat": (36.9, 281.4), "short": (73.2, 106.3), "agents": (46.8, 617.0)},
    "vllm": {"chat": (36.1, 275.4), "short": (71.1, 103.3), "agents": (46.8, 617.0)},
    "sglang": {"chat": (17.2, 131.1), "short": (12.8, 18.5), "agents": (24.7, 325.7)},
}
# Fig. 11: percent of the tokens by gigabytes; the text has the ratios.
CONTENTION = {
    "sglang": {60: 7.72, 80: 15.01, 100: 25.57, 120: 36.90, 140: 43.89},
    "marconi": {60: 9.59, 80: 22.74, 100: 43.03, 120: 47.92, 140: 48.21},
}
# Fig. 12a by (SSM, attention) layers and 12b by state size; the text has some of the ratios.
COMPOSITION = {
    "vllm": {(32, 4): 5.01, (30, 5): 5.01, (28, 7): 5.01, (24, 12): 5.02, (0, 36): 5.04},
    "sglang": {(32, 4): 11.31, (30, 5): 8.51, (28, 7): 6.62, (24, 12): 5.38, (0, 36): 5.04},
    "marconi": {(32, 4): 18.06, (30, 5): 12.3, (28, 7): 8.35, (24, 12): 5.69, (0, 36): 5.05},
}
STATE_SIZE = {
    "vllm": {128: 0.89, 64: 1.5, 32: 3.14, 16: 5.17},
    "sglang": {128: 16.39, 64: 17.39, 32: 18.00, 16: 18.37},
    "marconi": {128: 31.55, 64: 29.88, 32: 30.19, 16: 29.36},
}
# Fig. 13a by sessions a second (100 GB, 7.5 s a turn) and 13b by seconds a turn (its setting is not known).
SESSIONS = {
    "sglang": {0.5: 35.18, 1: 29.27, 2: 26.36},
    "marconi": {0.5: 48.70, 1: 44.92, 2: 43.02},
}
TURNS = {
    "sglang": {5: 18.83, 7.5: 16.60, 10: 15.49},
    "marconi": {5: 25.90, 7.5: 24.25, 10: 24.08},
}

# What the published simulator (github.com/ruipeterpan/marconi, commit 0801661) hits on the committed traces, in
# percent: its vLLM+, its SGLang+, its Marconi (a window of 5), and the best fixed alpha of a coarse grid.
CODE = ("vllm", "sglang", "marconi-code", "best alpha")
SAME_TRACES: dict[tuple[str, float], tuple[float | None, ...]] = {
    ("chat", 2): (6.81, 10.18, 10.56, 12.18),
    ("chat", 5): (6.90, 38.04, 36.03, 36.03),
    ("short", 1): (0.61, 6.51, 4.90, 7.77),
    ("short", 2): (0.68, 18.07, 16.10, 20.25),
    ("short", 4): (2.02, 39.89, 41.86, 43.89),
    ("agents", 60): (3.92, 13.71, 17.20, 34.12),
    ("agents", 100): (4.24, 25.12, 31.79, 39.46),
    ("log", 100): (None, 4.95, 6.67, 5.37),
    ("log", 200): (None, 11.71, 10.60, 11.33),
}


def same_trace(load: Load, gigabytes: float) -> dict[str, float | None]:
    """{"code vllm", ...} of the published simulator on this very trace; None where it was not run."""
    found = SAME_TRACES.get((load.name, gigabytes)) if load == COMMITTED[load.name] else None
    return {f"code {name}": found[i] if found else None for i, name in enumerate(CODE)}


# Runs of the published rules with bytes counted as here: (place, model, policy here, percent).
EXACT = (
    *(("chat", 5, "7b", "lru", 38.26), ("chat", 5, "7b", "alpha-code:1", 37.77)),
    *(("agents", 60, "7b", "lru", 14.9), ("agents", 100, "7b", "lru", 31.8)),
    ("agents", 140, "7b", "lru", 47.8),
    *(("agents", 60, "7b", "alpha-code:1", 34.4), ("agents", 100, "7b", "alpha-code:1", 39.3)),
    ("agents", 140, "7b", "alpha-code:1", 39.7),
    *(("agents", 60, "7b", "alpha:1", 16.7), ("agents", 100, "7b", "alpha:1", 22.3)),
    ("agents", 140, "7b", "alpha:1", 25.9),
    *(("chat", 10, "real", "lru", 79.6), ("chat", 10, "real", "alpha-code:1", 69.6)),
    *(("chat", 5, "real", "lru", 62.7), ("chat", 5, "real", "alpha-code:1", 56.6)),
    *(("agents", 40, "real", "lru", 28.0), ("agents", 40, "real", "alpha-code:1", 21.3)),
)
LONGEST_PREFIX = {"chat": 99.26, "short": 95.70, "agents": 51.61, "log": 27.82}


def place(name: str, gigabytes: float) -> Place:
    """On a committed trace."""
    return Place(load=COMMITTED[name], gigabytes=gigabytes)
