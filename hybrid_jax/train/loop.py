"""The training loop: Muon for matrices, Adam for the rest, resumable at any checkpoint. It reports its progress."""

from __future__ import annotations

import functools
import json
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from hybrid_jax.config import ModelConfig
from hybrid_jax.engine.programs.compile_cache import enable_compile_cache
from hybrid_jax.models import config_from_hf
from hybrid_jax.models.files import BUNDLED, CONFIG_FILE, CUT_FILE, TRAINING, read_json
from hybrid_jax.models.initialize import random_params
from hybrid_jax.process.extras import needs_extra
from hybrid_jax.process.own_settings import own_settings
from hybrid_jax.process.streams import forgiving
from hybrid_jax.text.tokenizer import Tokenizer
from hybrid_jax.train import TrainOptions
from hybrid_jax.train import state as saved
from hybrid_jax.train.data import PYTHON, Batches, Corpus, read_corpus, sources_of, tokenized
from hybrid_jax.train.evaluate import bits_per_byte, token_bits
from hybrid_jax.train.export import rounded, training_record, write_model

with needs_extra("train"):
    import optax

# From arrays, tokens and a rate, the new arrays and the loss.
Step = Callable[[dict, jax.Array, jax.Array], tuple[dict, jax.Array]]
DEFAULT_STEPS = 4000
ADAM_SHARE = 0.2  # Adam's learning rate relative to Muon's
QUICK_ROWS = 24  # rows of the measurements between steps
STATE_FILE = Path(TRAINING) / "state.npz"
# Shares of the training after which the learning rate is highest, and begins to fall.
WARMUP, DECAY_FROM = 0.02, 0.2
# From this share of the training on, rows are context / divisor tokens long.
ROW_SHARES = ((0.0, 4), (0.8, 2), (0.92, 1))
LOG_EVERY = 20  # steps


def tiny_fields(context: int = 0, config: str | None = None) -> dict:
    """A config.json, by default that of the bundled model, for sequences of at least `context` tokens.

    The bundled model has 4.1 M parameters over bytes. Its recurrent layers come first and see the order of the bytes,
    so attention needs no position encoding and is not tied to the lengths seen in training.
    """
    usual = read_json(BUNDLED / CONFIG_FILE, "tiny_fields")
    fields = usual if config is None else read_json(Path(config), "tiny_fields")
    for name in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id"):
        if fields.get(name) != usual[name]:
            raise ValueError(
                f"tiny_fields: {name} of {config} must be {usual[name]}, because tokens are bytes, "
                f"got {fields.get(name)!r}"
            )
    return fields | {"max_position_embeddings": max(fields["max_position_embeddings"], context)}


def muon_and_adam() -> optax.GradientTransformation:
    """Muon on the matrices of the layers; Adam on embeddings, convolutions, norms and vectors. Rate 1."""

    def is_matrix(path: tuple, leaf: jax.Array) -> bool:
        name = jax.tree_util.keystr(path)
        return leaf.ndim == 2 and not any(part in name for part in ("'embed'", "'conv'"))

    def label(params: dict) -> dict:
        matrix = optax.contrib.MuonDimensionNumbers(0, 1)
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: matrix if is_matrix(path, leaf) else None, params
        )

    muon = optax.contrib.muon(
        1.0,
        adam_learning_rate=ADAM_SHARE,
        adam_b2=0.98,
        weight_decay=0.01,
        muon_weight_dimension_numbers=label,
    )

    def update(*arguments: Any) -> tuple[Any, Any]:
        with jax.numpy_dtype_promotion("standard"):  # Optax relies on implicit promotion
            return muon.update(*arguments)

    return optax.GradientTransformation(muon.init, update)


@functools.partial(jax.jit, static_argnames="config", donate_argnums=0)
def train_step(
    arrays: dict, tokens: jax.Array, rate: jax.Array, config: ModelConfig
) -> tuple[dict, jax.Array]:
    """One step on tokens int32[B, T + 1]; returns the new {"params", "optimizer"} and bits per byte."""

    def loss(params: dict) -> jax.Array:
        return token_bits(params, tokens, config).mean()

    bits, gradients = jax.value_and_grad(loss)(arrays["params"])
    return stepped(muon_and_adam(), arrays, gradients, rate), bits


def stepped(
    optimizer: optax.GradientTransformation, arrays: dict, gradients: dict, rate: jax.Array
) -> dict:
    """{"params", "optimizer"} after a step of an optimizer that works at rate 1."""
    with jax.numpy_dtype_promotion("standard"):  # Optax relies on implicit promotion
        updates, moments = optimizer.update(gradients, arrays["optimizer"], arrays["params"])
    updates = jax.tree.map(lambda update: rate * update, updates)
    return {"params": optax.apply_updates(arrays["params"], updates), "optimizer": moments}


@own_settings()
def train(
    out_dir: Path,
    options: TrainOptions,
    *,
    resume: bool,
    sources: str | Path | Sequence[str | Path] | None,
    progress: bool,
    fields: dict | None = None,
) -> dict:
    """Does what `hybrid_jax.train.train_tiny` says.

    Args:
        out_dir, options, resume, sources, progress: as there.
        fields: config.json of the model to train; that of the bundled model when None.
    """
    fields = tiny_fields(options.context, options.config) if fields is None else fields
    config = replace(config_from_hf(fields), dtype="float32")
    training = Training(out_dir, options, sources, progress)
    arrays, at = training.start(random_params(config, options.seed), config, resume)

    def step(arrays: dict, tokens: jax.Array, rate: jax.Array) -> tuple[dict, jax.Array]:
        return train_step(arrays, tokens, rate, config)

    def measure(params: dict, report: Report) -> None:
        held_out = bits_per_byte(
            params, config, training.corpus.held_out, options.context, limit=QUICK_ROWS
        )["bits_per_byte"]
        seen = at.step * options.batch * options.context
        at.history.append({"step": at.step, "tokens_seen": seen, "held_out_sample": held_out})
        report.measured(at, f"{held_out:.4f} bits/byte")

    arrays = training.run(arrays, at, step, measure)
    return export(training, arrays["params"], fields, config, at)


class Training:
    """What all trainings share: options, data, and the steps from a start or from where an earlier run stopped.

    Args:
        out_dir, options, sources, progress: as of `hybrid_jax.train.train_tiny`.
        suffixes: of the files that are read.
        tokenizer: None if tokens are bytes.
    """

    def __init__(
        self,
        out_dir: Path,
        options: TrainOptions,
        sources: str | Path | Sequence[str | Path] | None,
        progress: bool,
        suffixes: Sequence[str] = PYTHON,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self._begun = time.monotonic()
        check_writable(out_dir)
        _refuse_other_model(out_dir)
        enable_compile_cache()
        if options.steps is None and options.minutes is None:
            options = replace(options, steps=DEFAULT_STEPS)
        self.out_dir, self.options, self.sources = out_dir, options, sources_of(sources)
        corpus = read_corpus(self.sources, suffixes)
        self.corpus = corpus if tokenizer is None else tokenized(corpus, tokenizer)
        self.progress = progress

    def start(
        self,
        params: dict,
        config: ModelConfig,
        resume: bool,
        optimizer: optax.GradientTransformation | None = None,
        **identity: str,
    ) -> tuple[dict, saved.TrainProgress]:
        """Arrays {"params", "optimizer"}, and where they stand: at the start, or where an earlier run stopped.

        Args:
            params: what is trained, at the start. resume: go on with an earlier run.
            optimizer: None for `muon_and_adam`.
            identity: what else than data, model and some options an earlier run must have in common.

        Raises:
            ValueError: the earlier run had another identity.
        """
        options, path = self.options, self.out_dir / STATE_FILE
        known: dict[str, object] = {
            **identity,
            "seed": options.seed,
            "batch": options.batch,
            "context": options.context,
            "corpus": self.corpus.digest(),
            "model": repr(config),
        }
        arrays = {"params": params, "optimizer": (optimizer or muon_and_adam()).init(params)}
        if resume and path.exists():
            return saved.load(path, arrays, known)
        return arrays, saved.TrainProgress(identity=known)

    def run(
        self,
        arrays: dict,
        at: saved.TrainProgress,
        step: Step,
        measure: Callable[[dict, Report], None],
    ) -> dict:
        """Steps until the steps or minutes are over, measures and saves on the way; returns the last arrays.

        Args:
            arrays, at: as `start` returns them; `at` moves on.
            step: from arrays, tokens int32[B, T + 1] and a rate, new arrays and the loss.
            measure: of the parameters; adds to `at.history`.
        """
        options, path = self.options, self.out_dir / STATE_FILE
        batches = Batches(self.corpus.train, options.seed, options.batch, options.context)
        begun = self._begun - at.seconds
        if progress_of(at.step, at.seconds, options.steps, options.minutes) < 1.0:
            at.runs.append({"from_step": at.step} | asdict(replace(options, config=None)))
        last_save = time.monotonic()
        step_tokens = options.batch * options.context
        with Report(self.progress) as report, Stop() as stop:
            report.start(self.corpus, arrays["params"], at)
            while True:
                at.seconds = time.monotonic() - begun
                if stop.asked:
                    saved.save(path, arrays, at)
                    report.say(
                        f"stopped after step {at.step}, which is saved; the same command goes on"
                    )
                    raise KeyboardInterrupt
                done = progress_of(at.step, at.seconds, options.steps, options.minutes)
                if done >= 1.0:
                    break
                if at.step % batches.steps_per_group == 0 or not at.row_len:
                    at.row_len = row_length(done, options.context)
                rate = jnp.float32(options.learning_rate * rate_factor(done))
                tokens = batches(at.step, at.row_len)
                arrays, bits = step(arrays, tokens, rate)
                at.step += 1
                report.step(at, float(bits), step_tokens, done)
                if at.step % options.eval_every == 0:
                    measure(arrays["params"], report)
                if time.monotonic() - last_save > 60 * options.save_minutes:
                    at.seconds = time.monotonic() - begun
                    saved.save(path, arrays, at)
                    last_save = time.monotonic()
            saved.save(path, arrays, at)
        Report(self.progress).say("measuring on held-out files")
        return arrays


def check_writable(out_dir: Path) -> None:
    """Makes the directory and writes to it, so that an hour of training cannot fail at its end."""
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out_dir):
            pass
    except OSError as error:
        raise ValueError(
            f"check_writable: cannot write to {out_dir}: {error.strerror}; give another directory"
        ) from error


def _refuse_other_model(out_dir: Path) -> None:
    """Refuses a directory with a model that was not trained there, which the training would overwrite."""
    found = (out_dir / CONFIG_FILE).exists() or (out_dir / CUT_FILE).exists()
    if found and not (out_dir / STATE_FILE).exists():
        raise ValueError(
            f"train: {out_dir} holds a model already, which would be overwritten; give another directory"
        )


def export(
    training: Training, params: dict, fields: dict, config: ModelConfig, at: saved.TrainProgress
) -> dict:
    """Measures the weights as stored on the held-out files, writes the model directory and its record."""
    corpus, options, out_dir = training.corpus, training.options, training.out_dir
    stored, context = rounded(params, config), options.context
    measure = functools.partial(
        bits_per_byte, stored, config, corpus.held_out, say=Report(training.progress).say
    )
    measured = {f"context_{context}": measure(context)}
    # Rows that fill the context: the same texts at every position, so that positions can be compared.
    for length in (context, 2 * context):
        if length <= config.max_position:
            measured[f"context_{length}_full_rows"] = measure(length, rows=2, full=True)
    record = training_record(config, params, corpus, options, at, training.sources, measured)
    write_model(out_dir, params, fields)
    (out_dir / "training_record.json").write_text(json.dumps(record, indent=1) + "\n")
    return record


# --- what changes with the progress of the training, a number from 0 to 1 --------------------------


def rate_factor(progress: float) -> float:
    """Share of the peak learning rate: a short linear warmup, a short plateau, then linearly to zero."""
    warm = min(1.0, (progress + 1e-3) / WARMUP)
    return min(warm, max(0.0, (1.0 - progress) / (1.0 - DECAY_FROM)))


def row_length(progress: float, context: int) -> int:
    """Tokens of a row: short at first, when a step costs less and teaches as much."""
    divisor = next(d for start, d in reversed(ROW_SHARES) if progress >= start)
    return max(context // divisor, min(context, 64))


def progress_of(step: int, seconds: float, steps: int | None, minutes: float | None) -> float:
    """How far a training is, by whichever of `steps` and `minutes` is nearer to its end."""
    shares = [0.0]
    if steps is not None:
        shares.append(step / steps)
    if minutes is not None:
        shares.append(seconds / (60 * minutes))
    return min(1.0, max(shares))


# --- how it is stopped ----------------------------------------------------------------------------


class Stop:
    """Has Ctrl-C wait for the end of a step, because what a step was given is lost in the middle of it.

    A second Ctrl-C does not wait. A context manager; it does nothing where Ctrl-C would not interrupt this thread.
    """

    def __init__(self) -> None:
        self.asked = False
        here = threading.current_thread() is threading.main_thread()
        self.applies = here and signal.getsignal(signal.SIGINT) is signal.default_int_handler

    def __enter__(self) -> Stop:
        if self.applies:
            signal.signal(signal.SIGINT, self._ask)
        return self

    def __exit__(self, *exc: object) -> None:
        if self.applies:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _ask(self, *_: object) -> None:
        self.asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)


# --- what is shown --------------------------------------------------------------------------------


class Report:
    """Shows step, tokens, loss, rate and time left: a bar on a terminal, log lines elsewhere, or nothing.

    A context manager.
    """

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self.console = Console(file=forgiving(sys.stderr), soft_wrap=True, highlight=False)
        self.bar: Progress | None = None
        self.held_out = "-"
        self.recent: list[float] = []
        self.clock = (time.monotonic(), 0)

    def __enter__(self) -> Report:
        if self.enabled and self.console.is_terminal:
            columns = (BarColumn(), TextColumn("{task.description}"))
            self.bar = Progress(*columns, console=self.console)
            self.bar.start()
            self.task = self.bar.add_task("compiling", total=1.0)
        return self

    def __exit__(self, *exc: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def say(self, line: str) -> None:
        """Prints a line, above the bar if there is one."""
        if self.enabled:
            self.console.print(line)

    def start(self, corpus: Corpus, params: dict, at: saved.TrainProgress) -> None:
        """Says what is trained on what, and starts the clock."""
        size = sum(leaf.size for leaf in jax.tree.leaves(params))
        train, held_out = (sum(len(d.content) for d in p) for p in (corpus.train, corpus.held_out))
        self.say(
            f"{size / 1e6:.2f} M parameters; training on {len(corpus.train)} files, {train / 1e6:.1f} MB; "
            f"held out {len(corpus.held_out)} files, {held_out / 1e6:.2f} MB; from step {at.step}"
        )
        self.clock = (time.monotonic(), at.step)

    def step(self, at: saved.TrainProgress, bits: float, step_tokens: int, done: float) -> None:
        """After each step; `done` is the progress from 0 to 1."""
        if not self.enabled:
            return
        self.recent = [*self.recent[-(LOG_EVERY - 1) :], bits]
        if at.step % LOG_EVERY and self.bar is None:
            return
        now, (then, before) = time.monotonic(), self.clock
        rate = (at.step - before) * step_tokens / max(now - then, 1e-9)
        left = at.seconds * (1 - done) / done / 60 if done else float("nan")
        line = (
            f"step {at.step}  {at.step * step_tokens / 1e6:.2f} M tokens seen  rows of {at.row_len}  "
            f"loss {sum(self.recent) / len(self.recent):.3f}  held out {self.held_out}  "
            f"{rate:.0f} tokens/s  {left:.0f} min left"
        )
        if at.step % LOG_EVERY == 0:
            self.clock = (now, at.step)
        if self.bar is None:
            self.say(line)
        else:
            self.bar.update(self.task, completed=done, description=line)

    def measured(self, at: saved.TrainProgress, found: str) -> None:
        """Shows a held-out measurement."""
        self.held_out = found
        self.say(f"step {at.step}  held-out sample {found}")
