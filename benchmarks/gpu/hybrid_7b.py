"""The whole engine on the 7B hybrid {4 attention, 24 Mamba-2, 28 MLP}, random bfloat16 weights, on one GPU.

    python benchmarks/gpu/hybrid_7b.py --only decode --kernels pallas --minutes 9 --cache DIR
    python benchmarks/gpu/hybrid_7b.py --smoke          # a tiny hybrid on the CPU, all sections, under a minute

Sections: decode (tokens/s and share of the bytes floor), prefill (tokens/s and MFU), ttft (time to first token,
cold and with 90 % of the prompt cached), compile (warm-up, with and without a filled compilation cache). The
sides of a case - kernels, chunk lengths, steps per dispatch - are timed in turns in one process as far as they
fit the device memory together. Inside the clock: everything from `Engine.add` or `Engine.step` to the tokens on
the host. Floors: `floors.py`, over the device's own bandwidth and matrix rate, which every run measures.

Results of several runs on one device, commit and set of versions are merged into one JSON file. Sides that it
holds already, failed ones too, are left out unless --again is given, and the most important cases come first: the
same command can be repeated until all is there. The last line says how many cases remain.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import json
import math
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

sys.path.append(str(Path(__file__).resolve().parents[2]))  # when run as a file
from benchmarks.common import ROOT, device_answers, header, measure_ceilings, turns, write_json
from benchmarks.gpu.compiling import compile_times
from benchmarks.gpu.model import free_bytes, hybrid, make_weights, take_most_memory
from benchmarks.gpu.sections import (
    SMOKE,
    Bench,
    Candidate,
    Case,
    Scale,
    Side,
    decode_case,
    prefill_case,
    ttft_case,
)
from benchmarks.gpu.tables import tables
from hybrid_jax.config import with_inner_cut
from hybrid_jax.costs import weight_count
from hybrid_jax.engine.engine import Engine
from hybrid_jax.engine.programs.compile_cache import MIN_COMPILE_SECONDS, enable_compile_cache
from hybrid_jax.models.cut import cut_params
from hybrid_jax.models.files import known_names

SECTIONS = ("decode", "prefill", "ttft", "compile")
DTYPE = "bfloat16"


class Report:
    """A JSON file of results, brought up to date after every case."""

    def __init__(self, path: Path, known: dict) -> None:
        self.path, self.values = path, {"header": known}
        if path.exists():
            self.values = json.loads(path.read_text())
            if self.values["header"] != known:
                raise SystemExit(
                    f"hybrid_7b: {path} holds results of {self.values['header']}, this is {known}; "
                    "give another --json"
                )

    def put(self, section: str, case: str, results: dict) -> None:
        self.values.setdefault(section, {}).setdefault(case, {}).update(results)
        write_json(self.path, self.values)

    def forget_errors(self, section: str, case: str) -> None:
        """Drops what failed in a case that is measured again."""
        known = self.values.get(section, {}).get(case, {})
        for name in [name for name, result in known.items() if "error" in result]:
            del known[name]

    def lacks(self, section: str, case: str, side: str) -> bool:
        """A side was not measured, or not to its end; one that failed counts as measured.

        A side may stand under several names that begin alike.
        """
        known = self.values.get(section, {}).get(case, {})
        done = [name for name, result in known.items() if result.get("complete", True)]
        return not any(f"{name} ".startswith(f"{side} ") for name in done)

    @property
    def num_errors(self) -> int:
        cases = (case for name in SECTIONS for case in self.values.get(name, {}).values())
        return sum("error" in result for case in cases for result in case.values())


# --- one case -------------------------------------------------------------------------------------


def measure(case: Case, scale: Scale, report: Report, over: Callable, trace: Path | None) -> None:
    """Times all sides of a case and reports them, those that failed included."""
    report.forget_errors(case.section, case.name)
    for group in together(case.sides):
        if over():
            return
        print(f"{case.section} {case.name}: {', '.join(side.name for side in group)}", flush=True)
        engines, candidates, first_s = open_all(case, group, report, over)
        results = timed(case, candidates, scale.rounds, trace)
        for name, result in results.items():
            result |= {"first_s": first_s[name]}
        report.put(case.section, case.name, results)
        for engine in engines:
            engine.close()
        del engines, candidates
        gc.collect()
        jax.clear_caches()


def open_all(case: Case, group: list[Side], report: Report, over: Callable):
    """Engines, candidates by name, and the seconds each took up to its first result, compilation included."""
    engines: list[Engine] = []
    candidates: dict[str, Candidate] = {}
    first_s: dict[str, float] = {}
    for side in group:
        if engines and over():
            break
        gc.collect()  # an engine that failed halfway
        start = time.perf_counter()
        try:
            engine, opened = side.open(side.settings)
            engines.append(engine)
            for name, candidate in opened.items():
                candidate.call(case.draw())
                first_s[name] = time.perf_counter() - start
                start = time.perf_counter()
            candidates |= opened
        except Exception as error:  # out of memory, or what a kernel refuses: the other sides go on
            report.put(case.section, case.name, {side.name: failed(error)})
    return engines, candidates, first_s


def timed(case: Case, candidates: dict[str, Candidate], rounds: int, trace: Path | None) -> dict:
    """Results of the candidates by name, timed in turns; one that fails costs no other its result."""
    if not candidates:
        return {}
    results: dict[str, dict] = {}

    def guarded(name: str, inputs: list[int]) -> float:
        try:
            return math.nan if name in results else candidates[name].call(inputs)
        except Exception as error:
            results[name] = failed(error)
            return math.nan

    calls = {name: functools.partial(guarded, name) for name in candidates}
    values = turns(rounds, calls, case.draw)
    beside = [name for name in candidates if name not in results]
    for name in beside:
        try:
            results[name] = {**candidates[name].result(values[name]), "beside": beside}
        except Exception as error:
            results[name] = failed(error)
    for name in beside if trace else ():
        inputs = case.draw()
        folder = "_".join((case.section, *case.name.split(), *name.split()))
        with jax.profiler.trace(str(trace / folder)):
            calls[name](inputs)
    return results


def together(sides: list[Side]) -> Iterator[list[Side]]:
    """Sides in groups that fit the device memory; one that never fits stands alone, and fails by itself."""
    while sides:
        room, group = free_bytes(), [sides[0]]
        for side in sides[1:]:
            needed = sum(one.settings.memory for one in (*group, side))
            if room is not None and needed > room:
                break
            group.append(side)
        sides = sides[len(group) :]
        yield group


def failed(error: Exception) -> dict:
    """An exception as a result; its trace goes to stderr."""
    traceback.print_exception(error)
    text = str(error).strip().splitlines() or [""]
    return {"error": f"{type(error).__name__}: {text[0][:300]}"}


# --- all of them ----------------------------------------------------------------------------------


def cases(benches: list[Bench], asked: argparse.Namespace) -> list[Case]:
    """The cases of the sections asked for, the goals' first, with the sides of all models."""
    first, *others = (cases_of(bench, asked) for bench in benches)
    for more in others:
        for case, other in zip(first, more, strict=True):
            case.sides.extend(other.sides)
    return first


def cases_of(bench: Bench, asked: argparse.Namespace) -> list[Case]:
    scale = bench.scale
    decode = [decode_case(bench, rows, asked.kernels, asked.steps) for rows in scale.rows]
    chunks = list(scale.chunks)
    prefill = [prefill_case(bench, length, asked.kernels, chunks) for length in scale.lengths]
    ttft = ttft_case(bench, asked.kernels, chunks)
    ordered = [decode[0], prefill[0], ttft, *decode[1:], *prefill[1:]]
    return [case for case in ordered if case.section in asked.only]


def measure_all(
    benches: list[Bench], asked: argparse.Namespace, report: Report, over: Callable
) -> int:
    """Runs what the report lacks until time is over; returns how many cases remain."""
    remaining = 0
    for case in cases(benches, asked):
        lacking = lambda: [s for s in case.sides if report.lacks(case.section, case.name, s.name)]  # noqa: B023, E731
        sides = case.sides if asked.again else lacking()
        if sides and not over():
            measure(
                dataclasses.replace(case, sides=sides), benches[0].scale, report, over, asked.trace
            )
            if not device_answers():
                raise SystemExit(
                    f"hybrid_7b: {case.section} {case.name} left the device in a state of error, as a kernel does that "
                    "reads where nothing is; the same command goes on with the other cases"
                )
        remaining += bool(lacking())
    kernels = asked.kernels if "compile" in asked.only else []
    for kernel in kernels[-1:] if asked.smoke else kernels:  # interpreted ones compile for long
        if (asked.again or report.lacks("compile", kernel, "cached")) and not over():
            print(f"compile {kernel}", flush=True)
            try:
                found = compile_times(benches[0], kernel, over)
            except Exception as error:
                found = {"cold": failed(error), "cached": failed(error)}
            report.put("compile", kernel, found)
        remaining += report.lacks("compile", kernel, "cached")
    return remaining


def scale_of(asked: argparse.Namespace) -> Scale:
    """The sizes of the run, what the command line names in place of the defaults."""
    given = {
        name: getattr(asked, name)
        for name in ("rows", "lengths", "chunks", "context", "rounds")
        if getattr(asked, name) is not None
    }
    return dataclasses.replace(SMOKE if asked.smoke else Scale(), **given)


def use_cache(folder: Path | None) -> None:
    """Keeps compiled programs in the given folder, or in the user's."""
    if folder is None:
        enable_compile_cache("gpu-7b")
        return
    folder.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(folder.resolve()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", MIN_COMPILE_SECONDS)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    numbers = lambda text: tuple(int(part) for part in text.split(","))  # noqa: E731
    words = lambda text: text.split(",")  # noqa: E731
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--smoke", action="store_true", help="a tiny hybrid, on any device")
    add("--model", default="hybrid_7b", help="a folder of configs/models (hybrid_7b)")
    add("--cut", type=int, help="measure the model with a cut (SwiftKV) at this layer, too")
    add(
        "--only",
        type=words,
        help=f"some of {','.join(SECTIONS)}; all, or with --cut all but the last",
    )
    add("--kernels", type=words, default=["pallas", "xla"], help="the first are the baseline")
    add("--rows", type=numbers, help="of decode, the most important first")
    add("--steps", type=numbers, help="per decode dispatch; all but the first on the first kernels")
    add("--context", type=int, help="tokens of each prompt before decoding")
    add("--lengths", type=numbers, help="of prefill, the most important first")
    add("--chunks", type=numbers, help="prefill_tokens to compare")
    add("--rounds", type=int)
    add("--minutes", type=float, default=float("inf"), help="no engine is opened after so long")
    add("--again", action="store_true", help="measure what the JSON file holds, too")
    add("--json", type=Path, default=ROOT / "benchmarks/results/gpu" / "hybrid_7b.json")
    add("--cache", type=Path, help="folder of compiled programs")
    add("--trace", type=Path, help="folder for a profile of one more round of each side")
    add("--commit", help="of the code, where there is no git")
    asked = parser.parse_args(argv)
    asked.only = asked.only or list(SECTIONS if asked.cut is None else SECTIONS[:-1])
    for name, known in (("only", SECTIONS), ("kernels", ("pallas", "xla"))):
        unknown = set(getattr(asked, name)) - set(known)
        if unknown:
            parser.error(f"--{name} must be some of {','.join(known)}, got {','.join(unknown)}")
    if asked.cut is not None and "compile" in asked.only:
        parser.error("--cut is not for the section compile; give --only decode,prefill,ttft")
    if asked.model not in known_names():
        parser.error(f"--model must be one of {', '.join(known_names())}, got {asked.model}")
    return asked


def main(argv: list[str] | None = None) -> int:
    start = time.perf_counter()
    asked = arguments(argv)
    take_most_memory()
    if jax.default_backend() != "gpu" and not asked.smoke:
        print(
            f"hybrid_7b: needs a GPU, this is {jax.default_backend()}; run on one, or give --smoke",
            file=sys.stderr,
        )
        return 2
    use_cache(asked.cache)
    scale, config = scale_of(asked), hybrid(asked.model, tiny=asked.smoke)
    asked.steps = list(asked.steps or scale.steps)
    known = header() | ({"commit": asked.commit} if asked.commit else {})
    known |= {"model": asked.model, "dtype": DTYPE, "weights": weight_count(config)}
    report = Report(asked.json, known)
    over = lambda: time.perf_counter() - start > 60 * asked.minutes  # noqa: E731
    sizes = {"words": scale.copy_bytes // 4, "size": scale.matmul_size}
    ceilings = measure_ceilings(**sizes, rounds=scale.rounds + 1)
    report.values["ceilings"] = dataclasses.asdict(ceilings)
    drawn = time.perf_counter()
    params = make_weights(config, DTYPE)
    report.values["weights_s"] = time.perf_counter() - drawn
    bench = Bench(config=config, params=params, dtype=DTYPE, scale=scale, ceilings=ceilings)
    benches = [bench]
    if asked.cut is not None:
        changed = with_inner_cut(config, asked.cut)
        label, weights = f"cut {asked.cut} ", cut_params(params, changed)
        benches.append(dataclasses.replace(bench, config=changed, params=weights, label=label))
    remaining = measure_all(benches, asked, report, over)
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    report.values["peak_bytes"] = peak
    write_json(report.path, report.values)
    print("\n" + tables(report.values))
    failures = report.num_errors
    print(
        f"\n{time.perf_counter() - start:.0f} s; {remaining} cases remain, {failures} sides failed"
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
