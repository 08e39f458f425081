"""How a product of few rows is split, so that it still fills a GPU. No jax: the host counts by the same rule."""

from __future__ import annotations

TILE_ROWS, TILE_COLUMNS = 64, 128  # the tile of a product that one program computes
LEAST = 192  # the fewest elements of the inner dimension that are worth a program


def num_parts(rows: int, inner: int, columns: int, num_sms: int) -> int:
    """How many parts a product [rows, inner] @ [inner, columns] is split into.

    They make 1.5 programs per multiprocessor, or as many as the inner dimension allows. There must not be fewer than
    XLA would make, or XLA would split the parts again. XLA does not compile a single row as a matrix product;
    `pallas_kernels.row_product` has that.
    """
    tiles, parts = -(-rows // TILE_ROWS) * -(-columns // TILE_COLUMNS), 1
    while rows > 1 and 2 * tiles * parts < 3 * num_sms:
        part, rest = divmod(inner, 2 * parts)
        if rest or part < LEAST:
            break
        parts *= 2
    return parts
