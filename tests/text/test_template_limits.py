"""Templates that run for ever or build without bounds end with one error line, and others render as in Jinja alone."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path

import jinja2
import pytest
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from markupsafe import Markup

from hybrid_jax.text import template_limits
from hybrid_jax.text.template_checks import DEEP, FILTERS, METHODS
from hybrid_jax.text.template_environment import BoundedEnvironment
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
    "a filter of many items": "{{ ([{}] * 33000000) | map(attribute='x') | list }}",
    "a filter that leaves many items out": "{{ ([0] * 33000000) | select | list }}",
    "a pattern of many fields": "{{ ('{0}' * 10000000).format(1) }}",
    "a sum of many items": "{{ ([{'x': 1}] * 33000000) | sum(attribute='x') }}",
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


# Each of these took minutes or gigabytes in one operation, which no clock interrupts.
SET = "{% set a = 'a' * 20000000 %}{% set b = 'b' * 10000000 %}"
LARGE = (
    "{% set a = (1).from_bytes(A.encode(), 'big') %}{% set b = (1).from_bytes(B.encode(), 'big') %}"
)
LARGE = LARGE.replace("A", "('a' * 20000000)").replace("B", "('b' * 10000000)")
DEEP_LIST = (
    "{% set ns = namespace(x=range(100000) | list) %}{% for i in range(500) %}{% set ns.x = [ns.x] %}"
    + END
)
TWO = TUPLES + "{% set a = ns.x %}" + TUPLES.replace("ns", "os") + "{% set b = os.x %}"
VERY_DEEP = (
    "{% set ns = namespace(x=()) %}"
    + "{% for i in range(390) %}" * 2
    + "{% set ns.x = (ns.x,) %}"
    + END * 2
)
AT_ONCE = {
    **{
        f"integers: {source}": LARGE + "{{ " + source + " }}"
        for source in (
            *("a // b", "a % b", "a * b", "a - b", "a + b", "-a", "a / b", "a ** 2", "'%x' % a", "a is divisibleby b"),
            *("a | string", "a | abs", "a == b", "a | round(-1000)", "'{:x}'.format(a)", "[a] | sum", "a | int"),
        )
    },
    **{
        f"integers of text: {source}": SET + "{{ " + source + " }}"
        for source in (
            *("('0x' ~ a) | int(0, 16) // 3", "[a] | map('int', 0, 16) | list", "[a, b] | map('int', 0, 16) | sum"),
            "([2 ** 131000] * 33000000) | sum",
        )
    },
    **{
        source: "{{ " + source + " }}"
        for source in (
            *("'{:>{}}'.format('a', '8000000000')", "'{:>{}{}}'.format('a', 99999, 99999)"),
            *("'{x:>{w}}'.format_map({'x': 1, 'w': '8000000000'})", "'{0:.{1}f}'.format(1.5, '2000000000')"),
            *("('\ufbf9' * 33000000).encode('ascii', 'namereplace')", "('\n' * 33000000) | indent"),
            "('\u00e9' * 9000000).encode('ascii', 'xmlcharrefreplace')",
            *("('a' * 10**5).translate(['b' * 10**5] * 98)", "('\n' * 33000000).splitlines()"),
            *("('<' * 10000000) | escape", "('a' * 33000000) | urlencode", "('a' * 10**7).rfind('b' + 'a' * 999)"),
            *("('\u0101\u0102' * 16000000).strip(('\u0102' * 999) ~ '\u0101')", "('a' | escape).center(10**10)"),
            *("(('a' * 10**5) | escape).replace('a', 'b' * 10**5)", "('\t' | escape).expandtabs(10**10)"),
            *("('a' | escape).join(['b' * 30000000] * 100)", "('{:9999999999}' | safe).format(1)"),
            *("(('<' * 10**7) | safe).striptags()", "('ab' * 16000000) | sort", "('ab' * 16000000) | min"),
        )
    },
    "lists in lists with indents": DEEP_LIST + "{{ ns.x | tojson(indent=1000) }}",
    "lists in lists, printed well": DEEP_LIST.replace("100000", "50000") + "{{ ns.x | pprint }}",
    **{
        f"tuples without end in a call: {source}": TWO + "{{ " + source + " }}"
        for source in (
            *("namespace([(a, 1)])", "{}.keys() - [a]", "'a' | replace('a', a)", "[1] | map(a)", "a is filter"),
            *("'{x!r}'.format(x=a)", "'{0.x}'.format({'x': a})", "a in ([b] | select)", "{} | attr(a)", "a is eq b"),
            *("'a' | join(a)", "a is in [b]", "[{'x': a}] | selectattr('x', 'equalto', b) | list"),
        )
    },
    # These ended the process.
    **{
        f"tuples in tuples, very deep: {source}": VERY_DEEP + "{{ " + source + " }}"
        for source in ("{}.get(ns.x)", "ns.x is filter")
    },
    **{
        f"the name of an attribute: {source}": "{% set a = 'a.' * 16000000 %}{{ " + source + " }}"
        for source in (
            *("[{}] | map(attribute=a) | list", "[{}] | sort(attribute=a)", "[1] | max(0, a)"),
            *("[{}] | selectattr(a) | list", "[{}] | groupby(a)", "[{}] | sum(a)"),
            *("[{}] | join('', a)", "[{}] | unique(attribute=a) | list"),
        )
    },
    "tuples without end in a loop": TWO + "{% for x in [a, b] %}{{ loop.changed(x) }}{% endfor %}",
}  # fmt: skip


@pytest.mark.parametrize("name", AT_ONCE)
def test_what_no_clock_interrupts_is_refused_before(name):
    with pytest.raises(ValueError, match=r"^chat template: did not finish: ") as caught:
        ChatTemplate(AT_ONCE[name]).render(
            {}, seconds=60
        )  # a slow machine takes long to build some of them
    assert "processor time" not in str(caught.value)


@pytest.mark.parametrize("codec", ["punycode", "idna", "unicode_escape"])
def test_codecs_that_are_slow_cannot_be_used(codec):
    for source in (f"('a' * 99).encode('{codec}')", f"('a' * 99).encode().decode('{codec}')"):
        with pytest.raises(ValueError, match="is not for templates; use one of ascii, ") as caught:
            ChatTemplate("{{ " + source + " }}").render({})
        assert codec.replace("_", "-") in str(caught.value)
    assert ChatTemplate("{{ 'é'.encode('UTF_8').decode('utf-8') }}").render({}) == "é"


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
        ("{{ 1" + "+1" * 9000 + " }}", "RecursionError: "),
        ("{{ 1" + "+1" * 10**4 + " }}", "has more than 20000 names, signs and pieces of text; write less"),
        ("{%if a%}x{%endif%}" * 20_000, "has more than 20000 names, signs and pieces of text; write less"),
        ("{{ (0x" + "f" * 400_000 + " // 0x" + "e" * 399_000 + ") is odd }}", "did not finish: it builds an integer"),
        ("{% autoescape 0x" + "f" * 400_000 + " // 0x" + "e" * 400_000 + " %}{% endautoescape %}", "did not"),
        (LOOP * 30 + END * 30, "SyntaxError: too many statically nested blocks"),
        ("x" * 2**21, "has 2097152 characters, the most are 1048576"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError: maximum recursion depth"),
        ("{% include 'x' %}", "no loader for this environment"),
    ],
)  # fmt: skip
def test_a_template_that_cannot_be_compiled_or_run_says_why(source, complaint):
    with pytest.raises(ValueError, match=f"^chat template: {complaint}"):
        ChatTemplate(source).render({})


def test_an_error_is_never_long():
    for source in (
        "{{ raise_exception('not ' * 8000000) }}",
        "{{ {}['a' * 30000000].b }}",
        "{{ 1 / 0 ~ 'a' * 30000000 }}",
    ):
        with pytest.raises(ValueError, match="^chat template: ") as caught:
            ChatTemplate(source).render({})
        assert len(str(caught.value)) < 2100


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


def test_every_method_of_a_value_is_known():
    """A method that a new version of Python brings cannot be called until somebody has looked at it."""
    plain = plain_environment()
    values = (
        "",
        b"",
        1,
        1.0,
        True,
        [],
        (),
        {},
        {}.keys(),
        {}.values(),
        {}.items(),
        range(1),
        set(),
        Markup(),
    )
    for value in values:
        for name in dir(value):
            method = getattr(value, name)
            if not callable(method) or name.endswith("update"):
                continue
            if plain.is_safe_attribute(value, name, method):
                assert any(name in METHODS.get(base, {}) for base in type(value).__mro__), name


def test_an_unknown_method_of_a_value_cannot_be_called(monkeypatch):
    monkeypatch.delitem(METHODS[str], "casefold")
    with pytest.raises(ValueError, match="the method casefold of str is not for templates; do wi"):
        ChatTemplate("{{ 'A'.casefold() }}").render({})


def test_methods_of_a_callers_own_values_stay():
    class Name(str):
        def twice(self):
            return self + self

    values = {"name": Name("ab"), "day": date(2020, 5, 17)}
    source = "{{ name.twice() }} {{ name.upper() }} {{ day.strftime('%Y') }}"
    assert ChatTemplate(source).render(values) == "abab AB 2020"


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
