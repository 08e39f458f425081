"""Stop strings that name special tokens, which the text leaves out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hybrid_jax import LLM, SamplingParams, StructuredOutputsParams
from hybrid_jax.api import starting
from hybrid_jax.constraints import Constraints
from hybrid_jax.text.given_tokenizer import as_tokenizer
from tests.api.fake_engine import CONFIG, FakeEngine
from tests.llms import byte_tokenizer

EOT, CALL = 256, 257
WIDER = replace(CONFIG, vocab_size=260)


def special_tokenizer():
    tokenizer = byte_tokenizer()
    tokenizer.backend.add_special_tokens(["<|eot|>", "<|call|>"])
    return tokenizer


class Codec:
    """A caller's object, which always leaves out the special token that it names."""

    eos_token, eos_token_id = "<|eot|>", EOT

    def encode(self, text):
        return list(text.encode())

    def decode(self, ids):
        return bytes(token for token in ids if token < 256).decode(errors="replace")


@pytest.fixture
def special_llm(monkeypatch):
    monkeypatch.setattr(starting, "Engine", FakeEngine)
    monkeypatch.setattr(
        FakeEngine, "script", [*b"Hi\n", EOT, *b"\nYou", CALL, CALL, *b"<|eot|> end"]
    )
    return LLM.from_params(WIDER, None, tokenizer=special_tokenizer(), quiet=True)


ENDS = [
    ("<|eot|>", "Hi\n", "<|eot|>", 4),
    ("\n<|eot|>", "Hi", "\n<|eot|>", 4),
    ("<|eot|>\n", "Hi\n", "<|eot|>\n", 5),
    ("i\n<|eot|>\nY", "H", "i\n<|eot|>\nY", 6),
    ("|eot", "Hi\n", "|eot", 4),  # a part of it
    ("<|call|><|call|>", "Hi\n\nYou", "<|call|><|call|>", 10),
    ("u<|call|><|eot|>", "Hi\n\nYou<|eot|> end", None, 21),  # never there
    (["end", "<|call|>"], "Hi\n\nYou", "<|call|>", 9),
    ("<|eot|> e", "Hi\n\nYou", "<|eot|> e", 19),  # written by other tokens
]


@pytest.mark.parametrize(("stop", "text", "reason", "num_tokens"), ENDS)
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_of_special_tokens_ends_the_text(
    special_llm, stop, text, reason, num_tokens, include
):
    params = SamplingParams(
        stop=stop, include_stop_str_in_output=include, max_tokens=21, temperature=0.0
    )
    [output] = special_llm.generate("ab", params)
    [found] = output.outputs
    assert found.text == text + (reason if include and reason else "")
    assert (found.stop_reason, len(found.token_ids)) == (reason, num_tokens)
    assert found.finish_reason == ("stop" if reason else "length")
    deltas = list(special_llm.stream("ab", params))
    assert "".join(delta.text for delta in deltas) == found.text
    # What is shown with special tokens ends at the same place.
    shown = replace(params, skip_special_tokens=False)
    [whole] = special_llm.generate("ab", shown)
    assert whole.outputs[0].token_ids == found.token_ids


def test_before_min_tokens_it_is_not_looked_for(special_llm):
    params = SamplingParams(stop="<|eot|>", min_tokens=4, max_tokens=21, temperature=0.0)
    [output] = special_llm.generate("ab", params)
    assert output.outputs[0].text == "Hi\n\nYou"  # the next one, of other tokens


def test_a_special_token_that_an_object_names_is_found(monkeypatch):
    monkeypatch.setattr(starting, "Engine", FakeEngine)
    monkeypatch.setattr(FakeEngine, "script", [*b"Hi", EOT, *b"you"])
    llm = LLM.from_params(WIDER, None, tokenizer=as_tokenizer(Codec()), quiet=True)
    # Otherwise the text ends there by itself, since that is the tokenizer's end token.
    params = SamplingParams(stop="i<|eot|>", max_tokens=9, temperature=0.0, ignore_eos=True)
    [output] = llm.generate("ab", params)
    assert (output.outputs[0].text, output.outputs[0].stop_reason) == ("H", "i<|eot|>")


def limits_of(**given):
    config = replace(CONFIG, vocab_size=260)
    return Constraints(special_tokenizer(), config).limits(0, SamplingParams(**given), frozenset())


def test_a_bad_word_may_be_a_special_token():
    assert limits_of(bad_words=["<|eot|>"]).forbidden_ids == {EOT}
    [constraint] = limits_of(bad_words=["i<|eot|>"]).constraints
    assert not constraint.mask([*b"Hi"])[EOT // 32] >> EOT % 32 & 1


def test_a_form_writes_the_text_of_a_special_token_in_other_tokens():
    form = StructuredOutputsParams(choice=["<|eot|>", "x"])
    [constraint] = limits_of(structured_outputs=form).constraints
    first = [token for token in range(260) if constraint.mask([])[token // 32] >> token % 32 & 1]
    assert first == [ord("<"), ord("x")]
    assert not constraint.mask([*b"<|eot|>"]).any()  # complete
