"""What public calls say of arguments that they do not have, and of flags that are neither True nor False."""

from __future__ import annotations

import functools
import inspect
import reprlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from typing import Any, NoReturn, TypeVar

from hybrid_jax.api.options import ChatOptions
from hybrid_jax.config import EngineConfig
from hybrid_jax.config.other_names import nearest, other_names, refuse_name
from hybrid_jax.config.sampling_params import SamplingParams

Function = TypeVar("Function", bound=Callable[..., Any])
PARAMS = "sampling_params"
PARAMS_FIELDS = frozenset(field.name for field in fields(SamplingParams))
ENGINE_FIELDS = frozenset(field.name for field in fields(EngineConfig))
CHAT_OPTIONS = frozenset(ChatOptions.__annotations__)
# By annotation: what else than True and False such an argument may be.
FLAGS: Mapping[str, str] = {
    "bool": "",
    "bool | None": ", or None",
    "ProgressOption": ", None, or a function of (done, total)",
}


def checks_arguments(call: Function) -> Function:
    """Lets a public call refuse unknown keywords and wrong flags in one line. Its signature stays what it was.

    Keywords of a call that takes any are left to it, but for those of a chat.

    Example:
        >>> @checks_arguments
        ... def embed(prompts: str, *, normalize: bool = True) -> None: ...
        >>> embed("a", normalize="yes")
        Traceback (most recent call last):
        ValueError: embed: normalize must be True or False, got 'yes'; give one of these
    """
    parameters = inspect.signature(call).parameters
    named = {p.name for p in parameters.values() if p.kind is not p.VAR_KEYWORD} - {"self", "cls"}
    more = next((p.annotation for p in parameters.values() if p.kind is p.VAR_KEYWORD), None)
    chats = more == "Unpack[ChatOptions]"
    known = named | CHAT_OPTIONS if chats else named
    flags = {
        p.name: p.annotation
        for p in parameters.values()
        if p.annotation in FLAGS and p.name not in ENGINE_FIELDS  # which the config checks itself
    }
    where = call.__qualname__.replace("Reader.", "LLM.").removesuffix(".__init__")
    where = where.rpartition("<locals>.")[2]

    @functools.wraps(call)
    def checked(*args: Any, **given: Any) -> Any:
        for name, value in given.items():
            if name in flags:
                given[name] = _flag(where, name, value, flags[name])
            elif name not in known and (more is None or chats):
                _refuse(where, name, known, chats=chats)
        return call(*args, **given)

    return checked  # type: ignore[return-value]  # it takes and returns what the call does


def _flag(where: str, name: str, value: Any, annotation: str) -> Any:
    """The value of a flag. numpy's booleans become Python's own."""
    if type(value).__name__ in ("bool", "bool_"):
        return bool(value)
    others = FLAGS[annotation]
    if others and (value is None or ("function" in others and callable(value))):
        return value
    raise ValueError(
        f"{where}: {name} must be True or False{others}, got {reprlib.repr(value)}; give one of these"
    )


def _refuse(where: str, name: str, known: Collection[str], *, chats: bool) -> NoReturn:
    """Raises for a keyword that a call does not have, and says where it belongs."""
    unknown = f"{where}: unknown argument {name!r}"
    tables, chat_tables = other_names("SamplingParams"), other_names("LLM.chat")
    takes_params = PARAMS in known
    if takes_params and name in PARAMS_FIELDS:
        raise TypeError(f"{unknown}; {_in_params(name)}")
    near = nearest(name, known)
    if chats and (near or any(name in table for table in chat_tables.values())):
        refuse_name("LLM.chat", name, known, what="option")
    if near:
        raise TypeError(f"{unknown}; did you mean {near}?")
    if takes_params:
        if feature := tables["later"].get(name):
            raise NotImplementedError(f"{where}: {name}: {feature} is not built yet; leave it out")
        if meant := tables["ours"].get(name):
            raise TypeError(f"{unknown}; in SamplingParams it is {meant}")
        if name in CHAT_OPTIONS:
            raise TypeError(f"{unknown}; it is one of LLM.chat, which takes messages")
        if near := nearest(name, PARAMS_FIELDS):
            raise TypeError(f"{unknown}; if you mean {near}, {_in_params(near)}")
    if name in ENGINE_FIELDS:
        raise TypeError(f"{unknown}; it belongs to the model: LLM({name}=...)")
    if chats:
        refuse_name("LLM.chat", name, known, what="option")
    if name in PARAMS_FIELDS:
        raise TypeError(f"{unknown}; nothing is generated here, so leave it out")
    has = f"it has {', '.join(sorted(known))}" if known else "it takes none"
    raise TypeError(f"{unknown}; {has}")


def _in_params(name: str) -> str:
    return f"it belongs into SamplingParams: {PARAMS}=SamplingParams({name}=...)"
