"""Traces that cannot be read: every message names the file, the line and what was wrong there."""

from __future__ import annotations

import gzip
import json
import re

import pytest

from hybrid_jax.sim.prefix_cache.traces import BadTrace, read_trace
from tests.sim.tiny import BLOCKS, SEGMENTS, TOKENS

WRONG = {
    "no JSON": ("{", "must be one JSON object, Expecting property name enclosed in double quotes at column 2"),
    "two objects": ("{} {}", "must be one JSON object, Extra data at column 4"),
    "a list": ("[]", "must be one JSON object, got list"),
    "too deep": ("[" * 100_000, "must be one JSON object, got one that is nested too deep"),
    "no form": (
        {"session_id": 1, "prompt": "x"},
        "must have 'in' (segments), 'input_tokens' (tokens) or 'hash_ids' (blocks), got ['prompt', 'session_id']",
    ),
    "no output": ({"in": [[1, 2]]}, "must have the key 'out'"),
    "no output tokens": ({"input_tokens": [1]}, "must have the key 'output_tokens'"),
    "no session": (TOKENS, "session_id", "must have the key 'session_id'"),
    "no turn": (TOKENS, "turn_id", "must have the key 'turn_id'"),
    "no time": (SEGMENTS, "ts", "must have the key 'ts'"),
    "no length": (BLOCKS, "input_length", "must have the key 'input_length'"),
    "no output length": (BLOCKS, "output_length", "must have the key 'output_length'"),
    "no timestamp": (BLOCKS, "timestamp", "must have the key 'timestamp'"),
    "empty prompt": (TOKENS | {"input_tokens": []}, "a prompt must hold at least one token, got none"),
    "empty segments": (SEGMENTS | {"in": [[4, 0]]}, "a prompt must hold at least one token, got none"),
    "session": (TOKENS | {"session_id": [1]}, "session_id must be a number or a name, got [1]"),
    "turn": (TOKENS | {"turn_id": 1.5}, "turn_id must be a whole number of at least 0, got 1.5"),
    "turn below 0": (TOKENS | {"turn_id": -1}, "turn_id must be a whole number of at least 0, got -1"),
    "turn true": (TOKENS | {"turn_id": True}, "turn_id must be a whole number of at least 0, got True"),
    "time as text": (TOKENS | {"ts": "0"}, "ts must be a time of at least 0, got '0'"),
    "time below 0": (SEGMENTS | {"ts": -0.5}, "ts must be a time of at least 0, got -0.5"),
    "no number": (SEGMENTS | {"ts": float("nan")}, "ts must be a time of at least 0, got nan"),
    "endless": (BLOCKS | {"timestamp": float("inf")}, "timestamp must be a time of at least 0, got inf"),
    "segments as text": (SEGMENTS | {"in": "abc"}, "in must be a list of segments, got 'abc'"),
    "a bare segment": (SEGMENTS | {"in": [7]}, "in: a segment is [id, length] or with an offset, got 7"),
    "a segment of one": (
        SEGMENTS | {"out": [[7]]},
        "out: a segment is [id, length] or with an offset, got [7]",
    ),
    "segment id": (SEGMENTS | {"in": [["a", 2]]}, "in: id must be a whole number of at least 0, got 'a'"),
    "length": (SEGMENTS | {"in": [[1, -2]]}, "in: length must be a whole number of at least 0, got -2"),
    "offset": (
        SEGMENTS | {"out": [[1, 2, 0.5]]},
        "out: offset must be a whole number of at least 0, got 0.5",
    ),
    "too long": (SEGMENTS | {"in": [[1, 2**20, 1]]}, "in: a segment has at most 1048576 tokens, got 1048577"),
    "tokens as text": (TOKENS | {"input_tokens": "ab"}, "input_tokens must be a list of token ids, got ab"),
    "no tokens": (TOKENS | {"input_tokens": None}, "input_tokens must be a list of token ids, got None"),
    "halves": (TOKENS | {"output_tokens": [1.5]}, "output_tokens must be a list of token ids, got [1.5]"),
    "true": (TOKENS | {"input_tokens": [True, 1]}, "input_tokens must be a list of token ids, got [True, 1]"),
    "below 0": (TOKENS | {"input_tokens": [4, -1]}, "input_tokens must be a list of token ids, got [4, -1]"),
    "above int32": (
        TOKENS | {"input_tokens": [2**31]},
        "input_tokens must be a list of token ids, got [2147483648]",
    ),
    "above int64": (TOKENS | {"input_tokens": [10**30]}, f"input_tokens must be a list of token ids, got [{10**30}]"),
    "flags": (TOKENS | {"input_tokens": [True]}, "input_tokens must be a list of token ids, got [True]"),
    "nested": (TOKENS | {"input_tokens": [[1], [2]]}, "input_tokens must be a list of token ids, got [[1], [2]]"),
    "unequal": (TOKENS | {"input_tokens": [1, [2]]}, "input_tokens must be a list of token ids, got [1, [2]]"),
    "no blocks": (BLOCKS | {"hash_ids": 3}, "hash_ids must be a list of block ids, got 3"),
    "block id": (BLOCKS | {"hash_ids": [1, "b"]}, "hash_ids must be a whole number of at least 0, got 'b'"),
    "no input": (BLOCKS | {"input_length": 0}, "input_length must be a whole number of at least 1, got 0"),
    "output": (BLOCKS | {"output_length": -1}, "output_length must be a whole number of at least 0, got -1"),
    "too few blocks": (
        BLOCKS | {"input_length": 1025},
        "input_length 1025 takes 3 blocks of 512 tokens, got 2 hash_ids",
    ),
    "too many blocks": (
        BLOCKS | {"input_length": 512},
        "input_length 512 takes 1 blocks of 512 tokens, got 2 hash_ids",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_bad_line_is_named_with_its_number_and_reason(tmp_path, case):
    entry, *missing, reason = WRONG[case]
    if missing:
        entry = {key: value for key, value in entry.items() if key != missing[0]}
    path = tmp_path / "bad.jsonl"
    bad = entry if isinstance(entry, str) else json.dumps(entry)
    path.write_text(json.dumps(TOKENS) + "\n\n" + bad + "\n")
    with pytest.raises(BadTrace) as error:
        read_trace(path)
    assert str(error.value) == f"{path}, line 3: {reason}"


@pytest.mark.parametrize("text", ["", "\n\n"])
def test_a_file_without_requests_is_an_error(tmp_path, text):
    path = tmp_path / "none.jsonl"
    path.write_text(text)
    with pytest.raises(
        BadTrace, match=re.escape("none.jsonl: a trace must hold at least one request, got none")
    ):
        read_trace(path)


def test_a_missing_file_is_an_error_that_names_it(tmp_path):
    with pytest.raises(FileNotFoundError) as error:
        read_trace(tmp_path / "nowhere.jsonl.gz")
    assert error.value.filename == str(tmp_path / "nowhere.jsonl.gz")


def zipped() -> bytes:
    lines = (json.dumps(TOKENS | {"session_id": i, "input_tokens": [i, 7 * i]}) for i in range(500))
    return gzip.compress("\n".join(lines).encode())


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"{}\n", "Not a gzipped file"),
        (zipped()[:500], "ended before the end-of-stream marker"),
        (zipped()[:10] + b"\x07" * 40, "invalid block type"),
        (zipped()[:-8] + b"\0" * 8, "CRC check failed"),
        (gzip.compress(b"\xff\xfe"), "can't decode byte 0xff"),
    ],
    ids=["plain", "cut", "garbled", "sum", "bytes"],
)
def test_a_broken_archive_is_an_error_that_names_it(tmp_path, content, reason):
    path = tmp_path / "broken.jsonl.gz"
    path.write_bytes(content)
    with pytest.raises(BadTrace, match=r"/broken\.jsonl\.gz: cannot be read as text: .*" + reason):
        read_trace(path)


def test_a_plain_file_that_is_no_text_is_an_error_that_names_it(tmp_path):
    path = tmp_path / "image.jsonl"
    path.write_bytes(b"\x89PNG\r\n")
    with pytest.raises(BadTrace, match=r"/image\.jsonl: cannot be read as text: .*byte 0x89"):
        read_trace(path)
