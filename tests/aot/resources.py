"""What the kernels of steps take of each chip: registers, spills and shared memory, as compilers say. A table keeps it.

python -m tests.aot.resources      # compiles all steps for all chips and writes the table again
"""

from __future__ import annotations

import csv
import functools
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hybrid_jax.config import ModelConfig
from hybrid_jax.engine.programs.loops import GPU_OPTIONS, LOOP_OPTIONS
from hybrid_jax.models.known import load_known
from tests.aot import sass
from tests.aot.chip import H200, OTHER_CHIPS, Compiled, chip_of, compile_for_gpu
from tests.aot.models import decode_step, hybrid_7b, mixture, prefill_step

TABLE = Path(__file__).with_suffix(".csv")
COLUMNS = ("step", "chip", "kernel", "registers", "spilled_bytes", "shared_bytes")
OF_XLA = re.compile(r"fusion|^wrapped_|^sort_")  # names that XLA gives to kernels of its own
FRAMES = 4096
ADA = (8, 9)


@dataclass(frozen=True)
class Step:
    """A step and the first compute capability that has it."""

    make: Callable[..., Any]
    config: Callable[[], ModelConfig]
    sizes: dict[str, Any]
    since: tuple[int, int] = (8, 0)


def gated_delta() -> ModelConfig:
    """Two gated delta nets and an attention layer of Qwen3.5-9B, with heads of 256 channels."""
    config = load_known("qwen3_5_9b")
    return replace(config, layers=config.layers[1:4])


ONE, LONG = {"rows": 1, "chunk": 2048}, {"rows": 1, "chunk": 8192}
STEPS = {
    "decode": Step(decode_step, lambda: hybrid_7b(1), {"rows": 64}),
    "prefill": Step(prefill_step, lambda: hybrid_7b(1), ONE),
    "experts, decode": Step(decode_step, lambda: mixture("M*"), {"rows": 64}),
    "experts, prefill": Step(prefill_step, lambda: mixture("M"), LONG),
    "gated delta, decode": Step(decode_step, gated_delta, {"rows": 64}),
    "gated delta, prefill": Step(prefill_step, gated_delta, ONE),
    "FP8 pages, decode": Step(
        decode_step, lambda: hybrid_7b(1), {"rows": 64, "kv_cache_dtype": "fp8"}, ADA
    ),
    "FP8 pages, prefill": Step(
        prefill_step, lambda: hybrid_7b(1), {**ONE, "kv_cache_dtype": "fp8"}, ADA
    ),
}
CASES = [
    (name, chip)
    for name, step in STEPS.items()
    for chip in (H200, *OTHER_CHIPS)
    if chip_of(chip).capability >= step.since
]


@functools.lru_cache(maxsize=1)
def compiled(name: str, chip: str) -> Compiled:
    """A step for a chip, with the code of its kernels."""
    step = STEPS[name]
    function, specs = step.make(step.config(), num_frames=FRAMES, chip=chip, **step.sizes)
    options = LOOP_OPTIONS if step.make is decode_step else GPU_OPTIONS
    return compile_for_gpu(
        function, *specs, donate=(1,), chip=chip, spills=True, options=options, keep_ptx=True
    )


Used = tuple[int, int, int]


def used(name: str, chip: str) -> dict[str, Used]:
    """Of each of our kernels of a step: registers and spilled bytes of a thread, and shared bytes of a program.

    A kernel that stands in the step in several forms has the largest numbers of all.
    """
    found: dict[str, Used] = {}
    step = compiled(name, chip)
    for launch in step.launches:
        if launch.name in step.ptx and not OF_XLA.search(launch.name):
            code = sass.assembled(step.ptx[launch.name], chip=chip)
            kernel = re.sub(r"(__?\d+)$", "", launch.name)
            of_launch = (code.registers, code.spilled_bytes, launch.shared_bytes)
            found[kernel] = tuple(map(max, found.get(kernel, of_launch), of_launch))
    return found


def recorded() -> dict[tuple[str, str], dict[str, Used]]:
    """The table: what `used` found for each step and chip."""
    table: dict[tuple[str, str], dict[str, Used]] = {}
    with TABLE.open(newline="") as file:
        for step, chip, kernel, *numbers in list(csv.reader(file))[1:]:
            table.setdefault((step, chip), {})[kernel] = tuple(map(int, numbers))
    return table


def main() -> None:
    lines = []
    for name, chip in CASES:
        lines += [(name, chip, kernel, *row) for kernel, row in sorted(used(name, chip).items())]
        print(f"{name}, {chip}: {len(lines)} lines", file=sys.stderr, flush=True)
    with TABLE.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([COLUMNS, *lines])


if __name__ == "__main__":
    main()
