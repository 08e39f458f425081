"""What a chat template may use: processor time, and the size of what it builds.

A template comes with a model or from a caller. Jinja's sandbox keeps it away from Python, but not from loops in loops,
nor from 'a' * 10**10. Here each turn of a loop and each call looks at the clock. Each operation that can make a large
value from a small one says first how large it will be. What a template renders does not change.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, ItemsView, Iterable, KeysView, Mapping, ValuesView
from types import BuiltinMethodType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame, operators
from jinja2.defaults import DEFAULT_FILTERS, DEFAULT_TESTS
from jinja2.filters import make_attrgetter
from jinja2.runtime import Context, markup_join, str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, generate_lorem_ipsum

MAX_SECONDS = 3.0  # of processor time, for one rendering
MAX_TEXT = 1 << 25  # characters of one text, or items of one list
MAX_ITEMS = 1 << 18  # of a list and the lists inside of it, where something looks into all of them
MAX_MADE = 1 << 29  # bytes of everything that one rendering makes, kept or not
MAX_SOURCE = 1 << 20  # characters of a template; published ones have at most 30,000
MAX_BITS = 1 << 17  # of an integer
MAX_SLOW = 1 << 16  # characters for filters whose time grows with the square of the length
MAX_WIDTH = 1000  # of indents, of digits of a rounded number, and of patterns of dates
SHORT = 1 << 12  # characters; longer texts are looked at before they are counted
LONG = 1 << 17  # characters; shorter texts are split without a count of the pieces first
ITEM = 64  # bytes of a small object, or more
POINTER = 8  # bytes that an item takes in a list, beside those of its own

SCALARS = frozenset((str, int, float, bool, type(None)))
NUMBER = re.compile(r"\d+")
NESTED_FIELD = re.compile(r"\{[^{}]*\{")


class LimitExceeded(jinja2.TemplateRuntimeError):
    """A template ran too long or built too much."""


class Budget:
    """What is left of the limits for one rendering.

    Args:
        seconds: of processor time.
    """

    def __init__(self, seconds: float = MAX_SECONDS) -> None:
        self._seconds, self._room = seconds, MAX_MADE
        self._started = time.thread_time()
        self._look = time.perf_counter() + seconds  # earlier than this no time can be up

    def tick(self) -> None:
        """LimitExceeded if the time is up. To be called in each turn of a loop."""
        if time.perf_counter() > self._look:
            self._look_at_the_clock()

    def _look_at_the_clock(self) -> None:
        """The time of other threads and processes does not count, so that a busy machine refuses nothing."""
        left = self._seconds - (time.thread_time() - self._started)
        if left <= 0:
            raise LimitExceeded(
                f"did not finish within {self._seconds:g} s of processor time; look for a loop in a loop"
            )
        self._look = time.perf_counter() + left

    def allow(self, size: int) -> None:
        """LimitExceeded if something of so many characters or items is too large to be made."""
        if size > MAX_TEXT:
            raise LimitExceeded(
                f"did not finish: it builds a value of more than {MAX_TEXT} characters or items"
            )

    def made(self, value: Any) -> Any:
        """Counts a value that the template has made, and returns it."""
        kind = type(value)
        if kind is str:
            size = len(value)
            if size > SHORT:
                return self._made_long(value)
        elif kind in SCALARS:
            return value
        elif isinstance(value, list | tuple):
            size = ITEM + POINTER * len(value)
        elif isinstance(value, dict | set):
            size = ITEM * (1 + len(value))
        else:
            size = ITEM + (4 * len(value) if isinstance(value, str | bytes) else 0)
        self.spend(size)
        return value

    def _made_long(self, text: str) -> str:
        self.spend(len(text) if text.isascii() else 4 * len(text))
        return text

    def spend(self, size: int) -> None:
        """Counts bytes that the template has made."""
        self._room -= size
        if self._room < 0:
            raise LimitExceeded(f"did not finish: it builds more than {MAX_MADE >> 20} MiB in all")
        if size > LONG:
            self.tick()

    def weigh(self, *values: Any) -> int:
        """Characters and items in values, with all that is inside of them. Each list counts as often as it is reached.

        Any operation that looks into nested lists takes as long as that: a list that holds another twice, which holds
        another twice, and so on, is small in memory and has no end in print.
        """
        weight, seen, stack = 0, 0, list(values)
        while stack:
            value = stack.pop()
            seen += 1
            kind = type(value)
            if kind is str or kind is bytes:
                weight += len(value)
                continue
            if kind is dict:
                stack += value
                stack += value.values()
            elif kind is list or kind is tuple:
                stack += value
            elif kind is int:
                weight += value.bit_length() >> 2  # no fewer than its digits
            elif kind not in SCALARS:
                stack += _inside(value)
            if seen + len(stack) > MAX_ITEMS:
                raise LimitExceeded(
                    f"did not finish: it looks into a value of more than {MAX_ITEMS} items"
                )
        self.allow(weight)
        if weight + seen > LONG:
            self.tick()
        return weight + seen

    def weighed(self, value: Any) -> Any:
        """The value, after a look at how much is in it."""
        kind = type(value)
        if kind not in SCALARS or (kind is str and len(value) > LONG):
            self.weigh(value)
        return value

    def printed(self, value: Any) -> str:
        """The text of a value."""
        self.weigh(value)
        return self.made(str(value))

    def add(self, left: Any, right: Any) -> Any:
        """The operator +."""
        if type(left) is str and type(right) is str:
            size = len(left) + len(right)
            if size < SHORT:
                self._room -= size
                return left + right
            self.allow(size)
        elif isinstance(left, str | list | tuple | bytes) and hasattr(right, "__len__"):
            self.allow(len(left) + len(right))
        return self.made(left + right)

    # --- what compiled templates call instead of Jinja's own functions ----------------------------

    def concat(self, pieces: Iterable[str]) -> str:
        """The text of a macro or of a block."""
        if type(pieces) is list:
            self.allow(sum(map(len, pieces)))
            return self.made("".join(pieces))
        kept, size = [], 0
        for piece in pieces:
            size += len(piece)
            if size > MAX_TEXT:
                self.allow(size)
            kept.append(piece)
        return self.made("".join(kept))

    def str_join(self, values: tuple[Any, ...]) -> str:
        """The operator ~."""
        self.allow(self.weigh(*values))
        return self.made(str_join(values))

    def markup_join(self, values: tuple[Any, ...]) -> str:
        """The operator ~ where text is escaped."""
        self.allow(6 * self.weigh(*values))
        return self.made(markup_join(values))


def _inside(value: Any) -> Iterable[Any]:
    """The values from which another is made. Iterators are not looked into, they print nothing of what they give."""
    if isinstance(value, Mapping):
        return [*value.keys(), *value.values()]
    if isinstance(value, list | tuple | set | KeysView | ValuesView | ItemsView):
        return value
    if isinstance(value, str):  # escaped
        return [str.__str__(value)]
    if isinstance(value, Namespace):
        return [object.__getattribute__(value, "_Namespace__attrs")]
    return ()


class BoundedContext(Context):
    """The variables of one rendering, with its budget."""

    budget: Budget

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.budget = Budget()

    def derived(self, locals: dict[str, Any] | None = None) -> Context:
        """The variables of a block. It has no budget of its own."""
        inner = super().derived(locals)
        inner.budget = self.budget
        return inner


class _BoundedCode(CodeGenerator):
    """Compiles templates so that they ask their budget."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._bodies: set[int] = set()  # of loops

    def write_commons(self) -> None:
        super().write_commons()
        for name in ("concat", "str_join", "markup_join"):
            self.writeline(f"{name} = context.budget.{name}")

    def _output_child_pre(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        if frame.eval_ctx.volatile or frame.eval_ctx.autoescape:
            super()._output_child_pre(node, frame, finalize)
            self.write("context.budget.weighed(")
        else:  # most are text, which costs nothing more
            self.write("(_v if type(_v := (")

    def _output_child_post(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        if frame.eval_ctx.volatile or frame.eval_ctx.autoescape:
            self.write(")")
            super()._output_child_post(node, frame, finalize)
        else:
            self.write(")) is str else context.budget.printed(_v))")

    def visit_Add(self, node: nodes.Add, frame: Frame) -> None:
        self.write("context.budget.add(")
        self.visit(node.left, frame)
        self.write(", ")
        self.visit(node.right, frame)
        self.write(")")

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        self._bodies.add(id(node.body))
        super().visit_For(node, frame)

    def blockvisit(self, body: Iterable[nodes.Node], frame: Frame) -> None:
        if id(body) in self._bodies:
            self.writeline("context.budget.tick()")
        super().blockvisit(body, frame)

    def _wrapped(
        self, method: str, visit: Callable[..., None], node: nodes.Node, frame: Frame
    ) -> None:
        self.write(f"context.budget.{method}(")
        visit(node, frame)
        self.write(")")

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        self._wrapped("made", super().visit_List, node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self.write("context.budget.made({")
        for pair in node.items:
            self._weighed(pair.key, frame)
            self.write(": ")
            self.visit(pair.value, frame)
            self.write(", ")
        self.write("})")

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        if node.ctx == "load":
            self._wrapped("made", super().visit_Tuple, node, frame)
        else:
            super().visit_Tuple(node, frame)

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        if isinstance(node.arg, nodes.Slice):
            self._wrapped("made", super().visit_Getitem, node, frame)
        elif isinstance(node.arg, nodes.Const):
            super().visit_Getitem(node, frame)
        else:
            self.write("environment.getitem(")
            self.visit(node.node, frame)
            self.write(", ")
            self._weighed(node.arg, frame)
            self.write(")")

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:
        sides = [node.expr, *(operand.expr for operand in node.ops)]
        among = any(operand.op in ("in", "notin") for operand in node.ops)
        if len(sides) == 2 and not among and any(isinstance(side, nodes.Const) for side in sides):
            # A constant is compared at once, with whatever it is.
            super().visit_Compare(node, frame)
            return
        self.write("(")
        self._weighed(node.expr, frame)
        for operand in node.ops:
            self.write(f" {operators[operand.op]} ")
            self._weighed(operand.expr, frame)
        self.write(")")

    def _weighed(self, node: nodes.Expr, frame: Frame) -> None:
        if isinstance(node, nodes.Const):
            self.visit(node, frame)
        elif isinstance(node, nodes.List | nodes.Tuple) and _all_constant(node):
            super().visit_Tuple(node, frame)  # Python keeps it; nothing is made each time
        else:
            self._wrapped("weighed", self.visit, node, frame)


def _all_constant(node: nodes.List | nodes.Tuple) -> bool:
    return all(isinstance(item, nodes.Const) for item in node.items)


# --- operators, calls and filters -----------------------------------------------------------------


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, in which everything that can make a large value from a small one asks the budget first.

    Args:
        filters: more filters, or others of the same name.
        options: of Jinja's environment.
    """

    code_generator_class = _BoundedCode
    context_class = BoundedContext
    intercepted_binops = frozenset("+ * ** %".split())

    def __init__(self, *, filters: Mapping[str, Callable[..., Any]], **options: Any) -> None:
        super().__init__(**options)
        # A filter that wants the context is not called while a template is compiled, where it has no budget.
        self.filters = {
            name: _bounded(name, filter)
            for name, filter in {**DEFAULT_FILTERS, "sum": _sum, **filters}.items()
        }
        self.tests = {
            name: _weighing(test) if name in COMPARING else test
            for name, test in DEFAULT_TESTS.items()
        }
        self.globals["lipsum"] = _lipsum

    def call_binop(self, context: BoundedContext, operator: str, left: Any, right: Any) -> Any:
        """An operator; LimitExceeded if its result would be too large."""
        budget = context.budget
        if operator == "+":  # between constants, and in `sum`
            return budget.add(left, right)
        if operator == "%" and isinstance(left, str | bytes):
            budget.allow(_formatted_size(budget, left, right))
        elif operator == "*":
            budget.allow(_product_size(left, right))
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() * max(right, 1))
        return budget.made(self.binop_table[operator](left, right))

    def call(self, context: BoundedContext, called: Any, /, *args: Any, **options: Any) -> Any:
        """Calls a macro, a function or a method of a value. LimitExceeded if its result would be too large."""
        budget = context.budget
        budget.tick()
        if type(called) is BuiltinMethodType:
            options.pop("_loop_vars", None)  # which compiled templates add
            options.pop("_block_vars", None)
            args = self._checked(budget, called, args, options)
            result = called(*args, **options)
            if type(result) is list:  # of pieces, which are new
                budget.spend(ITEM * len(result))
            return budget.made(result)
        method = getattr(called, "__wrapped__", None)  # Jinja wraps the methods `format`
        if isinstance(method, BuiltinMethodType):
            given = {name: value for name, value in options.items() if name[0] != "_"}
            args = self._checked(budget, method, args, given)
        return budget.made(super().call(context, called, *args, **options))

    @staticmethod
    def _checked(
        budget: Budget, method: BuiltinMethodType, args: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[Any, ...]:
        """The arguments with which a method of a value may be called."""
        for arg in args:
            budget.weighed(arg)
        check = METHODS.get(method.__name__)
        return args if check is None else check(budget, method.__self__, *args, **options) or args


def _check_bits(bits: int) -> None:
    if bits > MAX_BITS:
        raise LimitExceeded(f"did not finish: it builds an integer of more than {MAX_BITS} bits")


def _product_size(left: Any, right: Any) -> int:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())
    for repeated, times in ((left, right), (right, left)):
        if isinstance(repeated, str | list | tuple | bytes) and isinstance(times, int):
            return len(repeated) * times
    return 0


def _formatted_size(budget: Budget, pattern: str | bytes, *values: Any) -> int:
    """The most characters that % or `format` make of a pattern."""
    text = pattern if isinstance(pattern, str) else pattern.decode("latin-1")
    width = sum(int(digits[:9]) for digits in NUMBER.findall(text))
    content = budget.weigh(*values)
    if "*" in text or NESTED_FIELD.search(text):  # a width that is among the values
        content += sum(abs(value) for value in _integers(values))
    return len(text) + width + (text.count("%") + text.count("{")) * content


def _integers(values: Any) -> Iterable[int]:
    for value in values.values() if isinstance(values, Mapping) else values:
        if isinstance(value, int):
            yield value
        elif isinstance(value, list | tuple | Mapping):
            yield from _integers(value)


def _pieces(text: Any, separator: Any = None) -> int:
    return text.count(separator) + 1 if separator else len(text) // 2 + 1


# Methods of values that make much of little, or look into nested lists. Each check takes the budget, the value and the
# arguments, and returns other arguments or None. All other methods make at most three times what they are given.


def _check_padding(budget: Budget, owner: Any, width: Any = 0, *_: Any, **__: Any) -> None:
    if isinstance(width, int):
        budget.allow(width)


def _check_tabs(budget: Budget, owner: Any, tabsize: Any = 8, *_: Any, **__: Any) -> None:
    if isinstance(tabsize, int):
        tabs = owner.count("\t" if isinstance(owner, str) else b"\t")
        budget.allow(len(owner) + tabs * tabsize)


def _check_replace(budget: Budget, owner: Any, *args: Any, **options: Any) -> None:
    kinds = {type(text) for text in (owner, *args[:2])}
    if kinds in ({str}, {bytes}) and len(args) > 1:
        budget.allow(len(owner) + owner.count(args[0]) * len(args[1]))


def _check_join(budget: Budget, owner: Any, items: Any = (), *_: Any, **__: Any) -> tuple[Any]:
    items = items if isinstance(items, list | tuple | str) else list(items)
    texts = (item for item in items if isinstance(item, str | bytes))
    budget.allow(sum(map(len, texts)) + len(owner) * len(items))
    return (items,)


def _check_translate(
    budget: Budget, owner: Any, table: Any = None, *_: Any, **options: Any
) -> None:
    if isinstance(owner, str) and isinstance(table, Mapping):
        lengths = [len(value) for value in table.values() if isinstance(value, str)]
        budget.allow(len(owner) * max(lengths, default=1))


def _check_split(budget: Budget, owner: Any, sep: Any = None, *_: Any, **__: Any) -> None:
    if len(owner) > LONG:
        budget.allow(ITEM * _pieces(owner, sep))
    _check_backwards(budget, owner, sep)


def _check_backwards(budget: Budget, owner: Any, wanted: Any = None, *_: Any, **__: Any) -> None:
    """A search from the end can look at each character as often as the wanted text is long."""
    if isinstance(wanted, str | bytes) and len(wanted) > MAX_WIDTH:
        budget.allow(len(owner) * len(wanted) // MAX_WIDTH)


def _check_lines(budget: Budget, owner: Any, *_: Any, **options: Any) -> None:
    if len(owner) > LONG:
        budget.allow(ITEM * len(owner.splitlines()))


def _check_format(budget: Budget, owner: Any, *args: Any, **options: Any) -> None:
    budget.allow(_formatted_size(budget, owner, *args, options))


def _check_bytes(budget: Budget, owner: Any, length: Any = 1, *_: Any, **options: Any) -> None:
    if isinstance(length, int):
        budget.allow(length)


def _check_search(budget: Budget, owner: Any, *args: Any, **__: Any) -> None:
    if isinstance(owner, list | tuple):
        budget.weigh(owner, *args)


METHODS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("center", "ljust", "rjust", "zfill"), _check_padding),
    "expandtabs": _check_tabs,
    "replace": _check_replace,
    "join": _check_join,
    "translate": _check_translate,
    **dict.fromkeys(("split", "rsplit"), _check_split),
    **dict.fromkeys(("rfind", "rindex", "rpartition"), _check_backwards),
    "splitlines": _check_lines,
    **dict.fromkeys(("format", "format_map"), _check_format),
    "to_bytes": _check_bytes,
    **dict.fromkeys(("count", "index"), _check_search),
}


# Filters. Those that look at all that is in a value are given lists instead of iterators, which can be weighed.
DEEP = frozenset(
    "capitalize center dictsort e escape forceescape format groupby indent join lower max min pprint replace safe sort "
    "string striptags title tojson trim unique upper urlencode urlize wordcount wordwrap xmlattr".split()
)
SLOW = frozenset(("pprint", "striptags", "urlize", "wordwrap", "xmlattr"))
COMPARING = frozenset(
    "eq equalto ne lt lessthan le gt greaterthan ge in == != < <= > >= lower upper".split()
)


def _check_width(budget: Budget, value: Any, width: Any = 0, *_: Any, **__: Any) -> None:
    if isinstance(width, int):
        budget.allow(width)


def _check_indent(budget: Budget, value: Any, width: Any = 4, *_: Any, **__: Any) -> None:
    text = str(value)
    each = len(width) if isinstance(width, str) else width
    budget.allow(len(text) + each * (1 + len(text.splitlines())))


def _check_count(budget: Budget, value: Any, linecount: Any = 1, *_: Any, **options: Any) -> None:
    if isinstance(count := options.get("slices", linecount), int):
        budget.allow(ITEM * count)


def _check_precision(budget: Budget, value: Any, precision: Any = 0, *_: Any, **__: Any) -> None:
    _check_small("the precision of round", precision)


def _check_old_and_new(
    budget: Budget, value: Any, old: Any = "", new: Any = "", *_: Any, **__: Any
) -> None:
    _check_replace(budget, str(value), str(old), str(new))


def _check_separator(budget: Budget, value: Any, d: Any = "", *_: Any, **__: Any) -> None:
    budget.allow(budget.weigh(value, d) + len(value) * len(str(d)))


def _check_values(budget: Budget, value: Any, *args: Any, **options: Any) -> None:
    budget.allow(_formatted_size(budget, str(value), args or options))


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
        _check_small("each indent and separator of tojson", what)


def _check_list(budget: Budget, value: Any, *_: Any, **__: Any) -> None:
    if isinstance(value, str | bytes | range):
        budget.allow(len(value))
        budget.spend(ITEM * len(value))


def _check_wrapping(budget: Budget, value: Any, *args: Any, **options: Any) -> None:
    given = [other for other in (*args, *options.values()) if isinstance(other, str)]
    budget.allow((1 + len(str(value))) * (1 + sum(map(len, given))))


def _check_trim(budget: Budget, value: Any, chars: Any = None, *_: Any, **__: Any) -> None:
    _check_small("what is stripped", chars)


def _check_small(what: str, value: Any) -> None:
    """LimitExceeded for a number, or a text of a length, of more than `MAX_WIDTH`."""
    size = len(value) if isinstance(value, str | bytes) else value
    if isinstance(size, int) and abs(size) > MAX_WIDTH:
        raise LimitExceeded(f"did not finish: {what} may be at most {MAX_WIDTH}")


METHODS |= dict.fromkeys(("strip", "lstrip", "rstrip"), _check_trim)
FILTERS: dict[str, Callable[..., None]] = {
    "center": _check_width,
    "indent": _check_indent,
    **dict.fromkeys(("batch", "slice"), _check_count),
    "round": _check_precision,
    "replace": _check_old_and_new,
    "join": _check_separator,
    "format": _check_values,
    "tojson": _check_json,
    "list": _check_list,
    **dict.fromkeys(("wordwrap", "urlize"), _check_wrapping),
    "trim": _check_trim,
}


@jinja2.pass_context
def _sum(context: BoundedContext, iterable: Any, attribute: Any = None, start: Any = 0) -> Any:
    """Jinja's filter. Lists are added one by one, because the time of `sum` grows with the square of their number."""
    if attribute is not None:
        iterable = map(make_attrgetter(context.environment, attribute), iterable)
    if isinstance(start, int | float | str):
        return sum(iterable, start)  # which refuses a text
    for item in iterable:
        context.budget.tick()
        start = context.environment.call_binop(context, "+", start, item)
    return start


@jinja2.pass_context
def _lipsum(
    context: BoundedContext, n: int = 5, html: bool = True, min: int = 20, max: int = 100
) -> str:
    """Jinja's function, a text for looks."""
    for size in (n, min, max):
        _check_small("each number of lipsum", size)
    return generate_lorem_ipsum(n, html, min, max)


def _weighing(test: Callable[..., bool]) -> Callable[..., Any]:
    """A test that looks at all that is in values."""

    @jinja2.pass_context
    @functools.wraps(test)
    def weighing(context: BoundedContext, *values: Any) -> bool:
        context.budget.weigh(*values)
        return test(*values)

    return weighing


def _bounded(name: str, filter: Callable[..., Any]) -> Callable[..., Any]:
    wants = getattr(getattr(filter, "jinja_pass_arg", None), "name", None)
    is_deep, is_slow, check = name in DEEP, name in SLOW, FILTERS.get(name)
    is_plain = wants is None and check is None  # whatever it does with a short text is soon done

    @jinja2.pass_context
    @functools.wraps(filter)
    def bounded(context: BoundedContext, *args: Any, **options: Any) -> Any:
        budget = context.budget
        value = args[0] if args else None
        if type(value) is str and len(value) < SHORT and is_plain:
            return budget.made(filter(*args, **options))
        budget.tick()
        if is_deep and args and (type(value) is not str or is_slow):
            if hasattr(args[0], "__next__"):
                args = (list(args[0]), *args[1:])
            weight = budget.weigh(args[0])
            if is_slow and weight > MAX_SLOW:
                raise LimitExceeded(
                    f"did not finish: the filter {name} takes at most {MAX_SLOW} characters or items, got {weight}"
                )
        if check is not None:
            check(budget, *args, **options)
        if wants is not None:
            args = (_wanted(context, wants), *args)
        return budget.made(filter(*args, **options))

    return bounded


def _wanted(context: BoundedContext, what: str) -> Any:
    """What a filter of Jinja takes before its arguments."""
    if what == "context":
        return context
    return context.environment if what == "environment" else context.eval_ctx
