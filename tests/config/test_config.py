"""Descriptions refuse what cannot be, naming the value, and derive what follows."""

import math
import re

import pytest

from hybrid_jax.config import (
    MLP,
    Attention,
    Block,
    CacheConfig,
    EngineConfig,
    GatedDelta,
    Layer,
    LowRank,
    Mamba1,
    Mamba2,
    ModelConfig,
    MoE,
    Residual,
    Rope,
    RopeScaling,
    residual_layer,
)

ATTENTION = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
MAMBA = {"num_heads": 6, "head_dim": 8, "state_size": 16}
MAMBA1 = {"inner_size": 8, "state_size": 4, "dt_rank": 2}
DELTA = {"num_key_heads": 2, "num_value_heads": 4, "key_dim": 8, "value_dim": 16}
EXPERTS = {"num_experts": 8, "top_k": 2, "width": 16}
MODEL = {
    "family": "tiny",
    "vocab_size": 32,
    "width": 16,
    "layers": (residual_layer(mlp=MLP(width=8)),),
}


def layers(*specs) -> dict:
    return {"layers": specs}


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (Rope, {"dim": 7}, "Rope: dim must be even, got 7"),
        (Rope, {"dim": 0}, "Rope: dim must be even, got 0"),
        (
            RopeScaling,
            {"kind": "yarn", "factor": 2.0},
            "RopeScaling: kind must be linear or llama3, got 'yarn'",
        ),
        (
            RopeScaling,
            {"kind": "linear", "factor": 0.0},
            "RopeScaling: factor must be positive, got 0.0",
        ),
        (
            RopeScaling,
            {"kind": "llama3", "factor": 2.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0},
            "RopeScaling: low_freq_factor must be positive and below high_freq_factor, "
            "got 4.0 and 4.0",
        ),
        (
            Attention,
            ATTENTION | {"num_heads": 12, "num_kv_heads": 5},
            "Attention: num_heads must be a multiple of num_kv_heads, got 12 and 5",
        ),
        (Attention, ATTENTION | {"num_heads": 0}, "Attention: num_heads must be positive, got 0"),
        (
            Attention,
            ATTENTION | {"num_kv_heads": 0},
            "Attention: num_kv_heads must be positive, got 0",
        ),
        (Attention, ATTENTION | {"head_dim": 9}, "Attention: head_dim must be even, got 9"),
        (
            Attention,
            ATTENTION | {"rope": Rope(dim=16)},
            "Attention: rope dim must be at most head_dim 8, got 16",
        ),
        (
            Attention,
            ATTENTION | {"sliding_window": 0},
            "Attention: sliding_window must be positive, got 0",
        ),
        (
            Mamba2,
            MAMBA | {"num_groups": 4},
            "Mamba2: num_heads must be a multiple of its groups, got 6 and 4",
        ),
        (
            Mamba2,
            MAMBA | {"norm_groups": 5},
            "Mamba2: inner_size must be a multiple of its groups, got 48 and 5",
        ),
        (Mamba2, MAMBA | {"num_groups": 0}, "Mamba2: num_groups must be positive, got 0"),
        (Mamba2, MAMBA | {"state_size": -1}, "Mamba2: state_size must be positive, got -1"),
        (Mamba2, MAMBA | {"conv_width": 1}, "Mamba2: conv_width must be at least 2, got 1"),
        (
            Mamba2,
            MAMBA | {"dt_limits": (0.2, 0.1)},
            "Mamba2: dt_limits must be ordered, got (0.2, 0.1)",
        ),
        (
            Mamba2,
            MAMBA | {"dt_limits": (-1.0, 1.0)},
            "Mamba2: dt_limits must be ordered, got (-1.0, 1.0)",
        ),
        (Mamba1, MAMBA1 | {"inner_size": 0}, "Mamba1: inner_size must be positive, got 0"),
        (Mamba1, MAMBA1 | {"dt_rank": -1}, "Mamba1: dt_rank must be positive, got -1"),
        (GatedDelta, DELTA | {"key_dim": 0}, "GatedDelta: key_dim must be positive, got 0"),
        (
            GatedDelta,
            DELTA | {"num_value_heads": 5},
            "GatedDelta: num_value_heads must be a multiple of num_key_heads, got 5 and 2",
        ),
        (MLP, {"width": 0}, "MLP: width must be positive, got 0"),
        (
            MLP,
            {"width": 8, "kind": "gelu"},
            "MLP: kind must be gated_silu or relu2, got 'gelu'",
        ),
        (
            MoE,
            EXPERTS | {"kind": "gelu"},
            "MoE: kind must be gated_silu or relu2, got 'gelu'",
        ),
        (
            MoE,
            EXPERTS | {"routing": "hash"},
            "MoE: routing must be topk_softmax, softmax_topk or sigmoid, got 'hash'",
        ),
        (
            MoE,
            EXPERTS | {"top_k": 9},
            "MoE: top_k must be between 1 and num_experts 8, got 9",
        ),
        (MoE, EXPERTS | {"top_k": 0}, "MoE: top_k must be between 1 and num_experts 8, got 0"),
        (
            MoE,
            EXPERTS | {"num_groups": 3},
            "MoE: num_groups must divide num_experts and top_groups be at most num_groups, "
            "got 8, 3, 1",
        ),
        (
            MoE,
            EXPERTS | {"num_groups": 2, "top_groups": 3},
            "MoE: num_groups must divide num_experts and top_groups be at most num_groups, "
            "got 8, 2, 3",
        ),
        (MoE, EXPERTS | {"top_groups": 0}, "MoE: top_groups must be positive, got 0"),
        (residual_layer, {}, "residual_layer: needs a mixer or an mlp"),
        (Layer, {"blocks": ()}, "Layer: needs a block"),
        (Block, {"parts": ()}, "Block: needs a mixer or a feed-forward block"),
        (LowRank, {"matrices": (), "rank": 2}, "LowRank: needs the name of a matrix"),
        (LowRank, {"matrices": ("up",), "rank": 0}, "LowRank: rank must be positive, got 0"),
        (
            ModelConfig,
            MODEL | layers(Layer(blocks=(Block(parts=(MLP(width=8),), reads="aside"),))),
            "ModelConfig: block 0 of layer 0 reads 'aside', and none before it puts aside",
        ),
        (
            Block,
            {"parts": (MLP(width=8),), "norm": "after", "adds": Residual(of="normed")},
            "Block: a residual of the normed input needs a norm before, of the stream, got norm='after', "
            "reads='stream'",
        ),
        (ModelConfig, MODEL | layers(), "ModelConfig: needs at least one layer"),
        (ModelConfig, MODEL | {"vocab_size": 0}, "ModelConfig: vocab_size must be positive, got 0"),
        (
            ModelConfig,
            MODEL | {"max_position": -1},
            "ModelConfig: max_position must be positive, got -1",
        ),
        (
            ModelConfig,
            MODEL | {"dtype": "int8"},
            "ModelConfig: dtype must be float32, bfloat16 or float16, got 'int8'",
        ),
        (
            ModelConfig,
            MODEL | layers(residual_layer(mlp=MLP(width=8)).again(0)),
            "ModelConfig: block 0 of layer 0 shares weights of (0, 0), which is no (layer, block) before it",
        ),
        (
            ModelConfig,
            MODEL
            | layers(
                residual_layer(mlp=MLP(width=8)),
                residual_layer(mlp=MLP(width=8)).again(0),
                residual_layer(mlp=MLP(width=8)).again(1),
            ),
            "ModelConfig: block 0 of layer 2 shares weights of (1, 0), which has none of its own",
        ),
        (
            ModelConfig,
            MODEL
            | layers(residual_layer(mlp=MLP(width=8)), residual_layer(mlp=MLP(width=16)).again(0)),
            "ModelConfig: block 0 of layer 1 shares weights of (0, 0), so both must compute the same, got "
            f"{residual_layer(mlp=MLP(width=16)).again(0).blocks[0]} and {residual_layer(mlp=MLP(width=8)).blocks[0]}",
        ),
        (EngineConfig, {"max_rows": "8"}, "EngineConfig: max_rows must be an integer, got '8'"),
        (EngineConfig, {"max_rows": True}, "EngineConfig: max_rows must be an integer, got True"),
        (EngineConfig, {"max_rows": None}, "EngineConfig: max_rows must be an integer, got None"),
        (EngineConfig, {"grain": 32.0}, "EngineConfig: grain must be an integer, got 32.0"),
        (EngineConfig, {"seed": "x"}, "EngineConfig: seed must be an integer, got 'x'"),
        (EngineConfig, {"memory": 1.5}, "EngineConfig: memory must be an integer, got 1.5"),
        (
            EngineConfig,
            {"max_model_len": "9"},
            "EngineConfig: max_model_len must be an integer, got '9'",
        ),
        (
            EngineConfig,
            {"page_tokens": 64.0},
            "EngineConfig: page_tokens must be an integer, got 64.0",
        ),
        (
            EngineConfig,
            {"prefill_tokens": 512.0},
            "EngineConfig: prefill_tokens must be an integer, got 512.0",
        ),
        (
            EngineConfig,
            {"steps_per_dispatch": 8.0},
            "EngineConfig: steps_per_dispatch must be an integer, got 8.0",
        ),
        (
            CacheConfig,
            {"policy": "fifo"},
            "CacheConfig: policy must be one of off, lru, sglang, marconi, marconi-code, adaptive, or alpha:X "
            "with a number X >= 0, got 'fifo'",
        ),
        (
            CacheConfig,
            {"history_tokens": -1},
            "CacheConfig: history_tokens must be at least 0, got -1",
        ),
        (
            CacheConfig,
            {"history_tokens": 0.5},
            "CacheConfig: history_tokens must be an integer, got 0.5",
        ),
        (
            CacheConfig,
            {"checkpoints": "int4"},
            "CacheConfig: checkpoints must be float32 or int8, got 'int4'",
        ),
        (EngineConfig, {"exact": 1}, "EngineConfig: exact must be True or False, got 1"),
        (EngineConfig, {"cache": "lru"}, "EngineConfig: cache must be a CacheConfig, got 'lru'"),
        (
            EngineConfig,
            {"kernels": "cuda"},
            "EngineConfig: kernels must be auto, xla or pallas, got 'cuda'",
        ),
        (
            EngineConfig,
            {"shapes": "all"},
            "EngineConfig: shapes must be fine or coarse, got 'all'",
        ),
        (
            EngineConfig,
            {"seed": 2**63},
            f"EngineConfig: seed must be an integer between 0 and {2**63 - 1}, got {2**63}",
        ),
        (EngineConfig, {"max_rows": 0}, "EngineConfig: max_rows must be positive, got 0"),
        (EngineConfig, {"memory": 0}, "EngineConfig: memory must be positive, got 0"),
        (
            EngineConfig,
            {"max_model_len": -5},
            "EngineConfig: max_model_len must be at least 2, a prompt's token and one more, got -5",
        ),
        (
            EngineConfig,
            {"grain": 24},
            "EngineConfig: grain must be a power of two between 8 and 64, got 24",
        ),
        (
            EngineConfig,
            {"grain": 4},
            "EngineConfig: grain must be a power of two between 8 and 64, got 4",
        ),
        (
            EngineConfig,
            {"grain": 128},
            "EngineConfig: grain must be a power of two between 8 and 64, got 128",
        ),
        (
            EngineConfig,
            {"page_tokens": 8},
            "EngineConfig: page_tokens must be a power of two of at least 16, got 8",
        ),
        (
            EngineConfig,
            {"page_tokens": 48},
            "EngineConfig: page_tokens must be a power of two of at least 16, got 48",
        ),
        (
            EngineConfig,
            {"prefill_tokens": 100},
            "EngineConfig: prefill_tokens must be a multiple of grain 32, got 100",
        ),
        (
            EngineConfig,
            {"steps_per_dispatch": 33},
            "EngineConfig: steps_per_dispatch must be at most grain 32, got 33",
        ),
        (
            EngineConfig,
            {"dtype": "float16"},
            "EngineConfig: dtype must be float32 or bfloat16, got 'float16'",
        ),
    ],
)
def test_an_impossible_value_is_named(kind, fields, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        kind(**fields)


def test_mixers_may_differ_in_what_they_do_not_cache():
    local = Attention(**ATTENTION | {"sliding_window": 4, "qk_norm": True})
    model = ModelConfig(
        **MODEL
        | layers(residual_layer(mixers=(Attention(**ATTENTION),)), residual_layer(mixers=(local,)))
    )
    assert model.mixers(Attention)[1] is local


def test_mixers_are_counted_in_layer_order_and_not_by_layer():
    attention, mamba = Attention(**ATTENTION), Mamba2(**MAMBA)
    model = ModelConfig(
        **MODEL
        | layers(
            residual_layer(mlp=MLP(width=8)),
            residual_layer(mixers=(attention, mamba)),
            residual_layer(mixers=(mamba,), mlp=MLP(width=8)),
        )
    )
    assert model.mixers(Mamba2) == (mamba, mamba) and model.mixers(Attention) == (attention,)
    assert model.attention is attention and model.recurrent == (mamba, mamba)
    assert ModelConfig(**MODEL).attention is None and ModelConfig(**MODEL).recurrent == ()


def test_sizes_of_a_mamba2_mixer_follow_from_its_heads():
    mixer = Mamba2(num_heads=6, head_dim=8, state_size=16, num_groups=3)
    assert mixer.inner_size == 48
    assert mixer.record_size == 48 + 48
    assert mixer.conv_size == 48 + 2 * 48
    assert mixer.proj_size == 48 + (48 + 2 * 48) + 6
    assert mixer.dt_limits == (0.0, math.inf)


def test_convolved_channels_of_mixers_that_only_have_sizes():
    assert Mamba1(**MAMBA1).conv_size == 8
    assert GatedDelta(**DELTA).conv_size == 2 * 2 * 8 + 4 * 16


def test_the_softmax_scale_defaults_to_the_head_width():
    assert Attention(**ATTENTION).softmax_scale == 8**-0.5
    assert Attention(**ATTENTION | {"scale": 0.25}).softmax_scale == 0.25


def test_equal_descriptions_hash_alike_so_that_jit_can_reuse_a_program():
    first, second = ModelConfig(**MODEL), ModelConfig(**MODEL)
    assert first == second and hash(first) == hash(second)
    assert hash(EngineConfig()) == hash(EngineConfig())
