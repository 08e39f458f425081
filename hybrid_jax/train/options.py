"""What one training is told, and what it takes for granted: the defaults of `train_tiny` and the command line."""

from __future__ import annotations

from dataclasses import asdict, dataclass


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
        for name, value in asdict(self).items():
            if value is not None and value <= 0 and name != "seed":
                raise ValueError(f"train_tiny: {name} must be positive, got {value}")
