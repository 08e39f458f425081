"""In which arrays the numbers of a matrix are kept. No jax, so the host counts bytes by the same entries."""

from __future__ import annotations

from hybrid_jax.config.arrays import ArraySpec

Specs = ArraySpec | dict[str, ArraySpec]


class Format:
    """A way to keep a matrix. An entry of `products.operations.OPERATIONS` computes with it."""

    name: str

    def specs(self, shape: tuple[int, ...], dtype: str) -> Specs:
        """The arrays that stand for a matrix [..., I, O] of a model in `dtype`: one, or several by name."""
        raise NotImplementedError

    def made_bytes(self, shape: tuple[int, ...], dtype: str) -> int:
        """Bytes that a step holds of a matrix [I, O] beside its arrays: all its numbers, where products are made of
        these. Nobody asks for a matrix that is kept as one dense array, nor for experts, whose numbers all count."""
        return ArraySpec(shape, dtype).num_bytes

    def token_bytes(self, shape: tuple[int, ...], dtype: str) -> int:
        """Bytes that a product of its own holds for each token, beside what goes in and comes out."""
        return 0


class Dense(Format):
    """One array with every number."""

    name = "dense"

    def specs(self, shape: tuple[int, ...], dtype: str) -> Specs:
        return ArraySpec(shape, dtype)


FORMATS: dict[str, Format] = {"dense": Dense()}
