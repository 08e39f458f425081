"""Jinja's sandbox with the limits of `template_limits` on its operators, calls, filters and tests."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import BuiltinMethodType, MethodType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame, operators
from jinja2.defaults import DEFAULT_FILTERS, DEFAULT_TESTS
from jinja2.filters import make_attrgetter
from jinja2.lexer import Token, TokenStream
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import (
    ImmutableSandboxedEnvironment,
    SandboxedEscapeFormatter,
    SandboxedFormatter,
)
from jinja2.utils import generate_lorem_ipsum
from markupsafe import Markup

from hybrid_jax.text.template_checks import (
    BY_ATTRIBUTE,
    DEEP,
    FILTERS,
    GOING_THROUGH,
    HANDING_ON,
    NOWHERE,
    QUICK_TESTS,
    SLOW,
    check_percent,
    check_slow,
    check_small,
    checked_method,
    numbers_in,
    product_size,
)
from hybrid_jax.text.template_limits import (
    ITEM,
    LONG,
    MAX_TOKENS,
    SHORT,
    Budget,
    Lazy,
    check_bits,
)


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


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, in which everything that can make a large value from a small one asks the budget first.

    Args:
        filters: more filters, or others of the same name.
        options: of Jinja's environment.
    """

    code_generator_class = _BoundedCode
    context_class = BoundedContext
    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)
    intercepted_unops = frozenset(ImmutableSandboxedEnvironment.default_unop_table)

    def __init__(self, *, filters: Mapping[str, Callable[..., Any]], **options: Any) -> None:
        super().__init__(**options)
        # What wants the context is not called while a template is compiled, where it has no budget.
        self.filters = {
            name: _bounded(name, filter)
            for name, filter in {**DEFAULT_FILTERS, "sum": _sum, **filters}.items()
        }
        self.tests = {
            name: test if name in QUICK_TESTS else _weighing(test)
            for name, test in DEFAULT_TESTS.items()
        }
        self.globals["lipsum"] = _lipsum

    def _tokenize(self, *args: Any, **options: Any) -> TokenStream:
        stream = super()._tokenize(*args, **options)
        return TokenStream(_counted(stream), stream.name, stream.filename)

    def call_unop(self, context: BoundedContext, operator: str, arg: Any) -> Any:
        """The operators - and + before a value."""
        return context.budget.made(self.unop_table[operator](context.budget.weighed(arg)))

    def call_binop(self, context: BoundedContext, operator: str, left: Any, right: Any) -> Any:
        """An operator; LimitExceeded if its result would be too large."""
        budget = context.budget
        if operator == "+":  # between constants, and in `sum`
            return budget.add(left, right)
        if operator == "*":
            budget.allow(product_size(left, right))
        elif operator == "%" and isinstance(left, str | bytes):
            check_percent(budget, left, right)
        else:
            budget.weighed(left)
            budget.weighed(right)
            if operator == "**" and isinstance(left, int) and isinstance(right, int):
                check_bits(left.bit_length() * max(right, 1))
        return budget.made(self.binop_table[operator](left, right))

    def call(self, context: BoundedContext, called: Any, /, *args: Any, **options: Any) -> Any:
        """Calls a macro, a function or a method of a value. LimitExceeded if its result would be too large."""
        budget = context.budget
        budget.tick()
        method = getattr(called, "__wrapped__", called)  # Jinja wraps the methods `format`
        if isinstance(method, BuiltinMethodType | MethodType):
            owner = method.__self__
            given = {
                name: value
                for name, value in options.items()
                if name not in ("_loop_vars", "_block_vars")  # which compiled templates add
            }
            args = checked_method(method, budget, args, given)
            if isinstance(owner, str) and method is not called:
                return budget.made(_formatted(self, budget, method, args, given))
            if type(called) is BuiltinMethodType:
                result = called(*args, **given)
                if type(result) is list:  # of pieces, which are new
                    budget.spend(ITEM * len(result))
                return budget.made(result)
            if isinstance(owner, LoopContext):  # `loop.changed` compares
                budget.weigh(*args)
        elif isinstance(called, type):  # `namespace` looks names up
            budget.weigh(*args)
        return budget.made(super().call(context, called, *args, **options))


def _counted(tokens: TokenStream) -> Iterator[Token]:
    """The tokens of a template, up to `MAX_TOKENS`: the time to compile it grows with their number."""
    for count, token in enumerate(tokens):
        if count >= MAX_TOKENS:
            raise jinja2.TemplateError(
                f"has more than {MAX_TOKENS} names, signs and pieces of text; write less of them"
            )
        if token.type == "integer":
            check_bits(token.value.bit_length())
        yield token


# --- the methods `format` -----------------------------------------------------------------------------


class _BoundedFormatter(SandboxedFormatter):
    """Asks the budget for each field, when its width is known.

    Args:
        environment: of the template.
        budget: of the rendering.
        options: of Jinja's formatters.
    """

    def __init__(self, environment: jinja2.Environment, budget: Budget, **options: Any) -> None:
        super().__init__(environment, **options)
        self._budget, self._size = budget, 0

    def convert_field(self, value: Any, conversion: Any) -> Any:
        self._budget.weighed(value)
        return super().convert_field(value, conversion)

    def format_field(self, value: Any, format_spec: str) -> Any:
        self._budget.tick()
        size = len(format_spec) + numbers_in(format_spec) + self._budget.weigh(value)
        self._size += size
        self._budget.allow(self._size)
        return super().format_field(value, format_spec)


class _BoundedEscapeFormatter(_BoundedFormatter, SandboxedEscapeFormatter):
    """The same for text that is escaped."""


def _formatted(
    environment: jinja2.Environment,
    budget: Budget,
    method: Any,
    args: tuple[Any, ...],
    options: Mapping[str, Any],
) -> str:
    """What `format` or `format_map` of a text returns."""
    text = method.__self__
    if method.__name__ == "format_map":
        if options or len(args) != 1:
            raise TypeError("format_map() takes exactly one argument, a mapping")
        [options] = args
        args = ()
    if isinstance(text, Markup):
        formatter: Any = _BoundedEscapeFormatter(environment, budget, escape=text.escape)
    else:
        formatter = _BoundedFormatter(environment, budget)
    return type(text)(formatter.vformat(text, args, options))


# --- filters and tests --------------------------------------------------------------------------------


@jinja2.pass_context
def _sum(context: BoundedContext, iterable: Any, attribute: Any = None, start: Any = 0) -> Any:
    """Jinja's filter, which asks the budget for each item. `sum` adds lists in a time that grows with the square."""
    if attribute is not None:
        iterable = map(make_attrgetter(context.environment, attribute), iterable)
    if isinstance(start, str):
        return sum((), start)  # which refuses a text
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
        check_small("each number of lipsum", size)
    return generate_lorem_ipsum(n, html, min, max)


def _weighing(test: Callable[..., bool]) -> Callable[..., Any]:
    """A test that looks at all that is in values."""
    wants = _wants(test)

    @jinja2.pass_context
    @functools.wraps(test)
    def weighing(context: BoundedContext, *values: Any, **options: Any) -> bool:
        for value in (*values, *options.values()):
            context.budget.weighed(value)
        if wants is not None:
            values = (_wanted(context, wants), *values)
        return test(*values, **options)

    return weighing


def _bounded(name: str, filter: Callable[..., Any]) -> Callable[..., Any]:
    wants = _wants(filter)
    is_deep, is_slow, check = name in DEEP, name in SLOW, FILTERS.get(name)
    is_plain = wants is None and check is None  # whatever it does with a short text is soon done
    by_attribute = BY_ATTRIBUTE.get(name, NOWHERE)
    goes_through, hands_on = name in GOING_THROUGH, name in HANDING_ON

    @jinja2.pass_context
    @functools.wraps(filter)
    def bounded(context: BoundedContext, *args: Any, **options: Any) -> Any:
        budget = context.budget
        value: Any = args[0] if args else None
        if (
            type(value) is str
            and len(value) < SHORT
            and is_plain
            and not options
            and len(args) == 1
        ):
            return budget.made(filter(*args, **options))
        budget.tick()
        for other in (*args[by_attribute], options.get("attribute")):
            if isinstance(other, str):
                check_small("the name of an attribute", other)
        if not hands_on:
            for other in (*args[1:], *options.values()):
                budget.weighed(other)
        if is_deep and args and (type(value) is not str or is_slow):
            if hasattr(value, "__next__"):
                args = (list(value), *args[1:])
            weight = budget.weigh(args[0])
            if is_slow:
                check_slow(f"the filter {name}", weight)
        elif goes_through and isinstance(value, list | tuple | str) and len(value) > LONG:
            args = (Lazy(budget, value, size=0), *args[1:])
        elif type(value) is int:
            budget.weighed(value)
        if check is not None:
            check(budget, *args, **options)
        if wants is not None:
            args = (_wanted(context, wants), *args)
        result = filter(*args, **options)
        if hasattr(result, "__next__") and type(result) is not Lazy:
            return Lazy(budget, result)
        return budget.made(result)

    return bounded


def _wants(function: Callable[..., Any]) -> str | None:
    """What a filter or a test takes before its arguments."""
    return getattr(getattr(function, "jinja_pass_arg", None), "name", None)


def _wanted(context: BoundedContext, what: str) -> Any:
    if what == "context":
        return context
    return context.environment if what == "environment" else context.eval_ctx
