"""Drafts on the host: what followed the longest match of a sequence's last tokens, by how often it did.

After SuffixDecoding (arXiv 2411.04975): the draft is as long as the match allows, and goes on while it is likely.
Matches are looked up by their last few tokens, so there is no tree to keep.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Sequence as Tokens
from typing import NamedTuple

from hybrid_jax.config import SpeculationConfig

PLACES = 24  # of earlier matches that are looked at, the latest ones
LONGEST = 32  # tokens of a match that are compared
LEAST_CHANCE = 0.1  # of the whole draft to be right, below which it ends


class Draft(NamedTuple):
    """Tokens that may follow a sequence.

    Attributes:
        tokens: in order. expected: how many of them will be right, by how often they were.
    """

    tokens: list[int]
    expected: float


NO_DRAFT = Draft([], 0.0)


class SuffixIndex:
    """Texts, and where each run of a few tokens ends in them.

    Args:
        least: tokens of a run.
        max_tokens: of all texts together; the oldest texts go first. A text that is being written always stays.
    """

    def __init__(self, least: int, max_tokens: int) -> None:
        self._least, self._max_tokens, self._num_tokens = least, max_tokens, 0
        self._texts: OrderedDict[str, list[int]] = OrderedDict()
        self._ends: defaultdict[tuple[int, ...], list[tuple[str, int]]] = defaultdict(list)

    def extend(self, name: str, tokens: Tokens[int]) -> None:
        """Makes a text longer, so that it is `tokens`; it begins with what is known of it."""
        text = self._texts.setdefault(name, [])
        known, least = len(text), self._least
        text += tokens[known:]
        self._num_tokens += len(text) - known
        for end in range(max(known, least - 1), len(text)):
            self._ends[tuple(text[end - least + 1 : end + 1])].append((name, end))
        while self._num_tokens > self._max_tokens and next(iter(self._texts)) != name:
            self.forget(next(iter(self._texts)))

    def forget(self, name: str) -> None:
        """Drops a text; does nothing if it is unknown."""
        text, least = self._texts.pop(name, []), self._least
        self._num_tokens -= len(text)
        for end in range(least - 1, len(text)):
            run = tuple(text[end - least + 1 : end + 1])
            left = [place for place in self._ends.get(run, ()) if place[0] != name]
            if left:
                self._ends[run] = left
            else:
                self._ends.pop(run, None)

    def draft(self, name: str, most: int) -> Draft:
        """Up to `most` tokens that may follow the end of a text."""
        text = self._texts.get(name, [])
        run = tuple(text[-self._least :])
        places = [
            (self._texts[other], end)
            for other, end in self._ends.get(run, ())[-PLACES - 1 :]
            if end + 1 < len(self._texts[other])
        ]
        if not places:
            return NO_DRAFT
        lengths = [_match(text, other, end) for other, end in places]
        longest = max(lengths)
        best = [place for place, length in zip(places, lengths, strict=True) if length == longest]
        return _go_on(text, best, min(most, longest))


def _match(text: list[int], other: list[int], end: int) -> int:
    """How many tokens at the end of `text` stand in `other` up to `end`."""
    most = min(len(text), end + 1, LONGEST)
    length = 0
    while length < most and text[-1 - length] == other[end - length]:
        length += 1
    return length


def _go_on(own: list[int], places: list[tuple[list[int], int]], most: int) -> Draft:
    """What followed these places most often, token by token. After the end of the text `own` comes its draft."""
    tokens: list[int] = []
    chance, expected = 1.0, 0.0

    def following(text: list[int], place: int) -> int | None:
        if place < len(text):
            return text[place]
        return tokens[place - len(text)] if text is own else None

    for ahead in range(1, most + 1):
        found = [(place, following(place[0], place[1] + ahead)) for place in places]
        counts = Counter(token for _, token in found if token is not None)
        if not counts:
            break
        ((best, count),) = counts.most_common(1)
        chance *= count / len(places)
        if chance < LEAST_CHANCE:
            break
        tokens.append(best)
        expected += chance
        places = [place for place, token in found if token == best]
    return Draft(tokens, expected)


class SuffixDrafter:
    """Drafts for sequences by name, from each one's own tokens and, if asked, from those of all others."""

    def __init__(self, config: SpeculationConfig) -> None:
        self._config = config
        self._shared = self._index() if config.shared else None
        self._own: dict[str, tuple[SuffixIndex, str]] = {}  # and the name of its text there
        self._num_texts = 0

    def _index(self) -> SuffixIndex:
        return SuffixIndex(self._config.ngram_min, self._config.shared_tokens)

    def draft(self, name: str, tokens: Tokens[int], most: int) -> Draft:
        """Up to `most` tokens that may follow a sequence's tokens, which begin with those of earlier calls."""
        if name not in self._own:
            self._num_texts += 1
            self._own[name] = self._shared or self._index(), str(self._num_texts)
        index, text = self._own[name]
        index.extend(text, tokens)
        return index.draft(text, most)

    def ended(self, name: str) -> None:
        """The sequence will ask no more; another may have its name later."""
        self._own.pop(name, None)
