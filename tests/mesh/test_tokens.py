"""A model that is divided over devices gives the tokens of one device, cold and with hits."""

from __future__ import annotations

import pytest

from tests.drawing import left_to_all
from tests.mesh.models import DIVIDED
from tests.mesh.running import answers, make, of_one_device

# Each kind on two devices, and one on eight, whose two key-value heads are repeated; the others with all cases.
CASES = [(name, count) for name, (_, counts) in DIVIDED.items() for count in counts]
DRAWN = [case for case in CASES if case[1] == 2 or case == ("two_kv", 8)]


@left_to_all(*(f"{name}-{count}" for name, count in CASES if (name, count) not in DRAWN))
@pytest.mark.parametrize(("name", "count"), CASES)
def test_tokens_are_those_of_one_device(name, count):
    with make(name, count) as llm:
        assert (answers(llm), answers(llm)) == of_one_device(name)
        assert min(of_one_device(name)[1][1]) > 0, "the second time, all prompts hit"
        engine = llm._engine
        engine.scheduler.check_invariants()
        arena = engine.runner.state.arena
        assert arena.shape[1] == count * engine.geometry.frame_words
        assert len(arena.sharding.device_set) == engine.shards.count == count
