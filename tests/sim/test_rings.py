"""Rings of honest studies: their sizes, their length by name, and frames of the arena that hold them, by hand."""

from __future__ import annotations

import pytest

from benchmarks.pools.model_sizes import model_sizes
from benchmarks.pools.names import make_memory, make_run
from benchmarks.pools.rivals import RING_KINDS, Amounts, rings_in_frames
from hybrid_jax.geometry import ring_specs
from tests.sim.tiny import MODEL, pool_load

A, B = range(2)
# Frames of 20 bytes and two entries; a page of four tokens takes one, a state three. A ring has 6 bytes of columns and
# 2 for each of at most 8 records: one frame, with 8 records two. Raw records of 4 bytes: from the sixth on two.


def with_frames(count: int, kind: str) -> Amounts:
    """A pool of so many frames beside the sink, a line of five entries, and not a byte more."""
    memory = rings_in_frames(MODEL, (count + 1) * 28 + 20, kind=kind)
    assert memory.units == (count,)
    return memory


def test_a_whole_ring_is_taken_on_admission_and_kept():
    memory = with_frames(10, "rings")
    assert memory.admit(A, 1) and memory.used_bytes == (1 + 3 + 2) * 20
    assert not memory.admit(B, 1)
    assert memory.grow(A, 9) and memory.used_bytes == (3 + 3 + 2) * 20
    memory.release(A)
    assert memory.used_bytes == 0
    memory.check_invariants()


def test_records_take_frames_as_they_come_and_the_fold_gives_them_back():
    memory = with_frames(10, "records")
    assert memory.admit(A, 7) and memory.used_bytes == (2 + 3 + 1) * 20
    assert memory.grow(A, 8) and memory.used_bytes == (2 + 3 + 2) * 20
    assert memory.grow(A, 9) and memory.used_bytes == (3 + 3 + 1) * 20
    assert memory.counters.folds_in_place == 1
    memory.release(A)
    assert memory.used_bytes == 0


def test_raw_records_have_no_columns_beside_them():
    memory = with_frames(10, "raw")
    used = []
    assert memory.admit(A, 1)
    for tokens in range(1, 10):
        assert memory.grow(A, tokens)
        used.append(memory.used_bytes // 20 - 3 - -(-tokens // 4))
    assert used == [1, 1, 1, 1, 1, 2, 2, 2, 1]


def test_a_record_without_a_frame_is_refused_and_changes_nothing():
    memory = with_frames(6, "records")
    assert memory.admit(A, 7) and not memory.grow(A, 8)
    assert memory.used_bytes == 6 * 20 and memory.holds(A) == (7, True)
    memory.check_invariants()


def test_page_and_record_of_one_token_come_together_or_not_at_all():
    model = MODEL.at_grain(4)  # raw records of 4 bytes, by fives: no frame but the first
    memory = rings_in_frames(model, 8 * 28 + 16, kind="raw")
    assert memory.units == (7,) and memory.admit(A, 8)
    assert memory.used_bytes == 6 * 20
    assert memory.grow(A, 9) and not memory.grow(A, 13)
    assert memory.used_bytes == 7 * 20


def test_who_fits_alone_has_room_for_the_longest_ring_it_will_have():
    assert with_frames(6, "records").fits_alone(7)
    assert not with_frames(6, "records").fits_alone(8)
    assert with_frames(6, "rings").fits_alone(4)
    assert not with_frames(6, "rings").fits_alone(5)


@pytest.mark.parametrize("kind", RING_KINDS)
@pytest.mark.parametrize("grain", [1, 8, 32])
def test_everything_lies_within_the_budget(kind, grain):
    model = model_sizes("nemotron_h_8b").at_grain(grain)
    memory = rings_in_frames(model, 1 << 30, kind=kind)
    taken = memory.reserved_bytes + memory.row_bytes(100)
    assert (1 << 30) - 2 * model.frames.frame_bytes < taken <= 1 << 30


def test_a_run_by_hand():
    # A: two pages, a state, a frame of records; B: one, three, one; 12 frames. At 5 B takes a page, the last frame. At
    # 8 A's eighth record takes B's place, which has computed 8 and is back at once. At 9 A folds, but its page comes
    # before the records go: B goes again, after 1, and is back. A departs at 10, B at 9 + 12.
    memory = with_frames(12, "records")
    load = pool_load((6, 4, 0), (4, 8, 0))
    found = make_run(load, memory, MODEL).run(name="own", pool_bytes=13 * 28 + 20)
    assert (found.completed, found.preempted, found.recomputed_tokens) == (2, 2, 8 + 1)
    assert (found.makespan, found.most_running) == (21, 2)
    assert (found.hollow, found.leaked_bytes, found.infeasible) == (0, 0, 0)
    assert found.peak_footprint <= 1


def test_a_shorter_ring_beside_the_pool_changes_the_footprint_alone():
    load, size = pool_load((6, 20, 0), (4, 30, 0)), 2000
    long, short = (
        make_run(load, make_memory(name, MODEL, size), MODEL).run(name=name, pool_bytes=size)
        for name in ("frames@8", "frames@2")
    )
    assert long.tokens_per_tick == short.tokens_per_tick
    # Two rows and the one for padding; six records of 2 bytes less in each.
    assert long.peak_footprint - short.peak_footprint == pytest.approx(3 * 6 * 2 / size)


def test_rings_are_those_of_the_engines_layout():
    model = model_sizes("nemotron_h_8b")
    for grain in (1, 8, 32):
        (specs,) = ring_specs(model.at_grain(grain).frames, num_rows=1, window=1)
        assert model.at_grain(grain).ring_bytes == sum(each.num_bytes for each in specs.values())
    assert model.column_bytes == 24 * 4 * 10240 * 2
    assert model.record_bytes == 24 * (9216 * 2 + 128 * 4)
    assert model.raw_bytes == 24 * (10240 * 2 + 128 * 4)


@pytest.mark.parametrize("name", ["frames@3", "frames:4@128", "frames_raw@96"])
def test_lengths_that_are_no_power_of_two_up_to_64_are_refused(name):
    length = name.rpartition("@")[2]
    with pytest.raises(ValueError, match=f"{name}: a ring's length .* from 1 to 64, got {length}$"):
        make_memory(name, MODEL, 2000)


@pytest.mark.parametrize("name", ["frames_rings:4", "frames_some", "frames@", "ideal:4@8"])
def test_other_names_are_unknown(name):
    with pytest.raises(ValueError, match="^pool-sim: no allocator"):
        make_memory(name, MODEL, 2000)


def test_a_pool_without_room_for_a_request_and_its_ring_is_refused():
    with pytest.raises(ValueError, match="must hold 6 frames of 20 bytes"):
        rings_in_frames(MODEL, 6 * 28, kind="rings")
