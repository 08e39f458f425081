"""Other values for the fields of config.json, to see what each means. Needs no torch.

A case is what it changes: values by the path of a field ("rms_norm_eps", "text_config.rms_norm_eps").
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.parity.golden_variants import A, M

ABSENT = {"__absent__": True}  # the field is taken out
Case = dict[str, Any]
# The goldens whose fields are walked: of each family one with most of what the family has, and one more where another
# golden has what the first one lacks.
WALKED = (
    *("bamba_quarter_limits", "falcon_h1_norm_first_biases", "falcon_mamba_untied"),
    *("granite_dense_rope_biases", "granite_moe_nope_tied", "jamba_experts_biases"),
    *("lfm2_biases_adjusted", "lfm2_moe_bias", "llama_llama3", "llama_swiftkv_groups_tied"),
    *("mamba_biases_untied", "mamba2_groups_limits", "nemotron_h_biases_limits"),
    *("nemotron_h_moe_groups", "qwen2_windows", "qwen2_swiftkv_groups", "qwen3_5_dense_tied"),
    *("qwen3_5_with_a_vision_tower", "qwen3_5_moe_text", "qwen3_5_moe_with_a_vision_tower"),
    "qwen3_next_experts_and_dense",
)
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=500.0,
    factor=4.0,
    low_freq_factor=1.0,
    high_freq_factor=3.0,
    original_max_position_embeddings=16,
)
YARN = dict(rope_type="yarn", rope_theta=500.0, factor=4.0, original_max_position_embeddings=16)
LONGROPE = dict(
    rope_type="longrope", short_factor=[1.0], long_factor=[2.0], original_max_position_embeddings=8
)
ROTATIONS: list[Any] = [
    {},
    dict(rope_theta=77.0),
    dict(rope_type="default", rope_theta=77.0),
    dict(rope_type="default", rope_theta=77.0, factor=3.0, mscale=2.0, attention_factor=0.5),
    dict(rope_type="default", rope_theta=77.0, partial_rotary_factor=0.5),
    dict(rope_type="default", rope_theta=77.0, partial_rotary_factor=1.0),
    dict(rope_type="default", rope_theta=77.0, mrope_section=[1, 1, 0], mrope_interleaved=True),
    dict(rope_type="default", type="linear", rope_theta=77.0, factor=3.0),
    dict(rope_type="linear", rope_theta=77.0, factor=3.0),
    dict(rope_type="linear", rope_theta=77.0, factor=3.0, partial_rotary_factor=0.5),
    dict(rope_type="linear", factor=0.5),
    dict(rope_type="linear", factor=None),
    dict(rope_type="linear"),
    dict(type="linear", factor=3.0),
    dict(rope_type=None, rope_theta=77.0),
    dict(rope_type=None, type="linear", rope_theta=77.0, factor=3.0),
    dict(rope_type="default", rope_theta=None),
    dict(rope_type="default", rope_theta=77.0, partial_rotary_factor=None),
    LLAMA3,
    {name: value for name, value in LLAMA3.items() if not name.startswith("original")},
    {name: value for name, value in LLAMA3.items() if name != "rope_theta"},
    LLAMA3 | dict(original_max_position_embeddings=None),
    YARN,
    LONGROPE,
    dict(rope_type="dynamic", rope_theta=77.0, factor=2.0),
    dict(rope_type="proportional", rope_theta=77.0, factor=2.0),
    dict(type="mrope", mrope_section=[1, 1, 0]),
    dict(rope_type="unheard_of", rope_theta=77.0),
    dict(full_attention=dict(rope_type="default", rope_theta=77.0)),
    dict(rope_theta=77.0, full_attention=dict(rope_type="linear", factor=3.0)),
    dict(linear_attention=dict(rope_type="default", rope_theta=77.0)),
    dict(
        sliding_attention=dict(rope_type="default", rope_theta=77.0),
        full_attention=dict(rope_type="default", rope_theta=99.0),
    ),
]
INF = float("inf")
BY_NAME: dict[str, list[Any]] = {
    "attention_chunk_size": [3],
    "attn_layer_indices": [[0], [0, 1], [2, 1], []],
    "attribute_map": [{}, {"hidden_size": "vocab_size"}],
    "block_ff_dim": [32, 50],
    "dtype": ["bfloat16", "float16", "float32", "float64"],
    "full_attention_interval": [1, 2, 3],
    "full_attn_idxs": [[0], [1], [0, 2], []],
    "head_dim": [4, 8, 12, 16],
    "hidden_act": ["swish", "gelu", "relu", "gelu_pytorch_tanh"],
    "hybrid_override_pattern": ["*M-MM", "MEM*-"],
    "is_causal": [True, False],
    "layer_types": [[A, M, A], [M, M, M], ["attention", "mamba", "attention"]],
    "layers_block_type": [[A, M, A], ["mamba", "mamba"]],
    "mamba_d_head": ["auto", 4, 8],
    "mamba_dt_rank": ["auto", 3],
    "mamba_hidden_act": ["swish", "gelu"],
    "mlp_hidden_act": ["silu", "relu", "gelu"],
    "mlp_only_layers": [[], [0], [1, 3]],
    "num_experts_per_tok": [1, 4],
    "original_max_position_embeddings": [8, 64],
    "output_attentions": [True],
    "partial_rotary_factor": [0.25, 0.5, 1.0],
    "per_layer_config": [
        {},
        {"0": {}},
        {"0": {"rms_norm_eps": 0.5}},
        {"1": {"hidden_act": "relu"}},
    ],
    "position_embedding_type": ["rope", "nope", "alibi", "learned"],
    "quantization_config": [{}],
    "rope_parameters": ROTATIONS,
    "rope_scaling": ROTATIONS,
    "rope_theta": [77.0, 5, 0],
    "sliding_window": [3, 9],
    "tie_embedding": [True, False],
    "time_step_limit": [[0.0, 0.1], [0.2, INF], [0.0, INF], [-1.0, INF], [0.3, 0.2]],
    "time_step_min": [0.0, 0.01, 0.7],
    "time_step_rank": ["auto", 3],
    "torch_dtype": ["bfloat16", "float32"],
    "transformers_weights": ["model.safetensors", "other.safetensors"],
}
BY_NAME["mamba_dt_limit"] = BY_NAME["time_step_limit"]
OF_NO_TYPE: tuple[Any, ...] = (True, False, 3, "other")


def others(name: str, now: Any) -> Iterator[Any]:
    """Other values for a field that has one, or has none (None)."""
    yield from BY_NAME.get(name, ())
    if isinstance(now, bool):
        yield not now
    elif isinstance(now, int):
        yield from (now + 1, 2 * now, now // 2, 0)
    elif isinstance(now, float):
        yield from (1.7 * now + 0.3, 0.0, -now, 1)
    elif isinstance(now, str):
        yield "other"
    elif isinstance(now, list):
        yield from (now[::-1], now[:-1], [])
        if now and all(isinstance(item, float) for item in now):
            yield from ([1.5 * now[0], *now[1:]], [*now[:-1], 1.5 * now[-1]])
    elif now is None and name not in BY_NAME:
        yield from OF_NO_TYPE


def single_changes(values: dict, names: list[str], prefix: str = "") -> Iterator[Case]:
    """Cases that change one field of a file each, to null and to nothing too."""
    inside = values[prefix] if prefix else values
    path = f"{prefix}." if prefix else ""
    for name in names:
        now, given = inside.get(name), []
        if isinstance(now, dict) and "model_type" in now:
            continue  # the config of a part, which without its sizes is a large model
        if name in inside:
            given.append(ABSENT)
        for value in (None, *others(name, now)):
            same = name in inside and value == now and type(value) is type(now)
            if not same and value not in given:
                given.append(value)
        yield from ({path + name: value} for value in given)


def changed(values: dict, case: Case) -> dict:
    """The contents of the file after the change."""
    values = copy.deepcopy(values)
    for path, value in case.items():
        *outer, name = path.split(".")
        inside = values
        for step in outer:
            inside = inside[step]
        if value == ABSENT:
            inside.pop(name, None)
        else:
            inside[name] = copy.deepcopy(value)
    return values


def cases_of(golden: Path, known: dict[str, list[str]]) -> list[Case]:
    """All cases of one golden.

    Args:
        known: names of fields, by the object in the file that they lie in ("" is the file itself).
    """
    values = json.loads((golden / "config.json").read_text())
    cases = [
        case for prefix, names in known.items() for case in single_changes(values, names, prefix)
    ]
    return cases + combined_changes(golden.name, values)


def combined_changes(golden: str, values: dict) -> list[Case]:
    """Cases of one golden in which several fields change, because one of them alone says nothing."""
    found = list(COMBINED.get(golden, ()))
    prefix = "text_config." if "text_config" in values else ""
    if (values.get("text_config") or values).get("rope_parameters"):
        found += [{prefix + name: value for name, value in case.items()} for case in OLD_ROTATIONS]
    return found


OLD_ROTATIONS: list[Case] = [
    dict(rope_parameters=ABSENT, rope_theta=77.0),
    dict(rope_parameters=ABSENT, rope_theta=None),
    dict(rope_parameters=ABSENT, rope_theta=77.0, partial_rotary_factor=0.5),
    dict(rope_parameters=ABSENT, rope_theta=77.0, rope_scaling=None),
    dict(rope_parameters=ABSENT, rope_theta=77.0, rope_scaling=dict(type="linear", factor=3.0)),
    dict(rope_parameters=dict(rope_theta=99.0), rope_theta=77.0),
    dict(rope_parameters=LLAMA3, original_max_position_embeddings=8),
    dict(
        rope_parameters=ABSENT,
        rope_scaling=LLAMA3,
        rope_theta=77.0,
        original_max_position_embeddings=64,
    ),
]
COMBINED: dict[str, list[Case]] = {
    "qwen2_windows": [
        dict(layer_types=ABSENT),
        dict(layer_types=ABSENT, sliding_window=None),
        dict(layer_types=ABSENT, sliding_window=ABSENT),
        dict(layer_types=ABSENT, sliding_window=5),
        dict(layer_types=ABSENT, max_window_layers=1),
        dict(layer_types=ABSENT, max_window_layers=ABSENT),
        dict(layer_types=ABSENT, use_sliding_window=False),
        dict(layer_types=ABSENT, use_sliding_window=ABSENT),
        dict(layer_types=["full_attention"] * 4, sliding_window=None),
        dict(layer_types=["sliding_attention"] * 4),
        dict(layer_types=["sliding_attention"] * 4, use_sliding_window=False),
    ],
    "nemotron_h_moe_groups": [
        dict(layers_block_type=ABSENT, hybrid_override_pattern="ME*EM-"),
        dict(layers_block_type=ABSENT, layer_types=[M, "moe", A, "moe", M, "mlp"]),
        dict(n_routed_experts=ABSENT, num_local_experts=8),
        dict(n_groups=ABSENT, mamba_n_groups=2),
        dict(conv_kernel=ABSENT, mamba_d_conv=4),
        dict(n_groups=1, mamba_n_groups=2),
        dict(head_dim=ABSENT, attention_head_dim=8),
        dict(time_step_limit=ABSENT, mamba_dt_limit=[0.0, 0.1]),
        dict(use_conv_bias=ABSENT, mamba_conv_bias=True),
    ],
    "granite_dense_rope_biases": [
        dict(layer_types=ABSENT, layers_block_type=[M, A, M, A]),
        dict(layer_types=ABSENT, layers_block_type=["mamba", "attention", "mamba", "attention"]),
        dict(layer_types=[M, M, M, M], layers_block_type=[M, A, M, A]),
    ],
    "granite_moe_nope_tied": [dict(position_embedding_type="rope", rope_theta=77.0)],
    "jamba_experts_biases": [
        dict(num_experts=ABSENT, num_local_experts=5),
        dict(num_experts=16, num_local_experts=5),
    ],
    "lfm2_biases_adjusted": [
        dict(layer_types=ABSENT, full_attn_idxs=[1]),
        dict(layer_types=ABSENT, full_attn_idxs=ABSENT),
        dict(intermediate_size=7, block_ff_dim=50),
        dict(intermediate_size=48, block_auto_adjust_ff_dim=False),
        dict(tie_word_embeddings=False, tie_embedding=True),
        dict(block_multiple_of=16, block_ffn_dim_multiplier=None),
    ],
    "mamba_biases_untied": [
        dict(expand=2, intermediate_size=102),
        dict(expand=ABSENT, intermediate_size=102),
        dict(intermediate_size=ABSENT),
    ],
    "falcon_mamba_untied": [
        dict(expand=3, intermediate_size=72),
        dict(intermediate_size=ABSENT),
    ],
    "qwen3_5_dense_tied": [
        dict(layer_types=ABSENT, full_attention_interval=2),
        dict(layer_types=None, full_attention_interval=2),
        dict(layer_types=ABSENT, full_attention_interval=None),
    ],
    "qwen3_5_with_a_vision_tower": [
        {"text_config.layer_types": ABSENT, "text_config.full_attention_interval": 3},
        {"text_config.tie_word_embeddings": True, "tie_word_embeddings": False},
        {"text_config.tie_word_embeddings": True, "tie_word_embeddings": ABSENT},
        {"text_config.rms_norm_eps": ABSENT, "rms_norm_eps": 0.3},
    ],
    "qwen3_5_moe_with_a_vision_tower": [
        {"text_config.tie_word_embeddings": True, "tie_word_embeddings": False},
        {"text_config.tie_word_embeddings": True, "tie_word_embeddings": ABSENT},
        {"text_config.tie_word_embeddings": False, "tie_word_embeddings": True},
    ],
}
