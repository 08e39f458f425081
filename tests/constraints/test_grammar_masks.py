"""Masks against their definition: a token is allowed if some text of the language begins like that."""

from __future__ import annotations

import pytest

from hybrid_jax.config.sampling_params import SamplingParams
from hybrid_jax.constraints import Constraints
from tests.constraints.forms import after, config_of, form
from tests.constraints.vocabularies import Language, make_tokenizer
from tests.llms import byte_tokenizer

REGEXES = ("a*", "aab", "(ab|b)+0?", "a{2,3}b|0", "[ab]{1,4}", "(a|aa|b0)*0", "(aab)+", "a?b?0?")
TEXT_LENGTH = 4  # with a token of 3 letters and the rest of a word, this stays below LONGEST


def constraint_of(tokenizer, vocab_size=None, eos=None, constraints=None, **params):
    eos = (tokenizer.backend.token_to_id("<eos>"),) if eos is None else eos
    config = config_of(vocab_size or tokenizer.vocab_size, eos)
    params = SamplingParams(**params)
    stops = frozenset((*(() if params.ignore_eos else eos), *params.stop_token_ids))
    constraints = constraints or Constraints(tokenizer, config)
    return constraints.limits(0, params, stops).constraints[0]


def texts_of(tokenizer):
    vocab = tokenizer.backend.get_vocab(with_added_tokens=False)
    return {token: text for text, token in vocab.items()}


@pytest.mark.parametrize("pairs", [(), None], ids=["letters", "pairs"])
@pytest.mark.parametrize("regex", REGEXES)
def test_a_token_is_allowed_if_and_only_if_some_match_begins_so(regex, pairs):
    tokenizer = make_tokenizer() if pairs is None else make_tokenizer(pairs)
    language, texts, eos = Language(regex), texts_of(tokenizer), tokenizer.vocab_size - 1
    constraint = constraint_of(tokenizer, structured_outputs=form(regex=regex))
    waiting, num_checked = [[]], 0
    while waiting:
        output = waiting.pop()
        text = "".join(texts[token] for token in output)
        expected, found = language.allowed(text, texts), after(constraint, output)
        assert (eos in found) == (text in language.texts and bool(expected)), text
        found.discard(eos)
        if pairs is None and language.forced(text):
            # Where the text is certain, the tokenizer's own way to write it is enough.
            assert found <= expected and (found or not expected), text
        else:
            assert found == expected, text
        num_checked += 1
        waiting += [
            [*output, token] for token in found if len(text) + len(texts[token]) <= TEXT_LENGTH
        ]
    assert num_checked >= 2


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_stop_ids_are_allowed_where_the_text_may_end(ignore_eos):
    tokenizer = make_tokenizer()
    eos, special = tokenizer.vocab_size - 1, tokenizer.vocab_size  # the model has ids of its own
    constraint = constraint_of(
        tokenizer,
        vocab_size=40,
        structured_outputs=form(regex="a+0?"),
        stop_token_ids=[special],
        ignore_eos=ignore_eos,
    )
    a, zero, aa = 0, 2, 5
    ends = {special} if ignore_eos else {eos, special}
    assert after(constraint, []) & {eos, special} == set()
    assert after(constraint, [a]) >= ends | {a, zero, aa}
    assert after(constraint, [a]) & {eos, special} == ends
    assert after(constraint, [a, zero]) == set()  # complete
    assert after(constraint, [a, special]) == set()
    assert constraint.stuck is None


def test_an_end_token_with_a_text_is_no_part_of_the_text():
    tokenizer = make_tokenizer(())
    a, b = 0, 1
    free = constraint_of(tokenizer, eos=(), structured_outputs=form(regex="[ab]+"))
    ended_by_b = constraint_of(tokenizer, eos=(b,), structured_outputs=form(regex="[ab]+"))
    assert after(free, []) == {a, b} and after(free, [a]) == {a, b}
    assert after(ended_by_b, []) == {a} and after(ended_by_b, [a]) == {a, b}


def test_nothing_stops_before_min_tokens_but_a_complete_text():
    tokenizer = make_tokenizer(())
    a, eos = 0, tokenizer.vocab_size - 1
    constraint = constraint_of(tokenizer, structured_outputs=form(regex="a{1,4}"), min_tokens=3)
    assert [after(constraint, [a] * n) for n in range(5)] == [{a}, {a}, {a}, {a, eos}, set()]
    short = constraint_of(tokenizer, structured_outputs=form(regex="aa"), min_tokens=3)
    assert after(short, [a, a]) == set() and short.stuck is None


@pytest.mark.parametrize("vocab_size", [4, 40, 64])
def test_ids_without_a_text_are_never_allowed(vocab_size):
    tokenizer = make_tokenizer()  # ids 0..8 are texts, 9 is <eos>
    constraint = constraint_of(tokenizer, vocab_size, structured_outputs=form(regex="[ab0]+"))
    mask = constraint.mask([])
    assert mask.dtype == "uint32" and mask.shape == (-(-vocab_size // 32),)
    assert after(constraint, []) == set(range(min(vocab_size, 9)))


def test_an_output_that_was_rolled_back_is_followed_again():
    tokenizer = make_tokenizer(())
    a, b, zero, eos = range(4)
    kept = constraint_of(tokenizer, structured_outputs=form(regex="(ab)*0"))
    histories = [[], [a], [a, b], [a, b, a], [a], [zero], [a, b, zero], [a, b], [], [a, b, a, b]]
    for output in histories:
        fresh = constraint_of(tokenizer, structured_outputs=form(regex="(ab)*0"))
        assert after(kept, output) == after(fresh, output)
        assert kept.mask(output) is kept.mask(list(output))  # the second call costs nothing
    assert after(kept, [b]) == set() and "doesn't satisfy the grammar" in kept.stuck
    assert after(kept, [a]) == {b} and kept.stuck is None


def test_an_interrupt_inside_a_mask_leaves_the_next_one_right(monkeypatch):
    tokenizer = make_tokenizer(())
    a, b, zero, eos = range(4)
    constraint = constraint_of(tokenizer, structured_outputs=form(regex="(ab)*0"))
    state, raised = constraint._grammar, []

    def interrupted():
        raised.append(True)
        raise KeyboardInterrupt

    assert after(constraint, [a]) == {b}
    with monkeypatch.context() as patch:
        patch.setattr(state, "allowed", interrupted)
        with pytest.raises(KeyboardInterrupt):
            constraint.mask([a, b])
    assert raised and after(constraint, [a, b]) == {a, zero}


def test_each_completion_follows_its_own_text():
    tokenizer = make_tokenizer(())
    a, b, zero, eos = range(4)
    params = SamplingParams(n=2, structured_outputs=form(regex="(ab)*0"))
    limits = Constraints(tokenizer, config_of(4)).limits(0, params, frozenset())
    first, second = limits.constraints
    assert after(first, [a]) == {b} and after(second, [zero]) == set()
    assert after(first, [a, b]) == {a, zero} and after(second, []) == {a, zero}


def test_a_grammar_is_compiled_once(monkeypatch):
    tokenizer = make_tokenizer(())
    constraints, compiled = Constraints(tokenizer, config_of(4)), []
    real = constraints._grammars._compile
    monkeypatch.setattr(
        constraints._grammars, "_compile", lambda wanted: (compiled.append(wanted), real(wanted))[1]
    )
    for regex in ("a+", "b+", "a+", "a+"):
        constraint_of(tokenizer, constraints=constraints, structured_outputs=form(regex=regex))
    assert [wanted.regex for wanted in compiled] == ["a+", "b+"]
    for n in range(1, 80):
        constraint_of(
            tokenizer, constraints=constraints, structured_outputs=form(regex=f"b{{{n}}}")
        )
    assert len(constraints._grammars._shelf) == 64


@pytest.mark.parametrize(
    "text", ["a", "ab", 'say "b"', "a\\b", "line\nend", "é 漢", "(a|b)*", "\x00", "-"]
)
def test_a_choice_is_taken_to_the_letter(text):
    tokenizer = byte_tokenizer()
    constraint = constraint_of(tokenizer, eos=(), structured_outputs=form(choice=[text, "zz"]))
    data = list(text.encode())
    for length, byte in enumerate(data):
        expected = {byte, *(b"z" if length == 0 else b"")}
        assert after(constraint, data[:length]) == expected
    assert after(constraint, data) == set() and constraint.stuck is None
