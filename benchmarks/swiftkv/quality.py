"""What models with a cut (SwiftKV) lose, before and after distillation, beside the models without.

    python benchmarks/swiftkv/quality.py --json OUT [--english DIR] [--dense DIR] [--steps 250] [--only WORD ...]

Every study is trained for the same steps on the same rows, and judged on the same held-out rows of Python's standard
library: nats a byte and perplexity against the model without a cut, KL divergence from it, how often the most likely
byte is the same, the share of the loss that training took back, and what keys and values in FP8 lose. The results so
far are in OUT; the same command goes on after them, and in the end prints a table of all. A study takes minutes on two
cores.

- The bundled model, 8 layers: cuts 6, 4 and 3; the loss KL or LM; what is trained is what later layers write and read
  with, or all their weights; data like the model's own, or English text (`--english`: a directory with .txt files, such
  as that of the Debian package git-doc). At cut 4 also three recurrent layers that share a state.
- A model of 12 attention layers, cut 6: groups of 1, 2, 3 and 6 layers that share keys and values; and at the bytes of
  groups of 3, one KV head in each layer, or a KV head for each query head in one group (SwiftKV, arXiv 2410.03960,
  table D.1). `--dense` is where this put it:

    hybrid-jax train-tiny DIR --config benchmarks/swiftkv/tiny_dense.json --steps 2000 --context 1024 --batch 4
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[2]))  # when run as a file
from benchmarks.common import header, write_json
from hybrid_jax.config import Attention, ModelConfig, with_cut
from hybrid_jax.config.engine import FP8
from hybrid_jax.models import decoder
from hybrid_jax.models.cut import cut_params
from hybrid_jax.train.data import TEXT, Batches, Corpus, read_corpus, segments, sources_of
from hybrid_jax.train.distances import measure
from hybrid_jax.train.distillation import Goal, adam, train_step
from hybrid_jax.train.loop import rate_factor, row_length
from hybrid_jax.weights import BUNDLED, load_config, load_model
from hybrid_jax.weights.cut import own_tensors, with_tensors

CONTEXT, BATCH, RATE = 1024, 2, 0.001
JUDGED_ROWS = 64
Heads = Literal["own", "one", "all"]


@dataclass(frozen=True)
class Study:
    """One model with a cut, and how it is trained.

    Attributes:
        heads: KV heads of the later attention layers: as the model without a cut has them, one, or one for each query
            head.
    """

    cut: int
    model: Literal["bundled", "dense"] = "bundled"
    loss: str = "kl"
    all_later: bool = False
    data: Literal["python", "english"] = "python"
    kv_group: int = 1
    state_group: int = 1
    heads: Heads = "own"
    seed: int = 0

    def name(self) -> str:
        trained = "all later weights" if self.all_later else "writes and reads"
        parts = [self.model, f"cut {self.cut}", self.loss, trained, self.data]
        parts += [f"kv group {self.kv_group}"] if self.kv_group > 1 else []
        parts += [f"state group {self.state_group}"] if self.state_group > 1 else []
        parts += [f"heads {self.heads}"] if self.heads != "own" else []
        return ", ".join([*parts, f"seed {self.seed}"])


def studies() -> Iterator[Study]:
    """All, those that matter most first."""
    yield Study(4)
    yield Study(4, data="english")
    yield Study(4, loss="lm", data="english")
    yield Study(4, loss="lm")
    yield Study(4, state_group=3)
    yield Study(6)
    yield Study(3)
    for group in (1, 2, 3, 6):
        yield Study(6, model="dense", kv_group=group)
    yield Study(6, model="dense", heads="one")
    yield Study(6, model="dense", heads="all", kv_group=6)
    for data in ("python", "english"):
        for loss in ("kl", "lm"):
            yield Study(4, loss=loss, data=data, all_later=True)
    for seed in (1, 2):
        for data in ("python", "english"):
            for loss in ("kl", "lm"):
                yield Study(4, loss=loss, data=data, seed=seed)
    for cut in (6, 3):
        for all_later in (False, True):
            for data in ("python", "english"):
                for loss in ("kl", "lm"):
                    yield Study(cut, loss=loss, all_later=all_later, data=data)
    for seed in (1, 2):
        for data in ("python", "english"):
            for loss in ("kl", "lm"):
                yield Study(4, loss=loss, all_later=True, data=data, seed=seed)


class Teachers:
    """The models without a cut, in float32, read when they are needed."""

    def __init__(self, dense: Path | None) -> None:
        self.folders = {"bundled": BUNDLED, "dense": dense}
        self._read: dict[str, tuple[ModelConfig, dict]] = {}

    def of(self, study: Study) -> tuple[ModelConfig, dict] | None:
        folder = self.folders[study.model]
        if folder is None:
            return None
        if study.model not in self._read:
            config = replace(load_config(folder), dtype="float32")
            self._read[study.model] = config, load_model(folder, dtype="float32")[1]
        return self._read[study.model]


def with_heads(
    config: ModelConfig, params: dict, cut: int, heads: Heads
) -> tuple[ModelConfig, dict]:
    """A model whose later attention layers have one KV head, the mean of theirs, or one for each query head."""
    if heads == "own":
        return config, params
    layers, weights = list(config.layers), list(params["layers"])
    for index in range(cut, len(layers)):
        (mixer,), (own,) = layers[index].mixers, weights[index]["mixers"]
        assert isinstance(mixer, Attention) and "qkv_bias" not in own, "a plain attention layer"
        count, size = mixer.num_kv_heads, mixer.head_dim
        query, *keyed = np.split(np.asarray(own["qkv"]), [-2 * count * size, -count * size], axis=1)
        split = [part.reshape(-1, count, size) for part in keyed]
        if heads == "one":
            made = [part.mean(1, keepdims=True) for part in split]
        else:
            made = [part.repeat(mixer.num_heads // count, axis=1) for part in split]
        joined = np.concatenate([query, *(part.reshape(len(part), -1) for part in made)], axis=1)
        mixer = replace(mixer, num_kv_heads=made[0].shape[1])
        layers[index] = layers[index].with_mixers((mixer,))
        weights[index] = weights[index] | {"mixers": [own | {"qkv": jnp.asarray(joined)}]}
    return replace(config, layers=tuple(layers)), params | {"layers": weights}


@functools.partial(jax.jit, static_argnames=("config", "kv_dtype"))
def costs(
    params: dict, tokens: jax.Array, counts: jax.Array, config: ModelConfig, kv_dtype: str | None
) -> jax.Array:
    """Sum of the nats of the tokens that count."""
    scores = decoder.forward(params, tokens[:, :-1], config, kv_dtype=kv_dtype)
    own = jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1)[..., 0]
    return jnp.where(counts, jax.nn.logsumexp(scores, axis=-1) - own, 0).sum()


def fp8_loss(params: dict, config: ModelConfig, rows: tuple[np.ndarray, np.ndarray]) -> float:
    """Nats a token that a model loses by keys and values in FP8."""
    tokens, lengths = rows
    counts = np.arange(tokens.shape[1] - 1) < lengths[:, None]
    sums = [
        sum(
            float(costs(params, tokens[i : i + 2], counts[i : i + 2], config, kv_dtype))
            for i in range(0, len(tokens), 2)
        )
        for kv_dtype in (FP8, None)
    ]
    return (sums[0] - sums[1]) / float(lengths.sum())


def carried_out(
    study: Study, teacher: tuple[ModelConfig, dict], train: Corpus, judged: Any, steps: int
) -> dict:
    """Trains a model with a cut, and measures it before and after."""
    base, weights = teacher
    plain, changed = with_heads(base, weights, study.cut, study.heads)
    config = with_cut(
        plain,
        study.cut,
        kv_group=study.kv_group,
        state_group=study.state_group,
    )
    params = cut_params(changed, config)
    goal = Goal(study.loss, all_later=study.all_later)
    start = own_tensors(params, config, all_later=study.all_later)
    tensors = jax.tree.map(jnp.array, start)
    arrays = {"params": tensors, "optimizer": adam().init(tensors)}
    batches = Batches(train.train, study.seed, BATCH, CONTEXT)
    length, begun = 0, time.monotonic()
    for step in range(steps):
        if step % batches.steps_per_group == 0:
            length = row_length(step / steps, CONTEXT)
        rate = jnp.float32(RATE * rate_factor(step / steps))
        tokens = batches(step, length)
        arrays, kl = train_step(arrays, params, weights, tokens, rate, config, base, goal)
        if step % 50 == 0:
            print(f"  step {step}  KL {float(kl):.4f}", flush=True)
    seconds = time.monotonic() - begun
    found = {
        when: measure(own, params, weights, config, base, judged)
        for when, own in (("untrained", start), ("trained", arrays["params"]))
    }
    alone = (study.seed, study.loss, study.data, study.all_later) == (0, "kl", "python", False)
    fp8 = {}
    if alone:
        fp8["fp8_loss"] = fp8_loss(with_tensors(params, arrays["params"]), config, judged)
        fp8["fp8_loss_without_cut"] = fp8_loss(weights, base, judged)
    lost = [part["nats"] - part["teacher_nats"] for part in found.values()]
    trained = sum(leaf.size for leaf in start.values())
    return (
        found
        | fp8
        | {
            "recovered": 1 - lost[1] / lost[0],
            "trained_parameters": trained,
            "seconds": round(seconds),
        }
    )


def table(found: dict[str, dict]) -> str:
    """The studies as markdown."""
    head = (
        "study",
        "perplexity before",
        "after",
        "KL after",
        "same byte",
        "recovered",
        "FP8 loses",
    )
    lines = [head, ("---", *["---:"] * (len(head) - 1))]
    for name, study in found.items():
        before, after = study["untrained"], study["trained"]
        numbers = (
            before["perplexity_ratio"],
            after["perplexity_ratio"],
            after["kl"],
            after["agreement"],
        )
        fp8 = f"{study['fp8_loss']:.5f}" if "fp8_loss" in study else ""
        lines.append((name, *(f"{x:.3f}" for x in (*numbers, study["recovered"])), fp8))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--english", type=Path, help="directory with English texts")
    parser.add_argument("--dense", type=Path, help="directory of the model of 12 attention layers")
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--only", nargs="*", default=[], help="words that a study's name must have")
    given = parser.parse_args()
    corpora = {"python": read_corpus(sources_of(None))}
    if given.english is not None:
        corpora["english"] = read_corpus([given.english], TEXT)
    judged = segments(corpora["python"].held_out, CONTEXT, JUDGED_ROWS, full=True)
    report: dict[str, Any] = {
        "steps": given.steps,
        "judged_tokens": int(judged[1].sum()),
        "studies": {},
    }
    if given.json.exists():
        report = json.loads(given.json.read_text())
        if report["steps"] != given.steps:
            parser.error(f"{given.json} has studies of {report['steps']} steps, not {given.steps}")
    teachers = Teachers(given.dense)
    for study in studies():
        name, teacher = study.name(), teachers.of(study)
        if teacher is None or study.data not in corpora or name in report["studies"]:
            continue
        if not all(word in name for word in given.only):
            continue
        print(name, flush=True)
        found = carried_out(study, teacher, corpora[study.data], judged, given.steps)
        report["studies"][name] = found
        write_json(given.json, header() | report)
        after = found["trained"]
        print(
            f"  perplexity x{after['perplexity_ratio']:.4f}, KL {after['kl']:.4f}, agreement {after['agreement']:.3f}, "
            f"recovered {found['recovered']:.2f}, {found['seconds']} s",
            flush=True,
        )
    print(table(report["studies"]))


if __name__ == "__main__":
    main()
