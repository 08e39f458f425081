"""What an engine should answer: the plain definition, against which finished requests are judged.

The definition is `models.decoder.forward` over the whole sequence, no cache, one compiled shape, and
`sampling.sample` on its logits. It is asked once per finished request, with the request's own output fed in:
each output token must be the one that the definition chooses after the tokens before it. By induction
that is the plain token-by-token loop, and after a mismatch the remaining tokens are still judged.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from hybrid_jax.config import XLA, ModelConfig
from hybrid_jax.engine.sampling import SamplingRows
from hybrid_jax.models import decoder
from hybrid_jax.models.matrices import with_matrices
from hybrid_jax.schedule.request import Request
from pallas_kernels.token_sampling.numbers import token_noise
from pallas_kernels.token_sampling.xla import keep_likely
from tests.exactness.jobs import Job
from tests.kernels.sampling_rows import arrays_of

# Executables may differ in the last bits. A token may differ only where the definition finds it within
# this much of its own choice, in logits over temperature plus noise.
GAP = 1e-4
# Log-probabilities of the chosen tokens agree this well, so a leak shows before it turns a token over.
LOGPROB_ERROR = 3e-4
# For FP8 pages: where two executables round a key or a value to neighbouring FP8 numbers.
FP8_GAP, FP8_LOGPROB_ERROR = 2e-3, 2e-3


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
        kv_dtype: as of `decoder.forward`.
        excused: mismatches within the gap, ever.
        num_tokens: output tokens judged, ever.
    """

    config: ModelConfig
    params: dict
    kv_dtype: str | None = None
    width: int = 256
    rows: int = 4
    excused: list[Mismatch] = field(default_factory=list)
    num_tokens: int = 0

    @property
    def gap(self) -> float:
        """By how much the definition may prefer its own token."""
        return GAP if self.kv_dtype is None else FP8_GAP

    @property
    def logprob_error(self) -> float:
        """By how much log-probabilities may be off."""
        return LOGPROB_ERROR if self.kv_dtype is None else FP8_LOGPROB_ERROR

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
            "temperature": np.float32([r.params.engine_temperature for r in padded]),
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
        how = {"config": self.config, "kv_dtype": self.kv_dtype}
        answers = _define(self.params, tokens, lengths, columns, penalties, **how)
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
                for index in range(len(request.output.token_ids)):
                    words = request.constraint.mask(request.output.token_ids[:index])
                    bits = np.unpackbits(words.view(np.uint8), bitorder="little")[:vocab]
                    bias[row, len(request.prompt) + index - 1, bits == 0] = -np.inf
        return bias

    def _judge(self, requests: Sequence[Request]) -> list[Mismatch]:
        logits, scores, choices = self._answers(requests)
        found = []
        for row, request in enumerate(requests):
            first = len(request.prompt)
            self.num_tokens += len(request.output.token_ids)
            for index, got in enumerate(request.output.token_ids):
                place = (row, first + index - 1)
                want = int(choices[place])
                if got != want:
                    gap = float(scores[place][want] - scores[place][got])
                    mismatch = Mismatch(request.request_id, first + index, got, want, gap)
                    (self.excused if gap <= self.gap else found).append(mismatch)
                if request.output.logprobs:
                    entry = request.output.logprobs[index]
                    found += self._logprob(request, first + index, logits[place], entry)
            found += _endings(request)
            if (
                request.params.prompt_logprobs is not None
                and request.output.finish_reason != "abort"
            ):
                known = request.logprobs_from
                assert (
                    len(request.output.prompt_logprobs) == first and request.hit.num_tokens < known
                )
                assert request.output.prompt_logprobs[:known] == [None] * known
                for index, entry in enumerate(request.output.prompt_logprobs[known:], start=known):
                    assert entry.token_id == request.prompt[index]
                    found += self._logprob(request, index, logits[row, index - 1], entry)
        pooling = [request for request in requests if request.pooling is not None]
        return found + [mismatch for request in pooling for mismatch in self._pooled(request)]

    def _pooled(self, request: Request) -> list[Mismatch]:
        """What is wrong with the hidden states that a request asked for."""
        first, tokens = len(request.prompt), np.zeros((1, self.width), np.int32)
        tokens[0, :first] = request.prompt
        how = {"config": self.config, "kv_dtype": self.kv_dtype}
        hidden = np.asarray(_hidden(self.params, tokens, np.int32([first]), **how))[0, :first]
        want = hidden[-1] if request.pooling == "last" else hidden.sum(axis=0)
        error = np.abs(want - request.output.pooled).max() / np.abs(want).max()
        if error <= self.logprob_error:  # NaN is a mismatch
            return []
        return [Mismatch(request.request_id, first, 0, 0, float(error))]

    def _logprob(
        self, request: Request, position: int, logits: np.ndarray, entry
    ) -> list[Mismatch]:
        """What is wrong with the log-probability of one token, by the logits before it."""
        logits, got = logits.astype(np.float64), entry.token_id
        peak = logits.max()
        error = abs(logits[got] - peak - np.log(np.exp(logits - peak).sum()) - entry.logprob)
        if error <= self.logprob_error:  # NaN is a mismatch
            return []
        return [Mismatch(request.request_id, position, got, got, error)]


def _endings(request: Request) -> list[Mismatch]:
    """Ended where it had to: at the first stop token, or at its limit."""
    stops = [i for i, token in enumerate(request.output.token_ids) if token in request.stop_ids]
    end = stops[0] + 1 if stops else request.max_tokens
    reason = "stop" if stops else "length"
    if (
        request.constraint is not None
        and not request.constraint.mask(request.output.token_ids).any()
    ):
        end, reason = len(request.output.token_ids), "stop"
    if request.output.finish_reason == "abort" or (
        len(request.output.token_ids) == end and request.output.finish_reason == reason
    ):
        return []
    return [
        Mismatch(
            request.request_id, len(request.tokens), len(request.output.token_ids), end, np.inf
        )
    ]


@functools.partial(jax.jit, static_argnames=("config", "kv_dtype"))
def _hidden(params, tokens, lengths, *, config, kv_dtype):
    """Hidden states after the last norm, float32[R, T, D]."""
    params = with_matrices(params, config, XLA)
    valid, mix = decoder.whole_sequences(tokens, lengths, kv_dtype)
    h = decoder.walk(params, tokens, valid, config, mix)
    return decoder.normed_hidden(params, h, config).astype(jnp.float32)


@functools.partial(jax.jit, static_argnames=("config", "kv_dtype"))
def _define(params, tokens, lengths, columns, penalties, *, config, kv_dtype):
    """Logits [R, T, V], scores (what argmax sees) and the token chosen after each position [R, T]."""
    params = with_matrices(params, config, XLA)
    logits = decoder.forward(params, tokens, config, lengths=lengths, kv_dtype=kv_dtype)
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
    arrays = arrays_of(scaled, chooser, positions)
    noise = token_noise(arrays.noise_keys(), jnp.arange(vocab)[None])
    drawn = keep_likely(scaled, arrays) + noise
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
