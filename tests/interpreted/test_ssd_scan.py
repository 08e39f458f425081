"""The scan's Triton kernels against the recurrence: frames, segments, checkpoints, padding and batches."""

from __future__ import annotations

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import jax_triton
from pallas_kernels.records import RecordSizes, read_states
from pallas_kernels.ssd_scan import triton_scan
from pallas_kernels.ssd_scan.triton_scan import SHORTEST
from tests.kernels.by_name import ssd_scan_frames
from tests.kernels.cases.ssd_scan import CASES, Case, make_inputs
from tests.kernels.compare import assert_same_bits, relative_error
from tests.kernels.framed import framed
from tests.kernels.ssd_scans import RAGGED, ROUNDED, TAIL, assert_close, scan
from tests.kernels.ssd_scans_in_frames import ODD, arguments, expected, records_of

CUT = Case(
    name="cut_into_segments",
    rows=5,
    tokens=600,
    heads=2,
    groups=2,
    lengths=(600, 256, 300, 0, 257),
    state_lengths=(576, 250, 280, 0, 256),
    initial_state=True,
)
ONE_GROUP = replace(RAGGED, name="one_group", groups=1)
FRAME_CASES = [
    replace(RAGGED, state_lengths=RAGGED.lengths),
    replace(ONE_GROUP, state_lengths=RAGGED.lengths),
    TAIL,
    ODD,
    CUT,
]


def run(case: Case, given: dict, **static) -> tuple[np.ndarray, np.ndarray]:
    """`ssd_scan_frames` in Triton; outputs and arena."""
    call = functools.partial(
        ssd_scan_frames, records=records_of(case), implementation="triton", **static
    )
    return tuple(np.asarray(a) for a in jax.jit(call)(**given))


def in_triton(x, dt, A, B, C, *, initial_state=None, lengths=None, state_lengths=None):
    """`ssd_scan` by `ssd_scan_frames`: every head's state is a frame, and x, B and C are copied into one array."""
    rows, tokens, heads, width = x.shape
    if initial_state is None:
        initial_state = jnp.zeros((rows, heads, width, B.shape[3]))
    lengths = jnp.full(rows, tokens) if lengths is None else lengths
    arena, table, exists = framed(initial_state)
    y, arena = jax.jit(
        functools.partial(ssd_scan_frames, records=RecordSizes.of(x, B), implementation="triton")
    )(
        **{"arena": arena, "read": table, "write": table, "exists": exists, "dt": dt, "A": A},
        D=None,
        xBC=jnp.concatenate([a.reshape(rows, tokens, -1) for a in (x, B, C)], axis=-1),
        lengths=lengths,
        state_lengths=lengths if state_lengths is None else state_lengths,
    )
    state = jax.lax.bitcast_convert_type(arena, jnp.float32)
    return y.reshape(x.shape), state.reshape(initial_state.shape)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_outputs_and_state_equal_the_reference(case):
    inputs = make_inputs(case, dtype="bfloat16")
    y, state = in_triton(**inputs)
    want_y, want_state = scan(**inputs, implementation="reference")
    assert y.dtype == jnp.bfloat16 and state.dtype == jnp.float32
    assert_close(y, want_y, ROUNDED)
    assert_close(state, want_state, ROUNDED)


@pytest.mark.parametrize("case", FRAME_CASES, ids=lambda case: case.name)
def test_states_go_from_frames_to_frames(case):
    given = arguments(case, "bfloat16", 1 if case is ODD else 4)
    whole = {name: jnp.pad(given[name], ((0, 0), (1, 2))) for name in ("read", "write")}
    y, arena = run(case, given | whole, first_frame=1)
    want_y, want_state = expected(case, "bfloat16")
    assert_close(y, want_y, ROUNDED)
    everywhere = jnp.ones(case.rows, bool)
    state = read_states(arena, given["write"], everywhere, records_of(case))
    assert_close(state, want_state, ROUNDED)
    untouched = np.setdiff1d(np.arange(len(arena)), np.asarray(given["write"]))
    assert_same_bits(arena[untouched], np.asarray(given["arena"])[untouched])


@pytest.mark.parametrize("case", [RAGGED, CUT], ids=lambda case: case.name)
def test_a_row_gets_the_same_bits_alone_and_in_a_batch(case):
    case = replace(case, state_lengths=case.state_lengths or case.lengths)
    given = arguments(case, "bfloat16", 4)
    y, arena = run(case, given)
    for row in range(case.rows):
        names = set(given) - {"arena", "A", "D"}
        alone = given | {name: given[name][row : row + 1] for name in names}
        one = replace(case, rows=1)
        alone_y, alone_arena = run(one, alone)
        assert_same_bits(alone_y[0], y[row])
        written = np.asarray(given["write"][row])
        assert_same_bits(alone_arena[written], arena[written])


@pytest.mark.parametrize("case", [RAGGED, CUT], ids=lambda case: case.name)
def test_padding_changes_no_bit(case):
    inputs = make_inputs(case, dtype="bfloat16")
    real = np.arange(case.tokens) < np.asarray(case.lengths)[:, None]
    dirty = dict(inputs)
    for name in ("x", "dt", "B", "C"):
        mask = real.reshape(real.shape + (1,) * (inputs[name].ndim - 2))
        dirty[name] = jnp.where(mask, inputs[name], jnp.asarray(np.nan, inputs[name].dtype))
    y, state = in_triton(**inputs)
    dirty_y, dirty_state = in_triton(**dirty)
    assert_same_bits(dirty_y, y)
    assert_same_bits(dirty_state, state)
    assert not np.asarray(y, np.float32)[~real].any()


def test_an_empty_row_keeps_its_state_and_returns_zeros_even_from_nan():
    inputs = make_inputs(RAGGED, dtype="bfloat16")
    empty = RAGGED.lengths.index(0)
    poisoned = inputs | {"initial_state": inputs["initial_state"].at[empty].set(jnp.nan)}
    y, state = in_triton(**inputs)
    poisoned_y, _ = in_triton(**poisoned)
    assert_same_bits(state[empty], inputs["initial_state"][empty])
    assert_same_bits(poisoned_y, y)


def test_a_shorter_state_leaves_outputs_bit_for_bit():
    inputs = make_inputs(CUT, dtype="bfloat16")
    y, _ = in_triton(**inputs)
    full = inputs | {"state_lengths": inputs["lengths"]}
    assert_same_bits(y, in_triton(**full)[0])


def test_a_huge_step_spoils_no_later_token():
    inputs = make_inputs(replace(ODD, lengths=None, state_lengths=None), dtype="bfloat16")
    inputs["dt"] = inputs["dt"].at[:, 3].set(1e7).at[:, 7].set(0)
    y, state = in_triton(**inputs)
    want_y, want_state = scan(**inputs, implementation="reference")
    assert_close(y[:, 4:], want_y[:, 4:], ROUNDED)
    assert_close(state, want_state, ROUNDED)


def test_another_rows_frames_and_swapped_projections_exceed_the_tolerance():
    given = arguments(ODD, "bfloat16", 2)
    y, _ = run(ODD, given)
    assert relative_error(run(ODD, given | {"read": given["read"][::-1]})[0][2], y[2]) > ROUNDED
    inputs = make_inputs(TAIL, dtype="bfloat16")
    swapped = in_triton(**inputs | {"B": inputs["C"], "C": inputs["B"]})
    for got, want in zip(swapped, scan(**inputs, implementation="reference"), strict=True):
        assert relative_error(got, want) > 10 * ROUNDED


@pytest.mark.skipif(not jax_triton.interpreted(), reason="a GPU chooses the order of programs")
@pytest.mark.parametrize("case", [ODD, CUT], ids=lambda case: case.name)
def test_programs_may_run_in_any_order_also_where_a_checkpoint_is_written_over(case, monkeypatch):
    from triton.runtime.interpreter import interpreter_builder

    given = arguments(case, "bfloat16", 4)
    given |= {"write": given["read"]}
    forward, set_index = run(case, given), interpreter_builder.set_grid_idx

    def backwards(*index: int) -> None:
        whole = zip(interpreter_builder.grid_dim, index, strict=True)
        set_index(*(size - 1 - place for size, place in whole))

    monkeypatch.setattr(interpreter_builder, "set_grid_idx", backwards)
    for got, want in zip(run(case, given), forward, strict=True):
        assert_same_bits(got, want)


@pytest.mark.parametrize("ahead", [1, triton_scan.AHEAD])
def test_states_at_the_starts_of_segments_are_those_of_the_recurrence(ahead):
    """Of more segments than are loaded at once, words that fill no block, rows that end anywhere, and an empty one."""
    from pallas_kernels.ssd_scan.triton_kernel import starts_kernel

    rows, heads, words, segments, per_frame = 4, 3, 700, 11, 2
    rng = np.random.default_rng(0)
    arena = rng.standard_normal((2 * rows + 1, per_frame * words)).astype(np.float32)
    read = 1 + rng.permutation(2 * rows).reshape(rows, 2).astype(np.int32)
    exists = np.array([1, 0, 1, 1], np.int32)
    lengths = np.array([segments * SHORTEST, 5 * SHORTEST, 5 * SHORTEST + 1, 0], np.int32)
    added = rng.standard_normal((rows, heads, segments, words)).astype(np.float32)
    totals = -rng.uniform(0, 3, (rows, heads, segments)).astype(np.float32)
    added[:, :, 0], totals[:, :, 0] = np.nan, np.nan  # nothing comes before the first
    want = added.copy()
    for row, head in np.ndindex(rows, heads):
        part = arena[read[row, head // per_frame]].reshape(per_frame, words)
        state = want[row, head, 0] = np.float32(exists[row]) * part[head % per_frame]
        for i in range(1, -(-lengths[row] // SHORTEST)):
            state = state * np.exp2(totals[row, head, i]) + added[row, head, i]
            want[row, head, i] = state
    (got,) = jax_triton.call(
        *(starts_kernel, added, arena.view(np.uint32), read, exists, totals, lengths),
        np.array([0, segments * SHORTEST, 0], np.int32),
        in_place=[0],
        grid=(-(-words // triton_scan.BLOCK), heads, rows),
        num_warps=4,
        HEADS=heads,
        WORDS=words,
        FRAMES=read.shape[1],
        FRAME=arena.shape[1],
        PER_FRAME=per_frame,
        SEGMENT=SHORTEST,
        BLOCK=triton_scan.BLOCK,
        AHEAD=ahead,
    )
    # The interpreter computes as numpy does; a GPU rounds a product and its sum at once.
    bound = 0 if jax_triton.interpreted() else 1e-6
    np.testing.assert_allclose(got, want, rtol=bound, atol=bound)


def test_what_cannot_be_taken_is_refused_with_the_reason():
    with pytest.raises(
        NotImplementedError, match="ssd_scan_frames: inputs must be bfloat16 .* got float32"
    ):
        in_triton(**make_inputs(RAGGED))
    wide = RecordSizes(num_heads=2, head_dim=64, num_groups=1, state_size=256)
    reason = triton_scan.why_unsupported(wide, jnp.bfloat16)
    assert "at most 8192 elements for 'triton', got 64 x 256" in reason
    long = triton_scan.why_unsupported(records_of(RAGGED), jnp.bfloat16, 1 << 30)
    assert "must have fewer than 14913080 tokens for 'triton', got 1073741824" in long
