"""Prompts that one engine computes and another goes on from: the tokens of one engine alone."""

from __future__ import annotations

import pytest

from hybrid_jax.tiers import chain, disk
from tests.exactness.conftest import FLOAT32, load
from tests.exactness.engines import one_shape
from tests.exactness.jobs import conversations, drive
from tests.exactness.pair import Pair
from tests.exactness.poison import Poison
from tests.exactness.tiers import NAMES, ROOM


@pytest.fixture(autouse=True)
def short_runs(monkeypatch):
    """Prefixes of several runs, although prompts are short."""
    for module in (chain, disk):
        monkeypatch.setattr(module, "RUN_TOKENS", 64)


@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_those_of_one_engine(name, plain_of):
    config, params = load(name)
    jobs = conversations(config.vocab_size)
    with one_shape(64):
        pair = Pair(config, params, FLOAT32, room=ROOM)
        run = drive(pair, jobs, Poison(pair.decode))
        assert plain_of(name).mismatches(run.requests) == []
    assert pair.handed_over > 10 and run.moved["disk_loads"] > 5, run.moved
    assert not len(pair.shared) and not pair.shared.folder.num_files
