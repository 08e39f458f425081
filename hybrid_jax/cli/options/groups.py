"""Options that several commands take, as fields of a dataclass."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from typing import Annotated, Any, get_args, get_type_hints


def spreads(**groups: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command an option for each field of some dataclasses.

    In the help, those of a dataclass stand under its `TITLE`, if it has one.

    Args:
        groups: a dataclass for each of these parameters of the command, which then gets an instance of it.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True)
        ... class Size:
        ...     rows: int = 1
        >>> @spreads(size=Size)
        ... def command(size: Size, name: str = "a") -> None:
        ...     print(name, size.rows)
        >>> str(inspect.signature(command))
        "(*, rows: int = 1, name: str = 'a') -> None"
        >>> command(rows=3, name="b")
        b 3
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(command, include_extras=True)
        parameters: list[inspect.Parameter] = []
        for name, parameter in inspect.signature(command).parameters.items():
            if name in groups:
                types = get_type_hints(groups[name], include_extras=True)
                title = getattr(groups[name], "TITLE", None)
                parameters += [_parameter(field, types, title) for field in fields(groups[name])]
            else:
                keyword = parameter.KEYWORD_ONLY
                parameters.append(parameter.replace(annotation=hints[name], kind=keyword))

        @functools.wraps(command)
        def spread(**given: Any) -> None:
            for name, group in groups.items():
                given[name] = group(
                    **{field.name: given.pop(field.name) for field in fields(group)}
                )
            command(**given)

        spread.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            parameters, return_annotation=None
        )
        spread.__annotations__ = {p.name: p.annotation for p in parameters}
        return spread

    return decorate


def _parameter(field: Field, types: dict[str, Any], title: str | None) -> inspect.Parameter:
    annotation = types[field.name]
    if title is not None:
        plain, info = get_args(annotation)
        titled = copy.copy(info)  # the same option may stand elsewhere without a title
        titled.rich_help_panel = title
        annotation = Annotated[plain, titled]
    default = inspect.Parameter.empty if field.default is MISSING else field.default
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )
