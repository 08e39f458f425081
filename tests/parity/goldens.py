"""The committed goldens: tiny random models and what transformers answers for them.

HYBRID_JAX_GOLDENS names another folder of them, as `make_goldens --random` writes it.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hybrid_jax.config import GatedDelta, ModelConfig, MoE
from hybrid_jax.models import config_from_hf

COMMITTED = Path(__file__).parent / "goldens"
FOLDER = Path(os.environ.get("HYBRID_JAX_GOLDENS") or COMMITTED)
GOLDENS: list[Path] = sorted(answers.parent for answers in FOLDER.glob("*/answers.npz"))


def tolerance(config: ModelConfig) -> float:
    """How far logits may be from those of transformers.

    A gated delta net is ten times less well conditioned than Mamba-2: with random weights, transformers in float32 is
    itself up to 1e-3 from float64.
    """
    return 2e-3 if config.mixers(GatedDelta) else 5e-4


@dataclass(frozen=True)
class Answer:
    """One prompt and its greedy continuation.

    Attributes:
        prompt, continuation: token ids, 32 of them in the continuation.
        logits: float32[len(prompt) + 32, V] of both together; row i follows token i.
    """

    prompt: list[int]
    continuation: list[int]
    logits: np.ndarray


def config_of(golden: Path) -> ModelConfig:
    """What its config.json says."""
    return config_from_hf(json.loads((golden / "config.json").read_text()))


def one_of_each_family() -> list[Path]:
    """The first golden of each family; the first with experts, where one has experts."""
    experts, plain = {}, {}
    for golden in GOLDENS:
        config = config_of(golden)
        has_experts = any(isinstance(part, MoE) for part, _ in config.parts)
        (experts if has_experts else plain).setdefault(config.family, golden)
    return list((plain | experts).values())


def load_answers(golden: Path) -> list[Answer]:
    """What transformers said about the prompts of one golden."""
    answers, start = [], 0
    with np.load(golden / "answers.npz") as file:
        prompts, lengths, logits = file["prompts"], file["lengths"], file["logits"]
        for row, length, new in zip(prompts, lengths, file["continuations"], strict=True):
            end = start + int(length) + len(new)
            answers.append(Answer(row[:length].tolist(), new.tolist(), logits[start:end]))
            start = end
    return answers
