"""Recurrent layers of the steps on Pallas kernels, which read and write arena and rings where they lie.

`window.py`, `chunk.py` and `blocks.py` hold the same steps for XLA, which writes rings at the end of a step and
states by slices, since it would copy them otherwise. Here a layer updates its ring where it computes.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from hybrid_jax.config import Mamba2
from hybrid_jax.engine import blocks
from hybrid_jax.engine.blocks import Model
from hybrid_jax.layers import mamba2
from hybrid_jax.layers.linear import linear, linear_in_parts
from hybrid_jax.state import State
from pallas_kernels.causal_conv import Sizes, causal_conv, causal_conv_window
from pallas_kernels.gated_rmsnorm import gated_rmsnorm
from pallas_kernels.ring_io import store_columns, store_tail
from pallas_kernels.ssd_scan import ssd_scan_frames
from pallas_kernels.ssd_window import fold_frames, ssd_window_rings

PALLAS = {"implementation": "pallas"}


def sizes_of(spec: Mamba2) -> Sizes:
    """How the mixer's projections, records and states lie in memory."""
    return Sizes(
        num_heads=spec.num_heads,
        head_dim=spec.head_dim,
        num_groups=spec.num_groups,
        state_size=spec.state_size,
        conv_width=spec.conv_width,
        dt_limits=spec.dt_limits,
    )


def mix_window(
    params: dict,
    h: jax.Array,
    state: State,
    rows,
    frames: jax.Array,
    exists: jax.Array,
    rates: jax.Array,
    layer: int,
    spec: Mamba2,
    model: Model,
) -> tuple[jax.Array, State]:
    """One Mamba-2 layer of a window: its outputs [B, T, D] or parts of them, and the state with its ring moved on.

    Args:
        h: [B, T, D] normed inputs. rows: `window.WindowRows`.
        frames: int32[B, F] of the checkpoints; exists: int32[B], 0 where the state is zero.
        rates: float32[L, M] decay rates of all layers.
    """
    sizes = sizes_of(spec)
    projected = linear_in_parts(h, params["in_proj"], params.get("in_bias"))
    here = {
        "starts": rows.base - rows.checkpoint,
        "num_valid": jnp.maximum(rows.end - rows.base, 0),
    }
    conv, xB, dt, C, scores = causal_conv_window(
        *(projected, params["conv"], params.get("conv_bias"), params["dt_bias"]),
        *(state.conv, state.xB, state.dt),
        layer=layer,
        sizes=sizes,
        first=jnp.maximum(rows.begin - rows.base, 0),
        **here,
        **PALLAS,
    )
    y = ssd_window_rings(
        *(state.arena, frames, exists, xB, dt, rates, C),
        layer=layer,
        first_frame=layer * model.geometry.frames_per_layer,
        records=sizes,
        D=params["D"],
        scores=scores,
        dtype=h.dtype,
        **here,
        **PALLAS,
    )
    return output(params, y, projected, spec), state.replace(conv=conv, xB=xB, dt=dt)


def mix_chunk(
    params: dict,
    h: jax.Array,
    state: State,
    read: jax.Array,
    write: jax.Array,
    row: jax.Array,
    exists: jax.Array,
    length: jax.Array,
    state_len: jax.Array,
    layer: int,
    spec: Mamba2,
    model: Model,
) -> tuple[jax.Array, State]:
    """One Mamba-2 layer of prompt chunks: its outputs [B, T, D], or parts of them, and the state with checkpoint and
    ring written.

    Args:
        h: [B, T, D] normed inputs. read, write: int32[B, F] frames of the checkpoints before and after.
        row: int32[B] ring rows. exists: bool[B], false where the first state is zero.
        length, state_len: int32[B] tokens that exist, and those the checkpoint after covers.
    """
    geometry, sizes = model.geometry, sizes_of(spec)
    projected = linear(h, params["in_proj"], params.get("in_bias"))
    history = blocks.read_layer_conv(state.arena, read, exists, layer, model)
    xBC, dt = causal_conv(
        *(projected, history, params["conv"], params.get("conv_bias"), params["dt_bias"], length),
        sizes=sizes,
        **PALLAS,
    )
    y, arena = ssd_scan_frames(
        *(state.arena, read, write, exists.astype(jnp.int32), xBC, dt, mamba2.decay_rates(params)),
        records=sizes,
        first_frame=layer * geometry.frames_per_layer,
        lengths=length,
        state_lengths=state_len,
        D=params["D"],
        implementation=model.scan,
    )
    arena, conv, ring_xB, ring_dt = store_tail(
        *(arena, state.conv, state.xB, state.dt, projected, history, xBC, dt),
        *(write[:, -geometry.conv_frames :], row, length, state_len),
        layer=layer,
        sizes=sizes,
        **PALLAS,
    )
    state = state.replace(arena=arena, conv=conv, xB=ring_xB, dt=ring_dt)
    return output(params, y, projected, spec), state


def output(params: dict, y: jax.Array, projected: jax.Array, spec: Mamba2) -> jax.Array:
    """Gated norm of y [B, T, ...], its D skip included, by the gates in front of `projected`; and out_proj. Both
    products may be parts."""
    y = y.reshape(*y.shape[:2], -1)
    y = gated_rmsnorm(
        *(y, projected, params["norm"]), eps=spec.norm_eps, groups=spec.norm_groups, **PALLAS
    )
    return linear_in_parts(y, params["out_proj"], params.get("out_bias"))


def fold_rows(
    state: State,
    needed: jax.Array,
    checkpoint: jax.Array,
    read_slot: jax.Array,
    write_slot: jax.Array,
    rates: jax.Array,
    model: Model,
) -> State:
    """`blocks.fold_rows` in two launches for all rows and layers."""
    geometry, spec = model.geometry, model.config.mamba2
    folds = jnp.where(needed, geometry.grain, -1).astype(jnp.int32)
    read, write = (blocks.slot_frames(state, slot) for slot in (read_slot, write_slot))
    arena = fold_frames(
        *(state.arena, read, write, (checkpoint > 0).astype(jnp.int32), folds),
        *(state.xB, state.dt, rates),
        records=sizes_of(spec),
        per_layer=geometry.frames_per_layer,
        **PALLAS,
    )
    arena = store_columns(
        *(arena, write[:, -geometry.conv_frames :], folds, state.conv),
        columns=spec.conv_width - 1,
        **PALLAS,
    )
    return state.replace(arena=arena)
