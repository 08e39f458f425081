"""Decode and prompt cases of `hybrid_7b.py`: what is opened, what a round times, and what its seconds mean."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from benchmarks.common import Ceilings, quantiles, request, run
from benchmarks.gpu.floors import DATASHEET_FLOPS, Work, decode_work, prefill_work
from benchmarks.gpu.model import with_memory
from hybrid_jax.config import CacheConfig, EngineConfig, ModelConfig
from hybrid_jax.engine.engine import Engine
from hybrid_jax.schedule.bucket import shapes_of


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Sizes of a run.

    Attributes:
        rows, main_rows: rows of the decode cases, and of the one that is measured first.
        context: tokens of each prompt before decoding. window: decode steps of one round, whole grains.
        steps: steps per dispatch; all but the first are measured on the first kernels alone.
        lengths, main_length: prompts of the prefill cases, and the one measured first.
        chunks: most tokens of a prefill step. ttft_length: of the prompts for time to first token.
        warm: settings of the engine whose warm-up is timed; the others are those that a user gets.
        copy_bytes, matmul_size: of the ceilings. rounds: measurements of each side.
    """

    rows: tuple[int, ...] = (64, 8, 256, 1)
    context: int = 1024
    window: int = 64
    steps: tuple[int, ...] = (8, 1)
    lengths: tuple[int, ...] = (8192, 2048, 32768)
    chunks: tuple[int, ...] = (8192, 2048)
    ttft_length: int = 8192
    warm: Mapping[str, int] = field(default_factory=dict)
    copy_bytes: int = 4 << 30
    matmul_size: int = 8192
    rounds: int = 5


SMOKE = Scale(
    rows=(2,),
    context=32,
    window=32,
    steps=(4,),
    lengths=(192,),
    chunks=(64,),
    ttft_length=330,  # 288 of its first 297 are cached; one chunk is left, of the same shape as all others
    warm={"max_rows": 1, "prefill_tokens": 32, "max_model_len": 160, "memory": 8 << 20},
    copy_bytes=1 << 22,
    matmul_size=128,
    rounds=2,
)


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What every section needs: the model, the sizes, and what to measure against.

    Attributes:
        label: in front of the names of the model's sides, or nothing.
    """

    config: ModelConfig
    params: dict
    dtype: str
    scale: Scale
    ceilings: Ceilings
    label: str = ""
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def prompt(self, length: int) -> list[int]:
        """Random tokens: no two prompts share a prefix worth caching."""
        return self.rng.integers(0, self.config.vocab_size, length).tolist()

    def engine(self, settings: EngineConfig) -> Engine:
        return Engine(self.config, self.params, settings)

    def against(self, work: Work, seconds: list[float]) -> dict:
        """Bytes, FLOPs and floor of the work, and what share of the floor the seconds reach."""
        floor = work.floor_s(self.ceilings)
        return {
            "parts": work.parts,
            "bytes": work.num_bytes,
            "flops": work.flops,
            "floor_s": floor,
            "seconds": quantiles(seconds),
            "floor_share": quantiles([floor / s for s in seconds]),
        }


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One side of a case, ready to be timed.

    Attributes:
        call: takes what the case draws, returns seconds. result: what all its seconds say.
    """

    call: Callable[[list[int]], float]
    result: Callable[[list[float]], dict]


@dataclass(frozen=True, kw_only=True)
class Side:
    """One engine of a case, not yet built.

    Attributes:
        name, settings: of the engine, its memory included.
        open: builds it; returns the engine and the candidates it serves, by name.
    """

    name: str
    settings: EngineConfig
    open: Callable[[EngineConfig], tuple[Engine, dict[str, Candidate]]]


@dataclass(frozen=True, kw_only=True)
class Case:
    """Sides that are timed in turns on the same inputs, which `draw` makes."""

    section: str
    name: str
    sides: list[Side]
    draw: Callable[[], list[int]]


# --- decode ---------------------------------------------------------------------------------------


class Decoding:
    """`rows` requests that decode together and never end. Rounds go on where the last one stopped."""

    def __init__(self, bench: Bench, engine: Engine, rows: int, limit: int) -> None:
        self.bench, self.engine, self.rows = bench, engine, rows
        self.contexts: list[float] = []
        self.requests = [
            request(f"d{row}", bench.prompt(bench.scale.context), limit) for row in range(rows)
        ]
        for one in self.requests:
            engine.add(one)
        while any(not one.output.token_ids for one in self.requests):
            engine.step()

    def call(self, _: list[int]) -> float:
        """Seconds per step, the host's work included, over one window."""
        wanted, tokens = self.rows * self.bench.scale.window, 0
        start = time.perf_counter()
        while tokens < wanted:
            tokens += sum(len(entry.new_token_ids) for entry in self.engine.step())
        seconds = time.perf_counter() - start
        self.contexts.append(
            np.mean([len(one.prompt) + len(one.output.token_ids) for one in self.requests])
        )
        return seconds * self.rows / tokens

    def result(self, seconds: list[float]) -> dict:
        stats, scale = self.engine.stats(), self.bench.scale
        assert stats["preemptions"] == 0, "rows lost their place for want of memory"
        assert all(one.output.finish_reason is None for one in self.requests), (
            "a row ended while timed"
        )
        context = round(np.mean(self.contexts[-len(seconds) :]) - scale.window / 2)
        shape = {"rows": self.rows, "context": context}
        work = decode_work(self.bench.config, self.bench.params, self.engine.geometry, **shape)
        rates = {"tokens_per_s": quantiles([self.rows / s for s in seconds])}
        return {**shape, **rates, **self.bench.against(work, seconds)}


def decode_case(bench: Bench, rows: int, kernels: list[str], steps: list[int]) -> Case:
    scale = bench.scale

    def settings(kernel: str, num_steps: int) -> tuple[EngineConfig, int]:
        """Settings, and output tokens no row reaches: what it decodes while others' prompts run, and the rounds."""
        engine = EngineConfig(
            dtype=bench.dtype,
            kernels=kernel,
            max_rows=rows,
            prefill_tokens=max(scale.chunks),
            steps_per_dispatch=num_steps,
            cache=CacheConfig(policy="off"),
        )
        chunk = min(scale.context, engine.prefill_tokens)
        at_once = shapes_of(engine).prefill_of(chunk)[1][-1]
        turns = 3 + -(-scale.context // chunk) * -(-rows // at_once)
        limit = turns * max(steps) + (scale.rounds + 3) * scale.window
        tokens = scale.context + limit
        engine = with_memory(bench.config, engine, tokens=tokens, sequences=rows + 1, checkpoints=1)
        return engine, limit

    def side(kernel: str, num_steps: int) -> Side:
        engine, limit = settings(kernel, num_steps)
        name = f"{bench.label}{kernel} x{num_steps}"

        def opened(engine: EngineConfig) -> tuple[Engine, dict[str, Candidate]]:
            built = bench.engine(engine)
            decoding = Decoding(bench, built, rows, limit)
            return built, {name: Candidate(call=decoding.call, result=decoding.result)}

        return Side(name=name, settings=engine, open=opened)

    pairs = [(k, n) for k in kernels for n in steps if k == kernels[0] or n == steps[0]]
    return Case(
        section="decode",
        name=f"{rows} rows",
        sides=[side(*pair) for pair in pairs],
        draw=list,  # the rows go on; there is nothing to draw
    )


# --- prompts --------------------------------------------------------------------------------------


def prompt_engine(bench: Bench, kernel: str, chunk: int) -> EngineConfig:
    """One row, the prefix cache on: the same for all prompt cases, so they share compiled programs.

    In this little memory what was used last must stay, whatever else was asked: no policy is measured here.
    """
    longest = max(*bench.scale.lengths, bench.scale.ttft_length)
    engine = EngineConfig(
        dtype=bench.dtype,
        kernels=kernel,
        max_rows=1,
        prefill_tokens=chunk,
        max_model_len=longest + 32,
        cache=CacheConfig(policy="lru"),
    )
    return with_memory(bench.config, engine, tokens=longest + 32, sequences=2, checkpoints=8)


def prefill_case(bench: Bench, length: int, kernels: list[str], chunks: list[int]) -> Case:
    def side(kernel: str, chunk: int) -> Side:
        name = f"{bench.label}{kernel} {chunk}"

        def opened(settings: EngineConfig) -> tuple[Engine, dict[str, Candidate]]:
            engine, firsts = bench.engine(settings), []

            def call(prompt: list[int]) -> float:
                one = request("p", prompt, 1)
                seconds = run(engine, [one])
                assert one.hit.num_tokens == 0, "a random prompt hit the prefix cache"
                firsts.append(one.output.token_ids[0])
                return seconds

            def result(seconds: list[float]) -> dict:
                work = prefill_work(
                    bench.config, bench.params, engine.geometry, length=length, chunk=chunk
                )
                rate = work.flops / bench.ceilings.matmul
                return {
                    "length": length,
                    "chunk": chunk,
                    "tokens_per_s": quantiles([length / s for s in seconds]),
                    "mfu": quantiles([rate / s for s in seconds]),
                    "mfu_datasheet": quantiles([work.flops / s / DATASHEET_FLOPS for s in seconds]),
                    "first_tokens": firsts[-len(seconds) :],
                    **bench.against(work, seconds),
                }

            return engine, {name: Candidate(call=call, result=result)}

        return Side(name=name, settings=prompt_engine(bench, kernel, chunk), open=opened)

    fitting = [chunk for chunk in chunks if chunk <= length] or [min(chunks)]
    return Case(
        section="prefill",
        name=f"{length} tokens",
        sides=[side(kernel, chunk) for kernel in kernels for chunk in fitting],
        draw=lambda: bench.prompt(length),
    )


def ttft_case(bench: Bench, kernels: list[str], chunks: list[int]) -> Case:
    """A prompt nobody has seen, and one that shares its first 90 % with a cached one."""
    length, chunk = bench.scale.ttft_length, max(chunks)
    prefix = bench.prompt(length * 9 // 10)

    def side(kernel: str) -> Side:
        name = f"{bench.label}{kernel}"

        def opened(settings: EngineConfig) -> tuple[Engine, dict[str, Candidate]]:
            engine, cached = bench.engine(settings), []
            run(engine, [request("prefix", prefix, 1)])

            def first_token(prompt: list[int]) -> float:
                one = request("t", prompt, 1)
                seconds = run(engine, [one])
                cached.append(one.hit.num_tokens)
                return seconds

            def cold(prompt: list[int]) -> float:
                seconds = first_token(prompt)
                assert cached[-1] == 0, "a random prompt hit the prefix cache"
                return seconds

            def hit(prompt: list[int]) -> float:
                seconds = first_token(prefix + prompt[len(prefix) :])
                assert cached[-1] == engine.geometry.align(len(prefix) - 1), (
                    f"{cached[-1]} of {len(prefix)} tokens of the prefix came from the cache"
                )
                return seconds

            def result(start: int) -> Callable[[list[float]], dict]:
                work = prefill_work(
                    *(bench.config, bench.params, engine.geometry),
                    **{"length": length, "chunk": chunk, "start": start},
                )
                shape = {"length": length, "cached": start, "chunk": chunk}
                return lambda seconds: {**shape, **bench.against(work, seconds)}

            known = engine.geometry.align(len(prefix) - 1)
            return engine, {
                f"{name} cold": Candidate(call=cold, result=result(0)),
                f"{name} hit": Candidate(call=hit, result=result(known)),
            }

        return Side(name=name, settings=prompt_engine(bench, kernel, chunk), open=opened)

    return Case(
        section="ttft",
        name=f"{length} tokens",
        sides=[side(kernel) for kernel in kernels],
        draw=lambda: bench.prompt(length),
    )
