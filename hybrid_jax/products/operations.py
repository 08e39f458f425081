"""What is done with the arrays of each format of matrices: one entry for each."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from hybrid_jax.config.formats import Dense, Format, Joined, Scaled, part_name
from hybrid_jax.products import narrow
from hybrid_jax.products.xla import linear, linear_transposed


class Operations:
    """What is done with the arrays of one format. `arrays` is what `Format.specs` says."""

    def __init__(self, format: Any) -> None:
        self.format = format

    def shape(self, arrays: Any) -> tuple[int, ...]:
        """[..., I, O]."""
        return jax.eval_shape(self.values, arrays).shape

    def dtype(self, arrays: Any) -> jax.typing.DTypeLike:
        """That of `values`."""
        return jax.eval_shape(self.values, arrays).dtype

    def values(self, arrays: Any) -> jax.Array:
        """The numbers [..., I, O]."""
        raise NotImplementedError

    def encode(self, values: jax.Array) -> Any:
        """The arrays that stand for numbers [..., I, O]."""
        raise NotImplementedError

    def columns(self, arrays: Any, which: slice) -> tuple[Any, Format]:
        """The arrays of some of the columns of [I, O], and their format."""
        raise NotImplementedError

    def in_float32(self, x: jax.Array, arrays: Any) -> jax.Array:
        """x [..., I] times the matrix [I, O], float32; no sum is rounded on the way."""
        raise NotImplementedError

    def whole(self, x: jax.Array, arrays: Any, bias: jax.Array | None = None) -> jax.Array:
        """x [..., I] times the matrix [I, O], plus bias [O], in the dtype of x."""
        y = self.in_float32(x, arrays).astype(x.dtype)
        return y if bias is None else y + bias

    def rows(self, arrays: Any, which: jax.Array) -> jax.Array:
        """Some rows [..., O] of [I, O] as numbers, for indices int[...]."""
        return self.values(arrays)[which]

    def transposed(self, x: jax.Array, arrays: Any) -> jax.Array:
        """x [..., I] times the transpose of the matrix [O, I], in the dtype of x."""
        return linear_transposed(x, self.values(arrays)).astype(x.dtype)


class DenseOperations(Operations):
    """See `formats.Dense`."""

    format: Dense

    def shape(self, arrays: jax.Array) -> tuple[int, ...]:
        return arrays.shape

    def dtype(self, arrays: jax.Array) -> jax.typing.DTypeLike:
        return arrays.dtype

    def values(self, arrays: jax.Array) -> jax.Array:
        return arrays

    def encode(self, values: jax.Array) -> jax.Array:
        return values

    def columns(self, arrays: jax.Array, which: slice) -> tuple[jax.Array, Format]:
        return arrays[:, which], self.format

    def in_float32(self, x: jax.Array, arrays: jax.Array) -> jax.Array:
        return linear(x.astype(jnp.float32), arrays.astype(jnp.float32))

    def whole(self, x: jax.Array, arrays: jax.Array, bias: jax.Array | None = None) -> jax.Array:
        return linear(x, arrays, bias)

    def rows(self, arrays: jax.Array, which: jax.Array) -> jax.Array:
        return arrays[which]


class ScaledOperations(Operations):
    """See `formats.Scaled`."""

    format: Scaled

    def shape(self, arrays: narrow.Arrays) -> tuple[int, ...]:
        *lead, columns, _ = arrays["codes"].shape
        return (*lead, narrow.inner_size(arrays, self.format), columns)

    def values(self, arrays: narrow.Arrays) -> jax.Array:
        return narrow.values(arrays, self.format)

    def encode(self, values: jax.Array) -> narrow.Arrays:
        return narrow.encode(values, self.format)

    def columns(self, arrays: narrow.Arrays, which: slice) -> tuple[narrow.Arrays, Format]:
        return narrow.of_columns(arrays, self.format, which)

    def in_float32(self, x: jax.Array, arrays: narrow.Arrays) -> jax.Array:
        return narrow.product(x, arrays, self.format)


class JoinedOperations(Operations):
    """See `formats.Joined`. Products are those of its parts, each in its own way (`matrix.product`)."""

    format: Joined

    def shape(self, arrays: dict[str, Any]) -> tuple[int, ...]:
        shapes = [operations.shape(own) for _, operations, own in self._parts(arrays)]
        return (*shapes[0][:-1], sum(shape[-1] for shape in shapes))

    def values(self, arrays: dict[str, Any]) -> jax.Array:
        found = [operations.values(own) for _, operations, own in self._parts(arrays)]
        return jnp.concatenate([own.astype(jnp.float32) for own in found], axis=-1)

    def encode(self, values: jax.Array) -> dict[str, Any]:
        found, start = {}, 0
        for index, (columns, format) in enumerate(self.format.parts):
            own = values[..., start : start + columns]
            found[part_name(index)] = operations_of(format).encode(own)
            start += columns
        return found

    def columns(self, arrays: dict[str, Any], which: slice) -> tuple[Any, Format]:
        start, stop, _ = which.indices(sum(columns for columns, _ in self.format.parts))
        first, parts, formats = 0, [], []
        for columns, operations, own in self._parts(arrays):
            low, high = max(start - first, 0), min(stop - first, columns)
            if low < high:
                cut, format = operations.columns(own, slice(low, high))
                parts.append(cut)
                formats.append((high - low, format))
            first += columns
        if len(parts) == 1:
            return parts[0], formats[0][1]
        named = {part_name(index): part for index, part in enumerate(parts)}
        return named, Joined(parts=tuple(formats))

    def _parts(self, arrays: dict[str, Any]) -> list[tuple[int, Operations, Any]]:
        return [
            (columns, operations_of(format), arrays[part_name(index)])
            for index, (columns, format) in enumerate(self.format.parts)
        ]


OPERATIONS: dict[type[Format], type[Operations]] = {
    Dense: DenseOperations,
    Scaled: ScaledOperations,
    Joined: JoinedOperations,
}


@functools.partial(jax.jit, static_argnames="format")
def encoded(numbers: jax.Array, format: Format) -> Any:
    """The arrays that stand for numbers [..., I, O] in a format."""
    return operations_of(format).encode(numbers)


@functools.cache
def operations_of(format: Format) -> Operations:
    """What is done with matrices of a format."""
    return OPERATIONS[type(format)](format)
