"""Chat templates: programs in Jinja that come with a model or from a caller, with the functions that they expect."""

from __future__ import annotations

import functools
import json
from datetime import datetime

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment


class NoTemplate(ValueError):
    """A model has no default chat template, and the caller named none."""


@functools.lru_cache(maxsize=64)
def compile_template(source: str) -> jinja2.Template:
    """A chat template, ready to be rendered. ValueError if it is not Jinja."""
    try:
        return _ENVIRONMENT.from_string(source)
    except jinja2.TemplateError as error:
        raise ValueError(f"chat template: {error}") from error


def quoted_strings(source: str) -> frozenset[str]:
    """The strings in quotes in a template's code. ValueError if it is not Jinja."""
    compile_template(source)
    tokens = _ENVIRONMENT.lex(source)
    return frozenset(text[1:-1] for _, kind, text in tokens if kind == "string")


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}` marks what a model wrote. Here its content is rendered unchanged."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


_ENVIRONMENT = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
)
# Plain JSON. Jinja's own filter escapes it for HTML, and no model was trained on that.
_ENVIRONMENT.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
_ENVIRONMENT.globals["raise_exception"] = _raise_exception
_ENVIRONMENT.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
