"""Batch files over several processes of this machine: what the driver costs, and what becomes of shared beginnings.

    python benchmarks/cluster/driver.py [--json benchmarks/results/cluster/driver.json] [--rounds 3] [--smoke]

The bundled model answers a file of completions whose prompts share their beginnings in two levels: in one process,
and in two. For each run: the processor time of the driver as a share of the run (its target is 3 % with two workers),
the share of prompt tokens that came from the prefix cache, new tokens a second, and how evenly the two workers got
their work (the larger share of FLOPs over the mean; the target is 1.1). The programs are compiled before, and every
run begins with an empty cache.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # when run as a file

from benchmarks.common import header, write_json
from hybrid_jax import LLM, run_batch

WORDS = (
    "def class import return self value index count total result while for in if not None".split()
)
SIZES = {"max_rows": 8, "max_model_len": 1024}


def write_file(path: Path, lines: int, *, groups: int, tokens: int) -> None:
    """A batch file: each group of lines shares a beginning, and each half of a group a longer one."""
    draw = random.Random(0)
    words = lambda count: " ".join(draw.choices(WORDS, k=count)) + "\n"
    heads = [words(60) for _ in range(groups)]
    longer = {(group, half): words(30) for group in range(groups) for half in range(2)}
    with path.open("w") as file:
        for number in range(lines):
            group = draw.randrange(groups)
            prompt = heads[group] + longer[group, draw.randrange(2)] + words(8)
            body = {"prompt": prompt, "max_tokens": draw.randrange(tokens // 2, tokens), "seed": 1}
            request = {"custom_id": str(number), "method": "POST", "url": "/v1/completions"}
            file.write(json.dumps(request | {"body": body}) + "\n")


def run(llm: LLM, folder: Path) -> dict[str, float]:
    """Answers the file anew; the numbers of one run."""
    output = folder / "out.jsonl"
    output.unlink(missing_ok=True)
    llm.reset_prefix_cache()
    before, begun = time.process_time(), time.perf_counter()
    summary = run_batch(folder / "in.jsonl", output, llm, progress=False)
    seconds = time.perf_counter() - begun
    return {
        "seconds": seconds,
        "driver_share": (time.process_time() - before) / seconds,
        "hit_rate": summary.hit_rate,
        "new_tokens_per_s": summary.completion_tokens / seconds,
        "compile_s": summary.compile_s,
    }


def measure(folder: Path, rounds: int) -> dict[str, Any]:
    """Both ways, one after the other: an idle LLM in the driver's process would count as work of the driver."""
    found: dict[str, list[dict[str, float]]] = {}
    for name, options in {"two workers": {"replicas": 2}, "one process": {}}.items():
        with LLM(**SIZES, **options, quiet=True) as llm:
            run(llm, folder)  # compiles
            runs = found[name] = []
            for _ in range(rounds):
                before = loads(llm)
                runs.append(run(llm, folder))
                given = [after - old for after, old in zip(loads(llm), before, strict=True)]
                runs[-1]["largest_over_mean"] = max(given) / statistics.mean(given)
    return {
        name: {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        for name, runs in found.items()
    }


def loads(llm: LLM) -> list[float]:
    """FLOPs that the router has given each replica, as it counts them; 1 and more where there is one."""
    dispatcher = getattr(llm._thread, "_dispatcher", None)
    return [time.time()] if dispatcher is None else [x.total for x in dispatcher._router._loads]


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--smoke", action="store_true", help="few lines, to see that it runs")
    arguments = parser.parse_args()
    lines, rounds = (24, 1) if arguments.smoke else (600, arguments.rounds)
    with tempfile.TemporaryDirectory() as folder:
        write_file(Path(folder, "in.jsonl"), lines, groups=max(2, lines // 40), tokens=64)
        found = measure(Path(folder), rounds)
    for name, numbers in found.items():
        print(f"{name}: " + ", ".join(f"{key} {value:.4g}" for key, value in numbers.items()))
    if arguments.json is not None:
        write_json(arguments.json, header() | {"lines": lines, "rounds": rounds, "runs": found})


if __name__ == "__main__":
    main()
