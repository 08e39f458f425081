"""What tests of the tiers below an arena share: models, settings, and prompts that come back."""

from __future__ import annotations

from dataclasses import replace

from tests.exactness.conftest import FLOAT32, SETTINGS

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
