"""What is read, what is held out, and that every byte of an epoch is seen once."""

from __future__ import annotations

import numpy as np
import pytest

from hybrid_jax.train.data import (
    END,
    PAD,
    Batches,
    Document,
    is_held_out,
    read_corpus,
    segments,
)

HELD_OUT_NAME = next(f"kept_{i}.py" for i in range(1000) if is_held_out(f"kept_{i}.py"))
TRAIN_NAMES = [name for i in range(100) if not is_held_out(name := f"seen_{i}.py")]


def write(folder, name, text):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def body(word, lines=10):
    return "".join(f"the_{word}_of_line_{line} = {line}\n" for line in range(lines))


def test_split_depends_on_the_path_alone_and_takes_about_the_share():
    names = [f"package_{i % 7}/module_{i}.py" for i in range(5000)]
    share = np.mean([is_held_out(name) for name in names])
    assert 0.02 < share < 0.04
    assert not any(is_held_out(name, 0.0) for name in names)
    assert all(is_held_out(name, 1.0) for name in names)


def test_a_held_out_file_of_another_version_does_not_reach_training(tmp_path):
    new, old = tmp_path / "new", tmp_path / "old"
    write(new, HELD_OUT_NAME, body("first"))
    write(new, TRAIN_NAMES[0], body("second"))
    write(old, HELD_OUT_NAME, body("first") + "one_more_line_in_the_old_one = 1\n")
    write(old, TRAIN_NAMES[1], body("first"))  # the same content under another name
    write(old, TRAIN_NAMES[2], body("first") + body("third", 3))  # most of it
    write(old, TRAIN_NAMES[3], body("first", 3) + body("third", 10))  # some of it
    corpus = read_corpus([new, old])
    assert [d.name for d in corpus.held_out] == [HELD_OUT_NAME]
    assert corpus.held_out[0].content == body("first").encode()
    assert {d.name for d in corpus.train} == {TRAIN_NAMES[0], TRAIN_NAMES[3]}
    assert corpus.copies == (TRAIN_NAMES[2],)
    assert corpus.duplicates == 2


def test_installed_packages_and_files_that_are_not_utf8_are_skipped(tmp_path):
    write(tmp_path, HELD_OUT_NAME, body("first"))
    write(tmp_path, TRAIN_NAMES[0], body("second"))
    write(tmp_path, f"site-packages/{TRAIN_NAMES[1]}", body("third"))
    write(tmp_path, TRAIN_NAMES[2], "")
    (tmp_path / TRAIN_NAMES[3]).write_bytes(b"# \xe9t\xe9 in Latin-1\n")
    corpus = read_corpus([tmp_path])
    assert [d.name for d in corpus.train] == [TRAIN_NAMES[0]]


def test_nothing_to_train_on_is_an_error_with_the_counts(tmp_path):
    write(tmp_path, TRAIN_NAMES[0], body("only"))
    with pytest.raises(ValueError, match=r"got 1 and 0 from 1 files \(.py\)"):
        read_corpus([tmp_path])
    with pytest.raises(ValueError, match="must be a directory, got '.*nowhere', where nothing is"):
        read_corpus([tmp_path / "nowhere"])
    with pytest.raises(ValueError, match="must be a directory, got '.*', where a file is"):
        read_corpus([tmp_path / TRAIN_NAMES[0]])


def test_of_few_files_one_is_held_out(tmp_path):
    for number, name in enumerate(TRAIN_NAMES[:3]):
        write(tmp_path, name, body(f"module{number}"))
    corpus = read_corpus([tmp_path])
    assert len(corpus.held_out) == 1 and len(corpus.train) == 2
    assert read_corpus([tmp_path]).held_out == corpus.held_out


def documents(count=40, size=60):
    rng = np.random.default_rng(0)
    return tuple(
        Document(f"{i}.py", rng.integers(0, 256, size + i, np.uint8).tobytes())
        for i in range(count)
    )


@pytest.mark.parametrize("row_lens", [(16,), (4,), (4, 16), (4, 8, 16)])
def test_an_epoch_sees_every_block_once_whatever_the_row_lengths(row_lens):
    batches = Batches(documents(), seed=3, batch=2, context=16)
    pairs = []
    for step in range(batches.groups_per_epoch * batches.steps_per_group):
        row_len = row_lens[step // batches.steps_per_group % len(row_lens)]
        rows = batches(step, row_len)
        assert rows.shape == (2 * 16 // row_len, row_len + 1)
        pairs += list(zip(rows[:, :-1].ravel(), rows[:, 1:].ravel(), strict=True))
    whole = Batches(documents(), seed=3, batch=32, context=16)
    expected = []
    for group in range(whole.groups_per_epoch):
        rows = whole(group, 16)
        expected += list(zip(rows[:, :-1].ravel(), rows[:, 1:].ravel(), strict=True))
    assert sorted(pairs) == sorted(expected)
    tokens = batches.num_tokens
    assert len(pairs) == batches.groups_per_epoch * 32 * 16 > tokens - 33 * 16


def test_a_batch_follows_from_seed_and_step_alone():
    one = Batches(documents(), seed=3, batch=2, context=16)
    for step in range(100):
        one(step, 8)
    other = Batches(documents(), seed=3, batch=2, context=16)
    assert 100 > one.groups_per_epoch * one.steps_per_group  # the second epoch too
    assert np.array_equal(one(100, 8), other(100, 8))
    assert not np.array_equal(other(100, 8), Batches(documents(), 4, 2, 16)(100, 8))


def test_too_little_text_is_an_error_with_the_count():
    with pytest.raises(ValueError, match="32 blocks of 16 tokens, got 123 tokens"):
        Batches(documents(count=2), seed=0, batch=2, context=16)
    with pytest.raises(ValueError, match="batch must divide 32, got 3"):
        Batches(documents(), seed=0, batch=3, context=16)


def test_segments_cover_each_document_and_never_join_two():
    texts = (Document("a", b"0123456789"), Document("b", b"xyz"))
    tokens, lengths = segments(texts, 4)
    assert lengths.tolist() == [4, 4, 2, 3]
    assert tokens[0].tolist() == [END, *b"0123"]
    assert tokens[1].tolist() == [*b"34567"]
    assert tokens[2].tolist() == [*b"789", PAD, PAD]
    assert tokens[3].tolist() == [END, *b"xyz", PAD]
    assert segments(texts, 4, limit=2)[1].tolist() == [4, 3]
    assert segments(texts, 4, full=True)[1].tolist() == [4, 4]
