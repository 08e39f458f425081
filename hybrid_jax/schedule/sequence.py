"""A request inside the scheduler: its tokens, its memory, and what is in flight for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import numpy as np

from hybrid_jax.cache.policy.points import Relation
from hybrid_jax.cache.tree.node import Node
from hybrid_jax.schedule.request import NewTokens, Request
from hybrid_jax.tiers.disk import Read

Page = tuple[int, ...]  # frame ids, one for each set of layers that share a frame
NO_PAGES: np.ndarray = np.zeros((0, 0), np.int32)


class Phase(Enum):
    """Where a sequence is. A `stopping` one was aborted, but a plan in flight still names it."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    STOPPING = "stopping"
    DONE = "done"


@dataclass(eq=False, slots=True)
class HeldMemory:
    """What a sequence holds of frames and slots; only `Memory` changes it.

    What has `real_` in its name is so after the plans received so far. What has not runs ahead of their results.

    Attributes:
        pages: int32[n, frames_per_page] frame ids of its pages, with one hold on each. The array is never changed in
            place. It is 0 in frames of layers with a window where they were given back or are still to be taken.
        first_pages: of each group of such layers, the first page that was not given back; empty before the first was.
        copies: page copies that its first chunk makes, with a hold on each source until then.
        slot: handle of the checkpoint after the last fold that is planned; 0 for none.
        real_slot, real_checkpoint: handle of its checkpoint, and where that stands. The sequence has one hold on
            real_slot, and one on slot if that is another.
        kept_slot, kept_checkpoint: the checkpoint before real_slot and where it stands, until the text that the last
            results brought has been searched for stop strings: it may end before real_checkpoint. 0 for none.
        reserved_slot: slot for the first checkpoint of its own; 0 if there is none, or once that is written.
    """

    pages: np.ndarray = field(default_factory=lambda: NO_PAGES)
    first_pages: list[int] = field(default_factory=list)
    copies: list[tuple[Page, Page]] = field(default_factory=list)
    slot: int = 0
    real_slot: int = 0
    real_checkpoint: int = 0
    kept_slot: int = 0
    kept_checkpoint: int = 0
    reserved_slot: int = 0


@dataclass(eq=False, slots=True)
class Announced:
    """What `Memory` has told the prefix tree of a prompt that is not computed yet.

    Attributes:
        end_node: the end of the prompt in the tree; None if it is not announced.
        expected: the sequence waits, so the tree tries to keep what it will use.
        wanted: positions of the prompt at which checkpoints are still to be left.
        version: of the tree for which these were found; -1 before.
    """

    end_node: Node | None = None
    expected: bool = False
    wanted: list[int] = field(default_factory=list)
    version: int = -1


@dataclass(eq=False, slots=True)
class Queued:
    """How a sequence waits for a row; `Admission` writes it.

    Attributes:
        waits_for: the promised node that it waits for.
        num_overtaken: later requests that were admitted while it waited.
        read: what is being read of its prompt from the disk; None for nothing. num_reads: how often it was asked for.
        above: how many tokens of it the tiers above the disk had when the disk was asked.
        slower: tokens that tiers have and that are computed, because loading them takes longer; by name of the tier.
        came_from: the tier that its prefix was copied from, in words; "" for none.
        came_after: how many tokens of it the arena had before.
    """

    waits_for: Node | None = None
    num_overtaken: int = 0
    read: Read | None = None
    num_reads: int = 0
    above: int = 0
    slower: dict[str, int] = field(default_factory=dict)
    came_from: str = ""
    came_after: int = 0


@dataclass(eq=False, slots=True)
class InFlight:
    """What is in flight for a sequence, and what its last results mean for it; the scheduler writes it.

    Attributes:
        num_plans: plans in flight that name it.
        stopped: the device has made its row inert.
        damaged: the model's numbers for it were not finite.
        starts_over: it goes back to the queue as soon as no plan in flight names it.
    """

    num_plans: int = 0
    stopped: bool = False
    damaged: bool = False
    starts_over: bool = False


class Known(NamedTuple):
    """What `History` found when a prompt came, before it was announced.

    Attributes:
        length: how many of its tokens were known.
        relation: how it related to what was known, for policies that learn; None for others.
    """

    length: int
    relation: Relation | None


@dataclass(eq=False, kw_only=True, slots=True)
class Sequence:
    """A request's tokens and how far it is. What other modules note of it lies in values of their own.

    Attributes:
        request: the request; its `output` grows here.
        arrival: order of arrival; smaller is older.
        limit: the most tokens it may have, prompt and output together.
        tokens: ids of prompt and output on the host; for an aborted request also those that were not reported.
        prompt: int32[goal] what the prefill computes: the prompt, and after a preemption the output too.
        phase: where it is.
        position: the next token to feed. In prefill it is the start of the next chunk; then it is the most tokens that
            the sequence may have after the plans in flight.
        real_position: how many tokens it has after the plans received so far.
        row: ring row while it runs; `Seats` writes it.
        held, announced: its memory, and its prompt in the prefix tree; `Memory` writes both.
        queued: how it waits; `Admission` writes it.
        in_flight: what is in flight for it; the scheduler writes it.
        known: what was known of its prompt when it came; None before that. `History` writes it.
        accepted_drafts: how many drafts of a window were accepted lately; None before the first window. `Pace` writes
            it.
    """

    request: Request
    arrival: int
    limit: int
    tokens: list[int] = field(init=False)
    prompt: np.ndarray = field(init=False)
    phase: Phase = Phase.WAITING
    position: int = 0
    real_position: int = 0
    row: int = -1
    held: HeldMemory = field(default_factory=HeldMemory)
    announced: Announced = field(default_factory=Announced)
    queued: Queued = field(default_factory=Queued)
    in_flight: InFlight = field(default_factory=InFlight)
    known: Known | None = None
    accepted_drafts: float | None = None

    def __post_init__(self) -> None:
        self.tokens = self.request.tokens
        self.prompt = np.array(self.tokens, np.int32)

    @property
    def owner(self) -> str:
        """Its name in the prefix tree."""
        return self.request.request_id

    @property
    def goal(self) -> int:
        """How many tokens its prefill computes."""
        return len(self.prompt)

    @property
    def sibling_group(self) -> str | None:
        """The group of siblings with which it shares its prompt; None once it has tokens of its own."""
        return self.request.sibling_group if self.goal == len(self.request.prompt) else None

    @property
    def forks_from(self) -> str | None:
        """The group it may fork from; None if it must compute its prompt itself."""
        return self.sibling_group if self.request.first_read is None else None

    @property
    def uses_cache(self) -> bool:
        """Whether a part of its prompt may come from the prefix cache."""
        return self.request.first_read != 0

    @property
    def looked_up(self) -> np.ndarray:
        """The part of its prompt of which all but the last token may come from the prefix cache."""
        first = self.request.first_read
        return self.prompt if first is None else self.prompt[: first + 1]

    @property
    def may_be_cut(self) -> bool:
        """Whether its text may end before tokens that are computed already."""
        return bool(self.request.params.stop)

    @property
    def running(self) -> bool:
        """Whether it has a row."""
        return self.phase in (Phase.PREFILL, Phase.DECODE, Phase.STOPPING)

    def first_tokens(self, count: int) -> np.ndarray:
        """int32[count] of prompt and output."""
        if count <= self.goal:
            return self.prompt[:count]
        return np.concatenate((self.prompt, np.array(self.tokens[self.goal : count], np.int32)))

    def stand_at(self, position: int) -> None:
        """It has so many tokens for certain: a hit, a chunk and a fork bring what they were planned to bring."""
        self.position = self.real_position = position

    def settle(self, num_planned: int, num_tokens: int) -> None:
        """Corrects its position once `num_tokens` have come of `num_planned` that might.

        The plan counted all its steps as taken; a stop token or a draft that was not accepted ends them sooner.
        """
        self.position -= num_planned - num_tokens
        self.real_position += num_tokens

    def accept(self, tokens: list[int]) -> None:
        """Appends new tokens from the device, the stop token included."""
        self.tokens += tokens
        self.in_flight.stopped = tokens[-1] in self.request.stop_ids

    def report(self, entry: NewTokens, tokens: list[int], logprobs: list) -> None:
        """Accepts new tokens and tells the request, which ends at a stop token or its limit."""
        self.accept(tokens)
        request, output = self.request, self.request.output
        output.token_ids += tokens
        entry.new_token_ids += tokens
        if request.params.logprobs is not None:
            output.logprobs += logprobs
            entry.new_logprobs += logprobs
        if self.in_flight.stopped:
            if tokens[-1] in (request.params.stop_token_ids or ()):
                output.stop_reason = tokens[-1]
            output.finish_reason = "stop"
        elif request.constraint is not None and not request.constraint.mask(output.token_ids).any():
            output.finish_reason = "stop"
        elif len(self.tokens) >= self.limit:
            output.finish_reason = "length"
        entry.finished = output.finish_reason is not None

    def wait_again(self) -> None:
        """Makes it a waiting sequence that has only its reported tokens; its memory was released."""
        self.tokens = self.request.tokens
        self.prompt = np.array(self.tokens, np.int32)
        self.phase, self.row = Phase.WAITING, -1
        self.stand_at(0)
        self.queued, self.in_flight = Queued(), InFlight()
