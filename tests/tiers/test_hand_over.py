"""Promises between two engines: who waits, who is told, and when parts may go."""

from __future__ import annotations

import numpy as np
import pytest

from hybrid_jax.tiers.chain import root_of
from hybrid_jax.tiers.hand_over import HandOver, MemoryParts
from hybrid_jax.tiers.parcel import Pieces

TOKENS = np.arange(700, dtype=np.int32)


def shared() -> HandOver:
    return HandOver(root_of("a model"))


def bring(over: HandOver, name: str, *, but: int = 0) -> None:
    """All parts of a promise, but the last so many."""
    parts = over.known(name).parts
    for part in parts[: len(parts) - but]:
        over.folder.write(part, {}, {"x": Pieces("uint32", (1,), [np.uint32([len(part)])])})
    if not but:
        over.arrived(name)


def test_a_promise_names_its_runs_and_its_checkpoint():
    over = shared()
    name = over.promise(TOKENS, 608)
    parts = over.known(name).parts
    assert len(parts) == 4 and len(set(parts)) == 4 and all(map(over.needs, parts))
    assert parts[-1] == name and over.positions() == [608] and len(over) == 1
    assert not over.needs(over.promise(TOKENS + 1, 320)[:-1])


def test_who_waits_is_told_once_when_it_is_there_or_failed():
    over, told = shared(), []
    kept, broken = over.promise(TOKENS, 320), over.promise(TOKENS, 640)
    promises = [over.known(kept), over.known(broken)]
    over.wait(promises[0], lambda: told.append("kept"))
    over.wait(promises[1], lambda: told.append("broken"))
    bring(over, kept, but=1)
    assert told == []
    bring(over, kept)
    over.fail(kept)  # too late
    over.fail(broken)
    over.arrived(broken)  # too late
    assert told == ["kept", "broken"]
    assert [promise.state for promise in promises] == ["there", "failed"]
    assert over.known(broken) is None and over.known(kept) is promises[0]
    over.wait(promises[0], lambda: told.append("at once"))
    over.wait(promises[1], lambda: told.append("and this"))
    assert told[2:] == ["at once", "and this"]


def test_parts_go_with_the_last_promise_that_has_them():
    over = shared()
    short, long, again = (
        over.promise(TOKENS, 256),
        over.promise(TOKENS, 512),
        over.promise(TOKENS, 512),
    )
    assert long == again and len(over) == 2
    for name in (short, long):
        bring(over, name)
    shared_run, second_run = over.known(long).parts[:2]
    assert over.folder.num_files == 4  # two runs, of which one is of both, and two checkpoints
    over.take_back(long)
    assert over.folder.num_files == 4
    over.take_back(long)
    assert (
        second_run not in over.folder and shared_run in over.folder and over.folder.num_files == 2
    )
    over.take_back(short)
    over.take_back(short)
    assert not over.folder.num_files and not over.folder.num_bytes and not len(over)


def test_a_part_that_comes_after_its_promise_was_taken_back_is_not_kept():
    over = shared()
    name = over.promise(TOKENS, 320)
    parts = over.known(name).parts
    over.take_back(name)
    for part in parts:
        over.folder.write(part, {}, {})
    assert not over.folder.num_files and not over.folder.num_bytes


def test_a_promise_that_is_taken_back_fails_those_that_wait():
    over, told = shared(), []
    name = over.promise(TOKENS, 320)
    promise = over.known(name)
    over.wait(promise, lambda: told.append(promise.state))
    over.take_back(name)
    assert told == ["failed"] and not len(over)


def test_what_failed_may_be_promised_again():
    over = shared()
    name = over.promise(TOKENS, 320)
    over.fail(name)
    assert over.known(name) is None
    assert over.promise(TOKENS, 320) == name and over.known(name).state == "coming"


def test_parts_are_kept_as_they_are_and_gone_ones_are_an_error():
    parts = MemoryParts(root_of("x"))
    values = np.arange(10, dtype=np.uint32)
    assert (
        parts.write(
            "a", {"kind": "pages"}, {"x": Pieces("uint32", (2, 5), [values[:5], values[5:]])}
        )
        == 40
    )
    values[:] = 0  # the frame is written again
    found = parts.read("a", {})
    assert (
        found.marks == {"kind": "pages"}
        and (found.arrays["x"] == np.arange(10).reshape(2, 5)).all()
    )
    assert parts.write("a", {}, {}) == 0 and parts.num_bytes == 40
    parts.remove("a")
    with pytest.raises(FileNotFoundError, match="a is no longer handed over"):
        parts.read("a", {})


def test_the_end_of_a_promise_is_none_of_the_one_that_was_made_in_its_place():
    """As when it comes late."""
    over = shared()
    name = over.promise(TOKENS, 256)
    before = over.known(name)
    over.take_back(name)
    assert over.promise(TOKENS, 256) == name
    over.end(name, "there", before)
    assert over.known(name).state == "coming"
    over.end(name, "there", over.known(name))
    assert over.known(name).state == "there"


def test_a_part_that_cannot_go_on_is_not_kept():
    def full(name, part):
        raise OSError("the store is full")

    over = HandOver(root_of("a model"), came=full)
    name = over.promise(TOKENS, 256)
    with pytest.raises(OSError, match="the store is full"):
        bring(over, name)
    assert not over.folder.num_files and over.known(name).parts[0] not in over.folder
