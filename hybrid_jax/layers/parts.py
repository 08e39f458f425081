"""How the work of few rows is split, so that it still fills a GPU.

No jax: `sizing.temporaries` counts by these rules, too. tests/layers/test_linear.py holds them to those of the kernels.
"""

from __future__ import annotations

NUM_SMS = 132  # multiprocessors of an H100 or H200
# Attention of a few queries a row: programs that a multiprocessor may get, and the fewest tokens of a split.
ATTENTION_PROGRAMS, LEAST_SPLIT = 8, 256
TILE_ROWS, TILE_COLUMNS = 64, 128  # of a product, by one program
LEAST = 192  # elements of the inner dimension that are worth a program
# The same of a lone row's product, with programs of a multiprocessor and the most parts.
ROW_INNER, ROW_COLUMNS, ROW_LEAST = 64, 64, 256
ROW_PROGRAMS, ROW_PARTS = 4, 8


def num_parts(rows: int, inner: int, columns: int) -> int:
    """Parts of a product [rows, inner] @ [inner, columns] that make 1.5 programs a multiprocessor, or as many as the
    inner dimension allows.

    Not fewer than XLA's own, or it would split the parts again. XLA does not compile a single row as a matrix product;
    `row_parts` counts the parts there.
    """
    tiles, parts = -(-rows // TILE_ROWS) * -(-columns // TILE_COLUMNS), 1
    while rows > 1 and 2 * tiles * parts < 3 * NUM_SMS:
        part, rest = divmod(inner, 2 * parts)
        if rest or part < LEAST:
            break
        parts *= 2
    return parts


def row_parts(inner: int, columns: int) -> int:
    """Parts that `pallas_kernels.row_product` makes of the product of a lone row."""
    blocks, parts = -(-columns // ROW_COLUMNS), 1
    while blocks * parts < ROW_PROGRAMS * NUM_SMS and parts < ROW_PARTS:
        if inner < 2 * parts * ROW_LEAST:
            break
        parts *= 2
    part = -(-inner // parts)
    part += -part % ROW_INNER
    return -(-inner // part)
