"""Convolution columns of several layers in the frames of a checkpoint."""

from __future__ import annotations

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from hybrid_jax.config import XLA, EngineConfig
from hybrid_jax.engine.frames import read_columns, write_columns
from hybrid_jax.engine.mixers.columns import WithColumns
from hybrid_jax.engine.mixers.columns_pallas import WithPallasColumns, fold_columns
from hybrid_jax.engine.mixers.mixer import FoldRows, LoadRows
from hybrid_jax.geometry import StateGroup, make_geometry
from hybrid_jax.kinds.kind import StateLayout
from hybrid_jax.state import Model, make_state, state_specs
from tests.tiny_models import tiny_model


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("num_layers", [1, 3, 5])
@pytest.mark.parametrize("frame_words", [96, 192, 720])
def test_each_layer_s_columns_come_back_wherever_a_frame_ends(frame_words, num_layers, rows):
    """Inside one frame, across frames, and in a later frame than the first."""
    layout = StateLayout(units=1, unit_words=16, columns=2, channels=72, records=())
    group = StateGroup(
        layout=layout,
        num_layers=num_layers,
        units_per_frame=1,
        first_frame=1,
        column_words=144,
        column_frames=-(-num_layers * 144 // frame_words),
    )
    geometry = SimpleNamespace(frame_words=frame_words, dtype="float32")
    model = SimpleNamespace(geometry=geometry, backend=XLA, activation_dtype=jnp.float32)
    count = 1 + group.num_frames
    rng = np.random.default_rng(0)
    frames = rng.permutation(np.arange(1, rows * count + 1)).reshape(rows, count)
    bits = rng.integers(0, 2**32, (num_layers, rows, 2, 72), np.uint32)
    arena = jnp.zeros((rows * count + 1, frame_words), jnp.uint32)
    frames = jnp.asarray(frames, jnp.int32)
    arena = write_columns(arena, frames, jnp.asarray(bits), group)
    for layer in range(num_layers):
        for exists in (True, False):
            given = (arena, frames, jnp.full(rows, exists), layer, group, model)
            np.testing.assert_array_equal(read_columns(*given), bits[layer] * exists)


@pytest.mark.parametrize("steps", [WithColumns, WithPallasColumns])
def test_a_kind_without_a_convolution_has_no_columns_to_move_load_or_fold(steps):
    config, _ = tiny_model("with_unknown_kind")
    geometry = make_geometry(config, EngineConfig(dtype="float32", max_rows=2))
    state = make_state(state_specs(geometry, num_frames=8, max_slots=2, max_rows=2))
    (number,) = [i for i, group in enumerate(geometry.groups) if group.layout.columns == 0]
    model, none = Model(config, geometry), jnp.zeros(2, jnp.int32)
    rows = LoadRows(none > 0, jnp.zeros((2, 4), jnp.int32), none > 0)
    assert steps().commit(state, number, none, model) is state
    assert steps().load(state, number, rows, model) == (state, [])
    if steps is WithPallasColumns:
        folds = FoldRows(none > 0, none, none, none)
        assert fold_columns(state, number, folds, none - 1, model) is state
