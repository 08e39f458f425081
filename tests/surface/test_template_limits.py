"""Templates that run for ever or build without bounds end with one error line, and others render as in Jinja alone."""

from __future__ import annotations

import json
from pathlib import Path

import jinja2
import pytest
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from hybrid_jax.text import template_limits
from hybrid_jax.text.template_limits import DEEP, FILTERS, METHODS, BoundedEnvironment
from hybrid_jax.text.templates import ChatTemplate

LOOP, END = "{% for i in range(100000) %}", "{% endfor %}"
TIME = {
    "loops in loops": LOOP * 3 + END * 3,
    "loops that leave everything out": LOOP + "{% for j in range(100000) if false %}{% endfor %}" + END,
    "loops in blocks": "{% for i in range(9) %}{% block x scoped %}" + LOOP * 2 + END * 2 + "{% endblock %}" + END,
    "macros that call themselves twice": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}"
    "{% endmacro %}{{ f(99) }}",
    "loops in a call": "{% macro f() %}{{ caller() }}{% endmacro %}"
    + LOOP + "{% call f() %}" + LOOP + END + "{% endcall %}" + END,
    "filters in loops": LOOP + "{{ range(100000) | select('odd') | list | length }}" + END,
    "a list in a list in a list": "{% set ns = namespace(x=[]) %}" + LOOP * 2 + "{% set ns.x = [ns.x] %}" + END * 2,
}  # fmt: skip
NESTED = "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
TUPLES = "{% set ns = namespace(x=()) %}{% for i in range(60) %}{% set ns.x = (ns.x, ns.x) %}{% endfor %}"
EMPTY = "{% set ns = namespace(x=[]) %}"
DOUBLES = "{% set ns = namespace(x='ab') %}" + LOOP + "{% set ns.x = SUM %}" + END
SIZE = {
    **{
        source: "{{ " + source + " }}"
        for source in (
            *("'a' * 10**10", "10**10 * 'a'", "[1] * 10**10", "10**(9**9)", "(10**100)**10000"),
            *("'a' | center(10**10)", "'a'.center(10**10)", "'a'.ljust(10**10)", "'a'.rjust(10**10)"),
            *("'a'.zfill(10**10)", "'\t'.expandtabs(10**10)", "'a\nb' | indent(10**10)"),
            *("'%1000000000d' % 1", "'%*d' % (10**9, 1)", "'%1000000000d' | format(1)"),
            *("'{:1000000000}'.format(1)", "'{:{w}}'.format(1, w=10**10)"),
            *("'{x:1000000000}'.format_map({'x': 1})", "(1).to_bytes(10**10, 'big')", "lipsum(10**9)"),
            *("[1] | batch(10**9, 'x') | list", "[1] | slice(10**9) | list", "1.5 | round(10**9, 'ceil')"),
            *("[1] | tojson(indent=10**9)", "[1] | tojson(separators=('x' * 10**6, ':'))"),
            *("('a' * 10**5).replace('a', 'b' * 10**5)", "('a' * 10**5) | replace('a', 'b' * 10**5)"),
            *("('b' * 10**5).join('a' * 10**5)", "('a' * 10**5) | list | join('b' * 10**5)"),
            *("('a' * 10**7).translate({97: 'b' * 10**3})", "('a ' * 10**7).split() | length"),
            *("('a\n' * 10**7).splitlines() | length", "('a' * 10**7).rfind('b' + 'a' * 10**6)"),
            *("('ab' * 10**7).strip('ab' * 10**7)", "('ab' * 10**7) | trim('ab' * 10**7)"),
            *("('<' * 10**6) | striptags", "('a-' * 10**6) | wordwrap(3)", "('www.' * 10**5) | urlize"),
            *("'a b' | wordwrap(1, wrapstring='x' * 10**8)", "strftime_now('%c' * 10**5)"),
            *("range(100000) | map('center', 10**6) | join", "([[1] * 1000] * 30000) | sum(start=[])"),
            "[10**4000] * 10**5",
        )
    },
    **{f"doubling {op}": DOUBLES.replace("SUM", f"ns.x {op} ns.x") for op in "~+"},
    "lists that double": DOUBLES.replace("'ab'", "[1]").replace("SUM", "ns.x + ns.x"),
    "numbers that double": DOUBLES.replace("'ab'", "3").replace("SUM", "ns.x * ns.x"),
    "pieces that are kept": EMPTY + LOOP + "{% set ns.x = [ns.x, ['ab' * 1000000]] %}" + END,
    "slices that are kept": "{% set b = 'ab' * 4000000 %}" + EMPTY + LOOP + "{% set ns.x = [ns.x, b[1:]] %}" + END,
    "blocks that are kept": EMPTY + LOOP + "{% set y %}" + "z" * 10**5 + "{% endset %}{% set ns.x = [ns.x, y] %}" + END,
    "much text": LOOP * 2 + "abc" * 1000 + END * 2,
    "much that is printed": LOOP * 2 + "{{ 'abc' * 1000 }}" + END * 2,
    "a block of a filter": "{% filter center(10**10) %}a{% endfilter %}",
    **{
        f"a list without end in print: {source}": NESTED + "{{ " + source + " }}"
        for source in (
            *("ns.x", "ns", "ns.x | tojson", "ns.x | string", "ns.x ~ ''", "ns.x | pprint", "'%s' % (ns.x,)"),
            *("'{}'.format(ns.x)", "[ns.x] | join", "[ns.x] | map('string') | list", "ns.x | upper"),
            *("ns.x is lower", "{'a': ns.x}.values()", "ns.x | replace('a', 'b')", "ns.x | urlencode"),
            *("1 in ns.x", "ns.x == [ns.x]", "[ns.x, ns.x] | sort", "[ns.x].index(1)", "[[ns.x]] | map('first') | max"),
        )
    },
    **{
        f"a tuple without end: {source}": TUPLES + "{{ " + source + " }}"
        for source in (
            *("{}.get(ns.x)", "{}[ns.x]", "{ns.x: 1}", "dict([(ns.x, 1)])", "[ns.x] | unique | list"),
            "dict.fromkeys(ns.x)",
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("name", TIME)
def test_a_template_that_does_not_end_is_stopped(name):
    with pytest.raises(
        ValueError,
        match=r"^chat template: did not finish within 0.05 s of processor time; look for",
    ):
        ChatTemplate(TIME[name]).render({}, seconds=0.05)


@pytest.mark.parametrize("name", SIZE)
def test_a_template_that_builds_without_bounds_is_stopped(name, monkeypatch):
    # As much as the limits allow takes a while.
    monkeypatch.setattr(template_limits, "MAX_ITEMS", 4096)
    monkeypatch.setattr(template_limits, "MAX_MADE", 1 << 26)
    with pytest.raises(
        ValueError, match=r"^chat template: did not finish: (it|the|each|what|a) "
    ) as caught:
        ChatTemplate(SIZE[name]).render({})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "source, complaint",
    [
        ("{{ " + "(" * 10**5 + "1" + ")" * 10**5 + " }}", "RecursionError: "),
        ("{{ 1" + "+1" * 10**4 + " }}", "RecursionError: "),
        (LOOP * 30 + END * 30, "SyntaxError: too many statically nested blocks"),
        ("x" * 2**21, "has 2097152 characters, the most are 1048576"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError: maximum recursion depth"),
        ("{% include 'x' %}", "no loader for this environment"),
    ],
)  # fmt: skip
def test_a_template_that_cannot_be_compiled_or_run_says_why(source, complaint):
    with pytest.raises(ValueError, match=f"^chat template: {complaint}"):
        ChatTemplate(source).render({})


def test_an_error_names_the_file_and_the_line():
    def said(source, file=None):
        with pytest.raises(ValueError, match="^chat template: ") as caught:
            ChatTemplate(source, file).render({"x": 1})
        return str(caught.value).removeprefix("chat template: ")

    assert (
        said("a\nb{{ raise_exception('not\n this') }}", "d/t.jinja")
        == "not this (d/t.jinja, line 2)"
    )
    assert said("a\n\n{{ x.y.z }}") == "'int object' has no attribute 'y' (line 3)"
    assert said("{{ x.y.z }}") == "'int object' has no attribute 'y'"
    assert said("\n{% macro f() %}\n{{ 1 / 0 }}{% endmacro %}\n{{ f() }}", "t").endswith(
        "division by zero (t, line 3)"
    )
    assert (
        said("a\n{% if %}", "d/t.jinja")
        == "Expected an expression, got 'end of statement block' (d/t.jinja, line 2)"
    )
    assert said("{{ 'a' * 10**10 }}", "t").endswith("characters or items (t, line 1)")


# --- what is within the limits ------------------------------------------------------------------------


def plain_environment():
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = lambda x, **options: json.dumps(
        x, ensure_ascii=False, **options
    )
    return environment


EXPRESSIONS = Path(__file__).with_name("jinja_expressions.txt").read_text(encoding="utf-8")
VALUES = {
    "s": "A b",
    "n": [1, 2, 3],
    "d": {"k": [1, "é"]},
    "m": [{"r": "u", "t": 1}, {"r": "a", "t": 2}],
    "width": 5,
}


def test_expressions_give_what_jinja_gives():
    plain = plain_environment()
    for expression in EXPRESSIONS.splitlines():
        source = "{{ " + expression + " }}"
        assert ChatTemplate(source).render(VALUES) == plain.from_string(source).render(VALUES), (
            source
        )


def test_every_filter_is_among_the_expressions():
    left_out = {"random", "count"}  # by chance, and another name of `length`
    environment = BoundedEnvironment(filters={})
    assert {name for name in environment.filters if f"| {name}" not in EXPRESSIONS} <= left_out
    assert DEEP | FILTERS.keys() <= environment.filters.keys()


def test_every_method_of_a_value_is_checked_or_makes_little():
    """A method that a new version of Python brings has to be looked at."""
    little = """
        capitalize casefold encode decode endswith find hex isalnum isalpha isascii isdecimal isdigit isidentifier
        islower isnumeric isprintable isspace istitle isupper lower maketrans partition removeprefix removesuffix
        startswith swapcase title upper fromhex as_integer_ratio bit_count bit_length conjugate denominator from_bytes
        imag numerator real is_integer fromkeys get items keys values copy start step stop isdisjoint mapping
    """.split()
    environment = BoundedEnvironment(filters={})
    for value in ("", b"", 1, 1.0, True, [], (), {}, {}.keys(), {}.values(), range(1)):
        for name in dir(value):
            if environment.is_safe_attribute(value, name, getattr(value, name)):
                assert name in METHODS or name in little, (type(value), name)


def test_a_template_that_fails_leaves_others_alone():
    template = ChatTemplate("{{ 'a' * n }}")
    for n in (3, 10**10, 3):
        if n == 3:
            assert template.render({"n": n}) == "aaa"
        else:
            with pytest.raises(ValueError, match="did not finish"):
                template.render({"n": n})


def test_a_generation_block_has_variables_of_its_own():
    source = "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}"
    assert ChatTemplate(source).render({}) == "21"


def test_a_namespace_takes_no_private_names():
    for source in (
        "{% set ns = namespace(_x=1) %}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}",
    ):
        with pytest.raises(
            ValueError, match="takes no name that begins with an underscore, got '_x'"
        ):
            ChatTemplate(source).render({})
    assert ChatTemplate("{{ namespace(self=1).self }}").render({}) == "1"


def test_jinjas_own_errors_stay_errors():
    with pytest.raises(ValueError, match="chat template: ") as caught:
        ChatTemplate("{{ x.y }}{{ x.y.z }}").render({})
    assert isinstance(caught.value.__cause__, jinja2.UndefinedError)
