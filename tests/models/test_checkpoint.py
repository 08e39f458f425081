"""Loading and saving models, and every way in which a checkpoint can be wrong."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from hybrid_jax.checkpoint import load_config, load_model, save_orbax
from hybrid_jax.config import Attention, LayerSpec, ModelConfig
from hybrid_jax.models.initialize import random_params
from tests.parity.goldens import GOLDENS

NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "int8": "I8"}
GOLDEN = {golden.name: golden for golden in GOLDENS}
MAMBA = "backbone.layers.0.mixer"


def read(file: Path) -> dict[str, np.ndarray]:
    """All tensors of a float32 safetensors file."""
    raw = file.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    header.pop("__metadata__", None)
    return {
        name: np.frombuffer(
            raw, np.float32, math.prod(entry["shape"]), start + entry["data_offsets"][0]
        ).reshape(entry["shape"])
        for name, entry in header.items()
    }


def write(file: Path, tensors: dict[str, np.ndarray]) -> None:
    """A safetensors file."""
    header, blobs, start = {}, [], 0
    for name, array in tensors.items():
        blob = np.ascontiguousarray(array).tobytes()
        header[name] = {
            "dtype": NAMES[str(array.dtype)],
            "shape": list(array.shape),
            "data_offsets": [start, start + len(blob)],
        }
        blobs.append(blob)
        start += len(blob)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(blobs))


@pytest.fixture
def edit(tmp_path):
    """Copies a golden and changes its tensors and config: edit(name, tensors=function, **fields)."""

    def make(name: str, tensors=None, **fields) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        for file in GOLDEN[name].iterdir():
            if file.name != "answers.npz":
                shutil.copyfile(file, folder / file.name)
        values = json.loads((folder / "config.json").read_text()) | fields
        (folder / "config.json").write_text(json.dumps(values))
        if tensors is not None:
            stored = read(folder / "model.safetensors")
            stored = tensors(stored) or stored
            write(folder / "model.safetensors", stored)
        return folder

    return make


def same_bits(left: dict, right: dict) -> bool:
    """Whether two parameter trees agree in structure, dtypes and every bit."""
    if jax.tree.structure(left) != jax.tree.structure(right):
        return False
    pairs = zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    return all(
        a.dtype == b.dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs
    )


# --- what arrives ---------------------------------------------------------------------------------


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


# --- tied heads, spare tensors --------------------------------------------------------------------


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


def test_known_spare_tensors_are_ignored(edit):
    def spare(tensors):
        zero = np.zeros(3, np.float32)
        names = ("model.layers.0.self_attn.rotary_emb.inv_freq", "mtp.norm.weight", "visual.w")
        tensors.update(dict.fromkeys(names, zero))

    folder = edit("llama_llama3", spare)
    assert same_bits(load_model(folder)[1], load_model(GOLDEN["llama_llama3"])[1])


def test_unknown_tensors_are_listed(edit):
    def spare(tensors):
        names = [f"model.layers.{i}.self_attn.sinks" for i in range(5)]
        tensors.update(dict.fromkeys(names, np.zeros(3, np.float32)))

    with pytest.raises(
        ValueError, match=r"5 tensors .* llama .*layers\.0\.self_attn\.sinks, .*\.\."
    ):
        load_model(edit("llama_llama3", spare))


def test_attention_bias_without_biases_in_the_file_is_no_bias(edit):
    _, params = load_model(edit("nemotron_h_dense", attention_bias=True))
    mixer = params["layers"][3]["mixers"][0]
    assert mixer["qkv_bias"].shape == ((3 + 2) * 10,)
    assert not mixer["qkv_bias"].any()


# --- what is wrong --------------------------------------------------------------------------------


def test_missing_tensor_is_named(edit):
    def drop(tensors):
        del tensors[f"{MAMBA}.dt_bias"]

    with pytest.raises(
        ValueError, match=r"tensor backbone\.layers\.0\.mixer\.dt_bias .* missing"
    ) as error:
        load_model(edit("mamba2_groups_limits", drop))
    assert "mamba2_groups_limits, which" in str(error.value)
    assert str(error.value).endswith("must be of the same model: fetch both again")


def test_missing_head_is_named(edit):
    with pytest.raises(ValueError, match=r"tensor lm_head\.weight \(101, 30\) is missing"):
        load_model(edit("mamba2_biases_tied", tie_word_embeddings=False))


def test_wrong_shape_is_named_with_both(edit):
    def cut(tensors):
        tensors[f"{MAMBA}.A_log"] = tensors[f"{MAMBA}.A_log"][:-1]

    with pytest.raises(
        ValueError, match=r"model\.safetensors has shape \(8,\), config\.json .* \(9,\)"
    ):
        load_model(edit("mamba2_groups_limits", cut))


@pytest.mark.parametrize(
    "name, place, value, at",
    [
        (f"{MAMBA}.norm.weight", (5,), math.nan, r"nan at \(5,\)"),
        (f"{MAMBA}.A_log", (8,), math.inf, r"inf at \(8,\)"),
        (f"{MAMBA}.in_proj.weight", ..., math.nan, r"nan at \(0, 0\)"),
    ],
)
def test_weights_that_are_no_numbers_are_refused(edit, name, place, value, at):
    def spoil(tensors):
        tensors[name] = tensors[name].copy()
        tensors[name][place] = value

    with pytest.raises(
        ValueError, match=rf"tensor {re.escape(name)} of .*model\.safetensors holds {at}"
    ):
        load_model(edit("mamba2_groups_limits", spoil))


def test_a_pointer_of_git_lfs_is_told_from_a_truncated_file(edit):
    file = edit("llama_llama3") / "model.safetensors"
    file.write_text("version https://git-lfs.example/spec/v1\noid sha256:00\nsize 9\n")
    with pytest.raises(ValueError, match=r"model\.safetensors is a git-lfs pointer.*git lfs pull"):
        load_model(file.parent)


def test_quantised_tensor_is_named(edit):
    def quantise(tensors):
        tensors[f"{MAMBA}.in_proj.weight"] = tensors[f"{MAMBA}.in_proj.weight"].astype(np.int8)

    with pytest.raises(NotImplementedError, match=r"mixer\.in_proj\.weight of .* has dtype I8"):
        load_model(edit("mamba2_groups_limits", quantise))


@pytest.mark.parametrize("keep", [-1, 5000, 100, 3, 0])
def test_truncated_file_is_named_with_both_sizes(edit, keep):
    file = edit("llama_llama3") / "model.safetensors"
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[:keep])
    left = keep if keep >= 0 else size - 1
    with pytest.raises(ValueError, match=rf"model\.safetensors is truncated.* {left}") as error:
        load_model(file.parent)
    if keep in (-1, 5000):
        assert f" {size} bytes" in str(error.value)


def test_file_that_is_no_safetensors_is_refused(edit):
    file = edit("llama_llama3") / "model.safetensors"
    file.write_bytes(b"a page that says the file is gone\n" * 3)
    with pytest.raises(ValueError, match=r"model\.safetensors is truncated or no safetensors"):
        load_model(file.parent)
    file.write_bytes((4).to_bytes(8, "little") + b"{]{]")
    with pytest.raises(ValueError, match=r"model\.safetensors has a malformed header"):
        load_model(file.parent)


def test_header_that_contradicts_itself_is_refused(edit):
    file = edit("llama_llama3") / "model.safetensors"
    file.write_bytes(file.read_bytes().replace(b'"shape":[83,48]', b'"shape":[83,47]', 1))
    with pytest.raises(ValueError, match=r"damaged, tensor .* \(83, 47\) .* needs 15604 .* 15936"):
        load_model(file.parent)


@pytest.mark.parametrize(
    "entry",
    [
        {"data_offsets": [0, 15936, 3]},
        {"data_offsets": [0]},
        {"data_offsets": [-4, 15932]},
        {"data_offsets": ["0", 15936]},
        {"shape": 3},
        {"shape": [83.0, 48]},
        {"dtype": 7},
        None,
    ],
    ids=str,
)
def test_a_malformed_header_entry_is_named_with_its_file(edit, entry):
    file = edit("llama_llama3") / "model.safetensors"
    raw = file.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    name = "model.embed_tokens.weight"
    header[name] = header[name] | entry if entry else entry
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + raw[start:])
    with pytest.raises(ValueError, match=rf"model\.safetensors .* tensor {name} must have"):
        load_model(file.parent)


@pytest.mark.parametrize("kind", [FileNotFoundError, ValueError])
def test_missing_directory_is_named(tmp_path, kind):
    with pytest.raises(kind, match="nowhere does not exist"):
        load_model(tmp_path / "nowhere")


@pytest.mark.parametrize("path", [5, ["a"], b"x", "", None, "a\0b"])
def test_what_is_no_path_is_named(path):
    message = f"a model is the path of a directory, got {path!r}"
    with pytest.raises(ValueError, match=re.escape(message)):
        load_model(path)


def test_a_name_on_the_hub_is_not_downloaded_and_how_to_get_it():
    with pytest.raises(
        FileNotFoundError,
        match=r"org/model does not exist; .* nothing is downloaded: `hf download org/model --local-dir",
    ):
        load_model("org/model")
    with pytest.raises(FileNotFoundError, match=r"/nowhere does not .* \(nothing is downloaded\)$"):
        load_model("/nowhere")


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_an_end_token_outside_the_vocabulary_is_named_with_its_file(edit, file):
    folder = edit("llama_llama3")
    values = json.loads((folder / file).read_text()) | {"eos_token_id": [1, 999]}
    (folder / file).write_text(json.dumps(values))
    message = r"eos_token_id must be token ids below vocab_size \d+, got \[1, 999\]"
    with pytest.raises(ValueError, match=rf"llama_llama3/{file}: .*{message}"):
        load_config(folder)


def test_an_error_of_the_config_names_its_file(edit):
    with pytest.raises(ValueError, match=r"llama_llama3/config\.json: llama: rms_norm_eps .* -1"):
        load_model(edit("llama_llama3", rms_norm_eps=-1))
    with pytest.raises(NotImplementedError, match=r"/config\.json: mamba2: hidden_act 'relu'"):
        load_model(edit("mamba2_biases_tied", hidden_act="relu"))


def test_missing_files_are_named(edit, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        load_model(tmp_path)
    folder = edit("llama_llama3")
    with pytest.raises(FileNotFoundError, match=r"config\.json is a file"):
        load_model(folder / "config.json")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match=r"no model\.safetensors .*pytorch_model\.bin"):
        load_model(folder)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": "part-1.safetensors"}}))
    with pytest.raises(FileNotFoundError, match=r"part-1\.safetensors does not exist"):
        load_model(folder)
    write(folder / "part-1.safetensors", {"other": np.zeros(1, np.float32)})
    with pytest.raises(ValueError, match=r"lm_head\.weight is not in part-1\.safetensors"):
        load_model(folder)


def test_broken_json_is_named(edit):
    folder = edit("llama_llama3")
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        load_model(folder)


def test_unknown_dtype_is_named():
    with pytest.raises(ValueError, match="dtype must be auto .*, got 'int4'"):
        load_model(GOLDENS[0], dtype="int4")


# --- orbax ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("golden", GOLDENS, ids=lambda golden: golden.name)
def test_orbax_round_trip_keeps_every_bit(golden, tmp_path):
    config, params = load_model(golden, dtype="bfloat16")
    save_orbax(tmp_path / "model", config, params)
    again, restored = load_model(tmp_path / "model")
    assert again == config
    assert same_bits(restored, params)


def test_orbax_keeps_shared_layers_and_copies_the_tokenizer(tmp_path):
    attention = Attention(num_heads=2, num_kv_heads=1, head_dim=4)
    layers = (LayerSpec(mixers=(attention,)), LayerSpec(mixers=(attention,), weights_of=0))
    config = ModelConfig(family="own", vocab_size=9, width=8, layers=layers)
    params = random_params(config, 1)
    source = tmp_path / "source"
    source.mkdir()
    (source / "tokenizer.json").write_text("{}")
    (source / "notes.txt").write_text("no")
    save_orbax(tmp_path / "model", config, params, tokenizer_from=source)
    again, restored = load_model(tmp_path / "model")
    assert again == config
    assert restored["layers"][1] == {}
    assert same_bits(restored, params)
    names = {file.name for file in (tmp_path / "model").iterdir()}
    assert names == {"model_config.json", "params", "tokenizer.json"}


def test_orbax_replaces_an_earlier_model_and_nothing_else(tmp_path):
    config, params = load_model(GOLDEN["mamba2_biases_tied"])
    save_orbax(tmp_path / "model", config, params)
    doubled = jax.tree.map(lambda leaf: 2 * leaf, params)
    save_orbax(tmp_path / "model", config, doubled)
    assert same_bits(load_model(tmp_path / "model")[1], doubled)
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("text")
    with pytest.raises(ValueError, match="thesis exists and is not a saved model"):
        save_orbax(tmp_path / "thesis", config, params)


def test_orbax_casts_on_load(tmp_path):
    config, params = load_model(GOLDEN["mamba2_biases_tied"])
    save_orbax(tmp_path / "model", config, params)
    config, restored = load_model(tmp_path / "model", dtype="bfloat16")
    mixer = restored["layers"][0]["mixers"][0]
    assert config.dtype == "bfloat16"
    assert mixer["in_proj"].dtype == jnp.bfloat16
    assert mixer["A_log"].dtype == jnp.float32


def test_orbax_directory_without_its_arrays_is_refused(tmp_path):
    config, params = load_model(GOLDEN["mamba2_biases_tied"])
    save_orbax(tmp_path / "model", config, params)
    shutil.rmtree(tmp_path / "model" / "params")
    with pytest.raises(FileNotFoundError, match=r"has model_config\.json but no params/"):
        load_model(tmp_path / "model")


def test_damaged_orbax_directory_is_refused(tmp_path):
    config, params = load_model(GOLDEN["mamba2_biases_tied"])
    save_orbax(tmp_path / "model", config, params)
    blobs = max(
        (file for file in (tmp_path / "model" / "params").rglob("*") if file.is_file()),
        key=lambda file: file.stat().st_size,
    )
    blobs.write_bytes(blobs.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"model/params is damaged or no orbax checkpoint"):
        load_model(tmp_path / "model")
    shutil.rmtree(tmp_path / "model" / "params")
    (tmp_path / "model" / "params").mkdir()
    with pytest.raises(ValueError, match=r"model/params is damaged or no orbax checkpoint"):
        load_model(tmp_path / "model")
