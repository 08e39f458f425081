"""Checks of what must hold for sequences in rows: all is recounted, and an error has both numbers."""

from __future__ import annotations

from collections import Counter

from hybrid_jax.cache.pools.pages import PageHolds
from hybrid_jax.cache.pools.recount import agree
from hybrid_jax.schedule.admission import Seats
from hybrid_jax.schedule.memory import Memory
from hybrid_jax.schedule.plan import Plan
from hybrid_jax.schedule.sequence import Sequence


def check_memory(memory: Memory, sequences: list[Sequence]) -> None:
    """Checks that the pools, the tree and the sequences agree on who holds which frame and slot."""
    memory.frames.check_invariants()
    memory.slots.check_invariants()
    assert not any(memory.later), "memory: a plan was left unfinished"
    frames = Counter(frame for s in sequences for frame in s.pages.reshape(-1).tolist())
    frames.update(frame for s in sequences for source, _ in s.copies for frame in source)
    held = [slot for s in sequences for slot in (*{s.slot, s.real_slot}, s.reserved_slot)]
    slots = Counter(filter(None, held))
    agree(
        "holds",
        live_page_frames=(memory.holds.page_frames, len(frames)),
        live_checkpoints=(memory.holds.num_slots, len(slots)),
    )
    if memory.tree is not None:
        memory.tree.check_invariants()
        page_holds = memory.tree.page_holds
        assert isinstance(page_holds, PageHolds), "memory: an engine's tree lists frames"
        frames.update(page_holds.as_dict())
        slots.update(list(memory.tree.slot_nodes))
    for slot in slots:
        frames.update(memory.slots.frames(slot))
    numbers = range(memory.frames.num_frames)
    frame_holders = {frame: memory.frames.holders(frame) for frame in numbers}
    agree(
        "memory",
        slots=(memory.slots.num_held, len(slots)),
        slot_holders=({slot: memory.slots.holders(slot) for slot in slots}, slots),
        frame_holders=(frame_holders, {frame: frames[frame] for frame in numbers}),
    )


def check_seats(seats: Seats) -> None:
    """Checks that every running sequence sits in the row that it names, and that nothing else sits in a row."""
    seated = {row: sequence for row, sequence in enumerate(seats.rows) if sequence is not None}
    running = seats.running
    agree(
        "scheduler",
        rows=(list(seated), [s.row for s in seated.values()]),
        seated=(sorted(s.arrival for s in seated.values()), [s.arrival for s in running]),
        seated_but_not_running=([s.owner for s in running if not s.running], []),
    )


def check_running(sequence: Sequence, flights: list[Plan], memory: Memory) -> None:
    """Checks one sequence: its flights, where its checkpoint stands, and its hold on that checkpoint."""
    checkpoint, real = sequence.real_checkpoint, sequence.real_position
    assert checkpoint <= real <= checkpoint + memory.geometry.grain, (
        f"scheduler: {sequence.owner} at {real}, checkpoint {checkpoint}"
    )
    rows = [row for plan in flights for row in plan.decode if row.sequence is sequence]
    agree(
        f"scheduler: {sequence.owner}",
        flights=(sequence.num_flights, sum(sequence in plan.sequences for plan in flights)),
        tokens_at_most=(sequence.position, real + sum(row.num_steps for row in rows)),
    )
    if sequence.slot:
        memory.slots.resolve(sequence.slot)
