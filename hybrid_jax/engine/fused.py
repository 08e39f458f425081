"""Recurrent layers of the steps on Pallas kernels, which read and write arena and rings where they lie.

`window.py`, `steps.py` and `blocks.py` hold the same steps for XLA, which writes rings at the end of a step and
states by slices, since it would copy them otherwise. Here a layer updates its ring where it computes.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from hybrid_jax.config import Mamba2, ModelConfig
from hybrid_jax.engine import blocks
from hybrid_jax.engine.blocks import Model
from hybrid_jax.geometry import Geometry
from hybrid_jax.layers import mamba2
from hybrid_jax.layers.linear import linear, linear_in_parts
from hybrid_jax.state import State
from pallas_kernels.causal_conv import Sizes, causal_conv, causal_conv_window
from pallas_kernels.causal_conv.kernel import why_unsupported as conv_unsupported
from pallas_kernels.gated_rmsnorm import gated_rmsnorm
from pallas_kernels.gated_rmsnorm.kernel import why_unsupported as norm_unsupported
from pallas_kernels.paged_attention.kernel import why_unsupported as attention_unsupported
from pallas_kernels.residual_rmsnorm.kernel import why_unsupported as residual_unsupported
from pallas_kernels.ring_io import store_columns, store_tail
from pallas_kernels.ssd_scan import ssd_scan_frames
from pallas_kernels.ssd_scan.kernel import why_unsupported as scan_unsupported
from pallas_kernels.ssd_scan.triton_scan import segment_tokens
from pallas_kernels.ssd_scan.triton_scan import why_unsupported as triton_unsupported
from pallas_kernels.ssd_window import fold_frames, ssd_window_rings
from pallas_kernels.ssd_window.kernel import why_unsupported as window_unsupported

PALLAS = {"implementation": "pallas"}
LARGEST_ERROR = 0.02  # of the norm, in the trial of the Triton kernels; they are off by 0.003, a wrong operand by 1


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


def why_unsupported(config: ModelConfig, geometry: Geometry, *, exact: bool) -> str | None:
    """Why the kernels cannot run a model's steps, or None."""
    reasons = [residual_unsupported(config.width)]
    if config.attention is not None:
        layout = blocks.page_layout(config.attention, geometry)
        reasons.append(attention_unsupported(layout))
    if config.mamba2 is not None:
        spec, sizes = config.mamba2, sizes_of(config.mamba2)
        reasons += [
            conv_unsupported(sizes, geometry.grain if exact else 1),
            scan_unsupported(sizes, geometry.dtype),
            window_unsupported(sizes, geometry.grain),
            norm_unsupported(spec.inner_size // spec.norm_groups),
        ]
    return next((reason for reason in reasons if reason is not None), None)


def why_not_triton(config: ModelConfig, geometry: Geometry, device: jax.Device) -> str | None:
    """Why chunks of prompts are scanned by the Pallas kernel and not by the Triton ones, or None."""
    if config.mamba2 is None:
        return "the model has no Mamba-2 layers"
    capability = str(getattr(device, "compute_capability", ""))
    if device.platform != "gpu" or not capability.startswith("9."):
        found = f"a GPU of {capability}" if capability else device.platform
        return f"needs a GPU of compute capability 9.0 (Hopper), found {found}"
    return triton_unsupported(sizes_of(config.mamba2), geometry.dtype)


def trial(config: ModelConfig, geometry: Geometry) -> str | None:
    """Why the Triton kernels fail on the device at hand although nothing speaks against them, or None.

    They scan a short row and one of two segments, and the numbers are compared with XLA's: so what is wrong with a
    driver, a compiler or a version of jax-triton is found here, and not by the first prompt.
    """
    spec = config.mamba2
    assert spec is not None, "a trial is for models with Mamba-2 layers"
    sizes, dtype = sizes_of(spec), jnp.dtype(geometry.dtype)
    # A table as wide as that of the steps: what is compiled for it serves them.
    frames = jnp.arange(geometry.state_frames, dtype=jnp.int32)[None] % geometry.frames_per_layer
    keys = jax.random.split(jax.random.key(0), 2)
    for tokens in (segment_tokens(spec.num_heads) + 65, 65):
        line = jnp.full(1, tokens, jnp.int32)
        given = {
            "read": frames,
            "write": frames,
            "exists": jnp.zeros(1, jnp.int32),
            "xBC": jax.random.normal(keys[0], (1, tokens, sizes.conv_size), dtype),
            "dt": jax.random.uniform(keys[1], (1, tokens, spec.num_heads), maxval=0.1),
            "A": -jnp.linspace(1, 16, spec.num_heads),
            "D": jnp.ones(spec.num_heads),
            "lengths": line,
            "state_lengths": line - 1,
        }

        want = _outputs_and_states(given, sizes, geometry, "xla")
        try:
            found = _outputs_and_states(given, sizes, geometry, "triton")
        except Exception as failed:  # whatever stops them, the Pallas kernel can do the same
            lines = str(failed).strip().splitlines() or [""]
            return f"they failed a trial: {type(failed).__name__}: {lines[0][:200]}"
        for name, a, b in zip(("outputs", "states"), found, want, strict=True):
            off = float(np.linalg.norm(a - b) / np.linalg.norm(b))
            if not off < LARGEST_ERROR:
                return f"they failed a trial: {name} of {tokens} tokens are off by {off:.2g} of their norm"
    return None


def _outputs_and_states(given: dict, sizes: Sizes, geometry: Geometry, implementation: str):
    """Of a scan over an arena of one layer's frames, in float32."""
    run = functools.partial(ssd_scan_frames, records=sizes, implementation=implementation)
    arena = jnp.zeros((geometry.frames_per_layer, geometry.frame_words), jnp.uint32)
    y, arena = jax.jit(run)(arena, **given)
    return np.asarray(y, np.float32), np.asarray(arena).view(np.float32)


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
