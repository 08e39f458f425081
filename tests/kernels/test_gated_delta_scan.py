"""The gated delta rule over prompts, from frames to frames."""

from __future__ import annotations

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.causal_conv import causal_conv
from pallas_kernels.gated_delta.scan_kernel import inverse_by_products, why_unsupported
from pallas_kernels.records import ProjectionLayout, RecordSizes, read_states
from tests.kernels.by_name import gated_delta_scan_frames, store_tail
from tests.kernels.cases.gated_delta import SCANS, ScanCase, make_scan_frames_inputs
from tests.kernels.compare import assert_same_bits, relative_error
from tests.kernels.framed import in_frames
from tests.kernels.lowered import kernels_in

TOLERANCE = {"float32": 3e-6, "bfloat16": 6e-3}  # of the norm
every_dtype = pytest.mark.parametrize("dtype", sorted(TOLERANCE))
BY_NAME = {case.name: case for case in SCANS}
ON_KERNELS = (
    "one_token",
    "two_tiles_and_a_bit",
    "odd_sizes",
    "one_head_one_state",
    "keys_alike",
    "forgetful",
)
ANYWHERE = ScanCase(
    name="states_anywhere",
    rows=6,
    tokens=131,
    lengths=(131, 131, 130, 100, 64, 40),
    state_lengths=(3, 64, 127, 0, 1, 40),
)
scan = functools.partial(jax.jit, static_argnames=("records", "first_frame", "implementation"))(
    gated_delta_scan_frames
)


def arguments(case: ScanCase, dtype: str, per_frame: int = 2) -> dict:
    """Row 0 writes in place, the others elsewhere, and row 1 starts from nothing. The layer's frames are not the
    first."""
    given = make_scan_frames_inputs(case, dtype=dtype)
    arena, read = in_frames(given.pop("state"), per_frame)
    exists = jnp.arange(case.rows) != 1
    spare = np.arange(read.size, dtype=np.int32).reshape(read.shape) + arena.shape[0]
    write = jnp.where((jnp.arange(case.rows) == 0)[:, None], read, spare)
    nan = jnp.full((read.size, arena.shape[1]), 0xFFFFFFFF, jnp.uint32)
    read = jnp.where(exists[:, None], read, 0)
    tables = {"read": read, "write": write}
    return {
        **given,
        **{name: jnp.pad(table, ((0, 0), (1, 2))) for name, table in tables.items()},
        "arena": jnp.concatenate([arena, nan]),
        "exists": exists,
    }


def records_of(case: ScanCase) -> RecordSizes:
    return RecordSizes(
        num_heads=case.heads,
        head_dim=case.width,
        num_groups=case.groups,
        state_size=case.size,
    )


def run(case: ScanCase, given: dict, implementation: str) -> tuple:
    """y, records, the states written, and the arena's other frames."""
    sizes = records_of(case)
    static = {"records": sizes, "first_frame": 1, "implementation": implementation}
    y, ukq, arena = scan(**given, **static)
    write = given["write"][:, 1:-2]
    others = np.setdiff1d(np.arange(len(arena)), np.asarray(write))
    state = read_states(arena, write, jnp.ones(case.rows, bool), sizes)
    return y, ukq, state, np.asarray(arena)[others]


@every_dtype
@pytest.mark.parametrize(
    ("implementation", "case"),
    [
        *(("pallas", case) for case in (*(BY_NAME[name] for name in ON_KERNELS), ANYWHERE)),
        ("xla", BY_NAME["states_before_the_end"]),
    ],
    ids=lambda x: getattr(x, "name", x),
)
def test_equals_the_reference(case, dtype, implementation):
    given = arguments(case, dtype)
    *got, others = run(case, given, implementation)
    *want, untouched = run(case, given, "reference")
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        assert relative_error(a, b) <= TOLERANCE[dtype]
    assert_same_bits(others, untouched)


@pytest.mark.parametrize("per_frame", [1, 64])
def test_states_lie_in_frames_of_any_size(per_frame):
    case = replace(BY_NAME["odd_sizes"], lengths=(19, 0), state_lengths=(7, 0))
    given = arguments(case, "float32", per_frame)
    for a, b in zip(run(case, given, "pallas"), run(case, given, "reference"), strict=True):
        assert relative_error(a, b) <= TOLERANCE["float32"]


@every_dtype
def test_padding_is_zero_and_changes_no_bit_whatever_it_holds(dtype):
    case = BY_NAME["padding"]
    given = arguments(case, dtype)
    padding = (np.arange(case.tokens) >= np.array(case.lengths)[:, None])[..., None]
    poisoned = dict(given)
    for name in ("vkq", "dt", "projected"):
        poisoned[name] = jnp.where(padding, jnp.nan, given[name])
    got, want = (run(case, each, "pallas") for each in (poisoned, given))
    for a, b in zip(got, want, strict=True):
        assert_same_bits(a, b)
    for made in got[:2]:
        assert not (np.asarray(made, np.float32) * padding).any()


def test_a_row_without_tokens_keeps_its_state():
    case = BY_NAME["padding"]
    given = arguments(case, "float32")
    _, _, state, _ = run(case, given, "pallas")
    before = make_scan_frames_inputs(case)["state"]
    assert_same_bits(state[2], before[2])


def test_a_prompt_in_two_chunks_is_a_prompt():
    case = ScanCase(name="whole", tokens=40)
    given = arguments(case, "float32")
    y, ukq, state, _ = run(case, given, "pallas")
    per_token, parts, table = ("vkq", "dt", "projected"), [], given["read"]
    for cut in (slice(0, 24), slice(24, 40)):
        count = jnp.full(case.rows, cut.stop - cut.start)
        part = {name: given[name][:, cut] for name in per_token}
        part |= {"lengths": count, "state_lengths": count, "read": table}
        made = scan(
            **given | part, records=records_of(case), first_frame=1, implementation="pallas"
        )
        parts.append(made[:2])
        given |= {"arena": made[2], "exists": jnp.ones(case.rows, bool)}
        table = given["write"]
    for index, whole in enumerate((y, ukq)):
        joined = jnp.concatenate([part[index] for part in parts], axis=1)
        assert relative_error(joined, whole) <= TOLERANCE["float32"]
    last = read_states(given["arena"], table[:, 1:-2], jnp.ones(2, bool), records_of(case))
    assert relative_error(last, state) <= TOLERANCE["float32"]


def test_mistakes_exceed_the_tolerance():
    case = ScanCase(name="mistakes", rows=3, tokens=40, heads=4, groups=2)
    given = arguments(case, "float32")
    want = run(case, given, "reference")[0]
    v, k, q = jnp.split(given["vkq"], [32, 64], axis=-1)
    groups = k.reshape(3, 40, 2, 16)[:, :, ::-1].reshape(k.shape)
    changes = (
        {"vkq": jnp.concatenate([v, q, k], axis=-1)},
        {"vkq": jnp.concatenate([v, groups, q], axis=-1)},
        {"dt": jnp.roll(given["dt"], 1, axis=1)},
        {"A": given["A"][::-1]},
        {"projected": jnp.roll(given["projected"], 1, axis=2)},
        {"read": given["read"][::-1]},
    )
    for change in changes:
        got = run(case, given | change, "pallas")[0]
        assert relative_error(got, want) > 100 * TOLERANCE["float32"]


@pytest.mark.parametrize("size", [1, 2, 16, 64])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("float16", 1e-3)])
@pytest.mark.parametrize("alike", [0.0, 0.7, 1.0])
def test_triangles_of_keys_are_inverted_by_products(size, dtype, tolerance, alike):
    rng = np.random.default_rng(0)
    keys = (1 - alike) * rng.standard_normal((size, 32)) + alike * rng.standard_normal(32)
    keys /= np.sqrt(np.square(keys).sum(-1, keepdims=True))
    triangle = np.tril(rng.uniform(0, 1, (size, 1)) * (keys @ keys.T), -1)
    got = inverse_by_products(jnp.asarray(triangle, jnp.float32), jnp.dtype(dtype))
    assert relative_error(got, np.linalg.inv(np.eye(size) + triangle)) < tolerance


@every_dtype
def test_a_ring_takes_records_from_in_front_of_queries(dtype):
    """Convolution, scan and tail over one projection, whose last columns are rates of writing."""
    rows, tokens, heads, slots = 2, 21, 4, 8
    layout = ProjectionLayout(num_heads=heads, head_dim=8, num_groups=2, state_size=16, delta=True)
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape, np.float32))

    bits = {"float32": jnp.uint32, "bfloat16": jnp.uint16}[dtype]
    projected = normal(rows, tokens, layout.projected_size).astype(dtype)
    assert layout.projected_size == 32 + 96 + 4 + 4
    history, weight = jnp.zeros((rows, 3, layout.conv_size), bits), normal(4, layout.conv_size)
    lengths, kept = jnp.asarray([21, 9]), jnp.asarray([16, 5])
    A, arena = -jnp.ones(heads), jnp.zeros((9, 2048), jnp.uint32)
    state_frames, column_frames = jnp.asarray([[1], [2]]), jnp.asarray([[3], [4]])

    @functools.partial(jax.jit, static_argnames="implementation")
    def chunk(implementation: str):
        named = {"implementation": implementation}
        vkq, dt = causal_conv(
            projected=projected,
            history=history,
            weight=weight.astype(dtype),
            bias=None,
            dt_bias=jnp.ones(heads),
            lengths=lengths,
            layout=layout,
            **named,
        )
        place = {"read": state_frames, "write": state_frames, "exists": jnp.zeros(rows, bool)}
        spans = {"lengths": lengths, "state_lengths": kept}
        y, ukq, after = gated_delta_scan_frames(
            **{"vkq": vkq, "dt": dt, "A": A, "projected": projected, "arena": arena},
            **place,
            **spans,
            records=layout,
            **named,
        )
        ring = store_tail(
            arena=after,
            conv=jnp.zeros((1, rows, 4, layout.conv_size), bits),
            xB=jnp.zeros((1, rows, slots, layout.record_size), bits),
            dt=jnp.zeros((1, rows, slots, heads), jnp.float32),
            **{"projected": projected, "history": history, "xBC": ukq, "steps": dt},
            **{"frames": column_frames, "rows": jnp.arange(rows)},
            **spans,
            layer=0,
            layout=layout,
            **named,
        )
        return y, ukq, ring

    (y, ukq, got), (want_y, _, want) = chunk("pallas"), chunk("reference")
    assert relative_error(y, want_y) <= TOLERANCE[dtype]
    assert_same_bits(got[1], want[1])
    for row in range(rows):
        own = ukq[row, kept[row] : lengths[row], : layout.record_size]
        in_ring = jax.lax.bitcast_convert_type(got[2][0, row], ukq.dtype)
        assert_same_bits(in_ring[: len(own)], own)
    read = functools.partial(read_states, frames=state_frames, exists=jnp.ones(rows, bool))
    states = (read(each[0], records=layout) for each in (got, want))
    assert relative_error(*states) <= TOLERANCE[dtype]


def test_two_kernels_run_and_what_does_not_fit_is_refused():
    case = BY_NAME["odd_sizes"]
    given = arguments(case, "bfloat16")
    call = functools.partial(gated_delta_scan_frames, records=records_of(case), first_frame=1)
    kernels = kernels_in(lambda given: call(**given), given)
    assert kernels == ["gated_delta_solve", "gated_delta_scan"]
    with pytest.raises(ValueError, match="read must hold 6 heads of each of 2 rows, got 2 in"):
        call(**given | {name: given[name][:, :2] for name in ("read", "write")})
    with pytest.raises(ValueError, match=r"vkq must have shape \(2, 19, 72\), got \(2, 19, 71\)"):
        call(**given | {"vkq": given["vkq"][..., :-1]})
    with pytest.raises(ValueError, match="projected must end in 6 columns of b, got 5 in all"):
        call(**given | {"projected": given["projected"][..., :5]})
    half = given | {name: given[name].astype("float16") for name in ("vkq", "projected")}
    with pytest.raises(NotImplementedError, match="for 'pallas', got float16"):
        call(**half, implementation="pallas")
    assert kernels_in(lambda given: call(**given), half) == []
    wide = replace(records_of(case), state_size=256)
    assert "at most 128 columns" in why_unsupported(wide, jnp.bfloat16)
