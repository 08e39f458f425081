"""A tokenizer.json that native code cannot bear ends in one line that names it: no panic, no signal, no gigabytes."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from pathlib import Path

import pytest

from hybrid_jax.text.tokenizer import Tokenizer
from hybrid_jax.text.tokenizer_bounds import check_tokenizer_bounds

VOCAB = {"a": 0, "b": 1, "ab": 2}


def tokenizer_json(**fields):
    model = {"type": "BPE", "vocab": VOCAB, "merges": [["a", "b"]]} | fields.pop("model", {})
    parts = dict.fromkeys(("normalizer", "pre_tokenizer", "post_processor", "decoder"))
    return {"version": "1.0", "added_tokens": []} | parts | fields | {"model": model}


def table(data):
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(data).decode()}


def replaces(number, content, pattern):
    one = {"type": "Replace", "pattern": pattern, "content": content}
    return {"type": "Sequence", "normalizers": [one] * number}


SPLIT = {"type": "Split", "behavior": "Isolated", "invert": False}
CASES = {
    "a table without its size": (
        {"normalizer": table(b"")},
        "precompiled_charsmap in its normalizer",
    ),
    "a table of random bytes": ({"normalizer": table(bytes(range(200)))}, "is damaged"),
    "a table that leads nowhere": (
        {"normalizer": table(b"\4\0\0\0\xff\xff\xff\xffabc")},
        "the library tokenizers fails at it: index out of bounds",
    ),
    "replacements of replacements": (
        {"normalizer": replaces(9, "aaaaaaaaaa", {"Regex": "."})},
        "the replacements of its normalizer lengthen a text up to 2357947691 times, the limit is 10000",
    ),
    "replacements of nothing": (
        {"normalizer": replaces(30, "a", {"Regex": "(?=.)"})},
        "lengthen a text up to 1073741824 times",
    ),
    "a decoder that lengthens": (
        {
            "decoder": {
                "type": "Sequence",
                "decoders": replaces(9, "b" * 20, {"String": "b"})["normalizers"],
            }
        },
        "the replacements of its decoder",
    ),
    "a long beginning": (
        {"normalizer": {"type": "Prepend", "prepend": "a" * 20_000}},
        "prepend in its normalizer has 20000 characters, the limit is 10000",
    ),
    "many components": (
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}] * 2000}},
        "its normalizer has 2001 components, the limit is 1000",
    ),
    "a far id": (
        {"model": {"vocab": VOCAB | {"c": 2**32 - 2}}},
        "it has a token with the id 4294967294, the limit is 10000000",
    ),
    "a far added id": ({"added_tokens": [{"id": 2**31, "content": "<x>"}]}, "the id 2147483648"),
    "a merge shorter than its prefix": (
        {"model": {"continuing_subword_prefix": "#" * 9}},
        "the library tokenizers fails at it: range end index",
    ),
    "a template of unknown tokens": (
        {
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "[CLS]", "type_id": 0}}],
                "pair": [],
                "special_tokens": {},
            }
        },
        "the library tokenizers fails at it: no entry found for key",
    ),
    "pieces of no letters": ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "non-zero"),
    "brackets in brackets": (
        {"pre_tokenizer": SPLIT | {"pattern": {"Regex": "(" * 50_000 + ")" * 50_000}}},
        "parse depth limit over",
    ),
    "wrong types": ({"model": {"vocab": []}}, "invalid type: sequence, expected a map"),
}


def write(folder, data):
    data = data if isinstance(data, bytes) else json.dumps(data).encode()
    (folder / "tokenizer.json").write_bytes(data)
    return folder


@pytest.mark.parametrize("case", CASES)
def test_a_file_that_would_end_the_process_is_refused_by_name(case, tmp_path):
    fields, message = CASES[case]
    write(tmp_path, tokenizer_json(**fields))
    with pytest.raises(ValueError) as raised:
        Tokenizer.from_directory(tmp_path)
    said = str(raised.value)
    assert said.startswith(f"{tmp_path}/tokenizer.json: not a tokenizer that can be read: ")
    assert message in said and "\n" not in said


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[]",
        b"[" * 200_000,
        b'{"normalizer":' * 50_000,
        b"\xff\xfe{",
        b'{"a" 1}',
        b"{},",
    ],
    ids=lambda data: str(data[:9]),
)
def test_what_is_no_tokenizer_is_refused_by_name(data, tmp_path):
    with pytest.raises(ValueError, match=r"tokenizer\.json: not a tokenizer that can be read: "):
        Tokenizer.from_directory(write(tmp_path, data))


def test_a_part_behind_the_model_is_looked_at_too():
    first = tokenizer_json()
    del first["normalizer"]
    with pytest.raises(ValueError, match="is damaged"):
        check_tokenizer_bounds(json.dumps(first | {"normalizer": table(b"")}))
    integer = '{"x": 1' + "0" * 5000 + ', "normalizer": ' + json.dumps(table(b"")) + "}"
    with pytest.raises(ValueError, match="is damaged"):
        check_tokenizer_bounds(integer)


def test_usual_parts_are_read(tmp_path):
    parts = [
        {"type": "Prepend", "prepend": "a"},
        replaces(1, "b", {"String": " "})["normalizers"][0],
    ]
    normalizer = {
        "type": "Sequence",
        "normalizers": [*parts, table((2048).to_bytes(4, "little") + bytes(2048) + b"a\0")],
    }
    padding = {
        "strategy": {"Fixed": 10**12},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "a",
    }
    folder = write(tmp_path, tokenizer_json(normalizer=normalizer, padding=padding))
    tokenizer = Tokenizer.from_directory(folder)
    assert tokenizer.encode("b") == [2]


def test_a_text_that_cannot_be_encoded_is_one_line(tmp_path):
    pattern = {
        "Regex": "(a*)*(a|aa)+(a*)*$b"
    }  # takes exponential time, which the library ends by a panic
    write(tmp_path, tokenizer_json(pre_tokenizer=SPLIT | {"pattern": pattern}))
    tokenizer = Tokenizer.from_directory(tmp_path)
    with pytest.raises(
        ValueError, match="^tokenizer: 'aaaaaaaaaaaa.*cannot be encoded: .*retry-limit"
    ):
        tokenizer.encode("a" * 60)
    model = {"type": "WordLevel", "vocab": VOCAB, "unk_token": "?"}
    write(tmp_path, tokenizer_json() | {"model": model})
    with pytest.raises(ValueError, match="^tokenizer: 'xyz' cannot be encoded: WordLevel error"):
        Tokenizer.from_directory(tmp_path).encode("xyz")


def test_the_command_line_says_it_in_one_line(tmp_path):
    bundled = Path(sys.modules["hybrid_jax"].__file__).parent / "bundled"
    for file in bundled.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "tokenizer.json").unlink()
    write(tmp_path, tokenizer_json(normalizer=table(b"")))
    command = [sys.executable, "-m", "hybrid_jax", "generate", "a", "--model", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "tokenizer.json: not a tokenizer that can be read: precompiled_charsmap" in done.stderr
