"""Compilation in `gpu_7b.py`: seconds per program of a warm-up, from nothing and from JAX's cache."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator

import jax
from common import quantiles
from gpu_7b_model import with_memory
from gpu_7b_sections import Bench
from jax.experimental.compilation_cache import compilation_cache

from hybrid_jax.config import EngineConfig
from hybrid_jax.engine.engine import Engine


class OutOfTime(Exception):
    """The budget ended inside a warm-up."""


def compile_times(bench: Bench, kernel: str, over: Callable[[], bool]) -> dict:
    """Warm-up of a small engine with an empty compilation cache, and of a second one that finds it filled."""
    scale = bench.scale
    settings = EngineConfig(
        dtype=bench.dtype,
        kernels=kernel,
        max_rows=scale.warm_rows,
        prefill_tokens=scale.warm_chunk,
        max_model_len=scale.warm_length,
    )
    settings = with_memory(
        bench.config, settings, tokens=scale.warm_length, sequences=1, checkpoints=scale.warm_rows
    )
    found = {}
    with _empty_cache():
        for name in ("cold", "cached"):
            engine = bench.engine(settings)
            shape = {"rows": scale.warm_rows, "chunk": scale.warm_chunk}
            found[name] = shape | _warmup(engine, over)
            engine.close()
            jax.clear_caches()
    return found


def _warmup(engine: Engine, over: Callable[[], bool]) -> dict:
    """Seconds of each program's compilation and first run, in all and by kind; what was done when time ran out."""
    marks: list[tuple[str, float]] = []

    def progress(done: int, total: int, name: str) -> None:
        marks.append((name, time.perf_counter()))
        if over() and done < total:
            raise OutOfTime

    complete = True
    try:
        engine.warmup(progress)
    except OutOfTime:
        complete = False
    pairs = zip(marks, marks[1:], strict=False)
    programs = {name: end - start for (name, start), (_, end) in pairs}
    kinds: dict[str, list[float]] = {}
    for name, seconds in programs.items():
        kinds.setdefault(name.replace("Bucket(", " ").split()[0].lower(), []).append(seconds)
    return {
        "complete": complete,
        "warmup_s": marks[-1][1] - marks[0][1],
        "kinds": {kind: {"programs": len(s), **quantiles(s)} for kind, s in kinds.items()},
        "programs": programs,
    }


@contextlib.contextmanager
def _empty_cache() -> Iterator[None]:
    """JAX's compilation cache in an empty folder of its own, everything kept, for as long as this lasts."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for name, value in zip(names, (folder, 0.0), strict=True):
                jax.config.update(name, value)
            compilation_cache.reset_cache()
            jax.clear_caches()
            yield
        finally:
            for name, value in before.items():
                jax.config.update(name, value)
            compilation_cache.reset_cache()
