"""Which line of the input an answer belongs to, told by its id."""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left
from functools import cached_property

import numpy as np

from hybrid_jax.batch.responses import Names

WELL_FORMED = re.compile("batch_req_[0-9a-f]{32}")
HEAD = slice(10, 26)  # 64 of an id's 128 bits


class Places:
    """Finds the places of answers; quickly where they follow each other, and in any order.

    Args:
        digest: of the input.
        num_lines: of the input.

    Example:
        >>> places = Places("0123", 5)
        >>> [places.find(Names("0123", place).line_id) for place in (2, 3, 0, 7)], places.find("2")
        ([2, 3, 0, None], None)
    """

    def __init__(self, digest: str, num_lines: int) -> None:
        self._digest, self._num_lines = digest, num_lines
        self._next = 0  # place after the one found last

    def find(self, line_id: object) -> int | None:
        """The place of the line with that id; None when there is none."""
        if self._next < self._num_lines and self._id(self._next) == line_id:
            place = self._next
        else:
            place = self._search(line_id)
        if place is not None:
            self._next = place + 1
        return place

    def _search(self, line_id: object) -> int | None:
        if not isinstance(line_id, str) or not WELL_FORMED.fullmatch(line_id):
            return None
        head = int(line_id[HEAD], 16)
        heads, places = self._sorted_heads
        index = bisect_left(heads, head)
        while index < len(heads) and heads[index] == head:
            if self._id(places[index]) == line_id:
                return places[index]
            index += 1
        return None

    @cached_property
    def _sorted_heads(self) -> tuple[array, array]:
        """Beginnings of all ids, ascending, and their places: 16 bytes a line."""
        heads = (int(self._id(place)[HEAD], 16) for place in range(self._num_lines))
        heads = np.fromiter(heads, np.uint64, self._num_lines)
        places = np.argsort(heads)
        return array("Q", heads[places].tobytes()), array("q", places.tobytes())

    def _id(self, place: int) -> str:
        return Names(self._digest, place).line_id
