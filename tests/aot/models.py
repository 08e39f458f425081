"""Shapes of the 7B hybrid's weights and state, and its steps, without a single array."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp

from hybrid_jax.config import (
    MLP,
    PALLAS,
    Attention,
    CacheConfig,
    EngineConfig,
    Mamba2,
    ModelConfig,
    MoE,
    SpeculationConfig,
    residual_layer,
)
from hybrid_jax.engine.steps.decode import Decode
from hybrid_jax.engine.steps.exact import Exact, ExactBucket
from hybrid_jax.engine.steps.prefill import Prefill
from hybrid_jax.engine.steps.verify import Verify
from hybrid_jax.geometry import KERNEL_LOGITS_MARGIN, drafting_specs, make_geometry
from hybrid_jax.kinds.kind import Weight, map_weights
from hybrid_jax.kinds.table import model_weights
from hybrid_jax.models import config_from_hf
from hybrid_jax.schedule.bucket import AfterCut, DecodeBucket, PrefillBucket
from hybrid_jax.sizing.temporaries import kernel_step_bytes
from hybrid_jax.state import Model, state_specs
from tests.aot.chip import H200, chip_of

CONFIG = Path(__file__).resolve().parents[2] / "configs/models/hybrid_7b/config.json"
PERIOD = 14  # blocks of the pattern: 6 Mamba-2, 1 attention, 7 MLP
PERIODS = 4


def hybrid_7b(periods: int = PERIODS) -> ModelConfig:
    """The 7B hybrid, or its first periods."""
    raw = json.loads(CONFIG.read_text())
    raw["hybrid_override_pattern"] = raw["hybrid_override_pattern"][: PERIOD * periods]
    raw["num_hidden_layers"] = PERIOD * periods
    return config_from_hf(raw)


def side_by_side(*, attention_first: bool) -> ModelConfig:
    """Two layers of the 7B hybrid's mixers, each with both of them."""
    config = hybrid_7b(1)
    kinds = (Attention, Mamba2) if attention_first else (Mamba2, Attention)
    mixers = [mixer for layer in config.layers for mixer in layer.mixers]
    both = tuple(next(mixer for mixer in mixers if isinstance(mixer, kind)) for kind in kinds)
    return replace(config, layers=(residual_layer(mixers=both),) * 2)


def mixture(layers: str = "MM*") -> ModelConfig:
    """Mamba-2 layers "M" and attention layers "*", each followed by experts: the shapes of Granite-4.0-H-Tiny."""
    mixers = {
        "M": Mamba2(num_heads=48, head_dim=64, state_size=128),
        "*": Attention(num_heads=12, num_kv_heads=4, head_dim=128),
    }
    experts = MoE(num_experts=64, top_k=6, width=512, shared_width=1024)
    return ModelConfig(
        family="granitemoehybrid",
        width=1536,
        vocab_size=100_352,
        max_position=131_072,
        layers=tuple(residual_layer(mixers=(mixers[letter],), mlp=experts) for letter in layers),
        tie_embeddings=True,
    )


def smallest() -> ModelConfig:
    """A Mamba-2 layer and an attention layer, each followed by an MLP, as small as the kernels take them."""
    mixers = (
        Mamba2(num_heads=8, head_dim=64, state_size=128),
        Attention(num_heads=4, num_kv_heads=2, head_dim=64),
    )
    layers = tuple(residual_layer(mixers=(mixer,), mlp=MLP(width=512)) for mixer in mixers)
    return ModelConfig(family="bamba", width=256, vocab_size=2048, layers=layers)


def weights(config: ModelConfig, dtype: str = "bfloat16") -> dict:
    """Shapes of all weights; A_log, D and dt_bias are float32."""

    def shape(weight: Weight) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(weight.shape, jnp.float32 if weight.float32 else dtype)

    return map_weights(shape, model_weights(config))


def decode_step(
    config: ModelConfig,
    *,
    rows: int,
    num_frames: int,
    tokens: int = 8192,
    dtype: str = "bfloat16",
    sampling: str = "pallas",
    kv_cache_dtype: str = "auto",
    loops: bool = True,
    chip: str = H200,
):
    """Decode steps of a dispatch of up to 8, or one of them, and the shapes of its arguments; the second is donated."""
    model, state = model_and_state(config, rows, num_frames, dtype, kv_cache_dtype=kv_cache_dtype)
    model = replace(model, backend=replace(PALLAS, sampling=sampling, chip=chip_of(chip)))
    bucket = DecodeBucket(rows, 8, model.geometry.num_pages(tokens))
    layout = Decode(EngineConfig(max_rows=rows), model, bucket.width).layout(bucket)
    static = {"max_steps": 8} if loops else {"max_steps": 1, "loops": False}
    run = functools.partial(Decode.run, model=model, layout=layout, num_logprobs=0, **static)
    batch = jax.ShapeDtypeStruct((rows, layout.size), jnp.int32)
    specs = (weights(config, dtype), state, batch, jax.ShapeDtypeStruct((), jnp.int32))
    return lambda params, state, batch, count: run(params, state, None, batch, count), specs


def prefill_step(
    config: ModelConfig,
    *,
    rows: int,
    chunk: int,
    num_frames: int,
    tokens: int = 8192,
    dtype: str = "bfloat16",
    scan: str = "pallas",
    after_cut: AfterCut = AfterCut.ALL,
    kv_cache_dtype: str = "auto",
    chip: str = H200,
):
    """The prefill step of `rows` chunks, and the shapes of its arguments; the second is donated."""
    model, state = model_and_state(config, 64, num_frames, dtype, kv_cache_dtype=kv_cache_dtype)
    model = replace(model, backend=replace(PALLAS, scan=scan, chip=chip_of(chip)))
    bucket = PrefillBucket(rows, chunk, model.geometry.num_pages(tokens), after_cut)
    layout = Prefill(EngineConfig(max_rows=rows), model, bucket.width).layout(bucket)
    static = {"model": model, "layout": layout, "num_logprobs": 0, "after_cut": after_cut}
    run = functools.partial(Prefill.run, **static)
    batch = jax.ShapeDtypeStruct((rows, layout.size), jnp.int32)
    specs = (weights(config, dtype), state, batch)
    return lambda params, state, batch: run(params, state, None, batch), specs


def window_step(
    config: ModelConfig,
    *,
    rows: int,
    num_frames: int,
    tokens: int = 8192,
    dtype: str = "bfloat16",
):
    """Exact mode's step, and the shapes of its arguments; the second is donated."""
    model, state = model_and_state(config, rows, num_frames, dtype, exact=True)
    geometry = model.geometry
    bucket = ExactBucket(rows, geometry.grain, geometry.num_pages(tokens))
    layout = Exact(EngineConfig(max_rows=rows), model, bucket.width).layout(bucket)
    run = functools.partial(Exact.run, model=model, layout=layout, num_logprobs=0)
    batch = jax.ShapeDtypeStruct((rows, layout.size), jnp.int32)
    specs = (weights(config, dtype), state, batch)
    return lambda params, state, batch: run(params, state, None, batch), specs


def verify_step(
    config: ModelConfig,
    *,
    rows: int,
    num_frames: int,
    tokens: int = 8192,
    speculation: SpeculationConfig | None = None,
    loops: bool = True,
):
    """Steps that judge drafts, or one of them; and the shapes of the arguments, the second donated."""
    speculation = speculation or SpeculationConfig()
    model, state = model_and_state(
        config, rows, num_frames, "bfloat16", speculation=speculation, longest=tokens
    )
    engine = EngineConfig(max_rows=rows, speculation=speculation)
    verify = Verify(engine, model, model.geometry.num_pages(tokens))
    bucket = next(bucket for bucket in verify.buckets() if bucket.rows == rows)
    layout = verify.layout(bucket)
    static = {"model": model, "layout": layout, "num_logprobs": 0, **verify.static(bucket)}
    static |= {} if loops else {"max_steps": 1, "loops": False}
    run = functools.partial(Verify.run, **static)
    batch = jax.ShapeDtypeStruct((rows, layout.size), jnp.int32)
    ends = [] if loops else [jax.ShapeDtypeStruct((rows,), jnp.int32)]
    specs = (weights(config), state, batch, jax.ShapeDtypeStruct((), jnp.int32), *ends)
    return lambda params, state, batch, *rest: run(params, state, None, batch, *rest), specs


def counted_bytes(config: ModelConfig, *, rows: int, tokens: int) -> int:
    """What sizing counts for the temporaries of a step in bfloat16: those of its layers, or those of its sampling."""
    engine = EngineConfig(dtype="bfloat16", max_rows=rows, max_model_len=8192)
    logit = KERNEL_LOGITS_MARGIN * (2 + 4)  # as the product makes it, and in float32
    layers = kernel_step_bytes(config, engine, rows=rows, tokens=tokens)
    return max(layers, int(logit * rows * config.vocab_size))


def model_and_state(
    config: ModelConfig,
    rows: int,
    num_frames: int,
    dtype: str,
    *,
    exact: bool = False,
    speculation: SpeculationConfig | None = None,
    longest: int = 0,
    kv_cache_dtype: str = "auto",
    checkpoints: str = "float32",
):
    """The model in an engine of so many rows, and the shapes of its state."""
    engine = EngineConfig(
        cache=CacheConfig(checkpoints=checkpoints),
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        max_rows=rows,
        kernels="pallas",
        exact=exact,
        speculation=speculation,
    )
    geometry = make_geometry(config, engine)
    specs = state_specs(
        geometry,
        num_frames=num_frames,
        max_slots=512,
        max_rows=rows,
        window=engine.decode_tokens,
        aligned=exact,
        drafting=drafting_specs(config, engine, longest),
    )
    state = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, jnp.dtype(s.dtype)), specs)
    return Model(config, geometry, PALLAS, speculation=speculation), state
