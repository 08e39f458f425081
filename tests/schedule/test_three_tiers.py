"""Arena, host's memory and disk at once, driven at random beside plain sets of what each may hold.

The device is simulated and the files are real. What a plan copies, what rows read and what lies in any tier are checked
token by token. Sets say which prefixes were saved completely, and which files are as they were written. Whatever is
refused, damaged, lost or taken away costs time and no token.
"""

from __future__ import annotations

import logging
import random
import shutil
import tempfile
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hybrid_jax.cache.tree.copies import pools_of
from hybrid_jax.cache.tree.node import ARENA
from hybrid_jax.config import CacheConfig
from hybrid_jax.schedule.tiers.below import HOST
from tests.drawing import left_to_all
from tests.schedule.disk_by_hand import DiskByHand, Written, small_and_timeless
from tests.schedule.faults import ALLOCATIONS, ERRORS, Faults, fail, is_ours
from tests.schedule.simulated_engine import Engine, make_geometry
from tests.schedule.stored_frames import StoringDevice, storable

GRAIN, LONGEST, VOCAB = 8, 140, 6
TIERS = ARENA, HOST

# Blocks of few symbols and a tail that may look like a block's beginning: paths part and meet often, off the grain too.
prompts = st.builds(
    lambda blocks, tail, count: [t for block in blocks for t in [block] * 12] + [tail] * count,
    st.lists(st.sampled_from([1, 2]), max_size=8),
    st.sampled_from([1, 2, 3]),
    st.integers(1, 12),
)
numbers = st.integers(0, 999)


def chosen(things, number):
    return things[number % len(things)]


class TierMachine(RuleBasedStateMachine):
    """An engine over a folder, and whoever else uses, prunes or damages that.

    The model: `host`, every prefix of which the host's memory has got all; and `Written`, which says the same of the
    disk. What is in a tier must be among them, and as they say.
    """

    kind, windows, checkpoints = "hybrid", (), "float32"
    num_frames, host_frames, limit = 44, 40, 1 << 30
    reached: Counter

    def __init__(self):
        super().__init__()
        self.patches = ExitStack()
        self.patches.enter_context(small_and_timeless())
        path = Path(tempfile.mkdtemp())
        self.patches.callback(shutil.rmtree, path)
        self.written = Written(path)
        self.asked = []  # prompts, with what came after them
        self.begin(16)

    def begin(self, page_tokens):
        """A process begins with an empty arena and an empty host's memory."""
        geometry = make_geometry(
            page_tokens=page_tokens, kind=self.kind, grain=GRAIN, windows=self.windows,
            longest_chunk=32, narrow=self.checkpoints == "int8",
        )  # fmt: skip
        geometry = storable(geometry)
        self.disk = DiskByHand(self.written, geometry, limit=self.limit)
        self.engine = Engine.make(
            geometry=geometry, disk=self.disk, device_kind=StoringDevice, num_frames=self.num_frames,
            host_frames=self.host_frames, max_slots=30, max_model_len=LONGEST + 20, vocab=VOCAB, grain=GRAIN,
            max_rows=3, prefill_tokens=32, steps_per_dispatch=4, cache=CacheConfig(checkpoints=self.checkpoints),
        )  # fmt: skip
        self.host = set()

    @property
    def tree(self):
        return self.engine.scheduler.memory.tree

    # --- requests -------------------------------------------------------------------------------

    def ask(self, prompt, max_tokens, count=1):
        prompt = prompt[:LONGEST]
        requests = self.engine.add_siblings(count, prompt, max_tokens=max_tokens, stop_ids=())
        self.asked.append(requests[0])

    @rule(
        prompt=prompts, max_tokens=st.sampled_from([1, 2, 12]), count=st.sampled_from([1, 1, 1, 2])
    )
    def ask_fresh(self, prompt, max_tokens, count):
        self.ask(prompt, max_tokens, count)

    @precondition(lambda self: self.asked)
    @rule(which=numbers, prompt=prompts, max_tokens=st.sampled_from([1, 12]))
    def go_on(self, which, prompt, max_tokens):
        """A conversation's next turn."""
        earlier = chosen(self.asked, which)
        self.ask(earlier.prompt + earlier.output.token_ids + prompt[-20:], max_tokens)

    @precondition(lambda self: self.asked)
    @rule(which=numbers, prompt=prompts, cut=st.integers(1, LONGEST))
    def part(self, which, prompt, cut):
        """It leaves an earlier one in the middle, or goes on from its end."""
        earlier = chosen(self.asked, which).prompt
        self.ask(earlier[:cut] + prompt[-cut % 30 - 1 :], 2)

    @precondition(lambda self: self.engine.scheduler._sequences)
    @rule(which=numbers)
    def abort(self, which):
        self.engine.scheduler.abort(chosen([*self.engine.scheduler._sequences], which))
        self.engine.scheduler.check_invariants()

    # --- turns ----------------------------------------------------------------------------------

    @rule(turns=st.integers(1, 6))
    def plan(self, turns):
        """Results come as late as they may."""
        for _ in range(turns):
            if not self.engine.plan():
                self.receive()

    @precondition(lambda self: self.engine.pending)
    @rule()
    def receive(self):
        if not self.engine.pending:
            return
        below = self.engine.scheduler.memory.below
        saved = [
            copy
            for plan, copies in below._in_flight
            for copy in copies
            if plan is self.engine.pending[0]
        ]
        self.engine.receive()
        self.host |= {tuple(copy.tokens.tolist()) for copy in saved}

    @rule(jobs=st.integers(1, 3))
    def read(self, jobs):
        self.disk.reads.run(jobs)

    @rule(jobs=st.integers(1, 6))
    def write(self, jobs):
        self.disk.write(jobs, refused=False)

    def finish(self):
        """All goes on to its end."""
        for _ in range(3000):
            if not self.engine.scheduler.has_work:
                return
            self.disk.run_all()
            if not self.engine.plan() or len(self.engine.pending) > 1:
                self.receive()
        raise AssertionError(f"no end in sight: {self.engine.counters}")

    @rule()
    def finish_all(self):
        self.finish()

    @precondition(lambda self: self.asked)
    @rule(
        which=numbers,
        tiers=st.sampled_from([(), (ARENA,), (ARENA, HOST), (HOST,)]),
        turns=st.integers(0, 9),
    )
    def come_back(self, which, tiers, turns):
        """An earlier prompt once more, when some tiers have given it away and the others have taken it."""
        self.finish()
        for tier in tiers:
            self.evict(99, tier)
            self.plan(1)
            self.receive()
        earlier = chosen(self.asked, which)
        self.ask(earlier.prompt + [1], 2)
        for turn in range(turns):
            self.plan(1)
            self.disk.reads.run(turn)

    # --- what happens to it ---------------------------------------------------------------------

    @precondition(lambda self: self.disk.writes.waiting and self.disk.writing)
    @rule(jobs=st.integers(1, 3))
    def disk_is_full(self, jobs):
        self.disk.write(jobs, refused=True)
        self.reached["refused"] += not self.disk.writing

    @precondition(lambda self: self.written.files)
    @rule(which=numbers, seed=numbers, asks=st.booleans())
    def damage(self, which, seed, asks):
        self.written.change(chosen(self.written.files, which), random.Random(seed))
        if asks and self.asked:
            self.come_back(which, TIERS, 0)
            self.finish()

    @precondition(lambda self: self.written.files)
    @rule(share=st.floats(0, 1))
    def another_process_prunes(self, share):
        self.written.prune(int(self.written.num_bytes * share))

    @rule(saves=st.booleans())
    def reset(self, saves):
        """Perhaps in the middle of copies."""
        if saves:
            self.evict(99, ARENA)
            self.plan(1)
        self.engine.scheduler.reset_prefix_cache()
        self.engine.scheduler.check_invariants()
        self.host.clear()

    @rule(frames=st.integers(1, 40), tier=st.sampled_from(TIERS))
    def evict(self, frames, tier):
        self.tree.make_room(frames, tier=tier)

    @rule(saves=st.booleans(), which=numbers)
    def lose_the_arena(self, saves, which):
        """Whole entries of the host's memory stay, and a prompt that comes back finds its own there."""
        if saves:
            self.finish()
            self.evict(99, ARENA)
            self.plan(2)
        prompts = [np.array([*request.tokens, 1]) for request in self.asked]
        before = [self.tree.match(tokens).found[HOST].hit_len for tokens in prompts]
        self.engine.crash()
        after = [self.tree.match(tokens).found[HOST].hit_len for tokens in prompts]
        assert all(now >= then for now, then in zip(after, before, strict=True))
        self.reached["kept below"] += any(before)
        if saves and self.asked:
            self.come_back(which, (), 2)

    @rule(calls=st.integers(0, 5), work=st.sampled_from(["plan", "receive"]))
    def refuse_memory(self, calls, work):
        """One call that asks a pool is refused, in whatever tier; what does not expect that starts over."""
        faults = Faults(ALLOCATIONS, fail, range(calls, calls + 1))
        try:
            with faults.installed():
                getattr(self, work)(*[1][: work == "plan"])
        except ERRORS as error:
            assert is_ours(error), error
            self.engine.recover()
        self.reached["no memory"] += faults.num_refused

    @rule(page_tokens=st.sampled_from([8, 16, 32]), closes=st.booleans())
    def start_anew(self, page_tokens, closes):
        """The process ends, or is killed, and the next one finds the folder."""
        if closes:
            self.finish()
            self.disk.run_all()
        self.count()
        self.begin(page_tokens if self.kind != "recurrent" else 0)

    # --- what always holds ----------------------------------------------------------------------

    @invariant()
    def counts_agree(self):
        self.engine.scheduler.check_invariants()
        assert not [node for node in self.tree.root.walk() if node.pins]

    @invariant()
    def the_folder_is_as_it_was_written(self):
        assert not self.written.wrong
        self.disk.folder.check_bytes()
        if not self.disk.writes.waiting:
            assert not (self.disk._waiting_bytes or self.disk._names_waiting)

    @invariant()
    def every_entry_holds_its_tokens(self):
        for tier in TIERS:
            for tokens, pages, states in self.entries(tier):
                if tier == HOST:
                    assert self.may_be_below(tokens), f"{len(tokens)} tokens were not saved"
                wide = tier == ARENA and self.is_due(states)
                if wide:
                    continue
                self.engine.device.check_entry(
                    tokens, pages, states, below=tier == HOST, wide=self.checkpoints != "int8"
                )

    @invariant()
    def what_is_on_its_way_is_left_alone(self):
        memory = self.engine.scheduler.memory
        for _, copies in memory.below._in_flight:
            for copy in copies:
                _, slots = pools_of(self.tree.tiers[HOST])
                states = slots.frames(copy.slot) if copy.slot else ()
                self.engine.device.check_entry(
                    copy.tokens.tolist(),
                    copy.pages,
                    states,
                    below=True,
                    wide=self.checkpoints != "int8",
                )

    def entries(self, tier):
        """Where a tier may be resumed from: tokens, pages, and frames of the checkpoint."""
        tree = self.tree
        for node in [*tree.root.walk()]:
            if not node.end or not node.has(tier):
                continue
            tokens = node.prefix()
            found = tree.match(tokens, least=0).found[tier]
            if not found.hit_len:
                continue
            states = ()
            if tree.needs_slots:
                if found.hit_len != node.end:
                    continue
                _, slots = pools_of(tree.tiers[tier])
                states = slots.frames(found.node.slots[tier])
            pages = tree.pages_to(found.node, found.hit_len, tier)
            yield tokens[: found.hit_len].tolist(), pages, states

    def is_due(self, states):
        """Whether a checkpoint still has the form of rows: the next plan narrows it."""
        narrowing = self.engine.scheduler.memory.narrowing
        due = narrowing._due if narrowing is not None else []
        return any(list(states) == recast.target.tolist() for recast in due)

    def may_be_below(self, tokens):
        tokens = tuple(tokens)
        if self.tree.needs_slots:
            return tokens in self.host
        return any(other[: len(tokens)] == tokens for other in self.host)

    def count(self):
        disk, events = self.disk.counters, self.engine.device.events
        self.reached.update(
            {"disk saves": disk.saves, "disk loads": disk.loads, "damage": disk.loads_failed}
        )
        self.reached.update(
            {name: events.get(name, 0) for name in ("saves", "loads", "narrowed", "widened")}
        )

    def teardown(self):
        try:
            self.finish()
            self.disk.run_all()
            self.engine.check()
            self.count()
            frames, slots = pools_of(self.tree.tiers[HOST])
            assert frames.num_held == slots.num_held == 0
            self.the_folder_is_as_it_was_written()
        finally:
            self.patches.close()


CELLS = {
    "hybrid": {},
    "checkpoints as int8": {"checkpoints": "int8"},
    "windows": {"windows": (20, None)},
    "attention": {"kind": "attention", "num_frames": 40},
    "attention with windows": {"kind": "attention", "windows": (20, None), "num_frames": 44},
    "windows and int8": {"windows": (20, None), "checkpoints": "int8"},
    "recurrent": {"kind": "recurrent", "num_frames": 24, "host_frames": 24},
    "a small folder": {"limit": 16_000},
    "a small folder of int8": {"limit": 12_000, "checkpoints": "int8"},
}


@pytest.mark.parametrize("cell", CELLS)
@left_to_all("attention with", "windows and", "a small folder of")
def test_three_tiers_agree_with_sets_of_prefixes(cell, caplog):
    caplog.set_level(logging.ERROR, "hybrid_jax.disk")
    reached = Counter()
    names = CELLS[cell] | {"reached": reached}
    machine = type("Machine", (TierMachine,), names).TestCase
    machine.settings = settings(max_examples=20, stateful_step_count=40, deadline=None)
    machine("runTest").runTest()
    wanted = {"disk saves", "disk loads", "saves", "loads", "kept below"}
    wanted |= {"damage"} if cell == "hybrid" else set()
    wanted |= {"narrowed", "widened"} if "int8" in cell else set()
    assert not wanted - {name for name, count in reached.items() if count}, reached


@pytest.mark.parametrize("kind", ["hybrid", "attention"])
@pytest.mark.parametrize("host", [False, True])
def test_what_a_file_has_of_a_window_is_read_by_rows_that_go_on_from_there_on(kind, host):
    """A page comes from disk with the tokens alone that a window sees. Who goes on earlier would see those before."""
    names = {"kind": kind, "windows": (20, None), "reached": Counter(), "num_frames": 60}
    machine = type("Machine", (TierMachine,), names)()
    prompt = [number % 5 for number in range(75)]
    machine.ask(prompt, 1)
    machine.finish()
    machine.disk.run_all()
    machine.begin(32)
    hits = []
    for tokens in ([*prompt, 3], prompt[:66] + [3] * 9, prompt[:66] + [2]):
        machine.ask(tokens, 1)
        machine.finish()
        hits.append(machine.asked[-1].hit.num_tokens)
        machine.every_entry_holds_its_tokens()
        if host:
            machine.evict(99, ARENA)
            machine.plan(1)
            machine.receive()
    assert (hits[0], hits[2]) == (72, 64)
    machine.teardown()
