"""How a product of few rows is split, so that it still fills a GPU. No jax: `engine.temporaries` counts the parts."""

from __future__ import annotations

NUM_SMS = 132  # multiprocessors of an H100 or H200
TILE_ROWS, TILE_COLUMNS = 64, 128  # of a product, by one program
LEAST = 192  # elements of the inner dimension that are worth a program


def num_parts(rows: int, inner: int, columns: int) -> int:
    """Parts of a product [rows, inner] @ [inner, columns] that make 1.5 programs a multiprocessor, or as many as the
    inner dimension allows.

    Not fewer than XLA's own, or it would split the parts again. A lone row is no product to XLA: it reads the matrix
    in a way of its own, and would turn a split one over first.
    """
    tiles, parts = -(-rows // TILE_ROWS) * -(-columns // TILE_COLUMNS), 1
    while rows > 1 and 2 * tiles * parts < 3 * NUM_SMS:
        part, rest = divmod(inner, 2 * parts)
        if rest or part < LEAST:
            break
        parts *= 2
    return parts
