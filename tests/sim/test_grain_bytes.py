"""Bytes of a decoded token by the length of the rings, by hand."""

from __future__ import annotations

import pytest

from benchmarks.memory import grain_bytes
from benchmarks.memory.grain_bytes import overwriting_traffic, ring_traffic, split_state
from benchmarks.pools.model_sizes import model_sizes
from tests.sim.tiny import MODEL

# Two layers with a word of columns each: of a state of 60 bytes 8 are columns. A record has 2, raw 4; a window 6.


@pytest.mark.parametrize(
    ("length", "in_window", "raw", "expected"),
    [
        # State; records read (one to four, and four by the fold) and written; columns; a quarter of a fold.
        (4, False, False, 52 + (2.5 * 2 + 2 + 2) + (8 + 6) + 2 * 60 / 4),
        (4, True, False, 52 + (2.5 * 2 + 2 + 2) + (8 + 6) + 60 / 4),
        (4, True, True, 52 + (2.5 * 4 + 4 + 4) + 8 + 60 / 4),
        (1, False, False, 52 + 3 * 2 + (8 + 6) + 2 * 60),
    ],
)
def test_a_token_moves_what_its_window_reads_and_its_share_of_a_fold(
    length, in_window, raw, expected
):
    assert ring_traffic(MODEL, length, folds_in_window=in_window, raw=raw) == expected


def test_overwriting_reads_and_writes_the_state():
    assert overwriting_traffic(MODEL) == 2 * 60


def test_states_and_columns_of_a_real_model():
    state, columns = split_state(model_sizes("nemotron_h_8b"))
    assert state == 24 * 128 * 64 * 128 * 4 and columns == 24 * 3 * 10240 * 2


def test_the_whole_step_counts_the_weights_of_dense_models():
    model = model_sizes("nemotron_h_8b")
    weights = 24 * (4096 * (8192 + 10240 + 128) + 8192 * 4096 + 10240 * 5 + 3 * 128 + 8192)
    weights += 24 * 2 * 4096 * 21504 + 4 * (4096 * (32 + 8 + 8) * 128 + 32 * 128 * 4096)
    expected = 2 * weights / grain_bytes.ROWS + grain_bytes.CONTEXT * model.token_bytes
    assert grain_bytes.other_bytes("nemotron_h_8b", model) == pytest.approx(expected, rel=1e-9)
    assert grain_bytes.other_bytes("qwen3_next_80b", model_sizes("qwen3_next_80b")) is None


def test_every_geometry_has_every_length():
    rows = grain_bytes.rows()
    lengths, kinds = len(grain_bytes.LENGTHS), len(grain_bytes.KINDS)
    assert len(rows) == len(grain_bytes.MODELS) * (lengths * kinds + 1)
    assert all(
        row["over_32"] == 1 for row in rows if (row["tokens"], row["kind"]) == (32, "engine")
    )
    assert len(grain_bytes.markdown().splitlines()) == 2 + len(grain_bytes.MODELS) * (lengths + 1)
