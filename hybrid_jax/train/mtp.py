"""Training of a head for multi-token prediction beside a model that stays as it is."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from hybrid_jax.config import ModelConfig
from hybrid_jax.models import decoder, mtp
from hybrid_jax.models.files import CONFIG_FILE
from hybrid_jax.models.initialize import random_params
from hybrid_jax.process.own_settings import own_settings
from hybrid_jax.train import TrainOptions
from hybrid_jax.train.data import Corpus, segments
from hybrid_jax.train.export import rounded, training_record, write_model
from hybrid_jax.train.loop import Report, Training, muon_and_adam, stepped, tiny_fields
from hybrid_jax.weights import load_config, load_model
from hybrid_jax.weights.digest import weights_digest

DEPTH = 3  # how many entries are trained to follow one another
DEPTH_WEIGHTS = (1.0, 0.7, 0.5)
MEASURED_ROWS = 24  # of the measurements between steps
RECORD_FILE = "mtp_training_record.json"


def depth_losses(
    head: dict, params: dict, tokens: jax.Array, config: ModelConfig
) -> tuple[jax.Array, jax.Array]:
    """How far the head is from the model, and how often it says what the model says, at each depth.

    At depth d an entry takes the hidden state of the entry before it at depth d - 1; at depth 1, the model's.

    Args:
        head: the head's weights. params: the model's.
        tokens: int32[B, T].

    Returns:
        float32[DEPTH] nats of KL(model, head), and float32[DEPTH] shares of equal most likely tokens.
    """
    whole = {**params, "mtp": head}
    lengths = jnp.full(tokens.shape[0], tokens.shape[1], jnp.int32)
    valid, mix = decoder.whole_sequences(tokens, lengths)
    h = decoder.walk(params, tokens, valid, config, mix)
    hidden = jax.lax.stop_gradient(decoder.normed_hidden(params, h, config))
    teacher = jax.nn.log_softmax(
        jax.lax.stop_gradient(decoder.head_logits(params, hidden, config)), axis=-1
    )
    best = teacher.argmax(-1)
    losses, agreed = [], []
    for depth in range(1, DEPTH + 1):
        # Entries of positions depth .. T - 1, each after the one of the position before.
        own = tokens[:, depth:]
        hidden = mtp.forward(whole, own, hidden[:, :-1], lengths - depth, config)
        said = jax.nn.log_softmax(decoder.head_logits(params, hidden, config), axis=-1)
        wanted = teacher[:, depth:]
        losses.append((jnp.exp(wanted) * (wanted - said)).sum(-1).mean())
        agreed.append((said.argmax(-1) == best[:, depth:]).mean())
    return jnp.stack(losses), jnp.stack(agreed)


@functools.partial(jax.jit, static_argnames="config", donate_argnums=0)
def train_step(
    arrays: dict, params: dict, tokens: jax.Array, rate: jax.Array, config: ModelConfig
) -> tuple[dict, jax.Array]:
    """One step of the head on tokens int32[B, T]; the new {"params", "optimizer"} and the loss of depth 1."""

    def loss(head: dict) -> tuple[jax.Array, jax.Array]:
        losses, _ = depth_losses(head, params, tokens, config)
        return losses @ jnp.array(DEPTH_WEIGHTS), losses[0]

    (_, first), gradients = jax.value_and_grad(loss, has_aux=True)(arrays["params"])
    return stepped(muon_and_adam(), arrays, gradients, rate), first


measured = jax.jit(depth_losses, static_argnames="config")


def agreement(
    head: dict, params: dict, config: ModelConfig, corpus: Corpus, context: int, rows: int | None
) -> list[float]:
    """Shares of equal most likely tokens on held-out files, by depth, from so many rows; None for all there are."""
    tokens, _ = segments(corpus.held_out, context, rows, full=True)
    found = [
        np.asarray(measured(head, params, tokens[i : i + 2, :-1], config)[1])
        for i in range(0, len(tokens) - 1, 2)
    ]
    return np.mean(found, axis=0).round(4).tolist()


def first_head(params: dict, config: ModelConfig, seed: int) -> dict:
    """Random weights of a head, but for its layers: those begin as the model's last layer with the same mixer."""
    head = random_params(config, seed)["mtp"]
    for number, layer in enumerate(config.mtp):
        alike = [i for i, other in enumerate(config.layers) if other == layer]
        if alike:
            head["layers"][number] = jax.tree.map(jnp.array, params["layers"][alike[-1]])
    return head


@own_settings()
def train(
    out_dir: Path,
    model: Path,
    options: TrainOptions,
    *,
    resume: bool,
    sources: str | Path | Sequence[str | Path] | None,
    progress: bool,
) -> dict:
    """Does what `hybrid_jax.train.train_mtp` says; the arguments are as there."""
    if out_dir.resolve() == model.resolve():
        raise ValueError(
            f"train: {out_dir} holds the model, which would be overwritten; give another directory for model and head"
        )
    config = replace(load_config(model, mtp=True), dtype="float32")
    fields = tiny_fields(config=str(model / CONFIG_FILE))
    training = Training(out_dir, options, sources, progress)
    _, params = load_model(model, dtype="float32")
    digest = weights_digest(config, params)
    arrays, at = training.start(
        first_head(params, config, options.seed), config, resume, weights=digest
    )

    def step(arrays: dict, tokens: jax.Array, rate: jax.Array) -> tuple[dict, jax.Array]:
        return train_step(arrays, params, tokens[:, :-1], rate, config)

    def measure(head: dict, report: Report) -> None:
        shares = agreement(head, params, config, training.corpus, options.context, MEASURED_ROWS)
        at.history.append({"step": at.step, "agreement": shares})
        report.say(f"step {at.step}  agreement by depth {shares}")

    arrays = training.run(arrays, at, step, measure)
    whole = rounded(params | {"mtp": arrays["params"]}, config)
    shares = agreement(whole["mtp"], params, config, training.corpus, options.context, None)
    held_out = {"agreement": shares}
    about = (training.corpus, training.options, at, training.sources, held_out)
    record = training_record(config, whole["mtp"], *about, command="train_mtp")
    write_model(out_dir, whole, fields, config.mtp)
    (out_dir / RECORD_FILE).write_text(json.dumps(record, indent=1) + "\n")
    return record
