"""The scan on a GPU, with states read from and written to frames, in two launches.

What does not depend on a state comes first, for all tiles of tokens at once: keys and queries of length one, the
triangle between the tokens of a tile, inverted, the weights by which its tokens see each other, and decays. The second
launch walks over the tiles with states in registers, and has only products left.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.causal_conv.reference import of_length_one
from pallas_kernels.decay import LOWEST, coarse_and_fine
from pallas_kernels.gated_delta.reference import DeltaScanFrames
from pallas_kernels.operands import widen
from pallas_kernels.plan import H200, Chip, over_limit
from pallas_kernels.records import RecordSizes
from pallas_kernels.ssd_scan.kernel import BLOCK, Tile
from pallas_kernels.triton import Ref, call, cdiv, dot, iota, load, power_of_two, store


@dataclass(frozen=True, kw_only=True)
class Config:
    """Launch parameters.

    Attributes:
        tile: tokens whose triangle is inverted at once. width: channels of a head that a program of the scan has.
        solve_warps, scan_warps: of a program of the first and of the second launch. num_stages: of the second one.
    """

    tile: int = 64
    width: int = 32
    solve_warps: int = 4
    scan_warps: int = 4
    num_stages: int = 2


CONFIGS = {
    "bfloat16": Config(),
    "float32": Config(tile=16, width=16, scan_warps=8, num_stages=1),
}
MAX_STATE_SIZE = BLOCK  # a state is multiplied whole
# Factors of a token: the rate by which it writes, and decays from the tile's start to it and from it to the tile's end.
BETA, BEFORE, BEHIND = range(3)


def config_of(dtype: jnp.dtype, chip: Chip) -> Config:
    """Launch parameters for these inputs. Where operands of products go through registers, loads ahead of their use
    would spill."""
    config = CONFIGS[dtype.name]
    return config if chip.reads_shared else replace(config, num_stages=1)


def why_unsupported(records: RecordSizes, dtype: str | jnp.dtype) -> str | None:
    """Why the kernels cannot take these shapes, or None."""
    if jnp.dtype(dtype).name not in CONFIGS:
        return f"inputs must be one of {sorted(CONFIGS)} for 'pallas', got {dtype}; convert them, or use 'xla'"
    return over_limit(("a state must have at most {} columns", MAX_STATE_SIZE, records.state_size))


def _log_decays(dt: jax.Array, A: jax.Array, dtype: jnp.dtype) -> tuple[list, list]:
    """Running sums [Q, 1] of the log decays of step sizes [Q, 1], in one or two parts; and the parts' totals."""
    exponents = jnp.maximum(dt * A, LOWEST)
    # One running sum is off by 6e-8 of itself: too much for float32, nothing beside bfloat16.
    parts = coarse_and_fine(exponents) if dtype == jnp.float32 else (exponents,)
    return [jnp.cumsum(part, axis=0) for part in parts], [jnp.sum(part) for part in parts]


def _behind(sums: list, totals: list) -> jax.Array:
    """Decays [Q, 1] from each token on."""
    return jnp.exp(sum(t - part for t, part in zip(totals, sums, strict=True)))


def inverse_by_products(triangle: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """(I + A)^-1 of a strictly lower triangle float32 A [Q, Q], Q a power of two, by products of `dtype` alone.

    As in `xla.inverse`, blocks are put together in pairs: [[a, 0], [c, b]]^-1 = [[a', 0], [-b' c a', b']]. All pairs at
    once are D - D C D, with D the inverses on the diagonal, and C all blocks c. Blocks of one element are their own
    inverses.
    """
    size = triangle.shape[0]
    row, column = iota(size, 0, 2), iota(size, 1, 2)
    apart = row ^ column  # step .. 2 step - 1 in blocks c of that size
    inverse = jnp.where(apart == 0, 1.0, jnp.where(apart == 1, -triangle, 0.0))
    triangle, step = triangle.astype(dtype), 2
    while step < size:
        corners = jnp.where(apart // step == 1, triangle, jnp.zeros((), dtype))
        operand = inverse.astype(dtype)
        inverse = inverse - dot(operand, dot(corners, operand).astype(dtype))
        step *= 2
    return inverse


def _solve_kernel(
    vkq_ref: Ref,  # [B, T, E]
    dt_ref: Ref,  # [B, T, M]
    A_ref: Ref,  # [M]
    projected_ref: Ref,  # [B, T, ... | b]
    lengths_ref: Ref,  # [B]
    ukq_ref: Ref,  # [B, T, E], of which v's place is left to the scan
    inverse_ref: Ref,  # [B, M, c, Q, Q]
    weights_ref: Ref,  # [B, M, c, Q, Q]
    factors_ref: Ref,  # [B, M, 3, c Q]
    *,
    records: RecordSizes,
):
    row, number, head = (pl.program_id(axis) for axis in range(3))
    (_, tokens, _), dtype, tile = vkq_ref.shape, vkq_ref.dtype, inverse_ref.shape[-1]
    per_group, size = records.num_heads // records.num_groups, records.state_size
    first, end = number * tile, lengths_ref[row]
    token, r = first + iota(tile, 0, 2), iota(size, 1, 2)
    valid, held = token < end, r < size
    column = head // per_group * size + r

    def of_length(start: int, length: float):
        x = load(vkq_ref, row, token, start + column, mask=valid & held)
        x = (of_length_one(x) * length).astype(dtype)

        # All heads of a group make them, and one writes them: zeros on padding.
        @pl.when(head % per_group == 0)
        def _():
            store(ukq_ref, row, token, start + column, value=x, mask=(token < tokens) & held)

        return x

    k, q = of_length(records.inner_size, 1.0), of_length(records.record_size, size**-0.5)

    @pl.when(first < end)
    def _():
        dt = load(dt_ref, row, token, head, mask=valid)
        sums, totals = _log_decays(dt, A_ref[head], dtype)
        rates = projected_ref.shape[2] - records.num_heads
        beta = jax.nn.sigmoid(widen(load(projected_ref, row, token, rates + head, mask=valid)))
        factors = {BETA: beta, BEFORE: jnp.exp(sum(sums)), BEHIND: _behind(sums, totals)}
        for place, factor in factors.items():
            store(factors_ref, row, head, place, token, value=factor)
        i, j = iota(tile, 0, 2), iota(tile, 1, 2)
        # Masked after the exponential, which overflows above the diagonal, where lags are positive.
        between = jnp.where(i >= j, jnp.exp(sum(part - part.T for part in sums)), 0.0)
        store(weights_ref, row, head, number, i, j, value=dot(q, k.T) * between)
        triangle = jnp.where(i > j, beta * dot(k, k.T) * between, 0.0)
        # Rates of at most 1 and keys of length one: no element of these products exceeds 1, so that float16 holds them,
        # with three bits more than bfloat16.
        inverse = inverse_by_products(triangle, dtype if dtype == jnp.float32 else jnp.float16)
        store(inverse_ref, row, head, number, i, j, value=inverse)


def _scan_kernel(
    read_ref: Ref,  # [B, n]
    write_ref: Ref,  # [B, n]
    exists_ref: Ref,  # [B]
    vkq_ref: Ref,  # [B, T, E]
    dt_ref: Ref,  # [B, T, M]
    A_ref: Ref,  # [M]
    inverse_ref: Ref,  # [B, M, c, Q, Q]
    weights_ref: Ref,  # [B, M, c, Q, Q]
    factors_ref: Ref,  # [B, M, 3, c Q]
    lengths_ref: Ref,  # [B]
    state_lengths_ref: Ref,  # [B]
    arena_ref: Ref,  # [U, W]
    ukq_ref: Ref,  # [B, T, E]
    y_ref: Ref,  # [B, T, M P]
    *,
    tile: Tile,
):
    tile, row = tile.here(), pl.program_id(0)
    records, head, chunk, dtype = tile.records, tile.head, tile.chunk, y_ref.dtype
    end, kept, tokens = lengths_ref[row], state_lengths_ref[row], y_ref.shape[1]
    p, inside = tile.channel()
    column = head * records.head_dim + p
    r = iota(records.state_size, 1, 2)
    in_group = head // (records.num_heads // records.num_groups) * records.state_size + r
    held = r < records.state_size
    i, j = iota(chunk, 0, 2), iota(chunk, 1, 2)
    (state,) = tile.read_state(arena_ref, read_ref, exists_ref, row)

    # A checkpoint before the first token is the state that the row came with: a row without tokens keeps its own.
    @pl.when(kept <= 0)
    def _():
        tile.write_state(arena_ref, write_ref, row, (state,))

    def after(state: jax.Array, decay: jax.Array, k: jax.Array, u: jax.Array, behind: jax.Array):
        """The state after tokens with decays `behind` them."""
        return decay * state + dot(k.T, (u * behind).astype(dtype))

    def scan(number: jax.Array, state: jax.Array):
        first = number * chunk
        token = first + i
        keys, values = (token < end) & held, (token < end) & inside
        k = load(ukq_ref, row, token, tile.B + in_group, mask=keys)
        q = load(ukq_ref, row, token, tile.C + in_group, mask=keys)
        v = load(vkq_ref, row, token, column, mask=values)
        inverse = load(inverse_ref, row, head, number, i, j)
        weights = load(weights_ref, row, head, number, i, j)
        beta, before, behind = (
            load(factors_ref, row, head, place, token) for place in (BETA, BEFORE, BEHIND)
        )
        rounded = state.astype(dtype)
        right = beta * (widen(v) - before * dot(k, rounded))
        u = dot(inverse, right.astype(dtype))
        y = before * dot(q, rounded) + dot(weights, u.astype(dtype))

        # The checkpoint may stand within a tile. What tokens write does not depend on later ones.
        @pl.when((first < kept) & (kept <= first + chunk))
        def _():
            dt = load(dt_ref, row, token, head, mask=token < kept)
            sums, totals = _log_decays(dt, A_ref[head], dtype)
            up_to = jnp.where(token < kept, _behind(sums, totals), 0.0)
            kept_state = after(state, jnp.exp(sum(totals)), k, u, up_to)
            tile.write_state(arena_ref, write_ref, row, (kept_state,))

        store(ukq_ref, row, token, column, value=u, mask=values)
        store(y_ref, row, token, column, value=y, mask=values)
        decay = factors_ref[row, head, BEFORE, first + chunk - 1]
        return after(state, decay, k, u, behind)

    jax.lax.fori_loop(0, cdiv(end, chunk), scan, state)

    # Padding becomes zero, whatever its inputs are.
    def blank(number: jax.Array, _: None):
        token = end + number * chunk + i
        for ref in (ukq_ref, y_ref):
            zeros = jnp.zeros((chunk, column.shape[1]), dtype)
            store(ref, row, token, column, value=zeros, mask=inside & (token < tokens))

    jax.lax.fori_loop(0, cdiv(tokens - end, chunk), blank, None)


def gated_delta_scan_frames_pallas(
    arrays: DeltaScanFrames,
    *,
    records: RecordSizes,
    first_frame: int = 0,
    chip: Chip = H200,
    config: Config | None = None,
):
    """See `api.gated_delta_scan_frames`.

    The first grid walks over rows, tiles of tokens and heads, and no program waits for another. The second one walks
    over rows and parts of heads.
    """
    vkq, dt, A, projected, arena, read, write, exists, lengths, state_lengths = arrays
    rows, tokens, _ = vkq.shape
    heads, dtype = records.num_heads, vkq.dtype
    config = config_of(dtype, chip) if config is None else config
    chunk, tiles = config.tile, cdiv(tokens, config.tile)
    square = jax.ShapeDtypeStruct((rows, heads, tiles, chunk, chunk), dtype)
    ukq, inverse, weights, factors = call(
        _solve_kernel,
        *(vkq, dt, A, projected, lengths),
        grid=(rows, tiles, heads),
        outputs=[
            jax.ShapeDtypeStruct(vkq.shape, dtype),
            *(square, square),
            jax.ShapeDtypeStruct((rows, heads, 3, tiles * chunk), jnp.float32),
        ],
        name="gated_delta_solve",
        num_warps=config.solve_warps,
        records=records,
    )
    tile = Tile(
        records=records,
        B=records.inner_size,
        C=records.record_size,
        per_frame=records.per_frame(arena),
        first_frame=first_frame,
        chunk=chunk,
        width=min(config.width, power_of_two(records.head_dim)),
    )
    arena, ukq, y = call(
        _scan_kernel,
        *(arena, ukq, read, write, exists.astype(jnp.int32), vkq, dt, A),
        *(inverse, weights, factors, lengths, state_lengths),
        grid=(rows, heads * tile.parts),
        outputs=[0, 1, jax.ShapeDtypeStruct((rows, tokens, records.inner_size), dtype)],
        name="gated_delta_scan",
        num_warps=config.scan_warps,
        num_stages=config.num_stages,
        tile=tile,
    )
    return y, ukq, arena
