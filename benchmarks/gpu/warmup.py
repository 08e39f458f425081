"""Seconds that a GPU's serving programs take to compile: every one of the 7B hybrid's, for an H200 that is not there.

Tracing and lowering hold Python's lock, so programs that compile in threads do these one after the other; XLA does
not. Nothing is autotuned here, which a GPU adds. Needs the environment of `make test-aot`:

    JAX_PLATFORMS=cpu PYTHONPATH=.:.venv-other/aot .venv-other/bin/python benchmarks/gpu/warmup.py [--programs N]
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import jax
from jax.experimental import serialize_executable
from jax.sharding import use_abstract_mesh

sys.path.append(str(Path(__file__).resolve().parents[2]))  # when run as a file
from benchmarks.common import header, write_json
from hybrid_jax.config import EngineConfig
from hybrid_jax.engine.programs.loops import GPU_OPTIONS
from hybrid_jax.engine.steps.decode import Decode
from hybrid_jax.engine.steps.prefill import Prefill
from hybrid_jax.geometry import make_geometry
from hybrid_jax.state import Model
from pallas_kernels.triton import for_cuda
from tests.aot.chip import on_chip, sharding
from tests.aot.models import decode_step, hybrid_7b, prefill_step
from tests.kernels.lowered import HOPPER

LENGTH = 131_072  # tokens of the longest sequence
FRAMES = 400_000  # 105 GB
THREADS = 2


def steps(config) -> dict[str, tuple]:
    """Prefill and decode programs by name, each a function and the shapes of its arguments."""
    engine = EngineConfig(
        dtype="bfloat16",
        kernels="pallas",
        max_rows=256,
        prefill_tokens=8192,
        steps_per_dispatch=4,
        shapes="coarse",
        max_model_len=LENGTH,
    )
    geometry = make_geometry(config, engine)
    model, pages = Model(config, geometry), geometry.num_pages(LENGTH)
    given = {"num_frames": FRAMES, "tokens": LENGTH}
    found = {}
    for shape in Prefill(engine, model, pages).buckets():
        name = f"prefill {shape.rows} x {shape.tokens}"
        found[name] = prefill_step(config, rows=shape.rows, chunk=shape.tokens, **given)
    for shape in Decode(engine, model, pages).buckets():
        found[f"decode {shape.rows}"] = decode_step(config, rows=shape.rows, **given)
    return found


def build(step: tuple) -> tuple[dict, jax.stages.Compiled]:
    """Seconds by the clock of each part, and the program."""
    function, specs = step
    specs = on_chip(specs)
    marks = [time.perf_counter()]
    with for_cuda(), use_abstract_mesh(HOPPER):
        traced = jax.jit(function, donate_argnums=(1,)).trace(*specs)
        marks.append(time.perf_counter())
        lowered = traced.lower(lowering_platforms=("cuda",))
    marks.append(time.perf_counter())
    compiled = lowered.compile(compiler_options=GPU_OPTIONS)
    marks.append(time.perf_counter())
    parts = [end - start for start, end in zip(marks, marks[1:], strict=False)]
    return dict(zip(("trace_s", "lower_s", "xla_s"), parts, strict=True)), compiled


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--programs", type=int, help="only the first few")
    parser.add_argument("--periods", type=int, default=4, help="of 14 blocks; the model has 4")
    parser.add_argument("--out", type=Path, help="a JSON file")
    args = parser.parse_args()
    try:
        sharding()
    except Exception as missing:  # jax says it in several ways
        parser.error(
            f"jax cannot compile for an H200 here ({str(missing).splitlines()[0]}); make test-aot makes the environment"
        )
    jax.config.update("jax_enable_compilation_cache", False)
    programs = dict(list(steps(hybrid_7b(args.periods)).items())[: args.programs])

    found = {}
    for name, step in programs.items():
        seconds, compiled = build(step)
        size = len(serialize_executable.serialize(compiled)[0])
        found[name] = {**seconds, "stored_bytes": size}
        parts = ", ".join(f"{key[:-2]} {value:.1f} s" for key, value in seconds.items())
        print(f"{name}: {parts}, {size / 1e6:.1f} MB on disk", flush=True)
    alone = sum(
        value for parts in found.values() for key, value in parts.items() if key.endswith("_s")
    )

    jax.clear_caches()
    start = time.perf_counter()
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(build, programs.values()))
    together = time.perf_counter() - start
    print(
        f"{len(programs)} programs: {alone:.0f} s one after the other, {together:.0f} s in {THREADS} threads"
    )
    times = {"alone_s": alone, "threads": THREADS, "together_s": together}
    write_json(args.out, {**header(), "programs": found, **times})


if __name__ == "__main__":
    main()
