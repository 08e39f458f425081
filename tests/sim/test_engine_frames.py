"""The engine's scheduler at a token a tick: its rules by hand, memory that adds up in every tick, and sizes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.pools.engine_frames import EngineFrames, SchedulerRun
from benchmarks.pools.model_sizes import model_sizes
from benchmarks.pools.names import make_run
from benchmarks.pools.rivals import ideal
from tests.sim.tiny import MODEL, pool_load

# Frames of 20 bytes: a page of four tokens takes one, a state three, once a request is past eight tokens.


def run(num_frames, *requests, **options):
    pool = EngineFrames(MODEL, num_frames * 20, **options)
    made = SchedulerRun(pool_load(*requests), pool, MODEL)
    found = made.run(name="own", pool_bytes=num_frames * 20)
    made.scheduler.check_invariants()
    assert (found.hollow, found.leaked_bytes) == (0, 0)
    return found


def test_a_request_alone_may_take_every_frame():
    found = run(10, (28, 1, 0))  # seven pages and a checkpoint
    assert (found.completed, found.makespan, found.mean_latency) == (1, 29, 29)
    assert run(10, (29, 1, 0)).infeasible == 1


def test_pages_and_checkpoints_take_frames_of_one_pool():
    # A has three pages and a checkpoint, B needs as many; 13 frames hold both and B's page in reserve, 12 do not.
    assert run(13, (9, 3, 0), (9, 3, 1)).makespan == 1 + 12
    assert run(12, (9, 3, 0), (9, 3, 1)).makespan == 12 + 12


def test_a_request_that_never_folds_has_no_checkpoint():
    assert run(6, (4, 5, 0), (4, 5, 0)).makespan == 9
    assert run(6, (4, 6, 0), (4, 6, 0)).makespan == 10 + 10


def test_a_preempted_request_keeps_its_tokens_and_needs_memory_for_them():
    # Both have three pages and a checkpoint, one frame is free. At 5 A takes it with its 13th token; at 7 B finds none
    # and goes, with 12 tokens. It could come back for them once five pages and a checkpoint are free.
    found = run(13, (12, 8, 0), (12, 8, 2))
    assert (found.preempted, found.recomputed_tokens) == (1, 13)
    assert found.makespan == 20 + 20


def test_the_scheduler_folds_in_place():
    found = run(20, (12, 18, 0))  # the prompt leaves a checkpoint at 8; folds with tokens 17 and 25
    assert (found.folds_in_place, found.folds_to_new) == (2, 0)
    found = run(20, (4, 26, 0))  # the first fold makes the first checkpoint
    assert (found.folds_in_place, found.folds_to_new) == (2, 1)


def test_rows_take_their_rings_and_tables_out_of_the_pool():
    # Three rings of 22 bytes; a frame and its entry take 24.
    pool = EngineFrames(MODEL, 200, rows=2)
    assert pool.num_frames == 5
    assert pool.reserved_bytes + pool.row_bytes(1) <= 200 + 20 + 12  # the sink, slot 0
    requests = [(4, 4, 0)] * 3
    assert run(50, *requests).most_running == 3
    assert [run(50, *requests, rows=rows).most_running for rows in (1, 2)] == [1, 2]


def test_a_pool_without_room_for_one_request_is_refused():
    message = "^pool-sim: frames: 60 bytes must hold 4 frames of 20 bytes"
    with pytest.raises(ValueError, match=message):
        EngineFrames(MODEL, 60)


# --- any requests ---------------------------------------------------------------------------------

REQUESTS = st.lists(
    st.tuples(st.integers(1, 30), st.integers(1, 30), st.integers(0, 20)), min_size=1, max_size=12
)


class CheckedRun(SchedulerRun):
    """Recounts all memory after every turn."""

    def turn(self, departing, growing, arriving):
        super().turn(departing, growing, arriving)
        self.scheduler.check_invariants()
        for request, sequence in self.rows.items():
            pages = len(sequence.held.pages) * 4
            assert pages >= max(self.known[request], self.tick - self.since[request])


@given(requests=REQUESTS, num_frames=st.integers(4, 40), grain=st.sampled_from((1, 2, 4, 8)))
@settings(max_examples=150, deadline=None)
def test_everyone_completes_or_is_refused_and_memory_adds_up(requests, num_frames, grain):
    model = MODEL.at_grain(grain)
    pool = EngineFrames(model, num_frames * 20)
    found = CheckedRun(pool_load(*requests), pool, model).run(
        name="own", pool_bytes=num_frames * 20
    )
    frames = lambda tokens: -(-tokens // 4) + 3 * (tokens > grain)
    refused = [r for r in requests if frames(r[0] + r[1] - 1) > num_frames]
    assert (found.infeasible, found.completed) == (len(refused), len(requests) - len(refused))
    assert (found.hollow, found.leaked_bytes) == (0, 0)


@given(requests=REQUESTS)
@settings(max_examples=50, deadline=None)
def test_with_memory_for_all_it_is_the_ideal(requests):
    found, expected = run(1000, *requests), ideal(MODEL, 20_000, step_tokens=4)
    expected = make_run(pool_load(*requests), expected, MODEL).run(name="own", pool_bytes=20_000)
    for name in (
        "completed",
        "makespan",
        "mean_latency",
        "mean_running",
        "most_running",
        "preempted",
    ):
        assert getattr(found, name) == getattr(expected, name)


# --- sizes ----------------------------------------------------------------------------------------


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
    model = model_sizes(name)
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
    model = model_sizes(str(path))
    assert model.state_bytes == 28 * (512 + 48) * 1024
    assert model.slot_bytes == 62 * 256 * 1024


def test_a_model_with_columns_alone_has_rings_of_them(tmp_path):
    path = tmp_path / "convolutions.toml"
    path.write_text(
        "width = 2048\n"
        "[[blocks]]\ncount = 6\nattention = { num_heads = 32, num_kv_heads = 8, head_dim = 64 }\n"
        "[[blocks]]\ncount = 10\nshort_conv = { size = 2048, conv_width = 3 }\n"
    )
    model = model_sizes(str(path))
    assert model.state_bytes == 10 * 2 * 2048 * 2
    # Two before a window of one token, and its own.
    assert model.column_bytes == 10 * 3 * 2048 * 2
    assert model.record_bytes == 0
