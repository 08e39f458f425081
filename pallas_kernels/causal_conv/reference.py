"""The definitions: every output from the last W columns on its token's path."""

from __future__ import annotations

import functools
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import BITS, FLOAT32, FLOATS, INTS
from pallas_kernels.dispatch import HIGHEST
from pallas_kernels.operands import floats, stored, summed
from pallas_kernels.records import ProjectionLayout

LENGTH_EPS = 1e-6  # under the root of the length of k and q


class Chunk(NamedTuple):
    """Arrays of `api.causal_conv`."""

    projected: Annotated[jax.Array, FLOATS, "B T columns"]
    history: Annotated[jax.Array, FLOATS + BITS, "B before E"]
    weight: Annotated[jax.Array, FLOATS, "W E"]
    bias: Annotated[jax.Array | None, FLOATS, "None E"]
    dt_bias: Annotated[jax.Array, FLOATS, "M"]
    lengths: Annotated[jax.Array, INTS, "B"]


class ConvWindow(NamedTuple):
    """Arrays of `api.causal_conv_window`.

    Attributes:
        projected: as in `api.causal_conv`, or parts float32[S, B, T, ...] of that product, whose sum counts in the
            dtype of `weight`.
        weight, bias, dt_bias: as in `api.causal_conv`.
        xB: [L, B', S, M P + G R] records, as floats or bits; of a gated delta net u and k.
        dt: float32[L, B', S, M] step sizes.
        conv: [L, B', W - 1 + T', E] raw columns, B' >= B and T' >= T: the W - 1 before the window, then those of its
            tokens; floats, or their bits as unsigned integers.
        starts: int32[B] slot of each row's token 0; starts + num_valid is at most S.
        first: int32[B] leading tokens that the rings hold already.
        num_valid: int32[B] tokens that exist; at most T.
        ancestors: int32[B, T] of a tree of tokens, as in `ssd_window.WindowFrames`; None for a chain.
    """

    projected: Annotated[jax.Array, FLOATS, "parts? B T columns"]
    weight: Annotated[jax.Array, FLOATS, "W E"]
    bias: Annotated[jax.Array | None, FLOATS, "None E"]
    dt_bias: Annotated[jax.Array, FLOATS, "M"]
    xB: Annotated[jax.Array, FLOATS + BITS, "L rows S record"]
    dt: Annotated[jax.Array, FLOAT32, "L rows S M"]
    conv: Annotated[jax.Array, FLOATS + BITS, "L rows C E"]
    starts: Annotated[jax.Array, INTS, "B"]
    first: Annotated[jax.Array, INTS, "B"]
    num_valid: Annotated[jax.Array, INTS, "B"]
    ancestors: Annotated[jax.Array | None, INTS, "None B T"] = None


def tap_places(paths: jax.Array, history: int) -> jax.Array:
    """int32[..., T, W]: the last W columns of each token's path.

    Args:
        paths: bool[..., T, T] the tokens of each token's path, itself included. history: W - 1 columns before them.
    """
    tokens = paths.shape[-1]
    before = jnp.ones((*paths.shape[:-1], history), bool)
    on_path = jnp.concatenate([before, paths], axis=-1)
    # What is not on the path sorts to the front.
    return jnp.sort(jnp.where(on_path, jnp.arange(history + tokens), -1))[..., -history - 1 :]


def convolved(taps: jax.Array, weight: jax.Array, bias: jax.Array | None) -> jax.Array:
    """Raw columns [..., W, E], the token's own last, to outputs [..., E]."""
    y = jnp.einsum(
        "...we,we->...e", taps.astype(jnp.float32), weight.astype(jnp.float32), precision=HIGHEST
    )
    if bias is not None:
        y = y + bias.astype(jnp.float32)
    return (y * jax.nn.sigmoid(y)).astype(taps.dtype)


def step_sizes(dt: jax.Array, dt_bias: jax.Array, layout: ProjectionLayout) -> jax.Array:
    """What in_proj gave [..., M] to step sizes float32[..., M]."""
    dt = dt.astype(jnp.float32) + dt_bias.astype(jnp.float32)
    return jnp.clip(jnp.logaddexp(dt, 0.0), *layout.dt_limits)


def of_length_one(x: jax.Array) -> jax.Array:
    """float32 of x [..., R], scaled to length 1; in kernels too."""
    wide = x.astype(jnp.float32)
    return wide * jax.lax.rsqrt(jnp.sum(wide * wide, axis=-1, keepdims=True) + LENGTH_EPS)


def causal_conv_reference(arrays: Chunk, *, layout: ProjectionLayout):
    """See `api.causal_conv`."""
    projected, history, weight, bias, dt_bias, lengths = arrays
    valid = (jnp.arange(projected.shape[1]) < lengths[:, None])[..., None]
    raw, dt = layout.split(jnp.where(valid, projected, 0))
    columns = jnp.concatenate([floats(history).astype(raw.dtype), raw], axis=1)
    places = jnp.arange(projected.shape[1])[:, None] + jnp.arange(layout.conv_width)
    y = convolved(columns[:, places], weight, bias)
    return jnp.where(valid, y, 0), jnp.where(valid, step_sizes(dt, dt_bias, layout), 0)


def causal_conv_window_reference(
    arrays: ConvWindow, *, layer: int, layout: ProjectionLayout, moves: bool = True
):
    """See `api.causal_conv_window`: each row by itself."""
    projected, weight, _, _, xB, dt, conv, starts, first, num_valid, ancestors = arrays
    projected = summed(projected, 3, weight.dtype)
    rows, tokens, _ = projected.shape
    token = jnp.arange(tokens)
    if ancestors is None:
        paths = jnp.broadcast_to(token <= token[:, None], (rows, tokens, tokens))
    else:
        paths = (ancestors[:, :, None] >> token) & 1 > 0
    one = functools.partial(_row, arrays, layout, moves)
    old = (conv[layer, :rows], xB[layer, :rows], dt[layer, :rows])
    new, *made = jax.vmap(one)((projected, *old, starts, first, num_valid, paths))
    conv, xB, dt = (
        ring.at[layer, :rows].set(x) for ring, x in zip((conv, xB, dt), new, strict=True)
    )
    return conv, xB, dt, *made


def _row(arrays: ConvWindow, layout: ProjectionLayout, moves: bool, row: tuple):
    """One row: projected [T, .], conv [W - 1 + T', E], xB [S, .], dt [S, M], three numbers, paths bool[T, T]."""
    projected, conv, xB, dt, start, first, count, paths = row
    tokens, slots, history = projected.shape[0], xB.shape[0], layout.history
    token, slot = jnp.arange(tokens), jnp.arange(slots)
    new = (token >= first) & (token < count)
    live = new.any()
    raw, own_dt = layout.split(jnp.where(new[:, None], projected, 0))
    old = floats(conv[: history + tokens]).astype(raw.dtype)
    raw = jnp.where((token < first)[:, None], old[history:], raw)
    columns = jnp.concatenate([old[:history], raw])

    xBC = convolved(columns[tap_places(paths, history)], arrays.weight, arrays.bias)
    records, C = jnp.split(xBC, [layout.record_size], axis=-1)
    if layout.delta:
        by_group = (tokens * layout.num_groups, layout.state_size)
        v, k = jnp.split(records, [layout.inner_size], axis=-1)
        k, q = (of_length_one(x.reshape(by_group)).reshape(C.shape) for x in (k, C))
        records, C = k.astype(xBC.dtype), q * layout.state_size**-0.5

    own = new & (slot[:, None] == start + token)  # [S, T]
    written, source = own.any(1)[:, None], own.argmax(1)
    rest, fresh = jnp.split(xB, [xB.shape[1] - records.shape[1]], axis=-1)
    fresh = jnp.where(written, stored(records, xB.dtype)[source], fresh)
    xB = jnp.concatenate([rest, fresh], axis=-1)
    dt = jnp.where(written, step_sizes(own_dt, arrays.dt_bias, layout)[source], dt)

    behind = jnp.where(
        (live & (token >= first))[:, None], stored(raw, conv.dtype), conv[history:][:tokens]
    )
    moved = live & (count == tokens) & moves
    before = jnp.where(moved, stored(columns[tokens:], conv.dtype), conv[:history])
    conv = jnp.concatenate([before, behind, conv[history + tokens :]])

    C = jnp.where(new[:, None], C, 0)
    seen = new[:, None] & (slot <= start + token[:, None])  # [T, S]
    B = jnp.where(seen.any(0)[:, None], floats(xB[:, layout.inner_size :]), 0)

    def scores(x: jax.Array) -> jax.Array:
        """float32[T, G, S] x . B"""
        grouped = (a.reshape(-1, layout.num_groups, layout.state_size) for a in (x, B))
        wide = (a.astype(jnp.float32) for a in grouped)
        products = jnp.einsum("tgr,sgr->tgs", *wide, precision=HIGHEST)
        return jnp.where(seen[:, None], products, 0)

    if not layout.delta:
        return (conv, xB, dt), C, scores(C)
    behind = layout.conv_start + layout.conv_size + layout.num_heads
    beta = jax.nn.sigmoid(projected[:, behind : behind + layout.num_heads].astype(jnp.float32))
    v, beta = (jnp.where(new[:, None], x, 0) for x in (v, beta))
    return (conv, xB, dt), C, jnp.stack([scores(records), scores(C)]), v, beta
