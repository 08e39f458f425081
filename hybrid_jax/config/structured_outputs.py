"""What form a completion must have: a JSON schema, a regular expression, a choice or a grammar."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from hybrid_jax.config.checks import is_unicode, must, refusal, refuse_constant
from hybrid_jax.config.other_names import refuses_other_names

FORMS = ("json", "regex", "choice", "grammar", "json_object")


class ModelClass(Protocol):
    """A class that gives its JSON schema, as pydantic's models do."""

    @classmethod
    def model_json_schema(cls) -> dict[str, Any]:
        """The schema, as JSON data."""


@refuses_other_names
@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """The form of a completion's text; exactly one of the fields but the last is given. Names follow vLLM.

    Attributes:
        json: a JSON schema, as a dict, as text, or as a class with `model_json_schema()`, which every pydantic
            model has; kept as text.
        regex: a regular expression that the whole text matches; no look-around, no back-references.
        choice: texts, one of which it is; kept as a tuple.
        grammar: a context-free grammar in llguidance's variant of Lark, with a rule `start`.
        json_object: any JSON object.
        after_thoughts: the form begins after the thoughts of a model that thinks first. None for what the prompt and
            the chat template say. False: it begins at once. True: the model may think first also where they say
            nothing.

    Raises:
        ValueError: none of them is given, or several, or one has a wrong value.
        NotImplementedError: a field of a feature that does not exist yet.
        TypeError: an unknown field.

    Example:
        >>> colour = StructuredOutputsParams(choice=["red", "green"])
        >>> colour.kind, colour.value
        ('choice', ('red', 'green'))
        >>> StructuredOutputsParams(json={"type": "integer", "maximum": 9}).value
        '{"type": "integer", "maximum": 9}'
    """

    json: Mapping[str, Any] | str | type[ModelClass] | None = None
    regex: str | None = None
    choice: tuple[str, ...] | list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    after_thoughts: bool | None = None

    def __post_init__(self) -> None:
        if self.json_object is False:
            object.__setattr__(self, "json_object", None)
        given = [name for name in FORMS if getattr(self, name) is not None]
        if len(given) != 1:
            names = ", ".join(FORMS)
            raise ValueError(
                f"StructuredOutputsParams: needs exactly one of {names}, got "
                f"{' and '.join(given) or 'none'}"
            )
        name, value = given[0], getattr(self, given[0])
        if name == "json":
            value = self._schema_text(value)
        elif name == "choice":
            value = self._texts(value)
        elif name == "json_object":
            must(self, name, value is True, "True or False")
        else:
            self._check_text(name, value)
        object.__setattr__(self, name, value)
        must(
            self,
            "after_thoughts",
            self.after_thoughts in (True, False, None),
            "True, False or None",
        )

    @property
    def kind(self) -> str:
        """The name of the field that is given."""
        return next(name for name in FORMS if getattr(self, name) is not None)

    @property
    def form(self) -> StructuredOutputsParams:
        """The same without `after_thoughts`, for what depends on the form alone."""
        return self if self.after_thoughts is None else replace(self, after_thoughts=None)

    @property
    def value(self) -> str | tuple[str, ...] | bool:
        """What is given."""
        return getattr(self, self.kind)

    def _schema_text(self, schema: Any) -> str:
        if isinstance(schema, type):
            read: Any = getattr(schema, "model_json_schema", None)
            what = "a JSON schema, or a class that has model_json_schema()"
            must(self, "json", callable(read), what)
            schema = read()
        what = "a model's class or its model_json_schema(), not an instance"
        must(self, "json", not hasattr(schema, "model_json_schema"), what)
        try:
            if isinstance(schema, str):
                schema = json.loads(schema, parse_constant=refuse_constant)
            text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
        except RecursionError:
            raise refusal(self, "json", "a JSON schema that is not nested too deeply") from None
        except (TypeError, ValueError) as error:
            raise refusal(self, "json", f"a JSON schema ({error})") from None
        must(self, "json", isinstance(schema, Mapping), "a JSON schema, an object")
        self._check_text("json", text)
        return text

    def _texts(self, choice: Any) -> tuple[str, ...]:
        good = isinstance(choice, Iterable) and not isinstance(choice, str | Mapping)
        must(self, "choice", good, "a list of texts")
        texts = tuple(choice)
        object.__setattr__(self, "choice", texts)  # it may have been an iterator
        must(self, "choice", bool(texts), "at least one text")
        for text in texts:
            self._check_text("choice", text)
        return texts

    def _check_text(self, name: str, text: Any) -> None:
        must(self, name, isinstance(text, str) and bool(text), "made of non-empty text")
        must(self, name, is_unicode(text), "valid Unicode")
