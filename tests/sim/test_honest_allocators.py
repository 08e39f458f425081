"""Allocators in honest use: sizes by hand, refusals that change nothing, invariants after every step."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_jax.sim.allocators.honest_allocators import make_honest
from hybrid_jax.sim.allocators.honest_arenas import Superblocks, TwoEnded
from hybrid_jax.sim.allocators.honest_frames import FramesMemory
from hybrid_jax.sim.allocators.honest_models import honest_model
from hybrid_jax.sim.allocators.honest_units import AvmpMemory, padded_unified, vllm_big_block
from tests.sim.tiny import MODEL

A, B, C = range(3)
GIB = 1 << 30

# --- frames ---------------------------------------------------------------------------------------


def test_pages_and_checkpoints_take_frames_of_one_pool():
    memory = FramesMemory(MODEL, 200)  # ten frames
    assert memory.admit(A, 9)  # three pages, and three frames of a checkpoint
    assert (memory.used_bytes, memory.holds(A)) == (120, (12, True))
    assert not memory.admit(B, 5) and memory.used_bytes == 120
    assert memory.admit(B, 4) and memory.used_bytes == 200
    assert not memory.grow(B, 5) and memory.holds(B) == (4, True)
    memory.release(A)
    assert memory.grow(B, 5) and memory.holds(A) == (0, False)
    memory.release(B)
    assert memory.used_bytes == 0
    memory.check_invariants()


def test_a_request_alone_may_take_every_frame():
    memory = FramesMemory(MODEL, 200)
    assert memory.fits_alone(28) and not memory.fits_alone(29)


def test_a_sole_holder_folds_in_place():
    memory = FramesMemory(MODEL, 400)
    memory.admit(A, 17)  # checkpoints at 8 and 16
    assert memory.counters.folds_in_place == 2
    assert memory.grow(A, 24) and memory.counters.folds_in_place == 2
    assert memory.grow(A, 25) and memory.counters.folds_in_place == 3
    assert memory.counters.folds_to_new == 0


def test_a_shared_checkpoint_is_folded_to_new_frames_once():
    memory = FramesMemory(MODEL, 400)
    memory.admit(A, 8)
    handle = memory.share(A)
    used = memory.used_bytes
    assert memory.grow(A, 25)
    assert (memory.counters.folds_to_new, memory.counters.folds_in_place) == (1, 2)
    assert memory.used_bytes == used + 60 + 5 * 20  # a checkpoint and five pages
    memory.unshare(handle)
    assert memory.used_bytes == used + 5 * 20
    memory.check_invariants()


def test_a_fold_to_new_frames_waits_for_them():
    memory = FramesMemory(MODEL, 160)  # eight frames: two pages and two checkpoints
    memory.admit(A, 8)
    handle = memory.share(A)
    assert not memory.grow(A, 9)  # the third page fits, a second checkpoint beside it does not
    memory.unshare(handle)
    assert memory.grow(A, 9) and memory.counters.folds_to_new == 0


def test_rows_take_their_rings_and_tables_out_of_the_pool():
    memory = FramesMemory(
        MODEL, 200, rows=2
    )  # three rings of 22 bytes; a frame and its entry take 24
    assert memory.num_frames == 5
    assert memory.reserved_bytes + memory.row_bytes(1) <= 200 + 20 + 12  # the sink, slot 0
    assert memory.admit(A, 1) and not memory.admit(B, 1)
    memory = FramesMemory(MODEL, 1000, rows=1)
    assert memory.admit(A, 1) and not memory.admit(B, 1)


def test_a_pool_without_room_for_one_request_is_refused():
    with pytest.raises(
        ValueError, match="^pool-sim: frames: 60 bytes must hold 4 frames of 20 bytes"
    ):
        FramesMemory(MODEL, 60)


@pytest.mark.parametrize(
    ("name", "page_tokens", "groups", "state_frames", "padding"),
    [
        ("jamba_1_5_mini", 16, 1, 28, 0),
        ("mamba2_1b3", 16, 1, 224, 0),
        ("nemotron_h_8b", 16, 1, 390, 0.0010),
        ("qwen3_next_80b", 32, 3, 295, 0.0008),
        ("bamba_9b", 64, 3, 470, 0.0008),
        ("granite_4_h_small", 16, 1, 583, 0.0001),
        ("paper_7b_float32", 16, 4, 195, 0.0031),
    ],
)
def test_the_engines_geometry_of_real_models(name, page_tokens, groups, state_frames, padding):
    model = honest_model(name)
    frames = model.frames
    assert frames.frame_bytes == 256 * 1024
    assert (frames.page_tokens, frames.frames_per_page) == (page_tokens, groups)
    assert frames.state_frames == state_frames
    assert 1 - model.state_bytes / model.slot_bytes == pytest.approx(padding, abs=5e-5)
    page = frames.frames_per_page * frames.frame_bytes
    assert page == frames.page_tokens * model.token_bytes  # no padding at all


def test_a_mamba1_model_has_frames_of_its_own_state(tmp_path):
    path = tmp_path / "jamba.toml"
    path.write_text(
        "width = 4096\n"
        "[[blocks]]\ncount = 4\nattention = { num_heads = 32, num_kv_heads = 8, head_dim = 128 }\n"
        "[[blocks]]\ncount = 28\nmamba1 = { inner_size = 8192, state_size = 16, dt_rank = 256 }\n"
    )
    model = honest_model(str(path))
    assert model.state_bytes == 28 * (512 + 48) * 1024
    assert model.slot_bytes == 62 * 256 * 1024


# --- units ----------------------------------------------------------------------------------------


def test_padded_pages_are_as_large_as_a_state():
    memory = padded_unified(MODEL, 300)  # ten of 30 bytes
    assert memory.admit(A, 5) and memory.used_bytes == 6 * 30  # two layers of two pages, two states
    assert not memory.grow(A, 17) and memory.grow(A, 16)
    assert memory.slot_bytes == 60


def test_vllm_raises_the_block_to_the_state():
    memory = vllm_big_block(MODEL, 300)  # blocks of 12 tokens, 60 bytes in both layers
    assert (memory.step_tokens, memory.state_units, memory.slot_bytes) == (12, 1, 60)
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
    memory = vllm_big_block(honest_model(name), 8 * GIB)
    assert (memory.prefix_tokens, memory.state_units) == (tokens, states)


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
    assert memory.grow(B, 12) and memory.counters.copies == 0  # a hole, and 20 of the gap
    assert memory.grow(B, 28)  # 80 of 40: B's state moves to its end
    assert (memory.counters.copies, memory.counters.copied_bytes) == (1, 60)
    assert memory.holds(B) == (28, True) and memory.used_bytes == 200
    memory.check_invariants()


# --- all of them ----------------------------------------------------------------------------------

MAKERS = {
    "superblocks": lambda: Superblocks(MODEL, 480, 60),
} | {
    name: lambda name=name: make_honest(name, MODEL, 480)
    for name in (
        *("frames", "frames:3", "frames@2", "frames_rings", "frames_records", "frames_raw@4"),
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
        if hasattr(memory, "check_invariants"):
            memory.check_invariants()
    for request in held:
        memory.release(request)
    assert memory.used_bytes == 0
