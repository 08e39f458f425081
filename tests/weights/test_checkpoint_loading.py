"""What arrives from a checkpoint: values, dtypes, shards, names, tied heads, spare tensors, end tokens."""

from __future__ import annotations

import json
import logging
import re
import shutil
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest

from hybrid_jax.weights import load_config, load_model
from tests.weights.checkpoints import GOLDEN, MAMBA, read, same_bits, write


def test_fused_and_transposed_weights_lie_where_the_layers_expect_them():
    golden = GOLDEN["llama_llama3"]
    stored = read(golden / "model.safetensors")
    _, params = load_model(golden)
    layer, prefix = params["layers"][1], "model.layers.1"
    q, k, v = (stored[f"{prefix}.self_attn.{x}_proj.weight"].T for x in "qkv")
    assert np.array_equal(layer["mixers"][0]["qkv"], np.concatenate([q, k, v], axis=1))
    gate, up = (stored[f"{prefix}.mlp.{x}_proj.weight"].T for x in ("gate", "up"))
    assert np.array_equal(layer["mlp"]["up"], np.concatenate([gate, up], axis=1))
    assert np.array_equal(params["head"], stored["lm_head.weight"].T)


def test_experts_are_stacked_in_order():
    golden = GOLDEN["nemotron_h_moe_groups"]
    stored = read(golden / "model.safetensors")
    _, params = load_model(golden)
    for expert, up in enumerate(params["layers"][1]["mlp"]["up"]):
        name = f"backbone.layers.1.mixer.experts.{expert}.up_proj.weight"
        assert np.array_equal(up, stored[name].T)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_cast_on_load_spares_the_values_that_need_their_precision(dtype):
    golden = GOLDEN["nemotron_h_moe_groups"]
    config, params = load_model(golden, dtype=dtype)
    assert config.dtype == dtype
    _, exact = load_model(golden)
    for (path, leaf), whole in zip(
        jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(exact), strict=True
    ):
        kept = path[-1].key in ("A_log", "D", "dt_bias", "router_bias")
        assert leaf.dtype == ("float32" if kept else dtype)
        assert np.array_equal(leaf, whole.astype(leaf.dtype))


def test_stored_dtype_is_kept_and_wins_over_the_config(edit):
    def to_bfloat16(tensors):
        keep = ("A_log", "D", "dt_bias")
        return {
            name: array if name.endswith(keep) else array.astype(ml_dtypes.bfloat16)
            for name, array in tensors.items()
        }

    folder = edit("mamba2_biases_tied", to_bfloat16)
    stored = read(GOLDEN["mamba2_biases_tied"] / "model.safetensors")
    config, params = load_model(folder)
    mixer = params["layers"][0]["mixers"][0]
    assert config.dtype == "bfloat16"
    expected = stored[f"{MAMBA}.in_proj.weight"].T.astype(ml_dtypes.bfloat16)
    assert mixer["in_proj"].dtype == "bfloat16"
    assert np.array_equal(np.asarray(mixer["in_proj"]), expected)
    assert mixer["A_log"].dtype == "float32"
    assert np.array_equal(mixer["A_log"], stored[f"{MAMBA}.A_log"])
    config, params = load_model(folder, dtype="float32")
    assert config.dtype == "float32"
    assert np.array_equal(params["layers"][0]["mixers"][0]["in_proj"], expected.astype(np.float32))


def test_shards_load_like_one_file(tmp_path):
    golden = GOLDEN["bamba_biases_tied"]
    tensors = list(read(golden / "model.safetensors").items())
    places = {}
    for number in range(3):
        shard = f"model-{number + 1:05}-of-00003.safetensors"
        write(tmp_path / shard, dict(tensors[number::3]))
        places |= dict.fromkeys([name for name, _ in tensors[number::3]], shard)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    shutil.copyfile(golden / "config.json", tmp_path / "config.json")
    config, params = load_model(tmp_path)
    whole_config, whole = load_model(golden)
    assert config == whole_config
    assert same_bits(params, whole)


def test_other_spellings_of_names_are_understood(edit):
    def in_memory_names(tensors):
        return {
            name.replace("input_linear.weight", "experts.gate_up_proj")
            .replace("output_linear.weight", "experts.down_proj")
            .replace("router.layer.weight", "router.weight")
            if "block_sparse_moe" in name
            else name: array
            for name, array in tensors.items()
        }

    folder = edit("granite_moe_nope_tied", in_memory_names)
    assert "model.layers.0.block_sparse_moe.router.weight" in read(folder / "model.safetensors")
    _, whole = load_model(GOLDEN["granite_moe_nope_tied"])
    assert same_bits(load_model(folder)[1], whole)

    folder = edit(
        "nemotron_h_dense", lambda t: {n.replace("backbone.", "model."): a for n, a in t.items()}
    )
    assert same_bits(load_model(folder)[1], load_model(GOLDEN["nemotron_h_dense"])[1])


def test_experts_in_one_tensor_are_those_of_many(edit):
    def fused(tensors):
        lone = {name: tensors.pop(name) for name in list(tensors) if ".experts." in name}
        for prefix in {name.split(".experts.")[0] for name in lone}:
            parts = {
                kind: np.stack([lone[f"{prefix}.experts.{i}.{kind}_proj.weight"] for i in range(7)])
                for kind in ("gate", "up", "down")
            }
            joined = np.concatenate([parts["gate"], parts["up"]], axis=1)
            tensors[f"{prefix}.experts.gate_up_proj"] = joined
            tensors[f"{prefix}.experts.down_proj"] = parts["down"]

    folder = edit("qwen3_5_moe_text", fused)
    assert len(read(folder / "model.safetensors")) < 70
    assert same_bits(load_model(folder)[1], load_model(GOLDEN["qwen3_5_moe_text"])[1])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_norms_that_are_stored_less_one_stay_in_float32(dtype):
    stored = read(GOLDEN["qwen3_5_dense_tied"] / "model.safetensors")
    _, params = load_model(GOLDEN["qwen3_5_dense_tied"], dtype=dtype)
    want = 1 + stored["model.layers.1.self_attn.q_norm.weight"]
    assert np.array_equal(params["layers"][1]["mixers"][0]["q_norm"], want)
    assert np.array_equal(params["norm"], 1 + stored["model.norm.weight"])
    assert params["norm"].dtype == "float32" and params["embed"].dtype == dtype
    gated = params["layers"][0]["mixers"][0]["norm"]
    assert np.array_equal(gated, stored["model.layers.0.linear_attn.norm.weight"].astype(dtype))


def test_progress_ends_at_the_bytes_of_the_file():
    golden = GOLDEN["mamba2_groups_limits"]
    seen = []
    load_model(golden, progress=lambda done, total: seen.append((done, total)))
    total = sum(array.nbytes for array in read(golden / "model.safetensors").values())
    assert seen[0] == (0, total)
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert len(seen) > 10


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux tells")
def test_a_file_does_not_stay_in_memory(edit):
    def grow(tensors):
        table = np.zeros((vocab_size, 48), np.float32)
        return tensors | {"model.embed_tokens.weight": table, "lm_head.weight": table + 1}

    def resident_pages_of_files() -> int:
        status = Path("/proc/self/status").read_text()
        return 1024 * int(re.search(r"RssFile:\s+(\d+)", status)[1])

    vocab_size = 100_000
    folder = edit("llama_llama3", grow, vocab_size=vocab_size)
    size = (folder / "model.safetensors").stat().st_size
    seen = []
    _, params = load_model(folder, progress=lambda *_: seen.append(resident_pages_of_files()))
    assert len(seen) > 10 and seen[-1] - seen[0] < size / 4
    assert not np.asarray(params["embed"]).any() and (np.asarray(params["head"]) == 1).all()


@pytest.mark.parametrize(
    "own, generation, merged",
    [(2, [5, 2], (5, 2)), ([2, 3], 7, (7, 2, 3)), (None, 4, (4,)), (2, None, (2,))],
)
def test_end_tokens_of_both_files_count(edit, own, generation, merged):
    folder = edit("llama_llama3", eos_token_id=own)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    assert load_config(folder).eos_token_ids == merged


def test_end_tokens_come_from_config_alone_without_generation_config(edit):
    folder = edit("llama_llama3")
    (folder / "generation_config.json").unlink()
    assert load_config(folder).eos_token_ids == (5, 9)


def test_an_equal_copy_of_a_tied_head_is_dropped(edit):
    def copy(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]

    config, params = load_model(edit("bamba_biases_tied", copy))
    assert config.tie_embeddings
    assert "head" not in params


def test_a_different_head_is_used_though_the_config_ties_it(edit):
    def other(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1

    config, params = load_model(edit("bamba_biases_tied", other))
    assert not config.tie_embeddings
    assert np.array_equal(params["head"], params["embed"].T + 1)


@pytest.mark.parametrize(
    "model, names",
    [
        ("llama_llama3", ["model.layers.0.self_attn.rotary_emb.inv_freq"]),
        ("nemotron_h_dense", ["mtp.layers.0.norm.weight"]),
        ("granite_dense_rope_biases", ["mtp.fc.weight", "mtp.layers.0.input_layernorm.weight"]),
        ("qwen3_next_experts_and_dense", ["model.layers.3.self_attn.rotary_emb.inv_freq"]),
        ("qwen3_next_experts_and_dense", ["mtp.norm.weight", "visual.w", "model.visual.w"]),
    ],
)
def test_known_spare_tensors_are_ignored(edit, model, names):
    folder = edit(
        model, lambda tensors: tensors.update(dict.fromkeys(names, np.zeros(3, "float32")))
    )
    assert same_bits(load_model(folder)[1], load_model(GOLDEN[model])[1])


def test_a_bias_of_experts_counts_if_the_config_says_so(edit):
    assert biases_of(load_model(GOLDEN["lfm2_moe_bias"])[1]).all()
    assert not biases_of(load_model(edit("lfm2_moe_bias", use_expert_bias=False))[1]).any()


def test_a_bias_of_experts_that_the_config_wants_is_not_left_out(edit):
    def drop(tensors):
        for name in [name for name in tensors if name.endswith("expert_bias")]:
            del tensors[name]

    folder = edit("lfm2_moe_bias", drop)
    with pytest.raises(ValueError, match="expert_bias .*is missing"):
        load_model(folder)


def biases_of(params: dict) -> np.ndarray:
    mixtures = [layer["mlp"] for layer in params["layers"] if "router" in layer.get("mlp", {})]
    return np.stack([mixture["router_bias"] for mixture in mixtures])


OTHER_PARTS = (
    *(
        "mtp.norm.weight",
        "visual.w",
        "model.visual.w",
        "vision_tower.blocks.0.norm.weight",
        "score.weight",
    ),
    *("v_head.summary.bias", "optimizer.state.0", "model.multi_modal_projector.linear.weight"),
    *(
        "model.layers.0._extra_state",
        "model.rotary_emb.inv_freq",
        "model.layers.1.self_attn.k_scale",
    ),
    *("model.layers.0.mlp.up_proj.weight.exp_avg", "model.layers.0.self_attn.bias"),
    *("model.layers.0.self_attn.rotary_emb.cos_cached", "model.layers.0.self_attn.masked_bias"),
)


def test_other_parts_of_a_model_are_left_out_with_a_word(edit, caplog):
    caplog.set_level(logging.INFO, logger="hybrid_jax")
    spare = dict.fromkeys(OTHER_PARTS, np.zeros(3, "float32"))
    folder = edit("llama_llama3", lambda tensors: tensors.update(spare))
    assert same_bits(load_model(folder)[1], load_model(GOLDEN["llama_llama3"])[1])
    told = [name for name in OTHER_PARTS if not name.endswith("inv_freq")]  # of every old file
    assert f"{len(told)} tensors that the model does not use are left out" in caplog.text


@pytest.mark.parametrize(
    "name",
    [
        *("model.layers.0.self_attn.q_proj.bias", "model.layers.1.mlp.gate.weight", "lm_head.bias"),
        *("model.embed_positions.weight", "model.norm.bias"),
    ],
)
def test_tensors_of_layers_are_not_left_out(edit, name):
    """With them the results would be others, and nobody would know."""
    folder = edit("llama_llama3", lambda tensors: tensors.update({name: np.zeros(3, "float32")}))
    with pytest.raises(ValueError, match=f"1 tensors of .* have no place .*: {name}; weights and"):
        load_model(folder)


def test_layers_after_those_of_config_json_are_left_out_with_a_warning(edit, caplog):
    """Of a model that is cut short on purpose, or one that keeps its drafting head there."""
    folder = edit("llama_llama3", num_hidden_layers=1)
    config, params = load_model(folder)
    assert len(config.layers) == 1
    whole = load_model(GOLDEN["llama_llama3"])[1]
    assert same_bits(params, whole | {"layers": whole["layers"][:1]})
    [said] = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert "config.json says 1 layers; the weights have more (layer 1), which are left out" in said


def test_unknown_tensors_are_listed(edit):
    def spare(tensors):
        names = [f"model.layers.{i % 2}.self_attn.sinks{i}" for i in range(5)]
        tensors.update(dict.fromkeys(names, np.zeros(3, np.float32)))

    with pytest.raises(
        ValueError, match=r"5 tensors .* llama .*layers\.0\.self_attn\.sinks0, .*\.\."
    ):
        load_model(edit("llama_llama3", spare))


def test_attention_bias_without_biases_in_the_file_is_no_bias(edit):
    _, params = load_model(edit("nemotron_h_dense", attention_bias=True))
    mixer = params["layers"][3]["mixers"][0]
    assert mixer["qkv_bias"].shape == ((3 + 2) * 10,)
    assert not mixer["qkv_bias"].any()


def test_projections_that_a_cut_replaces_may_be_there_or_not(edit):
    """After the cut; followers have no keys and values of their own either way."""
    name = "qwen2_swiftkv_groups"

    def drop(tensors):
        replaced = re.compile(r"layers\.[456]\.self_attn\.[qkv]_proj\.")
        left = {key: value for key, value in tensors.items() if not replaced.search(key)}
        assert len(tensors) - len(left) == 3 * 3 * 2
        return left

    config, params = load_model(GOLDEN[name])
    assert [layer.mixers[0].source for layer in config.layers][4:] == ["cut", "group", "group"]
    assert same_bits(params, load_model(edit(name, drop))[1])


def test_projections_after_a_cut_are_not_left_out(edit):
    def drop(tensors):
        del tensors["model.layers.4.self_attn.k_proj_swiftkv.bias"]

    with pytest.raises(
        ValueError, match=r"layers\.4\.self_attn\.k_proj_swiftkv\.bias \(32,\) is miss"
    ):
        load_model(edit("qwen2_swiftkv_groups", drop))


def test_projections_before_a_cut_are_those_of_the_plain_model(edit):
    """A later cut finds none of its projections; without one, those after the cut have no place."""
    name = "llama_swiftkv_no_groups"
    with pytest.raises(
        ValueError, match="3 tensors of .* have no place .*layers.1.self_attn.k_proj_swiftkv"
    ):
        load_model(edit(name, num_key_value_layers=2))
