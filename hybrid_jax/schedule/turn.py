"""One plan while it is being made: chunks and decode steps for sequences that have a row, and their memory."""

from __future__ import annotations

from hybrid_jax.config import EngineConfig
from hybrid_jax.schedule.bucket import shapes_of
from hybrid_jax.schedule.memory import Memory
from hybrid_jax.schedule.pace import ONE_TOKEN, Stride
from hybrid_jax.schedule.plan import DecodeRow, ForkRow, Plan, PrefillRow, SchedulerCounters
from hybrid_jax.schedule.request import Request
from hybrid_jax.schedule.sequence import Page, Phase, Sequence

STEPS_WITH_STOP_STRINGS = 4
UNLIMITED = 1 << 30  # steps


class Turn:
    """Collects the rows of one plan. Sequences advance as they are added, as if every step happened.

    Args:
        memory, engine, counters: those of the scheduler.
        running: sequences in rows; they decide how many decode steps the plan may take.
        stride: how they decode.

    Attributes:
        plan: what the runner has to do.
        ended: sequences whose prompt ends in this plan, forks included.
        preempted: a sequence has lost its row because memory ran out.
    """

    def __init__(
        self,
        memory: Memory,
        engine: EngineConfig,
        counters: SchedulerCounters,
        running: list[Sequence],
        stride: Stride = ONE_TOKEN,
    ):
        self.memory, self.counters, self.shapes = memory, counters, shapes_of(engine)
        self.geometry = memory.geometry
        self.plan, self._drafts = Plan(window=stride.window), stride.drafts
        self.ended: list[Sequence] = []
        self.preempted = False
        self._num_steps = min(self.shapes.steps_of(stride.window), stride.max_steps or UNLIMITED)
        for sequence in (s for s in running if s.phase is Phase.DECODE):
            self._num_steps = min(self._num_steps, most_steps(sequence.request))
        self._max_rows = self._max_tokens = 0  # the first chunk decides
        self._published: list[Sequence] = []  # their chunk leaves a checkpoint for the tree

    @property
    def full(self) -> bool:
        """Whether the prefill dispatch has as many rows as the token budget allows."""
        return bool(self.plan.prefill) and len(self.plan.prefill) >= self._max_rows

    @property
    def empty(self) -> bool:
        """Whether the plan has no work for the device."""
        plan = self.plan
        copies = [plan.narrowed, plan.saves, plan.to_disk, plan.loads, plan.from_disk, plan.widened]
        return not (plan.rows or plan.moves or any(copies))

    def chunk(self, sequence: Sequence) -> bool:
        """Plans the next chunk of a prompt if the budget has room; returns False if there is not enough memory."""
        geometry, held, start = self.geometry, sequence.held, sequence.position
        if self.full:
            return True
        end = start + self._chunk_tokens(sequence.goal - start)
        last = geometry.align(sequence.goal - 1)
        # A checkpoint comes only at the end of a chunk, so the chunk ends where others will resume.
        if geometry.has_state:
            end = min([end, *(w for w in sequence.announced.wanted if start < w < last)])
        final = end == sequence.goal
        # A row that decodes needs at least one token in its ring: the last checkpoint stays before the prompt's end.
        checkpoint = max(geometry.align(end - 1), start) if final else end
        if not self.memory.grow_chunk(sequence, end):
            return False
        slot: int | None = held.slot
        if checkpoint > start:
            slot = self.memory.slot_to_write(sequence)
        if slot is None:
            return False
        if not self.plan.prefill:
            self._set_budget(end - start)
        copies = self.memory.take_copies(sequence)
        self.plan.prefill.append(
            PrefillRow(
                sequence=sequence,
                row=sequence.row,
                tokens=sequence.prompt[start:end].tolist(),
                start=start,
                read_slot=self.memory.slots.resolve(held.slot),
                write_slot=self.memory.slots.resolve(slot) if checkpoint > start else 0,
                state_len=checkpoint - start,
                pages=held.pages[: geometry.num_pages(end)],
                copies=copies,
                samples=final,
            )
        )
        if checkpoint > start:
            self.memory.advance(sequence, checkpoint, slot)
            # Other checkpoints stay out of the tree: nobody shares them, so the next chunk may overwrite them.
            if not geometry.has_state or checkpoint in sequence.announced.wanted:
                self._published.append(sequence)
        sequence.stand_at(end)
        if final:
            sequence.phase = Phase.DECODE
            self.ended.append(sequence)
        self.counters.prefill_rows += 1
        self.counters.prefill_tokens += end - start
        self.counters.copies += len(copies)
        return True

    def _chunk_tokens(self, num_tokens: int) -> int:
        """Tokens of the next chunk of a prompt that has `num_tokens` left."""
        return min(num_tokens, self._max_tokens) or self.shapes.first_chunk(num_tokens)

    def _set_budget(self, num_tokens: int) -> None:
        """Lets the first chunk decide the shape: others are no longer, and the token budget limits their number."""
        self._max_tokens, rows = self.shapes.prefill_of(num_tokens)
        self._max_rows = rows[-1]

    def fork(self, parent: Sequence, child: Sequence, copies: list[tuple[Page, Page]]) -> None:
        """Plans that `child` starts where the parent's prompt ends in this plan; `child` has its memory already."""
        self.plan.forks.append(
            ForkRow(
                sequence=child,
                row=child.row,
                source=parent.row,
                line=[row.sequence for row in self.plan.prefill].index(parent),
                position=child.position,
                copies=copies,
            )
        )
        self.counters.forks += 1
        self.counters.copies += len(copies)
        child.phase = Phase.DECODE
        self.ended.append(child)

    def decode(self, sequence: Sequence) -> bool:
        """Plans the next tokens, up to the row's limit; returns False if there is not enough memory for even one."""
        position, memory, geometry = sequence.position, self.memory, self.geometry
        held, one_by_one = sequence.held, sequence.request.one_by_one
        if one_by_one and sequence.in_flight.num_plans:
            return True  # which tokens may come next depends on what is in flight
        most = 1 if one_by_one else self._num_steps * self.plan.window
        # The last token that the limit allows is drawn and never fed.
        tokens = min(most, sequence.limit - position - 1)
        if tokens <= 0:
            return True  # it waits for its last results
        # Pages for fewer tokens mean fewer steps; nobody is preempted as long as there is one.
        tokens = min(tokens, memory.grow(sequence, position + tokens) - position)
        checkpoint = geometry.checkpoint(position)
        # So many tokens fit into the ring. The next one needs a fold first, and the fold needs a slot.
        before_fold = checkpoint + geometry.grain - position
        if 0 < tokens and before_fold < tokens and not memory.plan_fold(sequence):
            tokens = before_fold
        if tokens <= 0:
            if not (held.reserved_slot or held.kept_slot):
                return False
            memory.give_back_reserve(sequence)  # it needs the next page before the next checkpoint
            return self.decode(sequence)
        # Whether a fold in flight took place is not known yet, because the row may have met a stop token before it. So
        # the plan names the last checkpoint that is known and the slot of all later ones. The device chooses by length.
        folds = geometry.checkpoint(position + tokens) > held.real_checkpoint
        self.plan.decode.append(
            DecodeRow(
                sequence=sequence,
                row=sequence.row,
                position=position,
                checkpoint=held.real_checkpoint,
                read_slot=memory.slots.resolve(held.real_slot),
                fold_slot=memory.slots.resolve(held.slot) if folds else 0,
                num_tokens=tokens,
                num_steps=min(tokens, self._num_steps),
                drafts=self._drafts.get(sequence, []),
                pages=held.pages[: geometry.num_pages(position + tokens)],
            )
        )
        sequence.position += tokens
        self.counters.decode_rows += 1
        self.counters.decode_steps += min(tokens, self._num_steps)
        return True

    def finish(self) -> None:
        """Publishes the chunks' checkpoints, decodes where prompts ended, and completes the plan.

        The order matters: a checkpoint in the tree is shared, so the first fold after it must not overwrite it.
        """
        for sequence in self._published:
            self.memory.publish(sequence)
        for sequence in dict.fromkeys([*(row.sequence for row in self.plan.prefill), *self.ended]):
            self.memory.give_back(sequence, later=True)
        # If other rows decode, the loop runs all their steps anyway, so fewer steps would save nothing.
        if not self.plan.decode:
            free = (s.request for s in self.ended if not s.request.one_by_one)
            self._num_steps = min([self._num_steps, *map(most_steps, free)])
        for sequence in self.ended:
            self.memory.withdraw(sequence)
            if not sequence.request.one_by_one:
                self.decode(sequence)
        self.memory.end_plan(self.plan)
        assert not (self.empty and self.plan.new_slots), "turn: an empty plan took slots"


def most_steps(request: Request) -> int:
    """The most decode steps that one dispatch should take for a request.

    It is one step if each token decides what may come next. It is a few if the text may end at a stop string, because
    what is computed past it is thrown away.
    """
    if request.one_by_one:
        return 1
    return STEPS_WITH_STOP_STRINGS if request.params.stop else UNLIMITED
