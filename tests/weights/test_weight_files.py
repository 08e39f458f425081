"""Checkpoints as tools write them: other names of files and tensors, fused experts, and what is no checkpoint."""

from __future__ import annotations

import json
import re
from itertools import product
from pathlib import Path

import ml_dtypes  # noqa: F401  # names the dtypes of 8 bits for numpy
import numpy as np
import pytest

from hybrid_jax.inspection.report import inspect_model
from hybrid_jax.models import files
from hybrid_jax.models.names import nearest
from hybrid_jax.weights import load_config, load_model
from tests.drawing import drawn
from tests.parity.goldens import GOLDENS
from tests.weights.checkpoints import GOLDEN, NAMES, read, same_bits, write

LLAMA = "llama_llama3"
FILE, INDEX = "model.safetensors", "model.safetensors.index.json"


def same_as(folder: Path, golden: str) -> bool:
    """Whether a directory gives the same config and every bit of a golden."""
    config, params = load_model(folder)
    expected, whole = load_model(GOLDEN[golden])
    return config == expected and same_bits(params, whole)


def renamed(change):
    """A change of tensors that gives each another name."""
    return lambda tensors: {change(name): value for name, value in tensors.items()}


# --- names ----------------------------------------------------------------------------------------


def compiled_inside(name):
    return re.sub(r"layers\.(\d+)\.", r"layers.\1._orig_mod.", name)


def text_part(name):
    """As older models of text and images have it: all of the text's under one name."""
    return f"language_model.{name}"


def backbone(name):
    return re.sub(r"^(model|backbone)\.", "", name)


def backbone_of_images(name):
    """As the text's backbone is called in a model of text and images that was saved without its head."""
    return re.sub(r"^(model|backbone)\.", "language_model.", name)


def first(prefix):
    def change(name):
        return prefix + name

    change.__name__ = prefix
    return change


CHANGES = (
    *(backbone, backbone_of_images, text_part, compiled_inside),
    *map(
        first,
        (
            "module.",
            "_orig_mod.",
            "base_model.model.",
            "model.",
            "transformer.",
            "module._orig_mod.",
        ),
    ),
    *map(
        first,
        ("_orig_mod.module.base_model.model.", "_fsdp_wrapped_module.", "model.language_model."),
    ),
)
# The head lies outside of a backbone that is saved alone, so here it goes along.
NAMED = sorted(golden.name for golden in GOLDENS if "vision" not in golden.name)


@pytest.mark.parametrize("name, change", drawn(product(NAMED, CHANGES)))
def test_names_are_read_without_the_prefixes_of_wrappers(edit, name, change):
    assert same_as(edit(name, renamed(change)), name)


@pytest.mark.parametrize(
    "name", ["mamba2_biases_tied", "lfm2_biases_adjusted", "qwen3_5_dense_tied"]
)
def test_a_backbone_without_its_head_is_whole_if_they_are_tied(edit, name):
    folder = edit(name, renamed(backbone))
    assert "lm_head.weight" not in read(folder / FILE)
    assert same_as(folder, name)


def test_a_backbone_without_its_own_head_is_named_with_what_it_has(edit):
    def drop(tensors):
        return {
            backbone(name): value for name, value in tensors.items() if name != "lm_head.weight"
        }

    with pytest.raises(
        ValueError, match=r"lm_head\.weight \(83, 48\) is missing .* embedding embed_tokens.weight"
    ):
        load_model(edit(LLAMA, drop))


def test_tied_weights_may_be_stored_as_the_head_alone(edit):
    def swap(tensors):
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")

    assert same_as(edit("bamba_biases_tied", swap), "bamba_biases_tied")


def test_a_missing_tensor_is_shown_with_the_nearest_name_there(edit):
    def misspell(tensors):
        tensors["module.model.layers.1.attention.q_proj.weight"] = tensors.pop(
            "module.model.layers.1.self_attn.q_proj.weight"
        )
        return tensors

    change = renamed(first("module."))
    with pytest.raises(
        ValueError,
        match=r"model\.layers\.1\.self_attn\.q_proj\.weight .* missing .* nearest name there is "
        r"module\.model\.layers\.1\.attention\.q_proj\.weight; ",
    ):
        load_model(edit(LLAMA, lambda tensors: misspell(change(tensors))))


def test_two_whole_models_in_one_file_are_named(edit):
    def twice(tensors):
        return {
            f"{who}.{name}": value for name, value in tensors.items() for who in ("actor", "critic")
        }

    with pytest.raises(
        ValueError,
        match=r"several models of this kind, whose tensors begin with actor\., critic\.;",
    ):
        load_model(edit(LLAMA, twice))
    with_plain = edit(
        "lfm2_biases_adjusted", lambda tensors: tensors | renamed(first("ema."))(tensors)
    )
    assert same_as(with_plain, "lfm2_biases_adjusted")


def test_the_nearest_name_has_the_same_end():
    names = ["a.layers.1.up.weight", "b.layers.2.up.bias", "b.layers.2.down.weight"]
    assert nearest("x.layers.1.up.weight", names) == names[0]
    assert nearest("b.layers.2.up.bias.more", names) == names[1]
    assert nearest("x", []) is None


# --- experts --------------------------------------------------------------------------------------

MIXTURES = (
    *("jamba_experts_biases", "lfm2_moe_bias", "lfm2_moe_without_bias", "nemotron_h_moe_groups"),
    *("nemotron_h_moe_latent_biases", "qwen3_5_moe_text", "qwen3_next_experts_and_dense"),
)
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")
PLACES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


def fuse(tensors: dict, *, turned: bool, layers: slice = slice(None)) -> dict:
    """All experts of a layer in one tensor, as transformers 5 has them in memory: [E, out, in], or [E, in, out]."""
    groups: dict[str, dict[str, list]] = {}
    for name, value in tensors.items():
        if found := EXPERT.fullmatch(name):
            kind = PLACES.get(found[3], found[3])
            groups.setdefault(found[1], {}).setdefault(kind, []).append((int(found[2]), value))
    out = dict(tensors)
    for prefix in sorted(groups)[layers]:
        for name in list(out):
            if name.startswith(f"{prefix}.") and EXPERT.fullmatch(name):
                del out[name]
        stacks = {
            kind: np.stack([value for _, value in sorted(parts, key=lambda part: part[0])])
            for kind, parts in groups[prefix].items()
        }
        if "gate_proj" in stacks:
            pair = (stacks.pop("gate_proj"), stacks.pop("up_proj"))
            stacks["gate_up_proj"] = np.concatenate(pair, axis=1)
        for kind, value in stacks.items():
            out[f"{prefix}.{kind}"] = value.transpose(0, 2, 1) if turned else value
    return out


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("name", MIXTURES)
def test_fused_experts_are_those_of_many_tensors(edit, name, turned):
    folder = edit(name, lambda tensors: fuse(tensors, turned=turned))
    assert not any(map(EXPERT.fullmatch, read(folder / FILE)))
    assert same_as(folder, name)


def test_layers_may_have_experts_in_either_way(edit):
    name = "qwen3_5_moe_text"
    folder = edit(name, lambda tensors: fuse(tensors, turned=False, layers=slice(1)))
    names = read(folder / FILE)
    assert any(map(EXPERT.fullmatch, names)) and any("gate_up_proj" in name for name in names)
    assert same_as(folder, name)


def test_turned_experts_of_granite_are_read_too(edit):
    def turn(tensors):
        return {
            name: value.transpose(0, 2, 1)
            if "block_sparse_moe" in name and value.ndim == 3
            else value
            for name, value in tensors.items()
        }

    assert same_as(edit("granite_moe_nope_tied", turn), "granite_moe_nope_tied")


# --- which files ----------------------------------------------------------------------------------


def split(folder: Path, count: int = 2, stem: str = "model", index: str | None = INDEX) -> Path:
    """The weights of a directory in shards, with an index or without."""
    tensors = list(read(folder / FILE).items())
    (folder / FILE).unlink()
    places = {}
    for number in range(count):
        shard = f"{stem}-{number + 1:05}-of-{count:05}.safetensors"
        write(folder / shard, dict(tensors[number::count]))
        places |= dict.fromkeys([name for name, _ in tensors[number::count]], shard)
    if index is not None:
        (folder / index).write_text(json.dumps({"weight_map": places}))
    return folder


@pytest.mark.parametrize(
    "file",
    [
        *("consolidated.safetensors", "model-00001-of-00001.safetensors", "model.fp16.safetensors"),
        *("pytorch_model.safetensors", "weights.safetensors"),
    ],
)
def test_the_only_file_with_weights_is_read_under_any_name(edit, file):
    folder = edit(LLAMA)
    (folder / FILE).rename(folder / file)
    assert same_as(folder, LLAMA)


@pytest.mark.parametrize(
    "stem, index",
    [("model", None), ("other", None), ("model.fp16", "model.safetensors.index.fp16.json")],
)
def test_shards_of_another_name_or_without_an_index_are_read(edit, stem, index):
    assert same_as(split(edit(LLAMA), 3, stem, index), LLAMA)


def test_a_shard_that_is_missing_is_named_without_an_index_too(edit):
    folder = split(edit(LLAMA), 3, index=None)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(
        FileNotFoundError, match="2 of 3 shards .* fetch model-00002-of-00003.safetensors too"
    ):
        load_model(folder)


def test_several_files_that_may_be_meant_are_named(edit):
    folder = edit(LLAMA)
    (folder / FILE).rename(folder / "model.fp16.safetensors")
    write(folder / "other.safetensors", {"x": np.zeros(1, np.float32)})
    with pytest.raises(
        FileNotFoundError, match=r"which of model\.fp16\.safetensors, other\.safetensors is meant"
    ):
        load_model(folder)


@pytest.mark.parametrize(
    "stray",
    [
        lambda tensors: {"model.embed_tokens.weight": np.zeros((4, 4), np.float32)},
        lambda tensors: {"encoder.weight": np.zeros((4, 4), np.float32)},
        lambda tensors: dict(list(tensors.items())[:9]),
    ],
)
def test_an_index_counts_beside_a_file_that_is_not_whole(edit, caplog, stray):
    folder = split(edit(LLAMA))
    write(folder / FILE, stray(read(GOLDEN[LLAMA] / FILE)))
    assert same_as(folder, LLAMA)
    assert "model.safetensors beside model.safetensors.index.json is left out" in caplog.text


def test_a_whole_file_counts_beside_an_index_as_in_transformers(edit, caplog):
    folder = split(edit(LLAMA))
    doubled = {name: 2 * value for name, value in read(GOLDEN[LLAMA] / FILE).items()}
    write(folder / FILE, doubled)
    _, params = load_model(folder)
    assert np.array_equal(params["embed"], doubled["model.embed_tokens.weight"])
    assert (
        "model.safetensors is read; model.safetensors.index.json beside it is left out"
        in caplog.text
    )
    (folder / INDEX).write_text('{"weight_map": null}')
    assert np.array_equal(load_model(folder)[1]["embed"], params["embed"])


def test_both_are_named_if_neither_is_whole(edit):
    folder = split(edit(LLAMA))
    (folder / "model-00002-of-00002.safetensors").unlink()
    write(folder / FILE, {"x": np.zeros(1, np.float32)})
    with pytest.raises(
        FileNotFoundError,
        match=r"00002-of-00002.safetensors does not .* model\.safetensors beside it",
    ):
        load_model(folder)


def test_what_only_an_index_names_is_not_missed(edit):
    """Neither a tensor nor a whole shard, if the model has no use for it."""
    folder = split(edit("qwen3_next_experts_and_dense"))
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] |= {
        "mtp.fc.weight": "model-00009-of-00009.safetensors",
        "model.layers.3.self_attn.rotary_emb.inv_freq": "model-00001-of-00002.safetensors",
        "visual.patch.weight": "visual.safetensors",
    }
    (folder / INDEX).write_text(json.dumps(index))
    assert same_as(folder, "qwen3_next_experts_and_dense")


def test_a_tensor_that_an_index_does_not_name_is_read_from_its_shards(edit):
    """As in transformers, an index says which files there are."""
    folder = split(edit(LLAMA))
    index = json.loads((folder / INDEX).read_text())
    del index["weight_map"]["model.norm.weight"]
    (folder / INDEX).write_text(json.dumps(index))
    assert same_as(folder, LLAMA)


@pytest.mark.parametrize(
    "places", [None, [], {}, {"lm_head.weight": None}, {"x": 3}, {"x": "../y"}, {"x": "/y"}]
)
def test_an_index_of_another_form_is_named(edit, places):
    folder = split(edit(LLAMA))
    (folder / INDEX).write_text(json.dumps({"weight_map": places}))
    with pytest.raises(
        ValueError, match=r"model\.safetensors\.index\.json (has no weight_map|must give the name)"
    ):
        load_model(folder)


def test_a_link_to_nothing_is_told_from_a_file_that_is_missing(edit):
    folder = edit(LLAMA)
    (folder / FILE).unlink()
    (folder / FILE).symlink_to("../../blobs/ab12")
    with pytest.raises(
        ValueError,
        match=r"model\.safetensors is a link to \.\./\.\./blobs/ab12, which does not exist",
    ):
        load_model(folder)
    (folder / FILE).unlink()
    (folder / FILE).symlink_to(".git/annex/objects/x")
    with pytest.raises(ValueError, match="is a link of git-annex.*git annex get"):
        load_model(folder)
    (folder / FILE).unlink()
    (folder / FILE).write_text("/annex/objects/SHA256E-s9--00\n")
    with pytest.raises(
        ValueError, match=r"model\.safetensors is a git-annex pointer.*git annex get"
    ):
        load_model(folder)
    (folder / FILE).unlink()
    (folder / "other.safetensors").symlink_to("gone")
    with pytest.raises(
        FileNotFoundError, match=r"other\.safetensors is a link to gone, which does not exist"
    ):
        load_model(folder)


def test_a_link_to_nothing_among_shards_is_named(edit):
    folder = split(edit(LLAMA))
    shard = folder / "model-00002-of-00002.safetensors"
    shard.unlink()
    shard.symlink_to("../blobs/cd")
    with pytest.raises(
        FileNotFoundError,
        match=r"00002-of-00002\.safetensors is a link to \.\./blobs/cd, which does",
    ):
        load_model(folder)


# --- what is no checkpoint of plain weights -------------------------------------------------------


def packed(dtype: str, per_item: int, *beside: str, own: str = "weight"):
    """A change that packs all projections into integers, with scales of these names beside them."""

    def change(tensors):
        out = {}
        for name, value in tensors.items():
            if not name.endswith("_proj.weight"):
                out[name] = value
                continue
            out[name.replace("weight", own)] = np.zeros(
                (value.shape[0], value.shape[1] // per_item), dtype
            )
            more = {
                name.replace("weight", end): np.ones((value.shape[0], 1), np.float16)
                for end in beside
            }
            out |= more
        return out

    return change


@pytest.mark.parametrize(
    "kind, change, fields",
    [
        ("MLX, 4 bits", packed("uint32", 8, "scales", "biases"), {"quantization": {"bits": 4}}),
        ("MLX", packed("uint32", 8, "scales", "biases"), {}),
        ("bitsandbytes", packed("uint8", 2, "weight.absmax", "weight.quant_map"), {}),
        ("bitsandbytes", packed("int8", 1, "SCB"), {}),
        ("torchao", packed("int8", 1, "_weight_scale", own="_weight_qdata"), {}),
        ("HQQ", packed("uint8", 2, "meta", own="W_q"), {}),
        ("quanto", packed("int8", 1, "weight._scale", own="weight._data"), {}),
    ],
)  # fmt: skip
def test_quantised_weights_are_called_so(edit, monkeypatch, kind, change, fields):
    more = {"uint32": "U32", "uint8": "U8"}
    for name, short in more.items():
        monkeypatch.setitem(NAMES, name, short)
    folder = edit(LLAMA, change, **fields)
    with pytest.raises(NotImplementedError) as error:
        load_model(folder)
    said = str(error.value)
    assert f"{LLAMA} holds quantised weights ({kind}), which are not read: tensor model." in said
    assert "; fetch the model as it was published, or in a form that is read: FP8" in said


@pytest.mark.parametrize(
    ("suffix", "error", "message"),
    [
        ("weight_scale_inv", ValueError, "1 tensors of .* have no place .*: {name};"),
        ("qweight", ValueError, "tensor {name} is of AWQ or GPTQ, .* no quantization_config"),
        ("weight.absmax", NotImplementedError, r"weights \(bitsandbytes\), .* tensor {name} of "),
    ],
)
def test_scales_beside_plain_weights_are_not_passed_over(edit, suffix, error, message):
    name = f"model.layers.0.mlp.up_proj.{suffix}"
    folder = edit(LLAMA, lambda tensors: tensors.update({name: np.zeros(3, "float32")}))
    with pytest.raises(error, match=message.format(name=name)):
        load_model(folder)


@pytest.mark.parametrize(
    "name", ["mamba2_groups_limits", "lfm2_biases_adjusted", "qwen3_5_dense_tied"]
)
def test_the_layout_of_mlx_is_called_so(edit, name):
    def turn(tensors):
        return {
            name: value.transpose(0, 2, 1) if re.search(r"\.conv(1d)?\.weight$", name) else value
            for name, value in tensors.items()
        }

    with pytest.raises(
        NotImplementedError, match=r"layout of MLX.*of shape \(\d+, \d, 1\)\); fetch the original"
    ):
        load_model(edit(name, turn))


@pytest.mark.parametrize(
    "part", ["lora_A.default.weight", "base_layer.weight", "lora_magnitude_vector"]
)
def test_an_adapter_that_was_saved_with_the_weights_is_named(edit, part):
    name = f"base_model.model.model.layers.0.self_attn.q_proj.{part}"

    def add(tensors):
        return {f"base_model.model.{key}": value for key, value in tensors.items()} | {
            name: np.zeros((2, 3), "float32")
        }

    with pytest.raises(
        NotImplementedError, match=f"adapter that is not merged .tensor {name}.* merge it into"
    ):
        load_model(edit(LLAMA, add))


def test_scales_of_other_parts_do_not_make_weights_quantised(edit):
    """Here a tensor is missing, and a vision tower has a parameter called scale."""

    def drop(tensors):
        del tensors["model.norm.weight"]
        tensors["vision_tower.layer_norm.scale"] = np.ones(3, "float32")

    with pytest.raises(ValueError, match=r"model\.norm\.weight .* is missing"):
        load_model(edit(LLAMA, drop))


def test_names_of_the_original_code_are_told(edit):
    names = {"layers.0.attention.wq.weight": np.zeros((3, 3), "float32")}
    with pytest.raises(
        NotImplementedError, match=r"names of the original code .*attention\.wq\.weight"
    ):
        load_model(edit(LLAMA, lambda tensors: names))


def test_original_files_of_mamba_are_told(tmp_path):
    fields = {"d_model": 64, "n_layer": 2, "vocab_size": 100, "ssm_cfg": {}, "rms_norm": True}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(
        ValueError,
        match="d_model, n_layer .* original code of Mamba; fetch the model in the layout of tr",
    ):
        load_model(tmp_path)


@pytest.mark.parametrize(
    "file, words",
    [
        ("params.json", "original layout of Mistral or Llama"),
        ("x.gguf", "x.gguf is a file of llama.cpp"),
    ],
)
def test_a_directory_without_a_config_says_what_it_has(tmp_path, file, words):
    (tmp_path / file).write_text("{}")
    with pytest.raises(FileNotFoundError, match=f"has no config.json .*{words}"):
        load_model(tmp_path)


# --- dtypes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", ["bfloat16", "float16", "float32"])
def test_the_dtype_is_that_of_most_bytes(edit, most):
    """Not that of config.json, and not that of the embedding."""

    def cast(tensors):
        other = "float32" if most != "float32" else "float16"
        return {
            name: value.astype(other if "embed" in name or "norm" in name else most)
            for name, value in tensors.items()
        }

    folder = edit(LLAMA, cast, torch_dtype="float32" if most != "float32" else "bfloat16")
    assert load_config(folder).dtype == load_model(folder)[0].dtype == most


def test_float64_becomes_float32(edit, monkeypatch):
    monkeypatch.setitem(NAMES, "float64", "F64")
    folder = edit(
        LLAMA, lambda tensors: {name: value.astype("float64") for name, value in tensors.items()}
    )
    assert load_config(folder).dtype == "float32" and same_as(folder, LLAMA)


def test_without_weights_config_json_says_the_dtype(edit):
    folder = edit(LLAMA, torch_dtype="bfloat16", dtype="bfloat16")
    (folder / FILE).write_bytes(b"nothing")
    assert load_config(folder).dtype == "bfloat16"
    (folder / FILE).unlink()
    assert load_config(folder).dtype == "bfloat16"


# --- what a look without loading shows ------------------------------------------------------------


def pickled(folder):
    (folder / FILE).rename(folder / "pytorch_model.bin")


def one_of_two(folder):
    (folder / FILE).rename(folder / "model-00001-of-00002.safetensors")


def link_to_nothing(folder):
    (folder / FILE).unlink()
    (folder / FILE).symlink_to("nowhere")


def pointer_of_git(folder):
    (folder / FILE).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")


def shorter(folder):
    (folder / FILE).write_bytes((folder / FILE).read_bytes()[:-8])


def empty(folder):
    (folder / FILE).write_bytes(b"")


BROKEN = [pickled, one_of_two, link_to_nothing, pointer_of_git, shorter, empty]


@pytest.mark.parametrize("change", BROKEN)
def test_inspect_says_that_weights_cannot_be_loaded_as_loading_does(edit, change):
    folder = edit(LLAMA)
    assert inspect_model(folder)["weights_problem"] is None
    change(folder)
    with pytest.raises((ValueError, OSError)) as refused:
        load_model(folder)
    report = inspect_model(folder)
    said = report["weights_problem"]
    assert f"weights          cannot be loaded: {said}" in str(report)
    if change is not empty:
        assert said in str(refused.value)


def test_inspect_says_that_weights_of_a_model_by_name_are_not_installed(monkeypatch, tmp_path):
    monkeypatch.setitem(files.PACKED, "tiny_gated_delta", tmp_path / "none")
    said = inspect_model("tiny_gated_delta")["weights_problem"]
    assert said.startswith("tiny_gated_delta is a model of hybrid-jax-models, which is not insta")


@pytest.mark.parametrize("golden", GOLDEN)
def test_inspect_finds_no_fault_with_whole_weights(golden):
    assert inspect_model(GOLDEN[golden])["weights_problem"] is None
