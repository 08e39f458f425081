"""Closed forms for XLA: matrix products inside a tile, and a triangle that is solved for what the tokens write."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.decay import lag, running_decay
from pallas_kernels.dispatch import HIGHEST
from pallas_kernels.gated_delta.reference import DeltaFold, DeltaScan, DeltaWindow
from pallas_kernels.ssd_window.xla import add_records, read_states_by, weigh, window_decays
from pallas_kernels.tiles import kept_state, with_usual_tile

BLOCK = 8  # of a triangle, inverted row by row; larger ones are put together from these by products


def gated_delta_scan_xla(arrays: DeltaScan, *, tile: int | None = None):
    """See `api.gated_delta_scan`; the token count is padded up to whole tiles here, of the usual size for None.

    Within a tile, with c the running sum of log decays and S the state before it (arXiv 2412.06464, section 3.3): what
    the tokens write solves the triangular system
    u_q = beta_q (v_q - exp(c_q) S k_q - sum over k < q of exp(c_q - c_k) (k_q . k_k) u_k). Then
    y_q = exp(c_q) S q_q + sum over k <= q of exp(c_q - c_k) (q_q . k_k) u_k,
    S'  = exp(c_last) S + sum over k of exp(c_last - c_k) u_k k_k^T.
    """
    if tile is None:
        return with_usual_tile(gated_delta_scan_xla, arrays)
    q, k, v, log_decay, beta, initial_state, lengths, state_lengths = arrays
    rows, tokens, heads, width = v.shape
    groups, size = k.shape[2:]
    tile = min(tile, -(-tokens // BLOCK) * BLOCK)
    tiles = -(-tokens // tile)
    position = jnp.arange(tiles * tile)
    valid = position < lengths[:, None]  # [B, T]

    def split(a: jax.Array):
        """[B, T, ...] as float32[c, B, Q, ...], zero on padding."""
        a = jnp.pad(a, ((0, 0), (0, tiles * tile - tokens)) + ((0, 0),) * (a.ndim - 2))
        a = jnp.where(valid.reshape(valid.shape + (1,) * (a.ndim - 2)), a.astype(jnp.float32), 0)
        return jnp.moveaxis(a.reshape(rows, tiles, tile, *a.shape[2:]), 1, 0)

    def by_head(a: jax.Array):
        """[c, B, Q, M, ...] as [c, B, G, h, Q, ...]."""
        a = a.reshape(*a.shape[:3], groups, heads // groups, *a.shape[4:])
        return jnp.moveaxis(a, 2, 4)

    below = jnp.tril(jnp.ones((tile, tile), bool), -1)

    def after(state: jax.Array, u: jax.Array, k: jax.Array, exponents: jax.Array, counts):
        """The state after those of a tile's tokens that count: bool[B, Q], or True for all."""
        counts = jnp.broadcast_to(counts, (rows, tile))[:, None, None]
        decay = running_decay(jnp.where(counts, exponents, 0), axis=-1)
        last = [part[..., -1:] for part in decay]
        left = u * jnp.where(counts, jnp.exp(lag(last, decay)), 0)[..., None]
        added = jnp.einsum("bghkp,bkgr->bghpr", left, k, precision=HIGHEST)
        return state * jnp.exp(sum(last))[..., None] + added

    def body(carry: tuple, tokens_of_tile: tuple):  # states: [B, G, h, P, R]
        state, in_checkpoint, start = carry
        kq, v, exponents, beta = tokens_of_tile
        k = kq[:, :tile]
        decay = running_decay(exponents, axis=-1)  # [B, G, h, Q] twice
        late, early = ([s[..., :, None] for s in decay], [s[..., None, :] for s in decay])
        between = jnp.exp(jnp.where(below | jnp.eye(tile, dtype=bool), lag(late, early), -jnp.inf))
        scores = jnp.einsum("bqgr,bkgr->bgqk", kq, k, precision=HIGHEST)[:, :, None]
        carried = jnp.einsum("bqgr,bghpr->bghqp", kq, state, precision=HIGHEST)
        carried_k, carried_q = jnp.split(carried, 2, axis=3)
        kept = jnp.exp(sum(decay))[..., None]  # [B, G, h, Q, 1]
        triangle = jnp.where(below, scores[..., :tile, :] * between, 0) * beta[..., None]
        right = beta[..., None] * (v - kept * carried_k)
        u = jnp.einsum("bghqk,bghkp->bghqp", inverse(triangle), right, precision=HIGHEST)
        weights = scores[..., tile:, :] * between
        y = kept * carried_q + jnp.einsum("bghqk,bghkp->bghqp", weights, u, precision=HIGHEST)
        # What tokens write does not depend on later ones.
        make = functools.partial(after, state, u, k, exponents)
        in_checkpoint = kept_state(in_checkpoint, state_lengths - start, tile, make)
        return (after(state, u, k, exponents, True), in_checkpoint, start + tile), (y, u)

    kq = jnp.concatenate([split(k), split(q)], axis=2)  # [c, B, 2 Q, G, R]
    xs = (kq, *(by_head(split(a)) for a in (v, log_decay, beta)))
    state = initial_state.reshape(rows, groups, heads // groups, width, size)
    (_, state, _), (y, u) = jax.lax.scan(body, (state, state, jnp.int32(0)), xs)

    def whole(a: jax.Array):
        """[c, B, G, h, Q, P] as [B, T, M, P], zero on padding, even where the state is not finite."""
        a = jnp.moveaxis(a, (0, 4), (1, 2)).reshape(rows, tiles * tile, heads, width)
        return jnp.where(valid[:, :, None, None], a, 0)[:, :tokens]

    return whole(y).astype(v.dtype), whole(u), state.reshape(rows, heads, width, size)


def inverse(triangle: jax.Array) -> jax.Array:
    """(I + A)^-1 of strictly lower triangles A [..., n, n].

    Blocks on the diagonal are inverted row by row, and two of them make a larger one:
    [[a, 0], [c, b]]^-1 = [[a', 0], [-b' c a', b']], with a' and b' the inverses of a and b.
    """
    size = triangle.shape[-1]
    step = min(BLOCK, size)
    padding = -size % step
    while (size + padding) // step & ((size + padding) // step - 1):  # a power of two of blocks
        padding += step
    full = size + padding
    triangle = jnp.pad(triangle, [(0, 0)] * (triangle.ndim - 2) + [(0, padding)] * 2)

    def blocks(step: int, row: int, column: int, stride: int) -> jax.Array:
        """Blocks [..., n, step, step] whose place in a pair, or alone, is (row, column)."""
        lead = triangle.shape[:-2]
        grid = triangle.reshape(*lead, full // step, step, full // step, step)
        places = range(0, full // step, stride)
        return jnp.stack([grid[..., i + row, :, i + column, :] for i in places], axis=-3)

    unit = jnp.eye(step, dtype=triangle.dtype)
    diagonal = blocks(step, 0, 0, 1)
    lines = [jnp.broadcast_to(unit[0], (*diagonal.shape[:-2], step))]
    for i in range(1, step):
        before = jnp.stack(lines, axis=-2)
        lines.append(unit[i] - (diagonal[..., i, :i, None] * before).sum(-2))
    inverses = jnp.stack(lines, axis=-2)  # [..., n, step, step]
    while step < full:
        first, second = inverses[..., 0::2, :, :], inverses[..., 1::2, :, :]
        product = "...ij,...jk,...kl->...il"
        corner = blocks(step, 1, 0, 2)
        corner = -jnp.einsum(product, second, corner, first, precision=HIGHEST)
        upper = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        lower = jnp.concatenate([corner, second], axis=-1)
        inverses, step = jnp.concatenate([upper, lower], axis=-2), 2 * step
    return inverses[..., 0, :size, :size]


def gated_delta_window_frames_xla(arrays: DeltaWindow):
    """See `api.gated_delta_window_frames`.

    The equations are those of a tile, with the ring before the window as part of what is there already. Token after
    token is solved for, and rounded as the ring keeps it before the next one sees it. So a token gets the same numbers
    whether those before it are in this window or were in an earlier one.
    """
    q, v, beta, u, k, log_decay, arena, frames, exists, starts, known, valid, ancestors = arrays
    rows, tokens, heads, width = v.shape
    slots, groups = k.shape[1:3]
    offsets = jnp.arange(tokens)
    counts = (offsets < valid[:, None])[..., None, None]  # [B, T, 1, 1]
    given = (offsets < known[:, None])[..., None, None, None]
    place = jnp.minimum(starts[:, None] + offsets, slots - 1)[..., None, None]  # in the ring
    # What is not live is zeroed, not only masked, so garbage there (NaN too) is inert.
    live = jnp.arange(slots) < (starts + valid)[:, None]
    before = jnp.arange(slots) < starts[:, None]
    k = jnp.where(live[:, :, None, None], k, 0).astype(jnp.float32)
    log_decay = jnp.where(live[:, :, None], log_decay, 0.0)
    q, v = (jnp.where(counts, x, 0).astype(jnp.float32) for x in (q, v))
    beta = jnp.where(counts[..., 0], beta, 0.0)
    own_u = jnp.take_along_axis(u, place, axis=1)  # of tokens that are known
    own_u = own_u.reshape(rows, tokens, groups, -1, width)
    u = jnp.where(before[:, :, None, None], u, 0).astype(jnp.float32)
    kq = jnp.concatenate([jnp.take_along_axis(k, place, axis=1), q], axis=1)  # [B, 2 T, G, R]
    carried, arena = read_states_by(kq, arena, frames, exists, heads, width)
    by_group = (rows, -1, groups, heads // groups)
    kept, between = window_decays(log_decay.reshape(by_group), starts, tokens, ancestors)
    scores = jnp.einsum("btgr,bsgr->btsg", kq, k, precision=HIGHEST)
    weights = scores[..., None] * jnp.concatenate([between, between], axis=1)  # [B, 2 T, S, G, h]
    base = carried * jnp.concatenate([kept, kept], axis=1)[..., None]
    base = base + weigh(weights, u.reshape(*by_group, width))
    base_k, base_q = jnp.split(base, 2, axis=1)  # [B, T, G, h, P]
    beta = beta.reshape(by_group)[..., None]
    right = beta * (v.reshape(*by_group, width) - base_k)
    among = jnp.take_along_axis(weights, place[:, None], axis=2)  # [B, 2 T, T, G, h]
    among_k, among_q = jnp.split(among, 2, axis=1)

    def solve(t: jax.Array | int, made: jax.Array) -> jax.Array:
        """Puts in what token t writes, as the ring keeps it; made: [B, T, G, h, P], zero from t on."""
        line, right_t, beta_t, known_t, own_t = (
            jax.lax.dynamic_slice_in_dim(x, t, 1, axis=1)
            for x in (among_k, right, beta, given, own_u)
        )
        new = right_t - beta_t * (line[:, 0, ..., None] * made).sum(1, keepdims=True)
        new = jnp.where(known_t, own_t, new.astype(own_u.dtype)).astype(jnp.float32)
        return jax.lax.dynamic_update_slice_in_dim(made, new, t, axis=1)

    if tokens == 1:
        made = jnp.where(given, own_u, right.astype(own_u.dtype)).astype(jnp.float32)
    else:
        made = jax.lax.fori_loop(0, tokens, solve, jnp.zeros_like(right))
    y = base_q + weigh(among_q, made)
    shape = (rows, tokens, heads, width)
    y, made = (jnp.where(counts, x.reshape(shape), 0) for x in (y, made))
    return y, made.astype(own_u.dtype), arena


def gated_delta_fold_xla(arrays: DeltaFold):
    """See `api.gated_delta_fold`."""
    u, k, log_decay, state, lengths = arrays
    live = jnp.arange(u.shape[1]) < lengths[:, None]
    u, k = (jnp.where(live[:, :, None, None], x, 0).astype(jnp.float32) for x in (u, k))
    log_decay = jnp.where(live[:, :, None], log_decay, 0.0).astype(jnp.float32)
    return add_records(state, u, log_decay, k, jnp.ones((), jnp.float32))
