"""What tests of the tiers below an arena share: models, settings, and prompts that come back."""

from __future__ import annotations

from dataclasses import replace

from hybrid_jax.engine.engine import Engine
from tests.exactness.conftest import FLOAT32, SETTINGS
from tests.exactness.engines import start_over
from tests.exactness.jobs import Job, Run, drive
from tests.exactness.poison import Poison

ROOM, BELOW = 2.2, 10.0
NAMES = ("mamba2", "bamba", "qwen3_next", "jamba", "windowed", "with_unknown_kind")
NAMES += ("with_cut", "with_latent", "with_fixed_decay", "llama")
OTHER = {
    "fp8": replace(FLOAT32, kv_cache_dtype="fp8"),
    "small pages": replace(FLOAT32, page_tokens=16),
    "one long step": replace(FLOAT32, steps_per_dispatch=8, max_rows=2),
}
EXACT = {
    "float32": SETTINGS["exact"],
    "bfloat16": replace(SETTINGS["exact"], dtype="bfloat16"),
    "fp8": SETTINGS["exact_fp8"],
}
DRAFTING = ("ngram-parallel", "mtp-parallel", "mtp_tree-qwen3_next", "draft-jamba", "exit-with_cut")


def serve(engine: Engine, jobs: list[Job], tier: str, *, tokens: int = 300) -> Run:
    """Runs jobs, of which more than so many tokens must have come from a tier, "host" or "disk"."""
    run = drive(engine, jobs, Poison(engine))
    engine.scheduler.check_invariants()
    moved = run.moved
    assert moved[f"{tier}_loads"] > 5 and moved.get("disk_loads_failed", 0) == 0, moved
    assert tier == "disk" or moved["host_saves"] > 5, moved  # the disk may have been filled before
    assert sum(run.cached) >= moved[f"{tier}_loaded_tokens"] > tokens
    return run


def cold(engine: Engine, jobs: list[Job]) -> Run:
    """The same without a cache."""
    start_over(engine, ROOM, policy="off")
    return drive(engine, jobs)
