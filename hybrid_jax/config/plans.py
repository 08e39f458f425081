"""How much the plans of a scheduler hold at once. The scheduler keeps to it, and sizing counts it."""

from __future__ import annotations

MAX_FLIGHTS = 2  # plans that the device has at once
# Once a plan copies so much out of the arena, what is evicted further is gone: the plan's rows wait for its copies. A
# plan hardly evicts more than it computes.
SAVED_BYTES = 8 << 30
