"""What a dispatch of decode steps takes on a GPU: a step, what is around it, the host's time, and each kernel's.

    python -m benchmarks.on_gpu.anatomy --form graph --out FILE [--repeats 100] [--trace FOLDER] [--smoke]

The 7B hybrid with random bfloat16 weights, 64 rows and 1. No prompt is read: memory is drawn, and no row folds. A
process measures one of `FORMS`, so that a crash costs no other, and adds it to the file. The file is written after each
result:

- seconds of a call of 1, 4 and 31 steps, from idle: until it returns, and until the device is done. 30 steps make the
  difference between 1 and 31; what one step leaves of the first is the dispatch.
- seconds of a call when the host makes one after another and never waits;
- whether repeats leave the same bits;
- launches and microseconds of each kernel, from a profile;
- for the form that an engine prefers, the trial that an engine makes of it.

Beside these stand the rates at which this device copies and reads, measured by the same process.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # when run as a file
from benchmarks.common import (
    copy_rate,
    device_answers,
    header,
    quantiles,
    read_rate,
    write_json,
)
from benchmarks.gpu.floors import decode_work
from benchmarks.gpu.model import free_bytes, make_weights, take_most_memory, with_memory
from benchmarks.on_gpu.steps import Steps, all_tokens, decode_row
from hybrid_jax.config import EngineConfig, ModelConfig
from hybrid_jax.engine.engine import Engine
from hybrid_jax.engine.programs import loops
from hybrid_jax.engine.programs.loops import FLAG, GPU_OPTIONS, LOOP_OPTIONS
from hybrid_jax.machine import cuda_driver
from hybrid_jax.schedule.plan import DecodeRow
from tests.aot.models import PERIODS, hybrid_7b, weights
from tests.tiny_models import tiny_model

DTYPE = "bfloat16"
PROFILED_STEPS = 4  # of a call that is profiled or repeated
ROOM = 64  # tokens that a row may have more than its context
# XLA starts what is in a command buffer one by one while there is a profiler, unless this is set.
PROFILE_AS_IT_IS = {"xla_enable_command_buffers_during_profiling": True}


@dataclass(frozen=True)
class Form:
    """A way to run the steps of a dispatch.

    Attributes:
        name: in tables.
        options: of the compiler, for a program that loops over steps.
        inside: the program has the loop over steps. If not, the host starts each step.
        env: of the process.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=lambda: GPU_OPTIONS)
    inside: bool = True
    env: Mapping[str, str] = field(default_factory=dict)


FORMS = {  # the most important first
    "graph": Form("the loop in the graph", LOOP_OPTIONS | PROFILE_AS_IT_IS),
    "outside": Form("the loop outside the graph"),
    "host": Form("the host starts each step", inside=False),
    "unbuffered": Form("no command buffers", GPU_OPTIONS | {FLAG: ""}),
    "async": Form(
        "the loop outside the graph, asynchronous dispatch",
        env={"PJRT_GPU_ENABLE_ASYNC_DISPATCH": "1"},
    ),
    "independent": Form(
        "the loop in the graph, no dependent launch",
        LOOP_OPTIONS | {"xla_gpu_enable_pdl": False, "xla_gpu_enable_pdl_launch": False},
    ),
}


@dataclass(frozen=True)
class Scale:
    """Sizes of a run.

    Attributes:
        rows: of the engines. context: tokens of each row whose state is in its checkpoint; one more is in its ring.
        calls: steps of the calls that are timed, the fewest first.
        rounds: calls of each that are timed. in_a_row: calls without waiting.
        words: of the array that is copied and read.
        settings: of the engines.
    """

    rows: tuple[int, ...] = (64, 1)
    context: int = 1344
    calls: tuple[int, ...] = (1, 4, 31)
    rounds: int = 9
    in_a_row: int = 12
    words: int = 1 << 30
    settings: Mapping[str, Any] = field(default_factory=lambda: {"kernels": "pallas"})


SMOKE = Scale(
    rows=(2,),
    context=32,
    calls=(1, 2, 4),
    rounds=2,
    in_a_row=2,
    words=1 << 16,
    settings={"kernels": "xla", "page_tokens": 16},  # interpreted kernels compile for a minute
)


class Report:
    """A form's part of a file, which is written after each result.

    Raises:
        SystemExit: the file has results of another device, or is damaged.
    """

    def __init__(self, path: Path, form: str, known: dict) -> None:
        self.path, self.whole = path, {"header": known, "forms": {}}
        if path.exists():
            try:
                self.whole = json.loads(path.read_text())
            except ValueError as error:
                raise SystemExit(f"anatomy: {path} is damaged: {error}; move it away") from error
            if self.whole["header"] != known:
                raise SystemExit(
                    f"anatomy: {path} holds results of {self.whole['header']}, this is {known}; give another --out"
                )
        self.form: dict[str, Any] = {"name": FORMS[form].name, "rows": {}}
        self.whole["forms"][form] = self.form
        self.failed = False

    def put(self, rows: int | None, what: str, result: Any) -> None:
        """Adds a result of the form, or of some rows of it."""
        of = self.form if rows is None else self.form["rows"].setdefault(str(rows), {})
        of[what] = result
        write_json(self.path, self.whole)
        about = what if rows is None else f"{rows} rows, {what}"
        print(f"{self.form['name']}: {about}: {json.dumps(result)[:600]}", flush=True)

    def measure(self, rows: int | None, what: str, call: Callable[[], Any]) -> Any:
        """Adds what a call returns, or its error, and returns it; None for an error.

        Raises:
            SystemExit: nothing can be computed any more in this process.
        """
        self.form["running"] = what if rows is None else f"{rows} rows, {what}"
        write_json(self.path, self.whole)
        result = None
        try:
            result = call()
        except Exception as error:
            self.failed = True
            text = (str(error).strip().splitlines() or [""])[0]
            self.put(rows, what, {"error": f"{type(error).__name__}: {text[:300]}"})
            if not device_answers():
                raise SystemExit(
                    f"anatomy: {self.form['running']} left the device in a state of error; other forms have "
                    "processes of their own"
                ) from error
        del self.form["running"]
        if result is not None:
            self.put(rows, what, result)
        return result


# --- what is measured -----------------------------------------------------------------------------


def rates(scale: Scale) -> dict[str, float]:
    """Bytes a second that the device copies, read plus written, and that it reads."""
    sizes = {"words": scale.words, "rounds": scale.rounds}
    return {"copy": copy_rate(**sizes), "read": read_rate(**sizes)}


def times(steps: Steps, scale: Scale) -> dict[str, dict]:
    """Seconds of calls, by their number of steps.

    Raises:
        RuntimeError: rows stopped on their way.
    """
    found = {}
    for count in scale.calls:
        rows = steps.rows(count)
        first, *others = steps.lengths(1 + scale.rounds)
        steps.rewind(first)
        jax.block_until_ready(steps.run(rows))
        returned, done = [], []
        for lengths in others:
            steps.rewind(lengths)
            jax.block_until_ready(steps.runner.state)
            start = time.perf_counter()
            tokens = steps.run(rows)
            returned.append(time.perf_counter() - start)
            jax.block_until_ready(tokens)
            done.append(time.perf_counter() - start)
        many = steps.lengths(scale.in_a_row)
        jax.block_until_ready(many)
        start = time.perf_counter()
        for lengths in many:
            steps.rewind(lengths)
            tokens = steps.run(rows)
        jax.block_until_ready(tokens)
        found[str(count)] = {
            "returned_s": quantiles(returned),
            "done_s": quantiles(done),
            "in_a_row_s": (time.perf_counter() - start) / len(many),
        }
        all_tokens(tokens, count)
    return found


def bits(steps: Steps, repeats: int) -> dict[str, Any]:
    """How many digests repeats have, and the first of them."""
    found = [steps.bits(PROFILED_STEPS) for _ in range(repeats)]
    return {"repeats": repeats, "different": len(set(found)), "first": found[0]}


def profile(steps: Steps, folder: Path) -> dict[str, Any]:
    """The kernels of one call, see `kernels_of`."""
    steps.draw()
    jax.block_until_ready(steps.runner.state)
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level, options.host_tracer_level = 0, 1
    with jax.profiler.trace(str(folder), profiler_options=options):
        jax.block_until_ready(steps.run(steps.rows(PROFILED_STEPS)))
    files = sorted(folder.rglob("*.xplane.pb"), key=lambda file: file.stat().st_mtime)
    if not files:
        raise RuntimeError("the profiler wrote no file")
    data = jax.profiler.ProfileData.from_file(str(files[-1]))
    return {"steps": PROFILED_STEPS, **kernels_of(data.planes)}


def kernels_of(planes: Iterable) -> dict[str, Any]:
    """Launches and microseconds of each kernel, the longest first; and how many events each line of a plane has."""
    launches: dict[str, int] = defaultdict(int)
    spent: dict[str, float] = defaultdict(float)
    lines: dict[str, int] = {}
    for plane in planes:
        for line in plane.lines:
            events = list(line.events)
            lines[f"{plane.name} / {line.name}"] = len(events)
            if "GPU" in plane.name and "Stream" in line.name:
                for event in events:
                    launches[event.name] += 1
                    spent[event.name] += event.duration_ns / 1e3
    order = sorted(spent, key=lambda name: -spent[name])
    found = {name: [launches[name], round(spent[name], 2)] for name in order}
    return {"kernels": found, "planes": lines}


def trial(steps: Steps) -> dict[str, Any]:
    """What an engine's trial of the loop finds, and its seconds: once with what it compiles, and again if it passes."""
    steps.draw()
    seconds, chosen = [], steps.runner.loops
    while len(seconds) < 2 and chosen.why_not is None:
        chosen.untried = True
        start = time.perf_counter()
        rows = steps.rows(PROFILED_STEPS)
        steps.runner._try_loop(steps.kind, steps.shape, steps.variant, rows)
        seconds.append(time.perf_counter() - start)
        if chosen.untried:
            raise RuntimeError("no row allows a trial")
    return {"seconds": seconds, "wrong": chosen.why_not}


# --- models and engines ---------------------------------------------------------------------------


def settings_of(config: ModelConfig, rows: int, scale: Scale) -> EngineConfig:
    """Of an engine for so many rows, with no more memory than they need."""
    room = scale.context + ROOM
    engine = EngineConfig(
        dtype=DTYPE,
        max_rows=rows,
        max_model_len=room,
        steps_per_dispatch=32,
        **scale.settings,
    )
    return with_memory(config, engine, tokens=room, sequences=rows, checkpoints=2)


def model(scale: Scale, smoke: bool) -> tuple[ModelConfig, dict, str]:
    """Configuration, weights and a name: the 7B hybrid, with as many of its layers as the device has memory for.

    Raises:
        SystemExit: not even its first layers fit.
    """
    if smoke:
        return *tiny_model("bamba", DTYPE), "a tiny hybrid"
    free = free_bytes()
    for periods in range(PERIODS, 0, -1):
        config = hybrid_7b(periods)
        needed = sum(settings_of(config, rows, scale).memory or 0 for rows in scale.rows)
        needed += sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(weights(config)))
        if free is None or needed <= free:
            part = "" if periods == PERIODS else f", the first {periods} of its {PERIODS} periods"
            return config, make_weights(config, DTYPE), f"the 7B hybrid{part}"
    raise SystemExit(
        f"anatomy: one period of the 7B hybrid with {scale.rows} rows needs {needed / 1e9:.1f} GB of the device, "
        f"{free / 1e9:.1f} GB are free; free some, or take a larger card"
    )


@contextlib.contextmanager
def compiled_as(form: Form) -> Iterator[None]:
    """Compiles programs that loop over steps with a form's options."""
    before = loops.LOOP_OPTIONS
    loops.LOOP_OPTIONS = dict(form.options)
    try:
        yield
    finally:
        loops.LOOP_OPTIONS = before


def opened(form: Form, config: ModelConfig, params: dict, rows: int, scale: Scale) -> Steps:
    """An engine of so many rows that takes the form, whatever it would choose, and has run a step."""

    def make_row(engine: Engine, row: int) -> DecodeRow:
        at, room = scale.context, scale.context + ROOM
        return decode_row(engine, row, position=at + 1, checkpoint=at, room=room, temperature=0.0)

    steps = Steps(config, params, settings_of(config, rows, scale), make_row)
    taken = steps.runner.loops
    taken.inside, taken.untried, taken.why_not = form.inside, False, None
    steps.draw()
    jax.block_until_ready(steps.run(steps.rows(1)))
    return steps


def measure(name: str, scale: Scale, report: Report, asked: argparse.Namespace) -> None:
    """All of a form. Times come first, and what could disturb them later; a profile of graphs last of all."""
    made: dict[str, Any] = {}
    every: dict[int, Steps] = {}

    def weights_made() -> dict[str, Any]:
        made["config"], made["params"], about = model(scale, asked.smoke)
        return {"name": about, "context": scale.context + 1}

    def program(rows: int) -> dict[str, Any]:
        start = time.perf_counter()
        every[rows] = steps = opened(FORMS[name], **made, rows=rows, scale=scale)
        seconds, engine = time.perf_counter() - start, steps.engine
        sizes = {"rows": rows, "context": scale.context}
        work = decode_work(**made, geometry=engine.geometry, **sizes)
        made_of = f"{engine.backend.about}, sampling by {engine.backend.sampling}"
        return {"first_s": seconds, "bytes": work.num_bytes, "kernels": made_of}

    report.measure(None, "rates", lambda: rates(scale))
    if report.measure(None, "model", weights_made) is None:
        return
    for rows in scale.rows:
        if report.measure(rows, "program", lambda rows=rows: program(rows)) is not None:
            report.measure(rows, "calls", lambda steps=every[rows]: times(steps, scale))
            report.measure(rows, "bits", lambda steps=every[rows]: bits(steps, asked.repeats))
            if name == "graph":
                report.measure(rows, "trial", lambda steps=every[rows]: trial(steps))
    with contextlib.ExitStack() as stack:
        folder = asked.trace or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for rows, steps in every.items():
            own = folder / f"{name}_{rows}"
            report.measure(rows, "profile", lambda steps=steps, own=own: profile(steps, own))
    for steps in every.values():
        steps.close()


def same_bits(forms: Mapping[str, dict]) -> bool:
    """Whether repeats of each form left the same bits, as far as they were measured. Forms are different programs."""
    found = [of.get("bits", {}) for form in forms.values() for of in form["rows"].values()]
    return all(bits.get("different", 1) <= 1 for bits in found)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--form", required=True, choices=FORMS)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--trace", type=Path, help="folder for the profiles")
    parser.add_argument("--commit", help="of the code, where there is no git")
    parser.add_argument("--smoke", action="store_true", help="a tiny hybrid, on a CPU too")
    asked = parser.parse_args(argv)
    os.environ.update(FORMS[asked.form].env)
    take_most_memory()
    if jax.default_backend() != "gpu" and not asked.smoke:
        parser.error(f"needs a GPU, this is {jax.default_backend()}; run on one, or give --smoke")
    known = header() | ({"commit": asked.commit} if asked.commit else {})
    known |= {"driver": ".".join(map(str, cuda_driver() or ())), "smoke": asked.smoke}
    report = Report(asked.out, asked.form, known)
    with compiled_as(FORMS[asked.form]):
        measure(asked.form, SMOKE if asked.smoke else Scale(), report, asked)
    return int(report.failed or not same_bits(report.whole["forms"]))


if __name__ == "__main__":
    sys.exit(main())
