"""Decode steps of the 7B hybrid's layers, again and again from the same state: the same bits each time?

    python -m benchmarks.on_gpu.repeats --out FILE [--repeats 100] [--smoke]

One period of layers, rows that fold among them, 64 rows and 1, bfloat16 before float32. For each dtype one process runs
as an engine chooses, with the loop over steps in XLA's command buffers if it can be there. Another has no command
buffers, and the host starts each step. The file is written after each. What each repeat leaves is hashed on the device:
tokens, arena and rings.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # when run as a file
from benchmarks.common import ROOT, header, write_json
from benchmarks.gpu.model import make_weights
from benchmarks.on_gpu.steps import Steps, decode_row
from hybrid_jax.config import EngineConfig
from hybrid_jax.engine.engine import Engine
from hybrid_jax.schedule.plan import DecodeRow
from tests.aot.models import hybrid_7b
from tests.tiny_models import tiny_model

NUM_STEPS = 4
RUNS = {"command buffers": "", "none": "--xla_gpu_enable_command_buffer="}  # flags of XLA
ANSWER = "repeats: "  # what a process prints in front of a case's digests


@functools.cache
def weights(dtype: str) -> dict:
    """Of one period of the 7B hybrid, drawn on the device: numpy takes half a minute."""
    return make_weights(hybrid_7b(1), dtype)


def digests(rows: int, dtype: str, repeats: int, smoke: bool) -> list[str]:
    """A digest of what each repeat leaves."""
    settings = {"max_rows": rows, "max_model_len": 512, "prefill_tokens": 512, "memory": 8 << 30}
    if smoke:
        config, params = tiny_model("bamba", dtype)
        settings |= {"max_model_len": 64, "prefill_tokens": 32}
        settings |= {"memory": 1 << 18, "page_tokens": 16}
    else:
        config = hybrid_7b(1)
        params = weights(dtype)
    settings = EngineConfig(dtype=dtype, kernels="pallas", **settings)
    steps = Steps(config, params, settings, folding_row)
    found = [steps.bits(NUM_STEPS) for _ in range(repeats)]
    steps.close()
    return found


def folding_row(engine: Engine, row: int) -> DecodeRow:
    """Every third row folds."""
    position = engine.geometry.grain if row % 3 == 0 else 5 + row % 9
    sampling = {"temperature": 1.0, "top_p": 0.9}
    return decode_row(engine, row, position=position, checkpoint=0, room=48, **sampling)


def run_all(cases: list, repeats: int, smoke: bool, flags: str) -> dict[tuple, dict]:
    """What each case gave, in one process: {"different": number of digests, "first": one}, or an error."""
    known = os.environ.get("XLA_FLAGS", "")
    command = [sys.executable, "-m", "benchmarks.on_gpu.repeats", "--repeats", str(repeats)]
    command += ["--cases", *(f"{rows},{dtype}" for rows, dtype in cases)]
    done = subprocess.run(
        command + ["--smoke"] * smoke,
        cwd=ROOT,
        env=os.environ | {"XLA_FLAGS": f"{known} {flags}".strip()},
        capture_output=True,
        text=True,
    )
    seen = {case: {"error": done.stderr[-2000:]} for case in cases}
    for line in done.stdout.splitlines():
        if line.startswith(ANSWER):
            rows, dtype, bits = json.loads(line.removeprefix(ANSWER))
            seen[rows, dtype] = {"different": len(set(bits)), "first": bits[0]}
    return seen


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--smoke", action="store_true", help="a tiny hybrid, on a CPU too")
    parser.add_argument("--cases", nargs="+", metavar="ROWS,DTYPE", help="these, to stdout")
    asked = parser.parse_args(argv)
    if asked.cases:
        for case in asked.cases:
            rows, dtype = case.split(",")
            bits = digests(int(rows), dtype, asked.repeats, asked.smoke)
            print(ANSWER + json.dumps([int(rows), dtype, bits]), flush=True)
        return 0
    report = {"header": header(), "repeats": asked.repeats, "smoke": asked.smoke, "cases": []}
    cases = [(rows, dtype) for dtype in ("bfloat16", "float32") for rows in (64, 1)]
    if asked.smoke:
        cases = [(2, "bfloat16")]
    runs: dict[str, dict] = {name: {} for name in RUNS}
    dtypes = list(dict.fromkeys(dtype for _, dtype in cases))
    with tempfile.TemporaryDirectory() as folder:
        # What one process finds fastest the next one takes as well: other products would have other bits.
        shared = "" if asked.smoke else f"--xla_gpu_per_fusion_autotune_cache_dir={folder} "
        for dtype, (name, flags) in itertools.product(dtypes, RUNS.items()):
            flags = "" if asked.smoke else shared + flags  # a CPU's XLA has neither
            own = [case for case in cases if case[1] == dtype]
            runs[name] |= run_all(own, asked.repeats, asked.smoke, flags)
            report["cases"] = [judged(case, runs) for case in cases]
            if asked.out:
                write_json(asked.out, report)
    for case in report["cases"]:
        result = "the same bits" if case["fine"] else case["runs"]
        print(f"{case['rows']} rows, {case['dtype']}: {result}", flush=True)
    return int(not all(case["fine"] for case in report["cases"]))


def judged(case: tuple[int, str], runs: dict[str, dict]) -> dict:
    """A case of the report: `fine` if all repeats gave the same bits, in each of `RUNS`."""
    seen = {name: run.get(case, {"error": "not run"}) for name, run in runs.items()}
    same = seen.keys() == RUNS.keys() and len({run.get("first") for run in seen.values()}) == 1
    fine = same and all(result.get("different") == 1 for result in seen.values())
    return {"rows": case[0], "dtype": case[1], "fine": fine, "runs": seen}


if __name__ == "__main__":
    sys.exit(main())
