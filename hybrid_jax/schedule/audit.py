"""Checks of what must hold for sequences in rows: all is recounted, and an error has both numbers."""

from __future__ import annotations

from collections import Counter

from hybrid_jax.cache.pools.pages import PageHolds
from hybrid_jax.schedule.admission import Seats
from hybrid_jax.schedule.memory import Memory
from hybrid_jax.schedule.plan import Plan
from hybrid_jax.schedule.sequence import Sequence


def check_memory(memory: Memory, sequences: list[Sequence]) -> None:
    """Checks that the pools, the tree and the sequences agree on who holds which frame and slot."""
    memory.frames.check_invariants()
    memory.slots.check_invariants()
    assert not any(memory.later), "memory: a plan was left unfinished"
    frames = [frame for s in sequences for frame in s.pages.reshape(-1).tolist()]
    frames += [frame for s in sequences for source, _ in s.copies for frame in source]
    slots = [slot for s in sequences for slot in (s.real_slot, s.reserved_slot) if slot]
    slots += [s.slot for s in sequences if s.slot != s.real_slot]
    memory.holds.check_invariants(set(frames), set(slots))
    holds = dict.fromkeys(range(memory.frames.num_frames), 0)
    if memory.tree is not None:
        memory.tree.check_invariants()
        page_holds = memory.tree.page_holds
        assert isinstance(page_holds, PageHolds), "memory: an engine's tree lists frames"
        holds |= page_holds.as_dict()
        slots += memory.tree.slot_nodes
    slot_holds = Counter(slots)
    for slot, count in slot_holds.items():
        held = memory.slots.holders(slot)
        assert held == count, f"memory: slot {slot:#x} has {held} holders, {count} known"
        for frame in memory.slots.frames(slot):
            holds[frame] += 1
    assert len(slot_holds) == memory.slots.num_held, (
        f"memory: {memory.slots.num_held} slots held, {len(slot_holds)} known"
    )
    for frame in frames:
        holds[frame] += 1
    for frame, count in holds.items():
        held = memory.frames.holders(frame)
        assert held == count, f"memory: frame {frame} has {held} holders, {count} known"


def check_seats(seats: Seats) -> None:
    """Checks that every running sequence sits in the row that it names, and that nothing else sits in a row."""
    rows, running = seats.rows, seats.running
    for row, sequence in enumerate(rows):
        assert sequence is None or sequence.row == row, (
            f"scheduler: row {row} holds a sequence that says {sequence.row}"
        )
    seated = [s for s in rows if s is not None]
    assert sorted(s.arrival for s in seated) == [s.arrival for s in running], (
        f"scheduler: {len(seated)} sequences in rows, {len(running)} running"
    )
    assert all(s.running for s in running), "scheduler: a sequence in a row does not run"


def check_running(sequence: Sequence, flights: list[Plan], memory: Memory) -> None:
    """Checks one sequence: its flights, where its checkpoint stands, and its hold on that checkpoint."""
    count = sum(sequence in plan.sequences for plan in flights)
    assert count == sequence.num_flights, (
        f"scheduler: {sequence.owner} counts {sequence.num_flights} flights, is in {count}"
    )
    checkpoint, real = sequence.real_checkpoint, sequence.real_position
    assert checkpoint <= real <= checkpoint + memory.geometry.grain, (
        f"scheduler: {sequence.owner} at {real}, checkpoint {checkpoint}"
    )
    on_their_way = [
        row.num_steps for plan in flights for row in plan.decode if row.sequence is sequence
    ]
    most = real + sum(on_their_way)
    assert sequence.position == most, (
        f"scheduler: {sequence.owner} at {real} with {on_their_way} in flight, not {sequence.position}"
    )
    if sequence.slot:
        memory.slots.resolve(sequence.slot)
