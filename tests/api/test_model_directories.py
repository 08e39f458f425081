"""The small files of a model's directory: what is wrong with them is said, and what is not read too."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import tokenizers
from tokenizers import models

from hybrid_jax import LLM
from hybrid_jax.api import starting
from hybrid_jax.api.options import unused_defaults
from hybrid_jax.config.model_directory import FILES, hub_name, left_out
from hybrid_jax.inspection.report import inspect_model
from hybrid_jax.text.given_tokenizer import as_tokenizer
from hybrid_jax.text.tokenizer import Tokenizer
from hybrid_jax.weights import load_config, load_model, save_orbax
from tests.api.fake_engine import CONFIG
from tests.drawing import drawn
from tests.llms import opened
from tests.weights.checkpoints import GOLDEN, same_bits

INDEX = "model.safetensors.index.json"
OBJECTS = (
    *("config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "chat_template.json", INDEX),
)
TEXTS = ("chat_template.jinja", "additional_chat_templates/more.jinja")
ADAPTER = "adapter_config.json"


@pytest.fixture
def folder(tmp_path):
    """A directory of a tiny model, with a tokenizer of one token."""
    made = tmp_path / "model"
    made.mkdir()
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        shutil.copyfile(GOLDEN["llama_llama3"] / name, made / name)
    backend = tokenizers.Tokenizer(models.WordLevel(vocab={"a": 0, "b": 1, "c": 2}, unk_token="a"))
    backend.save(str(made / "tokenizer.json"))
    return made


# --- files that are not what they should be -------------------------------------------------------

TEXT = '{"bos_token": "é", "eos_token_id": null}'
# What is wrong with a file, and how the line goes on after the file's name.
WRONG = {
    "utf-16": (TEXT.encode("utf-16"), "must be plain UTF-8 text, it is UTF-16; save it anew"),
    "utf-16 without a mark": (
        TEXT.encode("utf-16-le"),
        "must be plain UTF-8 text, it is UTF-16 or no",
    ),
    "a mark": (
        TEXT.encode("utf-8-sig"),
        "must be plain UTF-8 text, it is UTF-8 with a byte order mark",
    ),
    "latin-1": (TEXT.encode("latin-1"), "must be plain UTF-8 text, byte 15 is 0xe9; save it anew"),
    "a pointer": (b"version https://git-lfs.example/spec/v1\noid 0\n", "is a git-lfs pointer"),
}
WRONG_JSON = WRONG | {
    "empty": (b" \n", "is not valid JSON: it is empty"),
    "cut": (b'{"a": ', "is not valid JSON: Expecting value"),
    "a list": (b"[1]", "must hold an object, got list"),
    "null": (b"null", "must hold an object, got NoneType"),
    "deep": (b'{"a":' * 500 + b"1" + b"}" * 500, "nests lists and objects more than 100 deep"),
    "deeper": (b'{"a":' * 99999 + b"1" + b"}" * 99999, "is not valid JSON: maximum recursion"),
    "half a pair": (
        rb'{"a": "\ud83d"}',
        r"has half of a surrogate pair in a text, '\ud83d', which",
    ),
}
CASES = [
    *((name, kind) for name in OBJECTS for kind in WRONG_JSON),
    *((name, kind) for name in TEXTS for kind in WRONG),
]


def spoil(folder: Path, name: str, content: bytes) -> Path:
    file = folder / name
    file.parent.mkdir(exist_ok=True)
    if name == INDEX:
        (folder / "model.safetensors").unlink()
    file.write_bytes(content)
    return file


def one_line(run, *arguments) -> str:
    """What a command says about a caller's mistake."""
    code, out, err = run(*arguments)
    assert (code, out) == (2, "") and err.count("\n") == 1 and err.startswith("hybrid-jax: ")
    return err


@pytest.mark.parametrize("name, kind", drawn(CASES))
def test_a_malformed_small_file_is_named_in_one_line(run_command, folder, name, kind):
    content, words = WRONG_JSON[kind]
    expected = f"{spoil(folder, name, content)} {words}"
    with pytest.raises(ValueError) as error:
        LLM(folder, quiet=True)
    assert expected in str(error.value) and "\n" not in str(error.value)
    assert expected in one_line(run_command, "generate", "a", "--model", folder)
    if name != INDEX:  # it goes with the weights, which are not looked at
        assert expected in one_line(run_command, "inspect", folder)


@pytest.mark.parametrize(
    "name, kind",
    drawn(
        product(
            [*OBJECTS, *TEXTS, "tokenizer.json", "model.safetensors"],
            ["a directory", "a link to nothing"],
        )
    ),
)
def test_what_is_no_file_is_named(run_command, folder, name, kind):
    file = spoil(folder, name, b"")
    file.unlink()
    file.mkdir() if kind == "a directory" else file.symlink_to("../blobs/12ab")
    words = (
        f"{file} must be a file, it is a directory"
        if kind == "a directory"
        else f"{file} is a link to ../blobs/12ab, which does not exist; fetch the model again"
    )
    if kind == "a directory" and name in TEXTS[1:]:
        words = f"{file} cannot be read: Is a directory"
    with pytest.raises(ValueError) as error:
        LLM(folder, quiet=True)
    assert words in str(error.value)
    assert words in one_line(run_command, "generate", "a", "--model", folder)
    if name not in (INDEX, "tokenizer.json", "model.safetensors", TEXTS[1]):
        assert words in one_line(run_command, "inspect", folder)


@pytest.mark.parametrize(
    "name, content, words",
    [
        (
            "tokenizer_config.json",
            {"chat_template": [{"name": "x"}]},
            "a list of objects with a name",
        ),
        ("tokenizer_config.json", {"chat_template": [None]}, "a list of objects with a name"),
        ("tokenizer_config.json", {"chat_template": 5}, "must be text, an object of texts by name"),
        (
            "tokenizer_config.json",
            {"chat_template": {"default": None}},
            "must be text, an object of",
        ),
        ("chat_template.json", {"chat_template": [["a", "b"]]}, "a list of objects with a name"),
        (
            "tokenizer_config.json",
            {"added_tokens_decoder": {"x": {"content": "a"}}},
            "tokens by id",
        ),
        (
            "tokenizer_config.json",
            {"added_tokens_decoder": None},
            "must be an object of tokens by id",
        ),
        (
            "tokenizer_config.json",
            {"added_tokens_decoder": {"7": {}}},
            "must give an added token its content",
        ),
        (
            "tokenizer_config.json",
            {"additional_special_tokens": [{}]},
            "must be special tokens, got {}",
        ),
        ("special_tokens_map.json", {"extra_special_tokens": [3]}, "must be special tokens, got 3"),
        (
            "generation_config.json",
            {"x": {"__float__": []}},
            "__float__ must be a number as text",
        ),
        ("added_tokens.json", {"x": None}, "must be an object of token ids by text"),
        (
            "generation_config.json",
            {"eos_token_id": {"a": 1}},
            "eos_token_id must be token ids below",
        ),
        (
            "generation_config.json",
            {"eos_token_id": [None]},
            "eos_token_id must be token ids below",
        ),
        (
            "generation_config.json",
            {"temperature": float("nan")},
            "temperature must be 0 or a number",
        ),
        ("generation_config.json", {"top_k": "many"}, "top_k must be"),
        (INDEX, {"weight_map": None}, "has no weight_map"),
        (
            INDEX,
            {"weight_map": {"a": None}},
            "must give the name of a file for each tensor, got None",
        ),
    ],
)
def test_an_entry_of_another_form_is_named_with_its_file(run_command, folder, name, content, words):
    file = spoil(folder, name, json.dumps(content).encode())
    with pytest.raises(ValueError) as error:
        LLM(folder, quiet=True)
    assert file.name in str(error.value) and words in str(error.value)
    assert words in one_line(run_command, "generate", "a", "--model", folder)


def test_a_name_that_a_file_has_twice_is_said(folder, caplog):
    (folder / "generation_config.json").write_text(
        '{"eos_token_id": 3, "eos_token_id": 4, "a": 1, "a": 1}'
    )
    assert 4 in load_config(folder).eos_token_ids and 3 not in load_config(folder).eos_token_ids
    said = f"{folder / 'generation_config.json'} has 'eos_token_id' more than once; the last one counts"
    assert said in caplog.messages and len(set(caplog.messages)) == 1


# --- end tokens -----------------------------------------------------------------------------------


def bytes_model(monkeypatch, folder: Path, own: tuple[int, ...], **config) -> LLM:
    """An LLM of the fake engine whose config.json names these end tokens."""
    named = replace(CONFIG, eos_token_ids=own)
    monkeypatch.setattr(starting, "open_with_drafter", lambda *_: opened(named))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return LLM(folder, quiet=True)


@pytest.mark.parametrize(
    "own, eos, merged",
    [
        ((), "<0x0A>", (10,)),
        ((3,), {"content": "<0x0A>"}, (3, 10)),
        ((10, 3), "<0x0A>", (10, 3)),
        ((3,), None, (3,)),
        ((3,), "no such token", (3,)),  # the tokenizer gets one, which the model cannot write
    ],
)
def test_answers_also_end_at_the_end_token_of_the_tokenizer(
    monkeypatch, fake_model, own, eos, merged
):
    with bytes_model(monkeypatch, fake_model, own, eos_token=eos) as llm:
        assert llm.model_config.eos_token_ids == merged
        lines = [line for line in llm.describe().splitlines() if line.startswith("ends")]
        others = [token for token in merged if token != 10]
        assert bool(lines) == (10 in merged and bool(others))
        if lines:
            assert lines == ["ends      at 10 <0x0A>, which the tokenizer names, and 3 <0x03>"]


def test_special_tokens_map_counts_where_transformers_reads_it(monkeypatch, fake_model):
    (fake_model / "special_tokens_map.json").write_text('{"eos_token": "<0x0B>"}')
    with bytes_model(monkeypatch, fake_model, (), eos_token="<0x0A>") as llm:
        assert llm.model_config.eos_token_ids == (11,)
    with bytes_model(
        monkeypatch, fake_model, (), eos_token="<0x0A>", added_tokens_decoder={}
    ) as llm:
        assert llm.model_config.eos_token_ids == (10,)


def test_the_end_token_of_a_tokenizer_that_is_given_counts_too(make_llm, tokenizer):
    class Given:
        eos_token_id = 7

        def encode(self, text):
            return tokenizer.encode(text)

        def decode(self, ids):
            return tokenizer.decode(ids)

    with make_llm(tokenizer=Given(), quiet=True) as llm:
        assert 7 in llm.model_config.eos_token_ids


# --- what is not read -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, why",
    [
        ("preprocessor_config.json", "images, audio and video are not read"),
        ("video_preprocessor_config.json", "images, audio and video are not read"),
        ("modeling_own.py", "code that comes with a model is not run"),
        ("custom_generate/generate.py", "code that comes with a model is not run"),
        ("1_Pooling/config.json", "vectors are pooled and normalized as the call says"),
    ],
)
def test_what_is_left_out_is_said(fake_model, folder, name, why):
    for place in (fake_model, folder):
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_text("{}")
    with LLM(fake_model, quiet=True) as llm:
        [line] = [line for line in llm.describe().splitlines() if line.startswith("left out")]
    assert line == f"left out  {left_out(fake_model)[0]}" and name in line and line.endswith(why)
    report = inspect_model(folder)
    assert report["left_out"] == left_out(folder) and f"left out: {name}" not in str(report)
    assert left_out(folder)[0] in str(report)


@pytest.mark.parametrize("name", ["tokenizer.model", "vocab.json", "tekken.json", "qwen.tiktoken"])
def test_another_tokenizer_is_missed_only_without_a_tokenizer_json(folder, name):
    (folder / name).write_text("{}")
    assert left_out(folder) == []
    (folder / "tokenizer.json").unlink()
    assert left_out(folder)[0].startswith(
        f"{name}: only tokenizer.json is read as a tokenizer; `AutoTokenizer"
    )
    assert left_out(folder, tokenizer=False) == []
    with pytest.raises(
        ValueError, match=f"has no tokenizer.json; it has {name}; only tokenizer.json is read"
    ):
        as_tokenizer(folder)


def test_fields_of_generation_config_that_change_results_are_said(folder):
    file = folder / "generation_config.json"
    file.write_text(
        json.dumps({"num_beams": 1, "top_k": 5, "max_length": 20, "suppress_tokens": []})
    )
    assert unused_defaults(folder) == []
    file.write_text(
        json.dumps({"num_beams": 4, "typical_p": None, "no_repeat_ngram_size": 3, "top_k": 5})
    )
    assert unused_defaults(folder) == [
        "generation_config.json: num_beams 4, no_repeat_ngram_size 3"
    ]
    file.unlink()
    assert unused_defaults(folder) == []


def test_a_dtype_that_is_not_the_stored_one_is_said(monkeypatch, fake_model):
    stored = replace(CONFIG, dtype="float16")
    monkeypatch.setattr(starting, "open_with_drafter", lambda *_: opened(stored))
    with LLM(fake_model, quiet=True) as llm:
        assert " float32, stored as float16\n" in llm.describe()
    with LLM(fake_model, quiet=True, dtype="bfloat16") as llm:
        assert (
            " bfloat16, stored as float16, which has 3 bits more; dtype='float32' keeps them\n"
            in llm.describe()
        )


@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize(
    "name", ["adapter_model.safetensors", "adapter_model.bin", "adapters.safetensors"]
)
def test_an_adapter_is_named_whether_weights_lie_beside_it_or_not(
    run_command, folder, name, beside
):
    (folder / ADAPTER).write_text(
        json.dumps({"peft_type": "LORA", "base_model_name_or_path": "org/base"})
    )
    (folder / name).touch()
    if not beside:
        (folder / "model.safetensors").unlink()
        (folder / "config.json").unlink()
    words = f"has an adapter of org/base ({ADAPTER}, {name})"
    with pytest.raises(NotImplementedError) as error:
        load_model(folder)
    assert words in str(error.value) and "merge it into the whole model first" in str(error.value)
    assert ("or move its files away" in str(error.value)) == beside
    for command in (["inspect", folder], ["generate", "a", "--model", folder]):
        assert words in one_line(run_command, *command)


# --- what goes along ------------------------------------------------------------------------------


def test_what_is_read_of_text_goes_along_and_old_files_do_not_stay(tmp_path, folder):
    contents = {
        known.pattern.replace("*", "tool_use"): "{}" if known.pattern.endswith(".json") else "text"
        for known in FILES
        if known.role == "carried" and known.pattern != "tokenizer.json"
    }
    for name, text in contents.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    config, params = load_model(folder)
    copy = tmp_path / "copy"
    save_orbax(copy, config, params, tokenizer_from=folder)
    assert {name: (copy / name).read_text() for name in contents} == contents
    assert same_bits(load_model(copy)[1], params)
    (folder / "chat_template.jinja").unlink()
    save_orbax(copy, config, params, tokenizer_from=folder)
    assert not (copy / "chat_template.jinja").exists()
    assert (
        Tokenizer.from_directory(copy).chat_templates
        == Tokenizer.from_directory(folder).chat_templates
    )
    (copy / "generation_config.json").write_text('{"eos_token_id": 7}')
    assert load_config(copy).eos_token_ids[0] == 7


def test_convert_says_what_it_leaves_out(run_command, tmp_path, folder):
    (folder / "modeling_own.py").touch()
    code, _, err = run_command("convert", folder, tmp_path / "out")
    assert code == 0
    assert "hybrid-jax: left out: modeling_own.py: code that comes with a model is not run\n" in err


# --- the hub's cache ------------------------------------------------------------------------------


@pytest.fixture
def cached(tmp_path, folder):
    """The model in a cache of the hub, with links into its blobs."""
    cache = tmp_path / "hub" / "models--org--name"
    (cache / "blobs").mkdir(parents=True)
    snapshot = cache / "snapshots" / "ab12"
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(folder.iterdir())):
        shutil.copyfile(file, cache / "blobs" / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    return cache


def test_a_folder_of_the_hubs_cache_stands_for_its_snapshot(cached, folder):
    expected = load_model(folder)
    for place in (cached / "snapshots" / "ab12", cached, cached / "snapshots"):
        config, params = load_model(place)
        assert config == expected[0] and same_bits(params, expected[1])
        assert inspect_model(place)["family"] == "llama"
        assert as_tokenizer(place).vocab_size == 3
    (cached / "snapshots" / "cd34").mkdir()
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("ab12\n")
    assert load_config(cached) == expected[0]


def test_a_cache_that_does_not_say_which_model_is_meant_is_named(run_command, cached):
    (cached / "snapshots" / "cd34").mkdir()
    said = one_line(run_command, "inspect", cached)
    assert "does not say which of its snapshots is meant" in said and "(it has: ab12, cd34)" in said
    said = one_line(run_command, "generate", "a", "--model", cached.parent)
    assert "is a cache of the hub; name a model in it: models--org--name" in said
    shutil.rmtree(cached / "snapshots")
    assert "is a folder of the hub's cache without snapshots" in one_line(
        run_command, "inspect", cached
    )


@pytest.mark.parametrize(
    "given, name",
    [
        ("org/name", "org/name"),
        ("hf://org/name", "org/name"),
        ("https://hub.example/org/name-7B/", "org/name-7B"),
        ("../name", None),
        ("/org/name", None),
        ("name", None),
    ],
)
def test_a_name_on_a_hub_is_shown_as_it_was_given(run_command, given, name):
    assert hub_name(given) == name
    if name is not None:
        said = one_line(run_command, "generate", "a", "--model", given)
        assert f"{given} does not exist" in said and f"`hf download {name} --local-dir DIR`" in said
        said = one_line(run_command, "inspect", given)
        assert given in said and f"`hf download {name} config.json" in said


def test_the_page_lists_every_file_that_goes_along():
    """In a row of its table that says so."""
    page = Path(__file__).parents[2] / "docs" / "how_to" / "run_my_checkpoint.md"
    rows = [line for line in page.read_text().splitlines() if line.endswith("| yes |")]
    for known in FILES:
        if known.role == "carried":
            assert any(f"`{known.pattern}`" in row for row in rows), known.pattern
