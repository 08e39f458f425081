"""What other libraries say of the files that files.py makes: where it is stored, and how to read it."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).resolve().parents[1] / "goldens"
ANSWERS, LOGITS = FOLDER / "narrow.json", FOLDER / "narrow.npz"


@functools.cache
def answers() -> dict[str, Any]:
    """By variant: "files", the fingerprint of the files; "read whole", how far the logits of transformers are when it
    reads them itself, or why it does not; "weights", digests by library, rule of rounding, and weight."""
    return json.loads(ANSWERS.read_text(encoding="utf-8"))["variants"]


@functools.cache
def logits() -> dict[str, np.ndarray]:
    """float32[tokens, V] by variant: those of the model's prompt, with the weights in float32."""
    with np.load(LOGITS) as file:
        return dict(file)
