"""Pallas' Triton backend: the only module that imports it.

A kernel reads whole arrays by explicit indices with masks, since the backend has no bounds checks, takes no
values whose sizes are not powers of two, and cannot slice a value. A whole array costs nothing to pass: it is
a pointer. Interpret mode, which the CPU runs, slices it in every program: keep arenas small in tests.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.dispatch import HIGHEST
from pallas_kernels.plan import cdiv as cdiv
from pallas_kernels.plan import power_of_two as power_of_two

Ref: TypeAlias = Any  # what a kernel gets in place of an array: a pointer with a shape and a dtype
# Rows and inner elements of a product on tensor cores, at least: with fewer it compiles, and gives wrong numbers.
LEAST_PRODUCT = 16
# Index past the end of any frame, for what a masked store must not write: interpret mode writes the old value there,
# which would undo a live write to the same place.
NOWHERE = 1 << 30
_FOR_CUDA = contextvars.ContextVar("_FOR_CUDA", default=False)


@contextlib.contextmanager
def for_cuda() -> Iterator[None]:
    """What is traced inside is lowered for CUDA alone: kernels are not traced a second time for the interpreter."""
    token = _FOR_CUDA.set(True)
    try:
        yield
    finally:
        _FOR_CUDA.reset(token)


def call(
    kernel: Callable,
    *operands: jax.Array,
    grid: tuple[int, ...],
    outputs: Sequence[jax.ShapeDtypeStruct | int],
    name: str,
    num_warps: int,
    num_stages: int = 2,
    synchronizes: bool = False,
    **constants: Any,
) -> tuple[jax.Array, ...]:
    """Runs a kernel on whole arrays: compiled for CUDA, interpreted on a CPU.

    Args:
        kernel: takes a ref per operand that it does not write, then one per output, and the constants by name.
        grid: programs. name: of the kernel in lowered text and profiles.
        outputs: shape and dtype of each; or the index of an operand that the kernel writes in place.
        synchronizes: gives the kernel `barrier`, a function that lets a program's threads wait for each
            other; interpreted programs have only one.
    """
    aliases = {operand: i for i, operand in enumerate(outputs) if isinstance(operand, int)}
    described = (operands[output] if isinstance(output, int) else output for output in outputs)
    out_shape = tuple(jax.ShapeDtypeStruct(like.shape, like.dtype) for like in described)

    def run(interpret: bool):
        given = dict(constants)
        if synchronizes:
            given["barrier"] = lambda: None if interpret else pltriton.debug_barrier()

        def of_refs(*refs: Ref):
            kernel(*(ref for i, ref in enumerate(refs) if i not in aliases), **given)

        return pl.pallas_call(
            of_refs,
            grid=grid,
            out_shape=out_shape,
            input_output_aliases=aliases,
            compiler_params=pltriton.CompilerParams(num_warps=num_warps, num_stages=num_stages),
            interpret=interpret,
            name=name,
        )

    if _FOR_CUDA.get():
        return run(False)(*operands)
    return jax.lax.platform_dependent(*operands, cpu=run(True), cuda=run(False))


def load(
    ref: Ref, *index: jax.Array | int, mask: jax.Array | None = None, other: float = 0
) -> jax.Array:
    """Values at the broadcast indices; `other` where the mask is false."""
    if mask is None:
        return pltriton.load(ref.at[index])
    shape = jnp.broadcast_shapes(*(jnp.shape(i) for i in index))
    mask = jnp.broadcast_to(mask, shape)
    return pltriton.load(ref.at[index], mask=mask, other=jnp.asarray(other, ref.dtype))


def store(
    ref: Ref, *index: jax.Array | int, value: jax.Array, mask: jax.Array | None = None
) -> None:
    """Writes values, in the ref's dtype, at the broadcast indices where the mask is true."""
    if mask is not None:
        mask = jnp.broadcast_to(mask, value.shape)
    pltriton.store(ref.at[index], value.astype(ref.dtype), mask=mask)


def iota(size: int, axis: int = 0, rank: int = 1) -> jax.Array:
    """0 .. power_of_two(size) - 1 along one axis of `rank`."""
    shape = tuple(power_of_two(size) if i == axis else 1 for i in range(rank))
    return jax.lax.broadcasted_iota(jnp.int32, shape, axis)


def dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """a @ b in float32: exact products of bfloat16, and never TF32 for float32."""
    if min(a.shape) < LEAST_PRODUCT:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    precision = HIGHEST if a.dtype == jnp.float32 else None
    return jnp.dot(a, b, preferred_element_type=jnp.float32, precision=precision)
