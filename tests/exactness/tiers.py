"""What tests of the tiers below an arena share: models, settings, and prompts that come back."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from tests.exactness.conftest import FLOAT32, SETTINGS
from tests.exactness.jobs import Job, random_prompt

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


def conversations(vocab: int, rounds: int = 3) -> list[Job]:
    """Prompts that come back, each longer than before, when the arena has long given their beginnings away."""
    rng, jobs = Random(1), []
    prompts = [
        random_prompt(40, 100 + n // 3, vocab) + random_prompt(30 + 11 * n, n, vocab)
        for n in range(7)
    ]
    for turn in range(rounds):
        rng.shuffle(prompts)
        for place, prompt in enumerate(prompts):
            count = 4 + 7 * (place % 3)
            jobs.append(Job(prompt=prompt, max_tokens=count, arrive=9 * len(jobs)))
            prompts[place] = prompt + random_prompt(9, 50 * turn + place, vocab)
    return jobs
