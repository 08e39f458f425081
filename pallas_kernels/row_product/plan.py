"""How the product of a lone row is cut into parts. No jax."""

from __future__ import annotations

from pallas_kernels.plan import cdiv

BLOCK_INNER, BLOCK_COLUMNS = 64, 64  # the tile that a program reads at once
PROGRAMS_PER_SM = 4  # each keeps a tile of 8 KB (bfloat16) on the way
MOST_PARTS = 8  # what follows sums them with few threads
LEAST = 256  # elements of the inner dimension that are worth a program


def part_length(inner: int, columns: int, num_sms: int) -> int:
    """Elements of the inner dimension in a part, whole tiles; the last part may have fewer.

    Parts make `PROGRAMS_PER_SM` programs a multiprocessor, or as many as are worth it.
    """
    parts = 1
    while cdiv(columns, BLOCK_COLUMNS) * parts < PROGRAMS_PER_SM * num_sms:
        if parts == MOST_PARTS or inner < 2 * parts * LEAST:
            break
        parts *= 2
    return cdiv(cdiv(inner, parts), BLOCK_INNER) * BLOCK_INNER


def num_parts(inner: int, columns: int, num_sms: int) -> int:
    """Parts of a product."""
    return cdiv(inner, part_length(inner, columns, num_sms))
