"""Sizes that launches are made by. No jax, as in every `plan.py`: what counts memory on the host needs them, too."""

from __future__ import annotations

from typing import Any

NUM_SMS = 132  # multiprocessors of an H100 or H200, where no device is known


def power_of_two(size: int) -> int:
    """The least power of two that is at least `size`."""
    return 1 << (size - 1).bit_length()


def cdiv(a: Any, b: int) -> Any:
    """a / b, rounded up; a is not negative, and an int or an array."""
    return (a + b - 1) // b
