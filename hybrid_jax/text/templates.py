"""Chat templates: programs in Jinja that come with a model or from a caller, with the functions that they expect."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from types import TracebackType
from typing import Any

import jinja2
import jinja2.meta
from jinja2.ext import Extension, loopcontrols
from jinja2.utils import Namespace

from hybrid_jax.text.template_checks import MAX_WIDTH
from hybrid_jax.text.template_environment import BoundedContext, BoundedEnvironment
from hybrid_jax.text.template_limits import (
    MAX_SECONDS,
    MAX_SOURCE,
    Budget,
    LimitExceeded,
)

MAX_SAID = 2000  # characters of an error that are repeated; a template may say anything


class NoTemplate(ValueError):
    """A model has no default chat template, and the caller named none."""


@dataclass(frozen=True)
class ChatTemplate:
    """One template.

    Attributes:
        source: in Jinja.
        file: where it stands; None for one that a caller gave.
    """

    source: str
    file: str | None = None

    def render(self, variables: Mapping[str, Any], *, seconds: float = MAX_SECONDS) -> str:
        """The text that it makes of these variables.

        Raises:
            ValueError: it is not Jinja, it refuses the variables, it fails, or it does not finish within `seconds` of
                processor time. The cause is a `LimitExceeded` for the last of these.
        """
        template = self.compile()
        context: BoundedContext = template.new_context(dict(variables))
        context.budget = Budget(seconds)
        try:
            return context.budget.concat(template.root_render_func(context))
        except (
            Exception
        ) as error:  # a template is a program, and what it meets was written by somebody else
            line = _line_of(template, error.__traceback__)
            raise self._error(error, line) from error

    def compile(self) -> jinja2.Template:
        """The template, ready to be rendered. ValueError if it is not Jinja."""
        try:
            return _compile(self.source)
        except jinja2.TemplateSyntaxError as error:
            raise self._error(error, error.lineno) from error
        except (
            jinja2.TemplateError,
            SyntaxError,
            ValueError,
            RecursionError,
            MemoryError,
        ) as error:
            raise self._error(error, None) from error  # Python cannot compile what Jinja made of it

    def _error(self, error: BaseException, line: int | None) -> ValueError:
        """One line that says what is wrong, and where."""
        expected = isinstance(error, jinja2.TemplateError | TypeError)
        kind = "" if expected else f"{type(error).__name__}: "
        several = "\n" in self.source.strip()
        places = [self.file, f"line {line}" if line and (several or self.file) else None]
        where = ", ".join(place for place in places if place)
        said = error.msg if isinstance(error, SyntaxError) else str(error)
        what = " ".join(f"{kind}{said[:MAX_SAID]}".split())
        return ValueError(f"chat template: {what}{f' ({where})' if where else ''}")


def compile_template(source: str) -> jinja2.Template:
    """A chat template, ready to be rendered. ValueError if it is not Jinja."""
    return ChatTemplate(source).compile()


def quoted_strings(source: str) -> frozenset[str]:
    """The strings in quotes in a template's code. ValueError if it is not Jinja."""
    compile_template(source)
    tokens = _ENVIRONMENT.lex(source)
    return frozenset(text[1:-1] for _, kind, text in tokens if kind == "string")


@functools.lru_cache(maxsize=64)
def variables_read(source: str) -> frozenset[str]:
    """The names of variables that a template reads and does not set itself. ValueError if it is not Jinja.

    Example:
        >>> sorted(variables_read("{% set a = b %}{{ a }}{# tools #}{{ 'tools' }}"))
        ['b']
    """
    compile_template(source)
    return frozenset(jinja2.meta.find_undeclared_variables(_ENVIRONMENT.parse(source)))


@functools.lru_cache(maxsize=64)
def _compile(source: str) -> jinja2.Template:
    if len(source) > MAX_SOURCE:
        raise jinja2.TemplateError(f"has {len(source)} characters, the most are {MAX_SOURCE}")
    return _ENVIRONMENT.from_string(source)


def _line_of(template: Any, traceback: TracebackType | None) -> int | None:
    """The line of a template where an error came from."""
    line = None
    while traceback is not None:
        found = traceback.tb_frame.f_globals.get("__jinja_template__")
        if found is not None and found is template:
            line = template.get_corresponding_lineno(traceback.tb_lineno)
        traceback = traceback.tb_next
    return line


# --- what templates find ----------------------------------------------------------------------------


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}` marks what a model wrote. Here its content is rendered unchanged."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A block with variables of its own: what is set inside is not seen outside.
        call = self.call_method("_content")
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _content(self, caller: Callable[[], str]) -> str:
        return caller()


class _Namespace(Namespace):
    """`namespace(...)`, without names that begin with an underscore."""

    def __init__(
        *args: Any, **values: Any
    ) -> None:  # a template may call one of its variables `self`
        self, *given = args
        named = dict(*given, **values)
        for name in named:
            _check_name(name)
        Namespace.__init__(self, named)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(
            f"a namespace takes no name that begins with an underscore, got {name!r}; name it otherwise"
        )


class _Dict:
    """`dict(...)` and `dict.fromkeys(...)`, without what else Python's class has."""

    @jinja2.pass_context
    def __call__(self, context: BoundedContext, /, *args: Any, **values: Any) -> dict[Any, Any]:
        context.budget.weigh(*args)
        return dict(*args, **values)

    @jinja2.pass_context
    def fromkeys(self, context: BoundedContext, keys: Any, value: Any = None) -> dict[Any, Any]:
        """A dict that has the same value for each of these keys."""
        context.budget.weigh(keys)
        return dict.fromkeys(keys, value)


def _tojson(
    x: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON. Jinja's own filter escapes it for HTML, and no model was trained on that."""
    return json.dumps(
        x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    if len(format) > MAX_WIDTH:
        raise LimitExceeded(
            f"did not finish: a pattern for a date may have at most {MAX_WIDTH} characters"
        )
    return datetime.now().strftime(format)


_ENVIRONMENT = BoundedEnvironment(
    trim_blocks=True,
    lstrip_blocks=True,
    extensions=[_GenerationBlock, loopcontrols],
    filters={"tojson": _tojson},
)
_ENVIRONMENT.globals |= {
    "raise_exception": _raise_exception,
    "strftime_now": _strftime_now,
    "dict": _Dict(),
    "namespace": _Namespace,
}
