"""What the bundled models answer on the device at hand, and on a CPU: the same tokens in float32?

    JAX_PLATFORMS=cuda python -m benchmarks.on_gpu.answers --out FILE [--few]

Eight requests with a common head, greedy and sampled, three times: after the first time prompts come from the prefix
cache. The CPU answers in processes of its own at the same time. In bfloat16 the device answers alone.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # when run as a file
from benchmarks.common import ROOT, header, write_json
from hybrid_jax import LLM, SamplingParams

MODELS = {"tiny": None, "tiny_gated_delta": "tiny_gated_delta"}
HEAD = (ROOT / "examples" / "demo.py").read_text()[:900]  # bytes are tokens
TAILS = [
    *("def f(x):\n", "import os\n", "class A:\n", "for i in range(3):\n"),
    *("# a note\n", "x = [", "if a", ""),
]
ANSWER = "answers: "  # what a process prints in front of them


def answers(model: str | None, dtype: str) -> dict:
    """Tokens of each time, prompt tokens from the cache the last time, seconds to open it and of each time."""
    start = time.perf_counter()
    llm = LLM(model, dtype=dtype, memory="256MB", max_rows=8, max_model_len=2048, quiet=True)
    opened = time.perf_counter()
    params = [
        SamplingParams(temperature=0.8 * (i % 2), top_p=0.9, seed=i, max_tokens=48, ignore_eos=True)
        for i in range(len(TAILS))
    ]
    prompts = [HEAD + tail for tail in TAILS]
    found, seconds = [], [opened - start]
    for _ in range(3):
        start = time.perf_counter()
        outputs = llm.generate(prompts, params)
        seconds.append(time.perf_counter() - start)
        found.append([list(output.outputs[0].token_ids) for output in outputs])
    cached = sum(output.num_cached_tokens for output in outputs)
    llm.close()
    return {"tokens": found, "cached": cached, "seconds": seconds}


def begin(name: str, dtype: str, on: str) -> subprocess.Popen:
    """A process that answers on "cpu" or "here"."""
    env = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    env |= {"JAX_PLATFORMS": "cpu"} if on == "cpu" else {}
    command = [sys.executable, "-m", "benchmarks.on_gpu.answers", "--one", name, dtype]
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=ROOT, env=env, **piped)


def judged(name: str, dtype: str, ours: dict, other: dict) -> dict:
    """How many answers differ from the first of `other`, each time; or an error."""
    for one in (ours, other):
        if "error" in one:
            return {"model": name, "dtype": dtype, "fine": False, "error": one["error"]}
    first = other["tokens"][0]
    different = [sum(a != b for a, b in zip(run, first, strict=True)) for run in ours["tokens"]]
    # In bfloat16 a hit may turn a near tie over.
    return {
        "model": name,
        "dtype": dtype,
        "fine": dtype == "bfloat16" or not any(different),
        "different": different,
        "cached": ours["cached"],
        "seconds": [round(seconds, 2) for seconds in ours["seconds"]],
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--few", action="store_true", help="one model")
    parser.add_argument("--one", nargs=2, metavar=("MODEL", "DTYPE"), help=argparse.SUPPRESS)
    asked = parser.parse_args(argv)
    if asked.one:
        name, dtype = asked.one
        print(ANSWER + json.dumps(answers(MODELS[name], dtype)), flush=True)
        return 0
    names = list(MODELS)[-1:] if asked.few else list(MODELS)
    places = [("float32", "here"), ("float32", "cpu"), ("bfloat16", "here")]
    started = {(name, *place): begin(name, *place) for name in names for place in places}
    results = {}
    for key, process in started.items():
        out, error = process.communicate()
        lines = [line for line in out.splitlines() if line.startswith(ANSWER)]
        found = json.loads(lines[-1].removeprefix(ANSWER)) if lines else {"error": error[-3000:]}
        results[key] = found
    cases = []
    for name in names:
        float32, cpu, bfloat16 = (results[name, *place] for place in places)
        cases.append(judged(name, "float32", float32, cpu))
        cases.append(judged(name, "bfloat16", bfloat16, bfloat16))
    write_json(asked.out, {"header": header(), "requests": len(TAILS), "cases": cases})
    for case in cases:
        print(json.dumps(case)[-600:], flush=True)
    return int(not all(case["fine"] for case in cases))


if __name__ == "__main__":
    sys.exit(main())
