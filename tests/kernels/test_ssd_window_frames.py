"""Windows and folds whose states lie in frames and whose records lie in rings, and windows over trees."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import fold
from pallas_kernels.records import read_states
from pallas_kernels.ssd_window import RecordSizes
from pallas_kernels.ssd_window.api import FRAME_FOLDS, FRAMES, RINGS, SCORES
from tests.kernels.by_name import (
    fold_frames,
    ssd_window_frames,
    ssd_window_rings,
    ssd_window_scores,
)
from tests.kernels.cases.ssd_window import CASES, make_inputs
from tests.kernels.compare import assert_same_bits, relative_error
from tests.kernels.framed import in_frames
from tests.kernels.lowered import kernels_in
from tests.kernels.ssd_windows import FAST, RING, all_scores, assert_close, window

# A root with two children, one of which has a child; the last token stands alone.
TREE = jnp.asarray([0b00001, 0b00011, 0b00101, 0b01011, 0b10000], jnp.int32)
PATHS = ((0,), (0, 1), (0, 2), (0, 1, 3), (4,))


@pytest.mark.parametrize("per_frame", [1, 4, 64])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("implementation", sorted(FRAMES))
def test_states_in_frames_give_the_windows_outputs(case, per_frame, implementation):
    inputs = make_inputs(case)
    state = inputs.pop("state")
    exists = jnp.arange(case.rows) % 3 != 1
    arena, table = in_frames(state, per_frame)
    table = jnp.where(exists[:, None], table, 0)  # frame 0 is NaN throughout
    run = jax.jit(functools.partial(ssd_window_frames, implementation=implementation))
    y, after = run(arena=arena, frames=table, exists=exists, **inputs)
    empty = jnp.where(exists[:, None, None, None], state, 0.0)
    assert_close(y, window(empty, **inputs, implementation="reference"))
    assert_same_bits(after, arena)


def test_frames_that_cannot_hold_the_heads_are_refused():
    case = RING
    inputs = make_inputs(case)
    arena, table = in_frames(inputs.pop("state"), 2)
    with pytest.raises(ValueError, match="must hold 6 heads of each of 4 rows, got 4 in"):
        ssd_window_frames(arena=arena, frames=table[:, :2], exists=jnp.ones(4, bool), **inputs)


def in_rings(inputs: dict, layers: int, layer: int, spare_rows: int = 1) -> tuple:
    """The records as bits at one layer of rings whose other layers and rows are NaN, and their sizes."""
    x, B, dt = inputs["x"], inputs["B"], inputs["dt"]
    lead = x.shape[:2]
    joined = jnp.concatenate([x.reshape(*lead, -1), B.reshape(*lead, -1)], axis=-1)
    bits = jnp.uint16 if joined.dtype == jnp.bfloat16 else jnp.uint32
    pad = ((layer, layers - layer - 1), (0, spare_rows), (0, 0), (0, 0))
    xB = jnp.pad(joined[None], pad, constant_values=np.nan)
    dt = jnp.pad(dt[None], pad, constant_values=np.nan)
    return jax.lax.bitcast_convert_type(xB, bits), dt, RecordSizes.of(x, B)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("implementation", sorted(RINGS))
def test_records_in_rings_give_the_windows_outputs(case, dtype, implementation):
    inputs = make_inputs(case, dtype=dtype)
    arena, table = in_frames(inputs["state"], 2)
    xB, dt, records = in_rings(inputs, layers=3, layer=1)
    C = inputs["C"].reshape(*inputs["C"].shape[:2], -1)
    exists, D = jnp.ones(case.rows, bool), jnp.linspace(-1, 2, case.heads)
    scores = all_scores(inputs["C"], inputs["B"])
    dead = jnp.arange(case.slots) >= (inputs["starts"] + inputs["num_valid"])[:, None]
    scores = jnp.where(dead[:, None, None], jnp.nan, scores)
    rows = {name: inputs[name] for name in ("starts", "num_valid")}
    table = jnp.pad(table, ((0, 0), (2, 1)))  # of a whole checkpoint
    A = jnp.stack([-inputs["A"], inputs["A"], 0 * inputs["A"]])
    run = functools.partial(ssd_window_rings, layer=1, first_frame=2, records=records, **rows)
    run = jax.jit(functools.partial(run, implementation=implementation))
    want = window(**inputs, implementation="reference")
    own = inputs["starts"][:, None] + jnp.arange(case.tokens)
    own = jnp.minimum(own, case.slots - 1)[..., None, None]
    x = jnp.take_along_axis(inputs["x"], own, axis=1).astype(jnp.float32)
    counts = (jnp.arange(case.tokens) < inputs["num_valid"][:, None])[..., None, None]
    want = jnp.where(counts, want + D[:, None] * x, 0)
    states = {"arena": arena, "frames": table, "exists": exists}
    assert_close(run(**states, xB=xB, dt=dt, A=A, C=C, D=D, scores=scores), want)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("implementation", sorted(SCORES))
def test_scores_are_products_with_the_records_that_a_token_sees(case, dtype, implementation):
    inputs = make_inputs(case, dtype=dtype)
    xB, _, records = in_rings(inputs, layers=3, layer=1)
    starts, num_valid = inputs["starts"], inputs["num_valid"]
    behind = jnp.arange(case.slots) >= (starts + num_valid)[:, None]
    bits = xB.at[1, : case.rows].set(
        jnp.where(behind[..., None], ~xB.dtype.type(0), xB[1, : case.rows])
    )
    C = inputs["C"].reshape(*inputs["C"].shape[:2], -1)
    run = functools.partial(ssd_window_scores, layer=1, records=records)
    run = jax.jit(functools.partial(run, implementation=implementation))
    got = run(C=C, xB=bits, starts=starts, num_valid=num_valid)
    token, slot = jnp.arange(case.tokens)[:, None], jnp.arange(case.slots)
    seen = (slot <= starts[:, None, None] + token) & (token < num_valid[:, None, None])
    want = jnp.where(seen[:, :, None], all_scores(inputs["C"], inputs["B"]), 0)
    assert_close(got, want)
    assert not np.any(np.asarray(got)[~np.broadcast_to(seen[:, :, None], got.shape)])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("per_frame", [1, 4])
@pytest.mark.parametrize("implementation", sorted(FRAME_FOLDS))
def test_folds_between_frames_are_folds_of_each_layer(dtype, per_frame, implementation):
    """Two layers; row 0 folds in place, row 1 into other frames, row 2 from nothing, row 3 not at all."""
    layers = [make_inputs(RING, seed=seed, dtype=dtype) for seed in (1, 2)]
    lengths = jnp.asarray([32, 7, 19, -1], jnp.int32)
    exists = jnp.asarray([True, True, False, True])
    arenas, tables = zip(
        *(in_frames(x["state"], per_frame, i) for i, x in enumerate(layers)), strict=True
    )
    size = arenas[0].shape[0]
    spare = np.arange(8 * tables[0].shape[1], dtype=np.int32).reshape(4, -1) + 2 * size
    nan = jnp.full((spare.size, arenas[0].shape[1]), 0xFFFFFFFF, jnp.uint32)
    arena = jnp.concatenate([*arenas, nan])
    read = jnp.concatenate([tables[0], tables[1] + size], axis=1)
    read = jnp.where(exists[:, None], read, 0)
    write = jnp.where(jnp.asarray([True, False, False, False])[:, None], read, spare)
    rings = [in_rings(x, layers=1, layer=0) for x in layers]
    xB, dt = (jnp.concatenate(parts) for parts in zip(*(r[:2] for r in rings), strict=True))
    A = jnp.stack([x["A"] for x in layers])
    run = functools.partial(fold_frames, records=rings[0][2], per_layer=tables[0].shape[1])
    run = jax.jit(functools.partial(run, implementation=implementation))
    frames = {"arena": arena, "read": read, "write": write, "exists": exists}
    got = np.asarray(run(**frames, lengths=lengths, xB=xB, dt=dt, A=A))
    words = RING.width * RING.size
    for index, inputs in enumerate(layers):
        state = jnp.where(exists[:, None, None, None], inputs["state"], 0.0)
        records = {name: inputs[name] for name in ("x", "dt", "A", "B")}
        counted = jnp.maximum(lengths, 0)
        want = fold(state, **records, lengths=counted, implementation="reference")
        for row in range(3):
            own = write[row].reshape(2, -1)[index]
            heads = got[np.asarray(own), : per_frame * words].view(np.float32)
            assert_close(heads.reshape(-1, RING.width, RING.size)[: RING.heads], want[row])
    untouched = np.setdiff1d(np.arange(len(got)), np.asarray(write[:3]))
    assert_same_bits(got[untouched], np.asarray(arena)[untouched])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("implementation", sorted(FRAME_FOLDS))
def test_any_rows_of_a_batch_fold_and_none_past_its_ring(dtype, implementation):
    """Of eleven rows those that fold lie anywhere; a length may be larger than the ring, of 20 slots."""
    case = replace(RING, slots=20, starts=(0,) * 11, tokens=1)
    inputs = make_inputs(case, dtype=dtype)
    lengths = jnp.asarray([-1, 20, -1, -1, 0, 20, 7, -1, 1, 25, 12], jnp.int32)
    arena, table = in_frames(inputs["state"], 3)
    xB, dt, records = in_rings(inputs, layers=1, layer=0)[:3]
    given = {"arena": arena, "read": table, "write": table, "exists": jnp.ones(case.rows, bool)}
    given |= {"lengths": lengths, "xB": xB, "dt": dt, "A": inputs["A"][None]}
    run = functools.partial(fold_frames, records=records, per_layer=table.shape[1])
    got = jax.jit(functools.partial(run, implementation=implementation))(**given)
    got = read_states(got, table, jnp.ones(case.rows, bool), records)
    kept = {name: inputs[name] for name in ("state", "x", "dt", "A", "B")}
    want = fold(**kept, lengths=jnp.clip(lengths, 0, case.slots), implementation="reference")
    folds = np.asarray(lengths) >= 0
    assert_close(got[folds], want[folds])
    assert_same_bits(got[~folds], inputs["state"][~folds])


def test_rings_and_frames_name_their_kernels():
    inputs = make_inputs(RING)
    arena, table = in_frames(inputs["state"], 2)
    xB, dt, records = in_rings(inputs, layers=1, layer=0)
    exists, C = jnp.ones(RING.rows, bool), inputs["C"].reshape(RING.rows, RING.tokens, -1)
    rows = {name: inputs[name] for name in ("starts", "num_valid")}
    rows |= {"D": inputs["A"], "scores": all_scores(inputs["C"], inputs["B"])}

    def windows(name, arena, table, xB, dt, A, C):
        run = functools.partial(ssd_window_rings, layer=0, records=records, **rows)
        given = {"arena": arena, "frames": table, "exists": exists, "xB": xB, "dt": dt}
        return run(**given, A=A[None], C=C, implementation=name)

    def folds(name, arena, table, xB, dt, A):
        given = {"arena": arena, "read": table, "write": table, "exists": exists, "xB": xB}
        given |= {"dt": dt, "A": A[None], "lengths": inputs["num_valid"]}
        static = {"records": records, "per_layer": table.shape[1]}
        return fold_frames(**given, **static, implementation=name)

    for function, more, kernel in ((windows, [C], "ssd_window"), (folds, [], "ssd_fold")):
        given = (arena, table, xB, dt, inputs["A"], *more)
        for name, kernels in ((None, [kernel]), ("pallas", [kernel]), ("reference", [])):
            assert kernels_in(functools.partial(function, name), *given) == kernels


@pytest.mark.parametrize("implementation", FAST)
class TestTree:
    def test_a_node_is_the_end_of_its_own_chain(self, implementation):
        """Every node of the tree gives what a window over its path alone would give."""
        case = replace(RING, tokens=5, slots=37, starts=(0, 9, 32, 3))
        inputs = make_inputs(case)
        ancestors = jnp.broadcast_to(TREE, (case.rows, 5))
        got = window(**inputs, ancestors=ancestors, implementation=implementation)
        for node, path in enumerate(PATHS):
            alone = dict(inputs, num_valid=jnp.full(case.rows, len(path)))
            place = inputs["starts"][:, None] + jnp.asarray(path)
            for name in ("x", "dt", "B"):
                ring = inputs[name]
                index = place.reshape(*place.shape, *(1,) * (ring.ndim - 2))
                moved = jnp.take_along_axis(ring, index, axis=1)
                for row, start in enumerate(case.starts):
                    ring = ring.at[row, start : start + len(path)].set(moved[row])
                alone[name] = ring
            alone["C"] = inputs["C"][:, jnp.asarray(path)]
            want = window(**alone, implementation="reference")[:, -1]
            assert_close(got[:, node], want)

    def test_a_chain_as_a_tree_is_a_chain(self, implementation):
        case = replace(RING, tokens=5, slots=37, starts=(0, 9, 32, 3), num_valid=(5, 2, 1, 0))
        inputs = make_inputs(case)
        chain = jnp.broadcast_to((1 << jnp.arange(1, 6)) - 1, (case.rows, 5))
        got = window(**inputs, ancestors=chain, implementation=implementation)
        assert_close(got, window(**inputs, implementation="reference"))

    def test_another_tree_exceeds_the_tolerance(self, implementation):
        case = replace(RING, tokens=5, slots=37, starts=(0, 9, 32, 3))
        inputs = make_inputs(case)
        trees = [jnp.broadcast_to(tree, (case.rows, 5)) for tree in (TREE, TREE.at[3].set(0b01101))]
        got, other = (
            window(**inputs, ancestors=tree, implementation=implementation) for tree in trees
        )
        assert relative_error(got[:, 3], other[:, 3]) > 1e-3
        assert_same_bits(got[:, :3], other[:, :3])


def test_shapes_a_kernel_cannot_take_are_refused_by_name_and_run_by_default():
    case = replace(RING, slots=160, tokens=1, starts=(130,) * 4)
    inputs = make_inputs(case)
    with pytest.raises(NotImplementedError, match="at most 128 slots for 'pallas', got 160"):
        window(**inputs, implementation="pallas")
    arena, table = in_frames(inputs["state"], 2)
    xB, dt, records = in_rings(inputs, layers=1, layer=0)

    def by_default(xB):
        return ssd_window_rings(
            **{"arena": arena, "frames": table, "exists": jnp.ones(4, bool)},
            **{"xB": xB, "dt": dt, "A": inputs["A"][None]},
            C=inputs["C"].reshape(4, 1, -1),
            layer=0,
            records=records,
            starts=inputs["starts"],
            num_valid=inputs["num_valid"],
            D=inputs["A"],
            scores=all_scores(inputs["C"], inputs["B"]),
        )

    assert kernels_in(by_default, xB) == []


def test_trees_have_no_more_nodes_than_bits():
    inputs = make_inputs(RING)
    with pytest.raises(ValueError, match="a tree must have at most 31 new tokens, got 32"):
        window(**inputs, ancestors=jnp.ones((4, 32), jnp.int32), implementation="xla")
