"""How the work of few rows is split, so that it still fills a GPU.

This file does not use jax, because `sizing.temporaries` counts by the same rules. tests/layers/test_linear.py compares
them with those of the kernels.
"""

from __future__ import annotations

NUM_SMS = 132  # multiprocessors of an H100 or H200
# For attention of few queries per row: the most programs of a multiprocessor, and the fewest tokens of a split.
ATTENTION_PROGRAMS, LEAST_SPLIT = 8, 256
TILE_ROWS, TILE_COLUMNS = 64, 128  # the tile of a product that one program computes
LEAST = 192  # the fewest elements of the inner dimension that are worth a program
# The same for the product of a single row, then programs per multiprocessor and the most parts.
ROW_INNER, ROW_COLUMNS, ROW_LEAST = 64, 64, 256
ROW_PROGRAMS, ROW_PARTS = 4, 8


def num_parts(rows: int, inner: int, columns: int) -> int:
    """How many parts a product [rows, inner] @ [inner, columns] is split into.

    They make 1.5 programs per multiprocessor, or as many as the inner dimension allows. There must not be fewer than
    XLA would make, or XLA would split the parts again. XLA does not compile a single row as a matrix product; for a
    single row `row_parts` counts the parts.
    """
    tiles, parts = -(-rows // TILE_ROWS) * -(-columns // TILE_COLUMNS), 1
    while rows > 1 and 2 * tiles * parts < 3 * NUM_SMS:
        part, rest = divmod(inner, 2 * parts)
        if rest or part < LEAST:
            break
        parts *= 2
    return parts


def row_parts(inner: int, columns: int) -> int:
    """How many parts `pallas_kernels.row_product` makes for a single row."""
    blocks, parts = -(-columns // ROW_COLUMNS), 1
    while blocks * parts < ROW_PROGRAMS * NUM_SMS and parts < ROW_PARTS:
        if inner < 2 * parts * ROW_LEAST:
            break
        parts *= 2
    part = -(-inner // parts)
    part += -part % ROW_INNER
    return -(-inner // part)
