"""The options of a training, with the defaults of `train_tiny` and the command line."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

# Tokens of a row; longer rows need more memory than a trial is worth.
MIN_CONTEXT, MAX_CONTEXT = 16, 32768


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """See `hybrid_jax.train.train_tiny`."""

    steps: int | None = None
    minutes: float | None = None
    seed: int = 0
    batch: int = 2
    context: int = 2048
    learning_rate: float = 0.02
    eval_every: int = 200
    save_minutes: float = 4.0

    def __post_init__(self) -> None:
        for field in fields(self):
            name, value, kind = field.name, getattr(self, field.name), str(field.type)
            if value is None and kind.endswith("| None"):
                continue
            is_integer = kind.startswith("int")
            if not isinstance(value, int if is_integer else int | float) or isinstance(value, bool):
                what = "an integer" if is_integer else "a number"
                raise ValueError(f"train_tiny: {name} must be {what}, got {value!r}")
            if name != "seed" and not 0 < value < math.inf:  # NaN is neither
                raise ValueError(f"train_tiny: {name} must be positive, got {value}")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"train_tiny: seed must be in [0, 2**32), got {self.seed}")
        if not MIN_CONTEXT <= self.context <= MAX_CONTEXT:
            raise ValueError(
                f"train_tiny: context must be between {MIN_CONTEXT} and {MAX_CONTEXT}, got {self.context}"
            )
