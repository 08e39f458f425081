"""What kinds with records share where layers are made of Pallas kernels: projections and folds into states."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from hybrid_jax.engine import frames
from hybrid_jax.engine.mixers.columns_pallas import WithPallasColumns, fold_columns
from hybrid_jax.engine.mixers.mixer import CommitRows, FoldRows, Spec
from hybrid_jax.layers.cut import CutInput, MixerInput
from hybrid_jax.products.matrix import Out, product
from hybrid_jax.state import Model, State
from pallas_kernels.records import RecordSizes
from pallas_kernels.ssd_window import FoldFrames, fold_frames


class ReplayPallas(WithPallasColumns[Spec]):
    """What all kinds do with their records."""

    def commit(self, state: State, group: int, rows: CommitRows, model: Model) -> State:
        """Moves the records of a path together, too: all of them are read, then written."""
        state = super().commit(state, group, rows, model)
        if rows.path is None or rows.start is None:
            return state
        sources, targets, moves = rows.moves()
        own, rings = jnp.arange(len(sources))[:, None], dict(state.rings[group])
        sources = rows.start[:, None] + sources
        for name, ring in rings.items():
            if name != "conv":
                places = jnp.where(moves, rows.start[:, None] + targets, ring.shape[2])
                rings[name] = ring.at[:, own, places].set(ring[:, own, sources], mode="drop")
        return state.with_ring(group, **rings)


def projected_of(
    params: dict, h: MixerInput, *, out: Out = "whole"
) -> tuple[jax.Array | None, jax.Array]:
    """What has the gates in front, if they are needed, and what has the columns of all else; `out` as of `product`."""
    weights, bias = params["in_proj"], params.get("in_bias")
    if not isinstance(h, CutInput):
        projected = product(h, weights, bias, out=out)
        return projected, projected
    gates = None if h.own is None else product(h.own, weights, bias, out=out)
    return gates, h.projected


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
