"""From where a row can go on, where nodes lack pages that layers with a window have left behind."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_jax.cache.pools.frames import FrameAllocator
from hybrid_jax.cache.pools.windows import WindowedPageHolds
from hybrid_jax.cache.tree.eviction import LeastRecentlyUsed
from tests.cache.pools import GRAIN, Pools, seq

FRAMES = 4  # of a page: one that sees everything, two of one window, one of another


def resumes(store, spans, length):
    """The definition: of every page that a window reads, the deepest node's entry above `length` has all frames."""
    for window, frames in store.windows:
        for page in range(
            max(length - window + 1, 0) // store.page_tokens, store.num_pages(length)
        ):
            start, pages = next(
                (start, pages)
                for start, pages in spans
                if start < length and start // store.page_tokens <= page
            )
            if not pages[page - start // store.page_tokens, frames].all():
                return False
    return True


@st.composite
def paths(draw):
    """Pages of the nodes on a path, the deepest first, with runs of holes; and where it ends."""
    page_tokens = draw(st.sampled_from([4, 8, 16, 64]))
    windows = draw(st.tuples(st.integers(1, 90), st.integers(1, 200)))
    store = WindowedPageHolds(
        FrameAllocator(2), page_tokens, [(windows[0], slice(1, 3)), (windows[1], slice(3, 4))]
    )
    end = draw(st.integers(1, 60)) * GRAIN
    inside = draw(st.lists(st.integers(1, end - 1), max_size=4))
    on_the_grain = draw(st.lists(st.integers(0, end // GRAIN - 1), max_size=4))
    starts = sorted({0, *inside, *(n * GRAIN for n in on_the_grain)})
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    share, longest = draw(st.sampled_from([0.0, 0.03, 0.3, 1.0])), draw(st.sampled_from([1, 8]))
    spans = []
    for start, stop in zip(starts, [*starts[1:], end], strict=True):
        places = store.places(start, stop)
        pages = np.ones((places.stop - places.start, FRAMES), np.uint32)
        for frame in range(1, FRAMES):
            for first in np.flatnonzero(rng.random(len(pages)) < share):
                pages[first : first + rng.integers(1, longest + 1), frame] = 0
        for place in (0, -1):  # pages that boundaries cut
            pages[place, rng.integers(1, FRAMES)] = rng.integers(2)
        spans.append((start, pages))
    return store, spans[::-1], end


@settings(max_examples=150)
@given(path=paths())
def test_the_deepest_resume_point_is_that_of_the_definition(path):
    store, spans, end = path
    good = 0
    for length in range(0, end + 1, GRAIN):
        above = [span for span in spans if span[0] < length]
        good = length if resumes(store, above, length) else good
        assert store.deepest(above, length, GRAIN) == good
        assert store.readable(above, length) == (good == length)


def hollow_path(windows, *, kept):
    """A tree without recurrent layers with a text of 4096 tokens, of which a row gave back all but the last pages."""
    pools = Pools(needs_slots=False, num_frames=600, groups=2, windows=windows)
    tokens = np.arange(4096)
    pages = pools.pages(4096)
    gone = pages.copy()
    gone[-kept:], gone[:, 0] = 0, 0
    pools.tree.fill(tokens, pages - gone)
    pools.frames.release(pages)
    pools.check()
    return pools, tokens


@pytest.mark.parametrize("leaves", [100, 2000, 4000])
def test_a_text_that_leaves_a_hollow_path_costs_few_passes(leaves, monkeypatch):
    """How far back the next pages are makes no difference."""
    pools, tokens = hollow_path([(40, slice(1, 2))], kept=5)
    passes = []
    readable = WindowedPageHolds.readable
    monkeypatch.setattr(
        WindowedPageHolds, "readable", lambda *args: passes.append(1) or readable(*args)
    )
    assert pools.match([*tokens[:-leaves], 7]).hit_len == 0
    assert pools.match([*tokens, 7]).hit_len == 4096
    assert len(passes) == 2


def test_who_asks_what_is_known_looks_at_no_page(monkeypatch):
    pools, tokens = hollow_path([(40, slice(1, 2))], kept=5)
    match = pools.match([*tokens[:3000], 7])
    monkeypatch.setattr(WindowedPageHolds, "readable", None)
    node, known_len = pools.tree.reach(np.array([*tokens[:3000], 7]))
    assert (node, known_len) == (match.reached, match.match_len) and known_len == 3000
    pools.tree.ended(tokens, 4000)
    pools.tree.drop_path(tokens, 0)
    assert pools.tree.reach(tokens)[1] == 4096 and pools.frames.num_held == 0
    assert pools.tree.reach(np.array(seq((9000, 5)))) == (pools.tree.root, 0)


TEXT = seq((0, 256))


class Stranded:
    """A text that others go on from, all in the tree; of the others, rows hold the last pages."""

    def __init__(self, others=(1000, 2000), policy=None):
        self.pools = Pools(
            needs_slots=False, page_tokens=16, windows=[(40, slice(0, 1))], policy=policy
        )
        for first in others:
            tokens = [*TEXT, *seq((first, 64))]
            pages = self.pools.pages(len(tokens))
            self.pools.tree.fill(np.array(tokens), pages)
            self.pools.frames.release(pages[:16])
        self.pools.check()

    def hit(self, *tokens):
        return self.pools.match([*tokens, 7]).hit_len

    def take(self, num_frames):
        found = self.pools.tree.make_room(self.pools.frames.num_free + num_frames)
        self.pools.check()
        return found

    def thin_out(self):
        found = self.pools.tree.thin_out()
        self.pools.check()
        return found


def test_pages_above_what_rows_hold_go_from_far_behind():
    stranded = Stranded()
    assert stranded.hit(*TEXT[:100]) == 96
    assert stranded.take(12)
    assert stranded.hit(*TEXT[:100]) == 0  # no prompt has left the text there so far
    assert stranded.hit(*TEXT) == 256 and stranded.hit(*TEXT[:255]) == 248
    assert stranded.hit(*TEXT, *seq((1000, 64))) == 320
    assert not stranded.take(1)
    assert stranded.thin_out() and not stranded.thin_out()
    assert stranded.hit(*TEXT) == 0 and stranded.hit(*TEXT, *seq((1000, 64))) == 320
    assert stranded.pools.frames.num_held == 8  # those of the rows


def test_what_a_pinned_node_reads_stays():
    stranded = Stranded()
    tree = stranded.pools.tree
    inner = stranded.pools.match([*TEXT, 7]).reached
    tree.pin(inner)
    assert not stranded.take(1) and not stranded.thin_out()
    tree.unpin(inner)
    below = stranded.pools.match([*TEXT, 1000, 1001, 7]).reached  # its windows reach into the text
    tree.pin(below)
    assert stranded.take(1) and not stranded.thin_out()
    assert stranded.hit(*TEXT, *seq((1000, 8))) == 264
    tree.unpin(below)
    assert stranded.thin_out() and stranded.hit(*TEXT, *seq((1000, 8))) == 0


class KeepsNodes(LeastRecentlyUsed):
    def keeps(self, node):
        return True


def test_what_a_hit_in_the_middle_of_a_path_reads_stays_while_it_is_pinned():
    stranded = Stranded(others=[1000], policy=KeepsNodes())
    tree = stranded.pools.tree
    leaf, _ = tree.reach(np.array([*TEXT, 1000]))
    for position in (256, 128, 96):  # where chunks ended
        tree.boundary(leaf, position)
    match = stranded.pools.match([*TEXT[:104], 7])
    assert match.hit_len == 104 and (match.node.start, match.node.end) == (96, 128)
    tree.pin(match.node)
    assert stranded.take(1) and stranded.hit(*TEXT[:104]) == 104
    tree.unpin(match.node)
    assert stranded.take(1) and stranded.hit(*TEXT[:104]) == 0
