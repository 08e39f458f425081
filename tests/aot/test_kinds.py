"""Steps of models with other kinds of layers than Mamba-2, compiled for an H200 over an arena of 65 to 100 GB."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import replace

import jax
import pytest

from hybrid_jax.config import (
    MLP,
    Attention,
    EngineConfig,
    Mamba2,
    ModelConfig,
    Rope,
    ShortConv,
    residual_layer,
)
from hybrid_jax.engine.programs.loops import GPU_OPTIONS, LOOP_OPTIONS
from hybrid_jax.models.known import load_known
from hybrid_jax.sizing.temporaries import kernel_step_bytes
from tests.aot.chip import SHARED_MEMORY, Compiled, compile_for_gpu
from tests.aot.models import decode_step, prefill_step
from tests.drawing import EVERYTHING, left_to_all

FRAMES = 250_000


def qwen(name: str) -> ModelConfig:
    """Its first four layers: three gated delta nets, and attention with a gate and heads of 256 channels."""
    config = load_known(name)
    return replace(config, layers=config.layers[:4])


def lfm2() -> ModelConfig:
    """Three short convolutions and attention, of the sizes of LFM2-1.2B."""
    attention = Attention(
        num_heads=32, num_kv_heads=8, head_dim=64, rope=Rope(dim=64), qk_norm=True
    )
    mixers = (*[ShortConv(size=2048, conv_width=3)] * 3, attention)
    layers = tuple(residual_layer(mixers=(mixer,), mlp=MLP(width=8192)) for mixer in mixers)
    return ModelConfig(family="lfm2", layers=layers, width=2048, vocab_size=65_536)


def jamba() -> ModelConfig:
    """Three layers of Mamba and attention, of the sizes of Jamba mini, all with an MLP."""
    config = load_known("jamba_1_5_mini")
    mixers = [layer.mixers for layer in config.layers]
    attention = next(own for own in mixers if isinstance(own[0], Attention))
    mlp = MLP(width=14_336)
    layers = [residual_layer(mixers=own, mlp=mlp) for own in (*[mixers[0]] * 3, attention)]
    return replace(config, layers=tuple(layers))


def falcon_h1() -> ModelConfig:
    """Three layers of Mamba-2 and attention side by side, with the largest state that a kernel holds."""
    mamba2 = Mamba2(
        num_heads=24,
        head_dim=128,
        state_size=256,
        num_groups=1,
        conv_width=4,
        gated_norm="none",
    )
    attention = Attention(num_heads=12, num_kv_heads=2, head_dim=128, rope=Rope(dim=128))
    layer = residual_layer(mixers=(mamba2, attention), mlp=MLP(width=12_288))
    return ModelConfig(family="falcon_h1", layers=(layer,) * 3, width=3072, vocab_size=65_536)


MODELS = {
    "qwen3_5_9b": lambda: qwen("qwen3_5_9b"),
    "lfm2": lfm2,
    "jamba": jamba,
    "falcon_h1": falcon_h1,
    "qwen3_5_35b_a3b": lambda: qwen("qwen3_5_35b_a3b"),
}
NAMES = tuple(MODELS) if EVERYTHING else ("qwen3_5_9b", "lfm2", "jamba", "falcon_h1")
# Kernels of a layer, and its launches: norm, product, these, norm and product, and what reads the columns. A layer of
# falcon_h1 has those of attention too.
DECODE = {
    "qwen3_5_9b": (("causal_conv_window", "gated_delta_window", "gated_rmsnorm"), 6),
    "lfm2": (("short_conv_window",), 4),
    "jamba": (("short_conv_window", "scan_inputs", "selective_window"), 8),
    "falcon_h1": (("causal_conv_window", "ssd_window", "append_kv"), 13),
}
PREFILL = {
    "qwen3_5_9b": (
        ("causal_conv", "gated_delta_solve", "gated_delta_scan", "gated_rmsnorm", "store_tail"),
        11,
    ),
    "lfm2": (("short_conv", "store_short_tail"), 7),
    "jamba": (("short_conv", "scan_inputs", "selective_scan", "store_short_tail"), 12),
    "falcon_h1": (("causal_conv", "ssd_scan", "append_kv"), 16),
}
for of in (DECODE, PREFILL):
    of["qwen3_5_35b_a3b"] = of["qwen3_5_9b"]
MLP_LAUNCHES = {"qwen3_5_9b": 4, "lfm2": 4, "jamba": 4, "falcon_h1": 4, "qwen3_5_35b_a3b": 12}


@functools.cache
def compiled(name: str, rows: int, tokens: int) -> Compiled:
    if tokens == 1:
        step, specs = decode_step(MODELS[name](), rows=rows, num_frames=FRAMES)
    else:
        step, specs = prefill_step(MODELS[name](), rows=rows, chunk=tokens, num_frames=FRAMES)
    options = LOOP_OPTIONS if tokens == 1 else GPU_OPTIONS
    found = compile_for_gpu(step, *specs, donate=(1,), options=options)
    state = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(specs[1]))
    assert found.alias_bytes >= (state if tokens == 1 else FRAMES * 4 * 65_536)
    assert max(launch.shared_bytes for launch in found.launches) <= SHARED_MEMORY
    return found


def between(found: Compiled, kernel: str) -> int:
    """Launches of the second layer of three."""
    places = [i for i, x in enumerate(found.launches) if x in found.named(kernel)]
    assert len(places) == 3
    return places[2] - places[1]


@pytest.mark.parametrize(
    "name, rows",
    # XLA's own fusion of a router for one row spills 8 bytes.
    [(name, rows) for name in NAMES for rows in (1, 64) if (name, rows) != ("qwen3_5_35b_a3b", 1)],
)
@left_to_all("qwen3_5_9b-1]", "falcon_h1-1]", "lfm2-1]", "jamba-1]")
def test_a_decode_step_is_one_command_buffer_and_stays_within_its_launches(name, rows):
    found, (kernels, most) = compiled(name, rows, 1), DECODE[name]
    assert found.outer == ("kCommandBuffer",) and found.kinds["kWhile"] == 1
    assert rows == 1 or found.kinds["kCopy"] == 1  # of the loop's counter
    for kernel in kernels:
        assert len(found.named(kernel)) == 3, kernel
    assert between(found, kernels[0]) <= most + MLP_LAUNCHES[name]


@pytest.mark.parametrize("rows, tokens", [(2, 2048), (1, 8192)])
@pytest.mark.parametrize("name", NAMES)
def test_a_prefill_step_is_one_command_buffer_and_stays_within_its_launches(name, rows, tokens):
    found, (kernels, most) = compiled(name, rows, tokens), PREFILL[name]
    assert found.outer == ("kCommandBuffer",)
    assert rows == 1 or Counter(found.kinds).keys() == {"kCustomKernel"}
    for kernel in kernels:
        assert len(found.named(kernel)) == 3, kernel
    assert between(found, kernels[0]) <= most + MLP_LAUNCHES[name]


@pytest.mark.parametrize("rows, tokens", [(2, 2048), (1, 8192)])
@pytest.mark.parametrize("name", NAMES)
def test_temporaries_are_what_the_formula_says(name, rows, tokens):
    engine = EngineConfig(dtype="bfloat16", max_rows=rows, max_model_len=8192)
    counted = kernel_step_bytes(MODELS[name](), engine, rows=rows, tokens=tokens)
    assert compiled(name, rows, tokens).temp_bytes <= counted
    assert counted <= 1.25 * compiled(name, rows, tokens).temp_bytes
