"""Sizes and counts as people write them: "5GB", "5GiB" or plain bytes, "1 row".

Libraries read "5Gb" as bytes too; here it is refused, because it means bits.
"""

from __future__ import annotations

import math
import re

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_STEPS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _STEPS[f"{_letter}B"] = 1000**_power
    _STEPS[f"{_letter}IB"] = 1024**_power

_SIZE = re.compile(r"\s*([0-9]{1,18}(?:\.[0-9]{0,18})?|\.[0-9]{1,18})\s*([A-Za-z]*)\s*")


def parse_size(value: int | str, *, name: str = "size") -> int:
    """Bytes of "512MiB", "5GB", "1.5 GiB", "4096" or 4096.

    Args:
        value: a positive integer, or a number with one of B, KB, MB, GB, TB (powers of 1000), KiB, MiB,
            GiB, TiB (powers of 1024), or with these in small letters. A small b after capitals means bits, which are
            refused.
        name: what the size is for; the error begins with it.

    Raises:
        ValueError: it is not such a size, or not positive.

    Example:
        >>> parse_size("5GB"), parse_size("5GiB"), parse_size(4096)
        (5000000000, 5368709120, 4096)
    """
    problem = (
        f"{name}: a size must look like 5GB, 5GiB (capital B, for bytes) or a positive number of bytes, "
        f"got {value!r}"
    )
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(problem)
    if isinstance(value, int):
        num_bytes = value
    else:
        match = _SIZE.fullmatch(value)
        if match is None:
            raise ValueError(problem)
        number, unit = match.groups()
        bits = unit.endswith("b") and not unit.islower()  # Gib and Gb, but neither GiB nor gib
        if bits or unit.upper() not in _STEPS:
            raise ValueError(problem)
        step = _STEPS[unit.upper()]
        num_bytes = int(number) * step if number.isdigit() else round(float(number) * step)
    if num_bytes <= 0:
        raise ValueError(problem)
    return num_bytes


def format_size(num_bytes: float) -> str:
    """Bytes for people, in powers of 1024.

    Example:
        >>> format_size(262144), format_size(0), format_size(5_368_709_120)
        ('256 KiB', '0 B', '5 GiB')
    """
    value, unit = _in_unit(num_bytes)
    digits = ".0f" if value >= 100 or value == int(value) else ".3g"
    return f"{value:{digits}} {unit}"


def round_size(num_bytes: int, *, up: bool) -> str:
    """A byte count rounded to three digits, which `parse_size` reads: rounded up if `up`, else down.

    Example:
        >>> round_size(5_400_000_000, up=False), round_size(5_400_000_000, up=True)
        ('5.02 GiB', '5.03 GiB')
    """
    value, unit = _in_unit(num_bytes)
    scale = 100 if value < 10 else 10 if value < 100 else 1
    return f"{(math.ceil if up else math.floor)(value * scale) / scale:.12g} {unit}"


def at_least(least: int, got: int) -> str:
    """The end of a message about too little memory, for people. What it asks for is enough.

    Example:
        >>> at_least(5_091_764, 1 << 20)
        '4.86 MiB at least, got 1 MiB'
    """
    return f"{round_size(least, up=True)} at least, got {round_size(got, up=False)}"


def _in_unit(num_bytes: float) -> tuple[float, str]:
    """A byte count in the largest unit of which there is at least one."""
    power = 0
    while power < len(UNITS) - 1 and abs(num_bytes) >= 1024 ** (power + 1):
        power += 1
    return num_bytes / 1024**power, UNITS[power]


def counted(number: int, noun: str) -> str:
    """A number of things.

    Example:
        >>> counted(1, "row"), counted(2048, "row")
        ('1 row', '2,048 rows')
    """
    return f"{number:,} {noun}" + "s" * (number != 1)
