"""A form that begins after the thoughts of a model that thinks first."""

from __future__ import annotations

import random
import re
from types import SimpleNamespace

import pytest

from hybrid_jax.api.intake import Intake
from hybrid_jax.config import EngineConfig
from hybrid_jax.config.sampling_params import SamplingParams
from hybrid_jax.constraints import Constraints
from hybrid_jax.text.thoughts import Thoughts
from tests.constraints.forms import after, config_of, form
from tests.constraints.thinking import (
    ALWAYS,
    ASSISTANT,
    LFM2,
    QWEN3_5,
    SWITCH,
    TURNS,
    marked_tokenizer,
)
from tests.constraints.vocabularies import make_tokenizer
from tests.llms import byte_tokenizer

EOS, FORM = 0, r"\{a+\}"
OPENED = Thoughts(open="<think>", close="</think>", opened=True)
MAY_OPEN = Thoughts(open="<think>", close="</think>", opened=False)
WHITE = set(b"\n\r ")


def merging_tokenizer():
    """Tokens that reach over the end of a mark."""
    pairs = [(">", "{"), (">", "Ċ"), (">Ċ", "{"), ("k", ">"), ("k>", "{"), ("k>", "Ċ")]
    return make_tokenizer(pairs, letters="</think>{}abĊ")


def constraint(tokenizer, thoughts, *, regex=FORM, eos=(EOS,), **params):
    after_thoughts = params.pop("after_thoughts", None)
    wanted = form(regex=regex, after_thoughts=after_thoughts)
    params = SamplingParams(structured_outputs=wanted, **params)
    constraints = Constraints(tokenizer, config_of(tokenizer.vocab_size, eos))
    stops = frozenset((*eos, *params.stop_token_ids))
    return constraints.limits(0, params, stops, thoughts).constraints[0]


def test_opened_thoughts_are_free_until_they_close():
    allowed = constraint(byte_tokenizer(), OPENED)
    for text in (b"", b"hm", b"hm {a} </think", b"</thin"):
        assert after(allowed, [*text]) == set(range(1, 256))  # but not the end
    assert after(allowed, [*b"hm</think>"]) == WHITE | {ord("{")}
    assert after(allowed, [*b"hm</think>\n"]) == WHITE | {ord("{")}
    assert after(allowed, [*b"hm</think>\n\n"]) == {ord("{")}
    assert after(allowed, [*b"hm</think>\n\n{aa"]) == {ord("a"), ord("}")}
    assert after(allowed, [*b"</think>{aa}"]) == set()  # complete


def test_thoughts_may_be_opened_or_left_out():
    allowed = constraint(byte_tokenizer(), MAY_OPEN)
    assert after(allowed, []) == {*b"<{"}
    assert after(allowed, [*b"<"]) == {ord("t")}
    assert after(allowed, [*b"<think"]) == {ord(">")}
    assert len(after(allowed, [*b"<think>"])) == 255
    assert after(allowed, [*b"<think></think>{"]) == {ord("a")}
    assert after(allowed, [*b"{a"]) == {*b"a}"}


def test_marks_of_one_token_are_found_by_it():
    allowed = constraint(marked_tokenizer(), MAY_OPEN)
    assert after(allowed, []) == {256, ord("{")}
    assert len(after(allowed, [256, *b"what does </think> mean?"])) == 257  # written in bytes
    assert after(allowed, [256, *b"hm", 257]) == WHITE | {ord("{")}
    assert after(allowed, [256, 257, *b"\n\n{"]) == {ord("a")}


def test_no_token_ends_the_thoughts_and_begins_the_form():
    tokenizer = merging_tokenizer()
    vocab = tokenizer.backend.get_vocab()
    allowed = constraint(tokenizer, OPENED, eos=())
    written = [vocab[letter] for letter in "a</thin"]
    every = set(vocab.values())
    assert after(allowed, written) == every - {vocab["k>{"]}
    assert after(allowed, [*written, vocab["k"]]) == every - {vocab[">{"], vocab[">Ċ{"]}
    assert after(allowed, written[:3]) == every
    for end in ("k>", "k>Ċ"):
        assert after(allowed, [*written, vocab[end]]) >= {vocab["{"]}


@pytest.mark.parametrize("thoughts", [OPENED, MAY_OPEN])
@pytest.mark.parametrize("make", [byte_tokenizer, marked_tokenizer, merging_tokenizer])
def test_every_text_that_ends_has_the_form_after_its_thoughts(make, thoughts):
    rng, tokenizer = random.Random(0), make()
    vocab = tokenizer.backend.get_vocab()
    close = [vocab["</think>"]] if "</think>" in vocab else [*map(vocab.get, "</think>")]
    if make is byte_tokenizer:
        close = [*b"</think>"]
    walked = constraint(tokenizer, thoughts, eos=())
    closed = 0
    for _ in range(60):
        output = []
        while (allowed := after(walked, output)) and len(output) < 90:
            thinks = len(allowed) > 6
            ends = thinks and rng.random() < 0.1 and set(close) <= allowed
            output += close if ends else [rng.choice(sorted(allowed))]
        again = constraint(tokenizer, thoughts, eos=())
        assert after(again, output) == allowed  # whatever was looked at before
        if not allowed:
            text = tokenizer.decode(output, skip_special_tokens=False)
            thought, mark, rest = text.rpartition("</think>")
            closed += bool(mark)
            assert re.fullmatch(r"\s{0,4}" + FORM, rest) if mark else re.fullmatch(FORM, text)
    assert closed > (10 if thoughts.opened else 3)


def test_a_form_that_may_begin_like_a_mark_or_with_white_space_keeps_it():
    allowed = constraint(byte_tokenizer(), MAY_OPEN, regex="<x>|y")
    assert after(allowed, [*b"<"]) == {ord("x")}
    allowed = constraint(byte_tokenizer(), OPENED, regex=r"\n\n\nx|y")
    assert after(allowed, [*b"</think>"]) == {*b"\ny"}
    assert after(allowed, [*b"</think>\n\n\n"]) == {ord("x")}


def test_other_limits_hold_in_thoughts():
    tokenizer = marked_tokenizer()
    allowed = constraint(tokenizer, OPENED, bad_words=["q", "no"], stop_token_ids=[7], min_tokens=2)
    assert not {EOS, 7} & after(allowed, [*b"h"])
    assert 7 in after(allowed, [*b"hmm"]) and EOS not in after(allowed, [*b"hmm"])
    assert ord("o") not in after(allowed, [*b"n"]) and ord("o") in after(allowed, [*b"m"])
    assert EOS not in after(allowed, [*b"h", 257, *b"{a"])


def test_the_name_turns_it_off_and_on():
    tokenizer = marked_tokenizer()
    assert after(constraint(tokenizer, OPENED, after_thoughts=False), []) == {ord("{")}
    assert after(constraint(tokenizer, None), []) == {ord("{")}
    assert after(constraint(tokenizer, None, after_thoughts=True), []) == {256, ord("{")}
    with pytest.raises(
        ValueError, match="after_thoughts=True needs marks of thoughts, such as <think>"
    ):
        constraint(byte_tokenizer(), None, after_thoughts=True)
    with pytest.raises(ValueError, match="after_thoughts must be True, False or None, got 'yes'"):
        form(regex="a", after_thoughts="yes")
    assert form(regex="a", after_thoughts=True).form == form(regex="a")


def test_thoughts_that_could_never_end_are_refused():
    with pytest.raises(
        ValueError, match="opens thoughts with <think>, and </think> may not come with"
    ):
        constraint(marked_tokenizer(), OPENED, bad_words=["</think>"])
    # Where they need not be opened, they are not.
    allowed = constraint(marked_tokenizer(), MAY_OPEN, bad_words=["</think>"])
    assert after(allowed, []) == {ord("{")}


def test_a_form_without_a_first_token_is_refused_before_the_thoughts():
    with pytest.raises(ValueError, match="lets no token come first"):
        constraint(marked_tokenizer(), OPENED, bad_words=["{"])


PLAIN = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
QWEN3 = TURNS + ASSISTANT + SWITCH + "<think>\n\n</think>\n\n{% endif %}{% endif %}"
NEMOTRON_H = (
    TURNS + "{% set off = '/no_think' in messages[0].content %}" + ASSISTANT
    + "{% if off %}<think></think>{% else %}<think>\n{% endif %}{% endif %}"
)  # fmt: skip
COHERE = PLAIN + ASSISTANT + "<|START_THINKING|>{% endif %}"
MISTRAL = "{# [THINK]...[/THINK] #}" + PLAIN + ASSISTANT + "{% endif %}"

CHATS = [
    ("qwen3.5", QWEN3_5, {}, True),
    ("qwen3.5 off", QWEN3_5, {"enable_thinking": False}, None),
    ("qwen3", QWEN3, {}, False),
    ("qwen3 off", QWEN3, {"enable_thinking": False}, None),
    ("nemotron-h", NEMOTRON_H, {}, True),
    ("nemotron-h off", NEMOTRON_H, {"system": "/no_think"}, None),
    ("always", ALWAYS, {}, True),
    ("always, asked not to", ALWAYS, {"enable_thinking": False}, True),
    ("lfm2", LFM2, {}, False),
    ("lfm2 off", LFM2, {"enable_thinking": False}, None),
    ("cohere", COHERE, {}, True),
    ("kimi", PLAIN + ASSISTANT + "◁think▷{% endif %}", {}, True),
    (
        "kimi, which opens them itself",
        "{# ◁think▷...◁/think▷ #}" + PLAIN + ASSISTANT + "{% endif %}",
        {},
        False,
    ),
    ("mistral", MISTRAL, {}, False),
    ("without", PLAIN + ASSISTANT + "{% endif %}", {}, None),
]


@pytest.mark.parametrize(("name", "template", "options", "opened"), CHATS)
def test_a_chat_says_whether_thoughts_come_first(name, template, options, opened):
    config = config_of(256, (EOS,))
    thread = SimpleNamespace(check=lambda: None, facts=SimpleNamespace(longest_prompt=200))
    intake = Intake(config, EngineConfig(), byte_tokenizer(), SamplingParams(), thread)
    options = dict(options)
    first = options.pop("system", "What does <think> mean?")
    messages = [{"role": "user", "content": first}]
    ask = {"chat_template": template, "chat_template_kwargs": options}
    prompt = intake.conversation(messages, **ask)
    assert (prompt.thoughts and prompt.thoughts.opened) == opened
    # A conversation that ends with its last message goes on with that.
    whole = intake.conversation(messages, **ask, add_generation_prompt=False)
    assert whole.thoughts is None
