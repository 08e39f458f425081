"""How much each method of a value and each filter of a template may make, asked before it is called.

A method of a text, a number, a list or a dict that is not in `METHODS` cannot be called: a new version of Python may
bring one that makes much of little. Each check takes the budget, the value and the arguments. It returns other
arguments, or None.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jinja2
from markupsafe import Markup

from hybrid_jax.text.template_limits import (
    ITEM,
    LONG,
    MAX_ITEMS,
    MAX_TEXT,
    Budget,
    LimitExceeded,
    check_bits,
)

MAX_WIDTH = 1000  # of indents, of digits of a rounded number, and of patterns of dates
MAX_SLOW = 1 << 16  # characters for filters whose time grows with the square of the length
MAX_STEPS = 1 << 30  # comparisons of characters in one search
MAX_LEVELS = 1 << 20  # items for `pprint`, each counted once for each list around it
LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
ESCAPED = "&<>\"'"
# Codecs whose time and output grow with the length of the text alone.
CODECS = frozenset(
    "ascii us-ascii latin-1 latin1 iso-8859-1 cp1252 windows-1252 utf utf8 utf-8 utf-8-sig utf16 utf-16 utf-16-le "
    "utf-16-be utf-16le utf-16be utf32 utf-32 utf-32-le utf-32-be utf-32le utf-32be".split()
)
# Characters that a codec writes for one that it does not have, by the name of the way with errors.
GROWTH = {
    **dict.fromkeys(("strict", "ignore", "replace", "surrogateescape", "surrogatepass"), 4),
    **dict.fromkeys(("xmlcharrefreplace", "backslashreplace"), 10),
    "namereplace": 100,
}
NUMBER = re.compile(r"\d+")
Check = Callable[..., Any]


# --- sizes --------------------------------------------------------------------------------------------


def product_size(left: Any, right: Any) -> int:
    """How long the product of a text or a list and a number is; 0 if it is a number."""
    if isinstance(left, int) and isinstance(right, int):
        check_bits(left.bit_length() + right.bit_length())
    for repeated, times in ((left, right), (right, left)):
        if isinstance(repeated, str | list | tuple | bytes) and isinstance(times, int):
            return len(repeated) * times
    return 0


def check_percent(budget: Budget, pattern: str | bytes, *values: Any) -> None:
    """LimitExceeded if the operator % would make too much of a pattern."""
    text = pattern if isinstance(pattern, str) else pattern.decode("latin-1")
    width = numbers_in(text)
    content = budget.weigh(*values)
    if "*" in text:  # a width that is among the values
        content += sum(abs(value) for value in _integers(values))
    budget.allow(len(text) + width + text.count("%") * content)


def numbers_in(text: str) -> int:
    """The sum of the numbers in a pattern, or more than any limit."""
    return sum(int(digits.lstrip("0")[:12] or 0) for digits in NUMBER.findall(text))


def _integers(values: Any) -> Iterable[int]:
    for value in values.values() if isinstance(values, Mapping) else values:
        if isinstance(value, int):
            yield value
        elif isinstance(value, list | tuple | Mapping):
            yield from _integers(value)


def check_small(what: str, value: Any) -> None:
    """LimitExceeded for a number, or a text of a length, of more than `MAX_WIDTH`."""
    size = len(value) if isinstance(value, str | bytes) else value
    if isinstance(size, int) and abs(size) > MAX_WIDTH:
        raise LimitExceeded(f"did not finish: {what} may be at most {MAX_WIDTH}")


def _check_steps(budget: Budget, text: Any, wanted: Any) -> None:
    """A search that can look at each character as often as the wanted text is long."""
    if isinstance(wanted, str | bytes) and len(text) * len(wanted) > MAX_STEPS:
        raise LimitExceeded(
            f"did not finish: it looks for {len(wanted)} characters in {len(text)}; look for fewer"
        )


def _count_any(text: Any, characters: str) -> int:
    if isinstance(text, bytes):
        return sum(text.count(character.encode("latin-1")) for character in characters)
    return sum(str.count(text, character) for character in characters)


def _lines(text: Any) -> int:
    """The number of lines, or more."""
    return 1 + _count_any(text, LINE_ENDS if isinstance(text, str) else "\n\r")


def depths(value: Any) -> int:
    """The items in a value, each counted once for each list or dict around it. Those are as many indents in print."""
    total, depth, level = 0, 0, [value]
    while level:
        total += depth * len(level)
        if total > MAX_TEXT:
            break
        below: list[Any] = []
        for item in level:
            if isinstance(item, Mapping):
                below += item.values()
            elif isinstance(item, list | tuple):
                below += item
        depth, level = depth + 1, below
    return total


# --- methods ------------------------------------------------------------------------------------------


def _check_padding(budget: Budget, owner: Any, width: Any = 0, *_: Any, **__: Any) -> None:
    if isinstance(width, int):
        budget.allow(width)


def _check_tabs(budget: Budget, owner: Any, tabsize: Any = 8, *_: Any, **__: Any) -> None:
    if isinstance(tabsize, int):
        budget.allow(len(owner) + _count_any(owner, "\t") * tabsize)


def _check_replace(budget: Budget, owner: Any, *args: Any, **options: Any) -> None:
    if len(args) > 1 and _are_alike(owner, *args[:2]):
        count = type(owner).count(owner, args[0])
        budget.allow(len(owner) + count * len(args[1]))


def _are_alike(*texts: Any) -> bool:
    """Whether all are texts, or all are bytes."""
    return all(isinstance(text, str) for text in texts) or all(
        isinstance(text, bytes) for text in texts
    )


def _check_join(budget: Budget, owner: Any, items: Any = (), *_: Any, **__: Any) -> tuple[Any]:
    items = items if isinstance(items, list | tuple | str) else list(items)
    texts = (item for item in items if isinstance(item, str | bytes))
    budget.allow(sum(map(len, texts)) + len(owner) * len(items))
    return (items,)


def _check_translate(budget: Budget, owner: Any, table: Any = None, *_: Any, **__: Any) -> None:
    if isinstance(owner, str) and isinstance(table, Mapping | list | tuple):
        values = table.values() if isinstance(table, Mapping) else table
        lengths = [len(value) for value in values if isinstance(value, str)]
        budget.allow(len(owner) * max(lengths, default=1))


def _check_split(budget: Budget, owner: Any, sep: Any = None, *_: Any, **__: Any) -> None:
    if len(owner) > LONG:
        pieces = (
            type(owner).count(owner, sep) if sep and _are_alike(owner, sep) else len(owner) // 2
        )
        budget.allow(ITEM * (pieces + 1))
    _check_steps(budget, owner, sep)


def _check_lines(budget: Budget, owner: Any, *_: Any, **__: Any) -> None:
    if len(owner) > LONG:
        budget.allow(ITEM * _lines(owner))


def _check_codec(
    budget: Budget, owner: Any, encoding: Any = "utf-8", errors: Any = "strict", *_: Any, **__: Any
) -> None:
    if isinstance(encoding, str):
        _check_name("codec", encoding.lower().replace("_", "-"), CODECS)
    if isinstance(errors, str):
        _check_name("way with errors", errors, GROWTH)
        if GROWTH[errors] > 4:
            budget.allow(len(owner) * GROWTH[errors])


def _check_name(what: str, name: str, known: Iterable[str]) -> None:
    if name not in known:
        raise jinja2.exceptions.SecurityError(
            f"the {what} {name[:40]!r} is not for templates; use one of {', '.join(sorted(known))}"
        )


def _check_length(budget: Budget, owner: Any, length: Any = 1, *_: Any, **__: Any) -> None:
    if isinstance(length, int):
        budget.allow(length)


def _check_search(budget: Budget, owner: Any, wanted: Any = None, *_: Any, **__: Any) -> None:
    """A search from the end of a text, or one in a list, which looks into its items."""
    if isinstance(owner, str | bytes):
        _check_steps(budget, owner, wanted)
    else:
        budget.weigh(owner, wanted)


def _check_strip(budget: Budget, owner: Any, chars: Any = None, *_: Any, **__: Any) -> None:
    check_small("what is stripped", chars)
    _check_steps(budget, owner, chars)


def _check_unescape(budget: Budget, owner: Any, *_: Any, **__: Any) -> None:
    check_slow("a method of escaped text", len(owner))


def check_slow(what: str, weight: int) -> None:
    """LimitExceeded for more than what takes its time with the square of the length."""
    if weight > MAX_SLOW:
        raise LimitExceeded(
            f"did not finish: {what} takes at most {MAX_SLOW} characters or items, got {weight}"
        )


def _plain(names: str) -> dict[str, Check | None]:
    """Methods that make at most three times what they are given, in a time that grows as it does."""
    return dict.fromkeys(names.split())


_OF_TEXT_AND_BYTES: dict[str, Check | None] = {
    **_plain(
        "capitalize count endswith find index isalnum isalpha isascii isdigit islower isspace istitle isupper lower "
        "maketrans partition removeprefix removesuffix startswith swapcase title upper"
    ),
    **dict.fromkeys(("center", "ljust", "rjust", "zfill"), _check_padding),
    "expandtabs": _check_tabs,
    "replace": _check_replace,
    "join": _check_join,
    "translate": _check_translate,
    **dict.fromkeys(("split", "rsplit"), _check_split),
    **dict.fromkeys(("rfind", "rindex", "rpartition"), _check_search),
    "splitlines": _check_lines,
    **dict.fromkeys(("strip", "lstrip", "rstrip"), _check_strip),
}
_OF_NUMBERS = _plain("as_integer_ratio conjugate fromhex hex is_integer")
_OF_LISTS: dict[str, Check | None] = {
    "copy": None,
    **dict.fromkeys(("count", "index"), _check_search),
}
# By the type of the value. Those of a class count for the classes that are derived from it.
METHODS: dict[type, dict[str, Check | None]] = {
    str: {
        **_OF_TEXT_AND_BYTES,
        **_plain("casefold format format_map isdecimal isidentifier isnumeric isprintable"),
        "encode": _check_codec,
    },
    Markup: {"escape": None, **dict.fromkeys(("striptags", "unescape"), _check_unescape)},
    bytes: {**_OF_TEXT_AND_BYTES, **_plain("fromhex hex"), "decode": _check_codec},
    int: {
        **_OF_NUMBERS,
        **_plain("bit_count bit_length from_bytes"),
        "to_bytes": _check_length,
    },
    float: _OF_NUMBERS,
    list: _OF_LISTS,
    tuple: _OF_LISTS,
    range: _OF_LISTS,
    dict: _plain("copy fromkeys get items keys values"),
    **dict.fromkeys(map(type, ({}.keys(), {}.values(), {}.items())), _plain("isdisjoint")),
    set: _plain(
        "copy difference intersection isdisjoint issubset issuperset symmetric_difference union"
    ),
}


def checked_method(method: Any, budget: Budget, args: tuple[Any, ...], options: Any) -> Any:
    """The arguments with which a method of a value may be called; as given for values of other types.

    Raises:
        jinja2.exceptions.SecurityError: it is none of those that templates may call.
        LimitExceeded: it would make too much.
    """
    owner, name = method.__self__, method.__name__
    kind = owner if isinstance(owner, type) else type(owner)
    known = False
    for base in kind.__mro__:
        methods = METHODS.get(base)
        if methods is None:
            continue
        known = known or hasattr(base, name)
        if name in methods:
            for value in (*args, *options.values()):
                budget.weighed(value)
            check = methods[name]
            return args if check is None else check(budget, owner, *args, **options) or args
    if known:
        raise jinja2.exceptions.SecurityError(
            f"the method {name} of {kind.__name__} is not for templates; do without it"
        )
    return args


# --- filters ------------------------------------------------------------------------------------------

# Filters that look at all that is in a value. They are given lists instead of iterators, which can be weighed.
DEEP = frozenset(
    "capitalize center dictsort e escape forceescape format groupby indent join lower max min pprint replace safe sort "
    "string striptags title tojson trim unique upper urlencode urlize wordcount wordwrap xmlattr".split()
)
SLOW = frozenset(("pprint", "striptags", "urlize", "wordwrap", "xmlattr"))
# Filters that go through a list, and may look at no clock.
GOING_THROUGH = frozenset("batch map reject rejectattr select selectattr slice".split())
# Filters whose other arguments are handed on as they are.
HANDING_ON = frozenset(("d", "default"))
# Where filters take the name of an attribute, which is split into its parts. All take it as an option, too.
NOWHERE = slice(0)
BY_ATTRIBUTE = {
    **dict.fromkeys(("max", "min", "sort", "sum", "unique"), slice(1, None)),
    **dict.fromkeys(("groupby", "rejectattr", "selectattr"), slice(1, 2)),
    "join": slice(2, 3),
}
# Tests that look at the type of a value or at what it is, and never into it.
QUICK_TESTS = frozenset(
    "boolean callable defined escaped false float integer iterable mapping none number sameas sequence string true "
    "undefined".split()
)


def _check_width(budget: Budget, value: Any, width: Any = 0, *_: Any, **__: Any) -> None:
    if isinstance(width, int):
        budget.allow(width)


def _check_indent(budget: Budget, value: Any, width: Any = 4, *_: Any, **__: Any) -> None:
    text = str(value)
    each = len(width) if isinstance(width, str) else width
    budget.allow(len(text) + each * (1 + _lines(text)))


def _check_count(budget: Budget, value: Any, linecount: Any = 1, *_: Any, **options: Any) -> None:
    if isinstance(count := options.get("slices", linecount), int):
        budget.allow(ITEM * count)


def _check_precision(budget: Budget, value: Any, precision: Any = 0, *_: Any, **__: Any) -> None:
    check_small("the precision of round", precision)


def _check_old_and_new(
    budget: Budget, value: Any, old: Any = "", new: Any = "", *_: Any, **__: Any
) -> None:
    _check_replace(budget, str(value), str(old), str(new))


def _check_separator(budget: Budget, value: Any, d: Any = "", *_: Any, **__: Any) -> None:
    budget.allow(budget.weigh(value, d) + len(value) * len(str(d)))


def _check_values(budget: Budget, value: Any, *args: Any, **options: Any) -> None:
    check_percent(budget, str(value), args or options)


def _check_json(
    budget: Budget,
    value: Any,
    ensure_ascii: Any = False,
    indent: Any = None,
    separators: Any = None,
    *_: Any,
    **__: Any,
) -> None:
    for what in (indent, *(separators if isinstance(separators, list | tuple) else ())):
        check_small("each indent and separator of tojson", what)
    if indent is not None:
        each = len(indent) if isinstance(indent, str) else int(indent)
        budget.allow((1 + max(each, 0)) * depths(value))


def _check_levels(budget: Budget, value: Any, *_: Any, **__: Any) -> None:
    if depths(value) > MAX_LEVELS:
        raise LimitExceeded("did not finish: it prints lists in lists in lists; write them flatter")


def _check_list(budget: Budget, value: Any, *_: Any, **__: Any) -> None:
    if isinstance(value, str | bytes | range):
        budget.allow(len(value))
        budget.spend(ITEM * len(value))


def _check_wrapping(budget: Budget, value: Any, *args: Any, **options: Any) -> None:
    given = [other for other in (*args, *options.values()) if isinstance(other, str)]
    budget.allow((1 + len(str(value))) * (1 + sum(map(len, given))))


def _check_escape(budget: Budget, value: Any, *_: Any, **__: Any) -> None:
    if isinstance(value, str):
        budget.allow(len(value) + 4 * _count_any(value, ESCAPED))


def _check_quoting(budget: Budget, value: Any, *_: Any, **__: Any) -> None:
    budget.allow(12 * budget.weigh(value))


def _check_items(budget: Budget, value: Any, *_: Any, **__: Any) -> None:
    """A text whose characters are compared with one another. Lists have been weighed."""
    if isinstance(value, str) and len(value) > MAX_ITEMS:
        raise LimitExceeded(f"did not finish: it looks into a value of more than {MAX_ITEMS} items")


def _check_trim(budget: Budget, value: Any, chars: Any = None, *_: Any, **__: Any) -> None:
    _check_strip(budget, str(value), chars)


FILTERS: dict[str, Callable[..., None]] = {
    "center": _check_width,
    "indent": _check_indent,
    **dict.fromkeys(("batch", "slice"), _check_count),
    "round": _check_precision,
    "replace": _check_old_and_new,
    "join": _check_separator,
    "format": _check_values,
    "tojson": _check_json,
    "pprint": _check_levels,
    "list": _check_list,
    **dict.fromkeys(("wordwrap", "urlize"), _check_wrapping),
    **dict.fromkeys(("e", "escape", "forceescape"), _check_escape),
    "urlencode": _check_quoting,
    "trim": _check_trim,
    **dict.fromkeys(("groupby", "max", "min", "sort", "unique"), _check_items),
}
