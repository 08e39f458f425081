"""Trace files of all three forms, beside tokens computed in plain Python integers."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pytest

from hybrid_jax.sim.prefix_cache import traces
from hybrid_jax.sim.prefix_cache.traces import BLOCK_TOKENS, VOCAB, Segments, read_trace
from tests.sim.tiny import BLOCKS, SEGMENTS, TOKENS

MASK = (1 << 64) - 1


def splitmix64(seed: int) -> int:
    x = (seed + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def expanded(segment: int, length: int, offset: int = 0, vocab: int = VOCAB) -> list[int]:
    seeds = range(segment * 2**20 + offset, segment * 2**20 + offset + length)
    return [3 + splitmix64(seed & MASK) % (vocab - 3) for seed in seeds]


@pytest.fixture
def written(tmp_path):
    """The path of a file with one of these objects a line."""

    def write(*entries, name="trace.jsonl"):
        path = tmp_path / name
        text = "".join(json.dumps(entry) + "\n" for entry in entries)
        path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
        return path

    return write


def test_splitmix64_gives_the_published_first_value():
    assert splitmix64(0) == 0xE220A8397B1DCDAF


@pytest.mark.parametrize("segment", [0, 5, 10_002_426, 2**44 - 1, 2**44, 2**70 + 3])
def test_a_segment_expands_to_splitmix64_of_its_number_and_place(segment):
    found = Segments().tokens([[segment, 5], [segment, 3, 1000]], "in")
    assert found.dtype == np.int32
    assert found.tolist() == expanded(segment, 5) + expanded(segment, 3, 1000)


def test_the_vocabulary_bounds_the_tokens_of_a_segment(monkeypatch):
    monkeypatch.setattr(traces, "VOCAB", 10)
    found = Segments().tokens([[4, 200]], "in")
    assert found.tolist() == expanded(4, 200, vocab=10)
    assert set(found.tolist()) == set(range(3, 10))


def test_a_segment_that_was_asked_for_in_part_grows():
    segments = Segments()
    assert segments.tokens([[4, 2]], "in").tolist() == expanded(4, 2)
    assert segments.tokens([[4, 9]], "in").tolist() == expanded(4, 9)
    assert segments.tokens([[4, 3, 1]], "in").tolist() == expanded(4, 3, 1)


def test_a_segment_may_be_as_long_as_its_room():
    found = Segments().tokens([[1, 2, 2**20 - 2]], "in")
    assert found.tolist() == expanded(1, 2, 2**20 - 2)


def test_a_request_of_segments_is_read(written):
    (found,) = read_trace(written(SEGMENTS))
    assert (found.session_id, found.turn_id, found.arrival_s) == (7, 2, 1.5)
    assert found.prompt.tolist() == expanded(5, 3) + expanded(9, 2, 4)
    assert found.output.tolist() == expanded(6, 1)


def test_a_request_of_token_ids_is_read(written):
    (found,) = read_trace(written(TOKENS))
    assert (found.session_id, found.turn_id, found.arrival_s) == ("a", 0, 2.0)
    assert (found.prompt.tolist(), found.output.tolist()) == ([3, 1, 2], [9])
    assert found.prompt.dtype == found.output.dtype == np.int32


def test_a_request_without_an_output_is_read(written):
    found = read_trace(written(TOKENS | {"output_tokens": []}, SEGMENTS | {"out": []}))
    assert [len(request.output) for request in found] == [0, 0]


def test_a_request_of_blocks_has_the_stated_lengths_and_its_time_in_seconds(written):
    (found,) = read_trace(written(BLOCKS))
    assert (len(found.prompt), len(found.output), found.arrival_s) == (700, 5, 2.5)


def test_equal_blocks_are_equal_tokens_and_others_are_not(written):
    longer = BLOCKS | {"input_length": 1024}
    other = BLOCKS | {"hash_ids": [3, 8]}
    a, b, c = (request.prompt for request in read_trace(written(BLOCKS, longer, other)))
    assert (a == b[:700]).all()
    assert (c[BLOCK_TOKENS:] == b[:188]).all()
    assert (a[:BLOCK_TOKENS] != c[:BLOCK_TOKENS]).mean() > 0.99


def test_outputs_beside_blocks_are_unique(written):
    a, b = (request.output for request in read_trace(written(BLOCKS, BLOCKS)))
    assert (a != b).all()


@pytest.mark.parametrize(
    ("length", "blocks"), [(1, 1), (511, 1), (512, 1), (513, 2), (1024, 2), (1025, 3)]
)
def test_the_last_block_may_be_begun(written, length, blocks):
    entry = BLOCKS | {"input_length": length, "hash_ids": list(range(blocks))}
    (found,) = read_trace(written(entry))
    assert len(found.prompt) == length


def test_a_gzipped_file_reads_like_a_plain_one(written):
    plain = read_trace(written(SEGMENTS, TOKENS))
    zipped = read_trace(written(SEGMENTS, TOKENS, name="trace.jsonl.gz"))
    assert [r.prompt.tolist() for r in plain] == [r.prompt.tolist() for r in zipped]


def test_a_limit_reads_so_many_requests_and_nothing_behind_them(written, tmp_path):
    path = written(SEGMENTS, TOKENS)
    path.write_text(path.read_text() + "\nnot JSON\n")
    assert [r.session_id for r in read_trace(path, limit=2)] == [7, "a"]
    assert [r.session_id for r in read_trace(path, limit=1)] == [7]


def test_requests_keep_the_order_of_the_file(written):
    entries = [TOKENS | {"session_id": i, "ts": 9 - i} for i in range(5)]
    assert [r.session_id for r in read_trace(written(*entries))] == list(range(5))


def test_blank_lines_are_passed_over(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text("\n  \n" + json.dumps(TOKENS) + "\n\n")
    assert len(read_trace(path)) == 1


# requests, prompt tokens in millions, longest prompt, first prompt's length: what the README of the folder says.
SHIPPED = {
    "lmsys_s1_sps0.5": (1803, 10.97, 32_400, 45),
    "sharegpt_s1_sps1": (1115, 1.11, 2_500, 63),
    "swebench_s1_sps5_art10": (2647, 36.0, 30_900, 3549),
    "mooncake_conv_first1500": (1500, 20.98, None, 6758),
}


@pytest.mark.parametrize("name", SHIPPED)
def test_the_shipped_traces_are_what_their_readme_says(root, name):
    trace = read_trace(root / "benchmarks" / "traces" / f"{name}.seg.jsonl.gz")
    requests, millions, longest, first = SHIPPED[name]
    lengths = [len(request.prompt) for request in trace]
    assert (len(trace), lengths[0]) == (requests, first)
    assert sum(lengths) / 1e6 == pytest.approx(millions, rel=0.005)
    assert longest is None or max(lengths) == pytest.approx(longest, rel=0.005)
    arrivals = [request.arrival_s for request in trace]
    assert arrivals == sorted(arrivals)
