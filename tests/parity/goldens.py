"""The committed goldens: tiny random models and what transformers answers for them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

GOLDENS: list[Path] = sorted(
    answers.parent for answers in (Path(__file__).parent / "goldens").glob("*/answers.npz")
)


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
