"""Random and hostile forms, each given to the real code in a process of its own that must survive all of them.

    python -m tests.constraints.fuzz --count 10000 --seed 0

Exit code 1 if the process died, if an exception other than a clean ValueError escaped, or if a form took a minute of
processor time. Each fault is printed with its number; `--first NUMBER --count 1` repeats it.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import hybrid_jax
from hybrid_jax.config.structured_outputs import StructuredOutputsParams
from hybrid_jax.constraints.grammar import Grammars
from hybrid_jax.text.tokenizer import Tokenizer
from tests.constraints.vocabularies import tokens_of

STEPS = 60  # of the walk through each form
MEMORY_BYTES = 6 << 30  # of the process that is tried
SLOW_SECONDS = 60.0  # of processor time
NUMBERS = (
    *(0, 1, -1, 2, 7, 10, 99, 100, 1000, 65_536, 99_991, 100_000, 1_000_000),
    *(2**31 - 1, 2**31, -(2**31), 2**32, 2**53, 2**53 + 1, -(2**53) - 1, 2**62, -(2**62)),
    *(2**63 - 1, 2**63, -(2**63), -(2**63) + 1, -(2**63) + 512, -(2**63) - 1025, 2**64, 10**25),
    *(0.0, -0.0, 0.1, -0.5, 0.01, 1e-7, 5e-324, 1e-300, 1e19, -1e19, 1e22, 1e300, -1e308),
)
COUNTS = (0, 1, 2, 3, 10, 100, 1000, 10_000, 99_999, 100_000, 100_001, 2**31 - 1, 2**32, 2**63)
STRINGS = (
    "",
    "a",
    "ab",
    "é",
    "漢字",
    "\x00",
    '"',
    "\\",
    "C:\\User",
    "a" * 300,
    "\U0001f600",
    "#/",
    "~1",
)
NAMES = ("a", "b", "c", "$ref", "type", "enum", "", "é", '"', "x" * 200)
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object", "strng")
FORMATS = (
    "date",
    "time",
    "date-time",
    "email",
    "uuid",
    "ipv4",
    "ipv6",
    "hostname",
    "uri",
    "colour",
)


# --- forms ----------------------------------------------------------------------------------------


def make_form(seed: int, number: int) -> dict[str, Any]:
    """The arguments of `StructuredOutputsParams` for one case."""
    draw = random.Random(f"{seed} {number}")
    kind = draw.choice(("json", "json", "json", "regex", "grammar", "choice"))
    makers = {"json": make_schema, "regex": make_regex, "grammar": make_lark, "choice": make_choice}
    return {kind: makers[kind](draw)}


def number_of(draw: random.Random) -> float:
    modest = draw.choice(
        (draw.randint(-(10**4), 10**4), draw.uniform(-1e6, 1e6), draw.randint(0, 9))
    )
    huge = draw.choice((*NUMBERS, draw.randint(-(2**65), 2**65)))
    return modest if draw.random() < 0.8 else huge


def count_of(draw: random.Random) -> float:
    if draw.random() < 0.1:
        return draw.choice((-1, 1.5, "1", None, True, number_of(draw)))
    return draw.choice(COUNTS[:6] if draw.random() < 0.9 else COUNTS)


def value_of(draw: random.Random, depth: int = 0) -> Any:
    if depth < 3 and draw.random() < 0.3:
        parts = [value_of(draw, depth + 1) for _ in range(draw.randint(0, 3))]
        if draw.random() < 0.5:
            return parts
        return {draw.choice(NAMES): part for part in parts}
    return draw.choice((None, True, False, number_of(draw), draw.choice(STRINGS), number_of(draw)))


def make_schema(draw: random.Random) -> Any:
    shape = draw.random()
    if shape < 0.25:
        return hostile_schema(draw)
    schema = random_schema(draw, 0)
    schema |= {"$defs": {name: random_schema(draw, 2) for name in "ab"}}
    if shape < 0.35:
        text = mutated(draw, json.dumps(schema))
        with suppress(ValueError, RecursionError):
            json.loads(text)
            return text
    return schema


def random_schema(draw: random.Random, depth: int) -> dict[str, Any]:
    """Some keywords with values that mostly have the right type."""
    inner = lambda: random_schema(draw, depth + 1) if depth < 4 else draw.choice(({}, True, False))
    several = lambda: [inner() for _ in range(draw.randint(0, 3))]
    named = lambda: {draw.choice(NAMES): inner() for _ in range(draw.randint(0, 3))}
    makers = {
        "type": lambda: draw.choice((draw.choice(TYPES), [draw.choice(TYPES) for _ in range(2)])),
        "const": lambda: value_of(draw),
        "enum": lambda: [value_of(draw) for _ in range(draw.randint(0, 5))],
        "$ref": lambda: draw.choice(("#", "#/$defs/a", "#/$defs/b", "#/nowhere", "#a", "http://x")),
        "pattern": lambda: make_regex(draw),
        "format": lambda: draw.choice(FORMATS),
        "properties": named,
        "patternProperties": lambda: {make_regex(draw)[:40]: inner()},
        "additionalProperties": lambda: draw.choice((True, False, inner())),
        "required": lambda: [draw.choice(NAMES) for _ in range(draw.randint(0, 3))],
        "items": lambda: draw.choice((inner(), False, several())),
        "prefixItems": several,
        "x-guidance": lambda: {"whitespace_pattern": make_regex(draw), "lenient": True},
        "multipleOf": lambda: number_of(draw),
    }
    makers |= dict.fromkeys(("anyOf", "allOf", "oneOf"), several)
    makers |= dict.fromkeys(
        ("minItems", "maxItems", "minLength", "maxLength"), lambda: count_of(draw)
    )
    makers |= dict.fromkeys(("minProperties", "maxProperties"), lambda: count_of(draw))
    bounds = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
    makers |= dict.fromkeys(bounds, lambda: number_of(draw))
    makers |= {"not": inner, "uniqueItems": lambda: True, "default": lambda: value_of(draw)}
    names = draw.sample(sorted(makers), draw.randint(0, 4))
    return {name: makers[name]() for name in names}


def hostile_schema(draw: random.Random) -> Any:
    """One that is too long, too deep, too wide or too large in some way."""
    size = draw.choice((3, 30, 90, 130, 199, 300, 1000, 5000, 20_000))
    key = draw.choice(("items", "properties", "allOf", "anyOf", "$ref", "additionalProperties"))
    leaf = draw.choice(({"type": "null"}, {}, {"const": number_of(draw)}, {"$ref": "#"}))

    def around(schema: Any) -> dict[str, Any]:
        if key == "properties":
            return {"type": "object", key: {"a": schema}, "required": ["a"]}
        return {key: [schema, {"type": "object"}] if key in ("allOf", "anyOf") else schema}

    what = draw.randrange(8)
    if what == 0:  # nested
        for _ in range(min(size, 400)):
            leaf = around(leaf)
        return leaf
    if what in (1, 2):  # a chain, in order or in reverse
        refers = lambda i: {"$ref": f"#/$defs/d{i + 1}"}
        link = (lambda i: refers(i)) if key == "$ref" else (lambda i: around(refers(i)))
        chain = {f"d{i}": link(i) for i in range(size)} | {f"d{size}": leaf}
        chain = dict(reversed(chain.items())) if what == 2 else chain
        return {"$ref": "#/$defs/d0", "$defs": chain}
    if what == 3:
        return {"enum": [f"{i}{draw.choice(STRINGS)}" for i in range(size)]}
    if what == 4:
        entries = {f"p{i}": {"type": draw.choice(TYPES[:-1])} for i in range(size)}
        return {"type": "object", "properties": entries, "minProperties": count_of(draw)}
    if what == 5:  # each doubles the one before
        size = min(size, 60)
        twice = lambda i: [{"$ref": f"#/$defs/d{i + 1}"}] * 2
        key = draw.choice(("anyOf", "allOf", "oneOf", "prefixItems"))
        return {
            "$ref": "#/$defs/d0",
            "$defs": {f"d{i}": {key: twice(i)} for i in range(size)} | {f"d{size}": leaf},
        }
    if what == 6:
        options = lambda i: {"anyOf": [{"properties": {f"p{i}{j}": leaf}} for j in range(6)]}
        return {"allOf": [options(i) for i in range(min(size, 9))]}
    return {"const": {"a": "ab " * size * 10}, "description": "x" * size}


def make_regex(draw: random.Random, depth: int = 0) -> str:
    if depth == 0 and draw.random() < 0.1:
        size = draw.choice((10, 90, 130, 260, 3000, 100_000, 300_000))
        begin, middle, end = draw.choice(
            (
                ("(", "a", ")"),
                ("(?:", "a", ")*"),
                ("[", "a", "]"),
                ("", "|ab", ""),
                ("(", "", "a?)?"),
            )
        )
        return begin * size + (middle * size if not begin else middle) + end * size
    if depth == 0 and draw.random() < 0.1:
        return mutated(draw, make_regex(draw))
    atoms = (
        "a",
        "b",
        ".",
        r"\d",
        r"\w",
        r"[^\n]",
        "[a-f0-9]",
        r"\p{L}",
        "é",
        r"\.",
        "[]]",
        "(?i:k)",
    )
    parts = []
    for _ in range(draw.randint(1, 4)):
        atom = draw.choice(atoms)
        if depth < 4 and draw.random() < 0.4:
            atom = f"({make_regex(draw, depth + 1)})"
        parts.append(atom + repeat_of(draw))
    return draw.choice(("", "", "|")).join(parts)


def repeat_of(draw: random.Random) -> str:
    least, most = sorted(draw.choice(COUNTS[:5]) for _ in range(2))
    if draw.random() < 0.1:
        most = draw.choice(COUNTS)
    counts = (f"{{{least}}}", f"{{{least},}}", f"{{{least},{most}}}")
    return draw.choice(("", "", "", "", "*", "+", "?", "*?", *counts))


def make_lark(draw: random.Random) -> str:
    size = draw.choice((3, 30, 150, 300, 3000))
    if draw.random() < 0.2:
        mark = draw.choice(("r", "R"))
        lines = [f'{mark}{i}: {mark}{i + 1} "b"?' for i in range(size)] + [f'{mark}{size}: "a"']
        draw.shuffle(lines)
        return "\n".join([f"start: {mark}0", *lines])
    if draw.random() < 0.1:
        begin, end = draw.choice((("(", ")"), ("[", "]"), ("~", ""), ("%lark { start: ", "}")))
        return "start: " + begin * size + '"a"' + end * size
    names = ["start", "x", "y", "X", "Y"]
    atoms = [
        *(
            '"a"',
            '"bc"i',
            '"é"',
            "/[a-z]+/",
            f"/{make_regex(draw)[:60]}/",
            '"a".."f"',
            "x",
            "y",
            "X",
            "Y",
        ),
        *("%json " + json.dumps(make_schema(draw), default=str)[:3000], "<[0-9]>"),
        *('%regex { "substring_chars": "abcabc" }', '("a" | x)', "[Y]", "(x | y)"),
    ]
    lines = []
    for name in names:
        if name.isupper():  # a token has no rules in it
            atoms = [
                '"a"',
                '"bc"i',
                "/[a-z]+/",
                f"/{make_regex(draw)[:60]}/",
                '"a".."f"',
                '("c" | /d/)',
            ]
        parts = [draw.choice(atoms) + lark_repeat(draw) for _ in range(draw.randint(1, 4))]
        begin = draw.choice(("", "", "", '"a" | ', "| "))
        lines.append(f"{name}: {begin}{' '.join(parts)}")
    if draw.random() < 0.2:
        lines.append(
            draw.choice(
                (r"%ignore /\s*/", '%llguidance {"no_forcing": true}', "%import common.INT")
            )
        )
    text = "\n".join(lines)
    return mutated(draw, text) if draw.random() < 0.2 else text


def lark_repeat(draw: random.Random) -> str:
    if draw.random() < 0.1:
        return f"~{draw.choice(COUNTS if draw.random() < 0.1 else COUNTS[:7])}"
    return repeat_of(draw).replace("*?", "*")


def make_choice(draw: random.Random) -> list[str]:
    size = draw.choice((1, 2, 3, 30, 100, 1000, 3000, draw.choice((30_000, 150_000))))
    texts = [f"{i}{draw.choice(STRINGS)}" for i in range(size)]
    return [draw.choice(STRINGS) * draw.choice((1, 1, 50, 10_000)) or "x", *texts]


def mutated(draw: random.Random, text: str) -> str:
    """The text with a few letters changed, left out or doubled."""
    letters = list(text)
    for _ in range(draw.randint(1, 5)):
        place = draw.randrange(len(letters) + 1)
        change = draw.choice(
            ([], [draw.choice('(){}[]|*+?\\"/~:,.0a\n')], letters[place : place + 9] * 2)
        )
        letters[place : place + 1] = change
    return "".join(letters) or "a"


# --- the run --------------------------------------------------------------------------------------


def try_form(grammars: Grammars, form: dict[str, Any], seed: int) -> str:
    """What became of it: "refused", "followed", or "stopped" by the limits of a step."""
    try:
        state = grammars.state(StructuredOutputsParams(**form))
    except ValueError as error:
        assert "\n" not in str(error), f"more than one line: {error}"
        return "refused"
    draw = random.Random(seed)
    for _ in range(STEPS):
        words, may_end, failure = state.allowed()
        tokens = tokens_of(words)
        if failure is not None:
            return "stopped"
        if not tokens.size:
            break
        state.advance([int(tokens[draw.randrange(tokens.size)])])
    return "followed"


def serve(seed: int, first: int, count: int) -> None:
    """Tries forms, and prints the number of each before and what became of it after."""
    with suppress(ImportError):  # Windows has none
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, most))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tokenizer = Tokenizer.from_directory(Path(hybrid_jax.__file__).parent / "bundled")
    assert tokenizer is not None
    grammars = Grammars(tokenizer, tokenizer.vocab_size)
    for number in range(first, first + count):
        form = make_form(seed, number)
        print("begin", number, next(iter(form)), flush=True)
        begin = time.process_time()
        try:
            what = try_form(grammars, form, number)
        except BaseException:  # a panic of native code is no Exception
            what = "raised " + traceback.format_exc().strip().splitlines()[-1]
        seconds = time.process_time() - begin
        print("end", f"{seconds:.3f}", what, flush=True)
    grammars.close()


def run(seed: int, first: int, count: int) -> tuple[Counter[str], list[str]]:
    """Tries forms in processes, a new one after each death.

    Returns:
        how many of each kind went which way, and a line for each fault.
    """
    counts: Counter[str] = Counter()
    faults, number, last = [], first, first + count
    while number < last:
        command = [sys.executable, "-m", "tests.constraints.fuzz", "--serve", "--seed", str(seed)]
        command += ["--first", str(number), "--count", str(last - number)]
        errors = tempfile.TemporaryFile("w+")
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        kind = "none"
        assert process.stdout is not None
        for line in process.stdout:
            word, *rest = line.split(maxsplit=2)
            if word == "begin":
                number, kind = int(rest[0]), rest[1].strip()
                continue
            seconds, what = float(rest[0]), rest[1].strip()
            counts[f"{kind} {what.split()[0]}"] += 1
            if what.startswith("raised"):
                faults.append(f"{number} ({kind}): {what}")
            if seconds > SLOW_SECONDS:
                faults.append(f"{number} ({kind}): took {seconds:.0f} seconds of processor time")
            number += 1
        if process.wait() != 0:
            errors.seek(0)
            said = errors.read()[-300:]
            faults.append(f"{number} ({kind}): ended with {process.returncode}: {said}")
            number += 1
    return counts, faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(given.seed, given.first, given.count)
        return 0
    begin = time.monotonic()
    counts, faults = run(given.seed, given.first, given.count)
    for what, number in sorted(counts.items()):
        print(f"{number:6d} {what}")
    print("\n".join(faults) or "no faults", f"({time.monotonic() - begin:.0f} seconds)")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
