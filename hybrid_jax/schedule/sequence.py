"""A request inside the engine: its tokens, its memory, and what is in flight for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from hybrid_jax.cache.policy.points import Relation
from hybrid_jax.cache.tree.node import Node
from hybrid_jax.schedule.request import NewTokens, Request

Page = tuple[int, ...]  # frame ids, one for each set of layers that share a frame
NO_PAGES: np.ndarray = np.zeros((0, 0), np.int32)


class Phase(Enum):
    """Where a sequence is. A `stopping` one was aborted, but a plan in flight still names it."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    STOPPING = "stopping"
    DONE = "done"


@dataclass(eq=False, kw_only=True)
class Sequence:
    """One request's tokens and memory. Positions without `real_` run ahead of the results of plans in flight.

    Attributes:
        request: the request; its `output` grows here.
        arrival: order of arrival; smaller is older.
        limit: the most tokens it may have, prompt and output together.
        tokens: ids of prompt and output on the host; for an aborted request also those that were not reported.
        prompt: int32[goal] what the prefill computes: the prompt, and after a preemption the output too.
        row: ring row while it runs.
        pages: int32[n, frames_per_page] frame ids of its pages, with one hold on each. The array is never changed in
            place. It is 0 in frames of layers with a window where they were given back or are still to be taken.
        first_pages: of each group of such layers, the first page that was not given back; empty before the first was.
        position: the next token to feed. In prefill it is the start of the next chunk; then it is the most tokens that
            the sequence may have after the plans in flight.
        slot: handle of the checkpoint after the last fold that is planned; 0 for none.
        real_position, real_checkpoint, real_slot: how many tokens it has, where its checkpoint stands, and the handle
            of that checkpoint, after the plans received so far. The sequence has one hold on real_slot, and one on slot
            if that is another.
        kept_slot, kept_checkpoint: the checkpoint before real_slot and where it stands, until the text that the last
            results brought has been searched for stop strings: it may end before real_checkpoint. 0 for none.
        reserved_slot: slot for the first checkpoint of its own; 0 if there is none, or once that is written.
        copies: page copies that its first chunk makes, with a hold on each source until then.
        num_flights: plans in flight that name it.
        stopped: the device has made its row inert.
        damaged: the model's numbers for it were not finite.
        starts_over: it goes back to the queue as soon as no plan in flight names it.
        end_node: the end of its prompt in the prefix tree, as long as the prompt is announced and not computed.
        expected: it waits, so the tree tries to keep what it will use.
        waits_for: the promised node that it waits for.
        known_len: how many tokens of its prompt were known before it came; None before that.
        relation: how its prompt related to what was known, for policies that learn.
        wanted: positions of its prompt at which checkpoints are still to be left.
        num_overtaken: later requests that were admitted while it waited.
        accepted_drafts: how many drafts of a window were accepted lately; None before the first window.
    """

    request: Request
    arrival: int
    limit: int
    tokens: list[int] = field(init=False)
    prompt: np.ndarray = field(init=False)
    phase: Phase = Phase.WAITING
    row: int = -1
    pages: np.ndarray = field(default_factory=lambda: NO_PAGES)
    first_pages: list[int] = field(default_factory=list)
    position: int = 0
    slot: int = 0
    real_position: int = 0
    real_checkpoint: int = 0
    real_slot: int = 0
    kept_slot: int = 0
    kept_checkpoint: int = 0
    reserved_slot: int = 0
    copies: list[tuple[Page, Page]] = field(default_factory=list)
    num_flights: int = 0
    stopped: bool = False
    damaged: bool = False
    starts_over: bool = False
    end_node: Node | None = None
    expected: bool = False
    waits_for: Node | None = None
    known_len: int | None = None
    relation: Relation | None = None
    wanted: list[int] = field(default_factory=list)
    wanted_version: int = -1
    num_overtaken: int = 0
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

    def accept(self, tokens: list[int]) -> None:
        """Appends new tokens from the device, the stop token included."""
        self.tokens += tokens
        self.stopped = tokens[-1] in self.request.stop_ids

    def report(self, entry: NewTokens, tokens: list[int], logprobs: list) -> None:
        """Accepts new tokens and tells the request, which ends at a stop token or its limit."""
        self.accept(tokens)
        request = self.request
        request.output += tokens
        entry.new_token_ids += tokens
        if request.params.logprobs is not None:
            request.logprobs += logprobs
            entry.new_logprobs += logprobs
        if self.stopped:
            if tokens[-1] in (request.params.stop_token_ids or ()):
                request.stop_reason = tokens[-1]
            request.finish_reason = "stop"
        elif request.constraint is not None and not request.constraint.mask(request.output).any():
            request.finish_reason = "stop"
        elif len(self.tokens) >= self.limit:
            request.finish_reason = "length"
        entry.finished = request.finish_reason is not None

    def wait_again(self) -> None:
        """Makes it a waiting sequence that has only its reported tokens; its memory was released or is gone."""
        self.tokens = self.request.tokens
        self.prompt = np.array(self.tokens, np.int32)
        self.phase, self.row, self.copies = Phase.WAITING, -1, []
        self.pages, self.first_pages = NO_PAGES, []
        self.position = self.slot = 0
        self.real_position = self.real_checkpoint = self.real_slot = self.reserved_slot = 0
        self.kept_slot = self.kept_checkpoint = 0
        self.num_flights, self.stopped, self.starts_over = 0, False, False
        self.end_node = self.waits_for = None
        self.wanted, self.wanted_version, self.num_overtaken = [], -1, 0
