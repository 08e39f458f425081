"""XLA's walk of rows with a window: each row begins at its own first tile, wherever the others stand."""

import functools
from dataclasses import replace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.frame_io import read_frames
from pallas_kernels.paged_attention import AttentionArrays, AttentionOptions, xla
from pallas_kernels.paged_attention.layout import FP8
from tests.kernels.attention_cases import every_tile, run, seen_keys
from tests.kernels.cases.paged_attention import TREE, Case, make_inputs
from tests.kernels.compare import assert_same_bits

TILE = xla.TILE_TOKENS
# Of one key, of 16, of a tile, one less and one more, of several tiles, and longer than all.
WINDOWS = [1, 16, TILE - 1, TILE, TILE + 1, 300, 5000]
# The pages' dtype, tokens of a page, pages of a row.
PAGES = [
    ("float32", 16, 72),
    ("bfloat16", 64, 18),
    (FP8, 256, 5),
    ("float32", 24, 48),
    (FP8, 16, 72),
]
# Rows far on beside rows at their beginning, at edges of tiles and windows, and rows without keys.
CASES = [
    Case(name="decode", tokens=1, base=(1130, 0, 127, 128, 600, 427)),
    Case(name="inert_far_on", tokens=1, base=(1130, 1000, 255), end=(0, 1001, 256)),
    Case(name="verify", tokens=5, base=(1140, 126, 0, 380, 15)),
    Case(name="tree", tokens=6, base=(1130, 125, 700, 3), tree=TREE),
    Case(name="chunk", tokens=32, base=(0, 1024, 96, 512), end=(32, 1040, 128, 0)),
    Case(name="keys_after_the_queries", tokens=5, base=(500, 40), end=(1100, 900)),
]
MIXED = replace(CASES[0], window=300, page_tokens=64, pages=18)


def all_seen(case: Case, row: int) -> set[int]:
    """Places in a row's pages that any of its queries sees."""
    base, length = case.base[row], case.lengths[row]
    return {key for t in range(case.tokens) for key in seen_keys(case, base, t, length)}


@pytest.mark.as_users
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("dtype", "page_tokens", "pages"), PAGES)
def test_bits_are_those_of_a_walk_over_every_tile(case, window, dtype, page_tokens, pages):
    """Every word that must not be read is NaN, see `make_inputs`, and 0 for the walk over all."""
    case = replace(case, window=window, page_tokens=page_tokens, pages=pages)
    inputs = make_inputs(case, dtype=dtype)
    got = run(case, inputs, "xla", dtype)
    assert np.isfinite(got).all()
    options = AttentionOptions(case.layout(dtype), case.head_dim**-0.5, sliding_window=window)
    unread = inputs["arena"] == jnp.uint32(0xFFFFFFFF)
    clean = inputs | {"arena": jnp.where(unread, 0, inputs["arena"])}
    clean["table"] = clean["table"][:, None]
    want = jax.jit(functools.partial(every_tile, options=options))(AttentionArrays(**clean))
    assert_same_bits(got, want)


@pytest.mark.parametrize("dtype", ["float32", FP8])
def test_where_other_rows_stand_changes_no_bit(dtype):
    want = run(MIXED, make_inputs(MIXED, dtype=dtype), "xla", dtype)
    for row, base in enumerate(MIXED.base):
        for others in (0, 1151):
            moved = [base if other == row else others for other in range(MIXED.rows)]
            case = replace(MIXED, base=tuple(moved))
            got = run(case, make_inputs(case, dtype=dtype), "xla", dtype)
            assert_same_bits(got[row], want[row])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("window", [16, 300])
def test_the_loop_is_as_long_as_the_row_whose_queries_see_most_tiles(case, window):
    """Each round says which frames it reads."""
    case = replace(case, window=window, page_tokens=64, pages=18)
    inputs, rounds = make_inputs(case), []

    def read(arena: jax.Array, ids: jax.Array, **given):
        jax.debug.callback(lambda ids: rounds.append(np.asarray(ids)), ids, ordered=True)
        return read_frames(arena, ids, **given)

    options = AttentionOptions(case.layout("float32"), scale=1.0, sliding_window=window)
    arrays = AttentionArrays(**inputs | {"table": inputs["table"][:, None]})
    with mock.patch.object(xla, "read_frames", read):
        jax.jit(functools.partial(xla.paged_attention_xla, options=options))(arrays)
    jax.effects_barrier()
    seen = [sorted({key // TILE for key in all_seen(case, row)}) for row in range(case.rows)]
    assert len(rounds) == max(len(tiles) for tiles in seen) <= (window + 31) // TILE + 2
    pages = np.asarray(inputs["table"]).reshape(case.rows, -1, TILE // case.page_tokens)
    for row, tiles in enumerate(seen):
        for tile, ids in zip(tiles, rounds, strict=False):
            assert (ids[row] == pages[row, tile]).all()
