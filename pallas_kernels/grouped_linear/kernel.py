"""Experts on a GPU: visits sorted by expert, and two products over tiles of visits to the same expert.

`expert_visits` sorts the visits by expert. A program of `expert_up` takes one tile of up to `rows` visits to one expert
and a block of its columns: it gathers the visits' tokens, multiplies, and applies the activation. `expert_down` does
the same with what that left, and writes the outputs to where the visits stand among the tokens. The grid has room for
the most tiles that so many visits can make; a program past the last tile ends at once. So the weights of an expert that
no token visits are never read, and those of any other are read once for each of its tiles.

Few visits make few programs. Then `expert_up` splits the inner dimension as well and leaves float32 parts, which XLA
sums in front of the activation.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.grouped_linear.plan import Config, Plan, choose_config, make_plan
from pallas_kernels.grouped_linear.reference import Activation, ExpertArrays, activate, mixed
from pallas_kernels.operands import widen
from pallas_kernels.plan import H200, Chip
from pallas_kernels.triton import (
    NOWHERE,
    Ref,
    call,
    cdiv,
    dot,
    iota,
    load,
    power_of_two,
    store,
)

MOST_PARTS = 8  # of `expert_up`
SORTED_AT_ONCE = 4096  # ids in a step of `expert_visits`


def _visits_kernel(
    ids_ref: Ref,  # [V]
    order_ref: Ref,  # [V]
    first_ref: Ref,  # [X + 1]
    *,
    block: int,
):
    expert = pl.program_id(0)  # or the number of experts, for the end of the last one's visits
    count = ids_ref.shape[0]

    def ids_of(step: jax.Array):
        place = step * block + iota(block)
        return place, load(ids_ref, place, mask=place < count, other=NOWHERE)

    # Sums stay apart for every place of a step until the end, so threads wait for each other once.
    def count_before(step: jax.Array, total: jax.Array):
        return total + (ids_of(step)[1] < expert).astype(jnp.int32)

    steps = cdiv(count, block)
    before = jax.lax.fori_loop(0, steps, count_before, jnp.zeros((block,), jnp.int32)).sum()
    store(first_ref, expert, value=before)

    # The order of visits to one expert is that of the tokens, so it is the same each time.
    def list_own(step: jax.Array, end: jax.Array):
        place, ids = ids_of(step)
        own = ids == expert
        target = jnp.where(own, end + jnp.cumsum(own.astype(jnp.int32)) - 1, NOWHERE)
        store(order_ref, target, value=place, mask=own)
        return end + own.astype(jnp.int32).sum()

    jax.lax.fori_loop(0, steps, list_own, before)


def _tile(order_ref: Ref, first_ref: Ref, plan: Plan, tile: jax.Array, num_experts: int):
    """The expert of a tile, the sorted places int32[rows] of its visits, and which of them exist; any expert where none
    does."""
    row = iota(plan.config.rows)
    if plan.lone:
        expert = order_ref[tile]  # the ids themselves: nothing is sorted
        exists = (row == 0) & (expert < num_experts)
        return jnp.minimum(expert, num_experts - 1), tile + row, exists
    each = iota(num_experts)
    real = each < num_experts
    first = load(first_ref, each, mask=real)
    tiles = cdiv(load(first_ref, each + 1, mask=real) - first, plan.config.rows)
    last = jnp.cumsum(tiles)
    expert = ((last <= tile) & real).astype(jnp.int32).sum()
    start = jnp.where(each == expert, first + (tile - last + tiles) * plan.config.rows, 0).sum()
    end = load(first_ref, expert + 1, mask=expert < num_experts)  # 0 past the last tile
    return jnp.minimum(expert, num_experts - 1), start + row, start + row < end


def _up_kernel(
    x_ref: Ref,  # [S, Z]
    order_ref: Ref,  # [V]
    first_ref: Ref,  # [X + 1]
    up_ref: Ref,  # [X, Z, F or 2 F]
    bias_ref: Ref,  # [X, F or 2 F]
    hidden_ref: Ref,  # [1, V, F]; or parts [P, V, F or 2 F] without the activation
    *,
    plan: Plan,
    kind: Activation,
    biased: bool,
):
    config = plan.config
    num_experts, inner, width = up_ref.shape
    matrices = 2 if kind == "gated_silu" else 1
    size, top_k = width // matrices, order_ref.shape[0] // x_ref.shape[0]
    tile, block, part = (
        pl.program_id(0) // plan.blocks,
        pl.program_id(0) % plan.blocks,
        pl.program_id(1),
    )
    expert, place, exists = _tile(order_ref, first_ref, plan, tile, num_experts)
    visit = place if plan.lone else load(order_ref, place, mask=exists)
    token = visit // top_k
    column = block * config.columns + iota(config.columns)
    inside = column < size

    def rows_of(channel: jax.Array, mask: jax.Array | None):
        real = exists[:, None] if mask is None else exists[:, None] & mask[None, :]
        return load(x_ref, token[:, None], channel[None, :], mask=real)

    made = _products(
        rows_of,
        up_ref,
        expert=expert,
        columns=[column + i * size for i in range(matrices)],
        inside=inside,
        exists=exists,
        plan=plan,
        part=part,
    )
    target = jnp.where(exists, place, NOWHERE)[:, None]
    mask = exists[:, None] & inside[None, :]
    if biased:
        real = inside & (part == 0)
        biases = (load(bias_ref, expert, column + i * size, mask=real) for i in range(matrices))
        made = [value + widen(bias)[None, :] for value, bias in zip(made, biases, strict=True)]
    if plan.parts == 1:
        made = [_activated(made, kind)]
    for i, value in enumerate(made):
        store(hidden_ref, part, target, (column + i * size)[None, :], value=value, mask=mask)


def _activated(made: list[jax.Array], kind: Activation) -> jax.Array:
    """`reference.activate` of (gate, up), or of up alone."""
    if kind == "gated_silu":
        gate, up = made
        return jax.nn.silu(gate) * up
    return jnp.square(jnp.maximum(made[0], 0.0))


def _products(
    rows_of,
    weight_ref: Ref,  # [X, I, O]
    *,
    expert: jax.Array,
    columns: list[jax.Array],
    inside: jax.Array,
    exists: jax.Array,
    plan: Plan,
    part: jax.Array,
) -> list[jax.Array]:
    """Products float32[rows, columns] of a tile's rows with some columns of its expert's matrix, over one part."""
    config, inner = plan.config, weight_ref.shape[1]
    ragged = inner % config.inner > 0
    full = weight_ref.shape[2] // len(columns) % config.columns == 0

    def step(i: jax.Array, totals: tuple):
        channel = part * plan.length + i * config.inner + iota(config.inner)
        # No mask where all of a step exists: it would cost instructions at every load.
        mask = channel < inner if ragged else None
        rows = rows_of(channel, mask)
        real = None if full else inside[None, :]
        if ragged:
            real = mask[:, None] if real is None else real & mask[:, None]
        return tuple(
            total
            + dot(rows, load(weight_ref, expert, channel[:, None], column[None, :], mask=real))
            for total, column in zip(totals, columns, strict=True)
        )

    # A program without visits reads nothing.
    some = exists.astype(jnp.int32).sum() > 0
    length = jnp.minimum(jnp.where(some, inner - part * plan.length, 0), plan.length)
    zeros = jnp.zeros((config.rows, config.columns), jnp.float32)
    return list(jax.lax.fori_loop(0, cdiv(length, config.inner), step, (zeros,) * len(columns)))


def _down_kernel(
    hidden_ref: Ref,  # [V, F]
    order_ref: Ref,  # [V]
    first_ref: Ref,  # [X + 1]
    down_ref: Ref,  # [X, F, Z]
    bias_ref: Ref,  # [X, Z]
    out_ref: Ref,  # [V, Z]
    *,
    plan: Plan,
    biased: bool,
):
    num_experts, _, size = down_ref.shape
    tile, block = pl.program_id(0) // plan.blocks, pl.program_id(0) % plan.blocks
    expert, place, exists = _tile(order_ref, first_ref, plan, tile, num_experts)
    column = block * plan.config.columns + iota(plan.config.columns)
    inside = column < size

    def rows_of(channel: jax.Array, mask: jax.Array | None):
        real = exists[:, None] if mask is None else exists[:, None] & mask[None, :]
        return load(hidden_ref, place[:, None], channel[None, :], mask=real)

    (value,) = _products(
        rows_of,
        down_ref,
        expert=expert,
        columns=[column],
        inside=inside,
        exists=exists,
        plan=plan,
        part=jnp.int32(0),
    )
    if biased:
        value += widen(load(bias_ref, expert, column, mask=inside))[None, :]
    visit = place if plan.lone else load(order_ref, place, mask=exists)
    target = jnp.where(exists, visit, NOWHERE)[:, None]
    store(out_ref, target, column[None, :], value=value, mask=exists[:, None] & inside[None, :])


def sort_visits(ids: jax.Array, num_experts: int) -> tuple[jax.Array, jax.Array]:
    """int32[V] visits, sorted by expert, those of one expert in their order; and int32[X + 1], where each expert's
    begin. Visits to no expert are left out, so what stands after the last may be anything.

    Args:
        ids: int32[V] expert of each visit.
    """
    block = min(power_of_two(ids.size), SORTED_AT_ONCE)
    return call(
        _visits_kernel,
        ids,
        grid=(num_experts + 1,),
        outputs=[
            jax.ShapeDtypeStruct(ids.shape, jnp.int32),
            jax.ShapeDtypeStruct((num_experts + 1,), jnp.int32),
        ],
        name="expert_visits",
        num_warps=min(max(block // 256, 1), 8),
        block=block,
    )


def mix_experts_pallas(
    arrays: ExpertArrays,
    *,
    kind: Activation,
    chip: Chip = H200,
    up_config: Config | None = None,
    down_config: Config | None = None,
):
    """See `api.mix_experts`. The grids walk over the blocks of columns of a tile, tiles, then parts."""
    x, ids, weights, up, down, up_bias, down_bias = arrays
    num_experts, inner, columns = up.shape
    size = down.shape[1]
    matrices = columns // size
    choose = functools.partial(choose_config, ids.size, num_experts, dtype=x.dtype.name, chip=chip)
    up_config = up_config or choose(size, matrices=matrices)
    down_config = down_config or choose(inner, matrices=1)
    plan = functools.partial(
        make_plan, ids_shape=ids.shape, num_experts=num_experts, num_sms=chip.num_sms
    )
    first = plan(up_config, inner=inner, columns=size, most_parts=MOST_PARTS)
    last = plan(down_config, inner=size, columns=inner)
    flat = ids.reshape(-1)
    order, begins = (flat, flat) if first.lone else sort_visits(flat, num_experts)
    shape, dtype = (1, ids.size, size), x.dtype
    if first.parts > 1:
        shape, dtype = (first.parts, ids.size, columns), jnp.dtype("float32")
    unused = flat  # in place of an array that a kernel does not read
    (hidden,) = call(
        _up_kernel,
        *(x, order, begins, up, unused if up_bias is None else up_bias),
        grid=(first.blocks * first.tiles, first.parts),
        outputs=[jax.ShapeDtypeStruct(shape, dtype)],
        name="expert_up",
        num_warps=up_config.num_warps,
        num_stages=up_config.num_stages,
        plan=first,
        kind=kind,
        biased=up_bias is not None,
    )
    if first.parts > 1:
        hidden = activate(hidden.sum(0), kind).astype(x.dtype)
    (parts,) = call(
        _down_kernel,
        *(hidden.reshape(ids.size, size), order, begins, down),
        unused if down_bias is None else down_bias,
        grid=(last.blocks * last.tiles,),
        outputs=[jax.ShapeDtypeStruct((ids.size, inner), x.dtype)],
        name="expert_down",
        num_warps=down_config.num_warps,
        num_stages=down_config.num_stages,
        plan=last,
        biased=down_bias is not None,
    )
    parts = parts.reshape(*ids.shape, inner)
    return mixed(parts, ids, weights, num_experts)
