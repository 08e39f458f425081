"""What changes with the progress of the training, a number from 0 to 1: learning rate and row length."""

from __future__ import annotations

WARMUP = 0.02
DECAY_FROM = 0.2
ROW_SHARES = (
    (0.0, 4),
    (0.8, 2),
    (0.92, 1),
)  # from this progress on, rows are context / divisor long


def rate_factor(progress: float) -> float:
    """Share of the peak learning rate: a short linear warmup, a short plateau, then linearly to zero."""
    warm = min(1.0, (progress + 1e-3) / WARMUP)
    return min(warm, max(0.0, (1.0 - progress) / (1.0 - DECAY_FROM)))


def row_length(progress: float, context: int) -> int:
    """Tokens of a row: short at first, when a step costs less and teaches as much."""
    divisor = next(d for start, d in reversed(ROW_SHARES) if progress >= start)
    return max(context // divisor, min(context, 64))


def progress_of(step: int, seconds: float, steps: int | None, minutes: float | None) -> float:
    """How far a training is, by whichever of `steps` and `minutes` is nearer to its end."""
    shares = [0.0]
    if steps is not None:
        shares.append(step / steps)
    if minutes is not None:
        shares.append(seconds / (60 * minutes))
    return min(1.0, max(shares))
