"""The texts of a regular expression that has only a few, such as `^(a|b)$`."""

from __future__ import annotations

import itertools
import re
from collections.abc import Set

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
            if part["least"] is None:
                least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}[part[0]]
            else:
                least = _count(part["least"])
                most = (_count(part["most"]) if part["most"] else None) if part["comma"] else least
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
