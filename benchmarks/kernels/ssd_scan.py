"""The SSD scan of one Mamba-2 layer over prompts, from states in frames to states in frames.

    python -m benchmarks.kernels.ssd_scan [--smoke] [--cases G1] [--sweep] [--out FILE]

Sides: "triton", which an engine calls in bfloat16; "pallas", which cuts few rows into segments by its rule; "pallas
whole" and, where the rule does not, "pallas 4 segments"; XLA's compilation of the tiled form, and of the recurrence
where it is short.
Peers: mamba_ssm's Triton kernels with chunks of 256 and 128 tokens, and flash-linear-attention's, which want B and C
repeated for every head and x times dt; those are made outside the clock, as are contiguous x, B and C.
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
from benchmarks.kernels.peers import NotInstalled, need, to_torch
from pallas_kernels.plan import H200
from pallas_kernels.records import RecordSizes, read_states
from pallas_kernels.ssd_scan import ssd_scan_frames
from pallas_kernels.ssd_scan.kernel import (
    LEAST_SEGMENT,
    Config,
    config_of,
    num_segments,
    ssd_scan_frames_pallas,
)
from pallas_kernels.ssd_scan.reference import ScanFrames
from pallas_kernels.ssd_scan.triton_scan import why_unsupported as why_not_triton
from tests.kernels.cases import ssd_scan as shapes

GRANITE_4_H_SMALL = shapes.Case(
    name="granite_4_h_small_G1", tokens=2048, heads=128, width=64, size=128
)
NEMOTRON_H_8B = replace(GRANITE_4_H_SMALL, name="nemotron_h_8b_G8", groups=8)
SIZES = ((1, 8192), (1, 2048), (8, 2048), (16, 4096))
SMOKE = ("several_tiles_odd_heads",)
SHORT = 256  # tokens to which the recurrence is timed
SWEEP = [
    Config(chunk=chunk, width=width, num_warps=warps, num_stages=stages)
    for chunk in (32, 64, 128)
    for width in (32, 64)
    for warps in (4, 8)
    for stages in (1, 2, 3)
]
TILE = 64  # tokens within which products are counted


def records_of(shape: shapes.Case) -> RecordSizes:
    return RecordSizes(
        num_heads=shape.heads,
        head_dim=shape.width,
        num_groups=shape.groups,
        state_size=shape.size,
    )


def draw(shape: shapes.Case, dtype: str, key: jax.Array):
    """The arena is carried; every row reads one checkpoint and writes another, of 8 heads a frame."""
    records, keys = records_of(shape), jax.random.split(key, 5)
    per_row = -(-shape.heads // 8)
    count = 2 * shape.rows * per_row
    ids = 1 + jax.random.permutation(keys[0], count).reshape(2, shape.rows, per_row)
    states = jax.random.normal(keys[1], (count + 1, 8 * records.head_words))
    arena = jax.lax.bitcast_convert_type(states, jnp.uint32)
    lead = (shape.rows, shape.tokens)
    width = records.record_size + shape.groups * shape.size
    low = jnp.log(jnp.float32(1e-3))
    return arena, {
        "read": ids[0],
        "write": ids[1],
        "exists": jnp.ones(shape.rows, jnp.int32),
        "xBC": jax.random.normal(keys[2], (*lead, width), jnp.dtype(dtype)),
        "dt": jnp.exp(jax.random.uniform(keys[3], (*lead, shape.heads), minval=low, maxval=0)),
        "A": -jax.random.uniform(keys[4], (shape.heads,), minval=1, maxval=16),
        "D": jnp.linspace(-1, 2, shape.heads),
        "lengths": jnp.full(shape.rows, shape.tokens),
        "state_lengths": jnp.full(shape.rows, shape.tokens),
    }


def run(records: RecordSizes, implementation: str, arena, inputs):
    arrays = ScanFrames(arena=arena, **inputs)
    return ssd_scan_frames(arrays, records=records, implementation=implementation)


def triton(records: RecordSizes, arena, inputs):
    reason = why_not_triton(records, inputs["xBC"].dtype)
    if reason is not None:
        raise NotInstalled(f"not there: {reason}")
    return run(records, "triton", arena, inputs)


def run_config(records: RecordSizes, config: Config, arena, inputs):
    """The kernel with launch parameters of its own."""
    arrays = ScanFrames(arena=arena, **inputs)
    return ssd_scan_frames_pallas(arrays, records=records, config=config)


def result(records: RecordSizes, y, arena, inputs):
    """Outputs, and the last states."""
    return y, read_states(arena, inputs["write"], inputs["exists"], records)


def parts(records: RecordSizes, arena, inputs) -> dict[str, jax.Array]:
    """Contiguous x, B and C, and the first states: what public kernels take."""
    xBC, inner, size = inputs["xBC"], records.inner_size, records.record_size
    lead, grouped = xBC.shape[:2], (records.num_groups, records.state_size)
    return {
        "x": xBC[..., :inner].reshape(*lead, records.num_heads, -1),
        "B": xBC[..., inner:size].reshape(*lead, *grouped),
        "C": xBC[..., size:].reshape(*lead, *grouped),
        "state": read_states(arena, inputs["read"], inputs["exists"], records),
    }


def mamba_ssm(records: RecordSizes, chunk: int, arena, inputs):
    scan = need("mamba_ssm.ops.triton.ssd_combined").mamba_chunk_scan_combined
    given = parts(records, arena, inputs) | {name: inputs[name] for name in ("dt", "A", "D")}
    order = ("x", "dt", "A", "B", "C", "D", "state")
    x, dt, A, B, C, D, state = to_torch(*(given[name] for name in order))

    def call():
        y, last = scan(
            *(x, dt, A, B, C, chunk), D=D, initial_states=state, return_final_states=True
        )
        return y.reshape(*y.shape[:2], -1), last

    return call


def fla(records: RecordSizes, arena, inputs):
    scan = need("fla.ops.simple_gla").chunk_simple_gla
    given = parts(records, arena, inputs)
    repeats = records.num_heads // records.num_groups
    q, k = (jnp.repeat(given[name], repeats, axis=2) for name in ("C", "B"))
    v = (given["x"] * inputs["dt"][..., None]).astype(q.dtype)
    skip = (given["x"] * inputs["D"][:, None]).astype(q.dtype)
    state = jnp.swapaxes(given["state"], 2, 3)
    q, k, v, skip, g, state = to_torch(q, k, v, skip, inputs["dt"] * inputs["A"], state)

    def call():
        y, last = scan(q, k, v, g=g, scale=1.0, initial_state=state, output_final_state=True)
        return (y + skip).reshape(*y.shape[:2], -1), last.transpose(2, 3)

    return call


def work(shape: shapes.Case, dtype: str) -> Work:
    """Products of whole tiles of 64 tokens, C . B once per group; states are read and written once."""
    records, tokens = records_of(shape), shape.rows * shape.tokens
    width = jnp.dtype(dtype).itemsize
    per_token = width * (records.record_size + shape.groups * shape.size + records.inner_size)
    states = 2 * 4 * shape.rows * shape.heads * records.head_words
    flops = 4 * shape.heads * records.head_words + 2 * TILE * records.record_size
    return Work(
        bytes=tokens * (per_token + 4 * shape.heads) + states,
        flops=float(tokens) * flops,
        tokens=tokens,
    )


def case_of(shape: shapes.Case, dtype: str = "bfloat16", truth: str = "xla") -> Case:
    records = records_of(shape)
    segments = num_segments(shape.rows, shape.heads, shape.tokens, H200.num_sms)
    base = config_of(records, jnp.dtype(dtype), H200)
    calls = {"pallas": functools.partial(run, records, "pallas")}
    if segments > 1:
        calls["pallas whole"] = functools.partial(run_config, records, replace(base, segments=1))
    elif shape.tokens >= 4 * LEAST_SEGMENT and shape.rows == 1:
        calls["pallas 4 segments"] = functools.partial(
            run_config, records, replace(base, segments=4)
        )
    calls["xla"] = functools.partial(run, records, "xla")
    if shape.tokens <= SHORT:
        calls["reference"] = functools.partial(run, records, "reference")
    configs = SWEEP + [replace(base, segments=count) for count in (2, 4, 8)]
    peers = [
        Peer(name=f"mamba_ssm chunk {chunk}", build=functools.partial(mamba_ssm, records, chunk))
        for chunk in (256, 128)
    ]
    note = "B and C repeated, D x added in torch"
    peers.append(Peer(name="fla simple_gla", build=functools.partial(fla, records), note=note))
    return Case(
        operation="ssd_scan",
        name=shape.name,
        draw=functools.partial(draw, shape, dtype),
        truth=calls[truth],
        result=functools.partial(result, records),
        sides=(
            *(Side(name=name, call=call) for name, call in calls.items()),
            Side(name="triton", call=functools.partial(triton, records), gpu_only=True),
        ),
        peers=tuple(peers),
        configs={label(c): functools.partial(run_config, records, c) for c in configs},
        work=work(shape, dtype),
    )


def label(config: Config) -> str:
    segments = "" if config.segments is None else f" {config.segments} segments"
    return (
        f"chunk {config.chunk} width {config.width} {config.num_warps}w {config.num_stages}s"
        f"{segments}"
    )


def cases(*, smoke: bool) -> list[Case]:
    if smoke:
        found = [shape for shape in shapes.CASES if shape.name in SMOKE]
        return [case_of(shape, "float32", "reference") for shape in found]
    return [
        case_of(replace(model, name=f"{model.name}_{rows}x{tokens}", rows=rows, tokens=tokens))
        for rows, tokens in SIZES
        for model in (GRANITE_4_H_SMALL, NEMOTRON_H_8B)
    ]


if __name__ == "__main__":
    report.main("ssd_scan", __doc__.splitlines()[0], cases)
