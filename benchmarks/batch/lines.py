"""Many batch lines: speed, memory and order of `hybrid-jax run-batch` on a file of a million lines.

    python benchmarks/batch/lines.py [--lines 1000000] [--json benchmarks/results/batch/lines.json]
    python benchmarks/batch/lines.py --documents 64 [--json benchmarks/results/batch/order.json]

The model is as small as a hybrid can be, with random weights, so what is measured is the work per line on the
host. One line in fifty is wrong, in one of five ways. The program runs in a process of its own; once a second its
resident memory is read (Linux) beside the number of lines in its output. Lines per second are those from a
tenth of the lines to the last reading, so start-up and compilation are left out. Every answer is compared with
its line: right custom_id, in order, an error where there must be one.

With --documents, instead: 8 questions about each of so many documents of 400 tokens, shuffled, in a memory that holds
a few of the documents. Lines computed along the tree of their prefixes, against the order of the file, in
turns in one process; inside the clock is `run_batch`, from reading the file to its output.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple
from unittest import mock

sys.path.append(str(Path(__file__).resolve().parents[2]))  # when run as a file
from benchmarks.common import ROOT, header, quantiles, turns, write_json
from hybrid_jax import LLM, run_batch
from hybrid_jax.batch import partial_path
from hybrid_jax.batch import run as run_module
from hybrid_jax.models import config_from_hf
from hybrid_jax.models.initialize import random_params
from hybrid_jax.train.export import write_model
from hybrid_jax.train.loop import tiny_fields

WRONG_EVERY = 50
MAX_TOKENS = 4
SHARES = (0.1, 0.5, 1.0)  # of the lines, where memory is reported
QUESTIONS, DOCUMENT_BYTES = 8, 400
ORDER_SETTINGS = {"dtype": "float32", "max_rows": 4, "max_model_len": 512, "memory": "1MiB"}


class Sample(NamedTuple):
    """Seconds since the start, lines in the output, bytes resident."""

    seconds: float
    lines: int
    resident: int


def small_fields() -> dict:
    """config.json of one recurrent and one attention layer of width 32 over bytes."""
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "layer_types": ["mamba", "attention"],
        "num_attention_heads": 2,
        "attention_multiplier": 0.25,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
        "intermediate_size": 32,
        "shared_intermediate_size": 32,
        "max_position_embeddings": 512,
    }
    return tiny_fields() | sizes


def write_random_model(folder: Path) -> None:
    fields = small_fields()
    write_model(folder, random_params(config_from_hf(fields), 0), fields)


def make_line(index: int) -> tuple[str, str | None, bool]:
    """Line `index` of the file, the custom_id its answer must have, and whether it can be answered."""
    name = f"request-{index}"
    body = {"prompt": f"Line {index} of many: ", "max_tokens": MAX_TOKENS, "temperature": 0}
    line = {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body}
    wrong = index // WRONG_EVERY % 5 if index % WRONG_EVERY == WRONG_EVERY - 1 else None
    if wrong == 0:
        return json.dumps(line)[:-1], None, False
    if wrong == 1:
        del line["custom_id"]
        name = None
    elif wrong == 2:
        line["custom_id"] = name = f"request-{index - 1}"  # taken
    elif wrong == 3:
        body["max_tokens"] = -1
    elif wrong == 4:
        line["url"] = "/v1/nothing"
    return json.dumps(line), name, wrong is None


def write_lines(path: Path, count: int) -> None:
    with open(path, "w") as file:
        for index in range(count):
            file.write(make_line(index)[0] + "\n")


def resident_bytes(pid: int) -> int:
    """Resident memory of a process that runs, or has ended and was not waited for."""
    status = Path(f"/proc/{pid}/status").read_text()
    return sum(int(x.split()[1]) for x in status.splitlines() if x.startswith("VmRSS")) * 1024


def watch(command: list[str], output: Path, log: Path) -> tuple[list[Sample], dict]:
    """Runs the program to its end; returns what was seen of it, and its own summary."""
    samples, num_lines, start = [], 0, time.perf_counter()
    with ExitStack() as stack:
        notes, grown = stack.enter_context(open(log, "w")), None
        program = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=notes, cwd=ROOT)
        while True:
            resident = resident_bytes(program.pid)
            if program.poll() is not None:
                break
            if grown is None and partial_path(output).exists():
                grown = stack.enter_context(open(partial_path(output), "rb"))
            while grown is not None and (data := grown.read(1 << 20)):
                num_lines += data.count(b"\n")
            samples.append(Sample(time.perf_counter() - start, num_lines, resident))
            time.sleep(1)
    if program.returncode:
        raise RuntimeError(f"lines: run-batch failed: {log.read_text()[-2000:]}")
    return samples, json.loads(program.stdout.read())


def check_answers(output: Path, count: int) -> int:
    """Checks that every line is answered, once and in order; returns how many answers are errors."""
    num_answers = num_errors = 0
    with open(output, "rb") as file:
        for index, answer in enumerate(map(json.loads, file)):
            _, name, good = make_line(index)
            found = answer["custom_id"], answer["error"] is None
            if found != (name, good):
                raise RuntimeError(f"lines: line {index}: want {(name, good)}, got {found}")
            num_answers, num_errors = num_answers + 1, num_errors + (not good)
    if num_answers != count:
        raise RuntimeError(f"lines: want {count} answers, got {num_answers}")
    return num_errors


def measure(folder: Path, count: int, max_rows: int) -> dict:
    given, output = folder / "in.jsonl", folder / "out.jsonl"
    write_random_model(folder / "model")
    write_lines(given, count)
    command = [sys.executable, "-m", "hybrid_jax", "run-batch", "-i", given, "-o", output]
    command += ["--model", folder / "model", "--max-rows", max_rows, "--dtype", "float32", "--json"]
    samples, summary = watch([str(part) for part in command], output, folder / "log")
    num_errors = check_answers(output, count)
    if (summary["num_lines"], summary["num_errors"]) != (count, num_errors):
        raise RuntimeError(f"lines: want {count} lines, {num_errors} errors, got {summary}")
    at = [next((s for s in samples if s.lines >= x * count), samples[-1]) for x in SHARES]
    first, last = at[0], samples[-1]
    lines, seconds = last.lines - first.lines, last.seconds - first.seconds
    return {
        "dtype": "float32",
        "max_rows": max_rows,
        "lines": count,
        "errors": num_errors,
        "in_order": True,
        "seconds": round(last.seconds, 1),
        "lines_per_s": round(lines / seconds, 1) if lines else None,
        "resident_bytes": {f"{x:.0%}": s.resident for x, s in zip(SHARES, at, strict=True)},
        "peak_resident_bytes": summary["peak_memory_bytes"],
        "bytes_per_line": round((last.resident - first.resident) / lines, 1) if lines else None,
        "completion_tokens": summary["completion_tokens"],
        "input_bytes": given.stat().st_size,
        "output_bytes": output.stat().st_size,
    }


# --- the order of lines -------------------------------------------------------------------------


def write_questions(path: Path, num_documents: int) -> None:
    """All questions about all documents, shuffled."""
    random_ = random.Random(0)
    documents = [
        "".join(random_.choices("abcdefgh ", k=DOCUMENT_BYTES)) for _ in range(num_documents)
    ]
    pairs = [(d, q) for d in range(num_documents) for q in range(QUESTIONS)]
    random_.shuffle(pairs)
    with open(path, "w") as file:
        for d, q in pairs:
            body = {"prompt": f"{documents[d]}? {q}", "max_tokens": MAX_TOKENS, "temperature": 0}
            line = {"custom_id": f"{d}-{q}", "method": "POST", "url": "/v1/completions"}
            file.write(json.dumps(line | {"body": body}) + "\n")


def texts(output: Path) -> list[tuple[str, str]]:
    answers = map(json.loads, output.read_text().splitlines())
    return [(a["custom_id"], a["response"]["body"]["choices"][0]["text"]) for a in answers]


def compare_orders(folder: Path, num_documents: int, rounds: int) -> dict:
    given = folder / "in.jsonl"
    write_random_model(folder / "model")
    write_questions(given, num_documents)
    hit_rates, found = {}, {}

    def answer(side: str, order) -> float:
        output = folder / f"{side}.jsonl"
        output.unlink(missing_ok=True)
        llm.reset_prefix_cache()
        with mock.patch.object(run_module, "prefix_order", order):
            summary = run_batch(given, output, llm)
        hit_rates[side], found[side] = summary.hit_rate, texts(output)
        return summary.seconds

    sides = {
        "file_order": lambda _: answer("file_order", lambda prompts, grain: range(len(prompts))),
        "along_tree": lambda _, order=run_module.prefix_order: answer("along_tree", order),
    }
    with LLM(folder / "model", quiet=True, **ORDER_SETTINGS) as llm:
        seconds = turns(rounds, sides, lambda: None)
    if found["file_order"] != found["along_tree"]:
        raise RuntimeError("lines: the order changed an answer")
    pairs = zip(seconds["file_order"], seconds["along_tree"], strict=True)
    return {
        **ORDER_SETTINGS,
        "documents": num_documents,
        "questions": QUESTIONS,
        "rounds": rounds,
        "hit_rate": hit_rates,
        "seconds": {side: quantiles(values) for side, values in seconds.items()},
        "ratio": quantiles([a / b for a, b in pairs]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lines", type=int, default=1_000_000)
    parser.add_argument("--max-rows", type=int, default=64)
    parser.add_argument("--documents", type=int, help="compare orders of lines instead")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.documents:
            found = compare_orders(Path(folder), arguments.documents, arguments.rounds)
        else:
            found = measure(Path(folder), arguments.lines, arguments.max_rows)
    report = header() | found
    for name, value in report.items():
        print(f"{name:20} {value}")
    write_json(arguments.json, report)


if __name__ == "__main__":
    main()
