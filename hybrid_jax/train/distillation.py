"""Distillation of a model with a cut (SwiftKV, arXiv 2410.03960, section 3.3) from the model without, its teacher.

The teacher stays as it is. Both share its layers before the cut, so these run once. What is trained: what the cut's
output is multiplied with, the norm at the cut, and what makes the queries and gates of later layers.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hybrid_jax.config import ModelConfig, with_cut
from hybrid_jax.models import decoder
from hybrid_jax.models.cut import cut_params
from hybrid_jax.models.decoder import Stream
from hybrid_jax.models.files import CONFIG_FILE
from hybrid_jax.train import TrainOptions
from hybrid_jax.train.data import Corpus, segments
from hybrid_jax.train.export import training_record
from hybrid_jax.train.loop import QUICK_ROWS, Report, Training, stepped, tiny_fields
from hybrid_jax.weights import load_config, load_model
from hybrid_jax.weights.cut import own_tensors, save_cut, with_tensors
from hybrid_jax.weights.digest import weights_digest

TEMPERATURE = 2.0
RECORD_FILE = "distillation_record.json"


class Distances(NamedTuple):
    """How far a model with a cut is from its teacher on some tokens, as float32 scalars.

    Attributes:
        kl: nats of KL(teacher, model) a token, at temperature 1.
        soft_kl: the same at the temperature that is trained at, times its square.
        nats: of the tokens that follow, by the model. teacher_nats: the same by the teacher.
        agreement: share of tokens whose most likely next token is the same.
        hidden: mean square of the difference of the last hidden states but one layer's, before the last layer.
    """

    kl: jax.Array
    soft_kl: jax.Array
    nats: jax.Array
    teacher_nats: jax.Array
    agreement: jax.Array
    hidden: jax.Array


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
    assert config.cut is not None, "the model has a cut"
    given, following = tokens[:, :-1], tokens[:, 1:]
    lengths = jnp.full(given.shape[0], given.shape[1], jnp.int32)
    valid, mix = decoder.whole_sequences(given, lengths)
    stream = decoder.enter(teacher, given, valid, base)
    stream = decoder.through(teacher, stream, valid, range(config.cut), base, mix)
    stream = jax.lax.stop_gradient(stream)

    def rest(weights: dict, of: ModelConfig) -> tuple[jax.Array, jax.Array]:
        """Log-probabilities [B, T, V], and the stream in front of the last layer."""
        _, mix = decoder.whole_sequences(given, lengths)
        last = len(of.layers) - 1
        before = decoder.through(weights, stream, valid, range(config.cut, last), of, mix)
        after = decoder.through(weights, before, valid, range(last, last + 1), of, mix)
        h = decoder.leave(weights, after, valid, of)
        said = jax.nn.log_softmax(decoder.logits(weights, h, of), axis=-1)
        return said, decoder.leave(weights, _settled(before), valid, of)

    wanted, hidden = jax.lax.stop_gradient(rest(teacher, base))
    said, own_hidden = rest(with_tensors(params, tensors), config)

    def mean(values: jax.Array) -> jax.Array:
        return jnp.where(counts, values, 0).sum() / counts.sum().astype(jnp.float32)

    def nats(log_probabilities: jax.Array) -> jax.Array:
        return -mean(jnp.take_along_axis(log_probabilities, following[..., None], axis=-1)[..., 0])

    def kl(temperature: float) -> jax.Array:
        p, q = (jax.nn.log_softmax(x / temperature, axis=-1) for x in (wanted, said))
        return temperature**2 * mean((jnp.exp(p) * (p - q)).sum(-1))

    return Distances(
        kl=kl(1.0),
        soft_kl=kl(TEMPERATURE),
        nats=nats(said),
        teacher_nats=nats(wanted),
        agreement=mean((said.argmax(-1) == wanted.argmax(-1)).astype(jnp.float32)),
        hidden=mean(jnp.square((own_hidden - hidden).astype(jnp.float32)).mean(-1)),
    )


def _settled(stream: Stream) -> Stream:
    """A stream whose last update may be missing, as `decoder.leave` takes it."""
    return stream if stream.update is not None else stream._replace(update=jnp.zeros_like(stream.h))


measured = functools.partial(jax.jit, static_argnames=("config", "base"))(distances)


class Goal(NamedTuple):
    """What is trained for.

    Attributes:
        loss: "kl" is the teacher's distribution at `TEMPERATURE`; "lm" is the tokens that follow.
        hidden: weight of `Distances.hidden` beside it.
    """

    loss: str = "kl"
    hidden: float = 0.0


def adam() -> optax.GradientTransformation:
    """At rate 1, so that steps are multiplied with the rate in force."""
    return optax.adam(1.0, b1=0.9, b2=0.999)


@functools.partial(jax.jit, static_argnames=("config", "base", "goal"), donate_argnames=("arrays",))
def train_step(
    arrays: dict,
    params: dict,
    teacher: dict,
    tokens: jax.Array,
    rate: jax.Array,
    config: ModelConfig,
    base: ModelConfig,
    goal: Goal,
) -> tuple[dict, jax.Array]:
    """One step on tokens int32[B, T + 1]: the new {"params", "optimizer"}, and KL(teacher, model) in nats."""
    counts = jnp.ones((tokens.shape[0], tokens.shape[1] - 1), bool)

    def loss(tensors: dict) -> tuple[jax.Array, jax.Array]:
        found = distances(tensors, params, teacher, tokens, counts, config, base)
        aim = found.soft_kl if goal.loss == "kl" else found.nats
        return aim + goal.hidden * found.hidden, found.kl

    (_, kl), gradients = jax.value_and_grad(loss, has_aux=True)(arrays["params"])
    return stepped(adam(), arrays, gradients, rate), kl


def held_out(
    tensors: dict[str, Any],
    params: dict,
    teacher: dict,
    config: ModelConfig,
    base: ModelConfig,
    corpus: Corpus,
    context: int,
    limit: int | None,
    rows: int = 2,
) -> dict[str, float]:
    """`Distances` on held-out files, means over tokens.

    Args:
        context, limit: as of `evaluate.bits_per_byte`. rows: at a time.
    """
    tokens, lengths = segments(corpus.held_out, context, limit)
    sums, total = np.zeros(len(Distances._fields)), 0
    for start in range(0, len(tokens), rows):
        part, lens = tokens[start : start + rows], lengths[start : start + rows]
        spare = ((0, rows - len(part)), (0, 0))
        counts = np.pad(np.arange(context) < lens[:, None], spare)
        found = measured(tensors, params, teacher, np.pad(part, spare), counts, config, base)
        sums += np.array([float(value) for value in found]) * counts.sum()
        total += int(counts.sum())
    return dict(zip(Distances._fields, (sums / total).tolist(), strict=True))


def train(
    out_dir: Path,
    model: Path,
    options: TrainOptions,
    *,
    cut: int,
    kv_group: int,
    state_group: int,
    goal: Goal,
    resume: bool,
    sources: str | Path | Sequence[str | Path] | None,
    progress: bool,
) -> dict:
    """Does what `hybrid_jax.train.distill` says; the arguments are as there."""
    base = replace(load_config(model), dtype="float32")
    tiny_fields(config=str(model / CONFIG_FILE))  # tokens must be bytes
    config = with_cut(base, cut, kv_group=kv_group, state_group=state_group)
    if config.cut is None:
        raise ValueError(
            f"distill: cut must be below the number of layers, {len(base.layers)}, got {cut}"
        )
    training = Training(out_dir, options, sources, progress)
    _, teacher = load_model(model, dtype="float32")
    params = cut_params(teacher, config)
    start = own_tensors(params, config)
    arrays, at = training.start(
        *(jax.tree.map(jnp.array, start), config, resume),  # copies: steps give theirs away
        optimizer=adam(),
        weights=weights_digest(base, teacher),
        goal=repr(goal),
    )

    def distances_of(tensors: dict, limit: int | None) -> dict[str, float]:
        about = (config, base, training.corpus, options.context, limit)
        return held_out(tensors, params, teacher, *about)

    def step(arrays: dict, tokens: jax.Array, rate: jax.Array) -> tuple[dict, jax.Array]:
        return train_step(arrays, params, teacher, tokens, rate, config, base, goal)

    def measure(tensors: dict, report: Report) -> None:
        found = distances_of(tensors, QUICK_ROWS)
        at.history.append({"step": at.step} | rounded_numbers(found))
        report.say(f"step {at.step}  KL {found['kl']:.4f} nats  agreement {found['agreement']:.3f}")

    arrays = training.run(arrays, at, step, measure)
    stored = load_config(model).dtype
    tensors = {
        name: leaf.astype(stored).astype(leaf.dtype) for name, leaf in arrays["params"].items()
    }
    measured_at = {"untrained": distances_of(start, None), "trained": distances_of(tensors, None)}
    for found in measured_at.values():
        found["perplexity_ratio"] = math.exp(found["nats"] - found["teacher_nats"])
    lost = [found["nats"] - found["teacher_nats"] for found in measured_at.values()]
    about = (training.corpus, training.options, at, training.sources)
    results = {name: rounded_numbers(found) for name, found in measured_at.items()}
    results["recovered"] = round(1 - lost[1] / lost[0], 4) if lost[0] else None
    record = training_record(config, tensors, *about, results, command="distill")
    record |= {"cut": cut, "kv_group": kv_group, "state_group": state_group, "goal": goal._asdict()}
    save_cut(out_dir, config, tensors, base=model, dtype=stored)
    (out_dir / RECORD_FILE).write_text(json.dumps(record, indent=1) + "\n")
    return record


def rounded_numbers(found: dict[str, float]) -> dict[str, float]:
    """The same numbers with five digits behind the point."""
    return {name: round(value, 5) for name, value in found.items()}
