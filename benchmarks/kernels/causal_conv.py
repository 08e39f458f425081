"""The causal convolution and step sizes of one Mamba-2 layer: over prompts, and over windows into rings.

    python -m benchmarks.kernels.causal_conv [--smoke] [--cases window] [--sweep] [--out FILE]

Peer for prompts: causal_conv1d's kernel with torch's softplus for the step sizes, reading the same projection.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import asdict, replace
from pathlib import Path

import jax
import jax.numpy as jnp

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # when run as a file
from benchmarks.kernels import report
from benchmarks.kernels.harness import Case, Peer, Side, Work, with_arrays
from benchmarks.kernels.peers import need, to_torch
from pallas_kernels import causal_conv, causal_conv_window
from pallas_kernels.causal_conv import ProjectionLayout
from pallas_kernels.causal_conv.kernel import (
    Config,
    causal_conv_pallas,
    causal_conv_window_pallas,
)
from pallas_kernels.causal_conv.reference import Chunk, ConvWindow
from pallas_kernels.operands import floats, stored
from tests.kernels.cases import causal_conv as shapes

GRANITE_4_H_SMALL = ProjectionLayout(num_heads=128, head_dim=64, num_groups=1, state_size=128)
MODELS = {"granite_4_h_small_G1": GRANITE_4_H_SMALL, "nemotron_h_8b_G8": shapes.NEMOTRON_H_8B}
PROMPTS = ((1, 8192), (4, 2048))
ROWS, GRAIN, WINDOWS = 64, 32, (1, 5)
WAYS = {"pallas": "pallas", "xla": "reference"}  # the definition, as XLA compiles it
SMOKE, SMOKE_WINDOW = "lengths_around_the_taps", "verify"
PROMPT_SWEEP = [
    Config(tokens, channels, warps)
    for tokens in (8, 16, 32)
    for channels in (128, 256, 512)
    for warps in (1, 2, 4)
]


def window_sweep(tokens: int) -> list[Config]:
    """A window's programs take all of its tokens, up to a power of two."""
    block = Config.of_window(tokens).block_tokens
    return [
        Config(block, channels, warps, block_slots=slots)
        for channels in (128, 256, 512)
        for warps in (1, 2, 4)
        for slots in (16, 32)
    ]


def normal(key: jax.Array, *shape: int) -> jax.Array:
    return jax.random.normal(key, shape, jnp.bfloat16)


def draw_layer(layout: ProjectionLayout, key: jax.Array, rows: int, tokens: int) -> dict:
    """What in_proj gave, and the layer's weights."""
    keys = jax.random.split(key, 4)
    return {
        "projected": normal(keys[0], rows, tokens, layout.projected_size),
        "weight": normal(keys[1], layout.conv_width, layout.conv_size),
        "bias": normal(keys[2], layout.conv_size),
        "dt_bias": jax.random.uniform(keys[3], (layout.num_heads,), minval=-4, maxval=1),
    }


def draw_prompt(shape: shapes.Case, key: jax.Array):
    keys, layout = jax.random.split(key), shape.layout
    return (), {
        **draw_layer(layout, keys[0], shape.rows, shape.tokens),
        "history": normal(keys[1], shape.rows, layout.history, layout.conv_size),
        "lengths": jnp.asarray(shape.lengths, jnp.int32),
    }


def prompt(layout: ProjectionLayout, run, carry, inputs):
    return run(**inputs, layout=layout), carry


def causal_conv1d(layout: ProjectionLayout, carry, inputs):
    conv = need("causal_conv1d").causal_conv1d_fn
    softplus = need("torch").nn.functional.softplus
    names = ("projected", "weight", "bias", "dt_bias", "history")
    projected, weight, bias, dt_bias, history = to_torch(*(inputs[name] for name in names))
    first, last = layout.inner_size, layout.inner_size + layout.conv_size
    x, dt = projected[..., first:last].transpose(1, 2), projected[..., last:]
    weight, history = weight.t().contiguous(), history.transpose(1, 2)

    def call():
        y = conv(x, weight, bias, initial_states=history, activation="silu")
        return y.transpose(1, 2), softplus(dt.float() + dt_bias)

    return call


def prompt_case(shape: shapes.Case) -> Case:
    layout, tokens = shape.layout, sum(shape.lengths)
    calls = {
        name: functools.partial(prompt, layout, functools.partial(causal_conv, implementation=way))
        for name, way in WAYS.items()
    }
    columns = 2 * layout.conv_size + layout.num_heads  # read and written, and step sizes read
    return Case(
        operation="causal_conv",
        name=shape.name,
        draw=functools.partial(draw_prompt, shape),
        truth=calls["xla"],
        sides=tuple(Side(name=name, call=call) for name, call in calls.items()),
        peers=(Peer(name="causal_conv1d", build=functools.partial(causal_conv1d, layout)),),
        configs={
            label(c): functools.partial(
                prompt, layout, with_arrays(causal_conv_pallas, Chunk, config=c)
            )
            for c in PROMPT_SWEEP
        },
        work=Work(bytes=tokens * (2 * columns + 4 * layout.num_heads), tokens=tokens),
    )


def draw_window(shape: shapes.WindowCase, key: jax.Array):
    """The rings are carried, of one layer, as bits of bfloat16."""
    keys, layout = jax.random.split(key, 4), shape.layout
    lead = (1, shape.rows + 1)
    rings = (
        stored(normal(keys[0], *lead, layout.history + shape.tokens, layout.conv_size), jnp.uint16),
        stored(normal(keys[1], *lead, shape.slots, layout.record_size), jnp.uint16),
        jax.random.uniform(keys[2], (*lead, shape.slots, layout.num_heads)),
    )
    ints = {name: getattr(shape, name) for name in ("starts", "first", "num_valid")}
    return rings, {
        **draw_layer(layout, keys[3], shape.rows, shape.tokens),
        **{name: jnp.asarray(value, jnp.int32) for name, value in ints.items()},
    }


def window(layout: ProjectionLayout, run, rings, inputs):
    conv, xB, dt = rings
    *rings, C, scores = run(**inputs, conv=conv, xB=xB, dt=dt, layer=0, layout=layout)
    return (C, scores), tuple(rings)


def window_result(outputs, rings, inputs):
    conv, xB, dt = rings
    return outputs, floats(conv), floats(xB), dt


def window_case(shape: shapes.WindowCase) -> Case:
    layout, tokens = shape.layout, sum(shape.num_valid)
    calls = {
        name: functools.partial(
            window, layout, with_arrays(causal_conv_window, ConvWindow, implementation=way)
        )
        for name, way in WAYS.items()
    }
    shared = 2 * layout.shared_size  # bytes of one token's B, or of its C
    read = 2 * (layout.conv_size + layout.num_heads)
    written = 2 * (layout.conv_size + layout.record_size) + shared
    written += 4 * (layout.num_heads + layout.num_groups * shape.slots)
    history = 2 * 2 * layout.history * layout.conv_size  # read and moved
    seen = sum(start * shared for start in shape.starts)  # B of the records before the window
    return Case(
        operation="causal_conv",
        name=shape.name,
        draw=functools.partial(draw_window, shape),
        truth=calls["xla"],
        result=window_result,
        sides=tuple(Side(name=name, call=call) for name, call in calls.items()),
        configs={
            label(c): functools.partial(
                window, layout, with_arrays(causal_conv_window_pallas, ConvWindow, config=c)
            )
            for c in window_sweep(shape.tokens)
        },
        work=Work(bytes=tokens * (read + written) + shape.rows * history + seen, tokens=tokens),
    )


def label(config: Config) -> str:
    return " ".join(
        f"{name.removeprefix('block_')} {size}" for name, size in asdict(config).items()
    )


def cases(*, smoke: bool) -> list[Case]:
    if smoke:
        row = next(shape for shape in shapes.CASES if shape.name == SMOKE)
        ring = next(shape for shape in shapes.WINDOW_CASES if shape.name == SMOKE_WINDOW)
        return [
            prompt_case(replace(row, name="prompt", lengths=(row.tokens,) * 2)),
            window_case(replace(ring, name="window", first=(0,) * ring.rows)),
        ]
    windows = [
        window_case(
            shapes.WindowCase(
                name=f"window_{model}_T{tokens}",
                layout=layout,
                tokens=tokens,
                slots=GRAIN + tokens - 1,
                starts=tuple(i % GRAIN for i in range(ROWS)),
                first=(0,) * ROWS,
                num_valid=(tokens,) * ROWS,
            )
        )
        for tokens in WINDOWS
        for model, layout in MODELS.items()
    ]
    prompts = [
        prompt_case(
            shapes.Case(
                name=f"prompt_{model}_{rows}x{tokens}",
                layout=layout,
                tokens=tokens,
                lengths=(tokens,) * rows,
            )
        )
        for rows, tokens in PROMPTS
        for model, layout in MODELS.items()
    ]
    return [case for pair in zip(windows, prompts, strict=True) for case in pair]


if __name__ == "__main__":
    report.main("causal_conv", __doc__.splitlines()[0], cases)
