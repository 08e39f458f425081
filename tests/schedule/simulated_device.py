"""A device made of dictionaries: it runs plans exactly and knows what every read should have found.

A token prefix is summed up in one number (`extend`). A page's frame remembers which layer group wrote it, and per
offset the summary of the prefix that ends there; a checkpoint's frames remember the summary of the prefix they
cover; a ring row remembers its tokens since the checkpoint. Every read is checked against the summary of the row's
own tokens, so memory that was lost, overwritten or mixed up between requests is found where it is read, not where it
shows. The next token is a function of the prefix alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from hybrid_jax.geometry import Geometry
from hybrid_jax.schedule.plan import DecodeRow, Plan, PrefillRow, Recast
from hybrid_jax.schedule.request import Request

EMPTY = 0x9E3779B97F4A7C15


def extend(summary: int, token: int) -> int:
    """Summary of a prefix and one more token."""
    return ((summary ^ (token + 1)) * 0xD6E8FEB86659FD93 + 0x2545F4914F6CDD1D) % (1 << 64)


def next_token(summary: int, vocab: int) -> int:
    """The token the model gives after a prefix."""
    return (summary >> 17) % vocab


def plain_loop(prompt: list[int], *, vocab: int, stop_ids: frozenset[int], limit: int) -> list[int]:
    """The definition: token after token, no memory at all."""
    summary, output = EMPTY, []
    for token in prompt:
        summary = extend(summary, token)
    while len(prompt) + len(output) < limit:
        token = next_token(summary, vocab)
        output.append(token)
        if token in stop_ids:
            break
        summary = extend(summary, token)
    return output


@dataclass
class Frame:
    """What a frame holds: a page's summaries by offset, of one layer group, or a part of a checkpoint."""

    group: int = -1
    summaries: list[int | None] = field(default_factory=list)
    state: tuple[int, int, bool] | None = None  # summary, which part, whether in the narrow form

    def copy(self) -> Frame:
        return replace(self, summaries=list(self.summaries))


@dataclass
class Ring:
    """One ring row: the summary at the checkpoint, the tokens since, the token to feed next (-1: inert)."""

    base: int = 0
    records: list[int] = field(default_factory=list)
    summary: int = EMPTY
    token: int = -1
    true: list[int] = field(default_factory=list)  # summaries of the row's own prefixes, by length

    @property
    def position(self) -> int:
        """How many tokens it has been fed."""
        return self.base + len(self.records)


def _slot(row: DecodeRow, ring: Ring) -> int:
    """Of the checkpoint that a ring follows."""
    return row.read_slot if ring.base == row.checkpoint else row.fold_slot


class SimulatedDevice:
    """Runs plans in order; `execute` gives rows their results, and the caller may hand the plan over later.

    Args:
        keep: how many of a decode row's steps stay, 1 to as many as are given to it. The others leave what is not true
            in the row's pages. None if all stay.

    Attributes:
        events: how often each mechanism ran: folds, copies, inert rows, ...
    """

    def __init__(
        self,
        geometry: Geometry,
        *,
        num_frames: int,
        max_rows: int,
        vocab: int,
        exact: bool = False,
        keep: Callable[[int], int] | None = None,
        events: dict | None = None,
    ):
        self.geometry, self.vocab, self.exact, self.keep = geometry, vocab, exact, keep
        self.frames = [Frame() for _ in range(num_frames)]
        self.table: dict[int, tuple[int, ...]] = {0: ()}
        self.rings = [Ring() for _ in range(max_rows)]
        self.events: dict[str, int] = {} if events is None else events
        self.below: dict[int, Frame] = {}  # frames of the tier below the arena
        self._truths: dict[Request, list[int]] = {}

    def execute(self, plan: Plan) -> None:
        """Makes the copies of a plan and runs its dispatches."""
        for recast in plan.narrowed:
            self._recast(recast, narrow=True)
        self._copy_between_tiers(plan)
        for recast in plan.widened:
            self._recast(recast, narrow=False)
        for slot, frames in plan.new_slots:
            assert len(frames) == self.geometry.state_frames and 0 not in frames and slot > 0
            self.table[slot] = tuple(frames.tolist())
        for source, target in plan.moves:
            self.rings[target] = self.rings[source]
            self.rings[source] = Ring()
            self._count("moves")
        begun = {row.row for row in plan.prefill}
        joined = [row for row in plan.decode if self.exact and row.row not in begun]
        self._no_write_meets_another([*plan.prefill, *self._live(joined)])
        self._prefill(plan.prefill)
        self._fork(plan)
        self._decode(plan)

    def _recast(self, recast: Recast, *, narrow: bool) -> None:
        """Reads a checkpoint in one form, all of it, and writes it in another."""
        sizes = self.geometry.checkpoint_frames
        assert (len(recast.source), len(recast.target)) == (sizes if narrow else sizes[::-1])
        found = [self.frames[frame].state for frame in recast.source.tolist()]
        summary, _, was_narrow = found[0] or (0, 0, None)
        assert found == [(summary, part, not narrow) for part in range(len(found))], found
        for part, frame in enumerate(recast.target.tolist()):
            assert frame > 0
            self.frames[frame] = Frame(state=(summary, part, narrow))
        self._count("narrowed" if narrow else "widened")

    def _copy_between_tiers(self, plan: Plan) -> None:
        for move in (*plan.saves, *plan.loads):
            assert move.arena.all() and move.other.all(), "a copy of the sink"
        written = {frame for move in plan.saves for frame in move.other.tolist()}
        read = {frame for move in plan.loads for frame in move.other.tolist()}
        assert not written & read, f"frames {written & read} below are written before they are read"
        for move in plan.saves:
            for arena, other in zip(move.arena.tolist(), move.other.tolist(), strict=True):
                self.below[other] = self.frames[arena].copy()
            self._count("saves")
        for out in plan.to_disk:
            assert out.arena.all(), "a copy of the sink"
            out.give([self.stored(self.frames[frame]) for frame in out.arena.tolist()])
        for move in plan.loads:
            for arena, other in zip(move.arena.tolist(), move.other.tolist(), strict=True):
                self.frames[arena] = self.below[other].copy()
            self._count("loads")
        for come in plan.from_disk:
            assert come.arena.all(), "a copy to the sink"
            for frame, words in zip(come.arena.tolist(), come.words, strict=True):
                self.frames[frame] = self.restored(words)
            self._count("loads from disk")

    def stored(self, frame: Frame) -> Any:
        """What the disk is given of a frame."""
        return frame.copy()

    def restored(self, words: Any) -> Frame:
        """The frame of which the disk was given this."""
        return words.copy()

    def _count(self, event: str) -> None:
        self.events[event] = self.events.get(event, 0) + 1

    # --- prefill --------------------------------------------------------------------------------

    def _prefill(self, rows: list[PrefillRow]) -> None:
        assert len({row.row for row in rows}) == len(rows), "two chunks in one ring row"
        copies = [copy for row in rows for copy in row.copies]
        targets = {frame for _, target in copies for frame in target}
        assert not targets & {frame for source, _ in copies for frame in source}
        for row in rows:
            for source, target in row.copies:
                for a, b in zip(source, target, strict=True):
                    self.frames[b] = self.frames[a].copy()
                self._count("copies")
        truths = [self._truth(row.request, row.start + len(row.tokens)) for row in rows]
        for row, true in zip(rows, truths, strict=True):
            assert row.start % self.geometry.grain == 0 and row.tokens
            assert row.state_len % self.geometry.grain == 0
            tail = len(row.tokens) - row.state_len
            assert (0 < tail if row.samples else 0 == tail) and tail <= self.geometry.grain
            assert row.request.tokens[row.start : row.start + len(row.tokens)] == row.tokens
            self._check_state(row.read_slot, row.start, true)
            self._check_pages(row.pages, row.start, true, row.start)
        for row, true in zip(rows, truths, strict=True):
            summary = self._state(row.read_slot) if self.geometry.has_state else true[row.start]
            summaries = [summary]
            for offset, token in enumerate(row.tokens):
                summary = extend(summary, token)
                summaries.append(summary)
                self._write_page(row.pages, row.start + offset, summary)
            ring = Ring(base=row.start + row.state_len, summary=summaries[row.state_len], true=true)
            ring.records = row.tokens[row.state_len :]
            if row.state_len and self.geometry.has_state:
                self._write_state(row.write_slot, summaries[row.state_len])
                self._count(
                    "chunk over its own slot" if row.write_slot == row.read_slot else "chunk to new"
                )
            token = next_token(summary, self.vocab)
            ring.token = -1 if not row.samples or token in row.request.stop_ids else token
            self.rings[row.row] = ring
            row.new_tokens = [token] if row.samples else []
        for row, true in zip(rows, truths, strict=True):
            self._check_pages(row.pages, row.start + len(row.tokens), true, row.start)
            if row.state_len == 0 and self.geometry.has_state:
                self._check_state(row.read_slot, row.start, true)

    def _live(self, rows: list[DecodeRow]) -> list[DecodeRow]:
        return [row for row in rows if self.rings[row.row].token >= 0]

    def _no_write_meets_another(self, rows: list[PrefillRow | DecodeRow]) -> None:
        """Rows of one dispatch run side by side: nothing one writes may be read or written by another.

        Sources of copies are exempt: copies come first, and whoever filled a page may still append to it.
        """
        writes, reads, page = [], [], self.geometry.page_tokens
        for row in rows:
            chunk = isinstance(row, PrefillRow)
            slot = (row.write_slot if row.state_len else 0) if chunk else row.fold_slot
            own = set(self.table[slot])
            if page:
                first = (row.start if chunk else self.rings[row.row].position) // page
                own.update(row.pages[first:].ravel().tolist())
            writes.append(own)
            reads.append({*row.pages.ravel().tolist(), *self.table[row.read_slot]})
        seen: dict[int, int] = {}
        for index, own in enumerate(writes):
            for frame in own:
                assert frame != 0, "a write to the sink by a real row"
                assert seen.setdefault(frame, index) == index, f"two rows write frame {frame}"
            for other, read in enumerate(reads):
                assert other == index or not own & read, (
                    f"a row writes frames {own & read} another reads"
                )

    # --- fork -----------------------------------------------------------------------------------

    def _fork(self, plan: Plan) -> None:
        """Forks see the rings as the prefill left them; nothing of a fork's is anybody else's."""
        seated = [row.row for row in (*plan.prefill, *plan.forks)]
        assert len(set(seated)) == len(seated), "a fork into a ring row of this plan"
        read = {frame for row in plan.prefill for page in row.pages for frame in page}
        targets = [frame for row in plan.forks for _, page in row.copies for frame in page]
        assert len(set(targets)) == len(targets) and not read & set(targets)
        for row in plan.forks:
            source = plan.prefill[row.line]
            assert source.samples and source.row == row.source
            assert source.request.prompt == row.request.prompt and not row.request.output.token_ids
            assert row.position == source.start + len(source.tokens) == len(row.request.prompt)
            for page, target in row.copies:
                for a, b in zip(page, target, strict=True):
                    self.frames[b] = self.frames[a].copy()
            ring = self.rings[row.source]
            true = self._truth(row.request, row.position)
            token = next_token(true[row.position], self.vocab)
            stopped = token in row.request.stop_ids
            self.rings[row.row] = replace(
                ring, records=list(ring.records), true=list(true), token=-1 if stopped else token
            )
            row.new_tokens = [token]
            self._count("forks into a page" if row.copies else "forks")

    # --- decode ---------------------------------------------------------------------------------

    def _decode(self, plan: Plan) -> None:
        rows = plan.decode
        assert len({row.row for row in rows}) == len(rows)
        assert all(0 < row.num_tokens <= plan.num_steps * plan.window for row in rows)
        for row in rows:
            ring = self.rings[row.row]
            if ring.token < 0:
                self._count("inert rows")
                continue
            position = ring.position
            ring.true = self._truth(row.request, position + 1)[: position + 1]
            assert ring.base >= row.checkpoint, f"row {row.row}: {ring.base} < {row}"
            assert position <= row.position, "more tokens than the plan says at most"
            if position < row.position:
                assert self.keep is not None, "fewer tokens than the plan says"
                self._count("rows behind their plan")
            self._check_pages(row.pages, position, ring.true, self._base(ring))
        live = self._live(rows)
        self._no_write_meets_another(live)
        steps = [row.num_tokens if self.keep is None else self.keep(row.num_tokens) for row in live]
        bases = {row.row: self._base(self.rings[row.row]) for row in rows}
        most = [self.rings[row.row].position + row.num_tokens for row in live]
        for step in range(max(steps, default=0)):
            for row, num_steps in zip(live, steps, strict=True):
                if step < num_steps and self.rings[row.row].token >= 0:
                    row.new_tokens.append(self._step(row, self.rings[row.row]))
        for row, end in zip(live, most, strict=True):
            for position in range(self.rings[row.row].position, end if self.keep else 0):
                self._write_page(row.pages, position, None)
        for row in rows:
            ring = self.rings[row.row]
            self._check_pages(row.pages, ring.position, ring.true, bases[row.row])
            if ring.token >= 0 and self.geometry.has_state:
                self._check_state(_slot(row, ring), ring.base, ring.true)

    def _step(self, row: DecodeRow, ring: Ring) -> int:
        grain = self.geometry.grain
        assert len(ring.records) <= grain
        if len(ring.records) == grain:
            if self.geometry.has_state:
                self._check_state(_slot(row, ring), ring.base, ring.true)
                summary = self._state(_slot(row, ring))
                for token in ring.records:
                    summary = extend(summary, token)
                self._write_state(row.fold_slot, summary)
                self._count(
                    "folds in place" if row.fold_slot == _slot(row, ring) else "folds to new"
                )
            for token in ring.records:
                ring.summary = extend(ring.summary, token)
            ring.base, ring.records = ring.base + grain, []
        ring.records.append(ring.token)
        summary = ring.summary
        for token in ring.records:
            summary = extend(summary, token)
        position = ring.position - 1
        ring.true.append(extend(ring.true[-1], ring.token))
        self._write_page(row.pages, position, summary)
        token = next_token(summary, self.vocab)
        ring.token = -1 if token in row.request.stop_ids else token
        return token

    # --- memory ---------------------------------------------------------------------------------

    def _truth(self, request: Request, length: int) -> list[int]:
        """Summaries of the request's own prefixes of 0 .. length tokens, by the plain loop."""
        summaries = self._truths.setdefault(request, [EMPTY])
        while len(summaries) <= length:
            index = len(summaries) - 1
            inside = index < len(request.prompt)
            token = request.prompt[index] if inside else next_token(summaries[-1], self.vocab)
            summaries.append(extend(summaries[-1], token))
        return summaries

    def _state(self, slot: int) -> int:
        if not slot:
            return EMPTY
        state = self.frames[self.table[slot][0]].state
        assert state is not None
        return state[0]

    def _check_state(self, slot: int, position: int, true: list[int]) -> None:
        if not self.geometry.has_state:
            assert slot == 0
            return
        assert (slot == 0) == (position == 0), f"slot {slot} for a checkpoint at {position}"
        for index, frame in enumerate(self.table[slot]):
            found = self.frames[frame].state
            assert found == (true[position], index, False), (
                f"frame {frame} of slot {slot} holds {found}"
            )

    def _write_state(self, slot: int, summary: int) -> None:
        assert slot > 0, "a checkpoint written without a slot"
        for index, frame in enumerate(self.table[slot]):
            self.frames[frame] = Frame(state=(summary, index, False))

    def _base(self, ring: Ring) -> int:
        """The first position of which a decoding row makes a query."""
        return ring.base if self.exact else ring.position

    def _check_pages(self, pages: np.ndarray, length: int, true: list[int], base: int) -> None:
        """Checks what queries from position `base` on may see of the first `length` tokens."""
        if not self.geometry.has_pages:
            return
        size = self.geometry.page_tokens
        firsts = [0] * self.geometry.frames_per_page
        for part in self.geometry.windowed:
            firsts[part.frames] = [max(base - part.window + 1, 0)] * part.num_frames
        for start, page in zip(range(0, length, size), pages.tolist(), strict=False):
            for group, (frame, first) in enumerate(zip(page, firsts, strict=True)):
                seen = slice(max(first, start), max(first, min(start + size, length)))
                wanted = true[seen.start + 1 : seen.stop + 1]
                if not wanted:
                    continue
                assert frame, f"position {seen.start} of layer group {group} was given back"
                held = self.frames[frame]
                found = held.summaries[seen.start - start : seen.stop - start]
                assert (held.group, found) == (group, wanted), (
                    f"frame {frame} holds {found} of layer group {held.group} after position {start}"
                )

    def _write_page(self, pages: np.ndarray, position: int, summary: int | None) -> None:
        if not self.geometry.has_pages:
            return
        page, offset = divmod(position, self.geometry.page_tokens)
        assert len(pages[page]) == self.geometry.frames_per_page
        for group, frame in enumerate(pages[page].tolist()):
            assert frame > 0
            if self.frames[frame].group != group:
                self.frames[frame] = Frame(group, [None] * self.geometry.page_tokens)
            self.frames[frame].summaries[offset] = summary
