"""A matrix of weights as a step sees it, and the one function that multiplies with it."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp

from hybrid_jax.config.backend import XLA, Backend
from hybrid_jax.products.operations import OPERATIONS, Operations
from hybrid_jax.products.xla import linear
from pallas_kernels.grouped_linear import ExpertArrays, mix_experts

Out = Literal["whole", "parts"]


@dataclass(frozen=True)
class Matrix:
    """A matrix of weights [..., I, O], whatever its arrays are.

    Attributes:
        arrays: what stands for its numbers: one array, or several by name, as its format says.
        format: the name of that format (`products.formats`).
        backend: what multiplies with it.
        change: two matrices [I, R] and [R, O] whose product is added to it; None for none.
    """

    arrays: Any
    format: str = "dense"
    backend: Backend = XLA
    change: tuple[Matrix, Matrix] | None = None

    @property
    def operations(self) -> Operations:
        """What is done with arrays of its format."""
        return OPERATIONS[self.format]

    @property
    def shape(self) -> tuple[int, ...]:
        """[..., I, O]."""
        return self.operations.shape(self.arrays)

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of its numbers, however they are kept."""
        return jnp.dtype(self.operations.dtype(self.arrays))

    @property
    def values(self) -> jax.Array:
        """Its numbers."""
        assert self.change is None, "only products have a form for a matrix with a change"
        return self.operations.values(self.arrays)

    def columns(self, which: slice) -> Matrix:
        """Some of its columns."""
        change = self.change and (self.change[0], self.change[1].columns(which))
        arrays = self.operations.columns(self.arrays, which)
        return replace(self, arrays=arrays, change=change)

    def changed(self, a: Matrix | jax.Array, b: Matrix | jax.Array) -> Matrix:
        """This matrix [I, O] plus the product of a [I, R] and b [R, O], which is never made."""
        return replace(self, change=(as_matrix(a), as_matrix(b)))

    def rows(self, which: jax.Array) -> jax.Array:
        """Some of its rows as numbers [..., O], for indices int[...]."""
        assert self.change is None, "only products have a form for a matrix with a change"
        return self.operations.rows(self.arrays, which)


def as_matrix(weight: Matrix | jax.Array) -> Matrix:
    """A weight as a matrix. One that is an array is dense, and XLA multiplies with it, as in the definition."""
    return weight if isinstance(weight, Matrix) else Matrix(weight)


def product(
    x: jax.Array,
    weight: Matrix | jax.Array,
    bias: jax.Array | None = None,
    *,
    out: Out = "whole",
) -> jax.Array:
    """x [..., I] times a matrix [I, O], plus bias [O].

    Args:
        out: "whole"; or "parts", if what follows sums them.

    Returns:
        [..., O] in the dtype of x; with "parts" also float32[S, ..., O] that sum to it.
    """
    matrix = as_matrix(weight)
    if matrix.change is not None:
        a, b = matrix.change
        return product(x, replace(matrix, change=None), bias) + product(product(x, a), b)
    own = _own_products(matrix.backend).get(matrix.format, {})
    made = own.get(out) or own.get("whole")
    if made is None:
        return matrix.operations.whole(x, matrix.arrays, bias)
    return made(x, matrix.arrays, bias, backend=matrix.backend)


def product_in_float32(x: jax.Array, weight: Matrix | jax.Array) -> jax.Array:
    """x [..., I] times a matrix [I, O], in float32 whatever dtype both have: no sum is rounded on the way."""
    matrix = as_matrix(weight)
    assert matrix.change is None, "only products have a form for a matrix with a change"
    made = _own_products(matrix.backend).get(matrix.format, {}).get("float32")
    if made is None:
        return linear(x.astype(jnp.float32), matrix.values.astype(jnp.float32))
    return made(x, matrix.arrays, backend=matrix.backend)


def product_transposed(x: jax.Array, weight: Matrix | jax.Array) -> jax.Array:
    """x [..., I] times the transpose of a matrix [O, I], in the dtype of x."""
    matrix = as_matrix(weight)
    assert matrix.change is None, "only products have a form for a matrix with a change"
    made = _own_products(matrix.backend).get(matrix.format, {}).get("transposed")
    if made is None:
        return matrix.operations.transposed(x, matrix.arrays)
    return made(x, matrix.arrays, backend=matrix.backend)


def mixed(
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    up: Matrix | jax.Array,
    down: Matrix | jax.Array,
    up_bias: jax.Array | None,
    down_bias: jax.Array | None,
    *,
    kind: Any,
) -> jax.Array:
    """The sum of what a token's experts make of it: `mix_experts` with matrices up [X, I, F] and down [X, F, I]."""
    up, down = as_matrix(up), as_matrix(down)
    arrays = ExpertArrays(x, ids, weights, up.values, down.values, up_bias, down_bias)
    backend = up.backend
    made = _own_products(backend).get(up.format, {}).get("mixed")
    if made is not None:
        return made(arrays, kind=kind, backend=backend)
    return mix_experts(arrays, kind=kind, chip=backend.chip, implementation=backend.runs("experts"))


@functools.cache
def _own_products(backend: Backend) -> Mapping[str, Mapping[str, Callable[..., jax.Array]]]:
    """The products that a backend makes in its own way, by format and by what comes out."""
    return importlib.import_module(backend.products).PRODUCTS
