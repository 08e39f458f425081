"""Folds of records into states, as kinds with records do them where layers are made of Pallas kernels."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from hybrid_jax.engine import frames
from hybrid_jax.engine.kinds.columns_pallas import fold_columns
from hybrid_jax.engine.kinds.kind import FoldRows
from hybrid_jax.state import Model, State
from pallas_kernels.records import RecordSizes
from pallas_kernels.ssd_window import FoldFrames, fold_frames


def fold_records(
    state: State,
    group: int,
    rows: FoldRows,
    rates: jax.Array,
    model: Model,
    *,
    field: str,
    records: RecordSizes,
    scaled: bool,
) -> State:
    """Folds with two launches for all rows and layers.

    Args:
        rates: float32[L, M] of decay. field: the ring of the records. records, scaled: as `fold_frames` takes them.
    """
    own, ring = model.geometry.groups[group], state.rings[group]
    folds = rows.lengths(model.geometry.grain)
    read, write = (
        frames.slot_frames(state, slot)[:, own.first_frame :]
        for slot in (rows.read_slot, rows.write_slot)
    )
    exists = (rows.checkpoint > 0).astype(jnp.int32)
    arrays = FoldFrames(folds, ring[field], ring["dt"], rates, state.arena, read, write, exists)
    arena = fold_frames(
        arrays,
        records=records,
        per_layer=own.frames_per_layer,
        scaled=scaled,
        implementation="pallas",
    )
    return fold_columns(state.replace(arena=arena), group, rows, folds, model)
