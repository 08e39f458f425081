"""Window outputs of one Mamba-2 layer from checkpoints in frames and records in rings, and the fold.

    python -m benchmarks.kernels.ssd_window [--smoke] [--cases T1] [--sweep] [--out FILE]

64 rows with 0 to 31 records after their checkpoints. Nearly all bytes are the states: the share of the floor is the
share of the copy's bandwidth. Scores C . B are given, as the convolution's kernel leaves them; in the cases "scored" a
kernel makes them first, as for layers that read the records of another. "xla" is what one would write for a GPU without
kernels: it takes all states out of the arena at once.
Peer for one token: mamba_ssm's selective_state_update, which keeps a running state, and so writes as much as it reads.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # when run as a file
from benchmarks.kernels import report
from benchmarks.kernels.harness import Case, Peer, Side, Work, with_arrays
from benchmarks.kernels.peers import need, to_torch
from pallas_kernels.records import RecordSizes, read_states, split_records, write_states
from pallas_kernels.ssd_window import fold, fold_frames, ssd_window_rings, ssd_window_scores, xla
from pallas_kernels.ssd_window.kernel import Config, fold_frames_pallas, ssd_window_rings_pallas
from pallas_kernels.ssd_window.reference import FoldFrames, WindowFrames, WindowRings, WindowScores
from tests.kernels.cases import ssd_window as shapes

ROWS, GRAIN, HEADS_PER_FRAME = 64, 32, 8
GRANITE_4_H_SMALL = shapes.Case(
    name="granite_4_h_small_G1",
    tokens=1,
    starts=tuple(i % GRAIN for i in range(ROWS)),
    heads=128,
    width=64,
    size=128,
)
NEMOTRON_H_8B = replace(GRANITE_4_H_SMALL, name="nemotron_h_8b_G8", groups=8)
WINDOWS = (
    (GRANITE_4_H_SMALL, 1),
    (NEMOTRON_H_8B, 1),
    (GRANITE_4_H_SMALL, 5),
    (GRANITE_4_H_SMALL, 16),
    (NEMOTRON_H_8B, 5),
    (NEMOTRON_H_8B, 16),
)
SMOKE = "verify"
WINDOW_SWEEP = [
    Config(num_warps=warps, channels=channels) for warps in (1, 2, 4) for channels in (16, 32, 64)
]
FOLD_SWEEP = [(warps, stages) for warps in (4, 8) for stages in (1, 2)]


def records_of(shape: shapes.Case) -> RecordSizes:
    return RecordSizes(
        num_heads=shape.heads,
        head_dim=shape.width,
        num_groups=shape.groups,
        state_size=shape.size,
    )


def draw_rings(shape: shapes.Case, key: jax.Array) -> dict[str, jax.Array]:
    """An arena of two checkpoints a row, and rings of one layer: bfloat16 as bits."""
    records, keys = records_of(shape), jax.random.split(key, 5)
    per_row = -(-shape.heads // HEADS_PER_FRAME)
    count = 2 * shape.rows * per_row
    ids = 1 + jax.random.permutation(keys[0], count).reshape(2, shape.rows, per_row)
    states = jax.random.normal(keys[1], (count + 1, HEADS_PER_FRAME * records.head_words))
    lead = (1, shape.rows + 1, shape.slots)
    xB = jax.random.normal(keys[2], (*lead, records.record_size), jnp.bfloat16)
    low = jnp.log(jnp.float32(1e-3))
    return {
        "arena": jax.lax.bitcast_convert_type(states, jnp.uint32),
        "read": ids[0],
        "write": ids[1],
        "exists": jnp.ones(shape.rows, jnp.int32),
        "xB": jax.lax.bitcast_convert_type(xB, jnp.uint16),
        "dt": jnp.exp(jax.random.uniform(keys[3], (*lead, shape.heads), minval=low, maxval=0)),
        "A": -jax.random.uniform(keys[4], (1, shape.heads), minval=1, maxval=16),
    }


def draw_window(shape: shapes.Case, key: jax.Array):
    """Nothing is carried: a window only reads."""
    records, keys = records_of(shape), jax.random.split(key)
    inputs = draw_rings(shape, keys[0])
    del inputs["write"]
    C = jax.random.normal(keys[1], (shape.rows, shape.tokens, shape.groups * shape.size))
    C = C.astype(jnp.bfloat16)
    _, B = split_records(inputs["xB"][0, : shape.rows], records)
    grouped = C.astype(jnp.float32).reshape(shape.rows, shape.tokens, *B.shape[2:])
    scores = jnp.einsum(
        "btgr,bsgr->btgs", grouped, B.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST
    )
    return (), inputs | {
        "frames": inputs.pop("read"),
        "C": C,
        "D": jnp.linspace(-1, 2, shape.heads),
        "starts": jnp.asarray(shape.starts, jnp.int32),
        "num_valid": jnp.asarray(shape.valid, jnp.int32),
        "scores": scores,
    }


def window(records: RecordSizes, implementation: str, carry, inputs):
    static = {"records": records, "dtype": jnp.bfloat16, "implementation": implementation}
    return ssd_window_rings(WindowRings(**inputs), layer=0, **static), carry


def window_scored(records: RecordSizes, carry, inputs):
    """The window as a layer runs it that reads the records of another."""
    asked = WindowScores(*(inputs[name] for name in WindowScores._fields))
    scores = ssd_window_scores(asked, layer=0, records=records, implementation="pallas")
    return window(records, "pallas", carry, inputs | {"scores": scores})


def window_gather(records: RecordSizes, carry, inputs):
    """The window over states that are gathered first, in plain jnp."""
    starts, num_valid, C = (inputs[name] for name in ("starts", "num_valid", "C"))
    rows, tokens, _ = C.shape
    state = read_states(inputs["arena"], inputs["frames"], inputs["exists"], records)
    x, B = (a.astype(jnp.float32) for a in split_records(inputs["xB"][0, :rows], records))
    grouped = C.astype(jnp.float32).reshape(rows, tokens, *B.shape[2:])
    by_group = state.reshape(rows, records.num_groups, -1, *state.shape[2:])
    carried = jnp.einsum(
        "btgr,bghpr->btghp", grouped, by_group, precision=jax.lax.Precision.HIGHEST
    )
    own = (x, inputs["dt"][0, :rows], inputs["A"][0], B, grouped)
    state = (inputs["arena"], inputs["frames"], inputs["exists"])
    y = xla.outputs(carried, WindowFrames(*own, *state, starts, num_valid, None))
    new = x[jnp.arange(rows)[:, None], starts[:, None] + jnp.arange(tokens)]
    counts = (jnp.arange(tokens) < num_valid[:, None])[..., None, None]
    return (y + jnp.where(counts, inputs["D"][:, None] * new, 0)).astype(jnp.bfloat16), carry


def window_config(records: RecordSizes, config: Config, carry, inputs):
    y = ssd_window_rings_pallas(
        WindowRings(**inputs),
        layer=0,
        first_frame=0,
        records=records,
        dtype=jnp.bfloat16,
        config=config,
    )
    return y, carry


def state_update(records: RecordSizes, carry, inputs):
    """One token from a running state: the checkpoint with the row's records folded into it, outside the clock."""
    update = need("mamba_ssm.ops.triton.selective_state_update").selective_state_update
    starts, rows = inputs["starts"], inputs["starts"].shape[0]
    state = read_states(inputs["arena"], inputs["frames"], inputs["exists"], records)
    x, B = split_records(inputs["xB"][0, :rows], records)
    dt, A = inputs["dt"][0, :rows], inputs["A"][0]
    folded = [a.astype(jnp.float32) for a in (x, B)]
    state = fold(state, folded[0], dt, A, folded[1], lengths=starts, implementation="xla")
    row = jnp.arange(rows)
    C = inputs["C"].reshape(rows, *B.shape[2:])
    new = (x[row, starts], dt[row, starts], A, B[row, starts], C, inputs["D"])
    state, x, dt, A, B, C, D = to_torch(state, *new)
    _, width, size = state.shape[1:]
    # Strides of 0 tell the kernel that a head's channels share them.
    dt = dt[..., None].expand(-1, -1, width)
    no_bias = (0 * A)[:, None].expand(-1, width)
    A, D = A[:, None, None].expand(-1, width, size), D[:, None].expand(-1, width)
    return lambda: update(state, x, dt, A, B, C, D=D, dt_bias=no_bias)[:, None]


def window_work(shape: shapes.Case) -> Work:
    records = records_of(shape)
    seen = sum(start + valid for start, valid in zip(shape.starts, shape.valid, strict=True))
    tokens = sum(shape.valid)
    states = 4 * shape.rows * shape.heads * records.head_words
    rings = seen * (2 * records.inner_size + 4 * shape.heads)
    per_token = 2 * records.inner_size + 2 * shape.groups * shape.size
    per_token += 4 * shape.groups * shape.slots
    flops = 2 * tokens * shape.heads * records.head_words
    return Work(bytes=states + rings + tokens * per_token, flops=float(flops), tokens=tokens)


def window_case(shape: shapes.Case) -> Case:
    records = records_of(shape)
    names = ("pallas", "reference")
    calls = {name: functools.partial(window, records, name) for name in names}
    calls["xla"] = functools.partial(window_gather, records)
    note = "keeps a running state: twice the bytes"
    build = functools.partial(state_update, records)
    peer = Peer(name="mamba_ssm state_update", build=build, note=note)
    return Case(
        operation="ssd_window",
        name=shape.name,
        draw=functools.partial(draw_window, shape),
        truth=calls["reference"],
        sides=tuple(Side(name=name, call=call) for name, call in calls.items()),
        peers=(peer,) if shape.tokens == 1 else (),
        configs={label(c): functools.partial(window_config, records, c) for c in WINDOW_SWEEP},
        work=window_work(shape),
    )


def scored_case(shape: shapes.Case) -> Case:
    records, plain = records_of(shape), window_case(shape)
    sides = {"pallas": window_scored, "xla": window_gather}
    calls = {name: functools.partial(call, records) for name, call in sides.items()}
    made = tuple(Side(name=name, call=call) for name, call in calls.items())
    return replace(plain, name=f"scored_{shape.name}", sides=made, peers=(), configs={})


def draw_fold(shape: shapes.Case, key: jax.Array):
    """The arena is carried; every row's ring is full."""
    inputs = draw_rings(shape, key)
    inputs["lengths"] = jnp.full(shape.rows, shape.slots)
    return inputs.pop("arena"), inputs


def fold_call(shape: shapes.Case, run, arena, inputs):
    per_layer = inputs["read"].shape[1]
    return (), run(arena=arena, **inputs, records=records_of(shape), per_layer=per_layer)


def fold_gather(arena, *, read, write, exists, lengths, xB, dt, A, records, per_layer):
    """The fold of one layer's rows at once, in plain jnp."""
    rows = lengths.shape[0]
    x, B = (a.astype(jnp.float32) for a in split_records(xB[0, :rows], records))
    state = read_states(arena, read, exists, records)
    given = (state, x, dt[0, :rows], A[0], B)
    return write_states(arena, write, fold(*given, lengths=lengths, implementation="xla"), records)


def fold_result(shape: shapes.Case, outputs, arena, inputs):
    return read_states(arena, inputs["write"], inputs["exists"], records_of(shape))


def fold_case(shape: shapes.Case, truth: str = "xla") -> Case:
    records = records_of(shape)
    runs = {
        name: with_arrays(fold_frames, FoldFrames, implementation=name)
        # Those of 64 rows take a minute to compile, and go over the whole arena once a row.
        for name in (("pallas",) if truth == "xla" else ("pallas", "reference"))
    }
    runs["xla"] = fold_gather
    calls = {name: functools.partial(fold_call, shape, run) for name, run in runs.items()}
    usual = Config.of_fold(records)
    sweep = [replace(usual, num_warps=warps, num_stages=stages) for warps, stages in FOLD_SWEEP]
    configs = {
        label(c): functools.partial(
            fold_call, shape, with_arrays(fold_frames_pallas, FoldFrames, config=c)
        )
        for c in sweep
    }
    states = 2 * 4 * shape.rows * shape.heads * records.head_words
    count = shape.rows * shape.slots
    return Case(
        operation="ssd_window",
        name=f"fold_{shape.name}",
        draw=functools.partial(draw_fold, shape),
        truth=calls[truth],
        result=functools.partial(fold_result, shape),
        sides=tuple(Side(name=name, call=call) for name, call in calls.items()),
        configs=configs,
        work=Work(
            bytes=states + count * (2 * records.record_size + 4 * shape.heads),
            flops=2.0 * count * shape.heads * records.head_words,
            tokens=count,
        ),
    )


def label(config: Config) -> str:
    channels = f" {config.channels}c" if config.channels else ""
    return f"{config.num_warps}w {config.num_stages}s{channels}"


def cases(*, smoke: bool) -> list[Case]:
    if smoke:
        shape = next(shape for shape in shapes.CASES if shape.name == SMOKE)
        short = replace(shape, name="decode", tokens=1, num_valid=(1,) * shape.rows)
        folds = fold_case(replace(shape, slots=GRAIN), "reference")
        return [window_case(short), window_case(shape), folds, scored_case(shape)]
    windows = [
        window_case(
            replace(model, name=f"{model.name}_T{tokens}", tokens=tokens, slots=GRAIN + tokens - 1)
        )
        for model, tokens in WINDOWS
    ]
    scored = scored_case(replace(NEMOTRON_H_8B, slots=GRAIN))
    return [*windows[:2], fold_case(GRANITE_4_H_SMALL), *windows[2:], scored]


if __name__ == "__main__":
    report.main("ssd_window", __doc__.splitlines()[0], cases)
