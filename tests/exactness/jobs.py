"""Requests to make, and an engine driven over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

from hybrid_jax.config.sampling_params import SamplingParams
from hybrid_jax.engine.engine import Engine
from hybrid_jax.schedule.request import Constraint, Request
from tests.exactness.poison import Poison
from tests.tiny_models import VOCAB


@dataclass(frozen=True, kw_only=True)
class Job:
    """One request to make.

    Attributes:
        arrive: engine steps before it is added.
        abort_at: aborted as soon as it has so many tokens, as at a stop string; None lets it end.
        The others as in `Request` and `SamplingParams`.
    """

    prompt: tuple[int, ...]
    max_tokens: int = 40
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    constraint: Constraint | None = None
    seed: int = 0
    sample_index: int = 0
    group: str | None = None
    stop_ids: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()
    logprobs: int | None = 2
    prompt_logprobs: int | None = None
    cache_breakpoints: tuple[int, ...] = ()
    logprobs_from: int = 1
    pooling: str | None = None
    arrive: int = 0
    abort_at: int | None = None

    def request(self, name: str) -> Request:
        params = SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            min_tokens=self.min_tokens,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self.logit_bias,
            allowed_token_ids=self.allowed_token_ids,
            max_tokens=self.max_tokens,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            stop_token_ids=tuple(self.stop_ids),
            stop=self.stop,
        )
        return Request(
            request_id=name,
            prompt=list(self.prompt),
            params=params,
            seed=self.seed,
            sample_index=self.sample_index,
            sibling_group=self.group,
            stop_ids=self.stop_ids,
            max_tokens=self.max_tokens,
            constraint=self.constraint,
            cache_breakpoints=self.cache_breakpoints,
            logprobs_from=self.logprobs_from,
            pooling=self.pooling,
        )


@dataclass
class Run:
    """What a run of jobs gave: their requests, in order, and how far the engine's counters moved."""

    requests: list[Request]
    moved: dict[str, float]

    @property
    def outputs(self) -> list[list[int]]:
        return [request.output.token_ids for request in self.requests]

    @property
    def bits(self) -> list[tuple]:
        """Tokens and the exact bits of their log-probabilities."""
        return [
            (
                tuple(r.output.token_ids),
                np.float32([e.logprob for e in r.output.logprobs]).tobytes().hex(),
            )
            + tuple(tuple(entry.top) for entry in r.output.logprobs)
            for r in self.requests
        ]

    @property
    def folds(self) -> float:
        return self.moved["folds_in_place"] + self.moved["folds_to_new"]

    @property
    def cached(self) -> list[int]:
        return [request.hit.num_tokens for request in self.requests]


def drive(
    engine: Engine,
    jobs: Sequence[Job],
    poison: Poison | None = None,
    forget_at: frozenset[int] = frozenset(),
    check_every: int = 1,
) -> Run:
    """Runs jobs to their ends, checking the scheduler's books after every step, or so many.

    Args:
        engine: without work. jobs: what to add to it and when.
        poison: spread between the steps at its own moments.
        forget_at: steps after which the prefix cache is emptied while requests run.
        check_every: steps from one check of the books to the next.
    """
    before = engine.stats()
    requests = [job.request(f"job-{index}") for index, job in enumerate(jobs)]
    waiting = sorted(zip(jobs, requests, strict=True), key=lambda pair: pair[0].arrive)
    aborting = [(j, r) for j, r in zip(jobs, requests, strict=True) if j.abort_at is not None]
    step = 0
    while waiting or engine.has_work:
        while waiting and waiting[0][0].arrive <= step:
            engine.add(waiting.pop(0)[1])
        engine.step()
        if step % check_every == 0:
            engine.scheduler.check_invariants()
        for job, request in aborting:
            if (
                request.output.finish_reason is None
                and len(request.output.token_ids) >= job.abort_at
            ):
                engine.abort(request.request_id)
                engine.scheduler.check_invariants()
        if step in forget_at:
            engine.reset_prefix_cache()
        if poison is not None:
            poison.sometimes()
        step += 1
        assert step < 10_000, "drive: the engine makes no progress"
    after = engine.stats()
    return Run(requests, {name: after[name] - before[name] for name in before})


def random_prompt(length: int, seed: int, vocab: int) -> tuple[int, ...]:
    """Token ids, the same for the same seed; a longer one begins with the shorter."""
    return tuple(np.random.default_rng(seed).integers(0, vocab, 512)[:length].tolist())


def generate(engine, length: int = 20, count: int = 1, max_tokens: int = 6) -> list[list[int]]:
    """The engine's tokens after random prompts."""
    prompts = np.random.default_rng(length).integers(0, VOCAB, (count, length)).tolist()
    jobs = [Job(prompt=tuple(ids), max_tokens=max_tokens, logprobs=None) for ids in prompts]
    return drive(engine, jobs).outputs


def conversations(vocab: int, rounds: int = 3) -> list[Job]:
    """Prompts that come back, each longer than before, when the arena has long given their beginnings away."""
    rng, jobs = Random(1), []
    prompts = [
        random_prompt(40, 100 + n // 3, vocab) + random_prompt(30 + 11 * n, n, vocab)
        for n in range(7)
    ]
    for turn in range(rounds):
        rng.shuffle(prompts)
        for place, prompt in enumerate(prompts):
            count = 4 + 7 * (place % 3)
            jobs.append(Job(prompt=prompt, max_tokens=count, arrive=9 * len(jobs)))
            prompts[place] = prompt + random_prompt(9, 50 * turn + place, vocab)
    return jobs
