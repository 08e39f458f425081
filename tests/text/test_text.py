"""Incremental decoding and stop strings, against decoding and searching the whole text at once."""

from __future__ import annotations

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from hybrid_jax.text.incremental import MAX_TAIL, IncrementalDecoder, StopStrings

SAMPLE = "naïve 你好, wörld 🙂🙃!  def f(x):\n    return '\u00e9' # \u0301 combining\n" * 3


def byte_decode(ids):
    return bytes(ids).decode(errors="replace")


def byte_level_bpe():
    """A BPE over bytes, trained on the sample: tokens may hold parts of characters."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([SAMPLE], trainer)
    return tokenizer


def byte_fallback():
    """Words with a leading space mark, unknown characters as byte tokens, first space dropped."""
    words = ["<unk>", "\u2581def", "\u2581a", "a", "\u2581", "x", "y"]
    vocab = words + [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            vocab={word: index for index, word in enumerate(vocab)},
            merges=[],
            byte_fallback=True,
            unk_token="<unk>",
        )
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


def metaspace():
    """Words with a leading space mark; the decoder drops the first space it sees."""
    words = ["<unk>", "\u2581The", "\u2581cat", "\u2581sat", "s", "\u2581"]
    tokenizer = tokenizers.Tokenizer(
        models.Unigram([(word, -1.0) for word in words], unk_id=0, byte_fallback=False)
    )
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def pieces(decode, ids, prompt=()):
    decoder = IncrementalDecoder(decode, prompt)
    return [*[decoder.push(token) for token in ids], decoder.finish()]


def test_pieces_of_a_byte_level_tokenizer_join_to_the_whole_text():
    tokenizer = byte_level_bpe()
    ids = tokenizer.encode(SAMPLE).ids
    assert len(ids) > 60  # several cuts of the window
    assert "".join(pieces(tokenizer.decode, ids)) == SAMPLE


def test_no_piece_holds_a_part_of_a_character():
    for piece in pieces(byte_decode, SAMPLE.encode()):
        assert "\ufffd" not in piece
        assert len(piece) <= 1


def test_an_incomplete_character_at_the_end_becomes_a_replacement_character():
    assert pieces(byte_decode, "ab\U0001f642".encode()[:-1]) == ["a", "b", "", "", "", "\ufffd"]


def test_byte_fallback_tokens_join_across_tokens():
    tokenizer = byte_fallback()
    byte_of = {b: tokenizer.token_to_id(f"<0x{b:02X}>") for b in range(256)}
    ids = [1, 2, 3] + [byte_of[b] for b in "é你".encode()] + [2, 1] * 20 + [4, 5]
    assert "".join(pieces(tokenizer.decode, ids)) == tokenizer.decode(ids)
    assert tokenizer.decode(ids).startswith("def aaé你 a def")


@pytest.mark.parametrize("text", ["你好世界" * 30, "🙂🙃" * 60, "é你🙂" * 50, "ab" * 200])
def test_a_long_run_of_byte_tokens_is_given_out_by_whole_characters(text):
    """Its decoder replaces all bytes of a run as long as the last character is incomplete."""
    tokenizer, sizes = byte_fallback(), []
    ids = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in text.encode()]

    def decode(ids):
        sizes.append(len(ids))
        return tokenizer.decode(ids)

    given = pieces(decode, ids)
    assert [piece for piece in given if piece] == list(text)
    assert max(sizes) < 30
    cut = pieces(tokenizer.decode, ids[:-1])
    assert "".join(cut).rstrip("\ufffd") == text[:-1]
    assert len(cut[-1]) == len(text[-1].encode()) - 1


def test_long_garbage_is_given_out_and_costs_a_bounded_window():
    sizes = []

    def decode(ids):
        sizes.append(len(ids))
        return byte_decode(ids)

    text = "".join(pieces(decode, b"\xff" * 1000 + "é".encode()))
    assert max(sizes) <= MAX_TAIL
    assert text == "\ufffd" * 1000 + "é"


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=80))
def test_any_bytes_join_to_the_whole_text(data):
    assert "".join(pieces(byte_decode, data)) == byte_decode(data)


# --- after a prompt -------------------------------------------------------------------------------


@pytest.mark.parametrize("make, prompt_len", [(metaspace, 1), (metaspace, 40), (byte_fallback, 3)])
def test_the_space_after_the_prompt_is_kept(make, prompt_len):
    decode = make().decode
    prompt, ids = [1, 2, 3, 4, 2] * 8, [2, 3, 4, 2, 1] * 9
    prompt = prompt[:prompt_len]
    text = "".join(pieces(decode, ids, prompt))
    assert decode(prompt) + text == decode(prompt + ids)
    assert text.startswith(" ")
    assert "".join(pieces(decode, ids)) == text[1:]  # at the start of a text there is none


def test_only_the_end_of_a_prompt_is_decoded():
    sizes = []

    def decode(ids):
        sizes.append(len(ids))
        return byte_decode(ids)

    assert pieces(decode, b"ab", b"x" * 1000) == ["a", "b", ""]
    assert max(sizes) < 10


@pytest.mark.parametrize(
    "prompt, ids, text",
    [
        (b"a\xc3", b"\xa9b", "\u00e9b"),  # completed: the character belongs to the pieces
        (b"a\xf0\x9f", b"\x99\x82", "\U0001f642"),
        (b"a\xc3", b"b", "b"),  # never completed: the replacement character is the prompt's
        (b"a\xff\xff", b"\xffb", "\ufffdb"),
        (b"\xa9\xa9\xa9\xa9\xa9\xa9\xa9", "\u00e9".encode(), "\u00e9"),
        (b"abc", b"", ""),
        (b"a", b"\xc3", "\ufffd"),
    ],
)
def test_a_character_cut_by_the_end_of_the_prompt(prompt, ids, text):
    assert "".join(pieces(byte_decode, ids, prompt)) == text


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=20), st.text(max_size=40))
def test_a_prompt_of_whole_characters_changes_nothing_for_bytes(prompt, text):
    assert "".join(pieces(byte_decode, text.encode(), prompt.encode())) == text


# --- stop strings ---------------------------------------------------------------------------------


def naive(text, stops, include):
    """Reads one character after another; the longest stop string that ends there wins."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def run(parts, stops, include):
    machine, shown = StopStrings(stops, include=include), ""
    for part in parts:
        text, stop = machine.push(part)
        shown += text
        if stop is not None:
            return shown, stop
    return shown + machine.finish(), None


@settings(max_examples=500, deadline=None)
@given(
    st.lists(st.text("ab<", max_size=4), max_size=8),
    st.lists(st.text("ab<", min_size=1, max_size=4), max_size=3),
    st.booleans(),
)
def test_stop_strings_are_found_wherever_the_pieces_end(parts, stops, include):
    assert run(parts, stops, include) == naive("".join(parts), stops, include)


def test_many_stop_strings_cost_no_more_than_one():
    """One after the other, for each character, they would take hours."""
    stops = [f"{'ab' * 30}{number:04d}" for number in range(1000)]
    machine = StopStrings(stops)
    for _ in range(200_000):
        assert machine.push("ab")[1] is None
    assert machine.push("0")[1] is None
    assert machine.push("999 and more") == ("", "ab" * 30 + "0999")
    one = StopStrings(["a" * 65535 + "b"])
    assert "".join(one.push("a")[0] for _ in range(100_000)) == "a" * (100_000 - 65535)


def naive_with_hidden(parts, stops, include):
    """The same for parts of which some are hidden: they are searched, and then left out."""
    whole = "".join(text for text, _ in parts)
    hidden = [is_hidden for text, is_hidden in parts for _ in text]
    before, stop = naive(whole, stops, False)
    shown = (c for c, is_hidden in zip(before, hidden, strict=False) if not is_hidden)
    return "".join(shown) + (stop if stop and include else ""), stop


@settings(max_examples=500, deadline=None)
@given(
    st.lists(st.tuples(st.text("ab<", max_size=4), st.booleans()), max_size=8),
    st.lists(st.text("ab<", min_size=1, max_size=5), max_size=3),
    st.booleans(),
)
def test_stop_strings_are_found_in_what_is_hidden(parts, stops, include):
    machine, shown, stop = StopStrings(stops, include=include), "", None
    for text, hidden in parts:
        piece, stop = machine.push(text, hidden=hidden)
        shown += piece
        if stop is not None:
            break
    else:
        shown += machine.finish()
    assert (shown, stop) == naive_with_hidden(parts, stops, include)


@pytest.mark.parametrize("include, text", [(False, "say "), (True, "say STOP")])
def test_a_stop_string_across_pieces_ends_the_text(include, text):
    assert run(["say S", "TO", "P and more"], ["STOP"], include) == (text, "STOP")


def test_a_possible_start_is_held_back_and_given_out_when_it_is_none():
    machine = StopStrings(["\n\ndef"])
    assert [machine.push(p)[0] for p in ("x\n", "\nde", "l y")] == ["x", "", "\n\ndel y"]
    assert machine.push("\n") == ("", None)
    assert machine.finish() == "\n"
