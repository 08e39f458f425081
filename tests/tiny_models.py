"""Tiny models of every mixer and family shape: more than one KV head and group, odd sizes, nothing at its default.

The weights are drawn so that what a bug would confuse matters: biases and norm weights are spread, every
multiplier differs from 1, and states remember tens of tokens, so that a stale one changes what comes next.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from hybrid_jax.config import (
    MLP,
    Attention,
    EngineConfig,
    GatedDelta,
    Layer,
    Mamba1,
    Mamba2,
    ModelConfig,
    MoE,
    Rope,
    RopeScaling,
    ShortConv,
    residual_layer,
    with_cut,
)
from hybrid_jax.engine.engine import Engine
from hybrid_jax.models.initialize import random_params
from hybrid_jax.products.operations import encoded
from tests.blocks import one_of_each
from tests.kinds import fixed_decay, gated, latent
from tests.kinds.fixed_decay import FixedDecay
from tests.kinds.gated import Gated
from tests.kinds.latent import Latent
from tests.products.cases import CASES, kept

fixed_decay.register()
gated.register()
latent.register()
VOCAB = 61
MAX_POSITION = 256

_MAMBA = Mamba2(num_heads=6, head_dim=4, state_size=8, num_groups=2, norm_groups=2)
_ATTENTION = Attention(num_heads=4, num_kv_heads=2, head_dim=8, rope=Rope(dim=8))
_MLP = MLP(width=40)
GRANITE_MOE = MoE(num_experts=5, top_k=2, width=12, shared_width=16)
NEMOTRON_MOE = MoE(
    num_experts=6,
    top_k=2,
    width=12,
    kind="relu2",
    routing="sigmoid",
    num_groups=3,
    top_groups=2,
    scale=1.7,
    shared_width=20,
)


QWEN_MOE = MoE(
    num_experts=5, top_k=2, width=12, routing="softmax_topk", shared_width=16, shared_gate=True
)


def _config(family: str, *layers: Layer, **settings) -> ModelConfig:
    settings = {"width": 28, "vocab_size": VOCAB, "max_position": MAX_POSITION} | settings
    return ModelConfig(family=family, layers=layers, **settings)


def _layer(*mixers, mlp=None, gain=1.0) -> Layer:
    return residual_layer(mixers=mixers, mlp=mlp, gain=gain)


def _llama() -> ModelConfig:
    scaling = RopeScaling(kind="llama3", factor=4.0, original_max_position=64)
    rope = Rope(dim=8, theta=500.0, scaling=scaling)
    attention = Attention(num_heads=6, num_kv_heads=3, head_dim=8, rope=rope, qkv_bias=True)
    return _config("llama", *[_layer(attention, mlp=_MLP)] * 2)


def _mamba2() -> ModelConfig:
    mixer = Mamba2(num_heads=6, head_dim=4, state_size=8, num_groups=3, conv_width=3)
    return _config("mamba2", *[_layer(mixer)] * 2, tie_embeddings=True, residual_in_fp32=True)


def _nemotron_h() -> ModelConfig:
    mixer = Mamba2(num_heads=6, head_dim=4, state_size=6, num_groups=2, norm_groups=2)
    attention = Attention(num_heads=4, num_kv_heads=2, head_dim=6)
    relu2 = MLP(width=36, kind="relu2")
    parts = {"M": _layer(mixer), "-": _layer(mlp=relu2), "*": _layer(attention)}
    return _config("nemotron_h", *(parts[letter] for letter in "M-*M"))


def _nemotron_h_moe() -> ModelConfig:
    attention = Attention(num_heads=4, num_kv_heads=2, head_dim=6, out_bias=True)
    mixer = Mamba2(
        num_heads=4, head_dim=6, state_size=8, num_groups=2, norm_groups=2, proj_bias=True
    )
    parts = {"M": _layer(mixer), "E": _layer(mlp=NEMOTRON_MOE), "*": _layer(attention)}
    return _config("nemotron_h", *(parts[letter] for letter in "ME*"))


def _bamba() -> ModelConfig:
    attention = Attention(num_heads=4, num_kv_heads=2, head_dim=8, rope=Rope(dim=4))
    mixers = [_MAMBA, attention]
    return _config("bamba", *(_layer(mixer, mlp=_MLP) for mixer in mixers))


def _granite() -> ModelConfig:
    attention = Attention(num_heads=4, num_kv_heads=2, head_dim=8, scale=0.21)
    mixers = [_MAMBA, attention]
    return _config(
        "granitemoehybrid",
        *(_layer(mixer, mlp=GRANITE_MOE, gain=0.7) for mixer in mixers),
        embedding_multiplier=3.1,
        logits_multiplier=0.6,
    )


def _qwen3_next() -> ModelConfig:
    delta = GatedDelta(num_key_heads=2, num_value_heads=4, key_dim=6, value_dim=4, conv_width=3)
    attention = Attention(
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        rope=Rope(dim=4),
        qk_norm=True,
        float32_norms=True,
        gate=True,
    )
    mixers = [(delta, QWEN_MOE), (attention, _MLP), (delta, _MLP)]
    layers = [_layer(mixer, mlp=mlp) for mixer, mlp in mixers]
    return _config("qwen3_next", *layers, float32_norms=True)


def _lfm2() -> ModelConfig:
    attention = Attention(num_heads=4, num_kv_heads=2, head_dim=8, rope=Rope(dim=8), qk_norm=True)
    mixers = [ShortConv(size=28), attention, ShortConv(size=28)]
    return _config("lfm2", *(_layer(mixer, mlp=_MLP) for mixer in mixers), tie_embeddings=True)


def _jamba() -> ModelConfig:
    mixer = Mamba1(inner_size=20, state_size=5, dt_rank=3, conv_width=3, norms="weighted")
    attention = Attention(num_heads=4, num_kv_heads=2, head_dim=6)
    experts = MoE(num_experts=5, top_k=2, width=12, routing="softmax_topk", normalize=False)
    pairs = [(mixer, experts), (attention, _MLP), (mixer, _MLP)]
    return _config("jamba", *(_layer(mixer, mlp=mlp) for mixer, mlp in pairs))


def _parallel() -> ModelConfig:
    both = _layer(_MAMBA, _ATTENTION, mlp=_MLP)
    return _config("parallel", both, both)


def _shared() -> ModelConfig:
    block = _layer(_ATTENTION, mlp=_MLP)
    again = _layer(_ATTENTION, mlp=_MLP).again(1)
    mamba_again = _layer(_MAMBA).again(0)
    return _config("shared", _layer(_MAMBA), block, mamba_again, again)


def _windowed() -> ModelConfig:
    shape = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "rope": Rope(dim=8)}
    near = Attention(**shape, sliding_window=37, soft_cap=5.0, qk_norm=True)
    far = Attention(**shape, qk_norm=True, qk_norm_eps=1e-3)
    layers = [_layer(mixer, mlp=_MLP) for mixer in (near, _MAMBA, far)]
    return _config("windowed", *layers)


def _two_shapes() -> ModelConfig:
    """Two shapes of states and two of KV, between each other."""
    small = Mamba2(num_heads=4, head_dim=6, state_size=4, conv_width=3)
    wide = Attention(num_heads=4, num_kv_heads=4, head_dim=6, rope=Rope(dim=6))
    mixers = (_MAMBA, wide, small, _ATTENTION, small, _MAMBA)
    return _config("two_shapes", *(_layer(mixer) for mixer in mixers), _layer(small, wide))


def _unknown_kind() -> ModelConfig:
    """A kind that only the tests know and that carries its state, alone and beside one that keeps records, between two
    shapes of KV; one that keeps records beside one that caches columns alone."""
    replay = GatedDelta(num_key_heads=1, num_value_heads=3, key_dim=6, value_dim=4, conv_width=3)
    carry = Gated(num_blocks=5, block_size=4)
    wide = Attention(num_heads=4, num_kv_heads=4, head_dim=6, rope=Rope(dim=6))
    short = ShortConv(size=20, conv_width=4, bias=True)
    mixers = [(replay,), (wide,), (carry,), (_MAMBA, carry), (_ATTENTION,), (short, replay)]
    return _config("unknown_kinds", *(_layer(*mixer, mlp=_MLP) for mixer in mixers))


def _cut() -> ModelConfig:
    """A cut, and after it layers of which each two share keys and values, or a state."""
    near = replace(_ATTENTION, qk_norm=True, qkv_bias=True)
    mixers = [(_MAMBA,), (_ATTENTION,), (_MAMBA,), (near,), (_MAMBA,), (near,)]
    layers = [_layer(*mixer, mlp=_MLP if place % 2 else None) for place, mixer in enumerate(mixers)]
    return with_cut(_config("with_cut", *layers), 2, kv_group=2, state_group=2)


def _cut_delta() -> ModelConfig:
    """Gated delta nets and gated attention after a cut, in layers of their own and side by side."""
    layers = list(_qwen3_next().layers)
    delta, attention = (layers[place].mixers[0] for place in (0, 1))
    later = [_layer(delta), _layer(mlp=_MLP), _layer(_MAMBA, attention, mlp=_MLP)]
    layers = [layer.with_gain(0.8) for layer in (*layers[:2], *later)]
    return with_cut(_config("with_cut", *layers), 2)


def _latent() -> ModelConfig:
    """Latents in pages beside keys and values, with a window and without, between recurrent layers."""
    own = Latent(num_heads=3, head_dim=4, rank=12)
    layers = [_layer(_MAMBA, mlp=_MLP), _layer(own), _layer(_ATTENTION), _layer(_MAMBA)]
    return _config("with_latent", *layers, _layer(replace(own, sliding_window=23), mlp=_MLP))


def _blocks() -> ModelConfig:
    """Layers of every other shape, and norms that take the mean away."""
    return _config("with_blocks", *one_of_each(), norm_kind="layer")


def _fixed_decay() -> ModelConfig:
    """Matrix states with fixed decays, without a convolution, alone and beside attention, between others."""
    own = FixedDecay(num_heads=3, value_dim=4, key_dim=6)
    mixers = [(own,), (_ATTENTION,), (_MAMBA,), (own, _ATTENTION)]
    return _config("with_fixed_decay", *(_layer(*mixer, mlp=_MLP) for mixer in mixers))


MODELS = {
    "llama": _llama,
    "mamba2": _mamba2,
    "nemotron_h": _nemotron_h,
    "nemotron_h_moe": _nemotron_h_moe,
    "bamba": _bamba,
    "granite": _granite,
    "qwen3_next": _qwen3_next,
    "lfm2": _lfm2,
    "jamba": _jamba,
    "parallel": _parallel,
    "shared": _shared,
    "windowed": _windowed,
    "with_two_shapes": _two_shapes,
    "with_unknown_kind": _unknown_kind,
    "with_cut": _cut,
    "with_cut_delta": _cut_delta,
    "with_latent": _latent,
    "with_blocks": _blocks,
    "with_fixed_decay": _fixed_decay,
    # Matrices that are kept as codes.
    "with_int8": lambda: kept(_nemotron_h_moe(), CASES["int8"].format),
    "with_fp8": lambda: kept(_qwen3_next(), CASES["fp8_blocks"].format),
    "with_int4": lambda: kept(_bamba(), CASES["int4_zeros"].format),
}
# Another model in the middle would change the weights of those after it.
LAST = (
    *("with_cut", "with_cut_delta", "with_latent", "with_blocks", "with_fixed_decay"),
    *("with_int8", "with_fp8", "with_int4"),
)
SEEDS = (*sorted(set(MODELS) - set(LAST)), *LAST)


@functools.cache
def tiny_model(name: str, dtype: str = "float32") -> tuple[ModelConfig, dict]:
    """The configuration of one of `MODELS` and its weights, the same in every run."""
    config = MODELS[name]()
    return config, redrawn(config, seed=SEEDS.index(name), dtype=dtype)


def as_codes(params: dict, config: ModelConfig) -> dict:
    """Weights whose matrices are numbers, as the config keeps them."""
    formats = dict(config.matrices)

    def keep(path, leaf):
        format = formats.get(jax.tree_util.keystr(path, simple=True, separator="."))
        return leaf if format is None else encoded(leaf, format)

    return jax.tree_util.tree_map_with_path(keep, params)


def tiny_engine(name: str = "bamba", **settings) -> Engine:
    """An engine of one of `MODELS`: few rows and short chunks, `settings` above all."""
    config, params = tiny_model(name)
    settings = {"max_rows": 4, "prefill_tokens": 64, "steps_per_dispatch": 4} | settings
    return Engine(config, params, EngineConfig(**settings))


def redrawn(config: ModelConfig, seed: int, dtype: str = "float32") -> dict:
    """Weights without special values: `random_params` with norms, biases and decay drawn anew, outputs louder."""
    if config.matrices:
        return as_codes(redrawn(replace(config, matrices=()), seed, dtype), config)
    rng = np.random.default_rng((seed, 1))

    def draw(path, leaf):
        name = str(getattr(path[-1], "key", path[-1]))
        if name == "dt_bias":  # steps of 0.05 to 0.6
            values = np.log(np.expm1(rng.uniform(0.05, 0.6, leaf.shape)))
        elif name == "A_log":  # 2 to 200 tokens of memory
            values = np.log(rng.uniform(0.02, 1.0, leaf.shape))
        elif name in ("D", "gain") or "norm" in name:
            values = rng.uniform(0.6, 1.6, leaf.shape)
        elif name.endswith("bias"):
            values = rng.normal(0, 0.3, leaf.shape)
        elif name in ("out", "out_proj", "down"):
            values = np.asarray(leaf, np.float32) * 3
        elif name == "embed":
            values = rng.normal(0, 1 if not config.tie_embeddings else 0.4, leaf.shape)
        elif name == "conv":
            values = np.asarray(leaf, np.float32) * 1.5
        else:
            return leaf
        return jnp.asarray(values, leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, random_params(config, seed, dtype))
