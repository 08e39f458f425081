"""Continuous batching on the host: which rows run next, on which memory, and what their results mean.

The engine's loop is

    plan = scheduler.plan()
    if plan:                      # a Plan; None and NEED_RESULTS are false
        pending.append(runner.execute(plan))
    if pending and (len(pending) == 2 or not plan):
        for new in scheduler.receive(*the oldest pending plan, with its results*): ...

Positions advance when a plan is made, as if every step of it happened. `receive` corrects them once it is known what
did. At most two plans are in flight. The device executes them in order and keeps a stopped row inert, so the memory of
a finished row may be given away while a later plan still names it.

One turn does this, oldest sequence first:

1. Running rows get the memory for their next steps or chunk. If memory is short, the scheduler evicts from the tree,
   then takes fewer steps, then preempts the youngest sequence once nothing is in flight.
2. Waiting requests are admitted into free rows, and siblings of a prompt that ends in this plan fork from it.
3. The checkpoints of chunks are published in the tree.
4. Rows whose prompt ends in this plan get their first decode steps.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable

from hybrid_jax.cache.pools.recount import agree
from hybrid_jax.config import EngineConfig
from hybrid_jax.config.plans import MAX_FLIGHTS
from hybrid_jax.costs import Costs, StepCosts
from hybrid_jax.geometry import Geometry
from hybrid_jax.schedule.admission import Admission, Seats
from hybrid_jax.schedule.bucket import shapes_of
from hybrid_jax.schedule.drafts import DraftCounts
from hybrid_jax.schedule.memory import Memory
from hybrid_jax.schedule.pace import Pace
from hybrid_jax.schedule.plan import (
    NEED_RESULTS,
    DecodeRow,
    NeedResults,
    Plan,
    Row,
    SchedulerCounters,
)
from hybrid_jax.schedule.request import NewTokens, Request
from hybrid_jax.schedule.sequence import Phase, Sequence
from hybrid_jax.schedule.tiers.speeds import Speeds
from hybrid_jax.schedule.turn import Turn
from hybrid_jax.tiers.disk import Prefixes

LOG = logging.getLogger("hybrid_jax.scheduler")


class Scheduler:
    """Plans turns for up to `max_rows` sequences over one pool of frames.

    Args:
        geometry: page and checkpoint sizes.
        engine: rows, budgets, cache policy.
        num_frames: frames of the arena, the sink included.
        max_slots: slots of the device's table, slot 0 included.
        max_model_len: the most tokens of a sequence, prompt and output together.
        host_frames: frames of the tier below the arena, of which one is never used; 0 for no such tier.
        disk: the tier on disk, or None.
        costs: the model's costs, for policies that weigh them.
        speeds: says what is loaded from lower tiers; None to load whatever is there.
        step_costs: those of decode steps, to weigh what drafts are worth; None to judge drafts always.
    """

    def __init__(
        self,
        geometry: Geometry,
        engine: EngineConfig,
        *,
        num_frames: int,
        max_slots: int,
        max_model_len: int,
        host_frames: int = 0,
        disk: Prefixes | None = None,
        costs: Costs | None = None,
        step_costs: StepCosts | None = None,
        speeds: Speeds | None = None,
    ):
        if geometry.has_state and max_slots < 2:
            raise ValueError(
                f"Scheduler: max_slots must be at least 2 (slot 0 is empty), got {max_slots}"
            )
        self.geometry, self.engine, self.costs = geometry, engine, costs
        self.num_frames, self.max_slots, self.max_model_len = num_frames, max_slots, max_model_len
        self.host_frames, self.disk = host_frames, disk
        self._pool_holds = geometry.longest_row(num_frames - 1) + 1  # the last token is never fed
        self.counters = SchedulerCounters()
        self._sequences: dict[str, Sequence] = {}  # unfinished ones
        self._num_arrivals = 0
        self.memory = Memory(
            geometry,
            num_frames=num_frames,
            max_slots=max_slots,
            cache=engine.cache,
            host_frames=host_frames,
            disk=disk,
            costs=costs,
            speeds=speeds,
        )
        self.speeds = speeds
        self.seats = Seats(engine.max_rows)
        self.step_costs, speculation = step_costs, engine.speculation
        self.drafts = DraftCounts(depth=speculation.most_tokens - 1 if speculation else 0)
        # A step of exact mode costs the same whatever it feeds.
        costs_of_steps = None if engine.exact else step_costs
        self.pace = Pace(engine.speculation, costs_of_steps, shapes_of(engine).decode_steps)
        # What the host drafts follows from results, so it waits for them.
        self.max_flights = MAX_FLIGHTS if self.pace.drafter is None else 1
        self.admission = Admission(self.memory, engine, self.counters, self.seats)
        self._flights: deque[Plan] = deque()
        self._drain = False

    # --- requests -------------------------------------------------------------------------------

    def max_output(self, prompt_len: int) -> int:
        """How many tokens a prompt of this length can be continued by, as model and pool allow; may be < 1."""
        return min(self.max_model_len, self._pool_holds) - prompt_len

    @property
    def longest_prompt(self) -> int:
        """The most tokens of a prompt that is not continued, as model and pool allow."""
        return min(self.max_model_len, self._pool_holds - 1)

    def add(self, request: Request) -> None:
        """Queues a request.

        Raises:
            ValueError: its id is live already, its prompt is empty, or it can never fit. It cannot fit if the prompt
                and one token exceed the model's length or the pool. With an explicit `params.max_tokens`, the prompt
                and `max_tokens` of the request count instead. Without one, the request ends at the length that fits.
                Of a request that only reads, the prompt alone counts.
        """
        where, prompt_len = f"request {request.request_id!r}", len(request.prompt)
        if request.request_id in self._sequences:
            raise ValueError(
                f"{where}: request_id must be unique among live requests; choose another"
            )
        if prompt_len == 0:
            raise ValueError(f"{where}: prompt must hold at least one token, got 0")
        explicit = request.params.max_tokens is not None
        asked = request.max_tokens if explicit else 1
        for most, what, setting in (
            (self.max_model_len + request.reads_only, "the model", "max_model_len"),
            (self._pool_holds, "the pool", "memory"),
        ):
            if prompt_len + asked > most:
                raise ValueError(
                    f"{where}: prompt of {prompt_len} tokens and {asked} to generate need {prompt_len + asked}, "
                    f"{what} holds {most}; shorten the prompt or max_tokens, or raise {setting}"
                )
        # The one token that is drawn for a request that only reads is never fed.
        room = 1 if request.reads_only else self.max_output(prompt_len)
        limit = prompt_len + min(request.max_tokens, room)
        request.course.drafts.depth = self.drafts.depth
        sequence = Sequence(request=request, arrival=self._num_arrivals, limit=limit)
        self._num_arrivals += 1
        self._sequences[request.request_id] = sequence
        self.memory.announce(sequence)
        self.admission.waiting.append(sequence)

    def abort(self, request_id: str) -> bool:
        """Ends a request now; no more of its tokens are reported. Returns False if the request is not live.

        Its memory is released once no plan in flight names it. What it computed then stays in the prefix tree, and
        prompts that go on from there wait for it.
        """
        sequence = self._sequences.get(request_id)
        if sequence is None or sequence.request.output.finish_reason is not None:
            return False
        sequence.request.output.finish_reason, sequence.in_flight.starts_over = "abort", False
        if sequence.phase is Phase.WAITING:
            self.admission.waiting.remove(sequence)
            self.memory.withdraw(sequence)
            if self.memory.on_disk is not None:
                self.memory.on_disk.forget(sequence)
            self._leave(sequence)
        else:
            self._stop(sequence)
        return True

    @property
    def has_work(self) -> bool:
        """Requests are unfinished, plans in flight, or prefixes not written yet."""
        return bool(self._sequences or self._flights or self.has_saves)

    @property
    def has_saves(self) -> bool:
        """Prefixes wait to be written to the disk."""
        return self.memory.on_disk is not None and self.memory.on_disk.has_saves

    @property
    def num_flights(self) -> int:
        """Plans made and not received."""
        return len(self._flights)

    # --- planning -------------------------------------------------------------------------------

    def plan(self) -> Plan | NeedResults | None:
        """The next turn.

        Returns:
            A plan to execute; NEED_RESULTS if the oldest plan in flight must be received first; None if there is
            nothing to do until a request is added. The last two are false.
        """
        if len(self._flights) >= self.max_flights or (self._drain and self._flights):
            return NEED_RESULTS
        self._drain = False
        turn = self._turn()
        while turn.empty and (turn.preempted or self._has_read()):
            turn = (
                self._turn()
            )  # the only sequence went back to the queue, or its prefix is there; admit again
        if turn.empty:
            return NEED_RESULTS if self._flights else None
        for sequence in turn.plan.sequences:
            sequence.in_flight.num_plans += 1
        self._flights.append(turn.plan)
        self.counters.plans += 1
        return turn.plan

    def _has_read(self) -> bool:
        """Whether a prefix is there that a prompt waited for, if there is nothing to do but wait a while for it."""
        return not self._flights and self.memory.on_disk is not None and self.memory.on_disk.wait()

    def _begin_turn(self) -> Turn:
        """An empty turn. A simulator overrides it to set its own pace."""
        running = self.seats.running
        stride = self.pace.stride(running)
        return Turn(self.memory, self.engine, self.counters, running, stride)

    def _turn(self) -> Turn:
        """One turn's work, in the order of the module's docstring."""
        self.memory.begin_plan()
        turn = self._begin_turn()
        turn.plan.moves = self.seats.close_holes(turn.shapes.decode_rows)
        self.counters.moves += len(turn.plan.moves)
        for sequence in self.seats.running:
            self.memory.promise(sequence)
        for sequence in list(self.seats.running):
            if sequence.running:  # it may just have been preempted for an older one
                self._advance(turn, sequence)
        # As long as memory is short for those that run, nobody is let in.
        if not (self._drain or turn.preempted):
            self.admission.admit(turn)
            self.admission.fork(turn)
        turn.finish()
        return turn

    def _advance(self, turn: Turn, sequence: Sequence) -> None:
        """Plans the next chunk or steps of a running sequence, and preempts others for it if necessary."""
        work = {Phase.PREFILL: turn.chunk, Phase.DECODE: turn.decode}.get(sequence.phase)
        while work is not None and not work(sequence):
            if self._flights:
                self._drain = True  # which sequence to preempt is known once every result is in
                return
            if len(self.seats.running) == 1 and self.memory.thin_out():
                continue  # it is the only one that could go, and would find the same when it comes back
            # The youngest. So the oldest goes only if it is alone, and alone it will fit when it comes back.
            victim = self.seats.running[-1]
            self._preempt(victim)
            turn.preempted = True
            if victim is sequence:
                return

    # --- leaving --------------------------------------------------------------------------------

    def _preempt(self, sequence: Sequence) -> None:
        """Takes the memory of a running sequence that is not in flight."""
        LOG.info(
            "request %s gave its memory back after %d tokens, and will go on when there is room",
            sequence.owner,
            len(sequence.tokens),
        )
        self._send_back(sequence)

    def _send_back(self, sequence: Sequence) -> None:
        """Sends a running sequence that is not in flight to the front of the queue; its prefix goes to the tree."""
        self.memory.withdraw(sequence)
        self.memory.finish(sequence, for_good=False)
        self.seats.leave(sequence)
        sequence.request.course.num_preemptions += 1
        self.counters.preemptions += 1
        sequence.wait_again()
        self.memory.announce(sequence)
        self.admission.waiting.appendleft(sequence)

    def _finish(self, sequence: Sequence) -> None:
        """Takes a running sequence out for good; its row is inert for later plans in flight that name it."""
        self.memory.withdraw(sequence)
        self.memory.finish(sequence)
        self.seats.leave(sequence)
        self._leave(sequence)

    def _stop(self, sequence: Sequence) -> None:
        """Takes a running sequence out as soon as no plan in flight names it."""
        if sequence.in_flight.num_plans == 0:
            self._finish(sequence)
        else:
            self.memory.withdraw(sequence)
            if not sequence.in_flight.damaged:
                self.memory.foretell(sequence)
            sequence.phase = Phase.STOPPING

    def _leave(self, sequence: Sequence) -> None:
        sequence.phase = Phase.DONE
        if self.memory.on_disk is not None:
            self.memory.on_disk.settle(sequence)
        if self.pace.drafter is not None:
            self.pace.drafter.ended(sequence.owner)
        del self._sequences[sequence.owner]

    # --- results --------------------------------------------------------------------------------

    def receive(self, plan: Plan) -> list[NewTokens]:
        """Settles the oldest plan in flight, whose rows have their results: appends outputs, ends sequences.

        Raises:
            ValueError: another plan is older, or a row brings more or fewer tokens than it may.
        """
        if not self._flights or self._flights[0] is not plan:
            raise ValueError(
                f"Scheduler: plans are received in the order they were made, got one that is not "
                f"the oldest of {len(self._flights)} in flight"
            )
        self._flights.popleft()
        if self.memory.below is not None:
            self.memory.below.received(plan)
        sequences = plan.sequences
        # Before the rows are settled: a sequence that fails there ends at once unless another plan names it.
        for sequence in sequences:
            sequence.in_flight.num_plans -= 1
        news: dict[Sequence, NewTokens] = {}
        for chunk in plan.prefill:
            chunk.request.note_prompt(chunk.start, chunk.prompt_logprobs, chunk.hidden)
        for row in plan.rows:
            if row.sequence.phase is not Phase.DONE:
                self._settle(news, row)
        self.pace.ran(plan)
        for sequence in sequences:
            if sequence.phase is Phase.STOPPING and sequence.in_flight.num_plans == 0:
                (self._send_back if sequence.in_flight.starts_over else self._finish)(sequence)
        if self.memory.on_disk is not None:
            for sequence in sequences:
                self.memory.on_disk.settle(sequence)
        return list(news.values())

    def _settle(self, news: dict[Sequence, NewTokens], row: Row) -> None:
        sequence, tokens = row.sequence, row.new_tokens
        # After a stop token the row is inert, so the plans that were in flight bring nothing for it.
        most = 0 if sequence.in_flight.stopped else row.most_tokens
        least = 0 if row.not_finite else min(1, most)
        if not least <= len(tokens) <= most:
            raise ValueError(
                f"Scheduler: request {sequence.owner!r} must bring {least} to {most} tokens, got {tokens}"
            )
        if row.num_tokens:
            sequence.settle(row.num_tokens, len(tokens))
            self.memory.settle(sequence)
        if isinstance(row, DecodeRow):
            row.request.course.drafts.add(row.verified)
            self.drafts.add(row.verified)
            self.pace.learn(sequence, row.verified)
        if tokens:
            self._accept(news, row)
        if row.not_finite:
            self._fail(news, row)

    def _accept(self, news: dict[Sequence, NewTokens], row: Row) -> None:
        """Appends new tokens and ends the sequence at a stop token or its limit."""
        sequence = row.sequence
        if sequence.phase is Phase.STOPPING:
            # Nobody is told, but the tree must know which tokens the pages hold.
            sequence.accept(row.new_tokens)
            return
        entry = news.setdefault(sequence, NewTokens(request=sequence.request))
        sequence.report(entry, row.new_tokens, row.new_logprobs)
        if entry.finished:
            self._finish(sequence)

    def _fail(self, news: dict[Sequence, NewTokens], row: Row) -> None:
        """Ends a sequence whose numbers are not finite. What it computed is of no use to anybody.

        In a window of drafts, a draft that nobody wanted may have spoilt the others: a kernel multiplies what may not
        be seen by zero, and zero times NaN is NaN. So the sequence goes on from its last token, without drafts.
        """
        sequence, in_flight, course = row.sequence, row.sequence.in_flight, row.request.course
        if in_flight.starts_over:
            return
        drafted = isinstance(row, DecodeRow) and self.engine.speculation is not None
        if drafted and not course.without_drafts and sequence.phase is Phase.DECODE:
            LOG.info("request %s goes on without drafts: numbers are not finite", sequence.owner)
            course.without_drafts = in_flight.stopped = in_flight.starts_over = True
            sequence.phase = Phase.STOPPING  # until no plan in flight names it
            return
        in_flight.damaged = True
        if sequence.phase not in (Phase.PREFILL, Phase.DECODE):
            return
        # The device has stopped the row only where it could draw no token.
        in_flight.stopped |= isinstance(row, DecodeRow) or (row.samples and not row.new_tokens)
        sequence.request.output.finish_reason = "error"
        news.setdefault(sequence, NewTokens(request=sequence.request)).finished = True
        self._stop(sequence)

    # --- starting over --------------------------------------------------------------------------

    def restarted(self, requests: Iterable[Request]) -> Scheduler:
        """A scheduler with the same settings and counters, empty memory, and these requests queued.

        It is for the case that the device's memory is lost. This scheduler, in whatever state it is, is of no use
        afterwards. The runner's state must be made anew as well. Requests start over from their prompt and output.
        """
        new = Scheduler(
            self.geometry,
            self.engine,
            num_frames=self.num_frames,
            max_slots=self.max_slots,
            max_model_len=self.max_model_len,
            host_frames=self.host_frames,
            disk=self.disk,
            costs=self.costs,
            step_costs=self.step_costs,
            speeds=self.speeds,
        )
        new.pace, new.drafts = self.pace, self.drafts
        new.pace.start_over()
        new.counters = new.admission.counters = self.counters
        if self.memory.tree is not None and new.memory.tree is not None:
            for tier, before in zip(new.memory.tree.tiers, self.memory.tree.tiers, strict=True):
                tier.counters = before.counters
        new.memory.holds.counters = self.memory.holds.counters
        new.memory.take_over(self.memory)
        new.counters.restarts += 1
        for request in requests:
            new.add(request)
        return new

    def reset_prefix_cache(self) -> None:
        """Empties the prefix tree; running sequences go on with what they hold."""
        self.memory.reset_tree(self._sequences.values())
        self.admission.look_again()

    # --- looking at it --------------------------------------------------------------------------

    def stats(self) -> dict[str, int | float]:
        """Counters, and present numbers of requests, frames, checkpoints and the prefix cache."""
        return {
            **vars(self.counters),
            "running": len(self.seats.running),
            "waiting": len(self.admission.waiting),
            **self.memory.stats(),
            **(self._draft_stats() if self.engine.speculation else {}),
        }

    def _draft_stats(self) -> dict[str, int | float]:
        return self.drafts.as_dict() | self.pace.times

    def check_invariants(self) -> None:
        """Recounts who holds what and who sits where; raises AssertionError with both numbers if they differ."""
        self.memory.check_invariants(self.seats.running)
        self.seats.check_invariants()
        for sequence in self.seats.running:
            self._check_running(sequence)
        queue, tree = self.admission.waiting, self.memory.tree
        agree(
            "scheduler",
            queued_but_not_waiting=([s.owner for s in queue if s.phase is not Phase.WAITING], []),
            live_requests=(len(self._sequences), len(self.seats.running) + len(queue)),
        )
        if self.memory.on_disk is not None:
            self.memory.on_disk.check_invariants(queue)
        if tree is not None:
            expected = sorted(s.owner for s in self._sequences.values() if s.announced.expected)
            waiting = sorted(s.owner for s in queue if s.uses_cache)
            agree(
                "scheduler",
                expected_requests=(expected, waiting),
                prompts_expected_in_the_tree=(len(tree.expected), len(waiting)),
            )

    def _check_running(self, sequence: Sequence) -> None:
        """Checks one sequence: its flights, where its checkpoint stands, and its hold on that checkpoint."""
        held, real, flights = sequence.held, sequence.real_position, self._flights
        checkpoint = held.real_checkpoint
        assert checkpoint <= real <= checkpoint + self.geometry.grain, (
            f"scheduler: {sequence.owner} at {real}, checkpoint {checkpoint}"
        )
        rows = [row for plan in flights for row in plan.rows if row.sequence is sequence]
        agree(
            f"scheduler: {sequence.owner}",
            flights=(sequence.in_flight.num_plans, sum(sequence in p.sequences for p in flights)),
            tokens_at_most=(sequence.position, real + sum(row.num_tokens for row in rows)),
        )
        if held.slot:
            self.memory.slots.resolve(held.slot)
