"""Tokenizers that a caller gives: directories, objects of other libraries, and objects that encode and decode."""

from __future__ import annotations

import bisect
import functools
import inspect
import os
import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import tokenizers

from hybrid_jax.config.checks import integers_of
from hybrid_jax.config.model_directory import (
    NO_TOKENIZER,
    TOKENIZER_FILE,
    hub_snapshot,
    other_tokenizers,
)
from hybrid_jax.text.conversation import common_length
from hybrid_jax.text.template_limits import MAX_SECONDS
from hybrid_jax.text.templates import NoTemplate
from hybrid_jax.text.tokenizer import SAMPLE, SPECIAL_NAMES, Tokenizer, own_copy


class TextCodec(Protocol):
    """What an object must have to serve as a tokenizer. Attributes named as in transformers are used if it has them.

    These are `bos_token`, `eos_token` and their like, `bos_token_id`, `eos_token_id`, `vocab_size`, and `chat_template`
    (Jinja source, or a dict of several by name) or a method `apply_chat_template`.
    """

    def encode(self, text: str) -> Sequence[int]:
        """Token ids of a text."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids."""


# What `LLM(tokenizer=...)` takes.
TokenizerLike = str | os.PathLike[str] | Tokenizer | tokenizers.Tokenizer | TextCodec


def as_tokenizer(given: Any) -> Tokenizer:
    """A tokenizer from what a caller gave.

    Args:
        given: a directory with a tokenizer.json, or that file; a `Tokenizer`; an object of the libraries tokenizers or
            transformers; or any object that fits `TextCodec`.

    Raises:
        ValueError: there is no such file, or the object cannot encode and decode.

    Example:
        >>> class Bytes:
        ...     def encode(self, text):
        ...         return list(text.encode())
        ...     def decode(self, ids):
        ...         return bytes(ids).decode(errors="replace")
        >>> as_tokenizer(Bytes()).encode("ab")
        [97, 98]
    """
    if isinstance(given, Tokenizer):
        return given
    if isinstance(given, str | os.PathLike):
        path = Path(given)
        path = hub_snapshot(path.parent if path.name == TOKENIZER_FILE else path, "LLM: tokenizer")
        found = Tokenizer.from_directory(path)
        if found is None:
            others = ", ".join(other_tokenizers(path))
            remedy = f"it has {others}; {NO_TOKENIZER}" if others else "name its directory"
            raise ValueError(f"LLM: tokenizer: {path} has no {TOKENIZER_FILE}; {remedy}")
        return found
    if isinstance(given, tokenizers.Tokenizer):
        return Tokenizer(own_copy(given))
    backend = getattr(given, "backend_tokenizer", None)
    if isinstance(backend, tokenizers.Tokenizer):
        return Tokenizer(
            own_copy(backend), special_tokens=_special(given), chat_templates=_templates(given)
        )
    if callable(getattr(given, "encode", None)) and callable(getattr(given, "decode", None)):
        return GivenTokenizer(given)
    raise ValueError(
        "LLM: tokenizer must be a directory with a tokenizer.json, or an object with encode and decode, got "
        f"{reprlib.repr(given)}"
    )


class GivenTokenizer(Tokenizer):
    """A caller's object behind the interface of `Tokenizer`. Without a vocabulary, no grammar can be made from it."""

    def __init__(self, given: Any) -> None:
        super().__init__(None, special_tokens=_special(given), chat_templates=_templates(given))
        self._given = given
        # Older or simpler objects do not know these options, so only those that do are given them.
        self._encodes_special = _takes(given.encode, "add_special_tokens")
        self._decodes_special = _takes(given.decode, "skip_special_tokens")

    @property
    def vocab_size(self) -> int:
        """How many ids it says that it knows; 0 if it does not say."""
        size = getattr(self._given, "vocab_size", 0)
        return size if isinstance(size, int) else 0

    @property
    def has_chat_template(self) -> bool:
        """See `Tokenizer.has_chat_template`."""
        own = getattr(self._given, "apply_chat_template", None)
        return super().has_chat_template or own is not None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """See `Tokenizer.encode`. An object without that option writes the special tokens that it always writes."""
        options = {"add_special_tokens": add_special_tokens} if self._encodes_special else {}
        ids = integers_of(getattr(found := self._given.encode(text, **options), "ids", found))
        if ids is None:
            raise ValueError(
                f"tokenizer: {type(self._given).__name__}.encode must return token ids, got {reprlib.repr(found)}"
            )
        return list(ids)

    def count_within(
        self, text: str, ids: Sequence[int], characters: Sequence[int]
    ) -> list[int] | None:
        """See `Tokenizer.count_within`. It is unknown if the ids do not decode to the text."""
        # Special tokens may be part of the text, as a template wrote it, or stand beside it.
        for skips in (False, True):
            if self.decode(ids, skip_special_tokens=skips) == text:
                end = functools.cache(functools.partial(self._end, text, ids, skips=skips))
                counts = range(1, len(ids) + 1)
                return [bisect.bisect_right(counts, c, key=end) for c in characters]
        return None

    def _end(self, text: str, ids: Sequence[int], count: int, *, skips: bool) -> int:
        beginning = self.decode(ids[:count], skip_special_tokens=skips)
        return common_length(text, beginning)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """See `Tokenizer.decode`."""
        options = {"skip_special_tokens": skip_special_tokens} if self._decodes_special else {}
        text = self._given.decode(list(ids), **options)
        if not isinstance(text, str):
            raise ValueError(
                f"tokenizer: {type(self._given).__name__}.decode must return text, got {reprlib.repr(text)}"
            )
        return text

    def _uses_method(self, chat_template: str | None) -> bool:
        """Whether the object's method makes the text. It does if there is no template."""
        own = getattr(self._given, "apply_chat_template", None)
        return chat_template is None and not self.chat_templates and own is not None

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        chat_template: str | None,
        options: Mapping[str, Any],
        seconds: float = MAX_SECONDS,
    ) -> str:
        """See `Tokenizer._render`. The time of the object's method is not limited."""
        if not self._uses_method(chat_template):
            return super()._render(
                messages, chat_template=chat_template, options=options, seconds=seconds
            )
        return self._given.apply_chat_template(list(messages), tokenize=False, **options)

    def identity(self) -> str:
        """See `Tokenizer.identity`: the object's class, and what it makes of a sample of text."""
        kind = type(self._given)
        return f"{kind.__module__}.{kind.__qualname__} {self.encode(SAMPLE)}"

    def token_name(self, token: int) -> str:
        """See `Tokenizer.token_name`; it knows none."""
        return ""

    def _special_id(self, name: str) -> int | None:
        found = getattr(self._given, f"{name}_id", None)
        return found if isinstance(found, int) else None

    def quoted_in_template(
        self, chat_template: str | None = None, *, with_tools: bool = False
    ) -> frozenset[str]:
        """See `Tokenizer.quoted_in_template`; nothing is known of a template inside of a method."""
        try:
            return super().quoted_in_template(chat_template, with_tools=with_tools)
        except NoTemplate:
            return frozenset()

    def template_source(self, chat_template: str | None = None, *, with_tools: bool = False) -> str:
        """See `Tokenizer.template_source`; empty if the template is inside of a method."""
        try:
            return super().template_source(chat_template, with_tools=with_tools)
        except NoTemplate:
            return ""

    def __repr__(self) -> str:
        return f"GivenTokenizer({type(self._given).__name__})"


def _takes(method: Any, option: str) -> bool:
    """Whether a method has a parameter of this name, or takes any."""
    try:
        parameters = inspect.signature(method).parameters.values()
    except (TypeError, ValueError):  # it is not written in Python
        return False
    return any(p.name == option or p.kind is p.VAR_KEYWORD for p in parameters)


def _special(given: Any) -> dict[str, str]:
    """The special tokens of an object: the usual ones, and others to which it gives a name."""
    named = getattr(given, "special_tokens_map", None)
    found = {name: getattr(given, name, None) for name in SPECIAL_NAMES}
    found = (dict(named) if isinstance(named, Mapping) else {}) | {
        name: str(text) for name, text in found.items() if text is not None
    }
    return {name: text for name, text in found.items() if isinstance(text, str)}


def _templates(given: Any) -> dict[str, str]:
    source = getattr(given, "chat_template", None)
    if isinstance(source, str):
        return {"default": source}
    return dict(source) if isinstance(source, Mapping) else {}
