"""Speculation under all circumstances, by a few cells for each engine: every two circumstances meet in one of them."""

from __future__ import annotations

import itertools
import random

import pytest

from tests.drawing import left_to_all
from tests.exactness.speculation_matrix import (
    ENGINES,
    FEWER_PROGRAMS,
    any_cell,
    pairwise,
    subject_of,
)

DRAWN = ("planted-jamba", "ngram-parallel")  # the quickest
TOKENS = 8_000  # of all engines that are drawn together


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[left_to_all] * (name not in DRAWN)) for name in ENGINES]
)
def test_drafts_change_no_token(name, plain_of):
    maker = ENGINES[name]
    plain = plain_of(maker.model, maker.kv_dtype)
    with subject_of(maker, plain, ()) as subject:
        rng = random.Random(name)
        cells = list(pairwise(FEWER_PROGRAMS, rng))
        for seed in itertools.count():
            if not cells and subject.tokens >= TOKENS / len(DRAWN):
                break
            cell = cells.pop() if cells else any_cell(FEWER_PROGRAMS, rng)
            assert subject.check(cell, 1000 * seed) == [], cell
        assert set(subject.accepted) == {0, 1, 2, 3}
        seen = ("cache_hits", "preemptions") + ("forks",) * (not maker.exact)
        seen += ("folds_to_new",) * bool(subject.engine.config.recurrent)
        assert not [what for what in seen if not subject.moved[what]], subject.moved
