"""The tokenizer of a model directory: text to token ids and back, and its chat templates.

transformers reads more kinds of tokenizers, but importing it takes seconds. `LLM(tokenizer=...)` takes its objects.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import json
import reprlib
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import tokenizers

from hybrid_jax.config.model_directory import TOKENIZER_FILE, is_there, pointer
from hybrid_jax.text.conversation import check_continuation, check_tools, render_open
from hybrid_jax.text.template_forms import TRIAL_TOOL, TemplateForm, form_of
from hybrid_jax.text.template_limits import MAX_SECONDS
from hybrid_jax.text.templates import ChatTemplate, NoTemplate, quoted_strings
from hybrid_jax.text.tokenizer_bounds import (
    called,
    check_tokenizer_bounds,
    may_join_words,
    may_remove_much,
    without_panic,
)
from hybrid_jax.text.tokenizer_files import SPECIAL_NAMES as SPECIAL_NAMES
from hybrid_jax.text.tokenizer_files import read_tokenizer_files

SAMPLE = "The quick brown fox, 0123456789: naïve 你好 🙂\n\tif x == [1]: {}"
PER_TOKEN = 8  # characters of a token; more than most texts have on average
SURPLUS = 1000  # tokens that a text of far too many has beside twice as many as fit
LONGEST_WORD = SURPLUS  # characters of a word, of which WordPiece makes several tokens
SECONDS_OF_A_TRIAL = 0.5  # of processor time, to render one conversation of a trial
SECONDS_OF_TRIALS = 3.0  # for all of them
MAX_FORMS = 64  # templates whose form is remembered


class Tokenizer:
    """A tokenizer.json, with what the files beside it say about special tokens and chat.

    Args:
        backend: the `tokenizers.Tokenizer`; None for a class that encodes and decodes by itself.
        special_tokens: from name ("bos_token", ...) to text, given to chat templates.
        chat_templates: from name to Jinja source; "default" is used unless another is named.
        template_files: from Jinja source to the file that holds it, for messages.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer | None,
        *,
        special_tokens: Mapping[str, str] | None = None,
        chat_templates: Mapping[str, str] | None = None,
        template_files: Mapping[str, str] | None = None,
    ) -> None:
        self._backend = backend
        self.special_tokens = dict(special_tokens or {})
        self.chat_templates = dict(chat_templates or {})
        self._hidden: dict[int, str] = {}
        self.template_files = dict(template_files or {})
        # Of the templates that were used, without tools and with them.
        self._forms: dict[tuple[str, bool], TemplateForm] = {}

    @classmethod
    def from_directory(cls, path: str | Path) -> Tokenizer | None:
        """Reads tokenizer.json and the files beside it; None if the directory has no tokenizer.json.

        Raises:
            ValueError: a file there is not what it should be.
        """
        folder = Path(path)
        file = folder / TOKENIZER_FILE
        if not is_there(file, "tokenizer"):
            return None
        data = file.read_bytes()
        try:
            text = data.decode()
            check_tokenizer_bounds(text)
            backend = without_panic(lambda: _whole(tokenizers.Tokenizer.from_str(text)))
            without_panic(lambda: _sampled(backend))
        except Exception as error:  # the library raises plain Exception
            hint = pointer(data[:64])
            said = f"{error}; it {hint}" if hint else str(error)
            raise ValueError(f"{file}: not a tokenizer that can be read: {said}") from error
        beside = read_tokenizer_files(folder, backend)
        backend.add_tokens(beside.added)
        return cls(
            backend,
            special_tokens=beside.special_tokens,
            chat_templates=beside.chat_templates,
            template_files=beside.template_files,
        )

    # --- text and ids -----------------------------------------------------------------------------

    @property
    def backend(self) -> tokenizers.Tokenizer:
        """The `tokenizers.Tokenizer`. ValueError if this one encodes and decodes by itself."""
        if self._backend is None:
            raise ValueError(
                f"{self!r} has no vocabulary that can be read; name a directory with a tokenizer.json"
            )
        return self._backend

    @property
    def vocab_size(self) -> int:
        """How many ids it knows, with added tokens."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @property
    def bos_token_id(self) -> int | None:
        """The token that begins a text, if there is one."""
        return self._special_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a text, if there is one."""
        return self._special_id("eos_token")

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, with the tokenizer's own special tokens unless told otherwise."""
        return self._encoding(text, add_special_tokens).ids

    def _encoding(self, text: str, add_special_tokens: bool) -> tokenizers.Encoding:
        backend = self.backend
        return called(
            f"tokenizer: {reprlib.repr(text)} cannot be encoded",
            lambda: backend.encode(text, add_special_tokens=add_special_tokens),
        )

    def is_far_beyond(self, text: str, longest: int) -> bool:
        """Whether a text has far more tokens than `longest`, by its beginning alone.

        A tokenizer in the usual form makes of the beginning nearly the tokens that it makes of the whole. Twice as many
        as fit, and more, cannot become fewer by what follows. Of any other tokenizer nothing is said, nor of an object
        with its own `encode`, which may do anything.
        """
        enough = beyond(longest)
        size = PER_TOKEN * enough
        while 2 * size < len(text) and self._goes_on_as_it_begins:
            cut = text.rfind(" ", size // 2, size) + 1 or size
            if len(self.encode(text[:cut], add_special_tokens=False)) > enough:
                return True
            size *= 2
        return False

    @functools.cached_property
    def _goes_on_as_it_begins(self) -> bool:
        """Whether no part can take away, or make one token of, a long piece of text that ends far behind its start."""
        backend = self._backend
        if backend is None:
            return False
        model: Any = backend.model
        by_words = isinstance(model, tokenizers.models.WordPiece)
        if not (by_words or isinstance(model, tokenizers.models.BPE | tokenizers.models.Unigram)):
            return False
        # Of a longer word it makes one token, so no word has more tokens. The cut may go through one.
        if by_words and model.max_input_chars_per_word > LONGEST_WORD:
            return False
        try:
            states = [
                json.loads(part.__getstate__())
                for part in (backend.normalizer, backend.pre_tokenizer)
                if part is not None
            ]
        except Exception:  # it is written in Python
            return False
        if by_words and any(map(may_join_words, states)):
            return False
        return not any(map(may_remove_much, states))

    def count_within(
        self, text: str, ids: Sequence[int], characters: Sequence[int]
    ) -> list[int] | None:
        """For each number of leading characters of a text, how many of its tokens end within them; None if unknown.

        `encode` must have made the ids of this text.
        """
        # The first token that ends behind a place is the first up to which any does.
        ends = list(itertools.accumulate(self._token_ends(text, ids), max))
        return [bisect.bisect_right(ends, place) for place in characters]

    def _token_ends(self, text: str, ids: Sequence[int]) -> list[int]:
        """Where in a text each of its tokens ends, in characters. `encode` must have made the ids of this text."""
        for add_special_tokens in (False, True):
            encoding = self._encoding(text, add_special_tokens)
            missing = len(ids) - len(encoding.ids)  # tokens that open the text
            if missing >= 0 and list(ids[missing:]) == encoding.ids:
                return [0] * missing + [end for _, end in encoding.offsets]
        raise ValueError(f"tokenizer: {len(ids)} ids are not this text's, {reprlib.repr(text)}")

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids. Bytes that are not a character become U+FFFD."""
        backend, listed = self.backend, list(ids)
        return called(
            f"tokenizer: {reprlib.repr(listed)} cannot be decoded",
            lambda: backend.decode(listed, skip_special_tokens=skip_special_tokens),
        )

    def batch_decode(
        self, sequences: Iterable[Sequence[int]], *, skip_special_tokens: bool = True
    ) -> list[str]:
        """The texts of several lists of token ids."""
        return [self.decode(ids, skip_special_tokens=skip_special_tokens) for ids in sequences]

    def hidden_text(self, token: int) -> str:
        """The text of a token that `decode` leaves out as a special one; empty for any other token."""
        hidden = self._hidden.get(token)
        if hidden is None:
            hidden = ""
            if not self.decode([token]):
                named = {self._special_id(name): text for name, text in self.special_tokens.items()}
                hidden = self.decode([token], skip_special_tokens=False) or named.get(token, "")
            self._hidden[token] = hidden
        return hidden

    def token_name(self, token: int) -> str:
        """How the vocabulary writes a token, which may stand for bytes; empty for an unknown one."""
        return self.backend.id_to_token(token) or ""

    def identity(self) -> str:
        """Text that tells it from tokenizers that make other ids or other texts."""
        return self.backend.to_str()

    def _special_id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self.backend.token_to_id(text)

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be rendered without a template from the caller."""
        return "default" in self.chat_templates

    def __repr__(self) -> str:
        chat = ", ".join(self.chat_templates) or "none"
        return f"Tokenizer({self.vocab_size} tokens, chat templates: {chat})"

    # --- chat -------------------------------------------------------------------------------------

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """Renders a conversation as text of the form on which the model was trained.

        Contents and arguments of calls are brought into the form that the template reads.

        Args:
            messages: {"role": ..., "content": ...} in order.
            chat_template: the name of one of the model's templates, or Jinja source. None for its default, or for the
                one called "tool_use" if there are tools and the model has that.
            add_generation_prompt: end with the beginning of the assistant's answer; None for yes, unless the last
                message is continued.
            continue_final_message: end with the last message's content, so that the answer goes on with it.
            tools: JSON schemas of tools, {"type": "function", "function": {"name": ..., "description": ...,
                "parameters": ...}} each, for templates that use them.
            variables: other variables that the template reads.

        Raises:
            ValueError: there is no template, it refuses the messages, it fails or does not finish, or a tool is not a
                dict.
        """
        if tools is not None:
            check_tools(tools)
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final_message
        check_continuation(continue_final_message, add_generation_prompt)
        options = {"add_generation_prompt": add_generation_prompt, "tools": tools} | variables
        render = functools.partial(self._render, chat_template=chat_template, options=options)
        fitted = self._form(chat_template, tools).fit(messages)
        return render_open(render, fitted) if continue_final_message else render(fitted)

    def _form(
        self, chat_template: str | None, tools: Sequence[Mapping[str, Any]] | None
    ) -> TemplateForm:
        """The form that a template reads."""
        with_tools = tools is not None
        key = self.template_source(chat_template, with_tools=with_tools), with_tools
        if (known := self._forms.get(key)) is not None:
            return known
        options = {"add_generation_prompt": False, "tools": [TRIAL_TOOL] if with_tools else None}
        end = time.thread_time() + SECONDS_OF_TRIALS

        def render(messages: Sequence[Mapping[str, Any]]) -> str:
            seconds = min(SECONDS_OF_A_TRIAL, end - time.thread_time())
            return self._render(
                messages, chat_template=chat_template, options=options, seconds=seconds
            )

        if len(self._forms) >= MAX_FORMS:
            self._forms.clear()
        return self._forms.setdefault(key, form_of(render))

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        chat_template: str | None,
        options: Mapping[str, Any],
        seconds: float = MAX_SECONDS,
    ) -> str:
        """The text that a template makes of messages which have its form."""
        tools = options["tools"]
        template = self._template(chat_template, with_tools=tools is not None)
        given = {"messages": list(messages), "documents": None}
        options = {**options, "tools": None if tools is None else list(tools)}
        return template.render(self.special_tokens | given | options, seconds=seconds)

    def quoted_in_template(
        self, chat_template: str | None = None, *, with_tools: bool = False
    ) -> frozenset[str]:
        """The strings in quotes in a template's code. The roles that it knows are among them.

        Raises:
            ValueError: there is no such template, or it is not Jinja.
        """
        return quoted_strings(self._template(chat_template, with_tools=with_tools).source)

    def _template(self, wanted: str | None, *, with_tools: bool) -> ChatTemplate:
        source = self._source(wanted, with_tools=with_tools)
        return ChatTemplate(source, self.template_files.get(source))

    def template_source(self, chat_template: str | None = None, *, with_tools: bool = False) -> str:
        """The source of a template, chosen as `apply_chat_template` does. Raises as that does."""
        return self._source(chat_template, with_tools=with_tools)

    def _source(self, wanted: str | None, *, with_tools: bool) -> str:
        if wanted is None and with_tools and "tool_use" in self.chat_templates:
            wanted = "tool_use"
        source = self.chat_templates.get(wanted or "default", wanted)
        if source is None:
            known = ", ".join(self.chat_templates)
            what = f"no default one (it has: {known})" if known else "none"
            what = f"chat template: this model has {what}"
            remedy = "pass chat_template=... or use generate() with a prompt of your own"
            raise NoTemplate(f"{what}; {remedy}")
        if wanted not in (None, *self.chat_templates) and "{" not in source:
            known = ", ".join(self.chat_templates) or "none"
            raise ValueError(
                f"chat template: {reprlib.repr(wanted)} is neither Jinja nor the name of a template of this model (it "
                f"has: {known}); if it is a file, read it first"
            )
        return source


def beyond(longest: int) -> int:
    """A number of tokens so far beyond the longest sequence that it does not matter where exactly a text was cut."""
    return 2 * longest + SURPLUS


def own_copy(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """A copy that neither truncates nor pads; the caller's own may still do so."""
    return _whole(tokenizers.Tokenizer.from_str(backend.to_str()))


def _sampled(backend: tokenizers.Tokenizer) -> None:
    """Encodes and decodes a short text; with a damaged table, that panics."""
    for special in (False, True):
        with suppress(Exception):  # a text without tokens is no fault of the file
            backend.decode(backend.encode(SAMPLE, add_special_tokens=special).ids or [0])


def _whole(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    backend.no_truncation()
    backend.no_padding()
    return backend


def byte_alphabet() -> list[str]:
    """The character that stands for each byte in byte-level tokenizers, by byte value.

    Printable Latin-1 characters stand for themselves. U+0100 and up stand for the other bytes, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return [
        chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)
    ]
