"""Lines of a batch file are computed along the tree of their prefixes, a block at a time, and written in order."""

from __future__ import annotations

import random

import numpy as np
import pytest

from hybrid_jax import LLM, run_batch
from hybrid_jax.api import starting
from hybrid_jax.batch import run as run_module
from hybrid_jax.batch.requests import BatchRequest
from hybrid_jax.batch.responses import AnswerIds
from hybrid_jax.batch.run import Ahead, Entry
from tests.batch.batch_files import SeededEngine, answers, ids, line, write
from tests.drawing import left_to_all
from tests.tiny_models import VOCAB, tiny_model


@pytest.fixture
def make_seeded(make_llm, monkeypatch):
    monkeypatch.setattr(starting, "Engine", SeededEngine)
    return make_llm


@pytest.fixture
def file_order(monkeypatch):
    """Called, it makes runs compute lines in the order of the file."""

    def keep(prompts, grain):
        return list(range(len(prompts)))

    return lambda: monkeypatch.setattr(run_module, "prefix_order", keep)


def shuffled(num_documents, num_questions, **body):
    """One line for each question about each document, in random order; its custom_id is "document-question"."""
    lines = [
        line(f"{d}-{q}", prompt=chr(65 + d) * 64 + f"{q}", **body)
        for d in range(num_documents)
        for q in range(num_questions)
    ]
    random.Random(1).shuffle(lines)
    return lines


def first_appearances(values):
    return list(dict.fromkeys(values))


def started(llm):
    """First letters of the prompts in the order the engine got them, a run of equal ones as one."""
    letters = [chr(request.prompt[0]) for request in llm._engine.added]
    return [a for a, b in zip(letters, [None, *letters], strict=False) if a != b]


def test_each_document_is_worked_off_before_the_next(make_seeded, files):
    source, output = files
    lines = shuffled(9, 7)
    write(source, lines)
    llm = make_seeded(max_rows=2)
    run_batch(source, output, llm)
    assert started(llm) == first_appearances(entry["body"]["prompt"][0] for entry in lines)
    assert ids(output) == [entry["custom_id"] for entry in lines]


def test_the_order_changes_no_answer(make_seeded, files, file_order):
    source, output = files
    write(source, shuffled(9, 7, temperature=1, n=2))
    run_batch(source, output, make_seeded(max_rows=2))
    file_order()
    run_batch(source, output.with_name("other.jsonl"), make_seeded(max_rows=5))
    assert answers(output) == answers(output.with_name("other.jsonl"))


def test_without_a_cache_the_order_is_that_of_the_file(make_seeded, files):
    source, output = files
    lines = shuffled(9, 7)
    write(source, lines)
    llm = make_seeded(max_rows=2, cache="off")
    run_batch(source, output, llm)
    found = ["".join(map(chr, request.prompt)) for request in llm._engine.added]
    assert found == [entry["body"]["prompt"] for entry in lines]


def test_a_line_of_several_prompts_goes_where_its_first_one_belongs(make_seeded, files):
    source, output = files
    a, b = "A" * 64, "B" * 64
    write(source, [line("0", prompt=a), line("1", prompt=b), line("2", prompt=[a + "2", b + "2"])])
    llm = make_seeded()
    run_batch(source, output, llm)
    prompts = ["".join(map(chr, request.prompt)) for request in llm._engine.added]
    assert prompts == [a, a + "2", b + "2", b]
    assert ids(output) == ["0", "1", "2"]


def test_blocks_grow_and_the_rows_stay_busy(make_seeded, files, monkeypatch):
    """The next block is what was read while the last one was computed, and is there when that one is started."""
    source, output = files
    write(source, shuffled(20, 20))
    monkeypatch.setattr(run_module, "READ_LINES", 16)
    blocks, order, idle = [], run_module.prefix_order, []
    monkeypatch.setattr(
        run_module,
        "prefix_order",
        lambda prompts, grain: (blocks.append(len(prompts)), order(prompts, grain))[1],
    )
    llm = make_seeded(max_rows=2, steps_per_dispatch=4)
    engine, step = llm._engine, llm._engine.step

    def watching():
        if len(engine.requests) < 2 and len(engine.added) < 400:
            idle.append(engine.num_steps)
        return step()

    engine.step = watching
    run_batch(source, output, llm)
    assert blocks[0] == 16
    assert blocks[-2] > 3 * blocks[0]
    assert sum(blocks) == 400
    assert idle == []


@left_to_all
def test_a_tiny_memory_is_enough_for_shuffled_documents(files, file_order):
    """15 frames of 16 tokens hold less than two documents of 128 tokens; 12 documents with 6 questions each."""
    random_ = random.Random(0)
    documents = [[random_.randrange(VOCAB) for _ in range(128)] for _ in range(12)]
    lines = [
        line(f"{d}-{q}", prompt=[*document, q, d, 5], max_tokens=2, temperature=0)
        for d, document in enumerate(documents)
        for q in range(6)
    ]
    random_.shuffle(lines)
    source, output = write(files[0], lines), files[1]
    other = output.with_name("file_order.jsonl")
    with LLM.from_params(
        *tiny_model("bamba"),
        **{"max_rows": 2, "max_model_len": 192, "memory": "160KiB", "quiet": True},
        **{"prefill_tokens": 64, "steps_per_dispatch": 4},
    ) as llm:
        along_tree = run_batch(source, output, llm)
        llm.reset_prefix_cache()
        file_order()
        as_given = run_batch(source, other, llm)
    ideal = 5 / 6 * 128 / 131  # each document computed once
    assert along_tree.hit_rate > 0.95 * ideal
    assert as_given.hit_rate < 0.25 * ideal
    assert answers(output) == answers(other)


# --- what is read ahead ---------------------------------------------------------------------------


def entry(*lengths, place=0, num_bytes=1):
    """A line of prompts of that many tokens, each of them `place`."""
    prompts = [np.full(length, place, np.int32) for length in lengths]
    request = BatchRequest(
        url="", model=None, prompts=prompts, breakpoints=[], thoughts=[], params=[]
    )
    made = Entry(number=place, num_bytes=num_bytes, ids=AnswerIds("", place))
    made.request = request
    return made


def test_text_and_tokens_are_both_bounded(monkeypatch):
    monkeypatch.setattr(run_module, "MAX_BYTES", 400)
    for held in (entry(50, 50), entry(1, num_bytes=400)):
        ahead = Ahead(32)
        ahead.add(entry(1))
        assert not ahead.full
        ahead.add(held)
        assert ahead.full
        ahead.pop()
        ahead.pop()
        assert not ahead.full
        assert ahead._num_bytes == len(ahead) == 0


def test_lines_are_bounded(monkeypatch):
    monkeypatch.setattr(run_module, "MAX_LINES", 2)
    ahead = Ahead(32)
    ahead.add(entry(1))
    assert not ahead.full
    ahead.add(entry(1))
    assert ahead.full
    ahead.pop()
    ahead.add(entry(1))
    assert ahead.full  # of two blocks


def test_a_block_is_what_was_read_since_the_last():
    ahead = Ahead(1)
    for place in (1, 2, 1):
        ahead.add(entry(3, place=place))
    assert ahead.pop().number == 1
    for place in (1, 3):
        ahead.add(entry(3, place=place))
    assert [ahead.pop().number for _ in range(len(ahead))] == [1, 2, 1, 3]
