"""The short convolution of one layer, with LFM2's gates or Mamba's SiLU: over prompts, and over windows into rings.

    python -m benchmarks.kernels.short_conv [--smoke] [--cases window] [--sweep] [--out FILE]

"xla" is the definition as XLA compiles it. Peer for prompts: causal_conv1d's kernel; of the gated form, which it does
not have, with torch's two products around it.
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
from pallas_kernels.operands import floats, stored
from pallas_kernels.short_conv import ShortWindow, short_conv, short_conv_window
from pallas_kernels.short_conv.kernel import Config, short_conv_pallas
from pallas_kernels.short_conv.reference import ShortChunk
from tests.kernels.cases import short_conv as shapes

LFM2_1_2B = shapes.Case(name="lfm2_1_2b", tokens=1, channels=2048, width=3, lengths=(1,))
JAMBA = shapes.Case(
    name="jamba", tokens=1, channels=8192, width=4, lengths=(1,), biased=True, gated=False
)
PROMPTS = ((1, 8192), (4, 2048))
ROWS, WINDOWS = 64, (1, 5)
WAYS = {"pallas": "pallas", "xla": "reference"}
SMOKE, SMOKE_WINDOW = "chunk", "verify"
SWEEP = [
    Config(tokens, channels, warps)
    for tokens in (8, 16, 32)
    for channels in (128, 256, 512)
    for warps in (1, 2, 4)
]


def normal(key: jax.Array, *shape: int) -> jax.Array:
    return jax.random.normal(key, shape, jnp.bfloat16)


def draw_layer(shape: shapes.Case, key: jax.Array) -> dict:
    """What in_proj gave, and the layer's weights."""
    keys = jax.random.split(key, 3)
    return {
        "projected": normal(keys[0], shape.rows, shape.tokens, shape.columns),
        "weight": normal(keys[1], shape.width, shape.channels),
        "bias": normal(keys[2], shape.channels) if shape.biased else None,
    }


def draw_prompt(shape: shapes.Case, key: jax.Array):
    keys = jax.random.split(key)
    return (), {
        **draw_layer(shape, keys[0]),
        "history": normal(keys[1], shape.rows, shape.width - 1, shape.channels),
        "lengths": jnp.asarray(shape.lengths, jnp.int32),
    }


def prompt(gated: bool, run, carry, inputs):
    return run(**inputs, gated=gated), carry


def causal_conv1d(gated: bool, carry, inputs):
    conv = need("causal_conv1d").causal_conv1d_fn
    weight, history = inputs["weight"].T, jnp.swapaxes(inputs["history"], 1, 2)
    projected, weight, history = to_torch(inputs["projected"], weight, history)
    bias = None if inputs["bias"] is None else to_torch(inputs["bias"])[0]
    *gates, x = projected.transpose(1, 2).chunk(3, dim=1) if gated else (projected.mT,)
    x = x if gated else x[:, : weight.shape[0]]

    def call():
        if not gated:
            return conv(x, weight, bias, initial_states=history, activation="silu").mT
        return (gates[1] * conv(gates[0] * x, weight, bias, initial_states=history)).mT

    return call


def prompt_case(shape: shapes.Case) -> Case:
    tokens, parts = sum(shape.lengths), 3 if shape.gated else 1
    calls = {
        name: functools.partial(
            prompt, shape.gated, functools.partial(short_conv, implementation=way)
        )
        for name, way in WAYS.items()
    }
    build = functools.partial(causal_conv1d, shape.gated)
    return Case(
        operation="short_conv",
        name=shape.name,
        draw=functools.partial(draw_prompt, shape),
        truth=calls["xla"],
        sides=tuple(Side(name=name, call=call) for name, call in calls.items()),
        peers=(Peer(name="causal_conv1d", build=build),),
        configs={
            f"tokens {c.block_tokens} channels {c.block_channels} {c.num_warps}w": functools.partial(
                prompt, shape.gated, with_arrays(short_conv_pallas, ShortChunk, config=c)
            )
            for c in SWEEP
        },
        work=Work(bytes=2 * tokens * (parts + 1) * shape.channels, tokens=tokens),
    )


def draw_window(shape: shapes.Case, key: jax.Array):
    """The ring is carried, of one layer, as bits of bfloat16."""
    keys = jax.random.split(key)
    ring = normal(keys[0], 1, shape.rows + 1, shape.width - 1 + shape.tokens, shape.channels)
    return stored(ring, jnp.uint16), {
        **draw_layer(shape, keys[1]),
        "first": jnp.zeros(shape.rows, jnp.int32),
        "num_valid": jnp.asarray(shape.lengths, jnp.int32),
    }


def window(gated: bool, run, conv, inputs):
    conv, y = run(**inputs, conv=conv, layer=0, gated=gated)
    return y, conv


def window_result(y, conv, inputs):
    return y, floats(conv)


def window_case(shape: shapes.Case) -> Case:
    tokens, parts = sum(shape.lengths), 3 if shape.gated else 1
    calls = {
        name: functools.partial(
            window, shape.gated, with_arrays(short_conv_window, ShortWindow, implementation=way)
        )
        for name, way in WAYS.items()
    }
    # The columns before a window are read and moved; its own go to the ring and to the output.
    columns = tokens * (parts + 2) + 2 * shape.rows * (shape.width - 1)
    return Case(
        operation="short_conv",
        name=shape.name,
        draw=functools.partial(draw_window, shape),
        truth=calls["xla"],
        result=window_result,
        sides=tuple(Side(name=name, call=call) for name, call in calls.items()),
        configs={},
        work=Work(bytes=2 * columns * shape.channels, tokens=tokens),
    )


def sized(model: shapes.Case, what: str, rows: int, tokens: int) -> shapes.Case:
    """The model's layer over full rows."""
    name = f"{what}_{model.name}_{rows}x{tokens}"
    return replace(model, name=name, tokens=tokens, lengths=(tokens,) * rows)


def cases(*, smoke: bool) -> list[Case]:
    if smoke:
        chunk = next(shape for shape in shapes.CHUNKS if shape.name == SMOKE)
        verify = next(shape for shape in shapes.WINDOWS if shape.name == SMOKE_WINDOW)
        return [
            prompt_case(replace(chunk, name="prompt", lengths=(chunk.tokens,) * 2)),
            window_case(replace(verify, name="window", lengths=(verify.tokens,) * verify.rows)),
        ]
    windows = [
        window_case(sized(model, "window", ROWS, tokens))
        for tokens in WINDOWS
        for model in (LFM2_1_2B, JAMBA)
    ]
    prompts = [
        prompt_case(sized(model, "prompt", *size))
        for size in PROMPTS
        for model in (LFM2_1_2B, JAMBA)
    ]
    return [case for pair in zip(windows, prompts, strict=True) for case in pair]


if __name__ == "__main__":
    report.main("short_conv", __doc__.splitlines()[0], cases)
