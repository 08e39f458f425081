"""Drives an engine over jobs, poisons what nobody may read, and compares with the plain definition.

The definition is `models.decoder.forward` over the whole sequence, no cache, one compiled shape, and
`sampling.sample` on its logits. It is asked once per finished request, with the request's own output fed in:
each output token must be the one that the definition chooses after the tokens before it. By induction
that is the plain token-by-token loop, and after a mismatch the remaining tokens are still judged.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from hybrid_jax.config import CacheConfig, EngineConfig, ModelConfig
from hybrid_jax.engine import bucket, sampling
from hybrid_jax.engine.engine import Engine
from hybrid_jax.engine.request import Constraint, Request
from hybrid_jax.engine.sampling import SamplingRows
from hybrid_jax.engine.scheduler import Scheduler
from hybrid_jax.engine.sequence import Phase
from hybrid_jax.engine.sizing import choose_sizes
from hybrid_jax.geometry import Geometry, make_geometry
from hybrid_jax.models import decoder
from hybrid_jax.sampling_params import SamplingParams
from hybrid_jax.state import State

# Executables may differ in the last bits. A token may differ only where the definition finds it within
# this much of its own choice, in logits over temperature plus noise.
GAP = 1e-4
# Log-probabilities of the chosen tokens agree this well, so a leak shows before it turns a token over.
LOGPROB_ERROR = 3e-4


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
            group=self.group,
            stop_ids=self.stop_ids,
            max_tokens=self.max_tokens,
            constraint=self.constraint,
        )


@dataclass
class Run:
    """What a run of jobs gave: their requests, in order, and how far the engine's counters moved."""

    requests: list[Request]
    moved: dict[str, float]

    @property
    def outputs(self) -> list[list[int]]:
        return [request.output for request in self.requests]

    @property
    def bits(self) -> list[tuple]:
        """Tokens and the exact bits of their log-probabilities."""
        return [
            (tuple(r.output), np.float32([e.logprob for e in r.logprobs]).tobytes().hex())
            + tuple(tuple(entry.top) for entry in r.logprobs)
            for r in self.requests
        ]

    @property
    def folds(self) -> float:
        return self.moved["folds_in_place"] + self.moved["folds_to_new"]

    @property
    def cached(self) -> list[int]:
        return [request.num_cached_tokens for request in self.requests]


def drive(
    engine: Engine,
    jobs: Sequence[Job],
    poison: Poison | None = None,
    forget_at: frozenset[int] = frozenset(),
) -> Run:
    """Runs jobs to their ends, checking the scheduler's books after every step.

    Args:
        engine: without work. jobs: what to add to it and when.
        poison: spread between the steps at its own moments.
        forget_at: steps after which the prefix cache is emptied while requests run.
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
        engine.scheduler.check_invariants()
        for job, request in aborting:
            if request.finish_reason is None and len(request.output) >= job.abort_at:
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


# --- the definition -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mismatch:
    """An output token the definition would not have chosen, or a log-probability that is off.

    Attributes:
        request: its id. position: absolute position of the token. got, want: token ids.
        gap: by how much the definition prefers its own; how far the log-probability is off.
    """

    request: str
    position: int
    got: int
    want: int
    gap: float


@dataclass
class Plain:
    """The definition of one model.

    Attributes:
        excused: mismatches within `GAP`, ever.
        num_tokens: output tokens judged, ever.
    """

    config: ModelConfig
    params: dict
    width: int = 256
    rows: int = 4
    excused: list[Mismatch] = field(default_factory=list)
    num_tokens: int = 0

    def mismatches(self, requests: Sequence[Request]) -> list[Mismatch]:
        """Everything about the requests' outputs that the definition does not confirm or excuse."""
        found = []
        for begin in range(0, len(requests), self.rows):
            found += self._judge(requests[begin : begin + self.rows])
        return found

    def greedy_loop(self, prompt: Sequence[int], count: int) -> list[int]:
        """The definition in its plainest form: one forward per token."""
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self._run(tokens)[0][0, len(tokens) - 1].argmax()))
        return tokens[len(prompt) :]

    def _run(self, tokens: list[int]) -> tuple:
        request = Job(prompt=tuple(tokens)).request("loop")
        return self._answers([request])

    def _answers(self, requests: Sequence[Request]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        tokens = np.zeros((self.rows, self.width), np.int32)
        lengths = np.ones(self.rows, np.int32)
        for row, request in enumerate(requests):
            lengths[row] = len(request.tokens)
            tokens[row, : lengths[row]] = request.tokens
        padded = [*requests, *[requests[0]] * (self.rows - len(requests))]
        columns = {
            "seed": np.uint32([(r.seed & 0xFFFFFFFF, r.seed >> 32) for r in padded]),
            "sample_index": np.int32([r.sample_index for r in padded]),
            "temperature": np.float32([r.params.temperature for r in padded]),
            "top_k": np.int32([max(r.params.top_k, 0) for r in padded]),
            "top_p": np.float32([r.params.top_p for r in padded]),
            "min_p": np.float32([r.params.min_p for r in padded]),
            "min_end": np.int32([len(r.prompt) + r.params.min_tokens for r in padded]),
            "stop_ids": np.int32([[*r.stop_ids, *[-1] * (8 - len(r.stop_ids))] for r in padded]),
        }
        penalties = {
            "prompt": np.int32([len(r.prompt) for r in padded]),
            "presence": np.float32([r.params.presence_penalty for r in padded]),
            "frequency": np.float32([r.params.frequency_penalty for r in padded]),
            "repetition": np.float32([r.params.repetition_penalty for r in padded]),
            "bias": self._bias(padded),
        }
        answers = _define(self.params, tokens, lengths, columns, penalties, config=self.config)
        return tuple(np.asarray(part) for part in answers)

    def _bias(self, requests: Sequence[Request]) -> np.ndarray:
        """float32[R, T, V] added to the logits of each position: a bias, -inf for what is not allowed."""
        vocab = self.config.vocab_size
        bias = np.zeros((len(requests), self.width, vocab), np.float32)
        for row, request in enumerate(requests):
            for token, value in request.params.logit_bias:
                bias[row, :, token] = value
            allowed = request.params.allowed_token_ids
            if allowed is not None:
                bias[row][:, [t for t in range(vocab) if t not in allowed]] = -np.inf
            if request.constraint is not None:
                for index in range(len(request.output)):
                    words = request.constraint.mask(request.output[:index])
                    bits = np.unpackbits(words.view(np.uint8), bitorder="little")[:vocab]
                    bias[row, len(request.prompt) + index - 1, bits == 0] = -np.inf
        return bias

    def _judge(self, requests: Sequence[Request]) -> list[Mismatch]:
        logits, scores, choices = self._answers(requests)
        found = []
        for row, request in enumerate(requests):
            first = len(request.prompt)
            self.num_tokens += len(request.output)
            for index, got in enumerate(request.output):
                place = (row, first + index - 1)
                want = int(choices[place])
                if got != want:
                    gap = float(scores[place][want] - scores[place][got])
                    mismatch = Mismatch(request.request_id, first + index, got, want, gap)
                    (self.excused if gap <= GAP else found).append(mismatch)
                if request.logprobs:
                    found += _logprob(
                        request, first + index, logits[place], request.logprobs[index]
                    )
            found += _endings(request)
            if request.params.prompt_logprobs is not None and request.finish_reason != "abort":
                assert len(request.prompt_logprobs) == first and request.num_cached_tokens == 0
                for index, entry in enumerate(request.prompt_logprobs[1:], start=1):
                    assert entry.token_id == request.prompt[index]
                    found += _logprob(request, index, logits[row, index - 1], entry)
        return found


def _logprob(request: Request, position: int, logits: np.ndarray, entry) -> list[Mismatch]:
    """What is wrong with the log-probability of one token, by the logits before it."""
    logits, got = logits.astype(np.float64), entry.token_id
    peak = logits.max()
    error = abs(logits[got] - peak - np.log(np.exp(logits - peak).sum()) - entry.logprob)
    # NaN is a mismatch.
    return (
        [] if error <= LOGPROB_ERROR else [Mismatch(request.request_id, position, got, got, error)]
    )


def _endings(request: Request) -> list[Mismatch]:
    """Ended where it had to: at the first stop token, or at its limit."""
    stops = [i for i, token in enumerate(request.output) if token in request.stop_ids]
    end = stops[0] + 1 if stops else request.max_tokens
    reason = "stop" if stops else "length"
    if request.constraint is not None and not request.constraint.mask(request.output).any():
        end, reason = len(request.output), "stop"
    if request.finish_reason == "abort" or (
        len(request.output) == end and request.finish_reason == reason
    ):
        return []
    return [Mismatch(request.request_id, len(request.tokens), len(request.output), end, np.inf)]


@functools.partial(jax.jit, static_argnames="config")
def _define(params, tokens, lengths, columns, penalties, *, config):
    """Logits [R, T, V], scores (what argmax sees) and the token chosen after each position [R, T]."""
    logits = decoder.forward(params, tokens, config, lengths=lengths)
    rows, width, vocab = logits.shape
    flat = _penalised(logits, tokens, **penalties).reshape(-1, vocab)
    columns = {name: jnp.repeat(value, width, axis=0) for name, value in columns.items()}
    chooser = SamplingRows(**columns)
    positions = jnp.tile(jnp.arange(1, width + 1, dtype=jnp.int32), rows)
    stops = (chooser.stop_ids[:, :, None] == jnp.arange(vocab)).any(1)
    early = positions < chooser.min_end
    flat = jnp.where(stops & early[:, None], -jnp.inf, flat)
    random = (chooser.temperature > 0)[:, None]
    scaled = flat / jnp.where(random, chooser.temperature[:, None], 1.0)
    keys = sampling.noise_keys(chooser, positions)
    noise = sampling.token_noise(keys, jnp.arange(vocab)[None])
    drawn = sampling.keep_likely(scaled, chooser) + noise
    scores = jnp.where(random, drawn, flat)
    return logits, scores.reshape(logits.shape), scores.argmax(-1).reshape(rows, width)


def _penalised(logits, tokens, prompt, presence, frequency, repetition, bias):
    """Bias, then the repetition penalty on prompt and output, then the penalties on the output so far."""
    one = jax.nn.one_hot(tokens, logits.shape[-1])  # [R, T, V]
    inside = jnp.arange(tokens.shape[1])[None] < prompt[:, None]
    generated = jnp.cumsum(jnp.where(inside[..., None], 0.0, one), axis=1)
    in_prompt = jnp.where(inside[..., None], one, 0.0).sum(1, keepdims=True)
    presence, frequency, repetition = (x[:, None, None] for x in (presence, frequency, repetition))
    out = logits + bias
    repeated = jnp.where(out > 0, out / repetition, out * repetition)
    out = jnp.where((generated > 0) | (in_prompt > 0), repeated, out)
    return jnp.where(generated > 0, out - frequency * generated - presence, out)


# --- poison ---------------------------------------------------------------------------------------

_KEEP = np.int32(1 << 30)


class Poison:
    """Writes NaN bits wherever nothing may be read: now everywhere that is free, then at random moments.

    Free frames, the sink, the tails of pages, the ring rows of nobody, and the records past the last one a
    row was planned to write.

    Args:
        engine: whose state is poisoned.
        seed: of the random moments.
        rate: share of the calls of `sometimes` that spread poison.
    """

    def __init__(self, engine: Engine, seed: int = 0, rate: float = 0.4):
        self.engine, self.rate = engine, rate
        self.rng = np.random.default_rng(seed)
        self.num_spread = 0
        self.spread()

    def sometimes(self) -> None:
        if self.rng.random() < self.rate:
            self.spread()

    def spread(self) -> None:
        """Poisons the state between two dispatches."""
        engine, geometry = self.engine, self.engine.geometry
        scheduler, frames = engine.scheduler, engine.scheduler.memory.frames
        num_frames = engine.runner.state.arena.shape[0]  # the scheduler may know of fewer
        whole = np.ones(num_frames, bool)
        tails = np.full(num_frames, _KEEP)
        for frame in range(frames.num_frames):
            whole[frame] = frames.holders(frame) == 0
        num_rows = engine.engine_config.max_rows + 1
        records, columns = np.zeros(num_rows, np.int32), np.zeros(num_rows, np.int32)
        for row, sequence in enumerate(scheduler.seats.rows):
            if sequence is None:
                continue
            if sequence.phase is not Phase.PREFILL:  # a chunk starts from the checkpoint alone
                records[row] = sequence.position - sequence.checkpoint
                committed = records[row] if engine.engine_config.exact else 0
                mixer = engine.config.mamba2
                columns[row] = committed + (mixer.conv_width - 1 if mixer else 0)
            for index, page in enumerate(sequence.pages):
                for frame in page:
                    if frames.holders(frame) == 1:
                        tails[frame] = max(sequence.position - index * geometry.page_tokens, 0)
        engine.runner.state = _fill(
            engine.runner.state,
            whole,
            tails,
            records,
            columns,
            page=(geometry.page_tokens, max(geometry.token_words, 1)),
        )
        self.num_spread += 1


@functools.partial(jax.jit, donate_argnums=0, static_argnames="page")
def _fill(state: State, whole, tails, records, columns, *, page) -> State:
    page_tokens, token_words = page
    token = jnp.arange(state.arena.shape[1]) // token_words
    if page_tokens:
        token = token % page_tokens
    bad = whole[:, None] | (token[None] >= tails[:, None])
    arena = jnp.where(bad, jnp.uint32(0x7FC07FC0), state.arena)

    def ring(array, kept):  # [L, B, S, C]
        past = jnp.arange(array.shape[2])[None] >= kept[:, None]
        value = {4: 0x7FC07FC0, 2: 0x7FC0}[array.dtype.itemsize]
        nan = jnp.nan if array.dtype == jnp.float32 else value
        return jnp.where(past[None, :, :, None], jnp.asarray(nan, array.dtype), array)

    return state.replace(
        arena=arena,
        conv=ring(state.conv, columns),
        xB=ring(state.xB, records),
        dt=ring(state.dt, records),
    )


# --- engines --------------------------------------------------------------------------------------


def frames_for(geometry: Geometry, room: float) -> int:
    """Frames, the sink included, for `room` sequences of 192 tokens with two checkpoints each."""
    sequence = geometry.num_pages(192) * geometry.frames_per_page + 2 * geometry.state_frames
    return 1 + int(room * sequence)


def make_engine(
    config: ModelConfig, params: dict, settings: EngineConfig, *, room: float
) -> Engine:
    """An engine with an arena of `frames_for(room)`."""
    geometry = make_geometry(config, settings)
    fixed = choose_sizes(config, replace(settings, memory=None), geometry).row_bytes
    fixed += 8 * max(geometry.state_frames, 1)
    per_frame = geometry.frame_bytes + (4 if geometry.has_state else 0)
    memory = fixed + frames_for(geometry, room) * per_frame
    return Engine(config, params, replace(settings, memory=memory))


def start_over(engine: Engine, room: float, *, cached: bool = True) -> None:
    """An empty cache, or none, and room for so much: the scheduler is told of a part of the arena only.

    No other shape is compiled for it.
    """
    geometry, sizes = engine.geometry, engine.sizes
    num_frames = frames_for(geometry, room)
    assert not engine.has_work and num_frames <= sizes.num_frames
    slots = 1 + num_frames // geometry.state_frames if geometry.has_state else 2
    engine.scheduler = Scheduler(
        geometry,
        replace(engine.engine_config, cache=CacheConfig(policy="lru" if cached else "off")),
        num_frames=num_frames,
        max_slots=max(2, min(slots, sizes.max_slots)),
        max_model_len=sizes.max_model_len,
    )


@contextlib.contextmanager
def one_shape(tokens: int = 64) -> Iterator[None]:
    """One prefill shape of [2, tokens] and one decode shape: less to compile, more padding to survive."""
    with (
        mock.patch.object(bucket, "prefill_rows", lambda engine: (2,)),
        mock.patch.object(bucket, "prefill_tokens", lambda engine: (tokens,)),
        mock.patch.object(bucket, "decode_rows", lambda engine: (engine.max_rows,)),
    ):
        yield


def random_prompt(length: int, seed: int, vocab: int) -> tuple[int, ...]:
    """Token ids, the same for the same seed; a longer one begins with the shorter."""
    return tuple(np.random.default_rng(seed).integers(0, vocab, 512)[:length].tolist())
