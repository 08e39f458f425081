"""Model directories' tokenizers and chat templates, as they come in the wild."""

from __future__ import annotations

import json
import re

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from hybrid_jax.text.tokenizer import Tokenizer, byte_alphabet

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}\n  {% if m.role == 'tool' %}\n"
    "{{ raise_exception('no tools here') }}\n  {% endif %}\n"
    "<{{ m.role }}>{% generation %}{{ m.content }}{% endgeneration %}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def save_tokenizer(folder, *, config=None, bos_by_backend=False):
    """Byte-level tokens without merges; <s> and </s> are special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    if bos_by_backend:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
        )
    backend.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.from_directory(folder)


def test_a_directory_without_a_tokenizer_gives_none(tmp_path):
    assert Tokenizer.from_directory(tmp_path) is None


def test_a_broken_tokenizer_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer\.json: not a tokenizer"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text("version https://git-lfs.example/spec/v1\noid 0\n")
    with pytest.raises(ValueError, match="it is a git-lfs pointer, .*run `git lfs pull`"):
        Tokenizer.from_directory(tmp_path)


def test_encode_and_decode_are_inverse(tmp_path):
    tokenizer = save_tokenizer(tmp_path)
    text = "naïve 你好\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode(text)) == len(text.encode())


@pytest.mark.parametrize("by_backend", [False, True])
@pytest.mark.parametrize("add_bos", [None, True])
def test_tokenizer_json_says_whether_bos_stands_first(tmp_path, caplog, by_backend, add_bos):
    """As in transformers 5. That tokenizer_config.json asks for another beginning is said."""
    config = {"bos_token": {"content": "<s>", "special": True}, "eos_token": "</s>"}
    if add_bos is not None:
        config["add_bos_token"] = add_bos
    tokenizer = save_tokenizer(tmp_path, config=config, bos_by_backend=by_backend)
    count = tokenizer.encode("ab").count(tokenizer.bos_token_id)
    assert count == (1 if by_backend else 0)
    assert ("asks for a bos token" in caplog.text) == bool(add_bos and not by_backend)
    assert tokenizer.encode("ab", add_special_tokens=False)[0] != tokenizer.bos_token_id
    assert tokenizer.eos_token_id == tokenizer.bos_token_id + 1


def test_special_tokens_are_left_out_unless_asked_for(tmp_path):
    tokenizer = save_tokenizer(tmp_path, config={"bos_token": "<s>"})
    ids = [tokenizer.bos_token_id, *tokenizer.encode("ab")]
    assert tokenizer.decode(ids) == "ab"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>ab"


def test_chat_templates_come_from_any_of_the_usual_files(tmp_path):
    tokenizer = save_tokenizer(tmp_path, config={"chat_template": "config"})
    assert tokenizer.apply_chat_template([]) == "config"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "json"}))
    assert Tokenizer.from_directory(tmp_path).apply_chat_template([]) == "config"
    (tmp_path / "tokenizer_config.json").unlink()
    assert Tokenizer.from_directory(tmp_path).apply_chat_template([]) == "json"
    (tmp_path / "chat_template.jinja").write_text("jinja {{ mood }}")
    newest = Tokenizer.from_directory(tmp_path)
    assert newest.apply_chat_template([], mood="fine") == "jinja fine"
    assert newest.apply_chat_template([], chat_template="given{# #}") == "given"


def test_named_chat_templates(tmp_path):
    templates = [{"name": "default", "template": "D"}, {"name": "tools", "template": "T"}]
    tokenizer = save_tokenizer(tmp_path, config={"chat_template": templates})
    assert tokenizer.apply_chat_template([]) == "D"
    assert tokenizer.apply_chat_template([], chat_template="tools") == "T"


def test_a_template_sees_special_tokens_and_trims_its_own_lines(tmp_path):
    tokenizer = save_tokenizer(tmp_path, config={"bos_token": "<s>", "chat_template": TEMPLATE})
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(messages) == "<s><user>hi<assistant>"
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=False)
    assert text == "<s><user>hi"


def test_a_template_may_refuse_messages(tmp_path):
    tokenizer = save_tokenizer(tmp_path, config={"chat_template": TEMPLATE})
    with pytest.raises(ValueError, match="chat template: no tools here"):
        tokenizer.apply_chat_template([{"role": "tool", "content": "x"}])


@pytest.mark.parametrize("name", ["tokenizer_config.json", "chat_template.jinja"])
def test_an_error_of_a_template_names_its_file(tmp_path, name):
    source = "{{ bos_token }}\n{{ messages[0].content.x.y }}"
    save_tokenizer(tmp_path, config={"chat_template": source})
    if name.endswith("jinja"):
        (tmp_path / name).write_text(source)
    complaint = f"chat template: 'str object' has no attribute 'x' ({tmp_path / name}, line 2)"
    with pytest.raises(ValueError, match=re.escape(complaint)):
        Tokenizer.from_directory(tmp_path).apply_chat_template([{"role": "user", "content": "hi"}])


def test_tojson_does_not_escape_for_html(tmp_path):
    tokenizer = save_tokenizer(tmp_path, config={"chat_template": "{{ tools | tojson(indent=1) }}"})
    assert tokenizer.apply_chat_template([], tools=[{"a": "<é&'>"}]) == (
        '[\n {\n  "a": "<é&\'>"\n }\n]'
    )


TOOLS = [{"type": "function", "function": {"name": "add"}}]


def test_with_tools_the_template_for_tools_is_used_where_there_is_one(tmp_path):
    templates = {"default": "D{{ tools | length }}", "tool_use": "T{{ tools | length }}"}
    tokenizer = save_tokenizer(tmp_path)
    tokenizer.chat_templates |= templates
    assert tokenizer.apply_chat_template([], tools=TOOLS) == "T1"
    assert tokenizer.apply_chat_template([], tools=TOOLS, chat_template="default") == "D1"
    del tokenizer.chat_templates["tool_use"]
    assert tokenizer.apply_chat_template([], tools=TOOLS) == "D1"


@pytest.mark.parametrize("tools", [[len], ["add"], TOOLS[0], "add"])
def test_a_tool_that_is_no_schema_is_refused(tmp_path, tools):
    tokenizer = save_tokenizer(tmp_path, config={"chat_template": "{{ tools }}"})
    with pytest.raises(ValueError, match="tools.* must be a .*JSON schema.*, got .*(len|add)"):
        tokenizer.apply_chat_template([], tools=tools)


def test_the_byte_alphabet_is_the_librarys(tmp_path):
    encode = save_tokenizer(tmp_path).backend.encode
    for text in ("".join(map(chr, range(256))), "\u3042\U0001f600\U000fffff"):
        letters = [byte_alphabet()[byte] for byte in text.encode()]
        assert encode(text, add_special_tokens=False).tokens == letters
    assert {*byte_alphabet()} == {*pre_tokenizers.ByteLevel.alphabet()}


def test_a_template_cannot_reach_python(tmp_path):
    tokenizer = save_tokenizer(tmp_path, config={"chat_template": "{{ messages.append(1) }}"})
    with pytest.raises(ValueError, match="chat template: .*unsafe|safely"):
        tokenizer.apply_chat_template([])


def test_a_missing_template_names_what_there_is(tmp_path):
    tokenizer = save_tokenizer(tmp_path)
    with pytest.raises(ValueError, match=r"this model has none"):
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    "text, message",
    [("{", "is not valid JSON: Expecting"), ("[1]", "must hold an object, got list")],
)
def test_a_config_that_is_no_object_is_named(tmp_path, text, message):
    save_tokenizer(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=f"{file} {message}"):
        Tokenizer.from_directory(tmp_path)


def test_ids_of_another_text_have_no_ends(tmp_path):
    tokenizer = save_tokenizer(tmp_path)
    with pytest.raises(ValueError, match="tokenizer: 2 ids are not this text's, 'abc'"):
        tokenizer.count_within("abc", tokenizer.encode("ab"), [1])


def test_places_in_a_text_are_looked_up_and_not_searched(tmp_path):
    """One after the other, they would take hours."""
    tokenizer = save_tokenizer(tmp_path)
    text = "é" * 100_000
    ids = tokenizer.encode(text)
    assert tokenizer.count_within(text, ids, range(1, 100_001)) == [*range(2, 200_002, 2)]


def word_pieces(**options):
    pieces = {piece: id for id, piece in enumerate(["[UNK]", "b", "##a", "##d"])}
    return models.WordPiece(pieces, unk_token="[UNK]", **options)


@pytest.mark.parametrize(
    "part, says",
    [
        ({}, True),
        ({"normalizer": normalizers.NFC()}, True),
        ({"normalizer": normalizers.Replace(tokenizers.Regex(" {2,}"), " ")}, True),
        ({"normalizer": normalizers.Replace(tokenizers.Regex("b.*"), "")}, False),
        ({"pre_tokenizer": pre_tokenizers.Split(tokenizers.Regex("b.*"), "removed")}, False),
        ({"pre_tokenizer": pre_tokenizers.Split(tokenizers.Regex(" ?b+"), "isolated")}, True),
        ({"model": models.WordLevel({"a": 0}, unk_token="a")}, False),
        ({"model": word_pieces(), "pre_tokenizer": pre_tokenizers.BertPreTokenizer()}, True),
        ({"model": word_pieces(), "pre_tokenizer": pre_tokenizers.WhitespaceSplit()}, True),
        # One word, of which it makes one token.
        ({"model": word_pieces(), "pre_tokenizer": None}, False),
        (
            {
                "model": word_pieces(max_input_chars_per_word=100_000),
                "pre_tokenizer": pre_tokenizers.BertPreTokenizer(),
            },
            False,
        ),
        (
            {
                "model": word_pieces(),
                "pre_tokenizer": pre_tokenizers.Split(tokenizers.Regex("b.*x|b"), "isolated"),
            },
            False,
        ),
    ],
)
def test_only_what_surely_has_more_tokens_is_far_beyond(tmp_path, part, says):
    tokenizer = save_tokenizer(tmp_path)
    for name, value in part.items():
        setattr(tokenizer.backend, name, value)
    assert tokenizer.is_far_beyond("bad " * 50_000, 10) == says
    assert not tokenizer.is_far_beyond("bad " * 50_000, 200_000)
    assert not tokenizer.is_far_beyond("bad " * 4000, 10)  # it is soon read


@pytest.mark.parametrize(
    "text", ["bad " * 6000, "bad" * 20_000, "bad" * 6000 + " bad" * 2000, "b " * 9000]
)
@pytest.mark.parametrize("longest_word", [1, 100, 1000])
@pytest.mark.parametrize("longest", [1, 300])
def test_what_is_far_beyond_for_word_pieces_has_too_many_tokens(
    tmp_path, text, longest_word, longest
):
    tokenizer = save_tokenizer(tmp_path)
    tokenizer.backend.model = word_pieces(max_input_chars_per_word=longest_word)
    tokenizer.backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    if tokenizer.is_far_beyond(text, longest):
        assert len(tokenizer.encode(text)) > 2 * longest
