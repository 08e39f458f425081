"""Odd bytes in batch files: marks, line ends, lines too long, and 2,000 lines of nonsense."""

from __future__ import annotations

import json
import random

import pytest

from hybrid_jax import run_batch
from hybrid_jax.api import starting
from hybrid_jax.batch import input_file as input_module
from hybrid_jax.openai.fields import ELSEWHERE, FIELDS
from tests.batch.batch_files import CHAT, COMPLETIONS, SeededEngine, ids, line, read, write


def test_marks_line_ends_and_blank_lines_do_not_matter(llm, files):
    source, output = files
    one, two, three = (json.dumps(line(name)).encode() for name in ("a", "b", "c"))
    source.write_bytes(b"\xef\xbb\xbf" + one + b"\r\n\n  \t\r\n" + two + b"\n" + three)
    summary = run_batch(source, output, llm)
    assert ids(output) == ["a", "b", "c"]
    assert (summary.num_lines, summary.num_errors) == (3, 0)


def test_bytes_that_are_no_utf8_cost_one_line(llm, files):
    source, output = files
    good = json.dumps(line("a")).encode()
    source.write_bytes(good.replace(b'"ab"', b'"\xffb"') + b"\n" + good + b"\n\x00\n")
    run_batch(source, output, llm)
    first, second, third = read(output)
    at = good.index(b'"ab"') + 1
    assert first["error"]["message"] == f"line 1: not UTF-8: invalid start byte at byte {at}"
    assert first["custom_id"] is third["custom_id"] is None
    assert (second["custom_id"], second["error"]) == ("a", None)
    assert third["error"]["code"] == "invalid_json_line"


def test_error_lines_name_the_line_of_the_file(llm, files):
    source, output = files
    source.write_text("\n\n{}\n")
    run_batch(source, output, llm)
    assert read(output)[0]["error"]["message"].startswith("line 3: has no custom_id")


def test_lines_of_10_mb_are_answered(llm, files):
    source, output = files
    write(source, [line("a", metadata={"k": "x" * 10_000_000}), line("b", prompt=[97] * 2_500_000)])
    run_batch(source, output, llm)
    first, second = read(output)
    assert first["error"] is None
    assert "has 2500000 tokens and needs room for one more" in second["error"]["message"]


@pytest.mark.parametrize("end", ["\n", ""])
def test_a_line_longer_than_the_limit_is_skipped_without_being_held(llm, files, monkeypatch, end):
    source, output = files
    monkeypatch.setattr(input_module, "MAX_LINE_BYTES", 1000)
    fits = json.dumps(line("b", user="u"))
    fits = fits.replace('"u"', '"' + "u" * (1001 - len(fits)) + '"')
    assert len(fits) == 1000
    source.write_text("[" * 5000 + "\n" + fits + "\r\n" + fits.replace("u", "uu", 1) + end)
    run_batch(source, output, llm)
    assert [entry["error"] and entry["error"]["code"] for entry in read(output)] == [
        "line_too_long",
        None,
        "line_too_long",
    ]
    assert ids(output) == [None, "b", None]


def nonsense(random_):
    """One line that is not blank: an object with anything anywhere, or bytes of any kind."""
    values = [None, True, 0, -1, 3, 300, 1.5, 1e308, 10**30, "", "ab", "x" * 300, "\ud800", [], {}]
    values += [["a", 1], [[]], [[97]], {"type": "text"}, {"1": 2}, [None], [255], {"role": 1}]
    if random_.random() < 0.1:
        text = bytes(random_.randrange(256) for _ in range(random_.randint(1, 40)))
        return text.replace(b"\n", b"").replace(b"\r", b"").strip() or b"?"
    url = random_.choice([CHAT, COMPLETIONS])
    entry = line(random_.choice(["a", *(f"id-{random_.random()}" for _ in range(3))]), url)
    entry["body"]["max_tokens"] = random_.randint(1, 6)
    names = [*FIELDS, *ELSEWHERE[url], "strange", "prompt"]
    for _ in range(random_.choice([0, 0, 1, 1, 2])):
        entry["body"][random_.choice(names)] = random_.choice(values)
    if random_.random() < 0.1:
        entry[random_.choice([*entry, "strange"])] = random_.choice(values)
    text = json.dumps(entry, ensure_ascii=random_.random() < 0.5).encode(errors="replace")
    if random_.random() < 0.1:
        at = random_.randrange(len(text))
        text = text[:at] + random_.choice([b"", b"\xff", b'"', b"}", b"\\u"]) + text[at + 1 :]
    return text


def test_2000_lines_of_nonsense_get_a_line_each(make_llm, monkeypatch, files):
    monkeypatch.setattr(starting, "Engine", SeededEngine)
    source, output = files
    random_ = random.Random(5)
    source.write_bytes(b"\n".join(nonsense(random_) for _ in range(2000)))
    summary = run_batch(source, output, make_llm())
    found = read(output)
    assert len(found) == summary.num_lines == 2000
    codes = [entry["response"]["status_code"] for entry in found]
    assert set(codes) == {200, 400}  # and no mistake of ours
    assert summary.num_errors == codes.count(400)
    assert 400 < summary.num_errors < 1700
    kinds = {entry["error"]["code"] for entry in found if entry["error"]}
    assert kinds >= {
        *("invalid_json_line", "invalid_value", "missing_required_parameter", "invalid_url"),
        *("invalid_method", "duplicate_custom_id", "unknown_parameter", "unsupported_parameter"),
        "context_length_exceeded",
    }
    for given, entry in zip(source.read_bytes().split(b"\n"), found, strict=True):
        if entry["error"] is None:
            assert json.loads(given)["custom_id"] == entry["custom_id"]
            assert all(choice["finish_reason"] for choice in entry["response"]["body"]["choices"])
