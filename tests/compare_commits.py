"""Does a change keep every result? Runs another commit and this tree on the same inputs, and says what differs.

    python tests/compare_commits.py against COMMIT [--only models simulate pools aot] [--aot PYTHON]
    python tests/compare_commits.py record FILE.json    # of the tree that PYTHONPATH names
    python tests/compare_commits.py compare OLD.json NEW.json

Tokens, counters and results of the simulators must be equal; launches, temporary memory and traces must not grow.
Log-probabilities should have the same bits; where they do not, the largest difference is shown. It uses what a caller
can reach, and of the tests `tiny_models` and `aot`, so that it runs on commits with another layout. PYTHON has the
packages of `make test-aot`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("models", "simulate", "pools", "aot")
NO_LARGER = ("num_traces", "launches", "temp_bytes")
CLOCKS = ("seconds", "cpu_seconds")
# Of `stats()`: depends on the clock or on the process.
LEFT_OUT = ("peak_memory_bytes", "memory_bytes", "compile_s")
# Of it, what older commits counted for a status of memory.
LEFT_OUT += ("memory_operations", "memory_transitions", "rebalanced_frames")
LEFT_OUT += ("memory_low_watermark", "memory_high_watermark")
ENGINE = {"max_rows": 3, "prefill_tokens": 32, "steps_per_dispatch": 3, "page_tokens": 16}
TRACES = ("lmsys_s1_sps0.5", "swebench_s1_sps5_art10")
POLICIES = ("vllm", "sglang", "marconi", "adaptive")
ALLOCATORS = {
    "paper": ("padded_unified", "fixed_dual_mr05", "avmp_static_mr05", "avmp_dynamic_b128"),
    "honest": ("frames", "frames:64", "frames_rings", "vllm_big_block", "two_ended", "ideal"),
}


# --- recording ------------------------------------------------------------------------------------


def models() -> Iterator[tuple[str, dict]]:
    """Every tiny model in both dtypes, through chunks, hits, evictions, forks and log-probabilities; exact mode too."""
    from tests.tiny_models import MODELS

    for name in MODELS:
        for dtype in ("float32", "bfloat16"):
            for exact in (False, True):
                yield f"{name} {dtype}{' exact' if exact else ''}", one_model(name, dtype, exact)


def one_model(name: str, dtype: str, exact: bool) -> dict:
    """Tokens, log-probabilities and counters of a few calls, one after the other."""
    import numpy as np

    from hybrid_jax import LLM, SamplingParams
    from tests.tiny_models import tiny_model

    config, params = tiny_model(name, dtype)
    draw = np.random.default_rng(7)

    def prompt(length: int) -> list[int]:
        return [int(token) for token in draw.integers(3, config.vocab_size, length)]

    shared = prompt(75)
    first = [shared + prompt(n) for n in (5, 30, 41)] + [prompt(n) for n in (1, 33, 64)]
    greedy = {"max_tokens": 40, "temperature": 0.0, "ignore_eos": True}
    drawn = {"max_tokens": 30, "temperature": 0.9, "top_p": 0.9, "top_k": 20, "seed": 5}
    calls = {
        "greedy": (first, greedy | {"logprobs": 20}),
        "again": (first[::-1], greedy | {"logprobs": 20}),
        "plain": (first[:3], greedy),
        "siblings": (first[:2], drawn | {"n": 3}),
        "penalties": (first[1:4], drawn | {"repetition_penalty": 1.3, "presence_penalty": 0.4}),
        "strangers": ([prompt(90) for _ in range(6)], drawn | {"logprobs": 5}),
        "prompt": (first[:1], greedy | {"max_tokens": 3, "prompt_logprobs": 3}),
    }
    found: dict[str, Any] = {}
    with LLM.from_params(
        config, params, dtype=dtype, quiet=True, max_model_len=192, exact=exact, **ENGINE
    ) as llm:
        for call, (prompts, asked) in calls.items():
            asked_ids = [{"prompt_token_ids": ids} for ids in prompts]
            outputs = llm.generate(asked_ids, SamplingParams(**asked), progress=False)
            found[call] = {
                "tokens": [[list(o.token_ids) for o in out.outputs] for out in outputs],
                "cached": [out.num_cached_tokens for out in outputs],
                "bits": [_bits(out) for out in outputs],
            }
        stats = llm.stats()
    found["stats"] = {
        k: v for k, v in stats.items() if k not in LEFT_OUT and type(v) in (int, float)
    }
    return found


def _bits(output: Any) -> list[str]:
    """All log-probabilities of an output, as the exact text of a float."""
    entries = [
        *(output.prompt_logprobs or []),
        *(e for o in output.outputs for e in o.logprobs or []),
    ]
    return [
        float(lp.logprob).hex() for entry in entries if entry for _, lp in sorted(entry.items())
    ]


def simulate() -> Iterator[tuple[str, dict]]:
    """Hit rates and counters of the prefix cache on traces."""
    for trace in TRACES:
        for policy in POLICIES:
            for clock in ("order", "arrivals"):
                path = ROOT / f"benchmarks/traces/{trace}.seg.jsonl.gz"
                command = ["simulate", "--trace", str(path), "--policy", policy, "--clock", clock]
                command += ["--limit", "300", "--capacity", "20GB", "--no-bounds"]
                if clock == "arrivals" and policy not in ("marconi", "adaptive"):
                    continue  # the engine's own policies
                yield f"{trace} {policy} {clock}", _command(command)


def pools() -> Iterator[tuple[str, dict]]:
    """What each allocator makes of a workload."""
    for mode, names in ALLOCATORS.items():
        for name in names:
            yield f"{mode} {name}", _command(["pool-sim", "--allocator", name, "--mode", mode])


def _command(words: list[str]) -> dict:
    """The JSON of a command, without what the clock says."""
    done = subprocess.run(
        [sys.executable, "-m", "hybrid_jax", *words, "--json"], capture_output=True, text=True
    )
    if done.returncode:
        return {"error": done.stderr.strip()}
    return _timeless(json.loads(done.stdout))


def _timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _timeless(v) for k, v in value.items() if "wall" not in k and k != "trace"}
    return [_timeless(v) for v in value] if isinstance(value, list) else value


def aot() -> Iterator[tuple[str, dict]]:
    """Launches and temporary memory of the 7B hybrid's steps, compiled for an H200."""
    try:
        from tests.aot.chip import compile_for_gpu
    except ImportError:  # of older commits
        from tests.aot.h200 import compile_for_h200 as compile_for_gpu  # type: ignore[no-redef]
    from tests.aot.models import decode_step, hybrid_7b, prefill_step

    config = hybrid_7b(2)
    steps = {f"decode {n}": decode_step(config, rows=n, num_frames=400_000) for n in (1, 64)}
    for rows, chunk in ((1, 8192), (2, 2048)):
        step = prefill_step(config, rows=rows, chunk=chunk, num_frames=400_000)
        steps[f"prefill {rows} x {chunk}"] = step
    for name, (step, specs) in steps.items():
        compiled = compile_for_gpu(step, *specs, donate=(1,))
        yield name, {"launches": len(compiled.launches), "temp_bytes": compiled.temp_bytes}


def record(path: Path, parts: list[str]) -> None:
    """Runs the parts and writes what came out."""
    made = {"models": models, "simulate": simulate, "pools": pools, "aot": aot}
    found: dict[str, dict] = json.loads(path.read_text()) if path.exists() else {}
    for part in parts:
        found[part] = {}
        for name, result in made[part]():
            found[part][name] = result
            print(f"{part}: {name}", file=sys.stderr, flush=True)
            path.write_text(json.dumps(found))


# --- comparing ------------------------------------------------------------------------------------


def compare(old: dict, new: dict) -> list[str]:
    """A line for each thing that differs and must not."""
    wrong: list[str] = []
    bits: list[str] = []

    def visit(where: str, a: Any, b: Any) -> None:
        name = where.rpartition("/")[2]
        if name == "bits":
            off = _largest_difference(a, b)
            if off is None:
                wrong.append(f"{where}: another number of log-probabilities")
            elif off > 0:
                bits.append(f"{where}: off by up to {off:.2g}")
        elif name in CLOCKS:
            pass
        elif name in NO_LARGER:
            if b > a:
                wrong.append(f"{where}: {a} -> {b}")
        elif isinstance(a, dict) and isinstance(b, dict):
            for key in sorted(a.keys() | b.keys()):
                if key in a and key in b:
                    visit(f"{where}/{key}", a[key], b[key])
                else:
                    wrong.append(f"{where}/{key}: only {'before' if key in a else 'now'}")
        elif a != b:
            wrong.append(f"{where}: {str(a)[:200]} -> {str(b)[:200]}")

    visit("", old, new)
    return wrong + [f"(bits) {line}" for line in bits]


def _largest_difference(a: list, b: list) -> float | None:
    if [len(x) for x in a] != [len(x) for x in b]:
        return None
    pairs = (
        (float.fromhex(x), float.fromhex(y))
        for u, v in zip(a, b, strict=True)
        for x, y in zip(u, v, strict=True)
    )
    return max((abs(x - y) for x, y in pairs if x != y), default=0.0)


def against(commit: str, parts: list[str], aot_python: str | None, keep: Path) -> int:
    """Records the commit in a work tree of its own, then this tree, and compares."""
    keep.mkdir(parents=True, exist_ok=True)
    files = {"old": keep / f"{commit}.json", "new": keep / "now.json"}
    files["new"].unlink(missing_ok=True)
    with work_tree(commit) as folder:
        for side, tree in (("old", folder), ("new", ROOT)):
            for part in parts:
                known = json.loads(files[side].read_text()) if files[side].exists() else {}
                if part in known:
                    continue
                python = aot_python if part == "aot" and aot_python else sys.executable
                command = [python, __file__, "record", str(files[side]), "--only", part]
                cache = os.environ.get("JAX_COMPILATION_CACHE_DIR", str(keep / "xla"))
                env = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": cache}
                env["PYTHONPATH"] = f"{tree}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
                subprocess.run(command, cwd=tree, env=env, check=True)
    old, new = (json.loads(files[side].read_text()) for side in ("old", "new"))
    return show(compare(*({part: x[part] for part in parts} for x in (old, new))))


@contextlib.contextmanager
def work_tree(commit: str) -> Iterator[Path]:
    """The files of a commit in a folder of their own."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["git", "-C", str(ROOT), "archive", commit]
        files = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
        subprocess.run(["tar", "-x", "-C", folder], check=True, input=files)
        yield Path(folder)


def show(lines: list[str]) -> int:
    """Prints what differs; 1 if anything but bits does."""
    print("\n".join(lines) or "no difference")
    return int(any(not line.startswith("(bits)") for line in lines))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("file", type=Path)
    comparing = commands.add_parser("compare")
    comparing.add_argument("old", type=Path)
    comparing.add_argument("new", type=Path)
    both = commands.add_parser("against")
    both.add_argument("commit")
    both.add_argument("--aot", metavar="PYTHON", help="compiles for an H200; else aot is left out")
    both.add_argument("--keep", type=Path, default=ROOT / "build/compare", help="folder of results")
    for command in (recording, both):
        command.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    asked = parser.parse_args()
    if asked.command == "record":
        record(asked.file, asked.only)
        return 0
    if asked.command == "compare":
        return show(compare(*(json.loads(path.read_text()) for path in (asked.old, asked.new))))
    parts = [part for part in asked.only if part != "aot" or asked.aot]
    return against(asked.commit, parts, asked.aot, asked.keep)


if __name__ == "__main__":
    sys.exit(main())
