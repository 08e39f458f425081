"""Scans from frames to frames, and scans cut into segments."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import fold, jax_triton, ssd_scan
from pallas_kernels.plan import H200
from pallas_kernels.records import RecordSizes, read_states, state_words, write_states
from pallas_kernels.ssd_scan import kernel, triton_scan
from pallas_kernels.ssd_scan.api import FRAMES, STATES
from pallas_kernels.ssd_scan.reference import Scan, ScanFrames
from pallas_kernels.triton import NOWHERE
from tests.kernels.by_name import ssd_scan_frames, ssd_states_frames
from tests.kernels.cases.ssd_scan import Case, make_inputs
from tests.kernels.compare import assert_same_bits, relative_error
from tests.kernels.lowered import kernels_in
from tests.kernels.ssd_scans import RAGGED, ROUNDED, TAIL, assert_close, scan
from tests.kernels.ssd_scans_in_frames import ODD, arguments, expected, records_of

LONG = Case(
    name="long",
    rows=4,
    tokens=520,
    heads=4,
    groups=2,
    lengths=(520, 256, 300, 0),
    state_lengths=(512, 256, 128, 0),
    initial_state=True,
)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("per_frame", [1, 4])
@pytest.mark.parametrize("case", [RAGGED, TAIL, ODD], ids=lambda case: case.name)
@pytest.mark.parametrize("implementation", sorted(set(FRAMES) - {"triton"}))
def test_states_go_from_frames_to_frames(case, per_frame, dtype, implementation):
    if case.state_lengths is None:
        case = replace(case, state_lengths=case.lengths)
    given = arguments(case, dtype, per_frame)
    run = functools.partial(
        ssd_scan_frames,
        records=records_of(case),
        first_frame=1,
        implementation=implementation,
    )
    whole = {name: jnp.pad(given[name], ((0, 0), (1, 2))) for name in ("read", "write")}
    y, arena = jax.jit(run)(**given | whole)
    want_y, want_state = expected(case, dtype)
    rounded = dtype == "bfloat16" and implementation == "pallas"
    assert_close(y, want_y, ROUNDED if rounded else None)
    everywhere = jnp.ones(case.rows, bool)
    state = read_states(arena, given["write"], everywhere, records_of(case))
    assert_close(state, want_state, ROUNDED if rounded else None)
    untouched = np.setdiff1d(np.arange(len(arena)), np.asarray(given["write"]))
    assert_same_bits(np.asarray(arena)[untouched], np.asarray(given["arena"])[untouched])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", [RAGGED, TAIL, ODD, LONG], ids=lambda case: case.name)
@pytest.mark.parametrize("implementation", sorted(STATES))
def test_states_alone_are_those_of_the_scan(case, dtype, implementation):
    """To the last bit; also where a row is cut into segments."""
    if case.state_lengths is None:
        case = replace(case, state_lengths=case.lengths)
    given = arguments(case, dtype, 1)
    how = {"records": records_of(case), "implementation": implementation}
    alone = jax.jit(functools.partial(ssd_states_frames, **how))(**given)
    _, arena = jax.jit(functools.partial(ssd_scan_frames, **how))(**given)
    assert_same_bits(alone, arena)
    assert not np.array_equal(alone, given["arena"])


@pytest.mark.parametrize("segments", [2, 3, 5])
def test_states_alone_are_those_of_segments(segments):
    given = ScanFrames(**arguments(LONG, "float32", 1))
    config = replace(kernel.CONFIGS["float32"], chunk=32, segments=segments)
    run = functools.partial(kernel.ssd_scan_frames_pallas, records=records_of(LONG), config=config)
    none, alone = jax.jit(functools.partial(run, outputs=False))(given)
    _, arena = jax.jit(run)(given)
    assert none is None
    assert_same_bits(alone, arena)


@pytest.mark.parametrize(
    "segments, size", [(2, LONG.size), (3, LONG.size), (5, LONG.size), (3, 200)]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_segments_give_what_one_program_gives(segments, size, dtype):
    inputs = make_inputs(replace(LONG, size=size), dtype=dtype)
    config = replace(kernel.CONFIGS[dtype], chunk=32, segments=segments)
    y, state = jax.jit(functools.partial(kernel.scan_dense, config=config))(Scan(**inputs))
    want_y, want_state = scan(**inputs, implementation="reference")
    tolerance = ROUNDED if dtype == "bfloat16" else None
    assert_close(y, want_y, tolerance)
    assert_close(state, want_state, tolerance)


def test_segments_read_no_padding_and_no_state_of_an_empty_row():
    inputs = make_inputs(LONG)
    config = replace(kernel.CONFIGS["float32"], chunk=32, segments=3)
    run = jax.jit(functools.partial(kernel.scan_dense, config=config))
    real = np.arange(LONG.tokens) < np.asarray(LONG.lengths)[:, None]
    dirty = dict(inputs)
    for name in ("x", "dt", "B", "C"):
        mask = real.reshape(real.shape + (1,) * (inputs[name].ndim - 2))
        dirty[name] = jnp.where(mask, inputs[name], jnp.nan)
    y, state = run(Scan(**inputs))
    dirty_y, dirty_state = run(Scan(**dirty))
    assert_same_bits(dirty_y, y)
    assert_same_bits(dirty_state, state)


def test_segments_fill_the_chip_and_no_more():
    assert kernel.num_segments(1, 128, 1 << 20, H200.num_sms) == 1
    assert kernel.num_segments(1, 48, 8192, H200.num_sms) == 2
    assert kernel.num_segments(1, 24, 8192, H200.num_sms) == 5
    assert kernel.num_segments(2, 24, 8192, H200.num_sms) == 2
    assert kernel.num_segments(1, 24, 1100, H200.num_sms) == 2
    assert kernel.num_segments(64, 128, 8192, H200.num_sms) == 1
    names = {1: ["ssd_scan"], 5: ["ssd_scan_segments", "ssd_scan_starts", "ssd_scan"]}
    for segments, kernels in names.items():
        config = kernel.Config(segments=segments)
        inputs = make_inputs(LONG, dtype="bfloat16")
        run = functools.partial(kernel.scan_dense, config=config)
        assert kernels_in(lambda inputs, run=run: run(Scan(**inputs)), inputs) == kernels


def test_frames_name_their_kernel_and_refuse_what_does_not_fit():
    given = arguments(ODD, "bfloat16", 2)
    run = functools.partial(ssd_scan_frames, records=records_of(ODD))
    assert kernels_in(lambda given: run(**given), given) == ["ssd_scan"]
    with pytest.raises(ValueError, match="read must hold 6 heads of each of 3 rows, got 2 in"):
        run(**given | {name: given[name][:, :1] for name in ("read", "write")})
    with pytest.raises(ValueError, match=r"xBC must have shape \(3, 70, 168\), got \(3, 70, 167\)"):
        run(**given | {"xBC": given["xBC"][..., :-1]})
    huge = RecordSizes(num_heads=1, head_dim=64, num_groups=1, state_size=512)
    reason = kernel.why_unsupported(huge, jnp.bfloat16)
    assert "at most 256 columns for 'pallas', got 512" in reason


def test_other_dtypes_and_wide_states_are_refused_by_name_and_run_by_default():
    inputs = make_inputs(replace(ODD, width=4, size=512), dtype="float16")
    with pytest.raises(NotImplementedError, match="for 'pallas', got float16"):
        ssd_scan(**inputs, implementation="pallas")
    assert kernels_in(lambda inputs: ssd_scan(**inputs), inputs) == []
    records = RecordSizes(num_heads=1, head_dim=4, num_groups=1, state_size=512)
    assert "at most 256 columns" in kernel.why_unsupported(records, jnp.bfloat16)


def test_triton_is_refused_with_the_reason():
    given = arguments(ODD, "float32", 2)
    with pytest.raises(
        NotImplementedError, match="ssd_scan_frames: inputs must be bfloat16 .* got float32"
    ):
        ssd_scan_frames(**given, records=records_of(ODD), implementation="triton")
    reason = jax_triton.why_unavailable()
    if reason is None:
        return
    given = arguments(ODD, "bfloat16", 2)
    with pytest.raises(NotImplementedError, match="ssd_scan_frames: needs "):
        ssd_scan_frames(**given, records=records_of(ODD), implementation="triton")


def test_segments_of_triton_follow_the_heads_alone():
    heads = {8: 256, 24: 256, 48: 512, 64: 512, 80: 1024, 128: 1024}
    assert {count: triton_scan.segment_tokens(count) for count in heads} == heads


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_huge_step_spoils_no_later_token(dtype):
    inputs = make_inputs(replace(ODD, lengths=None, state_lengths=None), dtype=dtype)
    inputs["dt"] = inputs["dt"].at[:, 3].set(1e7)
    y, state = scan(**inputs, implementation="pallas")
    want_y, want_state = scan(**inputs, implementation="reference")
    late = slice(4, None)
    tolerance = ROUNDED if dtype == "bfloat16" else 1e-5
    assert_close(y[:, late], want_y[:, late], tolerance)
    assert_close(state, want_state, tolerance)


def test_heads_that_groups_do_not_divide_are_refused():
    with pytest.raises(
        ValueError, match="num_heads must be a multiple of num_groups, .* got 3 and 2"
    ):
        RecordSizes(num_heads=3, head_dim=4, num_groups=2, state_size=4)
    x, B = jnp.ones((1, 4, 3, 4)), jnp.ones((1, 4, 2, 8))
    with pytest.raises(ValueError, match="groups of B must divide .* got 2 and 3"):
        fold(jnp.ones((1, 3, 4, 8)), x, jnp.ones((1, 4, 3)), -jnp.ones(3), B)


def test_another_rows_frames_exceed_the_tolerance():
    given = arguments(ODD, "float32", 2)
    run = jax.jit(
        functools.partial(ssd_scan_frames, records=records_of(ODD), implementation="pallas")
    )
    y, _ = run(**given)
    wrong = given | {"read": given["read"][::-1]}
    assert relative_error(run(**wrong)[0][2], y[2]) > 1e-3


def test_words_of_padding_are_no_other_channels_words():
    records = RecordSizes(num_heads=2, head_dim=3, num_groups=1, state_size=6)
    words, exists = state_words(records, 1, jnp.arange(4)[:, None], jnp.arange(8)[None, :])
    assert np.array_equal(np.asarray(words)[np.asarray(exists)], 18 + np.arange(18))
    assert (np.asarray(words)[~np.asarray(exists)] == NOWHERE).all()


def test_states_written_to_frames_are_read_back():
    records = RecordSizes(num_heads=5, head_dim=3, num_groups=1, state_size=6)
    state = jnp.asarray(np.random.default_rng(0).standard_normal((2, 5, 3, 6), np.float32))
    frames = jnp.asarray([[4, 1, 7], [2, 6, 3]], jnp.int32)
    arena = write_states(jnp.zeros((9, 40), jnp.uint32), frames, state, records)
    assert_same_bits(read_states(arena, frames, jnp.ones(2, bool), records), state)
    gone = read_states(arena, frames, jnp.asarray([False, True]), records)
    assert not gone[0].any() and gone[1].any()
