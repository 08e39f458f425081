"""Turns tokens into text as they come: only whole characters, and stop strings wherever they begin."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from os.path import commonprefix

REPLACEMENT = "\ufffd"  # what a decoder writes for bytes that are not (yet) a character
MAX_HELD = 16  # replacement characters held back; if there are more, the model wrote garbage
TAIL, KEPT = 16, 6  # tokens decoded again for each new one: when to cut, and how many stay
MAX_PARTIAL = 3  # the most tokens of an incomplete character
MAX_TAIL = 256  # cut here in any case: the text is garbage, and must not cost more and more


class IncrementalDecoder:
    """Decodes a growing sequence one token at a time. The pieces, joined, are its text.

    A token may hold only a part of a character, and its text may depend on the tokens before it. So a short tail of
    recent tokens is decoded again for each new one, and text that ends in an incomplete character is held back. The
    pieces depend only on the tokens, not on how they were grouped.

    The tail starts with the end of the prompt, because many decoders drop the space before the first word that they
    see. A character that begins in the prompt and ends after it belongs to the pieces.

    Args:
        decode: makes text of token ids: `Tokenizer.decode` with its options bound.
        prompt: the tokens before the sequence, or the last few of them.

    Example:
        >>> decoder = IncrementalDecoder(lambda ids: bytes(ids).decode(errors="replace"))
        >>> [decoder.push(byte) for byte in "a\u00e9b".encode()], decoder.finish()
        (['a', '', '\u00e9', 'b'], '')
    """

    def __init__(self, decode: Callable[[list[int]], str], prompt: Sequence[int] = ()) -> None:
        self._decode = decode
        self._prompt = list(prompt[-KEPT:])  # until the first piece
        self._tail = self._prompt  # never written into, so that a shallow copy is a copy
        self._sent = 0  # characters of the tail's text already given out
        self._partial = 0  # tokens since the last one that ended a character
        self._limit = TAIL

    def push(self, token: int) -> str:
        """Takes one token, and returns the text that is now certain, often ""."""
        self._tail = [*self._tail, token]
        text = self._decode(self._tail)
        end = len(text)
        held = end - len(text.rstrip(REPLACEMENT))
        self._partial = self._partial + 1 if held else 0
        # Some decoders write U+FFFD for every byte of a run that ends in an incomplete character, however long.
        if held > MAX_HELD and self._partial > MAX_PARTIAL:
            end -= 1  # all except the last one, which may still become a character
        elif held:
            return ""
        self._leave_prompt(text)
        piece = text[self._sent : end]
        self._sent = max(self._sent, end)
        if len(self._tail) > self._limit:
            self._cut(text, len(text) - end)
        return piece

    def finish(self) -> str:
        """The rest, with incomplete characters as U+FFFD. Nothing may be pushed afterwards."""
        if not self._tail:
            return ""
        text = self._decode(self._tail)
        self._leave_prompt(text)
        if 0 < self._partial <= MAX_PARTIAL:
            whole = self._decode(self._tail[: -self._partial])
            if not text.startswith(whole):  # they are lost in a run of bytes, see `push`
                return self._decode(self._tail[-self._partial :])
        return text[self._sent :]

    def _leave_prompt(self, text: str) -> None:
        """Counts the prompt's part of the tail as given out, except a character that the new tokens complete."""
        if not self._prompt:
            return
        known = self._decode(self._prompt)
        self._sent = len(commonprefix([known, text]))
        if known.endswith(REPLACEMENT):
            # Some decoders then lose the whole characters before it, too.
            for length in range(max(0, len(self._prompt) - MAX_PARTIAL), len(self._prompt)):
                whole = self._decode(self._prompt[:length])
                self._sent = max(self._sent, len(commonprefix([whole, text])))
        self._prompt = []

    def _cut(self, text: str, pending: int) -> None:
        """Forgets old tokens if the recent ones decode to the same text; `pending` characters are not given out yet."""
        for kept in range(KEPT, KEPT + MAX_PARTIAL + 1):  # one of them begins with a character
            tail = self._decode(self._tail[-kept:])
            if tail and text.endswith(tail) and not tail.startswith(REPLACEMENT):
                break
        else:
            if len(self._tail) < MAX_TAIL:
                self._limit = min(2 * len(self._tail), MAX_TAIL - 1)  # do not try again at once
                return
        self._tail, self._sent = self._tail[-kept:], max(0, len(tail) - pending)
        self._limit = TAIL


class StopStrings:
    """Finds stop strings in text that comes in pieces, and holds back text that may become one.

    The string that ends first wins, and the longest of several that end together. The result does not depend on how the
    text was cut into pieces.

    Args:
        stops: the strings; without any, all text passes through.
        include: keep the stop string in the text.

    Example:
        >>> stops = StopStrings(["</s>"])
        >>> stops.push("one <"), stops.push("b> two</"), stops.push("s> three")
        (('one ', None), ('<b> two', None), ('', '</s>'))
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._search = _search(tuple(sorted(set(stops)))) if stops else None
        self._state = 0  # of the search, at the end of the held text
        self._include = include
        self._held = ""
        self._hidden: list[tuple[int, int]] = []  # where in the held text the hidden parts lie

    def push(self, piece: str, *, hidden: bool = False) -> tuple[str, str | None]:
        """Takes a piece, and returns the text that may be shown, and the stop string that ended it, or None.

        A hidden piece, the text of a special token, may be a part of a stop string, but is not shown itself.
        """
        search = self._search
        if search is None:
            return "" if hidden else piece, None
        text = self._held + piece
        if hidden:
            self._hidden.append((len(self._held), len(text)))
        for end, letter in enumerate(piece, len(self._held) + 1):
            self._state = search.step(self._state, letter)
            if stop := search.found[self._state]:
                start, self._state = end - len(stop), 0
                return self._give_out(text, start, start) + (stop if self._include else ""), stop
        return self._give_out(text, len(text) - search.depth[self._state], len(text)), None

    def finish(self) -> str:
        """The text that was held back, which is not a stop string after all."""
        self._state = 0
        return self._give_out(self._held, len(self._held), len(self._held))

    def _give_out(self, text: str, cut: int, end: int) -> str:
        """What is shown of the text before `cut`. What follows, up to `end`, is held back."""
        self._held, hidden = text[cut:end], self._hidden
        self._hidden = [(max(0, a - cut), b - cut) for a, b in hidden if b > cut]
        for a, b in reversed(hidden):
            if a < cut:
                text, cut = text[:a] + text[b:], cut - (min(b, cut) - a)
        return text[:cut]


class _Search:
    """Looks for several strings at once. The time for a character does not depend on how many there are.

    A state stands for the longest beginning of a string with which the text ends. From each one there is a way to the
    next shorter beginning with which it ends, too.

    Args:
        strings: what is looked for.

    Attributes:
        depth: by state, the length of the beginning.
        found: by state, the longest string that ends there; empty for none.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self.depth, self.found = [0], [""]
        self._next: dict[tuple[int, str], int] = {}
        ways = [(0, "")]  # from the state before, and by which character
        for string in strings:
            state = 0
            for letter in string:
                way = (state, letter)
                state = self._next.setdefault(way, len(ways))
                if state == len(ways):
                    ways.append(way)
                    self.depth.append(self.depth[way[0]] + 1)
                    self.found.append("")
            self.found[state] = string
        self._shorter = [0] * len(ways)
        for state in sorted(range(1, len(ways)), key=self.depth.__getitem__):
            before, letter = ways[state]
            if before:
                self._shorter[state] = self.step(self._shorter[before], letter)
            self.found[state] = self.found[state] or self.found[self._shorter[state]]

    def step(self, state: int, letter: str) -> int:
        """The state after one more character."""
        following = self._next.get((state, letter))
        while following is None and state:
            state = self._shorter[state]
            following = self._next.get((state, letter))
        return following or 0


_search = functools.lru_cache(maxsize=8)(_Search)  # the completions of a request share one
