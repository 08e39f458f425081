"""What a chat template may use: processor time, and the size of what it builds.

A template comes with a model or from a caller. Jinja's sandbox keeps it away from Python, but not from loops in loops,
nor from 'a' * 10**10. Four rules hold here. Each turn of a loop, each call and each item of an iterator looks at the
clock. What can make a large value from a small one says first how large it will be. No integer has more than `MAX_BITS`
bits, so that no operation with integers takes long. What looks into nested values counts first what is in them. What a
template renders does not change.

`template_checks` has what is known of each method and each filter.
"""

from __future__ import annotations

import time
from collections.abc import (
    ItemsView,
    Iterable,
    Iterator,
    KeysView,
    Mapping,
    ValuesView,
)
from typing import Any

import jinja2
from jinja2.runtime import markup_join, str_join
from jinja2.utils import Namespace

MAX_SECONDS = 3.0  # of processor time, for one rendering
MAX_TEXT = 1 << 25  # characters of one text, or items of one list
MAX_ITEMS = 1 << 18  # of a list and the lists inside of it, where something looks into all of them
MAX_DEPTH = (
    1000  # of lists in lists, where something looks into all of them; Python prints no deeper ones
)
MAX_MADE = 1 << 29  # bytes of everything that one rendering makes, kept or not
MAX_SOURCE = 1 << 20  # characters of a template; published ones have at most 30,000
MAX_TOKENS = (
    20_000  # of a template's code: names, signs, pieces of text; published ones have at most 8,000
)
MAX_BITS = 1 << 17  # of an integer
SHORT_BITS = 1 << 9  # smaller integers are not counted
SHORT = 1 << 12  # characters; longer texts are looked at before they are counted
LONG = 1 << 17  # characters or items; what is shorter is soon done
ITEM = 64  # bytes of a small object, or more
POINTER = 8  # bytes that an item takes in a list, beside those of its own

SCALARS = frozenset((str, int, float, bool, type(None)))


class LimitExceeded(jinja2.TemplateRuntimeError):
    """A template ran too long or built too much."""


class Budget:
    """What is left of the limits for one rendering.

    Args:
        seconds: of processor time.
    """

    def __init__(self, seconds: float = MAX_SECONDS) -> None:
        self._seconds, self._room = seconds, MAX_MADE
        self._started = time.thread_time()
        self._look = time.perf_counter() + seconds  # earlier than this no time can be up

    def tick(self) -> None:
        """LimitExceeded if the time is up. To be called in each turn of a loop."""
        if time.perf_counter() > self._look:
            self._look_at_the_clock()

    def _look_at_the_clock(self) -> None:
        """The time of other threads and processes does not count, so that a busy machine refuses nothing."""
        left = self._seconds - (time.thread_time() - self._started)
        if left <= 0:
            raise LimitExceeded(
                f"did not finish within {self._seconds:g} s of processor time; look for a loop in a loop"
            )
        self._look = time.perf_counter() + left

    def allow(self, size: int) -> None:
        """LimitExceeded if something of so many characters or items is too large to be made."""
        if size > MAX_TEXT:
            raise LimitExceeded(
                f"did not finish: it builds a value of more than {MAX_TEXT} characters or items"
            )

    def made(self, value: Any) -> Any:
        """Counts a value that the template has made, and returns it."""
        kind = type(value)
        if kind is str:
            size = len(value)
            if size > SHORT:
                return self._made_long(value)
        elif kind is int:
            if (bits := value.bit_length()) < SHORT_BITS:
                return value
            check_bits(bits)
            size = bits >> 3
        elif kind in SCALARS:
            return value
        elif isinstance(value, list | tuple):
            size = ITEM + POINTER * len(value)
        elif isinstance(value, dict | set):
            size = ITEM * (1 + len(value))
        else:
            size = ITEM + (4 * len(value) if isinstance(value, str | bytes) else 0)
        self.spend(size)
        return value

    def _made_long(self, text: str) -> str:
        self.spend(len(text) if text.isascii() else 4 * len(text))
        return text

    def spend(self, size: int) -> None:
        """Counts bytes that the template has made."""
        self._room -= size
        if self._room < 0:
            raise LimitExceeded(f"did not finish: it builds more than {MAX_MADE >> 20} MiB in all")
        if size > LONG:
            self.tick()

    def weigh(self, *values: Any) -> int:
        """Characters and items in values, with all that is inside of them. Each list counts as often as it is reached.

        Any operation that looks into nested lists takes as long as that: a list that holds another twice, which holds
        another twice, and so on, is small in memory and has no end in print.
        """
        weight, seen, depth, level = 0, 0, 0, list(values)
        while level:
            seen, depth, below = seen + len(level), depth + 1, []
            for value in level:
                kind = type(value)
                if kind is str or kind is bytes:
                    weight += len(value)
                    continue
                if kind is dict:
                    below += value
                    below += value.values()
                elif kind is list or kind is tuple:
                    below += value
                elif kind is int:
                    bits = value.bit_length()
                    check_bits(bits)
                    weight += bits >> 2  # no fewer than its digits
                elif kind is Lazy:
                    value.is_weighed = True
                elif kind not in SCALARS:
                    below += _inside(value)
                if seen + len(below) > MAX_ITEMS:
                    raise LimitExceeded(
                        f"did not finish: it looks into a value of more than {MAX_ITEMS} items"
                    )
            level = below
            if depth > MAX_DEPTH:
                raise LimitExceeded(
                    f"did not finish: it looks into lists in lists, more than {MAX_DEPTH} deep"
                )
        self.allow(weight)
        if weight + seen > LONG:
            self.tick()
        return weight + seen

    def weighed(self, value: Any) -> Any:
        """The value, after a look at how much is in it."""
        kind = type(value)
        if kind is int:
            check_bits(value.bit_length())
        if kind not in SCALARS or (kind is str and len(value) > LONG):
            self.weigh(value)
        return value

    def printed(self, value: Any) -> str:
        """The text of a value."""
        self.weigh(value)
        return self.made(str(value))

    def add(self, left: Any, right: Any) -> Any:
        """The operator +."""
        if type(left) is str and type(right) is str:
            size = len(left) + len(right)
            if size < SHORT:
                self._room -= size
                return left + right
            self.allow(size)
        elif isinstance(left, str | list | tuple | bytes) and hasattr(right, "__len__"):
            self.allow(len(left) + len(right))
        return self.made(left + right)

    # --- what compiled templates call instead of Jinja's own functions ----------------------------

    def concat(self, pieces: Iterable[str]) -> str:
        """The text of a macro or of a block."""
        if type(pieces) is list:
            self.allow(sum(map(len, pieces)))
            return self.made("".join(pieces))
        kept, size = [], 0
        for piece in pieces:
            size += len(piece)
            if size > MAX_TEXT:
                self.allow(size)
            kept.append(piece)
        return self.made("".join(kept))

    def str_join(self, values: tuple[Any, ...]) -> str:
        """The operator ~."""
        self.allow(self.weigh(*values))
        return self.made(str_join(values))

    def markup_join(self, values: tuple[Any, ...]) -> str:
        """The operator ~ where text is escaped."""
        self.allow(6 * self.weigh(*values))
        return self.made(markup_join(values))


def _inside(value: Any) -> Iterable[Any]:
    """The values from which another is made. Iterators are not looked into, they print nothing of what they give."""
    if isinstance(value, Mapping):
        return [*value.keys(), *value.values()]
    if isinstance(value, list | tuple | set | KeysView | ValuesView | ItemsView):
        return value
    if isinstance(value, str):  # escaped
        return [str.__str__(value)]
    if isinstance(value, int):  # a member of an enumeration
        return [int(value)]
    if isinstance(value, Namespace):
        return [object.__getattribute__(value, "_Namespace__attrs")]
    return ()


class Lazy:
    """An iterator of a filter. Each item looks at the clock, is counted, and is weighed if something looks into it.

    Args:
        budget: of the rendering.
        items: the iterator.
        size: bytes of each item, 0 for those that are there already.
    """

    def __init__(self, budget: Budget, items: Iterable[Any], size: int = ITEM) -> None:
        self._budget, self._items, self._size = budget, iter(items), size
        self.is_weighed = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        item = next(self._items)
        self._budget.tick()
        self._budget.spend(self._size)
        return self._budget.weighed(item) if self.is_weighed else item


def check_bits(bits: int) -> None:
    """LimitExceeded if an integer of so many bits is too large."""
    if bits > MAX_BITS:
        raise LimitExceeded(f"did not finish: it builds an integer of more than {MAX_BITS} bits")
