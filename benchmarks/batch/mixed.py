"""A batch file in which lines ask for different things: programs, seconds of compiling, and the rate after that.

    python benchmarks/batch/mixed.py [--against CHECKOUT] [--json benchmarks/results/batch/mixed_cpu.json]

The file is `mixed_files/requests.jsonl`: 60 chat lines with tools, JSON schemas, log-probabilities, several
completions and seeds. The model is a random Qwen3.5 of 1.2 M parameters over bytes, drawn from a seed; its config and
chat template lie beside the file. Each run is a process of its own with an empty folder for compiled programs. There
the file is answered once, which is timed with all that it compiles. Then it is answered until that compiles nothing
more, and then some times with an empty prefix cache, for the rate after compiling. With --against, this checkout and
another one, such as a worktree of an older commit, run in turns: for the rates one round of one, then one of the other.
The texts of greedy lines must be equal.

`--write` makes the file anew.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))  # when run as a file

ROOT = Path(__file__).resolve().parents[2]
FILES = Path(__file__).resolve().parent / "mixed_files"
REQUESTS = FILES / "requests.jsonl"
NUM_LINES = 60
MEASURED_AFTER = ("tokens_per_s_after", "processor_ms_per_token_after")
SETTINGS = {"dtype": "float32", "max_model_len": 4096, "memory": "256MiB"}
MADE = re.compile(r"compiled (.*) in ([0-9.]+) s$")

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a place.",
            "parameters": {
                "type": "object",
                "properties": {"place": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["place"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Finds pages.",
            "parameters": {"type": "object", "properties": {"words": {"type": "string"}}},
        },
    },
]
SCHEMAS = [
    {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]},
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
        "required": ["name", "age"],
    },
]
SYSTEMS = (
    "You are brief.",
    "You answer questions about the weather, and about nothing else at all.",
)
WORDS = (
    "what is the weather like in the north today and who wrote that book about old ships".split()
)


# --- the file and the model -----------------------------------------------------------------------


def make_lines() -> list[dict]:
    """The lines of the file: what they ask for, and how long they are, is drawn from a seed."""
    draw = random.Random(0)
    return [_make_line(index, draw) for index in range(NUM_LINES)]


def _make_line(index: int, draw: random.Random) -> dict:
    words = draw.choices(WORDS, k=draw.choice((3, 8, 20, 60)))
    messages = [{"role": "user", "content": " ".join(words)}]
    if draw.random() < 0.6:
        messages.insert(0, {"role": "system", "content": draw.choice(SYSTEMS)})
    body: dict = {"messages": messages, "max_tokens": draw.choice((4, 12, 24, 32))}
    body["temperature"] = draw.choice((0, 0, 0.8))
    if index % 4 == 1:
        body["tools"] = TOOLS
    if index % 5 == 2:
        schema = {"name": "answer", "schema": draw.choice(SCHEMAS)}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    if index % 6 == 3:
        body |= {"logprobs": True, "top_logprobs": draw.choice((0, 5))}
    if index % 10 == 4:
        body |= {"n": 2, "temperature": 0.8}
    if index % 3 == 0:
        body["seed"] = index
    return {
        "custom_id": f"line-{index}",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": body,
    }


def write_requests(path: Path) -> None:
    """Writes the file."""
    path.write_text("".join(json.dumps(line) + "\n" for line in make_lines()))


def write_random_model(folder: Path) -> int:
    """Writes the model; returns how many parameters it has."""
    import jax

    from hybrid_jax.models import config_from_hf
    from hybrid_jax.models.initialize import random_params
    from hybrid_jax.train.export import write_model

    fields = json.loads((FILES / "config.json").read_text())
    params = random_params(config_from_hf(fields), 0)
    write_model(folder, params, fields)
    (folder / "chat_template.jinja").write_text((FILES / "chat_template.jinja").read_text())
    return sum(leaf.size for leaf in jax.tree.leaves(params))


# --- in a process of its own ----------------------------------------------------------------------


class Programs(logging.Handler):
    """Notes the programs that are compiled and how long each took."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[str, float]] = []

    def emit(self, record: logging.LogRecord) -> None:
        if found := MADE.match(record.getMessage()):
            self.made.append((found[1], float(found[2])))


def run_here(model: Path, output: Path, checkout: Path) -> None:
    """Answers the file in this process: until nothing compiles, and once more for each line of stdin.

    Prints a JSON object for each: of the first time, and then of each line.
    """
    import hybrid_jax
    from hybrid_jax import LLM, run_batch

    if Path(hybrid_jax.__file__).parent.parent != checkout:
        raise RuntimeError(f"mixed: want hybrid_jax of {checkout}, got {hybrid_jax.__file__}")
    programs = Programs()
    logger = logging.getLogger("hybrid_jax.compiling")
    logger.addHandler(programs)
    logger.setLevel(logging.INFO)

    def answer() -> tuple[float, float, int]:
        """Seconds, seconds of processors, and new tokens."""
        output.unlink(missing_ok=True)
        before, start = _processor_seconds(), time.perf_counter()
        summary = run_batch(REQUESTS, output, llm)
        seconds = time.perf_counter() - start
        if summary.num_errors:
            raise RuntimeError(f"mixed: want no error line, got {summary}")
        return seconds, _processor_seconds() - before, summary.completion_tokens

    with LLM(model, quiet=True, **SETTINGS) as llm:
        seconds, processors, tokens = answer()
        texts = greedy_texts(output)
        first = list(programs.made)
        settled = False
        while not settled:
            before = len(programs.made)
            llm.reset_prefix_cache()
            answer()
            settled = len(programs.made) == before
        found = {
            "programs": [name for name, _ in first],
            "compiling_s": round(sum(took for _, took in first), 1),
            "seconds": round(seconds, 2),
            "processor_s": round(processors, 2),
            "tokens": tokens,
            "programs_later": len(programs.made) - len(first),
            "texts": texts,
        }
        print(json.dumps(found), flush=True)
        for _ in sys.stdin:
            llm.reset_prefix_cache()
            again, used, count = answer()
            round_ = (count / again, 1e3 * used / count)
            print(json.dumps(dict(zip(MEASURED_AFTER, round_, strict=True))), flush=True)


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def greedy_texts(output: Path) -> dict[str, str]:
    """The texts of the lines that draw nothing."""
    greedy = {line["custom_id"] for line in make_lines() if line["body"]["temperature"] == 0}
    answers = [json.loads(line) for line in output.read_text().splitlines()]
    return {
        answer["custom_id"]: answer["response"]["body"]["choices"][0]["message"]["content"]
        for answer in answers
        if answer["custom_id"] in greedy
    }


# --- around it ------------------------------------------------------------------------------------


class Apart:
    """A run in a process of its own, on the source of a checkout, with no program on disk.

    Args:
        folder: an empty one, for this run.
    """

    def __init__(self, checkout: Path, model: Path, folder: Path) -> None:
        set_by_users = ("JAX_COMPILATION_CACHE_DIR", "JAX_ENABLE_COMPILATION_CACHE")
        own = {name: value for name, value in os.environ.items() if name not in set_by_users}
        own |= {"XDG_CACHE_HOME": str(folder), "PYTHONPATH": str(checkout), "JAX_PLATFORMS": "cpu"}
        self._checkout, self._errors = checkout, folder / "stderr.txt"
        command = [sys.executable, __file__, "--here", checkout, model, folder / "out.jsonl"]
        with self._errors.open("w") as errors:
            self._process = subprocess.Popen(
                [*map(str, command)],
                env=own,
                cwd=folder,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self.found = self._next() | {name: [] for name in MEASURED_AFTER}

    def measure(self) -> None:
        """Answers the file once more."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        for name, value in self._next().items():
            self.found[name].append(value)

    def end(self) -> dict:
        """What was found, once the process has ended."""
        self._process.communicate()
        return self.found

    def _next(self) -> dict:
        assert self._process.stdout is not None
        if line := self._process.stdout.readline():
            return json.loads(line)
        said = self._errors.read_text()[-2000:]
        raise RuntimeError(f"mixed: the run on {self._checkout} failed: {said}")


def commit_of(checkout: Path) -> str:
    """The commit that is checked out there."""
    command = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    return subprocess.run(command, cwd=checkout, capture_output=True, text=True).stdout.strip()


def summary_of(runs: list[dict]) -> dict:
    """Medians of the runs of one side; programs and tokens are the same in all."""
    after = {
        name: round(statistics.median(value for run in runs for value in run[name]), 3)
        for name in MEASURED_AFTER
    }
    middle = {
        name: round(statistics.median(run[name] for run in runs), 2)
        for name in ("seconds", "processor_s", "compiling_s")
    }
    return {
        "programs": [len(run["programs"]) for run in runs],
        "names": runs[0]["programs"],
        "tokens": runs[0]["tokens"],
        "programs_later": [run["programs_later"] for run in runs],
        **middle,
        "tokens_per_s": round(runs[0]["tokens"] / middle["seconds"], 1),
        **after,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", type=Path, help="another checkout, measured in turns")
    parser.add_argument("--turns", type=int, default=3, help="runs of each side; 3")
    parser.add_argument(
        "--rounds", type=int, default=5, help="runs of the file once nothing compiles; 5"
    )
    parser.add_argument("--json", type=Path, help="where the numbers go")
    parser.add_argument("--write", action="store_true", help="write the file of requests and stop")
    parser.add_argument("--here", nargs=3, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.write:
        write_requests(REQUESTS)
        return
    if options.here:
        checkout, model, output = options.here
        run_here(model, output, checkout)
        return
    from benchmarks.common import header, write_json

    checkouts = {"here": ROOT}
    if options.against:
        checkouts["against"] = options.against.resolve()
    runs: dict[str, list[dict]] = {side: [] for side in checkouts}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        parameters = write_random_model(model)
        for turn in range(options.turns):
            order = sorted(checkouts, reverse=turn % 2 == 1)
            alive = {}
            for side in order:
                own = Path(folder) / f"{side}_{turn}"
                own.mkdir()
                alive[side] = Apart(checkouts[side], model, own)
            for _ in range(options.rounds):
                for side in order:
                    alive[side].measure()
            for side in order:
                runs[side].append(alive[side].end())
                print(side, json.dumps(summary_of(runs[side][-1:])), flush=True)
    sides = {side: summary_of(found) for side, found in runs.items()}
    report = {**header(), **SETTINGS, "lines": NUM_LINES, "parameters": parameters}
    report |= {"turns": options.turns, "rounds": options.rounds, **sides}
    if options.against:
        texts = [run["texts"] for found in runs.values() for run in found]
        if any(other != texts[0] for other in texts):
            raise RuntimeError("mixed: the two checkouts gave different greedy texts")
        here, against = sides["here"], sides["against"]
        report["against"]["commit"] = commit_of(checkouts["against"])
        report["ratio"] = {
            name: round(here[name] / against[name], 3)
            for name in ("seconds", "processor_s", *MEASURED_AFTER)
        }
    for name, value in report.items():
        print(f"{name:20} {value}")
    write_json(options.json, report)


if __name__ == "__main__":
    main()
