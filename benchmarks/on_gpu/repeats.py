"""Decode steps of the 7B hybrid's layers, again and again from the same state: the same bits each time?

    python -m benchmarks.on_gpu.repeats --out FILE [--repeats 100] [--smoke]

One period of layers, rows that fold among them, 1 row and 64, bfloat16 and float32. Each run is a process of its own,
with XLA's command buffers and without them. What a row and its repeats gave is hashed: tokens, arena and rings.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # when run as a file
from benchmarks.common import ROOT, header, write_json

NO_COMMAND_BUFFERS = "--xla_gpu_enable_command_buffer="


def digests(rows: int, dtype: str, repeats: int, smoke: bool) -> list[str]:
    """A digest of what each repeat leaves."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from hybrid_jax.config import EngineConfig
    from hybrid_jax.engine.engine import Engine
    from hybrid_jax.engine.plan import DecodeRow
    from hybrid_jax.engine.request import Request
    from hybrid_jax.models.initialize import random_params
    from hybrid_jax.sampling_params import SamplingParams
    from tests.aot.models import hybrid_7b
    from tests.tiny_models import tiny_model

    settings = {"max_rows": rows, "max_model_len": 512, "prefill_tokens": 512, "kernels": "pallas"}
    if smoke:
        config, params = tiny_model("bamba", dtype)
        settings |= {
            "max_model_len": 64,
            "prefill_tokens": 32,
            "memory": 1 << 18,
            "page_tokens": 16,
        }
    else:
        config = hybrid_7b(1)
        params = random_params(config, 0, dtype)
    engine = Engine(config, params, EngineConfig(dtype=dtype, **settings))
    runner, scheduler = engine.runner, engine.scheduler
    geometry, memory = engine.geometry, scheduler.memory
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
        pages = memory._take(geometry.num_pages(48))[0]
        fills = geometry.grain if row % 3 == 0 else 5 + row % 9
        lines.append(
            DecodeRow(
                request=request,
                row=row,
                position=fills,
                checkpoint_position=0,
                read_slot=0,
                fold_slot=slot,
                num_steps=4,
                pages=pages,
            )
        )
    runner._write_slots(memory.slots.take_new())
    rng = np.random.default_rng(0)
    drawn = {
        name: rng.standard_normal(getattr(runner.state, name).shape).astype(np.float32)
        for name in ("conv", "xB", "dt")
    }
    start = runner.state

    def bits(name: str) -> jax.Array:
        array = getattr(start, name)
        if array.dtype == jnp.float32:
            return jnp.abs(jnp.asarray(drawn[name])) * 0.1
        kind = {2: jnp.bfloat16, 4: jnp.float32}[array.dtype.itemsize]
        return jax.lax.bitcast_convert_type(jnp.asarray(drawn[name], kind), array.dtype)

    slots = np.asarray(start.slots)
    tokens = np.arange(1, rows + 2, dtype=np.int32)
    shape, kind = start.arena.shape, start.arena.dtype
    found = []
    for _ in range(repeats):
        runner.state = start.replace(
            arena=jnp.zeros(shape, kind),
            conv=bits("conv"),
            xB=bits("xB"),
            dt=bits("dt"),
            slots=jnp.asarray(slots),
            tokens=jnp.asarray(tokens),
        )
        sampled = runner._decode(lines, 4)
        digest = hashlib.blake2b(np.asarray(sampled.tokens).tobytes(), digest_size=8)
        for name in ("conv", "xB", "dt"):
            digest.update(np.asarray(getattr(runner.state, name)).tobytes())
        sums = jnp.sum(
            runner.state.arena[1:], axis=1, dtype=jnp.uint32
        )  # of each frame but the sink
        digest.update(np.asarray(sums).tobytes())
        found.append(digest.hexdigest())
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--smoke", action="store_true", help="a tiny hybrid, on a CPU too")
    parser.add_argument("--one", nargs=2, metavar=("ROWS", "DTYPE"), help="one case, to stdout")
    asked = parser.parse_args(argv)
    if asked.one:
        rows, dtype = asked.one
        print(json.dumps(digests(int(rows), dtype, asked.repeats, asked.smoke)))
        return 0
    report = {"header": header(), "repeats": asked.repeats, "smoke": asked.smoke, "cases": []}
    cases = [(rows, dtype) for rows in (1, 64) for dtype in ("bfloat16", "float32")]
    for rows, dtype in [(2, "bfloat16")] if asked.smoke else cases:
        seen = {}
        for name, flags in (("command buffers", ""), ("none", NO_COMMAND_BUFFERS)):
            if asked.smoke:
                flags = ""  # a CPU's XLA has none
            known = os.environ.get("XLA_FLAGS", "")
            command = [sys.executable, "-m", "benchmarks.on_gpu.repeats", "--one", str(rows), dtype]
            command += ["--repeats", str(asked.repeats), *(["--smoke"] if asked.smoke else [])]
            done = subprocess.run(
                command,
                cwd=ROOT,
                env=os.environ | {"XLA_FLAGS": f"{known} {flags}".strip()},
                capture_output=True,
                text=True,
            )
            if done.returncode:
                seen[name] = {"error": done.stderr[-2000:]}
            else:
                bits = json.loads(done.stdout.splitlines()[-1])
                seen[name] = {"different": len(set(bits)), "first": bits[0]}
        same = len({result.get("first") for result in seen.values()}) == 1
        fine = same and all(result.get("different") == 1 for result in seen.values())
        case = {"rows": rows, "dtype": dtype, "fine": fine, "runs": seen}
        report["cases"].append(case)
        print(f"{rows} rows, {dtype}: {'the same bits' if fine else seen}", flush=True)
        if asked.out:
            write_json(asked.out, report)
    return int(not all(case["fine"] for case in report["cases"]))


if __name__ == "__main__":
    sys.exit(main())
