"""Every way in which a checkpoint can be wrong is named."""

from __future__ import annotations

import json
import math
import re

import numpy as np
import pytest

from hybrid_jax.weights import load_config, load_model
from tests.parity.goldens import GOLDENS
from tests.weights.checkpoints import MAMBA, write


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

    said = r"mixer\.in_proj\.weight has dtype I8, and config\.json has no quantization_config"
    with pytest.raises(NotImplementedError, match=said):
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
    with pytest.raises(ValueError, match=r"model\.safetensors is truncated or not a safetensors"):
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


@pytest.mark.parametrize("path", [5, ["a"], b"x", "", "a\0b"])
def test_what_is_no_path_is_named(path):
    message = f"a model is the path of a directory, got {path!r}"
    with pytest.raises(ValueError, match=re.escape(message)):
        load_model(path)


def test_a_home_folder_that_is_not_there_is_named():
    with pytest.raises(FileNotFoundError, match=r"load_model: ~no-such-user-here/x: .*home"):
        load_model("~no-such-user-here/x")


def test_a_name_on_the_hub_is_not_downloaded_and_how_to_get_it():
    with pytest.raises(
        FileNotFoundError,
        match=r"org/model does not exist; .* nothing is downloaded: `hf download org/model --local-dir",
    ):
        load_model("org/model")
    with pytest.raises(FileNotFoundError, match=r"/nowhere does not .* \(nothing is downloaded\)$"):
        load_model("/nowhere")


def test_a_known_model_without_weights_and_a_misspelt_one_are_told_apart():
    with pytest.raises(FileNotFoundError, match="qwen3_5_9b is known by its sizes alone, without"):
        load_model("qwen3_5_9b")
    with pytest.raises(FileNotFoundError, match="not exist.*; did you mean tiny_gated_delta\\?$"):
        load_model("tiny_gated_delt")


@pytest.mark.parametrize(
    "path",
    ["/data/models/of/everybody/tiny_gated_delt", "org/Tiny-Gated-Delt", "./tiny_gated_delt/"],
)
def test_only_the_name_in_a_path_is_compared(path):
    with pytest.raises(FileNotFoundError, match="; did you mean tiny_gated_delta\\?$"):
        load_model(path)
    with pytest.raises(FileNotFoundError, match="not exist[^?]*$"):
        load_model("tiny_gated_delta/of/mine/nowhere")


@pytest.mark.parametrize(
    "other, remedy",
    [
        (
            "model.gguf",
            "model.gguf is a file of llama.cpp, which is not read; fetch the original .*",
        ),
        (
            "pytorch_model-1.bin",
            "pytorch_model-1.bin is weights pickled by torch; .*save_pretrained.*",
        ),
        (
            "consolidated.00.pth",
            "consolidated.00.pth is the original layout of Llama or Mistral; .*",
        ),
        ("flax_model.msgpack", "flax_model.msgpack is an export for another program, .*"),
        ("notes", "fetch the weights too"),
    ],
)
def test_a_folder_without_safetensors_says_what_to_do(edit, other, remedy):
    folder = edit("llama_llama3")
    (folder / "model.safetensors").unlink()
    (folder / other).touch()
    with pytest.raises(FileNotFoundError, match=f"no model.safetensors and no .*; {remedy}$"):
        load_model(folder)


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
    index.write_text(json.dumps({"weights": {}}))
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json has no weight_map"):
        load_model(folder)
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


def header_of(file):
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def put_header(file, text, data):
    file.write_bytes(len(text).to_bytes(8, "little") + text.encode() + data)


@pytest.mark.parametrize(
    "change, message",
    [
        (
            lambda a, b: {"shape": [2**33, 2**31]},
            r"damaged, tensor .* needs 73786976294838206464 bytes",
        ),
        (lambda a, b: {"shape": [2**64, 0]}, r"needs 0 bytes, its header gives it"),
        (lambda a, b: {"shape": [10**30]}, r"needs 4000000000000000000000000000000 bytes"),
        (lambda a, b: {"shape": [*a["shape"], *[1] * 40]}, r"has 42 axes, the limit is 32"),
        (lambda a, b: {"shape": [10**4000] * 2000}, r"has 2000 axes, the limit is 32"),
        (lambda a, b: {"shape": [10**4000] * 9}, r"has 1000\S*0000 in its shape or data_offsets"),
        (lambda a, b: {"shape": [2**62] * 32}, r"needs \d+\.\.\.\d+ bytes"),
        (lambda a, b: {"data_offsets": a["data_offsets"][::-1]}, r"damaged, tensor .* gives it -"),
        (lambda a, b: b, r"damaged, tensors .* and .* share bytes"),
        (lambda a, b: {"data_offsets": [0, 2**63]}, r"is truncated, it should have 92233720368547"),
        (lambda a, b: {"dtype": "NEW", "data_offsets": [9, 3]}, r"dtype NEW needs .* gives it -6"),
    ],
)
def test_a_place_that_cannot_be_is_refused(edit, change, message):
    file = edit("llama_llama3") / "model.safetensors"
    header, data = header_of(file)
    one, other = [name for name in header if len(header[name].get("shape", ())) == 2][:2]
    header[one] = header[one] | change(header[one], header[other])
    put_header(file, json.dumps(header), data)
    with pytest.raises(ValueError, match=message) as error:
        load_model(file.parent)
    assert "model.safetensors" in str(error.value)


@pytest.mark.parametrize(
    "text, message",
    [
        ('{"a": ' * 100_000, "malformed header: RecursionError"),
        ('{"a": {"dtype": "F32"}, "a": {"dtype": "F32"}}', "malformed header: .*'a' comes twice"),
        ('{"a": {"dtype": "F32", "shape": [' + "9" * 5000 + "]}}", "malformed header: ValueError"),
        ("[1]", "malformed header"),
        ('"text"', "malformed header"),
    ],
    ids=lambda text: text[:12],
)
def test_a_header_that_is_no_table_of_tensors_is_refused(edit, text, message):
    file = edit("llama_llama3") / "model.safetensors"
    put_header(file, text, bytes(64))
    with pytest.raises(ValueError, match=rf"model\.safetensors has a {message}"):
        load_model(file.parent)


def test_a_header_longer_than_the_format_allows_is_refused(edit):
    file = edit("llama_llama3") / "model.safetensors"
    with file.open("wb") as opened:  # it has a hole, and takes no room
        opened.write((100_000_001).to_bytes(8, "little"))
        opened.truncate(100_000_100)
    with pytest.raises(ValueError, match="would have 100000001 bytes, the limit is 100000000"):
        load_model(file.parent)
    file.write_bytes((2**64 - 1).to_bytes(8, "little") + bytes(99))
    with pytest.raises(ValueError, match="its header should end at byte 18446744073709551623"):
        load_model(file.parent)
