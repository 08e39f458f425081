"""What a tokenizer.json may make of a text, looked at before native code reads it.

The library trusts such a file. A damaged table makes it ask for gigabytes, and a few replacements one after another
turn a line into gigabytes. Both end the process. So what could do that is measured here first. Where the library fails
with an error or a panic instead, `called` makes a ValueError of it.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
MAX_COMPONENTS = 1000  # of a part, one within the other or one after another
MAX_GROWTH = 10_000  # times that replacements may lengthen a text, all of them together
MAX_ADDED = 10_000  # characters that one component adds to a text
MAX_ID = 10_000_000
EIGHT_DIGITS = re.compile(r":\s*+\d{8}")
OF_SPACES = (" {2,}", r"\s+", " +")  # expressions that usual tokenizers replace
SPACE = re.compile(r"[ \t\r\n]*")
Answer = TypeVar("Answer")


def check_tokenizer_bounds(text: str) -> None:
    """Looks at the parts around the vocabulary. What is no JSON is left to the library, which refuses it.

    Raises:
        ValueError: a part would take too much memory, or holds a damaged table.

    Example:
        >>> check_tokenizer_bounds('{"normalizer": {"type": "Prepend", "prepend": "_"}}')
    """
    try:
        parts = _parts(text, with_model=EIGHT_DIGITS.search(text) is not None)
    except (ValueError, RecursionError):
        return
    _check_ids(parts)
    for name in PARTS:
        components = list(_components(parts.get(name)))
        if len(components) > MAX_COMPONENTS:
            raise ValueError(
                f"its {name} has {len(components)} components, the limit is {MAX_COMPONENTS}"
            )
        growth = 1
        for component in components:
            _check_component(name, component)
            growth *= _growth(component)
        if growth > MAX_GROWTH:
            raise ValueError(
                f"the replacements of its {name} lengthen a text up to {growth} times, the limit is {MAX_GROWTH}"
            )


def _parts(text: str, with_model: bool) -> dict[str, Any]:
    """The entries of the file; up to the model, which alone takes long to read, if the other ones came before it.

    Args:
        text: of the file.
        with_model: read the model in any case.

    Raises:
        ValueError, RecursionError: it is not JSON.
    """
    # An integer of thousands of digits is an error to Python, and a float to the library.
    decoder = json.JSONDecoder(parse_int=float)
    found: dict[str, Any] = {}
    position = _after_sign("{", text, 0)
    while True:
        key, position = decoder.raw_decode(text, _after_space(text, position))
        position = _after_sign(":", text, position)
        if key == "model" and not with_model and all(part in found for part in PARTS):
            return found
        found[key], position = decoder.raw_decode(text, _after_space(text, position))
        if text.startswith("}", _after_space(text, position)):
            return found
        position = _after_sign(",", text, position)


def _after_sign(sign: str, text: str, position: int) -> int:
    """Where the sign that must come next ends. ValueError if another one comes."""
    position = _after_space(text, position)
    if not text.startswith(sign, position):
        raise ValueError(f"no {sign}")
    return position + 1


def _after_space(text: str, position: int) -> int:
    found = SPACE.match(text, position)
    return found.end() if found else position


def _check_ids(parts: dict[str, Any]) -> None:
    """ValueError if an id is so large that going through all ids up to it, as the library does, takes minutes."""
    vocabulary = parts["model"].get("vocab") if isinstance(parts.get("model"), dict) else None
    ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else []
    added = parts.get("added_tokens")
    ids += [_id(token) for token in added] if isinstance(added, list) else []
    largest = max((number for number in ids if isinstance(number, float)), default=0.0)
    if largest >= MAX_ID:
        raise ValueError(f"it has a token with the id {largest:.0f}, the limit is {MAX_ID}")


def _id(token: Any) -> Any:
    return token.get("id") if isinstance(token, dict) else None


def _components(part: Any) -> Iterator[dict]:
    """A part and all components in it, whatever they are called."""
    waiting = [part]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            yield value
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value


def _is(component: dict, kind: str) -> bool:
    return component.get("type") == kind


def _text(component: dict, name: str) -> str:
    value = component.get(name)
    return value if isinstance(value, str) else ""


def _growth(component: dict) -> int:
    """How many times a component may lengthen a text."""
    length, pattern = len(_text(component, "content")), component.get("pattern")
    if not _is(component, "Replace") or not length:
        return 1
    # What matches nothing is put between all letters, and an expression may match nothing.
    literal = isinstance(pattern, dict) and bool(pattern.get("String"))
    return length if literal else length + 1


def _check_component(part: str, component: dict) -> None:
    for name in ("content", "prepend", "replacement"):
        length = len(_text(component, name))
        if length > MAX_ADDED:
            raise ValueError(
                f"{name} in its {part} has {length} characters, the limit is {MAX_ADDED}"
            )
    if _is(component, "Precompiled"):
        table = _text(component, "precompiled_charsmap")
        if not _is_table(table):
            raise ValueError(f"precompiled_charsmap in its {part} is damaged")


def _is_table(text: str) -> bool:
    """Whether a text is a table of sentencepiece: the bytes of a trie, as 4 bytes; the trie; UTF-8 between zeros."""
    try:
        data = base64.b64decode(text, validate=True)
        size = int.from_bytes(data[:4], "little")
        data[4 + size :].decode()
    except ValueError:
        return False
    return len(data) >= 4 + size and size > 0 and size % 4 == 0


def may_remove_much(part: Any) -> bool:
    """Whether a normalizer or a pre-tokenizer may take a piece of any length out of a text.

    Args:
        part: as JSON.

    Example:
        >>> may_remove_much({"type": "Replace", "pattern": {"Regex": "<a>.*</a>"}, "content": ""})
        True
        >>> may_remove_much({"type": "Replace", "pattern": {"String": " "}, "content": "_"})
        False
    """
    return any(
        "Regex" in pattern
        and pattern["Regex"] not in OF_SPACES
        and (_is(component, "Replace") or component.get("behavior") == "Removed")
        for component in _components(part)
        if isinstance(pattern := component.get("pattern"), dict)
    )


def may_join_words(part: Any) -> bool:
    """Whether a normalizer or a pre-tokenizer may make one word of what an expression finds, of any length.

    Args:
        part: as JSON.

    Example:
        >>> may_join_words({"type": "Split", "pattern": {"Regex": "a.*b"}, "behavior": "Isolated"})
        True
        >>> may_join_words({"type": "BertPreTokenizer"})
        False
    """
    return any(
        "Regex" in pattern and pattern["Regex"] not in OF_SPACES
        for component in _components(part)
        if isinstance(pattern := component.get("pattern"), dict)
    )


def without_panic(function: Callable[[], Answer]) -> Answer:
    """What a function of the library returns. A panic, which is no exception of Python's own, becomes a ValueError."""
    try:
        return function()
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"the library tokenizers fails at it: {error}") from error


def called(what: str, function: Callable[[], Answer]) -> Answer:
    """What a function of the library returns. If it fails, a ValueError says `what` before the reason.

    Example:
        >>> called("tokenizer: 'a' cannot be encoded", lambda: [1, 2])
        [1, 2]
    """
    try:
        return without_panic(function)
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"{what}: {error}") from error
