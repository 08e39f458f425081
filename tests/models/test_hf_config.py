"""config.json in both dialects, of tiny goldens and of released models."""

from __future__ import annotations

import json
import math
import re
import reprlib
from dataclasses import replace

import pytest

from hybrid_jax.config import Attention, Mamba2, MoE
from hybrid_jax.costs import weight_count
from hybrid_jax.models import config_from_hf
from hybrid_jax.models.known import known
from tests.parity.goldens import GOLDENS

RELEASED = {  # parameters as published, exactly or in billions
    "bamba_9b": 9.78e9,
    "codestral_mamba_7b": 7_285_403_648,
    "falcon_h1_0_5b": 521_411_104,
    "falcon_mamba_7b": 7.27e9,
    "granite_4_h_tiny": 6.94e9,
    "jamba_1_5_mini": 51.6e9,
    "lfm2_1_2b": 1_170_340_608,
    "llama_3_1_8b": 8_030_261_248,
    "llama_3_1_8b_swiftkv": 8_030_265_344,  # and a norm
    "mamba_2_8b": 2_768_345_600,
    "nemotron_3_nano_30b": 31.58e9,
    "nemotron_h_8b": 8.1e9,
    "qwen2_7b": 7_615_616_512,
    "qwen3_next_80b": 79.7e9,
}


def released(name: str) -> dict:
    return known()[name]


def golden(name: str) -> dict:
    (folder,) = [golden for golden in GOLDENS if golden.name == name]
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("name", RELEASED)
def test_released_models_have_their_known_size(name):
    count = weight_count(config_from_hf(released(name)))
    assert count == pytest.approx(RELEASED[name], rel=1e-3)


def test_released_nemotron_h():
    config = config_from_hf(released("nemotron_h_8b"))
    assert len(config.layers) == 52
    assert (len(config.mixers(Mamba2)), len(config.mixers(Attention))) == (24, 4)
    assert config.attention == Attention(num_heads=32, num_kv_heads=8, head_dim=128)
    assert config.recurrent[0].dt_limits == (0.0, math.inf)
    assert config.dtype == "bfloat16"
    assert config.eos_token_ids == (12,)


def test_released_granite_keeps_its_multipliers():
    config = config_from_hf(released("granite_4_h_tiny"))
    assert config.embedding_multiplier == 12
    assert {block.adds.gain for layer in config.layers for block in layer.blocks} == {0.22}
    assert config.logits_multiplier == pytest.approx(1 / 6)
    assert config.attention.scale == 0.0078125
    assert config.attention.rope is None
    assert config.tie_embeddings
    moe = config.layers[0].parts[-1]
    assert moe == MoE(num_experts=64, top_k=6, width=512, shared_width=1024)


def test_released_bamba_rotates_half_of_each_head():
    config = config_from_hf(released("bamba_9b"))
    assert config.attention.rope.dim == 64
    attention = [bool(isinstance(layer.mixers[0], Attention)) for layer in config.layers]
    assert [i for i, yes in enumerate(attention) if yes] == [9, 18, 27]


def test_released_llama_with_a_cut_skips_half_of_its_layers():
    config = config_from_hf(released("llama_3_1_8b_swiftkv"))
    assert (config.cut, config.kv_group, len(config.layers)) == (16, 1, 32)
    assert [layer.mixers[0].source for layer in config.layers] == ["own"] * 16 + ["cut"] * 16
    assert replace(config.layers[16].mixers[0], source="own") == config.layers[0].mixers[0]


def test_layers_share_keys_and_values_after_the_cut_that_a_file_names():
    config = config_from_hf(golden("llama_swiftkv_groups_tied"))
    sources = [layer.mixers[0].source for layer in config.layers]
    assert sources == ["own"] * 2 + ["cut", "group"] * 2
    values = golden("llama_swiftkv_groups_tied")
    assert config_from_hf(values | {"swiftkv": False}) == config  # a field of trainings
    for cut in (None, 6):
        plain = config_from_hf(values | {"num_key_value_layers": cut})
        assert plain.cut is None and {layer.mixers[0].source for layer in plain.layers} == {"own"}


def test_qwen2_says_in_two_ways_which_layers_have_a_window():
    values = golden("qwen2_windows")
    kinds = ["full_attention"] * 2 + ["sliding_attention"] * 2
    assert values.pop("layer_types") == kinds
    by_number = config_from_hf(values)
    assert [layer.mixers[0].sliding_window for layer in by_number.layers] == [None, None, 17, 17]
    by_list = config_from_hf(values | {"layer_types": kinds[::-1]})
    assert [layer.mixers[0].sliding_window for layer in by_list.layers] == [17, 17, None, None]
    for change in ({"use_sliding_window": False}, {"sliding_window": None}):
        without = config_from_hf(values | change)
        assert {layer.mixers[0].sliding_window for layer in without.layers} == {None}
        with pytest.raises(ValueError, match=r"layer_types\[2\] .* full_attention, got 'sliding"):
            config_from_hf(values | change | {"layer_types": kinds})
    del values["sliding_window"]
    usual = config_from_hf(values)
    assert [layer.mixers[0].sliding_window for layer in usual.layers] == [None, None, 4096, 4096]


@pytest.mark.parametrize(
    "name, field, meaning",
    [
        ("granite_dense_rope_biases", "mamba_conv_bias", False),
        ("bamba_quarter_limits", "mamba_conv_bias", False),
        ("falcon_h1_norm_first_biases", "mamba_conv_bias", False),
        ("falcon_h1_norm_first_biases", "mamba_norm_before_gate", False),
        ("granite_moe_nope_tied", "num_local_experts", 0),
        ("llama_llama3", "num_key_value_heads", 6),
    ],
)
def test_null_means_what_transformers_makes_of_it(name, field, meaning):
    values = golden(name)
    assert config_from_hf(values | {field: None}) == config_from_hf(values | {field: meaning})


def test_granite_without_a_number_of_experts_has_eight():
    values = golden("granite_moe_nope_tied")
    del values["num_local_experts"]
    assert {layer.parts[-1].num_experts for layer in config_from_hf(values).layers} == {8}


def test_of_two_names_of_a_field_that_of_transformers_counts():
    jamba = golden("jamba_experts_biases")
    values = jamba | {"num_experts": 16, "num_local_experts": 5}
    assert config_from_hf(values) == config_from_hf(jamba)
    granite = golden("granite_dense_rope_biases")
    values = granite | {
        "layer_types": ["linear_attention"] * 4,
        "layers_block_type": granite["layer_types"],
    }
    assert config_from_hf(values) == config_from_hf(granite)


@pytest.mark.parametrize("name", ["jamba_experts_biases", "lfm2_moe_bias", "qwen2_windows"])
def test_biases_of_attention_count_only_where_the_family_has_the_field(name):
    values = golden(name)
    assert config_from_hf(values | {"attention_bias": True}) == config_from_hf(values)


def test_heads_have_their_older_name_in_nemotron_h_alone():
    values = golden("nemotron_h_dense")
    del values["head_dim"]
    assert config_from_hf(values | {"attention_head_dim": 6}).attention.head_dim == 6
    llama = golden("llama_llama3")
    assert config_from_hf(llama | {"attention_head_dim": 6}) == config_from_hf(llama)


def test_more_experts_than_the_best_groups_have_are_refused():
    message = "at most the 2 experts that topk_group 1 of n_group 4 leaves, got 3"
    with pytest.raises(ValueError, match=message):
        config_from_hf(golden("nemotron_h_moe_groups") | {"topk_group": 1})


def test_a_window_that_no_sequence_reaches_is_none():
    values = golden("llama_llama3")
    assert config_from_hf(values | {"sliding_window": 512}) == config_from_hf(values)


def test_the_rotated_share_of_bamba_is_that_of_its_rotation():
    values = golden("bamba_quarter_limits")
    assert config_from_hf(values | {"partial_rotary_factor": 1.0}) == config_from_hf(values)
    del values["rope_parameters"]
    half = config_from_hf(values)
    assert half.attention.rope.dim == half.attention.head_dim // 2
    assert config_from_hf(values | {"partial_rotary_factor": 1.0}) == half


def test_fields_that_nothing_reads_are_logged_in_one_line(caplog):
    values = golden("llama_llama3") | {"unheard_of": 1, "pretraining_tp": 2, "_note": "x"}
    with caplog.at_level("INFO", "hybrid_jax.models"):
        config_from_hf(values)
    assert caplog.messages == ["llama: nothing reads these of config.json: unheard_of"]


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"key_value_group_size": 3}, ValueError, r"must divide .* 6 - 2 = 4, got 3"),
        ({"kv_sharing_map": {"3": 2}}, NotImplementedError, "kv_sharing_map .* is not supported"),
        ({"num_key_value_layers": 7}, ValueError, "num_key_value_layers .* at most 6, got 7"),
        ({"num_key_value_layers": 0}, ValueError, "num_key_value_layers .* at least 1, got 0"),
        ({"model_type": "deepseek_v2_swiftkv"}, NotImplementedError, "multi-head latent attention"),
    ],
)
def test_a_cut_that_cannot_be_is_refused(change, error, message):
    with pytest.raises(error, match=message):
        config_from_hf(golden("llama_swiftkv_groups_tied") | change)


def test_a_file_of_text_and_images_is_read_as_its_text():
    values = golden("qwen3_5_with_a_vision_tower")
    text = values["text_config"] | {"tie_word_embeddings": values["tie_word_embeddings"]}
    config = config_from_hf(values)
    assert text["model_type"] == "qwen3_5_text"
    assert config == config_from_hf(text) and config.family == "qwen3_5"
    inside = values | {"text_config": text | {"tie_word_embeddings": True}}
    assert config_from_hf(inside) == config  # what stands outside counts
    del inside["tie_word_embeddings"]
    assert config_from_hf(inside).tie_embeddings


def test_attention_every_few_layers_needs_no_list():
    values = golden("qwen3_next_experts_and_dense")
    del values["layer_types"]
    for every in (None, 2):
        config = config_from_hf(values | {"full_attention_interval": every})
        attention = [isinstance(layer.mixers[0], Attention) for layer in config.layers]
        assert attention == [(index + 1) % (every or 4) == 0 for index in range(4)]


def test_released_llama_scales_its_rotation():
    rope = config_from_hf(released("llama_3_1_8b")).attention.rope
    assert (rope.theta, rope.scaling.kind, rope.scaling.factor) == (500_000.0, "llama3", 8.0)
    assert rope.scaling.original_max_position == 8192


def older(values: dict) -> dict:
    """The same model in the dialect of transformers 4."""
    values = dict(values)
    values["torch_dtype"] = values.pop("dtype")
    rope = dict(values.pop("rope_parameters", None) or {})
    if rope:
        values["rope_theta"] = rope.pop("rope_theta")
        # Bamba takes no fraction from anywhere else.
        if "partial_rotary_factor" in rope and values["model_type"] != "bamba":
            values["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
        kind = rope.pop("rope_type")
        values["rope_scaling"] = {"type": kind} | rope if rope or kind != "default" else None
    if "time_step_limit" in values:
        low, high = values["time_step_limit"]
        values["time_step_limit"] = [low, math.inf if isinstance(high, dict) else high]
    letters = {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"}
    if "layers_block_type" in values:
        kinds = values.pop("layers_block_type")
        values["hybrid_override_pattern"] = "".join(letters[kind] for kind in kinds)
        values["num_hidden_layers"] = len(kinds)
    if "layer_types" in values and not values["model_type"].startswith(("qwen", "lfm2")):
        short = {"linear_attention": "mamba", "full_attention": "attention"}
        values["layer_types"] = [short[kind] for kind in values["layer_types"]]
    return json.loads(json.dumps(values))  # Infinity as released files spell it


@pytest.mark.parametrize("golden", GOLDENS, ids=lambda golden: golden.name)
def test_both_dialects_mean_the_same(golden):
    values = json.loads((golden / "config.json").read_text())
    assert older(values) != values
    assert config_from_hf(older(values)) == config_from_hf(values)


def test_infinity_has_two_spellings():
    values = golden("mamba2_biases_tied")
    assert values["time_step_limit"][1] == {"__float__": "Infinity"}
    for high in (math.inf, {"__float__": "Infinity"}):
        config = config_from_hf(values | {"time_step_limit": [0.0, high]})
        assert config.recurrent[0].dt_limits == (0.0, math.inf)


@pytest.mark.parametrize("smallest", [0, 0.0005, 0.001, None])
def test_step_size_floor_of_the_initialisation_is_no_limit(smallest):
    values = golden("nemotron_h_dense") | {"time_step_min": smallest, "time_step_floor": 0.4}
    assert config_from_hf(values).recurrent[0].dt_limits == (0.0, math.inf)


def test_old_field_names_of_nemotron_h_are_understood():
    values = golden("nemotron_h_biases_limits")
    expected = config_from_hf(values)
    for old, new in {
        "mamba_n_groups": "n_groups",
        "mamba_d_conv": "conv_kernel",
        "mamba_dt_limit": "time_step_limit",
        "mamba_conv_bias": "use_conv_bias",
        "attention_head_dim": "head_dim",
    }.items():
        values[old] = values.pop(new)
    assert config_from_hf(values) == expected


def test_without_a_model_type_the_supported_ones_are_named():
    with pytest.raises(
        ValueError, match=r"model_type is missing; it must be one of bamba, .*llama"
    ):
        config_from_hf({"hidden_size": 8})


@pytest.mark.parametrize("name", ["gpt2", 7, ["llama"]])
def test_unknown_family_names_the_supported_ones(name):
    with pytest.raises(
        ValueError, match=f"model_type {re.escape(repr(name))} .*bamba.*llama.*nemotron_h"
    ):
        config_from_hf({"model_type": name})


@pytest.mark.parametrize(
    "name, field, value",
    [
        ("llama_llama3", "hidden_act", "gelu"),
        ("llama_llama3", "partial_rotary_factor", 0.5),
        ("llama_llama3", "dtype", "float8_e4m3fn"),
        ("mamba2_biases_tied", "hidden_act", "relu"),
        ("nemotron_h_dense", "mamba_hidden_act", "gelu"),
        ("nemotron_h_dense", "mlp_hidden_act", "silu"),
        ("nemotron_h_dense", "sliding_window", 128),
        ("nemotron_h_moe_groups", "mlp_hidden_act", "silu"),
        ("bamba_biases_tied", "hidden_act", "gelu"),
        ("granite_moe_nope_tied", "hidden_act", "gelu"),
        ("granite_moe_nope_tied", "position_embedding_type", "alibi"),
        ("granite_moe_nope_tied", "normalization_function", "layernorm"),
        ("qwen3_next_experts_and_dense", "hidden_act", "gelu"),
        ("qwen3_next_experts_and_dense", "attn_output_gate", False),
        ("falcon_h1_norm_first_biases", "hidden_act", "gelu"),
        ("llama_llama3", "is_causal", False),
        ("llama_llama3", "is_causal", None),
        ("qwen3_next_experts_and_dense", "is_causal", False),
        ("llama_llama3", "sliding_window", 9),
        ("llama_llama3", "attention_chunk_size", 9),
        ("llama_swiftkv_groups_tied", "sliding_window", 9),
        ("llama_llama3", "per_layer_config", {"0": {"rms_norm_eps": 0.5}}),
        ("llama_llama3", "transformers_weights", "other.safetensors"),
        ("llama_llama3", "kv_sharing_modes", ["own", "reuse"]),
        ("mamba_tied", "rescale_prenorm_residual", True),
        ("falcon_mamba_untied", "rescale_prenorm_residual", True),
        ("mamba2_biases_tied", "rescale_prenorm_residual", True),
        ("nemotron_h_dense", "time_step_min", 0.7),
        ("nemotron_h_dense", "mamba_dt_min", 0.7),
    ],
)
def test_unsupported_field_is_named_with_its_value_and_family(name, field, value):
    values = golden(name)
    if field == "partial_rotary_factor":
        values["rope_parameters"][field] = value
    else:
        values[field] = value
    shown = re.escape(repr(value))
    with pytest.raises(NotImplementedError, match=f"{values['model_type']}: {field}.*{shown}"):
        config_from_hf(values)


@pytest.mark.parametrize("kind", ["yarn", "dynamic", "longrope"])
@pytest.mark.parametrize("field", ["rope_scaling", "rope_parameters"])
def test_unsupported_rope_type_is_named(kind, field):
    values = golden("llama_llama3")
    del values["rope_parameters"]
    values[field] = {"rope_type": kind, "factor": 4.0}
    with pytest.raises(NotImplementedError, match=f"llama: rope_type '{kind}'.*llama3"):
        config_from_hf(values)


@pytest.mark.parametrize(
    "name, field",
    [
        ("llama_llama3", "hidden_size"),
        ("llama_llama3", "num_attention_heads"),
        ("llama_llama3", "intermediate_size"),
        ("llama_llama3", "max_position_embeddings"),
        ("mamba2_biases_tied", "state_size"),
        ("mamba2_biases_tied", "num_heads"),
        ("nemotron_h_dense", "layers_block_type"),
        ("nemotron_h_dense", "ssm_state_size"),
        ("nemotron_h_moe_groups", "n_routed_experts"),
        ("bamba_biases_tied", "mamba_n_heads"),
        ("bamba_biases_tied", "num_hidden_layers"),
        ("granite_moe_nope_tied", "num_experts_per_tok"),
        ("granite_moe_nope_tied", "vocab_size"),
        ("qwen3_next_experts_and_dense", "linear_num_key_heads"),
        ("qwen3_next_experts_and_dense", "intermediate_size"),
        ("qwen3_next_experts_and_dense", "shared_expert_intermediate_size"),
    ],
)
@pytest.mark.parametrize("absent", [True, False], ids=["absent", "null"])
def test_missing_field_is_named(name, field, absent):
    values = golden(name)
    if absent:
        del values[field]
    else:
        values[field] = None
    with pytest.raises(ValueError, match=f"{values['model_type']}: config.json needs .*{field}"):
        config_from_hf(values)


@pytest.mark.parametrize(
    "name, field, value",
    [
        ("llama_llama3", "hidden_size", "big"),
        ("llama_llama3", "num_hidden_layers", 0),
        ("llama_llama3", "rms_norm_eps", True),
        ("llama_llama3", "attention_bias", "no"),
        ("llama_llama3", "eos_token_id", "</s>"),
        ("mamba2_biases_tied", "conv_kernel", 1),
        ("mamba2_biases_tied", "time_step_limit", 0.1),
        ("bamba_biases_tied", "attn_layer_indices", [1, 9]),
        ("bamba_biases_tied", "attn_layer_indices", [True]),
        ("granite_moe_nope_tied", "layer_types", ["mamba"]),
        ("nemotron_h_dense", "layers_block_type", ["mamba", "conv"]),
        ("granite_moe_nope_tied", "logits_scaling", 0),
        ("granite_moe_nope_tied", "rms_norm_eps", -1),
        ("granite_moe_nope_tied", "num_experts_per_tok", 99),
        ("llama_llama3", "rms_norm_eps", 0),
        ("llama_llama3", "rms_norm_eps", 10**400),
        ("llama_llama3", "num_key_value_heads", 5),
        ("llama_llama3", "num_key_value_heads", 0),
        ("llama_llama3", "head_dim", 7),
        ("llama_llama3", "eos_token_id", 999),
        ("llama_llama3", "eos_token_id", [1, -1]),
        ("mamba2_biases_tied", "time_step_limit", [0.5, 0.1]),
        ("mamba2_biases_tied", "n_groups", 7),
        ("mamba2_biases_tied", "layer_norm_epsilon", -1e-5),
        ("nemotron_h_dense", "layer_norm_epsilon", 0),
        ("nemotron_h_moe_groups", "n_group", 7),
        ("nemotron_h_moe_groups", "topk_group", 99),
        ("bamba_biases_tied", "mamba_n_groups", 7),
        ("qwen3_next_experts_and_dense", "linear_num_key_heads", 4),
        ("qwen3_next_experts_and_dense", "linear_conv_kernel_dim", 1),
        ("qwen3_next_experts_and_dense", "mlp_only_layers", ["all"]),
        ("qwen3_next_experts_and_dense", "mlp_only_layers", [99]),
        ("qwen3_next_experts_and_dense", "layer_types", ["sliding_attention"]),
        ("qwen3_next_experts_and_dense", "num_experts_per_tok", 7),
        ("qwen3_5_with_a_vision_tower", "text_config", 3),
        ("falcon_h1_norm_first_biases", "mlp_multipliers", [1.0]),
        ("falcon_h1_norm_first_biases", "ssm_multipliers", [1, 1, 1, 1, "x"]),
        ("falcon_h1_norm_first_biases", "mamba_d_head", 5),
        ("falcon_h1_norm_first_biases", "mamba_n_heads", 7),
        ("falcon_h1_norm_first_biases", "key_multiplier", "x"),
    ],
)
def test_malformed_field_is_named(name, field, value):
    values = golden(name)
    with pytest.raises(ValueError, match=rf"{values['model_type']}: .*{field}") as error:
        config_from_hf(values | {field: value})
    shown = reprlib.repr(value[0] if isinstance(value, list) and len(value) == 1 else value)
    assert shown in str(error.value) or isinstance(value, list)


@pytest.mark.parametrize(
    "name, kv_heads, head_dim",
    [
        ("qwen3_next_experts_and_dense", 2, 256),
        ("falcon_h1_norm_first_biases", 8, None),
        ("lfm2_attention_first_untied", 8, None),
        ("lfm2_moe_bias", 8, None),
        ("jamba_experts_biases", 8, None),
        ("bamba_quarter_limits", 8, None),
        ("nemotron_h_dense", 8, 128),
    ],
)
def test_where_a_file_says_nothing_there_are_as_many_kv_heads_as_in_transformers(
    name, kv_heads, head_dim
):
    values = golden(name) | {"num_attention_heads": 16, "hidden_size": 256}
    if name.startswith("falcon_h1"):
        values |= {
            "mamba_d_ssm": None,
            "mamba_n_heads": 16,
            "mamba_d_head": "auto",
            "mamba_expand": 2,
        }
        values["mamba_n_groups"] = 1
    if name.startswith("bamba"):
        values |= {"mamba_n_heads": 16, "mamba_d_head": "auto"}
    for field in ("num_key_value_heads", "head_dim"):
        values.pop(field, None)
    silent = config_from_hf(values).attention
    assert (silent.num_kv_heads, silent.head_dim) == (kv_heads, head_dim or 16)
    null = config_from_hf(values | {"num_key_value_heads": None, "head_dim": None}).attention
    assert (null.num_kv_heads, null.head_dim) == (16, 16)


def test_of_two_spellings_of_a_rotation_that_of_transformers_counts():
    values = golden("llama_llama3")
    values |= {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    values |= {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}
    assert config_from_hf(values).attention.rope.scaling.kind == "linear"
    assert config_from_hf(values | {"rope_scaling": {}}).attention.rope.scaling is None
    values["rope_parameters"] = {}
    assert config_from_hf(values).attention.rope.scaling.factor == 2.0


def test_heads_that_do_not_make_the_inner_width_are_named_by_the_field_that_gives_it():
    values = golden("falcon_h1_norm_first_biases")
    inner = values["mamba_d_ssm"]
    message = rf"mamba_n_heads \* mamba_d_head .* must equal mamba_d_ssm, got \d+ and {2 * inner}"
    with pytest.raises(ValueError, match=message):
        config_from_hf(values | {"mamba_d_ssm": 2 * inner})


def test_an_unknown_kind_of_layer_is_named_with_its_place():
    values = golden("lfm2_biases_adjusted")
    values["layer_types"][2] = "foo"
    message = (
        r"lfm2: layer_types\[2\] in config.json must be one of conv, full_attention, got 'foo'"
    )
    with pytest.raises(ValueError, match=message):
        config_from_hf(values)


@pytest.mark.parametrize("given", [[7], [-1], [True], 3])
def test_the_older_way_to_say_which_layers_attend_is_checked(given):
    values = golden("lfm2_attention_first_untied")
    del values["layer_types"]
    message = re.escape(f"each from 0 to {values['num_hidden_layers'] - 1}, got {given}")
    with pytest.raises(ValueError, match=f"lfm2: full_attn_idxs in config.json .*{message}"):
        config_from_hf(values | {"full_attn_idxs": given})
    assert config_from_hf(values | {"full_attn_idxs": [0]}).layers[0].mixers[0].num_heads


@pytest.mark.parametrize(
    "name, rope, error, message",
    [
        (
            "bamba_biases_tied",
            {"partial_rotary_factor": 1.5},
            ValueError,
            "a number in (0, 1], got 1.5",
        ),
        (
            "bamba_biases_tied",
            {"partial_rotary_factor": 0.01},
            NotImplementedError,
            "partial_rotary_factor 0.01 rotates 0 of head_dim",
        ),
        (
            "llama_llama3",
            {"rope_type": "linear"},
            ValueError,
            "rope_type 'linear' in config.json needs factor",
        ),
        (
            "llama_llama3",
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0},
            ValueError,
            "rope_type 'llama3' in config.json needs high_freq_factor",
        ),
        ("llama_llama3", "linear", ValueError, "rope_parameters in config.json must be an object"),
    ],
)
def test_a_rotation_that_cannot_be_is_named(name, rope, error, message):
    values = golden(name) | {"rope_parameters": rope}
    with pytest.raises(error, match=re.escape(message)):
        config_from_hf(values)


def test_the_first_length_of_a_llama3_rope_may_be_a_field_of_the_file():
    values = golden("llama_llama3") | {"original_max_position_embeddings": 8}
    assert config_from_hf(values).attention.rope.scaling.original_max_position == 8


@pytest.mark.parametrize("field", ["rope_parameters", "rope_scaling"])
def test_a_rotation_for_each_kind_of_layer_is_refused(field):
    values = golden("llama_llama3")
    values[field] = {"full_attention": {"rope_type": "default", "rope_theta": 77.0}}
    with pytest.raises(NotImplementedError, match=r"full_attention in rope_parameters .* 77\.0"):
        config_from_hf(values)


def test_a_llama3_rope_without_its_first_length_takes_that_of_the_model():
    values = golden("llama_llama3")
    rope = {k: v for k, v in values["rope_parameters"].items() if "original" not in k}
    (attention, *_) = config_from_hf(values | {"rope_parameters": rope}).mixers(Attention)
    assert attention.rope.scaling.original_max_position == values["max_position_embeddings"]


@pytest.mark.parametrize(
    "rope, message",
    [
        ({"rope_theta": 0}, "rope_theta in config.json must be a positive number, got 0"),
        ({"rope_theta": "big"}, "rope_theta in config.json must be a positive number, got 'big'"),
        ({"rope_type": "linear", "factor": -2}, "factor of 'linear' rope .* positive, got -2"),
        (
            {"low_freq_factor": 4.0, "high_freq_factor": 4.0},
            "low_freq_factor in config.json must be below high_freq_factor, got 4.0 and 4.0",
        ),
    ],
)
def test_a_malformed_rotation_is_named(rope, message):
    values = golden("llama_llama3")
    values["rope_parameters"] = values["rope_parameters"] | rope
    with pytest.raises(ValueError, match=f"llama: {message}"):
        config_from_hf(values)


ODD = [0, -1, 0.5, "x", [], {}, [None], True, math.inf, math.nan, 10**400, 10**30]


@pytest.mark.parametrize("golden", GOLDENS, ids=lambda golden: golden.name)
def test_no_odd_value_of_a_field_is_a_traceback_of_ours(golden):
    values = json.loads((golden / "config.json").read_text())
    for field in values:
        for odd in ODD:
            try:
                config_from_hf(values | {field: odd})
            except (ValueError, NotImplementedError):
                pass  # anything else fails the test


@pytest.mark.parametrize(
    "name, eps", [("granite_moe_nope_tied", 1e-6), ("bamba_biases_tied", 1e-5)]
)
def test_an_absent_epsilon_is_the_familys_for_layers_and_mixers(name, eps):
    values = golden(name)
    del values["rms_norm_eps"]
    config = config_from_hf(values)
    assert (config.norm_eps, config.recurrent[0].norm_eps) == (eps, eps)


def test_unknown_letter_of_a_pattern_is_named():
    values = golden("nemotron_h_dense")
    del values["layers_block_type"]
    with pytest.raises(ValueError, match=r"nemotron_h: .*M\*-E, got \['X'\]"):
        config_from_hf(values | {"hybrid_override_pattern": "M-X*"})


def test_inner_width_that_contradicts_itself_gives_both_numbers():
    with pytest.raises(ValueError, match="mamba2: num_heads \\* head_dim .* 60 and 90"):
        config_from_hf(golden("mamba2_biases_tied") | {"expand": 3})
