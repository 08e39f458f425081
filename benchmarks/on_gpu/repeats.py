"""Decode steps of the 7B hybrid's layers, again and again from the same state: the same bits each time?

    python -m benchmarks.on_gpu.repeats --out FILE [--repeats 100] [--smoke]

One period of layers, rows that fold among them, 64 rows and 1, bfloat16 before float32. For each dtype one process runs
with XLA's command buffers and another without; the file is written after each. What each repeat leaves is hashed on the
device: tokens, arena and rings.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # when run as a file
from benchmarks.common import ROOT, header, write_json
from benchmarks.gpu.model import make_weights
from hybrid_jax.config import EngineConfig
from hybrid_jax.config.sampling_params import SamplingParams
from hybrid_jax.engine.engine import Engine
from hybrid_jax.schedule.plan import DecodeRow
from hybrid_jax.schedule.request import Request
from hybrid_jax.schedule.sequence import Sequence
from tests.aot.models import hybrid_7b
from tests.tiny_models import tiny_model

RUNS = {"command buffers": "", "none": "--xla_gpu_enable_command_buffer="}  # flags of XLA
ANSWER = "repeats: "  # what a process prints in front of a case's digests


def checksum(array, skip: int = 0):
    """uint32[2] of an array's bits and where they are, those of the first `skip` rows left out."""
    kind = {2: jnp.uint16, 4: jnp.uint32}[array.dtype.itemsize]
    words = jax.lax.bitcast_convert_type(array, kind).astype(jnp.uint32)
    words = jnp.where(jax.lax.broadcasted_iota(jnp.int32, words.shape, 0) < skip, 0, words)
    place = jnp.zeros(words.shape, jnp.uint32)
    for axis, size in enumerate(words.shape):
        place = place * size + jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
    mixed = (words ^ (words >> 15)) * jnp.uint32(0x2C1B3C6D)
    sums = [jnp.sum(x * (2 * place + 1), dtype=jnp.uint32) for x in (words, mixed ^ (mixed >> 12))]
    return jnp.stack(sums)


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
    engine = Engine(config, params, EngineConfig(dtype=dtype, kernels="pallas", **settings))
    runner = engine.runner
    lines = rows_of(engine, rows)
    runner._write_slots(engine.scheduler.memory.slots.take_new())
    first = runner.state
    slots, tokens = np.asarray(first.slots), np.arange(1, rows + 2, dtype=np.int32)
    lengths = np.array([line.position for line in lines] + [0], np.int32)

    def ring(key, like):
        if like.dtype == jnp.float32:
            return jnp.abs(jax.random.normal(key, like.shape)) * 0.1
        kind = {2: jnp.bfloat16, 4: jnp.float32}[like.dtype.itemsize]
        return jax.lax.bitcast_convert_type(jax.random.normal(key, like.shape, kind), like.dtype)

    @jax.jit
    def begin():
        arrays, form = jax.tree.flatten(first.rings)
        keys = jax.random.split(jax.random.key(0), len(arrays))
        rings = jax.tree.unflatten(form, map(ring, keys, arrays))
        return {"rings": rings, "arena": jnp.zeros(first.arena.shape, first.arena.dtype)}

    @jax.jit
    def sums(state):
        # Frame 0 takes what padding writes, in any order.
        return [checksum(state.arena, 1), *map(checksum, jax.tree.leaves(state.rings))]

    decode = next(kind for kind in runner.kinds if kind.name == "decode")
    shape = decode.bucket(lines, None)
    found = []
    for _ in range(repeats):
        runner.state = first.replace(
            **begin(),
            slots=jnp.asarray(slots),
            tokens=jnp.asarray(tokens),
            lengths=jnp.asarray(lengths),
        )
        sampled = runner._run(decode, shape, decode.variant(lines), lines, np.int32(4)).sampled
        digest = hashlib.blake2b(np.asarray(sampled.tokens).tobytes(), digest_size=8)
        for part in sums(runner.state):
            digest.update(np.asarray(part).tobytes())
        found.append(digest.hexdigest())
    engine.close()
    return found


def rows_of(engine, rows: int) -> list:
    """Rows of a decode step, every third of which folds."""
    geometry, memory = engine.geometry, engine.scheduler.memory
    lines = []
    for row in range(rows):
        request = Request(
            request_id=str(row),
            prompt=[1] * 8,
            params=SamplingParams(temperature=1.0, top_p=0.9),
            seed=row,
            max_tokens=16,
        )
        slot = memory.slots.resolve(memory.holds.allocate_slot())
        lines.append(
            DecodeRow(
                sequence=Sequence(request=request, arrival=row, limit=24),
                row=row,
                position=geometry.grain if row % 3 == 0 else 5 + row % 9,
                checkpoint=0,
                read_slot=0,
                fold_slot=slot,
                num_tokens=4,
                num_steps=4,
                pages=memory._take(geometry.num_pages(48))[0],
            )
        )
    return lines


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
