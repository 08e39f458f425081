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
        """Bytes that a step holds of a matrix beside its arrays: all its numbers, where products are made of these."""
        return ArraySpec(shape, dtype).num_bytes


class Dense(Format):
    """One array with every number."""

    name = "dense"

    def specs(self, shape: tuple[int, ...], dtype: str) -> Specs:
        return ArraySpec(shape, dtype)

    def made_bytes(self, shape: tuple[int, ...], dtype: str) -> int:
        return 0


FORMATS: dict[str, Format] = {"dense": Dense()}
