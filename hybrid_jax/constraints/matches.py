"""What a written expression matches: all its texts, if they are few, and whether a text has a match."""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Callable, Set

# What `portable` writes: a set in brackets, a group, a count, an escape or a character.
_PART = re.compile(
    r"""
    (?P<set> \[\^?(?:\\.|\[(?:\\.|[^\]\\])*\]|[^\]\\])*\] )
    | (?P<open> \(\?(?P<flags>[is]*):|\(\?i\) )
    | (?P<count> [*+?] | \{(?P<least>\d+)(?P<comma>,)?(?P<most>\d*)\} )
    | (?P<property> \\[pP](?:\{[^}]*\}|.) )
    | (?P<plain> \\x\{[0-9a-f]+\} | \\. | . )
    """,
    re.X | re.S,
)
_MEMBER = re.compile(r"(\\x\{[0-9a-f]+\}|\\.|.)(?:-(\\x\{[0-9a-f]+\}|\\.|.))?", re.S)
# What stands inside brackets.
_ITEM = re.compile(
    r"(?P<inner>\[\^?(?:\\.|[^\]\\])*\])|(?P<property>\\[pP](?:\{[^}]*\}|.))|" + _MEMBER.pattern,
    re.S,
)
_CATEGORY = re.compile(r"\\([pP])\{?([A-Z][a-z]?)\}?")
MOST_STEPS = 10_000  # of a search
_CONTROLS = {"\\t": "\t", "\\n": "\n", "\\v": "\v", "\\f": "\f", "\\r": "\r"}
# Marks in texts: no character has these names.
_BEGIN, _END = "\ud800", "\udfff"

Texts = frozenset[str] | None  # None: more than asked for


def few_texts(pattern: str, most: int, longest: int, without: Set[str] = frozenset()) -> Texts:
    """All texts in which a regular expression finds something.

    Args:
        pattern: as `portable` writes it.
        most: how many texts are a few.
        longest: characters of the longest text.
        without: characters that no text has.

    Returns:
        the texts; None if there may be more of them, or longer ones.

    Example:
        >>> sorted(few_texts("^(?:a|b[01])$", 3, 9))
        ['a', 'b0', 'b1']
        >>> few_texts("^a", 3, 9) is None
        True
    """
    found = _Reader(pattern, 4 * most + 64, longest + 2, without).read()
    if found is None:
        return None
    texts = set()
    for text in found:
        inner = text.lstrip(_BEGIN).rstrip(_END)
        if _BEGIN in inner or _END in inner:
            continue  # something stands before the beginning or behind the end
        if not (text.startswith(_BEGIN) and text.endswith(_END)):
            return None  # anything may stand there
        texts.add(inner)
    return frozenset(texts) if len(texts) <= most else None


class _Reader:
    """Reads an expression from left to right. Arguments as `few_texts` has them."""

    def __init__(self, pattern: str, most: int, longest: int, without: Set[str]) -> None:
        self._parts = list(_PART.finditer(pattern))
        self._most, self._longest, self._without = most, longest, without
        self._at = 0

    def read(self, any_case: bool = False) -> Texts:
        """The texts up to the end of a group or of the expression."""
        found: set[str] = set()
        too_many = False
        texts: Texts = frozenset([""])
        while self._at < len(self._parts) and self._parts[self._at][0] != ")":
            part = self._parts[self._at]
            self._at += 1
            if part[0] == "|":
                found.update(texts or ())
                too_many = too_many or texts is None or len(found) > self._most
                texts = frozenset([""])
            elif part[0] == "(?i)":
                any_case = True
            else:
                texts = self._joined(texts, self._repeated(self._one(part, any_case)))
        return None if too_many else self._either(frozenset(found), texts)

    def _one(self, part: re.Match[str], any_case: bool) -> Texts:
        if part["open"] or part[0] == "(":
            texts = self.read(any_case or "i" in (part["flags"] or ""))
            self._at += 1
            return texts
        if part["set"]:
            return self._set(part[0], any_case)
        if part["property"] or part[0] == ".":
            return None
        if part[0] in "^$":
            return frozenset(_BEGIN if part[0] == "^" else _END)
        return self._characters([character_of(part[0])], any_case)

    def _set(self, text: str, any_case: bool) -> Texts:
        inside = text[1:-1]
        if inside.startswith(("^", "[")) or "\\p" in inside or "\\P" in inside:
            return None
        members: list[str] = []
        for found in _MEMBER.finditer(inside):
            first = ord(character_of(found[1]))
            last = ord(character_of(found[2])) if found[2] else first
            # Of those past the limit, some are not left out.
            members += map(chr, range(first, min(last, first + self._most + 64) + 1))
            if len(members) > 2 * self._most + 128:
                return None
        return self._characters(members, any_case)

    def _characters(self, members: list[str], any_case: bool) -> Texts:
        if any_case:
            members = [case for char in members for case in (char.lower(), char.upper())]
        return self._few(frozenset(members) - self._without)

    def _repeated(self, texts: Texts) -> Texts:
        """The texts of what was read last, as often as the counts behind it say."""
        while self._at < len(self._parts) and (part := self._parts[self._at])["count"]:
            self._at += 1
            least, most = _counts(part)
            texts = self._times(texts, least, most)
        return texts

    def _times(self, texts: Texts, least: int, most: int | None) -> Texts:
        nothing: Texts = frozenset([""])
        if most == 0 or texts == nothing:
            return nothing
        if not texts:
            return texts if least or texts is None else nothing
        power, all_texts = nothing, nothing if least == 0 else frozenset()
        for number in itertools.count(1):
            if power is None or all_texts is None or (most is not None and number > most):
                return None if power is None else all_texts
            power = self._joined(power, texts)  # grows in length or in number, up to the limits
            if number >= least:
                if power is not None and all_texts is not None and power <= all_texts:
                    return all_texts
                all_texts = self._either(all_texts, power)
        raise AssertionError("counts end")

    def _either(self, one: Texts, other: Texts) -> Texts:
        return None if one is None or other is None else self._few(one | other)

    def _joined(self, one: Texts, other: Texts) -> Texts:
        if one == frozenset() or other == frozenset():
            return frozenset()
        if other == frozenset([""]):
            return one
        if one is None or other is None or len(one) * len(other) > 4 * self._most:
            return None
        return self._few(frozenset(a + b for a in one for b in other))

    def _few(self, texts: frozenset[str]) -> Texts:
        many = len(texts) > self._most or any(len(text) > self._longest for text in texts)
        return None if many else texts


def _count(digits: str) -> int:
    """A count, of which Python reads no more than some thousand digits."""
    return int(digits.lstrip("0")[:20] or 0)


def character_of(text: str) -> str:
    """The character that `portable` writes as this text."""
    if text.startswith("\\x{"):
        return chr(int(text[3:-1], 16))
    return _CONTROLS.get(text, text[-1])


def finds(pattern: str, text: str) -> bool | None:
    """Whether a regular expression finds something in a text.

    Args:
        pattern: as `portable` writes it.

    Returns:
        None if this cannot be said: the search takes too long, or it needs a property of characters that Python lacks.

    Example:
        >>> finds("^(?:ab?)+$", "aab"), finds("^b", "ab")
        (True, False)
    """
    try:
        return _Search(pattern, text).find()
    except _NotSaid:
        return None


class _NotSaid(Exception):
    pass


class _Search:
    """Goes through an expression with all places of a text at once, so that nothing is tried twice."""

    def __init__(self, pattern: str, text: str) -> None:
        self._parts = list(_PART.finditer(pattern))
        self._text, self._steps = text, 0
        self._close: dict[int, int] = {}  # of each group that begins here
        opened = []
        for at, part in enumerate(self._parts):
            if part["open"] and part[0] != "(?i)":
                opened.append(at)
            elif part[0] == ")":
                self._close[opened.pop()] = at

    def find(self) -> bool:
        return bool(self._ends(0, len(self._parts), set(range(len(self._text) + 1)), False))

    def _ends(self, first: int, last: int, starts: set[int], any_case: bool) -> set[int]:
        """Where matches of some parts end that begin at given places."""
        ends: set[int] = set()
        places, at = starts, first
        while at < last:
            part, begin = self._parts[at], at
            at = self._close.get(at, at) + 1
            if part[0] == "|":
                ends, places = ends | places, starts
                continue
            if part[0] == "(?i)":
                any_case = True
                continue
            step = self._step(begin, at, any_case)
            while at < last and (count := self._parts[at])["count"]:
                step = self._repeated(step, *_counts(count))
                at += 1
            places = step(places)
        return ends | places

    def _step(self, begin: int, end: int, any_case: bool) -> Callable[[set[int]], set[int]]:
        part = self._parts[begin]
        if part["open"]:
            any_case = any_case or "i" in (part["flags"] or "")
            return lambda places: self._ends(begin + 1, end - 1, places, any_case)
        if part[0] in "^$":
            place = 0 if part[0] == "^" else len(self._text)
            return lambda places: places & {place}

        def after(places: set[int]) -> set[int]:
            self._steps += 1 + len(places)
            if self._steps > MOST_STEPS:
                raise _NotSaid
            chars = ((place, self._text[place]) for place in places if place < len(self._text))
            return {place + 1 for place, char in chars if _has(part, char, any_case)}

        return after

    def _repeated(
        self, step: Callable[[set[int]], set[int]], least: int, most: int | None
    ) -> Callable[[set[int]], set[int]]:
        def after(places: set[int]) -> set[int]:
            ends = set(places) if least == 0 else set()
            for number in itertools.count(1):
                before, places = places, step(places) if most is None or number <= most else set()
                if number >= least:
                    if places <= ends:
                        return ends
                    ends |= places
                elif places == before:  # as after all further ones
                    ends |= places
                    if not places:
                        return ends
            raise AssertionError("places come to an end")

        return after


def _counts(part: re.Match[str]) -> tuple[int, int | None]:
    if part["least"] is None:
        return {"*": (0, None), "+": (1, None), "?": (0, 1)}[part[0]]
    least = _count(part["least"])
    if not part["comma"]:
        return least, least
    return least, _count(part["most"]) if part["most"] else None


def _has(part: re.Match[str], char: str, any_case: bool) -> bool:
    """Whether a part of one character has this one."""
    chars = {char.lower(), char.upper()} if any_case else {char}
    if part["set"]:
        return any(_in_set(part[0], char) for char in chars)
    if part["property"]:
        return _has_property(part[0], char)
    if part[0] == ".":
        return True
    return character_of(part[0]) in chars


def _in_set(text: str, char: str) -> bool:
    inside = text[1:-1]
    negated = inside.startswith("^")
    return negated != any(_in_item(item, char) for item in _ITEM.finditer(inside, int(negated)))


def _in_item(item: re.Match[str], char: str) -> bool:
    if item["inner"]:
        return _in_set(item["inner"], char)
    if item["property"]:
        return _has_property(item["property"], char)
    first = character_of(item[3])
    return first <= char <= (character_of(item[4]) if item[4] else first)


def _has_property(text: str, char: str) -> bool:
    category = _CATEGORY.fullmatch(text)
    if category is None:
        raise _NotSaid
    return unicodedata.category(char).startswith(category[2]) == (category[1] == "p")
