"""Memory of other designs: sizes by hand, refusals that change nothing, invariants after every step."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.pools.model_sizes import model_sizes
from benchmarks.pools.names import make_memory
from benchmarks.pools.rivals import (
    AvmpMemory,
    Superblocks,
    TwoEnded,
    padded_unified,
    vllm_big_block,
)
from tests.sim.tiny import MODEL

A, B, C = range(3)
GIB = 1 << 30

# --- units ----------------------------------------------------------------------------------------


def test_padded_pages_are_as_large_as_a_state():
    memory = padded_unified(MODEL, 300)  # ten of 30 bytes
    assert memory.admit(A, 5) and memory.used_bytes == 6 * 30  # two layers of two pages, two states
    assert not memory.grow(A, 17) and memory.grow(A, 16)
    assert memory.slot_bytes == 60


def test_vllm_raises_the_block_to_the_state():
    memory = vllm_big_block(MODEL, 300)  # blocks of 12 tokens, 60 bytes in both layers
    assert (memory.step_tokens, memory.slot_bytes) == (12, 60)
    assert memory.admit(A, 12) and memory.used_bytes == 120
    assert memory.grow(A, 13) and memory.used_bytes == 180


@pytest.mark.parametrize(
    ("name", "tokens", "states"),
    [
        ("nemotron_h_8b", 1040, 6),
        ("qwen3_next_80b", 1056, 3),
        ("bamba_9b", 1040, 10),
        ("granite_4_h_small", 1040, 9),
    ],
)
def test_blocks_that_vllm_needs_for_real_models(name, tokens, states):
    memory = vllm_big_block(model_sizes(name), 8 * GIB)
    assert memory.prefix_tokens == tokens and memory.slot_bytes == states * memory.unit_bytes[0]


def test_avmp_refuses_where_it_would_evict():
    memory = AvmpMemory(MODEL, 120, 0.5)  # six pages, two states
    assert memory.admit(A, 4)
    assert not memory.admit(B, 4)
    assert memory.holds(A) == (4, True) and memory.avmp.counters.evictions == 0


def test_avmp_still_moves_capacity():
    memory = AvmpMemory(MODEL, 240, 0.5, 1)  # twelve pages, four states
    assert memory.admit(A, 25)  # fourteen pages: one of the free states becomes three
    assert memory.counters.rebalances == 1 and memory.counters.migrated_bytes == 30
    memory.release(A)
    assert memory.used_bytes == 0 and memory.reserved_bytes == 480


def test_avmp_moves_nothing_that_is_in_use():
    memory = AvmpMemory(MODEL, 120, 0.5, 1)
    memory.admit(A, 4)
    assert not memory.grow(A, 16) and memory.counters.rebalances_refused == 1
    assert memory.holds(A) == (4, True)


# --- superblocks, two ends ------------------------------------------------------------------------


def test_a_block_is_of_one_kind_until_it_is_empty():
    memory = Superblocks(MODEL, 180, 60)  # three blocks, of six pages or two states
    assert memory.admit(A, 4) and memory.used_bytes == 120
    assert memory.admit(B, 4) and memory.used_bytes == 180
    assert not memory.admit(C, 4)  # two pages fit in the block of pages, states do not
    memory.release(A)
    assert memory.used_bytes == 120 and memory.admit(C, 4)
    memory.check_invariants()


def test_a_block_that_holds_no_state_serves_nobody():
    memory = Superblocks(MODEL, 200, 25)
    assert not memory.fits_alone(1)


def test_what_is_in_the_way_is_moved_and_counted():
    memory = TwoEnded(MODEL, 220)  # pages of 20 bytes, states of 60
    assert memory.admit(A, 4) and memory.admit(B, 4)  # pages 0 and 1, states 0 and 1; gap 60
    memory.release(A)  # page 0 and state 0 are holes
    assert memory.grow(B, 12) and memory.counters.copied_bytes == 0  # a hole, and 20 of the gap
    assert memory.grow(B, 28)  # 80 of 40: B's state moves to its end
    assert memory.counters.copied_bytes == 60
    assert memory.holds(B) == (28, True) and memory.used_bytes == 200
    memory.check_invariants()


# --- all of them ----------------------------------------------------------------------------------

MAKERS = {
    "superblocks": lambda: Superblocks(MODEL, 480, 60),
} | {
    name: lambda name=name: make_memory(name, MODEL, 480)
    for name in (
        *("frames_rings", "frames_records", "frames_raw@4"),
        *("two_ended", "padded_unified", "vllm_big_block", "ideal"),
        *("fixed_dual_mr05", "avmp_static_mr05", "avmp_dynamic_b3"),
    )
}
STEP = st.tuples(
    st.sampled_from(("admit", "grow", "release")), st.integers(0, 4), st.integers(1, 20)
)


@pytest.mark.parametrize("kind", MAKERS)
@given(steps=st.lists(STEP, max_size=40))
@settings(max_examples=40, deadline=None)
def test_who_is_refused_keeps_what_it_has_and_nobody_else_loses(kind, steps):
    memory, held = MAKERS[kind](), {}
    for action, request, tokens in steps:
        before = memory.used_bytes
        if action == "admit" and request not in held:
            if memory.admit(request, tokens):
                held[request] = tokens
            else:
                assert memory.used_bytes == before
        elif action == "grow" and request in held:
            if memory.grow(request, held[request] + tokens):
                held[request] += tokens
        elif action == "release" and held.pop(request, None):
            memory.release(request)
        for other, least in held.items():
            found, has_state = memory.holds(other)
            assert has_state and found >= least
        assert memory.used_bytes <= 480
        memory.check_invariants()
    for request in held:
        memory.release(request)
    assert memory.used_bytes == 0
