"""Tokenizers that callers bring to `LLM(tokenizer=...)`."""

from __future__ import annotations

import re

import pytest

from hybrid_jax import SamplingParams, StructuredOutputsParams
from hybrid_jax.models.files import BUNDLED
from hybrid_jax.text.given_tokenizer import GivenTokenizer, as_tokenizer
from tests.api.fake_engine import GREEDY, SCRIPT
from tests.llms import byte_tokenizer

TEMPLATE = "{% for m in messages %}{{ bos_token }}{{ m.role }}={{ m.content }};{% endfor %}"


class Bytes:
    """The least that an object must have."""

    def encode(self, text):
        return list(text.encode())

    def decode(self, ids):
        return bytes(ids).decode(errors="replace")


class LikeTransformers(Bytes):
    """With the options and attributes that objects of transformers have."""

    bos_token, bos_token_id, vocab_size, chat_template = "!", 33, 256, TEMPLATE

    def encode(self, text, add_special_tokens=True):
        return [33] * add_special_tokens + super().encode(text)

    def decode(self, ids, skip_special_tokens=True, **options):
        return super().decode([i for i in ids if i != 33 or not skip_special_tokens])


class WithFastBackend:
    """As a fast tokenizer of transformers."""

    backend_tokenizer = byte_tokenizer().backend
    chat_template = {"default": "D{{ messages[0].content }}", "other": "O"}
    eos_token = "z"


def test_an_object_that_encodes_and_decodes_is_enough(make_llm):
    llm = make_llm(tokenizer=Bytes())
    [output] = llm.generate("né", GREEDY)
    assert output.prompt_token_ids == tuple("né".encode())
    assert output.outputs[0].text == SCRIPT[:12]
    assert llm.encode("ab") == [97, 98]
    assert llm.batch_decode([[97], [98, 99]]) == ["a", "bc"]
    assert repr(llm.get_tokenizer()) == "GivenTokenizer(Bytes)"


def test_options_and_attributes_are_used_where_an_object_has_them(make_llm):
    llm = make_llm(tokenizer=LikeTransformers())
    assert llm.encode("a") == [33, 97]
    assert llm.encode("a", add_special_tokens=False) == [97]
    assert llm.decode([33, 97]) == "a"
    assert llm.decode([33, 97], skip_special_tokens=False) == "!a"
    tokenizer = llm.get_tokenizer()
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.vocab_size) == (33, None, 256)
    prompt = llm.render_chat([{"role": "user", "content": "hi"}])
    assert prompt.text == "!user=hi;"
    assert prompt.token_ids == tuple(b"!user=hi;")


def test_a_method_serves_as_a_template(make_llm):
    class Own(Bytes):
        def apply_chat_template(self, messages, *, tokenize, add_generation_prompt, tools):
            assert tokenize is False and tools is None
            return "|".join(m["content"] for m in messages) + ">" * add_generation_prompt

    llm = make_llm(tokenizer=Own())
    assert llm.render_chat([{"role": "user", "content": "hi"}]).text == "hi>"
    assert (
        llm.render_chat(
            [{"role": "narrator", "content": "x"}],
            chat_template=TEMPLATE.replace("m.role", "'narrator'"),
        ).text
        == "narrator=x;"
    )


def test_without_a_template_a_chat_is_refused_with_the_remedy(make_llm):
    with pytest.raises(ValueError, match="this model has none; pass chat_template="):
        make_llm(tokenizer=Bytes()).chat([{"role": "user", "content": "hi"}])


def test_a_fast_tokenizer_of_transformers_is_read_whole():
    tokenizer = as_tokenizer(WithFastBackend())
    assert not isinstance(tokenizer, GivenTokenizer)
    assert tokenizer.special_tokens == {"eos_token": "z"}
    assert list(tokenizer.chat_templates) == ["default", "other"]
    assert tokenizer.encode("ab") == [97, 98]


def test_an_object_of_the_library_is_copied():
    backend = byte_tokenizer().backend
    backend.enable_truncation(2)
    tokenizer = as_tokenizer(backend)
    assert tokenizer.encode("abcd") == [97, 98, 99, 100]
    assert backend.encode("abcd").ids == [97, 98]


def test_breakpoints_in_characters_are_found_by_decoding(make_llm):
    llm = make_llm(tokenizer=Bytes())
    llm.generate({"prompt": "né and more", "cache_breakpoints": [2]}, GREEDY)
    assert llm._engine.added[-1].cache_breakpoints == (3,)


@pytest.mark.parametrize("name", ["tokenizer.json", ""])
def test_a_directory_or_its_file(name):
    assert as_tokenizer(BUNDLED / name if name else str(BUNDLED)).encode("a") == [97]


@pytest.mark.parametrize(
    "given, said",
    [
        (3, "tokenizer must be a directory with a tokenizer.json, or an object"),
        ("no/such/dir", "no/such/dir has no tokenizer.json; name its directory"),
    ],
)
def test_what_is_no_tokenizer_is_refused(make_llm, given, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        make_llm(tokenizer=given)


def test_an_object_that_returns_something_else_is_named(make_llm):
    class Wrong(Bytes):
        def encode(self, text):
            return text

        def decode(self, ids):
            return list(ids)

    llm = make_llm(tokenizer=Wrong())
    with pytest.raises(ValueError, match="Wrong.encode must return token ids, got 'ab'"):
        llm.encode("ab")
    with pytest.raises(ValueError, match=r"Wrong.decode must return text, got \[97\]"):
        llm.decode([97])


def test_a_grammar_needs_a_vocabulary(make_llm):
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a+"))
    with pytest.raises(
        ValueError, match=r"GivenTokenizer\(Bytes\) has no vocabulary .* tokenizer.json"
    ):
        make_llm(tokenizer=Bytes()).generate("ab", params)


def test_another_tokenizer_is_another_fingerprint():
    class Reversed(Bytes):
        def encode(self, text):
            return super().encode(text)[::-1]

    first, same, other = (as_tokenizer(kind()).identity() for kind in (Bytes, Bytes, Reversed))
    assert first == same != other
