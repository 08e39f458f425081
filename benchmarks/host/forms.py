"""What a form of a text costs before its first token: a new one with and without its trial, and a known one.

    python benchmarks/host/forms.py [--tokens 131072] [--json benchmarks/results/host/forms.json]

The tokenizer is byte-level, with random tokens of several bytes up to `--tokens`. New forms are schemas, expressions,
grammars and choices of usual sizes; each round has forms that no round before it had. The three ways take turns, in one
process. Inside the clock is `Grammars.state`. The first form, which starts the process and reads the tokenizer in both,
is a row of its own. Columns are medians, and the 90th percentile of the slowest way.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path
from unittest import mock

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

sys.path.append(str(Path(__file__).resolve().parents[2]))  # when run as a file
from benchmarks.common import header, quantiles, write_json
from hybrid_jax import StructuredOutputsParams
from hybrid_jax.constraints.grammar import Grammars
from hybrid_jax.constraints.trial import Trial
from hybrid_jax.text.tokenizer import Tokenizer, byte_alphabet

TYPES = ("string", "integer", "number", "boolean", "null")


def random_tokenizer(num_tokens: int) -> Tokenizer:
    """Bytes, and tokens that merge two others."""
    draw, tokens = random.Random(0), byte_alphabet()
    letters, merges, known = tokens[97:123], [], set(tokens)
    while len(tokens) < num_tokens:
        pair = draw.choice(tokens[256:] or letters), draw.choice(letters)
        if len(text := "".join(pair)) < 12 and text not in known:
            known.add(text)
            tokens.append(text)
            merges.append(pair)
    vocabulary = {text: token for token, text in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend)


def new_forms(draw: random.Random) -> dict[str, dict]:
    """A form of each kind that was never made before."""
    name = f"n{draw.getrandbits(60)}"
    fields = {f"{name}_{i}": {"type": draw.choice(TYPES)} for i in range(12)}
    inner = {"type": "array", "items": {"type": "object", "properties": fields}, "maxItems": 20}
    schema = {"type": "object", "properties": fields | {"list": inner}, "required": [*fields]}
    return {
        "schema": {"json": schema},
        "expression": {"regex": rf"{name}-(\d{{1,9}}\.)+[a-z]{{2,30}}"},
        "choice": {"choice": [f"{name} {i}" for i in range(50)]},
        "grammar": {"grammar": f'start: "{name}" item+\nitem: "(" (item | WORD) ")"\nWORD: /\\w+/'},
    }


def seconds_of(grammars: Grammars, form: StructuredOutputsParams) -> float:
    begin = time.perf_counter()
    grammars.state(form)
    return time.perf_counter() - begin


def measure(num_tokens: int, rounds: int) -> list[dict]:
    """A row for the first form, and one for each kind of form."""
    tokenizer, draw = random_tokenizer(num_tokens), random.Random(1)
    tried, untried = (Grammars(tokenizer, num_tokens) for _ in range(2))
    first = seconds_of(tried, StructuredOutputsParams(regex="first"))
    no_trial = mock.patch.object(Trial, "refusal", lambda self, source: None)
    with no_trial:
        seconds_of(untried, StructuredOutputsParams(regex="first"))
    seconds: dict[str, dict[str, list[float]]] = {}
    for _ in range(rounds):
        for kind, given in new_forms(draw).items():
            form, ways = StructuredOutputsParams(**given), seconds.setdefault(kind, {})
            with no_trial:
                ways.setdefault("untried", []).append(seconds_of(untried, form))
            ways.setdefault("tried", []).append(seconds_of(tried, form))
            ways.setdefault("known", []).append(seconds_of(tried, form))
    tried.close()
    rows = [{"form": "first", "tried_ms": 1e3 * first}]
    for kind, ways in seconds.items():
        row: dict = {"form": kind}
        for way, values in ways.items():
            found = quantiles([1e3 * value for value in values])
            row |= {f"{way}_ms": found["median"], f"{way}_p90_ms": found["p90"]}
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows = measure(given.tokens, given.rounds)
    print(f"{'form':12}{'untried ms':>12}{'tried ms':>12}{'p90':>8}{'known ms':>12}{'p90':>8}")
    for row in rows:
        columns = ("untried_ms", "tried_ms", "tried_p90_ms", "known_ms", "known_p90_ms")
        cells = [f"{row[name]:.3f}" if name in row else "" for name in columns]
        widths = (12, 12, 8, 12, 8)
        print(
            f"{row['form']:12}" + "".join(f"{c:>{w}}" for c, w in zip(cells, widths, strict=True))
        )
    write_json(given.json, {"header": header(), "tokens": given.tokens, "rows": rows})


if __name__ == "__main__":
    main()
