"""Warm-up in `hybrid_7b.py` with the settings that users of this device get: from nothing, and from stored programs."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from benchmarks.common import quantiles, request
from benchmarks.gpu.sections import Bench
from hybrid_jax.engine.engine import Engine
from hybrid_jax.engine.programs.compile_cache import NEVER_SECONDS
from hybrid_jax.engine.programs.store import ProgramStore
from hybrid_jax.engine.this_device import held_bytes, this_device
from hybrid_jax.sizing.defaults import choose_settings

PROMPT, OUTPUT, REQUESTS = 96, 32, 4  # tokens of the requests whose tokens are compared


def compile_times(bench: Bench, kernel: str, over: Callable[[], bool]) -> dict:
    """Warm-up of an engine that finds no program stored, and of a second one that finds those of the first. Both then
    serve the same requests."""
    held = held_bytes(bench.params)
    settings = choose_settings(
        bench.config,
        this_device(held=held),
        {"kernels": kernel, **bench.scale.warm},
        dtype=bench.dtype,
        held=held,
    )
    shape = {"rows": settings.max_rows, "chunk": settings.prefill_tokens, "shapes": settings.shapes}
    prompts = [bench.prompt(PROMPT) for _ in range(REQUESTS)]
    found, tokens = {}, {}
    with _empty_folder() as folder:
        for name in ("cold", "cached"):
            start = time.perf_counter()
            store = ProgramStore(folder / "programs", jax.devices()[0])
            engine = Engine(bench.config, bench.params, settings, store)
            found[name] = shape | {"start_s": time.perf_counter() - start} | _warmup(engine, over)
            files = (folder / "programs").glob("*")
            found[name]["stored_bytes"] = sum(file.stat().st_size for file in files)
            if found[name]["complete"]:
                tokens[name] = _serve(engine, prompts)
            engine.close()
            jax.clear_caches()
    if len(tokens) == 2:
        found["cached"]["same_tokens"] = tokens["cold"] == tokens["cached"]
    return found


def _serve(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    requests = [request(str(i), prompt, OUTPUT) for i, prompt in enumerate(prompts)]
    for one in requests:
        engine.add(one)
    while engine.has_work:
        engine.step()
    return [one.output.token_ids for one in requests]


def _warmup(engine: Engine, over: Callable[[], bool]) -> dict:
    """Seconds of each program's compilation and first run, in all and by kind; what was done when time ran out."""
    marks: list[tuple[str, float]] = []

    complete = True
    for program in engine.warm_ups():
        marks.append((program.name, time.perf_counter()))
        if over():
            complete = False
            break
        program.run()
    else:
        marks.append(("done", time.perf_counter()))
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
def _empty_folder() -> Iterator[Path]:
    """An empty folder where jax keeps what was tuned, and no programs, for as long as this lasts."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for name, value in zip(names, (folder, NEVER_SECONDS), strict=True):
                jax.config.update(name, value)
            compilation_cache.reset_cache()
            jax.clear_caches()
            yield Path(folder)
        finally:
            for name, value in before.items():
                jax.config.update(name, value)
            compilation_cache.reset_cache()
