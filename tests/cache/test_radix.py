"""The prefix tree, one behaviour at a time."""

import time

import numpy as np
import pytest

from hybrid_jax.cache.tree.node import ARENA, common_prefix_len, describe_tree, shared_len
from tests.cache.pools import Pools, evict, seq


def test_an_empty_tree_matches_nothing():
    match = Pools().match(seq((0, 40)))
    assert (match.match_len, match.cached_len, match.hit_len, match.pending) == (0, 0, 0, None)


def test_a_filled_prefix_is_hit_by_its_extensions():
    pools = Pools()
    pools.insert(seq((0, 32)))
    match = pools.match(seq((0, 32), (100, 5)))
    assert (match.match_len, match.hit_len) == (32, 32)


def test_the_last_token_is_always_computed():
    pools = Pools()
    pools.insert(seq((0, 32)))
    pools.insert(seq((0, 24)))
    assert pools.match(seq((0, 32))).hit_len == 24
    attention = Pools(needs_slots=False)
    attention.insert(seq((0, 32)))
    assert attention.match(seq((0, 32))).hit_len == 24
    assert attention.match(seq((0, 33))).hit_len == 32


def test_match_goes_deeper_than_hit_when_paths_part_inside_an_edge():
    pools = Pools()
    pools.insert(seq((0, 32)))
    match = pools.match(seq((0, 20), (100, 20)))
    assert (match.match_len, match.cached_len, match.hit_len) == (20, 20, 0)
    attention = Pools(needs_slots=False)
    attention.insert(seq((0, 32)))
    assert attention.match(seq((0, 20), (100, 20))).hit_len == 16


def test_announced_prompts_are_known_but_not_cached():
    pools = Pools()
    pools.tree.announce(np.array(seq((0, 40))))
    match = pools.match(seq((0, 30), (100, 9)))
    assert (match.match_len, match.cached_len, match.hit_len) == (30, 0, 0)
    pools.check()


def test_partings_list_branches_and_ends_of_waiting_prompts():
    pools = Pools()
    tree = pools.tree
    long = tree.announce(np.array(seq((0, 100))))
    tree.announce(np.array(seq((0, 50), (200, 10))))
    short = tree.announce(np.array(seq((0, 70))))
    assert tree.branch_points(long) == ([50], [70])
    tree.conclude(short)
    pools.check()
    assert tree.branch_points(long) == ([50], [])


def test_acquire_retains_pages_and_checkpoint_for_the_caller():
    pools = Pools(groups=2)
    pools.insert(seq((0, 32)))
    used = pools.frames.num_held
    pages, slot = pools.tree.acquire(pools.match(seq((0, 40))))
    assert len(pages) == 2 and all(len(page) == 2 for page in pages)
    assert [pools.frames.holders(f) for page in pages for f in page] == [2, 2, 2, 2]
    assert pools.slots.holders(slot) == 2
    pools.tree.reset()
    assert pools.frames.num_held == used  # the row still holds everything
    for page in pages:
        pools.frames.release(page)
    pools.slots.release(slot)
    assert pools.frames.num_held == 0


def test_a_split_inside_a_page_leaves_the_page_with_both():
    pools = Pools(page_tokens=64)
    pools.insert(seq((0, 64)))
    pools.insert(seq((0, 24)))
    assert pools.frames.num_held == 1 + 2 * 2  # one page, two checkpoints
    deep, _ = pools.tree.acquire(pools.match(seq((0, 64), (0, 1))))
    shallow, _ = pools.tree.acquire(pools.match(seq((0, 25))))
    assert deep == shallow and pools.frames.holders(deep[0][0]) == 4


def test_a_path_gives_the_deepest_copy_of_a_shared_page():
    pools = Pools(page_tokens=64)
    pools.insert(seq((0, 24)))
    parent = pools.tree.acquire(pools.match(seq((0, 25))))[0]
    pools.insert(seq((0, 24), (100, 40)))  # a row that copied the page inside which it resumed
    child = pools.tree.acquire(pools.match(seq((0, 24), (100, 40), (0, 1))))[0]
    assert len(parent) == len(child) == 1 and parent != child


def test_an_evicted_interior_checkpoint_leaves_its_pages_to_the_child():
    pools = Pools(page_tokens=64)
    pools.insert(seq((0, 24)))
    pools.insert(seq((0, 24), (100, 40)))
    held = pools.frames.num_held
    assert (
        evict(pools.tree, 1) == 3
    )  # the checkpoint's frames, and the page the child has a better copy of
    pools.check()
    assert pools.frames.num_held == held - 3
    assert pools.tree.num_nodes == 1
    assert pools.match(seq((0, 25))).hit_len == 0
    match = pools.match(seq((0, 24), (100, 40), (0, 1)))
    assert match.hit_len == 64 and len(pools.tree.acquire(match)[0]) == 1
    assert pools.tree.counters.tombstone_evictions == 1


def test_eviction_takes_the_entry_used_longest_ago():
    pools = Pools()
    for start in (0, 100, 200):
        pools.insert(seq((start, 16)))
    pages, slot = pools.tree.acquire(pools.match(seq((0, 17))))
    pools.frames.release(pages[0])
    pools.slots.release(slot)
    evict(pools.tree, 1)
    hits = [pools.match(seq((start, 17))).hit_len for start in (0, 100, 200)]
    assert hits == [16, 0, 16]
    pools.check()


def test_evicting_a_leaf_frees_the_branch_point_that_served_only_it():
    pools = Pools()
    pools.insert(seq((0, 32)))
    pools.insert(seq((0, 16), (100, 16)))  # parts at 16, where no checkpoint stands
    assert pools.tree.num_nodes == 3
    pools.tree.make_room(pools.frames.num_frames - 1)
    pools.check()
    assert pools.frames.num_held == 0
    assert pools.match(seq((0, 32), (1, 1))).match_len == 32  # still known


def test_pinned_nodes_stay():
    pools = Pools()
    node = pools.insert(seq((0, 32)))
    pools.tree.pin(node)
    assert evict(pools.tree, 1) == 0
    pools.tree.unpin(node)
    assert evict(pools.tree, 1) == 4
    pools.check()


def test_of_a_page_cut_by_a_boundary_that_goes_the_child_s_copy_stays():
    pools = Pools(page_tokens=64)
    pools.insert(seq((0, 24)))
    pools.insert(seq((0, 24), (100, 40)))  # a row that copied the page inside which it resumed
    whole = seq((0, 24), (100, 40), (0, 1))
    before, _ = pools.tree.acquire(pools.match(whole))
    pools.frames.release(before)
    assert evict(pools.tree, 1) == 3  # the checkpoint between, and the upper's copy
    after, _ = pools.tree.acquire(pools.match(whole))
    assert after.tolist() == before.tolist()


def test_a_node_of_which_a_row_holds_some_pages_gives_back_the_others():
    pools = Pools(needs_slots=False)
    pools.insert(seq((0, 32)))
    pools.tree.acquire(pools.match(seq((0, 20), (100, 5))))  # holds the first of two pages
    assert evict(pools.tree, 1) == 1
    pools.check()


def test_nodes_whose_memory_rows_hold_are_passed_over():
    pools = Pools()
    pools.insert(seq((0, 32)))
    pools.tree.acquire(pools.match(seq((0, 33))))
    assert evict(pools.tree, 1) == 0
    assert pools.match(seq((0, 33))).hit_len == 32
    pools.check()


def test_shared_pages_do_not_keep_each_other_from_eviction():
    pools = Pools(page_tokens=64, needs_slots=False)
    pools.insert(seq((0, 16)))
    pools.insert(seq((0, 24)))
    node = pools.tree.promise("r", pools.tree.announce(np.array(seq((0, 24)))), 8)
    assert node is None and pools.tree.num_nodes == 2
    assert pools.tree.make_room(pools.frames.num_frames - 1)
    pools.check()


def test_a_disowned_checkpoint_becomes_its_rows_own():
    pools = Pools()
    pools.insert(seq((0, 16)))
    _, slot = pools.tree.acquire(pools.match(seq((0, 17))))
    assert pools.slots.holders(slot) == 2
    assert pools.tree.disown(slot) and pools.slots.holders(slot) == 1
    assert not pools.tree.disown(slot)
    assert pools.match(seq((0, 17))).hit_len == 0
    pools.check()


def test_a_promise_is_pending_for_others_until_filled():
    pools = Pools()
    tree = pools.tree
    end_node = tree.announce(np.array(seq((0, 50))))
    tree.promise("a", end_node, 24)
    tree.promise("a", end_node, 48)
    assert pools.match(seq((0, 50)), "b").pending.end == 48
    assert pools.match(seq((0, 48)), "b").pending.end == 24  # 48 would leave nothing to compute
    assert pools.match(seq((0, 50)), "a").pending is None
    pools.check()
    pools.insert(seq((0, 24)))
    match = pools.match(seq((0, 50)), "b")
    assert match.hit_len == 24 and match.pending.end == 48
    tree.withdraw("a")
    pools.check()
    assert pools.match(seq((0, 50)), "b").pending is None


def test_a_promise_below_the_hit_is_nothing_to_wait_for():
    pools = Pools()
    pools.insert(seq((0, 48)))
    pools.tree.promise("a", pools.tree.announce(np.array(seq((0, 50)))), 24)
    match = pools.match(seq((0, 50)), "b")
    assert (match.hit_len, match.pending) == (48, None)
    assert pools.match(seq((0, 40)), "b").pending.end == 24
    pools.check()


def test_withdrawn_promises_leave_no_boundaries():
    pools = Pools()
    end_node = pools.tree.announce(np.array(seq((0, 50))))
    pools.tree.promise("a", end_node, 24)
    assert pools.tree.num_nodes == 2
    pools.tree.withdraw("a")
    assert pools.tree.num_nodes == 1 and end_node.start == 0
    pools.check()


def test_without_recurrent_layers_a_longer_fill_keeps_every_promise_below_it():
    pools = Pools(needs_slots=False)
    end_node = pools.tree.announce(np.array(seq((0, 50))))
    pools.tree.promise("a", end_node, 24)
    pools.insert(seq((0, 48)))
    assert pools.match(seq((0, 50)), "b").pending is None
    assert pools.match(seq((0, 30))).hit_len == 24


def test_known_spans_are_bounded_and_the_oldest_go_first():
    pools = Pools(max_known_nodes=3)
    end_nodes = [pools.tree.announce(np.array(seq((100 * i, 10)))) for i in range(6)]
    assert pools.tree.num_known_nodes == 6  # all of them are waited for
    for end_node in end_nodes:
        pools.tree.conclude(end_node)
    assert pools.tree.num_known_nodes == 3
    assert pools.match(seq((500, 10))).match_len == 10
    assert pools.match(seq((0, 10))).match_len == 0
    tokens = Pools(max_known_tokens=25)
    for i in range(4):
        tokens.tree.conclude(tokens.tree.announce(np.array(seq((100 * i, 10)))))
    assert tokens.tree.num_known_tokens == 20
    tokens.check()
    pools.check()


def test_a_second_fill_keeps_what_stands():
    pools = Pools()
    node = pools.insert(seq((0, 32)))
    slot, pages = node.slots[ARENA], node.held[ARENA].pages.tolist()
    assert pools.insert(seq((0, 32))) is node
    assert (node.slots[ARENA], node.held[ARENA].pages.tolist()) == (slot, pages)
    assert pools.frames.num_held == 4


def test_a_revived_tombstone_resumes_again():
    pools = Pools(page_tokens=64)
    pools.insert(seq((0, 24)))
    pools.insert(seq((0, 64)))
    pools.insert(seq((0, 24), (100, 40)))
    (upper,) = pools.tree.root.children.values()
    pools.tree.disown(upper.slots[ARENA])
    assert pools.match(seq((0, 25))).hit_len == 0
    pools.insert(seq((0, 24)))
    assert pools.match(seq((0, 25))).hit_len == 24


def test_a_model_without_attention_caches_checkpoints_alone():
    pools = Pools(page_tokens=0)
    pools.insert(seq((0, 24)))
    pools.insert(seq((0, 48)))
    match = pools.match(seq((0, 50)))
    assert match.hit_len == 48
    assert pools.tree.acquire(match)[0].size == 0
    assert pools.match(seq((0, 30))).hit_len == 24
    assert pools.tree.make_room(pools.frames.num_frames - 3)
    pools.check()


def test_a_dropped_path_goes_up_to_what_is_kept_or_shared():
    pools = Pools()
    for tokens in (seq((0, 16)), seq((0, 48)), seq((0, 32), (100, 16))):
        pools.insert(tokens)
    pools.tree.drop_path(seq((0, 48), (200, 4)), 16)
    assert pools.match(seq((0, 49))).hit_len == 16
    assert pools.match(seq((0, 32), (100, 17))).hit_len == 48
    pools.tree.drop_path(seq((0, 32), (100, 16)), 16)
    assert pools.match(seq((0, 32), (100, 17))).hit_len == 16
    pools.tree.drop_path(seq((0, 16)), 0)
    assert pools.match(seq((0, 17))).hit_len == 0
    pools.tree.drop_path(seq((5, 9)), 0)
    pools.tree.check_invariants()
    assert pools.frames.num_held == 0


def test_dropping_a_path_leaves_alone_what_parts_from_it_before_what_is_kept():
    pools = Pools(page_tokens=8, needs_slots=False)
    pools.insert(seq((0, 40)))
    pools.tree.drop_path(seq((0, 8), (100, 30)), 16)  # the first 16 are not known
    pools.check()
    assert pools.match(seq((0, 41))).hit_len == 40


def test_dropping_a_path_keeps_its_first_tokens_inside_a_span():
    pools = Pools(page_tokens=8, needs_slots=False)
    pools.insert(seq((0, 40)))
    pools.tree.drop_path(seq((0, 40)), 16)
    pools.check()
    assert pools.match(seq((0, 41))).hit_len == 16


def test_reset_releases_everything():
    pools = Pools(page_tokens=64)
    pools.insert(seq((0, 24)))
    pools.insert(seq((0, 64)))
    end_node = pools.tree.announce(np.array(seq((0, 64), (5, 9))))
    pools.tree.promise("a", end_node, 72)
    pools.tree.reset()
    pools.check()
    assert pools.frames.num_held == 0 and pools.match(seq((0, 64))).match_len == 0
    pools.tree.withdraw("a")
    pools.tree.conclude(end_node)
    pools.check()


def test_counters_tell_hits_and_what_no_checkpoint_covered():
    pools = Pools()
    pools.insert(seq((0, 32)))
    pools.tree.acquire(pools.match(seq((0, 40))))
    pools.tree.acquire(pools.match(seq((0, 20), (7, 20))))
    counters = pools.tree.counters.as_dict()
    assert (counters["lookups"], counters["hits"], counters["hit_tokens"]) == (2, 1, 32)
    assert counters["cached_tokens"] == 52 and counters["token_hit_rate"] == 32 / 80


def test_fill_refuses_what_is_no_resume_point():
    pools = Pools()
    slot = pools.slots.allocate()
    with pytest.raises(
        ValueError, match="positive multiple of grain 8 with a checkpoint, got 12 tokens"
    ):
        pools.tree.fill(np.arange(12), pools.pages(12), slot)
    with pytest.raises(ValueError, match="got 16 tokens and slot 0x0"):
        pools.tree.fill(np.arange(16), pools.pages(16), 0)
    with pytest.raises(ValueError, match="32 tokens need 2 pages, got 1"):
        pools.tree.fill(np.arange(32), pools.pages(16), slot)
    assert pools.tree.num_nodes == 0


def test_the_picture_shows_spans_and_who_needs_them():
    pools = Pools()
    pools.insert(seq((0, 16)))
    end_node = pools.tree.announce(np.array(seq((0, 16), (50, 20))))
    pools.tree.promise("r1", end_node, 24)
    assert list(map(str, describe_tree(pools.tree.root))) == [
        "[0, 16) 0 1 2 3 4 5 ...: 1 page, checkpoint",
        "  [16, 24) 50 51 52 53 54 55 ...: known, promised by r1",
        "    [24, 36) 58 59 60 61 62 63 ...: known, awaited by 1",
    ]
    lines = describe_tree(pools.tree.root)
    assert [line.cached for line in lines] == [True, False, False]
    assert [line.resumes for line in lines] == [True, False, False]


@pytest.mark.parametrize(("a", "b", "expected"), [([], [1], 0), ([1, 2], [1, 2], 2), ([1, 2, 3], [1, 2], 2),
                                                  ([1, 2, 3], [1, 9, 3], 1), ([5], [6], 0)])  # fmt: skip
def test_common_prefix_len(a, b, expected):
    assert common_prefix_len(np.array(a, np.int32), np.array(b, np.int32)) == expected


@pytest.mark.parametrize(
    ("edge", "position", "expected"),
    [([], 0, 0), ([1, 2], 0, 2), ([2, 3], 1, 2), ([2, 3, 4], 1, 2), ([2, 9], 1, 1), ([1], 1, 0)],
)
def test_shared_len_counts_from_a_position_of_the_prompt(edge, position, expected):
    tokens = np.array([1, 2, 3], np.int32)
    assert shared_len(np.array(edge, np.int32), tokens, tokens.tobytes(), position) == expected


def test_a_long_edge_is_compared_without_a_python_loop():
    pools = Pools(needs_slots=False, num_frames=20000, page_tokens=16)
    tokens = np.arange(160_000, dtype=np.int32)
    pools.tree.announce(tokens)
    start = time.perf_counter()
    for _ in range(10):
        pools.tree.match(tokens)
    assert (time.perf_counter() - start) / 10 < 0.02


def test_prompts_that_wait_do_not_crowd_out_history():
    pools = Pools(max_known_nodes=4, max_known_tokens=100)
    pools.tree.conclude(pools.tree.announce(np.array(seq((0, 40)))))  # history
    end_nodes = [pools.tree.announce(np.array(seq((100 * i, 90)))) for i in range(1, 9)]
    assert pools.match(seq((0, 40))).match_len == 40
    for end_node in end_nodes:
        pools.tree.conclude(end_node)
    assert pools.match(seq((0, 40))).match_len == 0  # now they are history themselves
    pools.check()
