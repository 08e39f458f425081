"""What speculative decoding gains and costs, beside plain decoding in the same process.

    python benchmarks/engine/speculation.py [--rounds 5] [--json OUT] [--png OUT]

Two models: a random Nemotron-H of 173 M parameters, which a CPU has to read for each token, and the bundled one, which
its caches hold. Inside the clock: engine turns from the moment every row decodes until the first row ends. Medians of
rounds taken in turns, with 10th and 90th percentiles. Ratios are of the same round: above 1, speculation is faster.

- Acceptance is forced where the price of a verification is measured: the drafts are the output of plain decoding, in
  which a share of the tokens was made wrong.
- Two other ways to take a recurrent state back are priced by measured parts of the same model: a copy of the states for
  each draft token, and one copy before the verification, from which the accepted tokens are run again.
- `docs/studies/speculation.md` has the numbers in words. Charts need matplotlib: `pip install -e '.[plot]'`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[2]))  # when run as a file
from benchmarks.common import header, quantiles, request, run, run_decode, turns, write_json
from benchmarks.engine.random_models import nemotron_model
from hybrid_jax.config import PALLAS, XLA, EngineConfig, ModelConfig, SpeculationConfig
from hybrid_jax.costs import state_elements
from hybrid_jax.engine.drafters.drafter import DraftRows, Drafts
from hybrid_jax.engine.drafters.table import DRAFTERS
from hybrid_jax.engine.engine import Engine
from hybrid_jax.engine.runner import Runner
from hybrid_jax.geometry import make_geometry
from hybrid_jax.models import decoder
from hybrid_jax.models.initialize import random_params
from hybrid_jax.models.stacks import ExitStack
from hybrid_jax.sizing.budget import split_memory
from hybrid_jax.state import Model, State
from hybrid_jax.weights import BUNDLED, load_config, load_model

DRAFTS = 4
FORCED = 3.4  # tokens a verification
HEADS = {
    "2 drafts": SpeculationConfig(method="mtp", num_tokens=2),
    "3 drafts": SpeculationConfig(method="mtp", num_tokens=3),
    "tree of 8": SpeculationConfig(method="mtp", tree=(0, 0, 1, 1, 3, 3, 5)),
    "n-gram, 3 drafts": SpeculationConfig(num_tokens=3),
}
EARLY = SpeculationConfig(method="exit", num_tokens=2, adaptive=False)
SURE = 0.95  # SwiftKV, arXiv 2410.03960, appendix E
EXITS = {
    "1 draft": replace(EARLY, num_tokens=1),
    "2 drafts": EARLY,
    "3 drafts": replace(EARLY, num_tokens=3),
    f"3, kept above {SURE}": replace(EARLY, num_tokens=3, unjudged_above=SURE),
}
PROMPTS = 48
LARGE = Path(__file__).resolve().parents[2] / "configs/models/hybrid_7b"


@dataclass(frozen=True)
class Subject:
    """A model to run."""

    config: ModelConfig
    params: dict

    def engine(self, speculation: SpeculationConfig | None, rows: int) -> Engine:
        settings = EngineConfig(max_rows=rows, max_model_len=1024, speculation=speculation)
        return Engine(self.config, self.params, settings)


def nemotron() -> Subject:
    config = nemotron_model()
    return Subject(config, random_params(config, 0))


def bundled() -> Subject:
    return Subject(*load_model(BUNDLED, dtype="float32"))


# --- forced acceptance ------------------------------------------------------------------------------


class Recorded:
    """Drafts what stands after the row's tokens in its history."""

    fields = ()

    def __init__(self, config: SpeculationConfig) -> None:
        self.most = config.num_tokens

    def draft(
        self, params: dict, state: State, rows: DraftRows, model: Model
    ) -> tuple[Drafts, State]:
        num_rows = len(rows.alive)
        places = state.lengths[:num_rows, None] + 1 + jnp.arange(self.most)
        history = state.drafting["history"][:num_rows]
        places = jnp.minimum(places, history.shape[1] - 1)
        tokens = jnp.take_along_axis(history, places, axis=1)
        return Drafts(tokens, jnp.full(num_rows, self.most)), state


@contextlib.contextmanager
def forced(outputs: dict[tuple[int, ...], list[int]]) -> Iterator[None]:
    """Engines that are made and run now draft these outputs, by prompt."""
    load = Runner._load_history

    def loaded(runner: Runner, row: int, tokens) -> None:
        tokens = list(map(int, tokens))
        load(runner, row, tokens + outputs.get(tuple(tokens), []))

    with (
        mock.patch.dict(DRAFTERS, {"ngram": Recorded}),
        mock.patch.object(Runner, "_load_history", loaded),
    ):
        yield


def share_right(tokens: float) -> float:
    """The share of right drafts at which a verification of `DRAFTS` drafts brings so many tokens on average."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        brings = sum(middle**i for i in range(DRAFTS + 1))
        low, high = (middle, high) if brings < tokens else (low, middle)
    return low


def with_mistakes(tokens: list[int], right: float, vocab_size: int, seed: int) -> list[int]:
    wrong = np.random.default_rng(seed).random(len(tokens)) > right
    return [
        (token + 1) % vocab_size if bad else token for token, bad in zip(tokens, wrong, strict=True)
    ]


# --- measuring --------------------------------------------------------------------------------------


@dataclass
class Side:
    """One engine, and what it decodes in each round."""

    engine: Engine
    prompts: list[list[int]]
    tokens: int
    sampling: dict[str, Any]
    number: int = 0
    steps: int = 0

    def requests(self) -> list:
        self.number += 1
        return [
            request(f"{self.number}-{i}", prompt, self.tokens, **self.sampling)
            for i, prompt in enumerate(self.prompts)
        ]

    def per_token(self, _: object = None) -> float:
        """Seconds a token while all rows decode."""
        self.engine.reset_prefix_cache()
        seconds, tokens = run_decode(self.engine, self.requests())
        return seconds / tokens

    def outputs(self) -> dict[tuple[int, ...], list[int]]:
        requests = self.requests()
        run(self.engine, requests)
        return {tuple(one.prompt): list(one.output.token_ids) for one in requests}


def compare(name: str, sides: dict[str, Side], rounds: int, base: str) -> list[dict]:
    """A row for each side: milliseconds a token, how many times as fast as `base`, and what was accepted."""
    print(name, flush=True)
    seconds = turns(rounds, {k: side.per_token for k, side in sides.items()}, lambda: None)
    rows = []
    for key, values in seconds.items():
        ratios = [b / v for b, v in zip(seconds[base], values, strict=True)]
        stats = sides[key].engine.stats()
        row = {
            "case": name,
            "side": key,
            "rows": len(sides[key].prompts),
            "ms_per_token": {k: 1e3 * v for k, v in quantiles(values).items()},
            f"over_{base}": quantiles(ratios),
            "tokens_per_verification": stats.get("tokens_per_verification", 0.0),
            "accepted_at": [
                stats[f"accepted_at_{i}"] for i in range(1, 31) if f"accepted_at_{i}" in stats
            ],
            "verifications": stats.get("verifications", 0),
        }
        rows.append(row)
        print(
            f"  {key:12} {row['ms_per_token']['median']:8.2f} ms a token  "
            f"{row[f'over_{base}']['median']:.2f}x"
            + f"  {row['tokens_per_verification']:.2f} a verification"
            * bool(row["verifications"]),
            flush=True,
        )
    return rows


def random_prompts(config: ModelConfig, rows: int, length: int = 64) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(1, config.vocab_size, length).tolist() for _ in range(rows)]


def texts(rows: int, length: int = 512) -> list[list[int]]:
    """Pieces of modules of this Python that the bundled model and its head have not seen, as bytes."""
    record = json.loads((BUNDLED / "mtp_training_record.json").read_text())
    library = Path(sysconfig.get_paths()["stdlib"])
    files = [library / name for name in record["corpus"]["held_out_names"]]
    content = [file.read_bytes() for file in files if file.is_file()]
    content = [text for text in content if len(text) > 2048 + length]
    starts = [(content[i % len(content)], 1024 + 512 * (i // len(content))) for i in range(rows)]
    return [list(text[start : start + length]) for text, start in starts]


# --- the cases --------------------------------------------------------------------------------------


def price(subject: Subject, rounds: int, tokens: int) -> list[dict]:
    """What a verification costs, whatever is accepted, and a plain step of as many rows as it has tokens."""
    prompts = random_prompts(subject.config, 1)
    plain = Side(subject.engine(None, 1), prompts, tokens, {})
    recorded = plain.outputs()
    right = {
        "all right": 1.0,
        f"{FORCED} tokens": share_right(FORCED),
        "none right": 0.0,
    }
    sides = {"plain": plain}
    for name, share in right.items():
        sides[name] = forced_side(subject, plain, recorded, share)
    many = random_prompts(subject.config, 1 + DRAFTS)
    sides[f"plain, {1 + DRAFTS} rows"] = Side(subject.engine(None, 1 + DRAFTS), many, tokens, {})
    rows = compare("forced acceptance", sides, rounds, "plain")
    by_side = {row["side"]: row for row in rows}
    step = (
        by_side["all right"]["ms_per_token"]["median"]
        * by_side["all right"]["tokens_per_verification"]
    )
    one = by_side["plain"]["ms_per_token"]["median"]
    of_rows = by_side[f"plain, {1 + DRAFTS} rows"]["ms_per_token"]["median"] * (1 + DRAFTS)
    print(
        f"  a verification of {1 + DRAFTS} tokens: {step:.1f} ms, {step / one:.2f}x a plain step of one row, "
        f"{step / of_rows:.2f}x one of {1 + DRAFTS} rows",
        flush=True,
    )
    rows.append(
        {
            "case": "price of a verification",
            "ms": step,
            "over_one_row": step / one,
            "over_as_many_rows": step / of_rows,
        }
    )
    return rows + other_ways(subject, by_side, rounds, step, one)


@dataclass
class _Forced(Side):
    planted: dict[tuple[int, ...], list[int]] | None = None

    def per_token(self, _: object = None) -> float:
        with forced(self.planted or {}):
            return super().per_token()


def forced_side(
    subject: Subject, plain: Side, recorded: dict[tuple[int, ...], list[int]], right: float
) -> _Forced:
    """A side that is given `plain`'s requests, and drafts its recorded outputs, of which a share is right."""
    outputs = {
        prompt: with_mistakes(output, right, subject.config.vocab_size, 1)
        for prompt, output in recorded.items()
    }
    engine = subject.engine(SpeculationConfig(num_tokens=DRAFTS, adaptive=False), 1)
    return _Forced(engine, plain.prompts, plain.tokens, {}, planted=outputs)


def flights(subject: Subject, rounds: int, tokens: int) -> list[dict]:
    """One plan in flight and two, where drafts are right so often that a verification brings `FORCED` tokens."""
    plain = Side(subject.engine(None, 1), random_prompts(subject.config, 1), tokens, {})
    recorded, sides = plain.outputs(), dict[str, Side]()
    for most in (1, 2):
        side = forced_side(subject, plain, recorded, share_right(FORCED))
        side.engine.scheduler.max_flights = most
        sides[f"{most} in flight"] = side
    return compare(f"plans in flight, width {subject.config.width}", sides, rounds, "1 in flight")


def other_ways(
    subject: Subject, by_side: dict[str, dict], rounds: int, step: float, one: float
) -> list[dict]:
    """Milliseconds a token if states were copied for each draft, or restored and run again, by measured parts."""
    mixers = subject.config.recurrent
    states = [jnp.zeros((1, sum(state_elements(mixer)))) for mixer in mixers]
    store = [jnp.zeros((1 + DRAFTS, state.shape[1])) for state in states]

    @jax.jit
    def snapshots(
        states, store
    ):  # after each token of the window; then one of them becomes the state
        store = [jnp.broadcast_to(s + 1.0, t.shape) for s, t in zip(states, store, strict=True)]
        return [t[2:3] * 1.0 for t in store], store

    @jax.jit
    def one_copy(states, store):
        return [s + 1.0 for s in states], store

    def ms(call: Callable) -> float:
        seconds = []
        for _ in range(4 * rounds):
            begun = time.perf_counter()
            jax.block_until_ready(call(states, store))
            seconds.append(time.perf_counter() - begun)
        return 1e3 * statistics.median(seconds[2:])

    name = f"{FORCED} tokens"
    brings, ours = by_side[name]["tokens_per_verification"], by_side[name]["ms_per_token"]["median"]
    again = 1 - share_right(FORCED) ** DRAFTS  # how often a draft is wrong
    whole = ours * brings
    ways = {
        "replay (this engine)": whole,
        "a snapshot a draft": whole + ms(snapshots),
        "restore and run again": whole + 2 * ms(one_copy) + again * step,
    }
    rows = []
    for way, cost in ways.items():
        rows.append(
            {
                "case": "ways to take a state back",
                "side": way,
                "ms_per_token": cost / brings,
                "over_plain": one / (cost / brings),
            }
        )
        print(f"  {way:24} {cost / brings:8.2f} ms a token  {one * brings / cost:.2f}x", flush=True)
    return rows


def lookup(subject: Subject, rounds: int, tokens: int) -> list[dict]:
    """n-gram drafts where the output repeats itself, and where it does not."""
    found = []
    prompts = random_prompts(subject.config, 1)
    period = prompts[0][:24]
    cases = {
        "repeats": ([period * 6], {"allowed_token_ids": tuple(period[:2])}),
        "does not repeat": (prompts, {"temperature": 1.0}),
    }
    for name, (given, sampling) in cases.items():
        sides = {
            "plain": Side(subject.engine(None, 1), given, tokens, sampling),
            "ngram": Side(subject.engine(SpeculationConfig(), 1), given, tokens, sampling),
        }
        found += compare(f"n-gram, output {name}", sides, rounds, "plain")
    return found


def many_rows(subject: Subject, rounds: int, tokens: int) -> list[dict]:
    """The bundled model with 8 rows, where speculation has little to gain."""
    given, sampling = texts(8), {"temperature": 0.7}
    sides = {"plain": Side(subject.engine(None, 8), given, tokens, sampling)}
    for method in ("ngram", "suffix"):
        speculation = SpeculationConfig(method=method)
        sides[method] = Side(subject.engine(speculation, 8), given, tokens, sampling)
    return compare("bundled model, 8 rows", sides, rounds, "plain")


def head(rounds: int, tokens: int) -> list[dict]:
    """The bundled model's head beside look-ups, on modules that neither has seen, at temperature 0.7.

    Greedy output of so small a model runs in circles, which any drafter foresees.
    """
    subject = Subject(*load_model(BUNDLED, dtype="float32", mtp=True))
    drafters = {name: replace(speculation, adaptive=False) for name, speculation in HEADS.items()}
    return layers_that_draft("head", subject, drafters, rounds, tokens)


def early_exit(rounds: int, tokens: int) -> list[dict]:
    """The layers before a cut of the bundled model, with a head on its output; with the paper's rule, which changes the
    output, too."""
    subject = Subject(*load_model("tiny_cut", dtype="float32", exit_head=True))
    found = [sure_drafts(subject)]
    return found + layers_that_draft("early exit", subject, EXITS, rounds, tokens)


def layers_that_draft(
    case: str,
    subject: Subject,
    drafters: dict[str, SpeculationConfig],
    rounds: int,
    tokens: int,
) -> list[dict]:
    """With 1 row and with 8, and how many tokens a verification brings on other prompts."""
    found = []
    for rows in (1, 8):
        given, sampling = texts(rows), {"temperature": 0.7}
        sides = {"plain": Side(subject.engine(None, rows), given, tokens, sampling)}
        for name, speculation in drafters.items():
            sides[name] = Side(subject.engine(speculation, rows), given, tokens, sampling)
        found += compare(f"{case}, {rows} row{'s' * (rows > 1)}", sides, rounds, "plain")
        if rows == 8:
            found += [acceptance(name, sides[name].engine, tokens) for name in drafters]
    return found


def sure_drafts(subject: Subject) -> dict:
    """How often the head on the cut finds one token more likely than `SURE`, and how often the model agrees then.

    On held-out text, so each token is predicted from real ones.
    """
    config, params = subject.config, subject.params
    tokens = jnp.array(texts(PROMPTS, 512))

    @jax.jit
    def both(tokens: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        valid, mix = decoder.whole_sequences(tokens, jnp.full(len(tokens), tokens.shape[1]))
        stack = ExitStack(params, config)
        early = stack.logits(stack.through(tokens, None, valid, mix, XLA))
        late = decoder.forward(params, tokens, config)
        sure = jax.nn.softmax(early).max(-1) > SURE
        same = early.argmax(-1) == late.argmax(-1)
        return sure.mean(), same.mean(), (sure & same).sum() / sure.sum()

    parts = [both(tokens[start : start + 4]) for start in range(0, PROMPTS, 4)]
    share, agreement, right = (float(np.mean(part)) for part in zip(*parts, strict=True))
    print(
        f"  the head's token is the model's {agreement:.3f} of the time; {right:.3f} where it is surer than {SURE}, "
        f"which is {share:.3f} of all",
        flush=True,
    )
    row = {"case": "agreement of the head on the cut", "tokens": PROMPTS * 512}
    return row | {"same_token": agreement, "sure": share, "same_token_if_sure": right}


def acceptance(name: str, engine: Engine, tokens: int) -> dict:
    """Tokens a verification over `PROMPTS` prompts, with the interval that drawing other prompts would give."""
    requests = [
        request(f"a-{i}", prompt, tokens, temperature=0.7)
        for i, prompt in enumerate(texts(PROMPTS, 256))
    ]
    run(engine, requests)
    counts = [
        (one.course.drafts.accepted_tokens, one.course.drafts.verifications) for one in requests
    ]
    drawn = np.random.default_rng(0).integers(0, PROMPTS, (1000, PROMPTS))
    accepted, windows = np.array(counts).T
    brings = 1 + accepted[drawn].sum(1) / windows[drawn].sum(1)
    row = {
        "case": "acceptance of other prompts",
        "side": name,
        "prompts": PROMPTS,
        "tokens_per_verification": 1 + accepted.sum() / windows.sum(),
        "p5": float(np.percentile(brings, 5)),
        "p95": float(np.percentile(brings, 95)),
    }
    print(
        f"  {name:16} {row['tokens_per_verification']:.2f} tokens a verification "
        f"({row['p5']:.2f} to {row['p95']:.2f}) over {PROMPTS} prompts",
        flush=True,
    )
    return row


def memory() -> list[dict]:
    """Bytes of a row of the 7B hybrid with and without drafts."""
    config, found = load_config(LARGE), []
    settings = EngineConfig(dtype="bfloat16", max_rows=64, max_model_len=8192, kernels="pallas")
    state = 4 * sum(state_elements(mixer)[0] for mixer in config.recurrent)
    for drafts in (0, 2, 4, 8):
        speculation = SpeculationConfig(num_tokens=drafts) if drafts else None
        engine = replace(settings, speculation=speculation)
        sizes = split_memory(config, engine, make_geometry(config, engine), backend=PALLAS)
        found.append(
            {
                "case": "bytes a row of the 7B hybrid",
                "tokens": 1 + drafts,
                "rings": sizes.ring_bytes / 65,
                "logits": sizes.logits_bytes / 64,
                "history": sizes.drafting_bytes / 65,
                "state": state,
            }
        )
    base = found[0]["rings"]
    for row in found:
        row["rings_over_a_state"] = (row["rings"] - base) / state
        print(
            f"  {row['tokens']} tokens: rings {row['rings'] / 1e6:.2f} MB a row, "
            f"{row['rings_over_a_state']:.3f} of a state more",
            flush=True,
        )
    return found


CASES: dict[str, Callable[[int], list[dict]]] = {
    "memory": lambda rounds: memory(),
    "price": lambda rounds: price(nemotron(), rounds, 128),
    "lookup": lambda rounds: lookup(nemotron(), rounds, 128),
    "many_rows": lambda rounds: many_rows(bundled(), rounds, 256),
    "head": lambda rounds: head(rounds, 256),
    "early_exit": lambda rounds: early_exit(rounds, 256),
    "flights": lambda rounds: flights(nemotron(), rounds, 128) + flights(bundled(), rounds, 256),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--rounds", type=int, default=5, help="how often each side is timed, taking turns; 5"
    )
    parser.add_argument(
        "--cases",
        nargs="+",
        choices=CASES,
        default=list(CASES),
        help="what is measured; all by default, which takes 40 minutes. memory takes seconds, the others 5 minutes or "
        "more, most of it to compile",
    )
    parser.add_argument("--json", type=Path, help="the numbers, written after each case")
    parser.add_argument("--png", type=Path, help="a chart of what was gained")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {options.rounds}")
    report: dict[str, Any] = {"header": header(), "rows": []}
    for name in options.cases:
        report["rows"] += CASES[name](options.rounds)
        write_json(options.json, report)
    if options.png and (bars := gains(report["rows"])):
        draw(bars, options.png)


def gains(rows: list[dict]) -> list[tuple[str, Any]]:
    """How many times as fast as plain decoding each side is, by its case and name."""
    return [
        (f"{row['case']}: {row['side']}", row["over_plain"])
        for row in rows
        if row.get("side") and "over_plain" in row and not row["side"].startswith("plain")
    ]


def draw(bars: list[tuple[str, Any]], path: Path) -> None:
    """A bar for each of the `gains`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 0.32 * len(bars) + 1.2), layout="constrained")
    axes = figure.subplots()
    values = [value["median"] if isinstance(value, dict) else value for _, value in bars]
    axes.barh(
        [name for name, _ in bars],
        values,
        color=["#4477aa" if v >= 1 else "#cc6677" for v in values],
    )
    axes.axvline(1.0, color="black", linewidth=1)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12 * max(values))
    axes.set_xlabel("tokens a second over plain decoding")
    for place, value in enumerate(values):
        axes.text(value, place, f" {value:.2f}", va="center")
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
