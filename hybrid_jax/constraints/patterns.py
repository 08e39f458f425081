"""Regular expressions, written again so that every reader of them means the same.

Dialects differ: `[a&&b]` and `a++` mean something else to llguidance (which reads as Rust's crate regex does) than to
Python and ECMAScript, and `\\d`, `\\w`, `\\s` and `.` are different sets in each. Here an expression is taken apart
and written in the part of the notation that all share. Each set is written out in the safe sense: all dialects match
what it matches.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

# Sets inside brackets. NARROW is in the set for every dialect, WIDE is in it for at least one of them.
_SPACES = r"\t\n\v\f\r \xa0\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}"
_WORDS = r"\p{Alphabetic}\p{L}\p{N}\p{M}\p{Pc}\x{200c}\x{200d}"
_ASCII_WORDS = "0-9A-Za-z_"
_NARROW = {
    "d": "0-9",
    "w": _ASCII_WORDS,
    "s": _SPACES,
    "D": r"[^\p{Nd}]",
    "W": f"[^{_WORDS}]",
    "S": r"[^\p{White_Space}\x1c-\x1f\x{feff}]",
}
# Outside JSON schemas. Letters and digits that Python's tables may not have yet are left out.
_NARROW_UNICODE = _NARROW | {
    "d": r"[\p{Nd}&&\p{age:14.0}]",
    "w": r"[\p{L}\p{Nd}_&&\p{age:14.0}]",
    "s": rf"{_SPACES}\x85",
}
_WIDE = {
    "d": r"\p{Nd}",
    "w": _WORDS,
    "s": r"\p{White_Space}\x1c-\x1f\x{feff}",
    "D": "[^0-9]",
    "W": f"[^{_ASCII_WORDS}]",
    "S": f"[^{_SPACES}]",
}
_CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13}
_LINE_ENDS = r"\n\r\x{2028}\x{2029}"
# Letters that a search without case also takes for an ASCII letter, in one dialect or the other.
_ALSO_CASES = r"\x{130}\x{131}\x{17f}\x{212a}"
# To Python, a text may also end before its last line end.
WIDE_END = r"\n?$"
_SPECIAL = frozenset(r"\.+*?()|[]{}^$#&-~")
# These are matched at a position of the expression, and none of them looks twice at what it has read.
_QUANTIFIER = re.compile(r"[*+?]|\{([0-9]++)(?:,([0-9]*+))?\}")
_OPEN_COUNT = re.compile(r"\{,[0-9]*+\}")
_BLANKS = r"(?:\s|#[^\n]*+)*+"
_SPACED_COUNT = re.compile(rf"\{{{_BLANKS}(?:[0-9]++{_BLANKS},?|,){_BLANKS}[0-9]*+{_BLANKS}\}}")
_NAMED = re.compile(r"\(\?P?<[A-Za-z_]\w*+>", re.ASCII)
_FLAGS = re.compile(r"\(\?([a-zA-Z]++)([:)])")
_PROPERTY = re.compile(
    r"\\[pP](?:[A-Z]|\{\^?[A-Za-z0-9_ ]++(?:[=:][A-Za-z0-9_. -]++)?\})", re.ASCII
)
_CODE = re.compile(
    r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|[xuU]\{([0-9a-fA-F]{1,8})\}"
)
_RANGE = re.compile(r"-[^\]]", re.DOTALL)
_ESCAPED = re.compile(r"\\.", re.DOTALL)
_BLANK = re.compile(r"[\s#]")
_ONE_BLANK = re.compile(r"\[\^?[\s#]\]")
_RANGE_TO_SET = re.compile(r"\\[dDwWsSpP]|\[")
# What all dialects leave out of a verbose expression. Rust leaves out other white space, too, and also in classes and
# counts. Validators of JSON schemas do not.
_VERBOSE_SPACES = frozenset(" \t\n\r\v\f")
_SET_OPERATORS = ("&&", "--", "~~", "||")


class NotPortable(ValueError):
    """A part of an expression that dialects read differently, or that cannot be followed token by token."""


def portable(pattern: str, *, ecma: bool, wide: bool = False) -> str:
    """Writes a regular expression for llguidance so that it matches only what every dialect matches.

    Args:
        pattern: the expression.
        ecma: it is the `pattern` of a JSON schema (ECMA 262, or Python's `re`, whichever the validator uses). Otherwise
            it is one of Python's `re` or of Rust's crate regex.
        wide: match everything that some dialect matches instead.

    Returns:
        the expression, without lazy quantifiers, names and `\\d`-like sets.

    Raises:
        NotPortable: a part of it means different things in different dialects, is not regular, or is wrong.

    Example:
        >>> portable(r"^\\d+?[a&b]$", ecma=True)
        '^[0-9]+[a\\\\&b]$'
    """
    return _Writer(pattern, ecma, wide).write()


def _character(char: str) -> str:
    """One character, inside or outside brackets."""
    if char in _SPECIAL:
        return "\\" + char
    if char.isascii() and char.isprintable():
        return char  # not \<, which is the beginning of a word to Rust
    code = ord(char)
    named = {code: name for name, code in _CONTROLS.items()}.get(code)
    return f"\\{named}" if named else f"\\x{{{code:x}}}"


def _number(digits: str) -> tuple[int, str]:
    """Orders counts by their digits, of which Python would not read thousands as a number."""
    digits = digits.lstrip("0")
    return len(digits), digits


@dataclass
class _Group:
    """A group that is open.

    Attributes:
        ignore_case, all_lines, verbose: its flags i, s and x.
    """

    ignore_case: bool = False
    all_lines: bool = False
    verbose: bool = False


@dataclass
class _Writer:
    """Takes one expression apart, from left to right.

    Attributes:
        at: where the rest begins.
        groups: those that are open, the whole expression first.
        may_repeat: a quantifier may come next.
    """

    pattern: str
    ecma: bool
    wide: bool
    at: int = 0
    groups: list[_Group] = field(default_factory=lambda: [_Group()])
    may_repeat: bool = False

    def write(self) -> str:
        parts = []
        while self.at < len(self.pattern):
            parts.append(self._next())
        if len(self.groups) > 1:
            raise NotPortable("unclosed group; close it with )")
        return "".join(parts)

    def _here(self, count: int) -> str:
        """The next characters, as many as there are up to a count."""
        return self.pattern[self.at : self.at + count]

    def _next(self) -> str:
        char, verbose = self.pattern[self.at], self.groups[-1].verbose
        if verbose and self._is_left_out(char):
            return ""
        if found := _QUANTIFIER.match(self.pattern, self.at):
            return self._quantifier(found)
        may_count = _SPACED_COUNT if verbose and not self.ecma else _OPEN_COUNT
        if found := may_count.match(self.pattern, self.at):
            text = " ".join(found[0].split())
            raise NotPortable(
                f"{text} is a count for some and text for others; write it as {{0,3}}, or as \\{{ for the character"
            )
        if char == "(":
            return self._open()
        self.may_repeat = True
        if char == "[":
            return self._class()
        if char == "\\":
            return self._escape()
        self.at += 1
        if char == ")":
            if len(self.groups) == 1:
                raise NotPortable("unopened group; write \\) for the character")
            self.groups.pop()
            return ")"
        if char in "|^$":
            self.may_repeat = False
            return WIDE_END if char == "$" and self.wide else char
        if char == ".":
            return self._dot()
        return self._plain(char)

    def _is_left_out(self, char: str) -> bool:
        """Whether a verbose expression has white space or a comment here, which is passed."""
        if char == "#":
            end = self.pattern.find("\n", self.at)
            self.at = len(self.pattern) if end < 0 else end + 1
            return True
        if char in _VERBOSE_SPACES:
            self.at += 1
            return True
        if char.isspace() and not self.ecma and not "\x1c" <= char <= "\x1f":
            raise NotPortable(
                f"U+{ord(char):04X} in a verbose expression (x) is left out by some; "
                f"write \\x{{{ord(char):x}}}"
            )
        return False

    def _plain(self, char: str) -> str:
        if self.groups[-1].ignore_case and not char.isascii() and char.lower() != char.upper():
            raise NotPortable(
                f"{char} while case is ignored (i); leave out i, and write both cases of letters beyond ASCII"
            )
        return _character(char)

    def _dot(self) -> str:
        if self.groups[-1].all_lines:
            return "(?s:.)"
        return f"[^{_LINE_ENDS}]" if self.ecma and not self.wide else r"[^\n]"

    def _quantifier(self, found: re.Match[str]) -> str:
        text = found[0]
        if not self.may_repeat:
            raise NotPortable(f"nothing that {text} could repeat; write \\{text} for the text")
        self.may_repeat = False
        self.at += len(text)
        if found[2] and _number(found[1]) > _number(found[2]):
            raise NotPortable(f"the counts of {text} are in the wrong order; swap them")
        after = self._here(1)
        if after == "+":
            raise NotPortable(f"{text}+ is possessive for some and not for others; write {text}")
        self.at += after == "?"  # lazy; the same texts match
        return text

    def _open(self) -> str:
        """The beginning of a group, or flags for the rest."""
        self.may_repeat = False
        group = _Group(**vars(self.groups[-1]))
        start = "(?:"
        pattern, at = self.pattern, self.at
        if named := _NAMED.match(pattern, at):
            self.at += len(named[0])
        elif flags := _FLAGS.match(pattern, at):
            whole = flags[2] == ")"
            if set(flags[1]) - set("isx") or (whole and self.at):
                raise NotPortable(
                    f"the flags {flags[0][:20]} are not supported; write i, s or x, at first or in (?i:...)"
                )
            group.ignore_case |= "i" in flags[1]
            group.all_lines |= "s" in flags[1]
            group.verbose |= "x" in flags[1]
            self.at += len(flags[0])
            case = "(?i" if "i" in flags[1] else "(?"
            start = case + ":"
            if whole:
                self.groups[-1] = group
                return "(?i)" if "i" in flags[1] else ""
        elif pattern.startswith(("(?=", "(?!", "(?<=", "(?<!"), at):
            raise NotPortable(
                "look-around, including look-ahead and look-behind, is not supported; write out what may come"
            )
        elif pattern.startswith("(?:", at):
            self.at += 3
        elif pattern.startswith("(?", at):
            raise NotPortable(f"{pattern[at : at + 4]} is not supported; write (?:...)")
        else:
            self.at += 1
        self.groups.append(group)
        return start

    def _escape(self) -> str:
        """An escape outside brackets."""
        self.at += 1
        kind = self._here(1)
        if kind and kind in "dDwWsS":
            self.at += 1
            return f"[{self._set(kind, wide=self.wide)}]"
        if kind and kind in "bBAzZG":
            # \A and \z would be anchors, but validators of JSON schemas do not have them.
            if not self.ecma and (kind == "A" and self.at == 1 or self._is_end(kind)):
                self.at += 1
                self.may_repeat = False
                return ""
            raise NotPortable(f"\\{kind} is not supported; leave it out")
        if kind.isdigit() and kind != "0":
            raise NotPortable("backreferences are not supported; write the text out again")
        if kind and kind in "pP":
            return self._property()
        return self._plain(self._escaped())

    def _is_end(self, kind: str) -> bool:
        return kind in "zZ" and self.at == len(self.pattern) - 1

    def _property(self) -> str:
        found = _PROPERTY.match(self.pattern, self.at - 1)
        if not found:
            raise NotPortable("\\p needs a property; write one, as in \\p{L}")
        self.at = found.end()
        return found[0]

    def _escaped(self) -> str:
        """The character of an escape; `at` is behind its backslash."""
        kind, after = self._here(1), self._here(2)[1:]
        if not kind:
            raise NotPortable("a backslash at the end; write \\\\ for the character")
        if kind in _CONTROLS:
            self.at += 1
            return chr(_CONTROLS[kind])
        if kind == "a" and not self.ecma:
            self.at += 1
            return "\a"
        if kind == "0" and not after.isdigit():
            self.at += 1
            return "\0"
        if code := _CODE.match(self.pattern, self.at):
            self.at += len(code[0])
            value = int(next(group for group in code.groups() if group), 16)
            if value > 0x10FFFF or 0xD800 <= value < 0xE000:
                raise NotPortable(f"\\{code[0]} is not a character; leave it out")
            return chr(value)
        if kind.isascii() and kind.isalnum():
            raise NotPortable(
                f"\\{kind} is not supported; write the character itself, or its number as \\x41"
            )
        self.at += 1
        return kind

    def _set(self, kind: str, *, wide: bool) -> str:
        """The inside of the brackets of one of `\\d` and its like."""
        return (_WIDE if wide else _NARROW if self.ecma else _NARROW_UNICODE)[kind]

    def _class(self) -> str:
        """A set in brackets."""
        start = self.at
        self.at += 1
        negated = self.pattern.startswith("^", self.at)
        self.at += negated
        if self.pattern.startswith("]", self.at):
            raise NotPortable("[] and [^] are text for some and sets for others; write \\]")
        # A negated set is wide if what it names is narrow.
        wide = self.wide != negated
        parts: list[str] = []
        while not self.pattern.startswith("]", self.at):
            if self.at >= len(self.pattern):
                raise NotPortable("unclosed character class; close it with ]")
            parts.append(self._item(wide))
        self.at += 1
        text = self.pattern[start : self.at]
        if self.groups[-1].verbose and not self.ecma and not _ONE_BLANK.fullmatch(text):
            if found := _BLANK.search(_ESCAPED.sub("", text)):
                raise NotPortable(
                    f"{found[0]!r} in a character class of a verbose expression (x) is left out by some; "
                    "write a backslash before it"
                )
        if self.groups[-1].ignore_case and negated:
            if not text.isascii() or "\\" in text:
                raise NotPortable(
                    "[^...] while case is ignored (i) needs plain ASCII characters; leave out i and write both cases"
                )
            parts.append(_ALSO_CASES)
        return f"[{'^' if negated else ''}{''.join(parts)}]"

    def _item(self, wide: bool) -> str:
        """A character, a range or a set inside brackets."""
        char, both = self._here(1), self._here(2)
        if not self.ecma and (char == "[" or both in _SET_OPERATORS):
            raise NotPortable(f"{both} in a character class is text for some; write \\{char}")
        kind = both[1:]
        if char == "\\" and kind and kind in "dDwWsS":
            self.at += 2
            self._no_range("\\" + kind)
            return self._set(kind, wide=wide)
        if char == "\\" and kind and kind in "pP":
            self.at += 1
            found = self._property()
            self._no_range(found)
            return found
        first = self._member()
        if not _RANGE.match(self.pattern, self.at):
            return self._plain(first)
        self.at += 1
        if _RANGE_TO_SET.match(self.pattern, self.at):
            raise NotPortable(
                f"a range of characters from {first}- to a set; write \\- for the character"
            )
        last = self._member()
        if first > last:
            raise NotPortable(f"the range {first}-{last} is in the wrong order; swap its ends")
        return f"{self._plain(first)}-{self._plain(last)}"

    def _no_range(self, what: str) -> None:
        if _RANGE.match(self.pattern, self.at):
            raise NotPortable(f"a range of characters from {what}; write \\- for the character")

    def _member(self) -> str:
        if self.pattern[self.at] != "\\":
            self.at += 1
            return self.pattern[self.at - 1]
        self.at += 1
        if self.pattern.startswith("b", self.at):
            self.at += 1
            return "\b"
        return self._escaped()
