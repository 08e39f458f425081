"""How far a model with a cut is from the model without, its teacher, on given tokens."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hybrid_jax.config import ModelConfig
from hybrid_jax.models import decoder
from hybrid_jax.weights.cut import with_tensors

TEMPERATURE = 2.0  # of the soft distance (SwiftKV, arXiv 2410.03960, section 3.3)


class Distances(NamedTuple):
    """How far a model with a cut is from its teacher on some tokens, as float32 scalars.

    Attributes:
        kl: nats of KL(teacher, model) a token, at temperature 1.
        soft_kl: the same at the temperature that is trained at, times its square.
        nats: of the tokens that follow, by the model. teacher_nats: the same by the teacher.
        agreement: share of tokens whose most likely next token is the same.
        hidden: mean square of the difference of the hidden states in front of the last layer.
        exit_kl, exit_soft_kl, exit_agreement: of the head on the cut, as those of the model; 0 without one.
    """

    kl: jax.Array
    soft_kl: jax.Array
    nats: jax.Array
    teacher_nats: jax.Array
    agreement: jax.Array
    hidden: jax.Array
    exit_kl: jax.Array
    exit_soft_kl: jax.Array
    exit_agreement: jax.Array


def distances(
    tensors: dict[str, Any],
    params: dict,
    teacher: dict,
    tokens: jax.Array,
    counts: jax.Array,
    config: ModelConfig,
    base: ModelConfig,
) -> Distances:
    """Runs both models over whole rows from nothing.

    Args:
        tensors: what is trained, as `weights.cut.own_tensors` names it. params: the other weights of the model with the
            cut. teacher: weights of the model without.
        tokens: int32[B, T + 1]; the last one of a row is only predicted.
        counts: bool[B, T] tokens whose prediction counts.
        config, base: of the model with the cut, and of the teacher.
    """
    cut = config.cut
    assert cut is not None, "the model has a cut"
    given, following = tokens[:, :-1], tokens[:, 1:]
    lengths = jnp.full(given.shape[0], given.shape[1], jnp.int32)
    valid, mix = decoder.whole_sequences(given, lengths)
    stream = decoder.enter(teacher, given, valid, base)
    stream = decoder.through(teacher, stream, valid, range(cut), base, mix)
    stream = jax.lax.stop_gradient(stream)

    def rest(weights: dict, of: ModelConfig) -> tuple[jax.Array, jax.Array]:
        """Log-probabilities [B, T, V], and the stream in front of the last layer."""
        _, mix = decoder.whole_sequences(given, lengths)
        last = len(of.layers) - 1
        before = decoder.through(weights, stream, valid, range(cut, last), of, mix)
        after = decoder.through(weights, before, valid, range(last, last + 1), of, mix)
        h = decoder.leave(weights, after, valid, of)
        said = jax.nn.log_softmax(decoder.logits(weights, h, of), axis=-1)
        return said, decoder.leave(weights, before, valid, of)

    wanted, hidden = jax.lax.stop_gradient(rest(teacher, base))
    student = with_tensors(params, tensors)
    said, own_hidden = rest(student, config)

    def mean(values: jax.Array) -> jax.Array:
        return jnp.where(counts, values, 0).sum() / counts.sum().astype(jnp.float32)

    def nats(log_probabilities: jax.Array) -> jax.Array:
        return -mean(jnp.take_along_axis(log_probabilities, following[..., None], axis=-1)[..., 0])

    def kl(said: jax.Array, temperature: float) -> jax.Array:
        p, q = (jax.nn.log_softmax(x / temperature, axis=-1) for x in (wanted, said))
        return temperature**2 * mean((jnp.exp(p) * (p - q)).sum(-1))

    def agreement(said: jax.Array) -> jax.Array:
        return mean((said.argmax(-1) == wanted.argmax(-1)).astype(jnp.float32))

    none = jnp.float32(0)
    early = {"exit_kl": none, "exit_soft_kl": none, "exit_agreement": none}
    if config.exit_head:
        h = decoder.leave(student, stream, valid, config)
        left = jax.nn.log_softmax(decoder.exit_logits(student, h, config), axis=-1)
        early = {"exit_kl": kl(left, 1.0), "exit_soft_kl": kl(left, TEMPERATURE)}
        early["exit_agreement"] = agreement(left)
    return Distances(
        kl=kl(said, 1.0),
        soft_kl=kl(said, TEMPERATURE),
        nats=nats(said),
        teacher_nats=nats(wanted),
        agreement=agreement(said),
        hidden=mean(jnp.square((own_hidden - hidden).astype(jnp.float32)).mean(-1)),
        **early,
    )


measured = functools.partial(jax.jit, static_argnames=("config", "base"))(distances)


def measure(
    tensors: dict[str, Any],
    params: dict,
    teacher: dict,
    config: ModelConfig,
    base: ModelConfig,
    rows: tuple[np.ndarray, np.ndarray],
    at_a_time: int = 2,
) -> dict[str, float]:
    """`Distances` on rows of tokens, as means over the tokens.

    Args:
        tensors, params, teacher, config, base: as of `distances`.
        rows: tokens int32[N, T + 1] and lengths int32[N], as `train.data.segments` returns them.

    Returns:
        Also "perplexity_ratio", of the model to its teacher, and "nats_error", the standard error of the difference of
        their nats, as the rows of a call give it.
    """
    tokens, lengths = rows
    sums, sizes, lost = [], [], []
    for start in range(0, len(tokens), at_a_time):
        part, lens = tokens[start : start + at_a_time], lengths[start : start + at_a_time]
        spare = ((0, at_a_time - len(part)), (0, 0))
        counts = np.pad(np.arange(tokens.shape[1] - 1) < lens[:, None], spare)
        found = measured(tensors, params, teacher, np.pad(part, spare), counts, config, base)
        sums.append([float(value) for value in found])
        lost.append(float(found.nats - found.teacher_nats))
        sizes.append(int(counts.sum()))
    means = dict(zip(Distances._fields, np.average(sums, axis=0, weights=sizes), strict=True))
    off = np.subtract(lost, np.average(lost, weights=sizes))
    variance = float(np.average(np.square(off), weights=sizes))
    if not config.exit_head:
        means = {name: value for name, value in means.items() if not name.startswith("exit_")}
    means["perplexity_ratio"] = math.exp(means["nats"] - means["teacher_nats"])
    means["nats_error"] = math.sqrt(variance / max(len(sums) - 1, 1))
    return {name: round(float(value), 6) for name, value in means.items()}
