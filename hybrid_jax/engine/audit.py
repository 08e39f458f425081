"""What must hold of sequences in rows: recounted from scratch, with both numbers when they differ."""

from __future__ import annotations

from hybrid_jax.engine.memory import Memory
from hybrid_jax.engine.seats import Seats
from hybrid_jax.engine.sequence import Flight, Sequence


def check_seats(seats: Seats) -> None:
    """Every running sequence sits in the row it says, and nobody else sits anywhere."""
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


def check_running(sequence: Sequence, flights: list[Flight], memory: Memory) -> None:
    """One sequence's flights, checkpoint and hold on it."""
    count = sum(sequence in flight.sequences() for flight in flights)
    assert count == sequence.num_flights, (
        f"scheduler: {sequence.owner} counts {sequence.num_flights} flights, is in {count}"
    )
    end = sequence.checkpoint + memory.geometry.grain
    assert sequence.checkpoint <= sequence.position <= end, (
        f"scheduler: {sequence.owner} at {sequence.position}, checkpoint {sequence.checkpoint}"
    )
    if sequence.slot:
        memory.slots.resolve(sequence.slot)
