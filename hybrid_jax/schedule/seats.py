"""Who runs: sequences in ring rows."""

from __future__ import annotations

from hybrid_jax.schedule.sequence import Phase, Sequence


class Seats:
    """Ring rows, and the sequences in them by age.

    Attributes:
        rows: the sequence of each ring row, or None.
        running: those that have a row, oldest first.
    """

    def __init__(self, max_rows: int):
        self.rows: list[Sequence | None] = [None] * max_rows
        self.running: list[Sequence] = []

    @property
    def num_free(self) -> int:
        return self.rows.count(None)

    def take(self, sequence: Sequence, hit_len: int) -> None:
        """Gives a waiting sequence the lowest free row; `hit_len` tokens of its prompt need no prefill."""
        sequence.waits_for = None
        sequence.phase = Phase.PREFILL
        sequence.row = self.rows.index(None)
        self.rows[sequence.row] = sequence
        self.running.append(sequence)
        self.running.sort(key=lambda s: s.arrival)
        if sequence.request.num_preemptions == 0 and not sequence.request.output:
            sequence.request.num_cached_tokens = hit_len

    def leave(self, sequence: Sequence) -> None:
        """Frees a sequence's row."""
        self.rows[sequence.row] = None
        self.running.remove(sequence)
