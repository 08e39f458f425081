"""Distillation of a model with a cut (SwiftKV, arXiv 2410.03960, section 3.3) from the model without, its teacher.

The teacher stays as it is. Both share its layers before the cut, so these run once. What is trained: what the cut's
output is multiplied with, the norm at the cut, and what makes the queries and gates of later layers; or all weights of
the later layers.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hybrid_jax.config import ModelConfig, with_inner_cut
from hybrid_jax.kinds.table import model_weights
from hybrid_jax.models.cut import cut_params, exit_params
from hybrid_jax.process.extras import needs_extra
from hybrid_jax.process.own_settings import own_settings
from hybrid_jax.train import TrainOptions
from hybrid_jax.train.data import reading, segments
from hybrid_jax.train.distances import distances, measure
from hybrid_jax.train.export import training_record
from hybrid_jax.train.loop import QUICK_ROWS, Report, Training, stepped
from hybrid_jax.weights import load_config, load_model
from hybrid_jax.weights.cut import own_tensors, save_cut
from hybrid_jax.weights.digest import weights_digest

with needs_extra("train"):
    import optax

RECORD_FILE = "distillation_record.json"
MEASURED_ROWS = 64  # held-out rows of the measurements at the start and at the end


class Goal(NamedTuple):
    """What is trained, and for what.

    Attributes:
        loss: "kl" is the teacher's distribution at `distances.TEMPERATURE`; "lm" is the tokens that follow.
        hidden: weight of `Distances.hidden` beside it.
        all_later: all weights of the layers after the cut are trained.
    """

    loss: str = "kl"
    hidden: float = 0.0
    all_later: bool = False


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
        return aim + goal.hidden * found.hidden + found.exit_soft_kl, found.kl

    (_, kl), gradients = jax.value_and_grad(loss, has_aux=True)(arrays["params"])
    return stepped(adam(), arrays, gradients, rate), kl


@own_settings()
def train(
    out_dir: Path,
    model: Path,
    options: TrainOptions,
    *,
    cut: int,
    kv_group: int,
    state_group: int,
    exit_head: bool,
    goal: Goal,
    resume: bool,
    sources: str | Path | Sequence[str | Path] | None,
    progress: bool,
) -> dict:
    """Does what `hybrid_jax.train.distill` says; the arguments are as there."""
    stored = load_config(model)
    base = replace(stored, dtype="float32")
    groups = {"kv_group": kv_group, "state_group": state_group}
    config = with_inner_cut(base, cut, **groups)
    config = replace(config, exit_head=exit_head)
    training = Training(out_dir, options, sources, progress, *reading(model, sources))
    _, teacher = load_model(model, dtype="float32")
    params = cut_params(teacher, config)
    if exit_head:
        params |= {"exit": exit_params(teacher, config)}
    start = own_tensors(params, config, all_later=goal.all_later)
    arrays, at = training.start(
        jax.tree.map(jnp.array, start),  # copies: steps give theirs away
        config,
        resume,
        optimizer=adam(),
        weights=weights_digest(base, teacher),
        goal=repr(goal),
    )
    rows = segments(training.corpus.held_out, options.context, MEASURED_ROWS, full=True)
    every = -(-len(rows[1]) // QUICK_ROWS)
    few = rows[0][::every], rows[1][::every]

    def step(arrays: dict, tokens: jax.Array, rate: jax.Array) -> tuple[dict, jax.Array]:
        return train_step(arrays, params, teacher, tokens, rate, config, base, goal)

    def look(tensors: dict, report: Report) -> None:
        found = measure(tensors, params, teacher, config, base, few)
        at.history.append({"step": at.step} | found)
        kl, agreement = found["kl"], found["agreement"]
        report.measured(at, f"KL {kl:.4f} nats, agreement {agreement:.3f}")

    arrays = training.run(arrays, at, step, look)
    weights = own_tensors(model_weights(config), config, all_later=goal.all_later)
    dtypes = {name: "float32" if weights[name].float32 else stored.dtype for name in start}
    kept = {name: np.asarray(leaf).astype(dtypes[name]) for name, leaf in arrays["params"].items()}
    after = {name: jnp.asarray(leaf, "float32") for name, leaf in kept.items()}
    results = {
        name: measure(tensors, params, teacher, config, base, rows)
        for name, tensors in (("untrained", start), ("trained", after))
    }
    lost = [found["nats"] - found["teacher_nats"] for found in results.values()]
    about = (training.corpus, training.options, at, training.sources)
    recovered = {"recovered": round(1 - lost[1] / lost[0], 4) if lost[0] else None}
    more = {"cut": cut} | groups | {"exit_head": exit_head}
    told = more | goal._asdict()
    record = training_record(
        config, after, *about, results | recovered, command="distill", more=told
    )
    record |= more | {"goal": goal._asdict()}
    save_cut(out_dir, config, kept, base=model, base_params=teacher)
    (out_dir / RECORD_FILE).write_text(json.dumps(record, indent=1) + "\n")
    return record
