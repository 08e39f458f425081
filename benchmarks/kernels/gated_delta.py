"""One layer of gated delta nets: the scan over prompts, from states in frames to states in frames, and windows.

    python -m benchmarks.kernels.gated_delta [--smoke] [--cases T1] [--sweep] [--out FILE]

Sides of a scan: "pallas", and XLA's compilation of the tiled form. Windows of 64 rows are computed with 0 to 31 records
after their checkpoints; k and q of length 1 and their products are given, as the convolution's kernel leaves them.
Peers: flash-linear-attention's chunks and, for one new token, its recurrent step, which keeps a running state and so
writes as much as it reads. Decays and rates of writing are made outside the clock.
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
from benchmarks.kernels.harness import Case, Peer, Side, Work
from benchmarks.kernels.peers import need, to_torch
from pallas_kernels.causal_conv.reference import of_length_one
from pallas_kernels.gated_delta import (
    DeltaRings,
    DeltaScanFrames,
    gated_delta_fold,
    gated_delta_scan_frames,
    gated_delta_window_rings,
)
from pallas_kernels.gated_delta.scan_kernel import CONFIGS, Config, gated_delta_scan_frames_pallas
from pallas_kernels.records import RecordSizes, read_states, split_records
from tests.kernels.cases import gated_delta as shapes

ROWS, GRAIN, HEADS_PER_FRAME = 64, 32, 4
QWEN3_5_9B = shapes.ScanCase(
    name="scan_qwen3_5_9b", tokens=2048, heads=32, width=128, groups=16, size=128
)
SIZES = ((1, 8192), (1, 2048), (8, 2048), (16, 4096))
SMOKE_SCAN, SMOKE_WINDOW = "two_tiles_and_a_bit", "verify"
SWEEP = [
    replace(CONFIGS["bfloat16"], width=width, scan_warps=warps, num_stages=stages)
    for width in (16, 32, 64)
    for warps in (4, 8)
    for stages in (1, 2)
]
TILE = 64  # tokens within which products are counted


def records_of(shape: shapes.ScanCase | shapes.WindowCase) -> RecordSizes:
    return RecordSizes(
        num_heads=shape.heads,
        head_dim=shape.width,
        num_groups=shape.groups,
        state_size=shape.size,
    )


def checkpoints(records: RecordSizes, rows: int, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """An arena of two checkpoints a row, and their frames [2, B, F]."""
    keys, per_row = jax.random.split(key), -(-records.num_heads // HEADS_PER_FRAME)
    count = 2 * rows * per_row
    ids = 1 + jax.random.permutation(keys[0], count).reshape(2, rows, per_row)
    states = jax.random.normal(keys[1], (count + 1, HEADS_PER_FRAME * records.head_words))
    return jax.lax.bitcast_convert_type(states / records.state_size, jnp.uint32), ids


# --- the scan -------------------------------------------------------------------------------------


def draw_scan(shape: shapes.ScanCase, dtype: str, key: jax.Array):
    """The arena is carried; every row reads one checkpoint and writes another."""
    records, keys = records_of(shape), jax.random.split(key, 5)
    arena, ids = checkpoints(records, shape.rows, keys[0])
    lead = (shape.rows, shape.tokens)
    low = jnp.log(jnp.float32(1e-3))
    return arena, {
        "read": ids[0],
        "write": ids[1],
        "exists": jnp.ones(shape.rows, jnp.int32),
        "vkq": jax.random.normal(keys[1], (*lead, records.conv_size), jnp.dtype(dtype)),
        "dt": jnp.exp(jax.random.uniform(keys[2], (*lead, shape.heads), minval=low, maxval=0)),
        "A": -jax.random.uniform(keys[3], (shape.heads,), minval=0.5, maxval=4),
        "projected": jax.random.normal(keys[4], (*lead, shape.heads), jnp.dtype(dtype)),
        "lengths": jnp.full(shape.rows, shape.tokens),
        "state_lengths": jnp.full(shape.rows, shape.tokens),
    }


def scan(records: RecordSizes, implementation: str, arena, inputs):
    arrays = DeltaScanFrames(arena=arena, **inputs)
    y, written, arena = gated_delta_scan_frames(
        arrays, records=records, implementation=implementation
    )
    return (y, written), arena


def scan_config(records: RecordSizes, config: Config, arena, inputs):
    """The kernels with launch parameters of their own."""
    arrays = DeltaScanFrames(arena=arena, **inputs)
    y, written, arena = gated_delta_scan_frames_pallas(
        arrays, records=records, first_frame=0, config=config
    )
    return (y, written), arena


def scan_result(records: RecordSizes, outputs, arena, inputs):
    """Outputs, and the last states."""
    return outputs[0], read_states(arena, inputs["write"], inputs["exists"], records)


def grouped(records: RecordSizes, x: jax.Array) -> jax.Array:
    """[..., G R] as [..., G, R]."""
    return x.reshape(*x.shape[:-1], records.num_groups, records.state_size)


def fla_chunks(records: RecordSizes, arena, inputs):
    rule = need("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    vkq, inner, size = inputs["vkq"], records.inner_size, records.record_size
    v = vkq[..., :inner].reshape(*vkq.shape[:2], records.num_heads, -1)
    k, q = (grouped(records, x) for x in (vkq[..., inner:size], vkq[..., size:]))
    beta = jax.nn.sigmoid(inputs["projected"].astype(jnp.float32))
    state = read_states(arena, inputs["read"], inputs["exists"], records)
    given = (q, k, v, inputs["dt"] * inputs["A"], beta, jnp.swapaxes(state, 2, 3))
    q, k, v, g, beta, state = to_torch(*given)

    def call():
        y, last = rule(
            *(q, k, v, g, beta),
            scale=records.state_size**-0.5,
            initial_state=state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        return y.reshape(*y.shape[:2], -1), last.transpose(2, 3)

    return call


def scan_work(shape: shapes.ScanCase, dtype: str) -> Work:
    """Products of whole tiles of 64 tokens; states, and what the convolution gave, are read once."""
    records, tokens = records_of(shape), shape.rows * shape.tokens
    width = jnp.dtype(dtype).itemsize
    outputs = records.inner_size + records.record_size
    per_token = width * (records.conv_size + shape.heads + outputs) + 4 * shape.heads
    states = 2 * 4 * shape.rows * shape.heads * records.head_words
    # A state is multiplied with k, q and u; a tile's tokens with each other, as k k and q k, u and outputs.
    within = 2 * TILE * (2 * records.shared_size + 2 * records.inner_size)
    flops = 6 * shape.heads * records.head_words + within
    return Work(
        bytes=tokens * per_token + states,
        flops=float(tokens) * flops,
        tokens=tokens,
    )


def scan_case(shape: shapes.ScanCase, dtype: str = "bfloat16", truth: str = "xla") -> Case:
    records = records_of(shape)
    names = ("pallas", "xla") if truth == "xla" else ("pallas", "xla", "reference")
    calls = {name: functools.partial(scan, records, name) for name in names}
    build = functools.partial(fla_chunks, records)
    return Case(
        operation="gated_delta",
        name=shape.name,
        draw=functools.partial(draw_scan, shape, dtype),
        truth=calls[truth],
        result=functools.partial(scan_result, records),
        sides=tuple(Side(name=name, call=call) for name, call in calls.items()),
        peers=(Peer(name="fla chunks", build=build),),
        configs={label(c): functools.partial(scan_config, records, c) for c in SWEEP},
        work=scan_work(shape, dtype),
        tolerance=2e-2,
    )


def label(config: Config) -> str:
    return f"width {config.width} {config.scan_warps}w {config.num_stages}s"


# --- windows --------------------------------------------------------------------------------------


def draw_window(shape: shapes.WindowCase, key: jax.Array):
    """The rings are carried, bfloat16 as bits."""
    records, keys = records_of(shape), jax.random.split(key, 7)
    arena, ids = checkpoints(records, shape.rows, keys[0])
    lead, new = (1, shape.rows + 1, shape.slots), (shape.rows, shape.tokens)
    u = jax.random.normal(keys[1], (*lead, records.inner_size), jnp.bfloat16)
    k, q = (
        of_length_one(jax.random.normal(key, (*most, records.num_groups, records.state_size)))
        for key, most in ((keys[2], lead), (keys[3], new))
    )
    k = k.astype(jnp.bfloat16)
    q = (q * records.state_size**-0.5).astype(jnp.bfloat16)
    places = jnp.asarray(shape.starts)[:, None] + jnp.arange(shape.tokens)
    own = k[0, : shape.rows]
    both = jnp.stack([jnp.take_along_axis(own, places[..., None, None], axis=1), q], axis=1)
    scores = jnp.einsum(
        "bctgr,bsgr->bctgs",
        *(both.astype(jnp.float32), own.astype(jnp.float32)),
        precision=jax.lax.Precision.HIGHEST,
    )
    uk = jnp.concatenate([u, k.reshape(*lead, -1)], axis=-1)
    low = jnp.log(jnp.float32(1e-3))
    return jax.lax.bitcast_convert_type(uk, jnp.uint16), {
        "q": q.reshape(*new, -1),
        "v": jax.random.normal(keys[4], (*new, records.inner_size), jnp.bfloat16),
        "beta": jax.random.uniform(keys[5], (*new, shape.heads)),
        "scores": scores,
        "dt": jnp.exp(jax.random.uniform(keys[6], (*lead, shape.heads), minval=low, maxval=0)),
        "A": -jnp.linspace(0.5, 4, shape.heads)[None],
        "arena": arena,
        "frames": ids[0],
        "exists": jnp.ones(shape.rows, jnp.int32),
        "starts": jnp.asarray(shape.starts, jnp.int32),
        "num_known": jnp.zeros(shape.rows, jnp.int32),
        "num_valid": jnp.full(shape.rows, shape.tokens),
    }


def window(records: RecordSizes, implementation: str, uk, inputs):
    static = {"records": records, "dtype": jnp.bfloat16, "implementation": implementation}
    return gated_delta_window_rings(DeltaRings(uk=uk, **inputs), layer=0, **static)


def fla_step(records: RecordSizes, uk, inputs):
    """One token from a running state: the checkpoint with the row's records folded into it, outside the clock."""
    rule = need("fla.ops.gated_delta_rule").fused_recurrent_gated_delta_rule
    starts, rows = inputs["starts"], inputs["starts"].shape[0]
    state = read_states(inputs["arena"], inputs["frames"], inputs["exists"], records)
    u, k = split_records(jax.lax.bitcast_convert_type(uk[0, :rows], jnp.bfloat16), records)
    log_decay = inputs["dt"][0, :rows] * inputs["A"][0]
    wide = (u.astype(jnp.float32), k.astype(jnp.float32))
    state = gated_delta_fold(state, *wide, log_decay, lengths=starts, implementation="xla")
    row = jnp.arange(rows)
    k = grouped(records, k.reshape(*k.shape[:2], -1)[row, starts][:, None])
    v = inputs["v"].reshape(rows, 1, records.num_heads, -1)
    given = (grouped(records, inputs["q"]), k, v, log_decay[row, starts][:, None], inputs["beta"])
    q, k, v, g, beta, state = to_torch(*given, jnp.swapaxes(state, 2, 3))

    def call():
        y, _ = rule(*(q, k, v, g, beta), scale=1.0, initial_state=state, output_final_state=True)
        return y

    return call


def window_work(shape: shapes.WindowCase) -> Work:
    records, tokens = records_of(shape), shape.rows * shape.tokens
    states = 4 * shape.rows * shape.heads * records.head_words
    seen = sum(shape.starts)
    per_token = 2 * (2 * records.inner_size + records.shared_size) + 4 * shape.heads
    per_token += 2 * records.inner_size + 2 * 4 * shape.groups * shape.slots
    rings = (seen + tokens) * 4 * shape.heads + 2 * seen * records.inner_size
    flops = 4 * tokens * shape.heads * records.head_words
    return Work(bytes=states + rings + tokens * per_token, flops=float(flops), tokens=tokens)


def window_case(shape: shapes.WindowCase) -> Case:
    records = records_of(shape)
    calls = {name: functools.partial(window, records, name) for name in ("pallas", "reference")}
    build = functools.partial(fla_step, records)
    peer = Peer(name="fla step", build=build, note="keeps a running state: twice the bytes")
    return Case(
        operation="gated_delta",
        name=shape.name,
        draw=functools.partial(draw_window, shape),
        truth=calls["reference"],
        sides=tuple(Side(name=name, call=call) for name, call in calls.items()),
        peers=(peer,) if shape.tokens == 1 else (),
        configs={},
        work=window_work(shape),
    )


def cases(*, smoke: bool) -> list[Case]:
    if smoke:
        scans = [shape for shape in shapes.SCANS if shape.name == SMOKE_SCAN]
        verify = next(shape for shape in shapes.WINDOWS if shape.name == SMOKE_WINDOW)
        decode = replace(verify, name="decode", tokens=1, valid=None)
        return [
            *(scan_case(shape, "float32", "reference") for shape in scans),
            window_case(decode),
            window_case(replace(verify, valid=None, starts=(0, 9, 31, 28))),
        ]
    scans = [
        scan_case(
            replace(QWEN3_5_9B, name=f"scan_qwen3_5_9b_{rows}x{tokens}", rows=rows, tokens=tokens)
        )
        for rows, tokens in SIZES
    ]
    windows = [
        window_case(
            shapes.WindowCase(
                name=f"window_qwen3_5_9b_T{tokens}",
                tokens=tokens,
                slots=GRAIN + tokens - 1,
                starts=tuple(i % GRAIN for i in range(ROWS)),
                heads=32,
                width=128,
                groups=16,
                size=128,
            )
        )
        for tokens in (1, 5, 16)
    ]
    return [scans[0], windows[0], *scans[1:], *windows[1:]]


if __name__ == "__main__":
    report.main("gated_delta", __doc__.splitlines()[0], cases)
