"""The selective scan of one Mamba layer: over prompts, from states in frames to those in frames and rings; and windows.

    python -m benchmarks.kernels.selective_scan [--smoke] [--cases window] [--sweep] [--out FILE]

Bias and softplus of the step sizes, skip and gate are inside. Prompts have no checkpoint before them, because
mamba_ssm's `selective_scan_fn`, their peer, takes no first state. "xla" takes tiles of tokens, as an engine without
kernels does, and reads and writes no frames. Peer for a window of one token: mamba_ssm's `selective_state_update`.
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
from pallas_kernels.selective_scan import (
    SelectiveChunk,
    SelectiveWindow,
    selective_chunk,
    selective_scan,
    selective_window,
)
from pallas_kernels.selective_scan.kernel import Config, selective_chunk_pallas
from pallas_kernels.selective_scan.reference import gated_output, read_states, step_sizes
from tests.kernels.cases import selective_scan as shapes

CHANNELS_PER_FRAME = 512
JAMBA = shapes.EngineCase(name="jamba", tokens=1, channels=8192, size=16, lengths=(1,))
PROMPTS, ROWS, WINDOWS = ((1, 8192), (1, 2048), (4, 2048)), 64, (1, 5)
SMOKE, SMOKE_WINDOW = "chunk", "verify"
SHORT = 256  # tokens to which the definition, a loop over tokens, is timed
SWEEP = [
    Config(channels, tokens, warps)
    for channels, warps in ((8, 1), (16, 1), (32, 1), (32, 2), (64, 2), (64, 4))
    for tokens in (4, 8, 16)
]


def draw_layer(shape: shapes.EngineCase, key: jax.Array, dtype: str) -> dict:
    """What the projections gave, and the layer's weights; half of `projected` is not read."""
    keys, lead = jax.random.split(key, 6), (shape.rows, shape.tokens)
    columns = {"x": 1, "dt": 1, "projected": 2}
    drawn = {
        name: jax.random.normal(key, (*lead, width * shape.channels), jnp.dtype(dtype))
        for key, (name, width) in zip(keys, columns.items(), strict=False)
    }
    sizes = jnp.arange(1, shape.size + 1, dtype=jnp.float32)
    return drawn | {
        "BC": jax.random.normal(keys[3], (*lead, 2 * shape.size), jnp.dtype(dtype)),
        "A_log": jnp.broadcast_to(jnp.log(sizes), (shape.channels, shape.size)),
        "D": jnp.ones(shape.channels),
        "dt_bias": jax.random.uniform(keys[4], (shape.channels,), minval=-6, maxval=-2),
    }


def draw_states(shape: shapes.EngineCase, key: jax.Array, count: int, copies: int):
    """An arena of `count` checkpoints a row, their frames [count, B, F], and rings of one layer."""
    keys, per_row = jax.random.split(key, 3), -(-shape.channels // CHANNELS_PER_FRAME)
    total = count * shape.rows * per_row
    ids = 1 + jax.random.permutation(keys[0], total).reshape(count, shape.rows, per_row)
    arena = jax.random.normal(keys[1], (total + 1, CHANNELS_PER_FRAME * shape.size))
    words = shape.channels * shape.size
    ring = jax.random.normal(keys[2], (1, shape.rows + 1, copies, words))
    return jax.lax.bitcast_convert_type(arena, jnp.uint32), ids, ring


# --- prompts --------------------------------------------------------------------------------------


def draw_prompt(shape: shapes.EngineCase, dtype: str, key: jax.Array):
    """Arena and rings are carried; every row writes one checkpoint."""
    keys = jax.random.split(key)
    arena, ids, ring = draw_states(shape, keys[0], 1, copies=1)
    lengths = jnp.asarray(shape.lengths, jnp.int32)
    return (arena, ring), {
        **draw_layer(shape, keys[1], dtype),
        "read": ids[0],
        "write": ids[0],
        "exists": jnp.zeros(shape.rows, bool),
        "rows": jnp.arange(shape.rows),
        "copies": jnp.zeros(shape.rows, jnp.int32),
        "lengths": lengths,
        "state_lengths": lengths,
    }


def prompt(run, carry, inputs):
    arena, ring = carry
    y, arena, ring = run(**inputs, arena=arena, state=ring, layer=0, first_frame=0)
    return y, (arena, ring)


def prompt_result(y, carry, inputs):
    """Outputs, and the last states."""
    exists = jnp.ones(y.shape[0], bool)
    return y, read_states(carry[0], inputs["write"], exists, *inputs["A_log"].shape)


def tiles(carry, inputs):
    """XLA's tiles. They begin with states of zero, and the last states go to the rings alone."""
    arena, ring = carry
    (channels, size), x = inputs["A_log"].shape, inputs["x"]
    BC, rows = inputs["BC"], x.shape[0]
    y, states = selective_scan(
        *(x, step_sizes(inputs["dt"], inputs["dt_bias"]), -jnp.exp(inputs["A_log"])),
        *(BC[..., :size], BC[..., size:]),
        state=jnp.zeros((rows, channels, size)),
        implementation="xla",
    )
    y = gated_output(y, x, inputs["D"], inputs["projected"][..., channels:])
    return (y, states[:, 0]), (arena, ring.at[0, :rows, 0].set(states.reshape(rows, -1)))


def all_result(outputs, carry, inputs):
    return outputs if isinstance(outputs, tuple) else prompt_result(outputs, carry, inputs)


def selective_scan_fn(carry, inputs):
    """Channels before tokens, B and C of one group, outside the clock."""
    scan = need("mamba_ssm.ops.selective_scan_interface").selective_scan_fn
    channels, size = inputs["A_log"].shape
    BC, z = inputs["BC"], inputs["projected"][..., channels:]
    wide = [jnp.swapaxes(a, 1, 2) for a in (inputs["x"], inputs["dt"], z)]
    B, C = (jnp.swapaxes(a, 1, 2)[:, None] for a in (BC[..., :size], BC[..., size:]))
    given = (*wide, -jnp.exp(inputs["A_log"]), B, C, inputs["D"], inputs["dt_bias"])
    x, dt, z, A, B, C, D, bias = to_torch(*given)

    def call():
        options = {"delta_softplus": True, "return_last_state": True}
        y, last = scan(x, dt, A, B, C, D=D, z=z, delta_bias=bias, **options)
        return y.transpose(1, 2), last

    return call


def prompt_case(
    shape: shapes.EngineCase, dtype: str = "bfloat16", *, reference: bool = False
) -> Case:
    named = functools.partial(with_arrays, selective_chunk, SelectiveChunk)
    calls = {"pallas": functools.partial(prompt, named(implementation="pallas")), "xla": tiles}
    if reference:
        calls["reference"] = functools.partial(prompt, named(implementation="reference"))
    tokens = sum(shape.lengths)
    per_token = jnp.dtype(dtype).itemsize * (4 * shape.channels + 2 * shape.size)
    # The last states go to frames and rings, float32.
    states = 2 * 4 * shape.rows * shape.channels * shape.size
    return Case(
        operation="selective_scan",
        name=shape.name,
        draw=functools.partial(draw_prompt, shape, dtype),
        truth=calls["reference" if reference else "xla"],
        result=all_result,
        sides=tuple(Side(name=name, call=call) for name, call in calls.items()),
        peers=(Peer(name="mamba_ssm scan", build=selective_scan_fn, note="to no frames or rings"),),
        configs={
            f"channels {c.channels} tokens {c.tokens} {c.num_warps}w": functools.partial(
                prompt, with_arrays(selective_chunk_pallas, SelectiveChunk, config=c)
            )
            for c in SWEEP
        },
        work=Work(bytes=tokens * per_token + states, tokens=tokens),
    )


# --- windows --------------------------------------------------------------------------------------


def draw_window(shape: shapes.EngineCase, dtype: str, key: jax.Array):
    """The rings are carried, each with a copy to spare for every token that may not stay."""
    keys = jax.random.split(key)
    arena, ids, ring = draw_states(shape, keys[0], 1, copies=shape.copies)
    return ring, {
        **draw_layer(shape, keys[1], dtype),
        "arena": arena,
        "frames": ids[0],
        "exists": jnp.ones(shape.rows, bool),
        "base": jnp.zeros(shape.rows, jnp.int32),
        "first": jnp.zeros(shape.rows, jnp.int32),
        "num_valid": jnp.asarray(shape.lengths, jnp.int32),
    }


def window(keeps: bool, run, ring, inputs):
    y, ring = run(**inputs, state=ring, layer=0, first_frame=0, keeps=keeps)
    return y, ring


def window_result(y, ring, inputs):
    return y


def state_update(ring, inputs):
    update = need("mamba_ssm.ops.triton.selective_state_update").selective_state_update
    (channels, size), rows = inputs["A_log"].shape, inputs["x"].shape[0]
    state, BC = ring[0, :rows, 0].reshape(rows, channels, size), inputs["BC"][:, 0]
    z = inputs["projected"][:, 0, channels:]
    wide = (inputs["x"][:, 0], inputs["dt"][:, 0], -jnp.exp(inputs["A_log"]))
    given = (*wide, BC[:, :size], BC[:, size:], inputs["D"], z, inputs["dt_bias"])
    state, x, dt, A, B, C, D, z, bias = to_torch(state, *given)

    def call():
        y = update(state, x, dt, A, B, C, D=D, z=z, dt_bias=bias, dt_softplus=True)
        return y[:, None]

    return call


def window_case(shape: shapes.EngineCase, dtype: str = "bfloat16") -> Case:
    named = functools.partial(with_arrays, selective_window, SelectiveWindow)
    calls = {
        name: functools.partial(window, shape.keeps, named(implementation=name))
        for name in ("pallas", "reference")
    }
    tokens = sum(shape.lengths)
    per_token = jnp.dtype(dtype).itemsize * (4 * shape.channels + 2 * shape.size)
    written = tokens if shape.keeps else shape.rows
    states = 4 * (shape.rows + written) * shape.channels * shape.size
    peer = Peer(name="mamba_ssm state_update", build=state_update)
    return Case(
        operation="selective_scan",
        name=shape.name,
        draw=functools.partial(draw_window, shape, dtype),
        truth=calls["reference"],
        result=window_result,
        sides=tuple(Side(name=name, call=call) for name, call in calls.items()),
        peers=(peer,) if shape.tokens == 1 else (),
        configs={},
        work=Work(bytes=states + tokens * per_token, tokens=tokens),
    )


def sized(what: str, rows: int, tokens: int) -> shapes.EngineCase:
    """Jamba's layer over full rows."""
    name = f"{what}_jamba_{rows}x{tokens}"
    return replace(JAMBA, name=name, tokens=tokens, lengths=(tokens,) * rows)


def cases(*, smoke: bool) -> list[Case]:
    if smoke:
        chunk = next(shape for shape in shapes.CHUNKS if shape.name == SMOKE)
        verify = next(shape for shape in shapes.WINDOWS if shape.name == SMOKE_WINDOW)
        whole = replace(chunk, name="prompt", lengths=(chunk.tokens,) * 2, ends=None)
        full = replace(verify, lengths=(verify.tokens,) * verify.rows)
        decode = replace(full, name="decode", tokens=1, lengths=(1,) * full.rows, keeps=False)
        return [
            prompt_case(whole, "float32", reference=True),
            window_case(decode, "float32"),
            window_case(full, "float32"),
        ]
    prompts = [prompt_case(sized("scan", *size)) for size in PROMPTS]
    short = sized("scan", 1, SHORT)
    windows = [
        window_case(
            replace(
                sized("window", ROWS, tokens),
                keeps=tokens > 1,
                copies=1 if tokens == 1 else 1 + tokens,
            )
        )
        for tokens in WINDOWS
    ]
    return [prompts[0], windows[0], *prompts[1:], *windows[1:], prompt_case(short, reference=True)]


if __name__ == "__main__":
    report.main("selective_scan", __doc__.splitlines()[0], cases)
