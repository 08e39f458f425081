"""Bad words become token sequences; the token that would complete one may not come."""

from __future__ import annotations

import itertools

import pytest

from hybrid_jax.config.sampling_params import SamplingParams
from hybrid_jax.config.structured_outputs import StructuredOutputsParams
from hybrid_jax.constraints import Constraints
from hybrid_jax.constraints.token_constraint import BadWords, token_sequences
from tests.constraints.forms import config_of
from tests.constraints.vocabularies import make_tokenizer, tokens_of

A, B, SPACE = 0, 1, 2
LETTERS = make_tokenizer((), "abĠ")
PAIRS = make_tokenizer([("a", "b"), ("Ġ", "a"), ("Ġ", "ab")], "abĠ")
AB, SPACE_A, SPACE_AB = 3, 4, 5


def limits_of(tokenizer, vocab_size=None, **params):
    constraints = Constraints(tokenizer, config_of(vocab_size or tokenizer.vocab_size))
    return constraints.limits(0, SamplingParams(**params), frozenset())


@pytest.mark.parametrize(
    "tokenizer, word, expected",
    [
        (LETTERS, "a", [(A,)]),
        (LETTERS, "ab", [(A, B)]),  # " ab" ends with it
        (LETTERS, " ab", [(SPACE, A, B)]),
        (PAIRS, "ab", [(AB,), (SPACE_AB,)]),
        (PAIRS, "a", [(A,), (SPACE_A,)]),
        (PAIRS, "ba", [(B, A)]),
    ],
)
def test_a_word_is_encoded_alone_and_after_a_space(tokenizer, word, expected):
    assert token_sequences(word, tokenizer) == expected


def test_the_completing_tokens_are_those_of_the_definition():
    sequences = [(0, 1), (1, 0), (0, 0, 0), (1, 1, 0, 1), (1, 1, 1, 1)]
    words = BadWords(sequences)
    for length in range(7):
        for output in itertools.product((0, 1), repeat=length):
            expected = {
                token
                for token in (0, 1)
                if any((*output, token)[-len(s) :] == s for s in sequences if len(s) <= length + 1)
            }
            assert set(words.completing(output)) == expected


def test_words_of_one_token_cost_nothing_per_step():
    limits = limits_of(PAIRS, bad_words=["ab"])
    assert limits.forbidden_ids == {AB, SPACE_AB} and limits.constraints == ()
    assert limits_of(PAIRS) == limits_of(PAIRS, temperature=0.0)


def test_longer_words_are_masked_at_their_last_token():
    limits = limits_of(PAIRS, bad_words=["ba", "ab"])
    [constraint] = limits.constraints
    everything = set(range(7)) - {AB, SPACE_AB}
    assert limits.forbidden_ids == {AB, SPACE_AB}
    assert set(tokens_of(constraint.mask([]))) == everything
    assert set(tokens_of(constraint.mask([A, B]))) == everything - {A}
    assert set(tokens_of(constraint.mask([A, B, SPACE]))) == everything
    assert set(tokens_of(constraint.mask([B]))) == everything - {A}


def test_a_grammar_goes_around_bad_words():
    form = StructuredOutputsParams(regex="[ab]{3}")
    [constraint] = limits_of(LETTERS, bad_words=["ab", "bb"], structured_outputs=form).constraints
    assert set(tokens_of(constraint.mask([]))) == {A, B}
    assert set(tokens_of(constraint.mask([A]))) == {A}
    assert set(tokens_of(constraint.mask([B]))) == {A}
    assert not constraint.mask([B, A, A]).any() and constraint.stuck is None


def test_a_text_that_can_only_go_on_with_a_bad_word_is_stuck():
    form = StructuredOutputsParams(regex="aab?|bab")
    [constraint] = limits_of(LETTERS, bad_words=["ab"], structured_outputs=form).constraints
    assert not constraint.mask([A, A]).any() and constraint.stuck is None  # it may end here
    assert not constraint.mask([B, A]).any()
    assert constraint.stuck == "no token that may come next is allowed"


def test_allowed_tokens_count_where_words_leave_none():
    limits = limits_of(LETTERS, bad_words=["aa"], allowed_token_ids=[A])
    [constraint] = limits.constraints
    assert set(tokens_of(constraint.mask([]))) == {A}
    assert not constraint.mask([A]).any() and constraint.stuck
