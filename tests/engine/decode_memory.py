"""What a process that decodes holds in memory, as JSON on its standard output: for a test to read.

In this order: every program is compiled and run; the state is thrown away, and what is still resident is the
baseline; a new state is made and every frame of its arena written; the peak is set back; requests are decoded.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from hybrid_jax.config.sampling_params import SamplingParams
from hybrid_jax.engine.engine import Engine
from hybrid_jax.engine.programs.compile_cache import enable_compile_cache
from hybrid_jax.machine import STATUS, give_back_free_memory, peak_resident_bytes
from hybrid_jax.schedule.request import Request
from tests.tiny_models import VOCAB, tiny_engine

PEAK_SWITCH = Path("/proc/self/clear_refs")  # 5 sets VmHWM back
NAN = np.uint32(0x7FC00000)
ROWS, PROMPT_TOKENS, OUTPUT_TOKENS = 2, 20, 100


def resident_bytes() -> int:
    """The physical memory this process holds now."""
    lines = Path(STATUS).read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmRSS:")).split()[1])


def forget_peak() -> bool:
    """Lets the peak begin anew with what is resident now; False where the system does not."""
    try:
        PEAK_SWITCH.write_text("5")
    except OSError:
        return False
    return True


def fresh_requests() -> Iterator[Request]:
    """One after the other; no two prompts are alike, and no page is filled by one alone."""
    rng = np.random.default_rng(0)
    for number in itertools.count():
        yield Request(
            request_id=str(number),
            prompt=rng.integers(0, VOCAB, PROMPT_TOKENS).tolist(),
            params=SamplingParams(),
            seed=number,
            max_tokens=OUTPUT_TOKENS,
        )


def make_engine(arena_bytes: int) -> Engine:
    """Few programs to compile, one step a dispatch, and so much memory in the arena."""
    beside = (arena_bytes >> 9) + (1 << 20)  # rings, tables, logits
    engine = tiny_engine(
        "with_unknown_kind",  # every kind of layer but Mamba, and two shapes of KV
        max_rows=ROWS,
        prefill_tokens=32,
        steps_per_dispatch=1,
        max_model_len=PROMPT_TOKENS + OUTPUT_TOKENS,
        memory=arena_bytes + beside,
    )
    assert engine.sizes.arena_bytes >= arena_bytes
    return engine


def empty_out(engine: Engine) -> None:
    """Compiles every program, runs it once, and throws the state away."""
    for program in engine.warm_ups():
        program.run()
    engine.runner.state = None
    gc.collect()
    give_back_free_memory()


def fill_arena(engine: Engine) -> None:
    """A new state whose frames are all written, as after a long time: none is a page of zeros yet to be made."""
    runner = engine.runner
    runner.rebuild()
    fill = jax.jit(lambda arena: arena | NAN, donate_argnums=0)
    runner.state = runner.state.replace(arena=fill(runner.state.arena))
    jax.block_until_ready(runner.state)


class Kept:
    """A compiled program that leaves its arguments as they are."""

    compiled = True

    def __init__(self, run):
        self._run = run

    def __call__(self, params, *rest):
        return self._run(params, *jax.tree.map(jnp.copy, rest))


@contextlib.contextmanager
def undonated(engine: Engine) -> Iterator[None]:
    """Programs that decode leave their arguments as they are."""
    executables = engine.runner.programs.made
    donating = {key: run for key, run in executables.items() if key[0] == "decode"}

    executables.update({key: Kept(run) for key, run in donating.items()})
    yield
    executables.update(donating)


def decode(engine: Engine, num_steps: int, undonated_step: int | None) -> dict[str, int]:
    """Keeps all rows busy until `num_steps` steps have decoded.

    Returns:
        steps: calls of the engine that decoded.
        moved: those that left the arena at another address. kept: after which the old one was still there.
    """
    runner, requests = engine.runner, fresh_requests()
    steps = moved = kept = 0
    while steps < num_steps:
        for _ in range(ROWS - len(engine._live)):
            engine.add(next(requests))
        arena, rows = runner.state.arena, engine.stats()["decode_rows"]
        address = arena.unsafe_buffer_pointer()
        with undonated(engine) if steps == undonated_step else contextlib.nullcontext():
            engine.step()
        steps += engine.stats()["decode_rows"] > rows
        moved += runner.state.arena.unsafe_buffer_pointer() != address
        kept += not arena.is_deleted()
    jax.block_until_ready(runner.state)
    return {"steps": steps, "moved": moved, "kept": kept}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arena", type=int, default=1 << 30, help="bytes of it, at least")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--undonated", action="store_true", help="one step keeps what it is given")
    options = parser.parse_args()
    enable_compile_cache("xla-tests")
    engine = make_engine(options.arena)
    empty_out(engine)
    baseline = resident_bytes()
    fill_arena(engine)
    filled, from_now = resident_bytes(), forget_peak()
    done = decode(engine, options.steps, options.steps // 3 if options.undonated else None)
    peak, arena, stats = peak_resident_bytes(), engine.sizes.arena_bytes, engine.stats()
    engine.scheduler.check_invariants()
    report = {
        "arena": arena,
        "baseline": baseline,
        "filled": filled,
        "peak": peak,
        "of_the_loop": from_now,
        "ratio": (peak - baseline) / arena,
        "raw_ratio": peak / arena,
        "folds": stats["folds_in_place"] + stats["folds_to_new"],
        "frames": stats["num_frames"] - stats["free_frames"],
    }
    print(json.dumps(report | done))


if __name__ == "__main__":
    main()
