"""What callers ask a live engine: a name for each question, plain arguments and plain answers.

Nothing that lives in the engine passes either way: numbers, words, arrays and small records only. So the same question
can be asked of an engine in another process. Where there are several engines, a question says how their answers become
one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Generic, NamedTuple, TypeVar

import numpy as np

from hybrid_jax.api.threads.joining import (
    joined_description,
    joined_nodes,
    joined_past,
    joined_stats,
    joined_words,
    largest,
    nothing,
)
from hybrid_jax.cache.tree.node import NodeLine, describe_tree, ids_of
from hybrid_jax.config import Backend, EngineConfig, ModelConfig
from hybrid_jax.schedule.history import PastRequests
from hybrid_jax.schedule.tiers.listing import tiers_below
from hybrid_jax.sizing.budget import MemorySplit
from hybrid_jax.sizing.devices import Device

if TYPE_CHECKING:
    from hybrid_jax.engine.engine import Engine

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Question(Generic[Answer]):
    """One question. It is sent by its name.

    Attributes:
        answer: answers it, where the engine is.
        at_once: any thread may answer it, also while the engine computes. Others are answered between two turns.
        joined: makes one answer of those of several engines, which are all asked. None if one engine answers for all.
        weight: which one that is: the engine with the largest answer to this, the first of several. None for the first.
        together: it changes what the engine computes, or has it compute something. Processes that run a model together
            must all ask it.
    """

    answer: Callable[Concatenate[Engine, ...], Answer]
    at_once: bool = False
    joined: Callable[[Sequence[Answer]], Answer] | None = None
    weight: Question[int] | None = None
    together: bool = False

    @property
    def name(self) -> str:
        """Its name in `QUESTIONS`."""
        return self.answer.__name__

    def of_all(self, answers: Sequence[Answer]) -> Answer:
        """One answer of those of all that were asked."""
        return answers[0] if self.joined is None else self.joined(answers)

    def __reduce__(self) -> tuple[Callable[[str], Any], tuple[str]]:
        return named, (self.name,)


def of_each(
    joined: Callable[[Sequence[Any]], Any], *, at_once: bool = False, together: bool = False
) -> Callable[[Callable[Concatenate[Engine, ...], Answer]], Question[Answer]]:
    """A question to every engine."""
    return lambda answer: Question(answer, at_once=at_once, joined=joined, together=together)


def of_one(
    weight: Question[int],
) -> Callable[[Callable[Concatenate[Engine, ...], Answer]], Question[Answer]]:
    """A question to the engine with the largest answer to `weight`."""
    return lambda answer: Question(answer, weight=weight)


def named(name: str) -> Question[Any]:
    """The question of a name."""
    return QUESTIONS[name]


class EngineFacts(NamedTuple):
    """What never changes about an engine.

    Attributes:
        config: the model, with a second one that drafts if there is one.
        engine_config, device, sizes, backend: as in `Engine`.
        about_disk: as in `Engine`, when it began.
        not_triton: why Triton kernels are not used, by operation.
        left_to_xla: operations that XLA does although kernels do the rest, and why.
        about_products: which products of few rows serve on a CPU, in words; "" where there is no choice.
        max_model_len, longest_prompt: in tokens, of a sequence and of a prompt that is only read.
    """

    config: ModelConfig
    engine_config: EngineConfig
    device: Device
    sizes: MemorySplit
    backend: Backend
    about_disk: str
    not_triton: dict[str, str]
    left_to_xla: dict[str, str]
    about_products: str
    max_model_len: int
    longest_prompt: int


class WarmUpProgram(NamedTuple):
    """A program that a warm-up compiles.

    Attributes:
        name: its name.
        has_ahead: it can be compiled in any thread before it runs.
        rank: the order in which programs are best compiled ahead, the smallest first.
    """

    name: str
    has_ahead: bool
    rank: tuple[int, ...]


@Question
def facts(engine: Engine) -> EngineFacts:
    """What never changes."""
    return EngineFacts(*(getattr(engine, name) for name in EngineFacts._fields))


@of_each(joined_stats)
def stats(engine: Engine) -> dict[str, int | float]:
    """Counters since the start, and present numbers."""
    return {"compile_s": engine.compile_seconds(), **engine.stats()}


@of_each(joined_description)
def describe(engine: Engine) -> str:
    """The memory in one line."""
    return engine.describe()


@of_each(nothing, together=True)
def reset_prefix_cache(engine: Engine) -> None:
    """Forgets every cached prefix."""
    engine.reset_prefix_cache()


@of_each(nothing, together=True)
def expect_everything(engine: Engine) -> None:
    """Says that requests to come will ask for more than tokens."""
    engine.expect_everything()


@functools.partial(Question, together=True)
def all_logprobs(engine: Engine, hidden: np.ndarray) -> np.ndarray:
    """Log-probabilities float32[N, V] of all tokens after hidden states float32[N, D]."""
    return engine.all_logprobs(hidden)


@Question
def where_damaged(engine: Engine) -> str:
    """Where to look if the model's numbers are not finite."""
    return engine.where_damaged()


@of_each(joined_nodes)
def cache_nodes(engine: Engine, num_tokens: int) -> list[tuple[NodeLine, list[int]]] | None:
    """The nodes of the prefix tree, each with its first tokens, `num_tokens` at most. None if the cache is off."""
    tree = engine.scheduler.memory.tree
    if tree is None:
        return None
    first: list[list[int]] = []

    def text_of(tokens: np.ndarray) -> str:
        first.append(tokens[:num_tokens].tolist())
        return ids_of(tokens)

    memory = engine.scheduler.memory
    on_disk = memory.on_disk
    if on_disk is not None and not on_disk.disk.is_disk:
        on_disk = None
    lines = describe_tree(tree.root, text_of, tiers_below(memory.below, on_disk))
    return list(zip(lines, first, strict=True))


@of_each(joined_past)
def past_requests(engine: Engine) -> PastRequests | None:
    """The finished requests, as replays need them. None if the cache is off."""
    history = engine.scheduler.memory.history
    return None if history is None else history.so_far()


@Question
def cached(engine: Engine, file: Path, tokens: Sequence[int]) -> int:
    """How many tokens of a prompt `save_prefix` would write."""
    return engine.cached_tokens(tokens)


@Question
def cached_of(engine: Engine, file: Path) -> int:
    """How many tokens of the prompt in a file the arena has."""
    return engine.cached_tokens_of(file)


@of_one(cached)
def save_prefix(engine: Engine, file: Path, tokens: Sequence[int]) -> int | None:
    """Writes what the arena has of a prompt to a file; returns its tokens, 0 for nothing, None for "after a turn"."""
    return engine.save_prefix(file, tokens)


@of_one(cached_of)
def load_prefix(engine: Engine, file: Path) -> int:
    """Puts what `save_prefix` has written into the arena; returns its tokens."""
    return engine.load_prefix(file)


@of_each(lambda answers: answers[0])
def warm_ups(engine: Engine, logprobs: bool, adjusts: bool) -> list[WarmUpProgram]:
    """The programs of a warm-up. The next two questions are about one of them, by its place in this list."""
    found = engine.warm_ups(logprobs=logprobs, adjusts=adjusts)
    return [WarmUpProgram(p.name, p.ahead is not None, p.rank) for p in found]


@of_each(nothing, at_once=True)
def compile_ahead(engine: Engine, logprobs: bool, adjusts: bool, index: int) -> None:
    """Compiles a program that has `has_ahead`, and runs nothing."""
    ahead = engine.listed[logprobs, adjusts][index].ahead
    assert ahead is not None, "its list says so"
    ahead()


@of_each(nothing, together=True)
def run_program(engine: Engine, logprobs: bool, adjusts: bool, index: int) -> None:
    """Compiles a program if nobody has, and runs it with inert rows."""
    engine.listed[logprobs, adjusts][index].run()


@of_each(max, at_once=True)
def compile_seconds(engine: Engine) -> float:
    """Seconds of compiling so far; of several engines, which compile at the same time, of the one that took longest."""
    return engine.compile_seconds()


@of_each(joined_words, at_once=True)
def about_loops(engine: Engine) -> str:
    """As `Engine.about_loops`; a trial may change it."""
    return engine.about_loops


@of_each(largest, at_once=True)
def peak_memory_bytes(engine: Engine) -> int | None:
    """The most memory in use so far, as `RequestMetrics` has it."""
    return engine.peak_memory_bytes()


LISTED: tuple[Question[Any], ...] = (
    *(facts, stats, describe, reset_prefix_cache, expect_everything, all_logprobs, where_damaged),
    *(cache_nodes, past_requests, cached, cached_of, save_prefix, load_prefix),
    *(warm_ups, compile_ahead, run_program),
    *(compile_seconds, peak_memory_bytes, about_loops),
)
QUESTIONS = {question.name: question for question in LISTED}
