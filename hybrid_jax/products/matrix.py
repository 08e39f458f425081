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
from hybrid_jax.config.formats import DENSE, Dense, Format, Joined, part_name
from hybrid_jax.products.operations import Operations, operations_of
from pallas_kernels.grouped_linear import ExpertArrays, mix_experts, mix_visits

Out = Literal["whole", "parts"]


@dataclass(frozen=True)
class Matrix:
    """A matrix of weights [..., I, O], whatever its arrays are.

    Attributes:
        arrays: what stands for its numbers: one array, or several by name, as its format says.
        format: how they stand for them.
        backend: what multiplies with it.
        change: two matrices [I, R] and [R, O] whose product is added to it; None for none.
    """

    arrays: Any
    format: Format = DENSE
    backend: Backend = XLA
    change: tuple[Matrix, Matrix] | None = None

    @property
    def operations(self) -> Operations:
        """What is done with arrays of its format."""
        return operations_of(self.format)

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

    @property
    def parts(self) -> list[Matrix]:
        """The matrices that lie side by side in it: itself, if it is of one format."""
        if not isinstance(self.format, Joined):
            return [self]
        return [
            replace(self, arrays=self.arrays[part_name(index)], format=format)
            for index, (_, format) in enumerate(self.format.parts)
        ]

    def columns(self, which: slice) -> Matrix:
        """Some of its columns."""
        change = self.change and (self.change[0], self.change[1].columns(which))
        arrays, format = self.operations.columns(self.arrays, which)
        return replace(self, arrays=arrays, format=format, change=change)

    def expert(self, index: jax.Array) -> Matrix:
        """One of matrices [X, I, O], by its number, a scalar."""
        return replace(self, arrays=jax.tree.map(lambda array: array[index], self.arrays))

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
    if isinstance(matrix.format, Joined):
        y = jnp.concatenate([product(x, part) for part in matrix.parts], axis=-1)
        return y if bias is None else y + bias
    own = _own_products(matrix)
    made = own.get(out) or own.get("whole")
    if made is None:
        return matrix.operations.whole(x, matrix.arrays, bias)
    return made(x, matrix.arrays, bias, backend=matrix.backend)


def product_in_float32(x: jax.Array, weight: Matrix | jax.Array) -> jax.Array:
    """x [..., I] times a matrix [I, O], in float32 whatever dtype both have: no sum is rounded on the way."""
    matrix = as_matrix(weight)
    assert matrix.change is None, "only products have a form for a matrix with a change"
    if isinstance(matrix.format, Joined):
        return jnp.concatenate([product_in_float32(x, part) for part in matrix.parts], axis=-1)
    made = _own_products(matrix).get("float32")
    if made is None:
        return matrix.operations.in_float32(x, matrix.arrays)
    return made(x, matrix.arrays, backend=matrix.backend)


def product_transposed(x: jax.Array, weight: Matrix | jax.Array) -> jax.Array:
    """x [..., I] times the transpose of a matrix [O, I], in the dtype of x."""
    matrix = as_matrix(weight)
    assert matrix.change is None, "only products have a form for a matrix with a change"
    if (made := _own_products(matrix).get("transposed")) is not None:
        return made(x, matrix.arrays, backend=matrix.backend)
    return matrix.operations.transposed(x, matrix.arrays)


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
    ups, downs = as_matrix(up), as_matrix(down)
    backend = ups.backend
    if isinstance(ups.format, Dense) and isinstance(downs.format, Dense):
        arrays = ExpertArrays(x, ids, weights, ups.arrays, downs.arrays, up_bias, down_bias)
        if (made := _own_products(ups).get("mixed")) is not None:
            return made(arrays, kind=kind, backend=backend)
        runs = backend.runs("experts")
        return mix_experts(arrays, kind=kind, chip=backend.chip, implementation=runs)

    def product_of(x: jax.Array, matrices: Matrix, expert: jax.Array) -> jax.Array:
        return product(x, matrices.expert(expert))

    whole: Any = ExpertArrays(x, ids, weights, ups, downs, up_bias, down_bias)
    return mix_visits(whole, kind=kind, num_experts=ups.shape[0], product=product_of)


def _own_products(matrix: Matrix) -> Mapping[str, Callable[..., jax.Array]]:
    """The products that its backend makes in its own way with matrices of its format, by what comes out."""
    found: Mapping[str, Callable[..., jax.Array]] = _products(matrix.backend.products).get(
        type(matrix.format), {}
    )
    return found


@functools.cache
def _products(module: str) -> Mapping[type[Format], Mapping[str, Callable[..., jax.Array]]]:
    """The products of a backend, by the class of the format."""
    products: Mapping = importlib.import_module(module).PRODUCTS
    return products
