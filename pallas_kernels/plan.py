"""Sizes that launches are made by. No jax, as in every `plan.py`: what counts memory on the host needs them, too."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Chip:
    """The facts about a GPU by which launches are split and tiles are chosen. Static under jit.

    Attributes:
        num_sms: multiprocessors that a launch should fill.
        shared_bytes: shared memory that one program may have.
        capability: NVIDIA's compute capability.
    """

    num_sms: int
    shared_bytes: int
    capability: tuple[int, int]

    @property
    def reads_shared(self) -> bool:
        """Whether tensor cores read their operands from shared memory, as those of Hopper and of data center cards of
        Blackwell do. Others get them through registers, so a tile must be smaller or it spills."""
        return self.capability[0] in (9, 10, 11)


H200 = Chip(num_sms=132, shared_bytes=232_448, capability=(9, 0))  # where no device is known


ADVICE = re.compile(r"; ([^;]*, or )?use 'xla'$")


def over_limit(*limits: tuple[str, int, int]) -> str | None:
    """Why "pallas" cannot take arguments of these sizes, or None.

    Args:
        limits: a rule such as "a state must have at most {} columns", the limit, and the size found.
    """
    for rule, most, found in limits:
        if found > most:
            return f"{rule.format(most)} for 'pallas', got {found}; use 'xla'"
    return None


def cause(reason: str) -> str:
    """A reason why "pallas" cannot do something, without its advice to use "xla", for where that is done already.

    Example:
        >>> cause("head_dim must be at most 256 for 'pallas', got 512; use 'xla'")
        "head_dim must be at most 256 for 'pallas', got 512"
    """
    return ADVICE.sub("", reason)


def power_of_two(size: int) -> int:
    """The least power of two that is at least `size`."""
    return 1 << (size - 1).bit_length()


def cdiv(a: Any, b: int) -> Any:
    """a / b, rounded up; a is not negative, and an int or an array."""
    return (a + b - 1) // b
