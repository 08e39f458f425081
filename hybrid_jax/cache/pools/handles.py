"""32-bit names of frames and slots that go stale when what they name is given away.

A handle is kind (2 bits) | generation (6 bits) | id (24 bits). Whoever keeps an id across time keeps a
handle and resolves it at use: a pool bumps an id's generation each time the id returns to its free
list, so an old handle raises instead of naming somebody else's memory. The generation wraps after
64 lives; a handle is a guard against our own mistakes, the counted holders are what makes reuse safe.
"""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import numpy.typing as npt

FRAME, SLOT = 1, 2
KIND_NAMES = {FRAME: "frame", SLOT: "slot"}
NUM_GENERATIONS = 1 << 6
MAX_ID = (1 << 24) - 1
# Of arrays of handles.
KIND_BITS, ID_BITS = np.uint32(3 << 30), np.uint32(MAX_ID)
NEXT_GENERATION, GENERATION_BITS = np.uint32(1 << 24), np.uint32(NUM_GENERATIONS - 1 << 24)


class StaleHandle(RuntimeError):
    """A handle outlived what it named, or names another kind of thing."""


def pack(kind: int, generation: int, index: int) -> int:
    """The handle of one id in its present generation; never 0."""
    return kind << 30 | generation << 24 | index


def unpack(handle: Any) -> tuple[Any, Any, Any]:
    """(kind, generation, id) of a handle, or of an array of them."""
    return handle >> 30, handle >> 24 & NUM_GENERATIONS - 1, handle & MAX_ID


def as_integer(handle: Any) -> int:
    """A handle as an integer of Python's own, of any size.

    Raises:
        ValueError: it is not an integer.
    """
    try:
        return operator.index(handle)
    except TypeError:
        raise ValueError(f"handles: a handle must be an integer, got {handle!r}") from None


def as_handles(names: npt.ArrayLike, kind: int) -> np.ndarray:
    """Handles as uint32, in the shape that came; numpy itself would cut them to 32 bits.

    Raises:
        ValueError: one is not an integer.
        StaleHandle: one has more bits, or a sign.
    """
    if isinstance(names, np.ndarray) and names.dtype == np.uint32:
        return names
    names = np.asarray(names, object)
    for name in map(as_integer, names.flat):
        if name >> 32:
            raise stale(name, kind, 0)
    return names.astype(np.uint32)


def next_lives(names: np.ndarray) -> np.ndarray:
    """The next handles of ids that are given away, but without the ids: uint32, in the shape that came."""
    return names & KIND_BITS | names + NEXT_GENERATION & GENERATION_BITS


def stale(handle: int, kind: int, generation: int) -> StaleHandle:
    """The error for a handle that does not match the pool's kind and present generation."""
    old_kind, old_generation, index = unpack(handle)
    if old_kind != kind:
        named = f"a {KIND_NAMES[old_kind]}" if old_kind in KIND_NAMES else "nothing"
        return StaleHandle(
            f"StaleHandle: {handle:#010x} names {named}, resolved as a {KIND_NAMES[kind]}; "
            f"keep handles of different pools apart"
        )
    what = f"{KIND_NAMES[kind]} {index} of generation {old_generation}"
    if old_generation == generation:
        return StaleHandle(f"StaleHandle: nobody holds {what}; hold a count on what is kept")
    return StaleHandle(
        f"StaleHandle: {what} was released, its present generation is {generation}; hold a count on what is kept"
    )
