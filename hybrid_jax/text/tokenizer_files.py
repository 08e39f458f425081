"""What the small files beside a tokenizer.json say: special tokens, added tokens and chat templates.

They are read as transformers reads them. Where two files disagree, the same one counts.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from hybrid_jax.config.model_directory import (
    ADDED_TOKENS_FILE,
    MORE_TEMPLATES,
    OLD_TEMPLATE_FILE,
    SPECIAL_TOKENS_FILE,
    TEMPLATE_FILE,
    TOKENIZER_CONFIG_FILE,
    read_json_if_there,
    read_text,
    read_text_if_there,
)

LOG = logging.getLogger("hybrid_jax.files")
SPECIAL_NAMES = (
    *("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"),
)
EXTRA = "extra_special_tokens"  # a list of further ones, or an object of named ones
OLD_EXTRA = "additional_special_tokens"  # what it was called before
OWN = "model_specific_special_tokens"  # the named ones, once they are told apart
ADDED = "added_tokens_decoder"
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


class TokenizerFiles(NamedTuple):
    """What the files beside a tokenizer.json say.

    Attributes:
        special_tokens: from name ("bos_token", ...) to text.
        added: tokens that the vocabulary has beside those of tokenizer.json, in the order in which they get ids.
        chat_templates: from name to Jinja source; "default" is used unless another is named.
        template_files: from Jinja source to the file that holds it.
    """

    special_tokens: dict[str, str]
    added: list[tokenizers.AddedToken]
    chat_templates: dict[str, str]
    template_files: dict[str, str]


def read_tokenizer_files(folder: Path, backend: tokenizers.Tokenizer) -> TokenizerFiles:
    """Reads the files beside the tokenizer.json that `backend` was made from.

    Raises:
        ValueError: one of them is not what it should be. The message names it.
    """
    file = folder / TOKENIZER_CONFIG_FILE
    config = read_json_if_there(file, "tokenizer")
    special = _sorted_out(config)
    there = backend.get_added_tokens_decoder()
    given = _added_tokens(file, config)
    if ADDED not in config:
        special = _with_special_tokens_map(folder, special)
        given = _old_added_tokens(folder, special) | there
    texts = _named(special)
    known = {str(token): token for token in given.values()}
    extra = special.get(EXTRA)
    # A token with other flags is added again, and takes them.
    same = {repr(token) for token in there.values()}
    added = [token for _, token in sorted(given.items()) if repr(token) not in same]
    encoded = {token.content for token in (*there.values(), *added)}
    named = [known.get(text, text) for text in texts.values()]
    for one in (*named, *(_tokens(extra, file) if isinstance(extra, list) else ())):
        token = (
            one
            if isinstance(one, tokenizers.AddedToken)
            else tokenizers.AddedToken(one, special=True)
        )
        if token.content not in encoded:
            added.append(token)
            encoded.add(token.content)
    if config.get("add_bos_token") is True and not backend.encode("").ids:
        LOG.warning(
            "%s asks for a bos token before each text; tokenizer.json puts none there, and that counts, as in "
            "transformers 5",
            file,
        )
    return TokenizerFiles(texts, added, *read_chat_templates(folder, config))


def _sorted_out(values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a file, with a list in `EXTRA` and with named tokens in `OWN`."""
    found = dict(values)
    if not isinstance(found.get(OWN), dict):
        found.pop(OWN, None)
    if OLD_EXTRA in found and not found.get(EXTRA):
        found[EXTRA] = found.pop(OLD_EXTRA)
    if isinstance(found.get(EXTRA), dict):
        found[OWN] = found.get(OWN, {}) | found.pop(EXTRA)
    return found


def _named(special: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens that have a name, the usual ones first."""
    own = {name: value for name, value in special.items() if name.endswith("_token")}
    own |= special.get(OWN, {})
    found = {name: _text_of(own.get(name)) for name in (*SPECIAL_NAMES, *own)}
    return {name: text for name, text in found.items() if text is not None}


def _text_of(value: Any) -> str | None:
    """The text of a special token, which files give as text or as {"content": text, ...}."""
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) and value else None


def _tokens(values: list[Any], file: Path) -> Iterator[tokenizers.AddedToken]:
    for value in values:
        if _text_of(value) is None:
            raise ValueError(
                f"tokenizer: {EXTRA} in {file} or {SPECIAL_TOKENS_FILE} must be special tokens, got {value!r}"
            )
        yield _token(value, file, special=True)


def _token(value: Any, file: Path, **usual: bool) -> tokenizers.AddedToken:
    """An added token from text or from an object with its flags. `usual`: flags where none are given."""
    text = _text_of(value)
    if text is None:
        raise ValueError(f"tokenizer: {file} must give an added token its content, got {value!r}")
    flags = value if isinstance(value, dict) else {}
    given = {name: flags[name] for name in FLAGS if isinstance(flags.get(name), bool)}
    return tokenizers.AddedToken(text, **usual | given)


def _added_tokens(file: Path, config: dict) -> dict[int, tokenizers.AddedToken]:
    """The tokens that tokenizer_config.json adds, by id."""
    values = config.get(ADDED, {})
    if not isinstance(values, dict) or not all(key.isdecimal() for key in values):
        raise ValueError(f"tokenizer: {ADDED} in {file} must be an object of tokens by id")
    return {int(key): _token(value, file) for key, value in values.items()}


def _with_special_tokens_map(folder: Path, special: Mapping[str, Any]) -> dict[str, Any]:
    """The same with what special_tokens_map.json says, which wins; its further tokens are added to lists."""
    found = _sorted_out(read_json_if_there(folder / SPECIAL_TOKENS_FILE, "tokenizer"))
    if isinstance(more := found.get(EXTRA), list):
        before = special.get(EXTRA)
        before = before if isinstance(before, list) else []
        found[EXTRA] = [*before, *(token for token in more if token not in before)]
    own = special.get(OWN, {}) | found.get(OWN, {})
    return {**special, **found, OWN: own}


def _old_added_tokens(folder: Path, special: dict[str, Any]) -> dict[int, tokenizers.AddedToken]:
    """The tokens of added_tokens.json, by id. Those that are special by name are so here too."""
    file = folder / ADDED_TOKENS_FILE
    values = read_json_if_there(file, "tokenizer")
    if not all(type(number) is int for number in values.values()):
        raise ValueError(f"tokenizer: {file} must be an object of token ids by text")
    extra = special.get(EXTRA) or []
    names = {_text_of(special.get(name)) for name in SPECIAL_NAMES}
    names |= {_text_of(token) for token in (extra if isinstance(extra, list) else ())}
    return {
        number: tokenizers.AddedToken(text, normalized=text not in names, special=text in names)
        for text, number in values.items()
    }


# --- chat templates -------------------------------------------------------------------------------


def read_chat_templates(folder: Path, config: dict) -> tuple[dict[str, str], dict[str, str]]:
    """The templates of a directory: those of its *.jinja files, else of tokenizer_config.json, else of an old file.

    Args:
        config: what tokenizer_config.json says.

    Returns:
        From name to Jinja source, and from source to the file that holds it.

    Raises:
        ValueError: a file has no template where it should have one. The message names it.
    """
    more = sorted((folder / MORE_TEMPLATES).glob("*.jinja"))
    found = {file.stem: read_text(file, "chat template") for file in more}
    files = {found[file.stem]: str(file) for file in more}
    default = read_text_if_there(folder / TEMPLATE_FILE, "chat template")
    if default is not None:
        found["default"] = default
        files[default] = str(folder / TEMPLATE_FILE)
    # Read in any case, so that a mistake shows.
    old = read_json_if_there(folder / OLD_TEMPLATE_FILE, "chat template")
    inner = _templates_in(folder / TOKENIZER_CONFIG_FILE, config.get("chat_template"))
    outer = _templates_in(folder / OLD_TEMPLATE_FILE, old.get("chat_template"))
    if found:
        return found, files
    if inner:
        return inner, dict.fromkeys(inner.values(), str(folder / TOKENIZER_CONFIG_FILE))
    return outer, dict.fromkeys(outer.values(), str(folder / OLD_TEMPLATE_FILE))


def _templates_in(file: Path, value: Any) -> dict[str, str]:
    """Templates as JSON files give them: one text, an object of several by name, or a list of objects with a name."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list):
        good = all(
            isinstance(entry, dict) and {"name", "template"} <= entry.keys() for entry in value
        )
        value = {str(entry["name"]): entry["template"] for entry in value} if good else None
    if not isinstance(value, dict) or not all(isinstance(source, str) for source in value.values()):
        raise ValueError(
            f"chat template: chat_template in {file} must be text, an object of texts by name, or a list of "
            "objects with a name and a template each"
        )
    return value
