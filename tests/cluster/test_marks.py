"""Names of prefixes, what marks find, and that they follow the trees that they are told of."""

from __future__ import annotations

import numpy as np
import pytest

from hybrid_jax.cache.tree.node import ARENA
from hybrid_jax.cluster.marks import Marks
from hybrid_jax.cluster.names import prefix_names
from hybrid_jax.cluster.watch import TreeWatcher, resume_points
from hybrid_jax.config import CacheConfig, EngineConfig
from hybrid_jax.sim.prefix_cache.virtual_engine import FRAME_BYTES, VirtualEngine
from tests.sim.chats import KINDS, asked, tokens

GRAIN = 32
HOST = 1


# --- names ----------------------------------------------------------------------------------------


def test_prefixes_have_the_same_names_exactly_as_far_as_they_agree():
    first = tokens(0, 300)
    for place in range(len(first)):
        other = first.copy()
        other[place] += 1
        same = prefix_names(first, GRAIN) == prefix_names(other, GRAIN)
        assert same.tolist() == [(block + 1) * GRAIN <= place for block in range(9)]


@pytest.mark.parametrize("grain", [8, 32, 64])
def test_a_name_is_that_of_the_prefix_alone(grain):
    whole = tokens(1, 1000)
    names = prefix_names(whole, grain)
    assert names.dtype == np.uint64 and len(names) == 1000 // grain
    assert prefix_names(whole[: grain - 1], grain).size == 0
    for end in range(grain, 1000, 7 * grain + 3):
        assert (prefix_names(whole[:end], grain) == names[: end // grain]).all()
    assert (prefix_names(whole[::2].copy(), grain) == prefix_names(whole[::2], grain)).all()


def test_blocks_in_another_order_and_neighbours_that_change_places_have_other_names():
    block, other = tokens(2, GRAIN), tokens(3, GRAIN)
    swapped = block.copy()
    swapped[[0, 1]] = block[[1, 0]]
    texts = [
        np.concatenate(parts)
        for parts in (
            (block, other),
            (other, block),
            (block, block),
            (other, other),
            (swapped, other),
        )
    ]
    assert len({int(prefix_names(text, GRAIN)[-1]) for text in texts}) == 5


def test_names_of_many_prefixes_differ():
    rng = np.random.default_rng(0)
    texts = rng.integers(0, 4, (20_000, 8), np.int32)  # few tokens, so that texts are alike
    known = {text.tobytes() for text in texts}
    assert len({int(prefix_names(text, 8)[0]) for text in texts}) == len(known)
    assert len(set(prefix_names(np.zeros(1 << 20, np.int32), 8).tolist())) == 1 << 17


# --- what marks find --------------------------------------------------------------------------------


def places(marks: Marks, found) -> list[tuple[int, int, int]]:
    """(length, tier, replica) of each place, in order."""
    there = []
    for mark in found:
        for tier, where in marks.each_place(mark.places):
            replicas = [where] if isinstance(where, int) else np.flatnonzero(where).tolist()
            there += [(mark.length, tier, replica) for replica in replicas]
    return there


def test_the_deepest_resume_point_of_every_place_is_found_and_no_other():
    marks, names = Marks(GRAIN, 3), [10, 20, 30, 40]
    marks.add(0, ARENA, names[:1])
    marks.add(1, ARENA, names[:3])
    marks.add(1, HOST, names)
    assert places(marks, marks.found(names, 1000)) == [
        (128, HOST, 1),
        (96, ARENA, 1),
        (32, ARENA, 0),
    ]
    assert places(marks, marks.found(names, 127)) == [(96, ARENA, 1), (96, HOST, 1), (32, ARENA, 0)]
    assert places(marks, marks.found(names, 31)) == []
    assert places(marks, marks.found([10, 99], 1000)) == [
        (32, ARENA, 0),
        (32, ARENA, 1),
        (32, HOST, 1),
    ]
    marks.remove(1, ARENA, names[1:3])
    assert places(marks, marks.found(names, 100)) == [(96, HOST, 1), (32, ARENA, 0), (32, ARENA, 1)]
    marks.forget(1, [ARENA, HOST])
    assert places(marks, marks.found(names, 1000)) == [(32, ARENA, 0)] and len(marks) == 1
    marks.remove(0, ARENA, names)
    assert not len(marks)


def test_many_replicas_with_the_same_are_all_found():
    marks = Marks(GRAIN, 70)
    for replica in range(1, 70, 2):
        marks.add(replica, HOST, [5])
    marks.add(69, ARENA, [5])
    expected = [(32, HOST, replica) for replica in range(1, 70, 2)]
    assert sorted(places(marks, marks.found([5], 40))) == sorted([*expected, (32, ARENA, 69)])


# --- marks beside trees -----------------------------------------------------------------------------


class Watched:
    """A simulated engine, and marks that are told of its tree."""

    def __init__(self, kind: str, frames: int, host: int = 0, policy: str = "adaptive"):
        engine = EngineConfig(
            cache=CacheConfig(policy=policy, loads="always"), max_rows=4, prefill_tokens=128
        )
        costs = KINDS[kind]
        self.engine = VirtualEngine(
            costs, costs, engine, frames * FRAME_BYTES, None, host_capacity=host * FRAME_BYTES
        )
        self.marks = Marks(GRAIN, 1)
        self.tree = self.engine.scheduler.memory.tree
        self.watch()

    def watch(self) -> None:
        watcher = TreeWatcher(GRAIN, needs_slots=self.tree.needs_slots, tell=self.tell)
        self.tree.watch(watcher)

    def tell(self, news) -> None:
        if news.what == "came":
            self.marks.add(0, news.tier, news.names)
        elif news.what == "went":
            self.marks.remove(0, news.tier, news.names)
        else:
            self.marks.forget(0, range(2))

    def check(self) -> None:
        for tier in self.tree.tiers:
            self.marks.check(0, tier.number, resume_points(self.tree, tier.number))


@pytest.mark.parametrize("host", [0, 80])
@pytest.mark.parametrize("kind", KINDS)
def test_marks_follow_a_tree_through_evictions_splits_and_copies(kind, host):
    frames = 16 if kind == "recurrent" else 56
    watched, rng = Watched(kind, frames, host), np.random.default_rng([3, host])
    stems = [tokens(seed, 200) for seed in range(4)]
    before = watched.tree.arena.counters
    for number in range(60):
        stem = stems[rng.integers(4)][: rng.integers(40, 200)]
        prompt = np.concatenate((stem, tokens(1000 + number, rng.integers(1, 90))))
        watched.engine.add(str(number), asked(number, 0.0, prompt, tokens(number, 20)))
        for _ in range(rng.integers(1, 12)):
            if watched.engine.begin() is not None:
                watched.engine.end()
            watched.check()
        if number == 30:
            watched.engine.scheduler.reset_prefix_cache()
            watched.check()
            assert not len(watched.marks)
    assert before.evictions > 10 and before.hits > 3
    assert len(watched.marks.of(0, ARENA)) > 3 and (not host or watched.marks.of(0, HOST))


def test_who_begins_to_watch_is_told_what_is_there():
    watched = Watched("hybrid", 100)
    for number in range(3):
        watched.engine.add(str(number), asked(number, 0.0, tokens(number, 200), tokens(9, 5)))
        while watched.engine.begin() is not None:
            watched.engine.end()
    there = watched.marks.of(0, ARENA)
    watched.marks.add(0, HOST, [7])  # of another time
    watched.watch()
    assert watched.marks.of(0, ARENA) == there and len(there) == 3 and not watched.marks.of(0, HOST)


def test_marks_that_differ_from_the_tree_are_an_error():
    watched = Watched("hybrid", 100)
    watched.marks.add(0, ARENA, [7])
    with pytest.raises(AssertionError, match=r"replica 0, tier 0"):
        watched.check()
