"""Drafts on the host, beside a search through whole texts."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_jax.config import SpeculationConfig
from hybrid_jax.schedule.suffix import (
    LEAST_CHANCE,
    LONGEST,
    NO_DRAFT,
    PLACES,
    SuffixDrafter,
    SuffixIndex,
)

texts = st.lists(st.integers(0, 3), max_size=60)


def expected(text: list[int], others: list[list[int]], least: int, most: int) -> list[int]:
    """The definition: the longest match, and what followed it most often; after a text's end comes its draft."""
    found = []
    for other in (*others, text):
        for end in range(len(other) - 1):
            length = 0
            while (
                length < min(LONGEST, len(text), end + 1)
                and text[-1 - length] == other[end - length]
            ):
                length += 1
            if length >= least:
                found.append((length, other, end))
    if not found:
        return []
    longest = max(length for length, *_ in found)
    places = [(other, end) for length, other, end in found if length == longest]
    drafted: list[int] = []
    chance = 1.0
    while len(drafted) < min(most, longest):
        nexts = []
        for other, end in places:
            whole = other + drafted if other is text else other
            place = end + 1 + len(drafted)
            nexts.append(whole[place] if place < len(whole) else None)
        known = [token for token in nexts if token is not None]
        if not known:
            break
        best = max(dict.fromkeys(known), key=known.count)
        chance *= known.count(best) / len(places)
        if chance < LEAST_CHANCE:
            break
        drafted.append(best)
        places = [place for place, token in zip(places, nexts, strict=True) if token == best]
    return drafted


@settings(max_examples=300)
@given(others=st.lists(texts, max_size=2), text=texts, least=st.integers(1, 3), parts=texts)
def test_a_draft_is_what_followed_the_longest_match_most_often(others, text, least, parts):
    index = SuffixIndex(least, 10**6)
    for number, other in enumerate(others):
        index.extend(str(number), other)
    for part in sorted({min(part * 15, len(text)) for part in parts} | {len(text)}):
        index.extend("own", text[:part])  # however it grew
    draft = index.draft("own", 5)
    if sum(map(len, others)) + len(text) <= PLACES:
        assert draft.tokens == expected(text, others, least, 5)
    assert len(draft.tokens) <= 5 and 0 <= draft.expected <= len(draft.tokens)


def test_a_period_goes_on_past_its_end():
    index = SuffixIndex(2, 100)
    index.extend("own", [7, 8, 9, 7, 8, 9, 7, 8])
    assert index.draft("own", 5) == ([9, 7, 8, 9, 7], 5.0)


def test_a_short_match_gives_a_short_draft():
    index = SuffixIndex(2, 100)
    index.extend("own", [1, 2, 3, 4, 5, 6, 9, 1, 2])
    assert index.draft("own", 5) == ([3, 4], 2.0)
    assert SuffixIndex(2, 100).draft("unknown", 5) == NO_DRAFT


def test_an_unlikely_draft_ends():
    index = SuffixIndex(2, 1000)
    for number in range(12):
        index.extend(str(number), [1, 2, 3, 4, 20 + number, 30])
    index.extend("own", [1, 2, 3, 4])
    assert index.draft("own", 4) == NO_DRAFT
    index.extend("more", [1, 2, 3, 4, 20, 30])
    assert index.draft("own", 4).tokens == [20, 30]


def test_old_texts_give_way_and_leave_nothing_behind():
    index = SuffixIndex(2, 50)
    rng = np.random.default_rng(0)
    for number in range(40):
        index.extend(str(number), rng.integers(0, 5, 20).tolist())
        assert index._num_tokens == sum(map(len, index._texts.values())) <= 50
        named = {name for places in index._ends.values() for name, _ in places}
        assert named <= set(index._texts)
    index.extend("long", list(range(80)))
    assert list(index._texts) == ["long"]  # what is being written stays


def test_requests_share_what_they_wrote_only_if_asked():
    first, second = [1, 2, 3, 4, 5, 6], [9, 1, 2, 3]
    for shared in (False, True):
        drafter = SuffixDrafter(SpeculationConfig(method="suffix", shared=shared))
        drafter.draft("a", first, 4)
        drafter.ended("a")
        assert drafter.draft("b", second, 4).tokens == ([4, 5, 6] if shared else [])
        # Another request may have an old one's name.
        assert drafter.draft("a", [5, 5, 1, 2], 4).tokens == ([3, 4] if shared else [])
