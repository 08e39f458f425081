"""The JSON schemas inside a Lark grammar, which are followed or refused as any other schema."""

from __future__ import annotations

import json
from collections.abc import Mapping

from hybrid_jax.constraints.lark import parts
from hybrid_jax.constraints.schemas.walk import followed


def followed_inside(grammar: str) -> str:
    """A Lark grammar with each schema behind `%json` as `followed` writes it.

    Raises:
        ValueError: as `followed` and `parts` say, or the whole grammar is JSON.

    Example:
        >>> followed_inside('start: "%json {}" %json {"$ref": 1}')
        Traceback (most recent call last):
        ValueError: $ref 1 at # is not text; write a pointer such as #/$defs/NAME
    """
    if (
        grammar.lstrip()[:1] == "{"
    ):  # llguidance would read it in another notation, past all that is checked here
        raise ValueError("it is JSON, and must be Lark; give a JSON schema as json")
    written, at = [], 0
    for part in parts(grammar):
        if part.kind == "schema":
            text = json.dumps(part.value, ensure_ascii=False)
            text = followed(text) if isinstance(part.value, Mapping) else text
            written += [grammar[at : part.begin], text]
            at = part.end
    return "".join([*written, grammar[at:]])
