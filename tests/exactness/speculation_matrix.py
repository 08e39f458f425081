"""Speculation under all circumstances: who drafts, how often that is right, the cache, the rows, and what requests ask.

`python -m tests.exactness.speculation_matrix` draws cells until 100,000 tokens are judged. `test_speculation_matrix.py`
takes for each engine a few cells, in which each two circumstances meet.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from hybrid_jax.config import Attention, EngineConfig, Layer, ModelConfig, SpeculationConfig
from hybrid_jax.config.arrays import FP8
from hybrid_jax.engine.engine import Engine
from hybrid_jax.models.cut import exit_params
from hybrid_jax.models.initialize import random_params
from tests.exactness.conftest import load
from tests.exactness.definition import Mismatch, Plain
from tests.exactness.engines import make_engine, one_shape, short_of_memory, start_over
from tests.exactness.jobs import Job, Run, drive, random_prompt
from tests.exactness.planted import Planted, planting, with_mistakes
from tests.exactness.poison import Poison

ROWS = 8
AMPLE, TINY = 24.0, 2.2  # sequences of 192 tokens
SETTINGS = EngineConfig(max_rows=ROWS, prefill_tokens=128, steps_per_dispatch=4, page_tokens=64)
CHAIN = SpeculationConfig(num_tokens=3, adaptive=False)
TREE = SpeculationConfig(tree=(0, 0, 1, 1, 2, 3, 5), adaptive=False)  # of depth 3


@dataclass(frozen=True)
class Maker:
    """An engine that drafts.

    Attributes:
        model: name of the model. second: of the one that drafts for it; "" for the same.
        speculation: how. planted: what it drafts is made by the test.
        exact: it runs in exact mode. fp8: its pages are FP8.
    """

    model: str
    speculation: SpeculationConfig
    planted: bool = False
    second: str = ""
    exact: bool = False
    fp8: bool = False

    @property
    def kv_dtype(self) -> str | None:
        """As of `Plain`."""
        return FP8 if self.fp8 else None

    @property
    def settings(self) -> EngineConfig:
        settings = replace(SETTINGS, speculation=self.speculation, exact=self.exact)
        settings = replace(settings, kv_cache_dtype="fp8" if self.fp8 else "auto")
        return replace(settings, prefill_tokens=settings.grain) if self.exact else settings


LOOKUP = SpeculationConfig(num_tokens=3, ngram_min=1)
ENGINES = {
    "planted-qwen3_next": Maker("qwen3_next", CHAIN, planted=True),
    "planted-jamba": Maker("jamba", CHAIN, planted=True),
    "planted_tree-with_unknown_kind": Maker("with_unknown_kind", TREE, planted=True),
    "planted_tree-jamba": Maker("jamba", TREE, planted=True),
    "ngram-parallel": Maker("parallel", LOOKUP),
    "suffix-qwen3_next": Maker("qwen3_next", replace(LOOKUP, method="suffix")),
    "mtp-parallel": Maker("parallel", replace(CHAIN, method="mtp")),
    "mtp_tree-qwen3_next": Maker("qwen3_next", replace(TREE, method="mtp")),
    "draft-jamba": Maker("jamba", replace(CHAIN, method="draft")),
    "draft-qwen3_next": Maker("qwen3_next", replace(CHAIN, method="draft"), second="parallel"),
    "draft_tree-parallel": Maker("parallel", replace(TREE, method="draft")),
    "planted_tree-with_cut": Maker("with_cut", TREE, planted=True),
    "draft-with_cut_delta": Maker("with_cut_delta", replace(CHAIN, method="draft"), second="jamba"),
    "exit-with_cut": Maker("with_cut", replace(CHAIN, method="exit")),
    "exit_tree-with_cut_delta": Maker("with_cut_delta", replace(TREE, method="exit")),
    "exact_exit-with_cut": Maker("with_cut", replace(CHAIN, method="exit"), exact=True),
    "exact_fp8_planted-with_cut": Maker("with_cut", CHAIN, planted=True, exact=True, fp8=True),
    "exact_mtp-parallel": Maker("parallel", replace(CHAIN, method="mtp"), exact=True),
    "exact_draft-jamba": Maker("jamba", replace(CHAIN, method="draft"), exact=True),
}
ALONE = 100  # engine steps in which a request ends
SHORT_AT = (60, 100)  # where the oldest row finds no memory, if the pool is tiny
AXES: dict[str, tuple] = {
    "wrong": (0.0, 0.3),  # share of planted drafts
    "cache": ("on", "off", "tiny"),
    "rows": (1, ROWS),
    "temperature": (0.0, 0.6, 1.0),
    "asks": ("nothing", "penalties", "logprobs", "three", "stop"),
}
# Each of these would need programs of its own, which take long to compile.
FEWER_PROGRAMS = AXES | {"asks": ("penalties", "logprobs", "three", "stop")}
Cell = dict[str, object]


def any_cell(axes: dict[str, tuple], rng: random.Random) -> Cell:
    """A cell drawn at random."""
    return {axis: rng.choice(values) for axis, values in axes.items()}


def pairwise(axes: dict[str, tuple], rng: random.Random) -> Iterator[Cell]:
    """Cells in which each two values of different axes meet."""
    names = list(axes)
    missing = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(names, 2)
        for x in axes[a]
        for y in axes[b]
    }

    def met(cell: Cell) -> set:
        return {((a, cell[a]), (b, cell[b])) for a, b in itertools.combinations(names, 2)} & missing

    while missing:
        tries = [any_cell(axes, rng) for _ in range(60)]
        best = max(tries, key=lambda cell: len(met(cell)))
        if found := met(best):
            missing -= found
            yield best


# --- engines ----------------------------------------------------------------------------------------


@functools.cache
def with_drafter(maker: Maker) -> tuple[ModelConfig, dict]:
    """A tiny model with a random head, or with a second model."""
    config, params = load(maker.model)
    if maker.speculation.method == "draft":
        other, weights = load(maker.second or maker.model)
        return replace(config, draft=other), params | {"draft": weights}
    if maker.speculation.method == "exit":
        config = replace(config, exit_head=True)
        return config, params | {"exit": exit_params(params, config)}
    if maker.speculation.method == "mtp":
        last = [s for s in config.layers if any(isinstance(m, Attention) for m in s.mixers)][-1]
        first, *rest = last.blocks
        only = replace(first, parts=tuple(m for m in last.mixers if isinstance(m, Attention)))
        config = replace(config, mtp=(Layer(blocks=(only, *rest)),))
        return config, params | {"mtp": random_params(config, 0)["mtp"]}
    return config, params


@dataclass
class Subject:
    """An engine, its memory poisoned, what it drafts if that is planted, and what was seen."""

    maker: Maker
    engine: Engine
    planted: Planted | None
    poison: Poison
    plain: Plain
    accepted: Counter = field(default_factory=Counter)
    moved: Counter = field(default_factory=Counter)
    tokens: int = 0

    @property
    def vocab_size(self) -> int:
        return self.engine.config.vocab_size

    def drive(self, jobs: Sequence[Job], tiny: bool = False) -> tuple[Run, list[Mismatch]]:
        """A run, and what of it the definition does not confirm. If the pool is `tiny`, rows are preempted."""
        with short_of_memory(self.engine, at=SHORT_AT if tiny else ()):
            run = drive(self.engine, jobs, self.poison)
        for request in run.requests:
            self.tokens += len(request.output.token_ids)
            for (_, accepted), windows in request.course.drafts.windows.items():
                self.accepted[accepted] += windows
        self.moved.update({name: int(count) for name, count in run.moved.items()})
        return run, self.plain.mismatches(run.requests)

    def check(self, cell: Cell, seed: int) -> list[str]:
        """Runs a cell: if drafts are planted, first without right ones; then a second turn. Returns what is wrong."""
        tiny = cell["cache"] == "tiny"
        start_over(
            self.engine,
            TINY if tiny else AMPLE,
            policy="off" if cell["cache"] == "off" else "adaptive",
        )
        self.poison.spread()
        jobs, rng = jobs_of(cell, seed, self.vocab_size), np.random.default_rng(seed)
        run, wrong = self.drive(jobs, tiny)
        found = [str(one) for one in wrong] + self.missed(jobs, run)
        if cell["asks"] == "stop":
            jobs = [stopping(job, out) for job, out in zip(jobs, run.outputs, strict=True)]
        if self.planted is not None:
            for job, output in zip(jobs, run.outputs, strict=True):
                share = float(str(cell["wrong"]))
                self.planted.outputs[job.prompt] = with_mistakes(output, rng, share)
        if self.planted is not None or cell["asks"] == "stop":
            again, wrong = self.drive(jobs, tiny)
            found += [str(one) for one in wrong]
            for job, before, now in zip(jobs, run.outputs, again.outputs, strict=True):
                if now != until_stop(before, job.stop_ids):
                    found.append(f"{job}: {before}, then {now}")
        longer = [
            Job(prompt=(*job.prompt, *output), max_tokens=12)
            for job, output in zip(jobs, run.outputs, strict=True)
            if len(job.prompt) + len(output) < 180
        ]
        _, wrong = self.drive(longer[:4])
        return found + [str(one) for one in wrong]

    def missed(self, jobs: Sequence[Job], run: Run) -> list[str]:
        """Windows of a second model like the first that are not all right, where nothing but the logits decides."""
        speculation = self.maker.speculation
        if speculation.method != "draft" or speculation.tree or self.maker.second:
            return []
        free = [
            request
            for job, request in zip(jobs, run.requests, strict=True)
            if job.allowed_token_ids is None and job.repetition_penalty == 1.0
        ]
        windows = sum((request.course.drafts.windows for request in free), Counter())
        return [f"{n} windows {w}" for w, n in windows.items() if w[0] != w[1]]


@contextlib.contextmanager
def subject_of(maker: Maker, plain: Plain, decode_rows: tuple[int, ...]) -> Iterator[Subject]:
    """An engine with decode shapes for so many rows, and for all."""
    planted = Planted() if maker.planted else None
    with contextlib.ExitStack() as stack:
        if planted is not None:
            stack.enter_context(planting(planted))
        stack.enter_context(one_shape(64, decode_rows=decode_rows))
        engine = make_engine(*with_drafter(maker), maker.settings, room=AMPLE)
        yield Subject(maker, engine, planted, Poison(engine), plain)
        engine.close()


# --- requests ---------------------------------------------------------------------------------------


def jobs_of(cell: Cell, seed: int, vocab_size: int) -> list[Job]:
    """Requests of one cell: prompts and outputs that end around the boundaries of the grain, some that repeat."""
    rng, count = np.random.default_rng(seed), int(str(cell["rows"]))
    asks, jobs = cell["asks"], []
    few = tuple(random_prompt(4, seed + 1, vocab_size))
    for i in range(max(count, 2)):
        length = int(rng.choice([1, 20, 31, 33, 45, 64, 70, 97]))
        prompt = random_prompt(length, seed + i, vocab_size)
        if i % 3 == 2:
            prompt = (few * length)[:length]
        job = Job(
            prompt=prompt,
            max_tokens=int(rng.integers(20, 70)),
            seed=int(rng.integers(1 << 30)),
            temperature=float(str(cell["temperature"])),
            allowed_token_ids=few if i % 3 == 2 else None,
            logprobs=None if asks == "nothing" else 5,
            arrive=ALONE * i if count == 1 else int(rng.integers(12)),
        )
        if asks == "penalties":
            job = replace(
                job, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.2 * (i % 2)
            )
        jobs.append(job)
    if asks == "three":
        jobs = [
            replace(job, group=f"g{i}", sample_index=sample)
            for i, job in enumerate(jobs[: max(1, count // 3)])
            for sample in range(3)
        ]
    return jobs


def stopping(job: Job, output: Sequence[int]) -> Job:
    """The job with a stop token that is in the middle of its output."""
    return replace(job, stop_ids=frozenset({output[len(output) // 2]}))


def until_stop(output: Sequence[int], stops: frozenset[int]) -> list[int]:
    """The output up to the first stop token."""
    ends = [place + 1 for place, token in enumerate(output) if token in stops]
    return list(output[: min(ends, default=len(output))])


# --- by one command ---------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    each, total, wrong = options.tokens // len(ENGINES) + 1, 0, 0
    excused = 0
    for name, maker in ENGINES.items():
        plain, rng = Plain(*load(maker.model), maker.kv_dtype), random.Random(options.seed)
        with subject_of(maker, plain, (1,)) as subject:
            seed = options.seed
            while subject.tokens < each:
                cell = any_cell(AXES, rng)
                seed += 100
                for line in subject.check(cell, seed):
                    wrong += 1
                    print(name, cell, line, flush=True)
            total, excused = total + subject.tokens, excused + len(plain.excused)
            print(
                f"{name}: {subject.tokens} tokens, accepted {sorted(subject.accepted.items())}, "
                f"{subject.moved['preemptions']} preemptions, {len(plain.excused)} near ties",
                flush=True,
            )
    print(f"{total} tokens, {wrong} differences, {excused} near ties that fell otherwise")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
