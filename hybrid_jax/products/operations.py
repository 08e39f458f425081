"""What is done with the arrays of each format of matrices: one entry for each."""

from __future__ import annotations

from typing import Any

import jax

from hybrid_jax.products.xla import linear, linear_transposed


class Operations:
    """What is done with the arrays of one format. A new format writes the first four, and what is worth its own form.

    `arrays` is what the `Format` says: one array, or several by name.
    """

    def values(self, arrays: Any) -> jax.Array:
        """The numbers [..., I, O], in the dtype in which products are made."""
        raise NotImplementedError

    def columns(self, arrays: Any, which: slice) -> Any:
        """The arrays of some of the columns of [I, O]."""
        raise NotImplementedError

    def rows(self, arrays: Any, which: jax.Array) -> jax.Array:
        """Some rows [..., O] of [I, O] as numbers, for indices int[...]."""
        raise NotImplementedError

    def encode(self, values: jax.Array) -> Any:
        """The arrays that stand for numbers [..., I, O]."""
        raise NotImplementedError

    def shape(self, arrays: Any) -> tuple[int, ...]:
        """[..., I, O]."""
        return jax.eval_shape(self.values, arrays).shape

    def dtype(self, arrays: Any) -> jax.typing.DTypeLike:
        """That of `values`."""
        return jax.eval_shape(self.values, arrays).dtype

    def whole(self, x: jax.Array, arrays: Any, bias: jax.Array | None = None) -> jax.Array:
        """x [..., I] times the matrix [I, O], plus bias [O], in the dtype of x."""
        return linear(x, self.values(arrays), bias)

    def transposed(self, x: jax.Array, arrays: Any) -> jax.Array:
        """x [..., I] times the transpose of the matrix [O, I], in the dtype of x."""
        return linear_transposed(x, self.values(arrays))


class DenseOperations(Operations):
    """See `formats.Dense`."""

    def values(self, arrays: jax.Array) -> jax.Array:
        return arrays

    def columns(self, arrays: jax.Array, which: slice) -> jax.Array:
        return arrays[:, which]

    def rows(self, arrays: jax.Array, which: jax.Array) -> jax.Array:
        return arrays[which]

    def encode(self, values: jax.Array) -> jax.Array:
        return values


OPERATIONS: dict[str, Operations] = {"dense": DenseOperations()}
