"""Allocator, slots and prefix tree driven at random beside a naive model: a dict of prefixes."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hybrid_jax.cache.pools.frames import FrameAllocator, OutOfFrames
from hybrid_jax.cache.pools.slots import OutOfSlots, SlotTable
from hybrid_jax.cache.pools.windows import page_holds
from hybrid_jax.cache.tree.copies import give_up, publish
from hybrid_jax.cache.tree.node import ARENA
from hybrid_jax.cache.tree.radix import RadixTree
from hybrid_jax.cache.tree.tier import Tier
from tests.cache.pools import evict
from tests.cache.second_tier import SECOND, load, save, second_tier
from tests.drawing import drawn

GRAIN, NUM_FRAMES, MAX_SLOTS, STATE_FRAMES = 8, 60, 12, 3

# Blocks of few symbols and a tail that may look like a block's beginning: paths part and meet often, off the
# grain too.
prompts = st.builds(
    lambda blocks, tail, count: (
        tuple(t for block in blocks for t in (block,) * 8) + (tail,) * count
    ),
    st.lists(st.sampled_from([3, 5]), max_size=5),
    st.sampled_from([3, 5, 7]),
    st.integers(1, 12),
)


class CacheMachine(RuleBasedStateMachine):
    """Rows are tuples (tokens, pages, slot) with one hold each on what they list.

    The model: `contents` says for every prefix ever filled which resume points must exist while nothing is
    evicted; evictions are compared by what they may and may not take.
    """

    page_tokens, needs_slots, window = 16, True, None

    def __init__(self):
        super().__init__()
        self.frames = FrameAllocator(NUM_FRAMES)
        self.slots = SlotTable(
            self.frames, lengths=(STATE_FRAMES if self.needs_slots else 0,), max_slots=MAX_SLOTS
        )
        windows = [(self.window, slice(0, 1))] if self.window else []
        arena = Tier(self.frames, self.slots, page_holds(self.frames, self.page_tokens, windows))
        self.tree = RadixTree(
            [arena, *self.tiers_below(arena)], grain=GRAIN, needs_slots=self.needs_slots,
            max_known_nodes=12, sink=self.sink,
        )  # fmt: skip
        self.rows = []  # (tokens, pages, slot)
        self.resumable = set()  # prefixes that must hit
        self.known = {}  # announcement -> node
        self.promised = {}  # owner -> {prefix}
        self.waiting = set()  # announcements that are expected
        self.text = {}  # (frame, offset) -> the prefix that ends there, as written by a row
        self.states = {}  # slot -> prefix

    def tiers_below(self, arena):
        return []

    def sink(self, tree, node, tier):
        """Is told of every eviction while all of it is in place."""
        assert node.has(tier) and all(part.has(tier) for part in node.path())

    # --- what rows do ---------------------------------------------------------------------------

    @rule(tokens=prompts)
    def compute(self, tokens):
        """A row resumes where it can, computes up to a grain boundary, and keeps its memory."""
        length = (len(tokens) - 1) // GRAIN * GRAIN
        match = self.tree.match(np.array(tokens))
        assert match.hit_len == self.expected_hit(tokens)
        pages, slot = self.tree.acquire(match)
        pages = [tuple(page) for page in pages.tolist()]
        self.check_content(tokens, match.hit_len, pages, slot)
        row = (tokens[:length], pages, slot)
        self.rows.append(row)
        if length <= match.hit_len:
            return
        try:
            self.extend_row(row, match.hit_len, length)
        except (OutOfFrames, OutOfSlots):
            pass  # it keeps what it has and stays at its hit
        self.rows[-1] = self.current

    def extend_row(self, row, hit_len, length):
        tokens, pages, slot = row
        self.current = (tokens[:hit_len], pages, slot)
        page = self.page_tokens
        fresh = []
        if page:
            count = -(-length // page) - len(pages) + (hit_len % page != 0)
            fresh = [(frame,) for frame in self.frames.allocate(count).tolist()]
        new_slot = 0
        if self.needs_slots:
            try:
                new_slot = self.slots.allocate()
            except (OutOfFrames, OutOfSlots):
                self.frames.release([frame for group in fresh for frame in group])
                raise
        if page and hit_len % page:  # copy on write
            (source,) = pages.pop()
            for offset in range(page):
                self.text.pop((fresh[0][0], offset), None)
                if (source, offset) in self.text:
                    self.text[fresh[0][0], offset] = self.text[source, offset]
            self.frames.release([source])
        pages += fresh
        for position in range(hit_len, length) if page else ():
            self.text[pages[position // page][0], position % page] = tokens[: position + 1]
        if slot:
            self.slots.release(slot)
        if new_slot:
            self.states[self.slots.resolve(new_slot)] = tokens[:length]
        self.current = (tokens[:length], pages, new_slot)

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), finish=st.booleans())
    def publish(self, data, finish):
        """A row's prefix goes into the tree; a finished row lets go of everything."""
        self.leave(data.draw(st.integers(0, len(self.rows) - 1)), finish)

    @rule(asked=st.lists(prompts, min_size=2, max_size=6))
    def serve(self, asked):
        """Rows that are computed and finished one after the other, in memory that others give up."""
        for tokens in asked:
            self.make_room(NUM_FRAMES // 3)
            self.compute(tokens)
            self.leave(-1, True)

    def leave(self, index, finish):
        tokens, pages, slot = self.rows[index]
        if tokens and bool(slot) == self.needs_slots:
            self.tree.fill(np.array(tokens), np.array(pages, np.int32).reshape(len(pages), 1), slot)
            self.add_resumable(tokens)
            for prefixes in self.promised.values():
                inside = {p for p in prefixes if p == tokens[: len(p)]}
                prefixes -= {tokens} if self.needs_slots else inside
        if finish:
            self.drop(index)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def abandon(self, data):
        self.drop(data.draw(st.integers(0, len(self.rows) - 1)))

    def drop(self, index):
        tokens, pages, slot = self.rows.pop(index)
        self.frames.release([frame for group in pages for frame in group])
        if slot:
            self.slots.release(slot)

    # --- what waiting requests do ---------------------------------------------------------------

    @rule(tokens=prompts)
    def announce(self, tokens):
        name = f"r{len(self.known)}-{len(self.promised)}-{self.tree.version}"
        self.known[name] = (tokens, self.tree.announce(np.array(tokens)))
        self.promised[name] = set()

    @precondition(lambda self: self.known)
    @rule(data=st.data(), turn=st.integers(0, 5))
    def wait_or_arrive(self, data, turn):
        name = data.draw(st.sampled_from(sorted(self.known)))
        if name in self.waiting:
            self.arrive(name)
        else:
            self.tree.expected.add(self.known[name][1], turn)
            self.waiting.add(name)

    def arrive(self, name):
        if name in self.waiting:
            self.tree.expected.remove(self.known[name][1])
            self.waiting.remove(name)

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def conclude(self, data):
        name = data.draw(st.sampled_from(sorted(self.known)))
        self.arrive(name)
        self.tree.withdraw(name)
        _, node = self.known.pop(name)
        self.promised.pop(name)
        self.tree.conclude(node)

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def promise(self, data):
        name = data.draw(st.sampled_from(sorted(self.known)))
        tokens, node = self.known[name]
        length = data.draw(st.integers(1, 6)) * GRAIN
        if length <= len(tokens):
            stands = self.needs_slots and tokens[:length] in self.resumable
            self.tree.promise(name, node, length)
            if not stands:
                self.promised[name].add(tokens[:length])

    @rule(tokens=prompts)
    def look_up(self, tokens):
        match = self.tree.match(np.array(tokens), "nobody")
        hit = self.expected_hit(tokens)
        assert match.hit_len == hit
        mine = [p for prefixes in self.promised.values() for p in prefixes]
        ahead = [len(p) for p in mine if hit < len(p) < len(tokens) and tokens[: len(p)] == p]
        assert (match.pending.end if match.pending else 0) == max(ahead, default=0)
        known = [t for t, _ in self.known.values()] + list(self.resumable)
        assert match.match_len >= max((common(tokens, t) for t in known), default=0)
        assert match.hit_len <= match.cached_len <= match.match_len

    # --- what memory pressure does --------------------------------------------------------------

    def make_room(self, count):
        self.tree.make_room(count)
        self.resumable = {p for p in self.resumable if self.found(p) == len(p)}

    @rule(count=st.integers(1, 20))
    def evict(self, count):
        free = self.frames.num_free
        freed = evict(self.tree, count)
        assert freed == self.frames.num_free - free
        lost = {p for p in self.resumable if self.found(p) != len(p)}
        self.resumable -= lost
        if freed < count:  # then all that is left in the tree is held by rows too, or is above such
            evict(self.tree, NUM_FRAMES)
            assert self.frames.num_free == free + freed

    @precondition(lambda self: not self.rows)
    @rule()
    def evict_everything(self):
        self.tree.make_room(NUM_FRAMES)
        assert self.frames.num_free == NUM_FRAMES - 1
        self.resumable.clear()

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def disown(self, data):
        tokens, _, slot = data.draw(st.sampled_from(self.rows))
        if slot and self.tree.disown(slot):
            assert self.found(tokens) < len(tokens)
            self.resumable = {p for p in self.resumable if self.found(p) == len(p)}

    @rule(tokens=prompts, keep=st.integers(0, 8))
    def drop_path(self, tokens, keep):
        self.tree.drop_path(np.array(tokens), keep * GRAIN)
        lost = {p for p in self.resumable if self.found(p) != len(p)}
        for (
            prefix
        ) in lost:  # it shares what comes after the kept part with the path, or hangs on it
            assert common(prefix, tokens) > keep * GRAIN or len(prefix) > keep * GRAIN
            assert prefix[: keep * GRAIN] == tokens[: keep * GRAIN]
        self.resumable -= lost

    @rule()
    def reset(self):
        self.tree.reset()
        self.resumable.clear()
        self.waiting.clear()
        names = {name: tokens for name, (tokens, _) in self.known.items()}
        self.promised = {name: set() for name in names}
        self.known = {name: (t, self.tree.announce(np.array(t))) for name, t in names.items()}

    # --- the naive model ------------------------------------------------------------------------

    def first_page(self, position):
        return 0

    def add_resumable(self, tokens):
        step = len(tokens) if self.needs_slots else GRAIN
        for length in range(step, len(tokens) + 1, step):
            self.resumable.add(tokens[:length])

    def expected_hit(self, tokens):
        return max(
            (len(p) for p in self.resumable if len(p) < len(tokens) and tokens[: len(p)] == p),
            default=0,
        )

    def found(self, prefix):
        return self.tree.match(np.array([*prefix, 9])).hit_len

    def check_content(self, tokens, length, pages, slot):
        if self.page_tokens:
            assert len(pages) == -(-length // self.page_tokens)
            for position in range(length):
                frame = pages[position // self.page_tokens][0]
                assert self.text[frame, position % self.page_tokens] == tokens[: position + 1]
        if self.needs_slots and length:
            assert self.states[self.slots.resolve(slot)] == tokens[:length]

    @invariant()
    def counts_agree(self):
        self.frames.check_invariants()
        self.slots.check_invariants()
        self.tree.check_invariants()
        holds = self.tree.arena.pages.as_dict()
        for _, pages, _ in self.rows:
            for group in pages:
                holds[group[0]] = holds.get(group[0], 0) + 1
        slots = [*self.tree.arena.slot_nodes] + [slot for _, _, slot in self.rows if slot]
        for slot in set(slots):
            assert self.slots.holders(slot) == slots.count(slot)
            holds |= dict.fromkeys(self.slots.frames(slot), 1)
        assert len(set(slots)) == self.slots.num_held
        for frame in range(1, NUM_FRAMES):
            assert self.frames.holders(frame) == holds.get(frame, 0)

    @invariant()
    def resume_points_are_those_of_the_model(self):
        for prefix in self.resumable:
            assert self.found(prefix) == len(prefix)

    def teardown(self):
        while self.rows:
            self.drop(0)
        self.tree.reset()
        assert self.frames.num_free == NUM_FRAMES - 1 and self.slots.num_held == 0


class WindowMachine(CacheMachine):
    """The same where a row reads `window` tokens back at most: rows and nodes have no more pages than that takes.

    The model needs to know every prefix that was ever filled: what one row mends, others can resume from again.
    """

    def __init__(self):
        super().__init__()
        self.filled = set()

    def first_page(self, position):
        return max(position - self.window + 1, 0) // self.page_tokens

    def extend_row(self, row, hit_len, length):
        super().extend_row(row, hit_len, length)
        tokens, pages, _ = self.current
        if self.needs_slots or length % (2 * GRAIN):  # a row may also keep what it need not
            gone = self.first_page(length)
            self.frames.release([frame for (frame,) in pages[:gone] if frame])
            pages[:gone] = [(0,)] * gone

    def drop(self, index):
        tokens, pages, slot = self.rows[index]
        self.rows[index] = tokens, [page for page in pages if page[0]], slot
        super().drop(index)

    def leave(self, index, finish):
        tokens, pages, slot = self.rows[index]
        super().leave(index, finish)
        if tokens and bool(slot) == self.needs_slots:
            self.filled |= {tokens[:n] for n in range(GRAIN, len(tokens) + 1, GRAIN)}
            self.resumable |= {p for p in self.filled if self.found(p) == len(p)}

    def add_resumable(self, tokens):
        _, pages, _ = next(row for row in self.rows if row[0] == tokens)
        if self.needs_slots:
            self.resumable.add(tokens)
            return
        held = [page for page, (frame,) in enumerate(pages) if frame]
        for length in range(GRAIN, len(tokens) + 1, GRAIN):
            needed = range(self.first_page(length), -(-length // self.page_tokens))
            if set(needed) <= set(held):
                self.resumable.add(tokens[:length])

    def check_content(self, tokens, length, pages, slot):
        first = self.first_page(length) * self.page_tokens
        for position in range(length):
            frame = pages[position // self.page_tokens][0]
            if position < first:
                assert frame == 0
            else:
                assert self.text[frame, position % self.page_tokens] == tokens[: position + 1]
        if self.needs_slots and length:
            assert self.states[self.slots.resolve(slot)] == tokens[:length]

    @rule()
    def thin_out(self):
        """Then rows hold all that is left in the tree, or it has checkpoints."""
        free = self.frames.num_free + evict(self.tree, NUM_FRAMES)
        assert self.tree.thin_out() == (self.frames.num_free > free)
        self.resumable = {p for p in self.resumable if self.found(p) == len(p)}
        holds = self.tree.arena.pages.as_dict()
        assert self.needs_slots or all(self.frames.holders(f) > n for f, n in holds.items())


class TwoTierMachine(CacheMachine):
    """The same beside a second tier that takes what the arena evicts: at once, later, or not at all.

    The model of the arena is what it was; `below` says which prefixes the second tier must have.
    """

    num_frames = 45

    def __init__(self):
        self.how, self.saving = "at once", []
        self.below = set()
        self.text_below, self.states_below = {}, {}
        super().__init__()

    def tiers_below(self, arena):
        self.second = second_tier(arena, self.num_frames)
        return [self.second]

    @rule(how=st.sampled_from(["at once", "later", "not at all"]))
    def take_evictions(self, how):
        self.how = how

    def sink(self, tree, node, tier):
        super().sink(tree, node, tier)
        if tier == ARENA and self.how != "not at all":
            if (copy := save(tree, node)) is not None:
                self.copy(copy, self.text, self.text_below)
                if copy.slot:
                    slot = self.slots.resolve(node.slots[ARENA])
                    self.states_below[self.second.slots.resolve(copy.slot)] = self.states[slot]
                self.saving.append(copy)
                if self.how == "at once":
                    self.publish_saves()
            self.forget_lost()

    def copy(self, copy, text, other):
        """Copies what frames hold, as the device would."""
        for source, target in zip(copy.source.tolist(), copy.target.tolist(), strict=True):
            for offset in range(self.page_tokens):
                other.pop((target, offset), None)
                if (source, offset) in text:
                    other[target, offset] = text[source, offset]

    @precondition(lambda self: self.saving)
    @rule()
    def publish_saves(self):
        for copy in self.saving:
            publish(self.tree, copy)
            self.took(tuple(copy.tokens.tolist()))
        self.saving = []

    def took(self, tokens):
        step = len(tokens) if self.needs_slots else GRAIN
        self.below |= {tokens[:n] for n in range(step, len(tokens) + 1, step)}

    def loaded(self, tokens):
        self.add_resumable(tokens)

    @precondition(lambda self: self.below)
    @rule(data=st.data(), rest=st.lists(prompts, max_size=3))
    def load(self, data, rest):
        """What the second tier has beyond the arena's hit comes back, and rows go on from there."""
        tokens = (*data.draw(st.sampled_from(sorted(self.below))), 7)
        self.load_for(tokens)
        cuts = range(len(tokens), 0, -11)  # where a prompt leaves the path: at its end, then inside
        self.serve([tokens[:cut] + tail for cut, tail in zip(cuts, rest, strict=False)])

    def load_for(self, tokens):
        best = max(
            (len(p) for p in self.below if tokens[: len(p)] == p and len(p) < len(tokens)),
            default=0,
        )
        match = self.tree.match(np.array(tokens))
        assert match.found[SECOND].hit_len == best
        copy = load(self.tree, np.array(tokens))
        if copy is None:
            self.resumable = {p for p in self.resumable if self.found(p) == len(p)}
            return
        self.copy(copy, self.text_below, self.text)
        if copy.slot:
            slot = self.second.slots.resolve(match.found[SECOND].node.slots[SECOND])
            self.states[self.slots.resolve(copy.slot)] = self.states_below[slot]
        self.resumable = {p for p in self.resumable if self.found(p) == len(p)}
        self.loaded(tokens[:best])
        assert self.tree.match(np.array(tokens)).hit_len == best

    @rule(count=st.integers(1, 20))
    def evict_below(self, count):
        free = self.second.frames.num_free
        self.tree.make_room(free + count, tier=SECOND)
        self.forget_lost()

    @rule(tokens=prompts, keep=st.integers(0, 8))
    def drop_path(self, tokens, keep):
        super().drop_path(tokens, keep)
        for prefix in self.forget_lost():
            assert len(prefix) > keep * GRAIN and prefix[: keep * GRAIN] == tokens[: keep * GRAIN]

    @rule()
    def reset(self):
        super().reset()
        self.below.clear()

    def found_below(self, prefix):
        return self.tree.match(np.array(prefix), least=0).found[SECOND].hit_len

    def forget_lost(self):
        lost = {p for p in self.below if self.found_below(p) != len(p)}
        self.below -= lost
        return lost

    @invariant()
    def counts_below_agree(self):
        second = self.second
        second.frames.check_invariants()
        second.slots.check_invariants()
        holds = Counter(second.pages.as_dict())
        slots = Counter(second.slot_nodes.keys())
        for copy in self.saving:
            holds.update(copy.pages.ravel().tolist())
            slots.update([copy.slot] * bool(copy.slot))
        for slot, count in slots.items():
            assert second.slots.holders(slot) == count
            holds.update(second.slots.frames(slot))
        for frame in range(1, self.num_frames):
            assert second.frames.holders(frame) == holds[frame]

    @invariant()
    def the_second_tier_has_what_it_took(self):
        for prefix in self.below:
            found = self.tree.match(np.array(prefix), least=0).found[SECOND]
            assert found.hit_len == len(prefix) <= found.cached_len
            pages = self.tree.pages_to(found.node, len(prefix), SECOND)
            first = self.first_page(len(prefix))
            assert not pages[:first].any()
            for position in range(first * self.page_tokens, len(prefix) if self.page_tokens else 0):
                place = pages[position // self.page_tokens].item(), position % self.page_tokens
                assert self.text_below[place] == prefix[: position + 1]
            if self.needs_slots:
                slot = self.second.slots.resolve(found.node.slots[SECOND])
                assert self.states_below[slot] == prefix

    def teardown(self):
        for copy in self.saving:
            give_up(self.tree, copy)
        super().teardown()
        assert self.second.frames.num_free == self.num_frames - 1


class TwoTierWindowMachine(TwoTierMachine, WindowMachine):
    """Both: what goes from tier to tier has no more pages than the window takes, and mends what lacks some there."""

    def __init__(self):
        self.filled_below = set()
        super().__init__()

    def took(self, tokens):
        self.filled_below |= {tokens[:n] for n in range(GRAIN, len(tokens) + 1, GRAIN)}
        self.below |= {p for p in self.filled_below if self.found_below(p) == len(p)}
        assert tokens in self.below

    def loaded(self, tokens):
        self.resumable |= {p for p in self.filled if self.found(p) == len(p)}
        assert tokens in self.resumable


def common(a, b):
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


FORMS = [(16, True), (4, True), (64, True), (16, False), (64, False), (0, True)]


def run(base, page_tokens, needs_slots, examples, **names):
    names |= {"page_tokens": page_tokens, "needs_slots": needs_slots}
    machine = type("Machine", (base,), names).TestCase
    machine.settings = settings(max_examples=examples, stateful_step_count=40, deadline=None)
    machine("runTest").runTest()


WINDOWS = [(4, True, 10), (16, True, 19), (4, False, 6), (16, False, 20)]


@pytest.mark.parametrize(("page_tokens", "needs_slots"), FORMS)
def test_the_cache_agrees_with_a_dict_of_prefixes(page_tokens, needs_slots):
    run(CacheMachine, page_tokens, needs_slots, 60)


@pytest.mark.parametrize(("page_tokens", "needs_slots", "window"), WINDOWS)
def test_a_cache_with_a_window_agrees_with_a_dict_of_prefixes(page_tokens, needs_slots, window):
    run(WindowMachine, page_tokens, needs_slots, 50, window=window)


@pytest.mark.parametrize(("page_tokens", "needs_slots"), drawn(FORMS))
def test_two_tiers_agree_with_dicts_of_prefixes(page_tokens, needs_slots):
    run(TwoTierMachine, page_tokens, needs_slots, 30)


@pytest.mark.parametrize(("page_tokens", "needs_slots", "window"), drawn(WINDOWS))
def test_two_tiers_with_a_window_agree_with_dicts_of_prefixes(page_tokens, needs_slots, window):
    run(TwoTierWindowMachine, page_tokens, needs_slots, 30, window=window)
