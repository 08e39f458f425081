"""The texts of a schema: their formats, and characters that cannot be written in them."""

from __future__ import annotations

import re
from collections.abc import Set

from hybrid_jax.constraints.matches import character_of

FORMATS = (
    "date-time",
    "time",
    "date",
    "duration",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "uuid",
    "uri",
)
_YEAR = "(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_LEAP = "(?:0[48]|[2468][048]|[13579][26])"
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|(?:[0-9]{{2}}{_LEAP}|{_LEAP}00)-02-29)"
)
_CLOCK = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_CLOCK}:[0-5][0-9](?:\.[0-9]+)?(?:[zZ]|[+-]{_CLOCK})"
# llguidance 1.9.1 lets 29 February be in every year, and a minute have 61 seconds on every day.
OWN_FORMATS = {"date": _DATE, "time": _TIME, "date-time": f"{_DATE}[tT]{_TIME}"}
LONGEST_HOSTNAME = 253

# What may follow a backslash. Without "u", each text has one spelling; with it, names have others: \u0061 is "a".
ESCAPES = 'nrbtf\\"u'
# Characters that JSON, or llguidance, writes with a backslash and a letter, or as \u and their number.
CONTROLS = frozenset(map(chr, [*range(32), 127]))
LETTERS = {"\n": "n", "\r": "r", "\b": "b", "\t": "t", "\f": "f"}
NOTHING = "[a&&b]"  # as an expression
# Characters and sets of an expression as `portable` writes it.
_CHARACTERS = re.compile(
    r"\[\^?(?:\\.|\[(?:\\.|[^\]\\])*\]|[^\]\\])*\]|\\x\{[0-9a-f]+\}|\\[pP](?:\{[^}]*\}|.)|\\.", re.S
)


def _as_ranges(characters: Set[str]) -> str:
    """Characters for the inside of the brackets of an expression.

    Example:
        >>> _as_ranges({"a", "b", "c", "x"})
        '\\\\x{61}-\\\\x{63}\\\\x{78}'
    """
    codes = sorted(map(ord, characters))
    first = [code for code in codes if code - 1 not in set(codes)]
    last = [code for code in codes if code + 1 not in set(codes)]
    ranges = zip(first, last, strict=True)
    return "".join(f"\\x{{{a:x}}}" + (f"-\\x{{{b:x}}}" if b > a else "") for a, b in ranges)


def without(pattern: str, unwritten: Set[str]) -> str:
    """A written pattern without characters that no text can have. llguidance sees if nothing is left of it.

    llguidance 1.9.1 adds a quote and a backslash to a set that has all of the first 32 characters. So a set in which
    they may be leaves out the first one.

    Example:
        >>> without(r"^[^a]\\x{1}$", {"\\x01"})
        '^[[^a]&&[^\\\\x{0}-\\\\x{1}]][a&&b]$'
    """
    left_out = _as_ranges(unwritten | {"\0"})

    def rest_of(found: re.Match[str]) -> str:
        part = found[0]
        if part[0] == "[":
            mixed = part[1] in "^[" or any(sign in part for sign in ("-", r"\p", r"\P"))
            named = unwritten and (r"\x" in part or r"\v" in part)
            return f"[{part}&&[^{left_out}]]" if mixed or named else part
        single = part[1] not in "pP"
        return NOTHING if single and character_of(part) in unwritten else part

    return _CHARACTERS.sub(rest_of, pattern)


def is_unusual(name: str) -> bool:
    """Whether a name has characters that only some validators may count among letters, digits or spaces."""
    return not (name.isascii() and name.isprintable())
