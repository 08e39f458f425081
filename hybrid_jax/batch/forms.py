"""The fields of a body that say what form the answer has: OpenAI's `response_format` and vLLM's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from hybrid_jax.batch.errors import LineError, shown
from hybrid_jax.structured_outputs import StructuredOutputsParams

TYPES = ("text", "json_object", "json_schema")


def response_format(name: str, value: Any) -> StructuredOutputsParams | None:
    """{"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "json_schema": {"schema": ...}}."""
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in TYPES:
        raise LineError(
            f'{name} must be {{"type": one of {", ".join(TYPES)}, ...}}, got {shown(value)}',
            param=name,
        )
    if kind == "text":
        return None
    if kind == "json_object":
        return _form(name, json_object=True)
    named = value.get("json_schema")
    schema = named.get("schema") if isinstance(named, dict) else None
    if not isinstance(schema, dict):
        raise LineError(
            f'{name} must have an object "schema" in its "json_schema", got {shown(value)}',
            param=name,
        )
    return _form(name, json=schema)


def structured_outputs(name: str, value: Any) -> StructuredOutputsParams:
    """An object with one of the fields of `StructuredOutputsParams`."""
    if not isinstance(value, dict):
        raise LineError(f"{name} must be an object, got {shown(value)}", param=name)
    known = [field.name for field in fields(StructuredOutputsParams)]
    for key in value:
        if key not in known:
            raise LineError(
                f"{name} has no field {shown(key)}; it has {', '.join(known)}",
                code="unknown_parameter",
                param=name,
            )
    return _form(name, **value)


def guided(to: str) -> Callable[[str, Any], StructuredOutputsParams]:
    """The reader of a field that means one of the fields of `StructuredOutputsParams`."""
    return lambda name, value: _form(name, **{to: value})


def _form(name: str, **given: Any) -> StructuredOutputsParams:
    try:
        return StructuredOutputsParams(**given)
    except ValueError as error:
        text = str(error).removeprefix("StructuredOutputsParams: ")
        raise LineError(f"{name}: {text}", param=name) from error
