"""Training of the small bundled model, of heads that draft for such models, and of models with a cut.

It needs the extra `train` (optax), loaded on the first call.

May import: config, costs, kinds, engine.programs, models, process, text, weights.
Packages: jax, ml_dtypes, numpy, optax, rich, safetensors, tokenizers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from hybrid_jax.config.checks import natural

# Tokens of a row; longer rows need more memory than a trial is worth.
MIN_CONTEXT, MAX_CONTEXT = 16, 32768


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """What a training was asked for, and its defaults."""

    steps: int | None = None
    minutes: float | None = None
    seed: int = 0
    batch: int = 2
    context: int = 2048
    learning_rate: float = 0.02
    eval_every: int = 200
    save_minutes: float = 4.0
    config: str | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            name, value, kind = field.name, getattr(self, field.name), str(field.type)
            if (value is None and kind.endswith("| None")) or kind.startswith("str"):
                continue
            is_integer = kind.startswith("int")
            if not isinstance(value, int if is_integer else int | float) or isinstance(value, bool):
                what = "an integer" if is_integer else "a number"
                raise ValueError(f"TrainOptions: {name} must be {what}, got {value!r}")
            if name != "seed" and not 0 < value < math.inf:  # NaN is neither
                raise ValueError(f"TrainOptions: {name} must be positive, got {value}")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"TrainOptions: seed must be in [0, 2**32), got {self.seed}")
        if not MIN_CONTEXT <= self.context <= MAX_CONTEXT:
            raise ValueError(
                f"TrainOptions: context must be between {MIN_CONTEXT} and {MAX_CONTEXT}, got {self.context}"
            )


DISTILL = TrainOptions(context=1024, learning_rate=0.001)  # the defaults of `distill`


def train_tiny(
    out_dir: str | Path,
    *,
    steps: int | None = TrainOptions.steps,
    minutes: float | None = TrainOptions.minutes,
    seed: int = TrainOptions.seed,
    resume: bool = True,
    batch: int = TrainOptions.batch,
    context: int = TrainOptions.context,
    sources: str | Path | Sequence[str | Path] | None = None,
    progress: bool = True,
    learning_rate: float = TrainOptions.learning_rate,
    eval_every: int = TrainOptions.eval_every,
    save_minutes: float = TrainOptions.save_minutes,
    config: str | Path | None = None,
) -> dict:
    """Trains the byte-level hybrid on Python sources and writes a Hugging Face directory.

    Args:
        out_dir: where the model goes; the training state lies in its subfolder `training_state`.
        steps: optimizer steps in all; None for 4000, or for as many as `minutes` allow.
        minutes: wall-clock minutes in all, resumed time included; to measure the result comes on top. The learning
            rate reaches zero at the end of whichever of `steps` and `minutes` comes first.
        seed: of the weights and of the order of the data.
        resume: continue from `training_state` where there is one; False starts over.
        batch: rows of `context` tokens a step; while rows are shorter there are more of them.
        context: tokens of a row in the last part of the training; it grows by halves towards that.
        sources: one or more directories of .py files; None or empty for the running Python's standard library. Of files
            with the same path below their directory the first is taken.
        progress: show a bar on a terminal, log lines elsewhere.
        learning_rate: peak rate of Muon; vectors and embeddings get a fifth of it, by Adam.
        eval_every: steps between held-out measurements.
        save_minutes: minutes between checkpoints.
        config: config.json of the model to train, of any family, with the vocabulary of the bundled model; None for
            that of the bundled model. It holds at least `context` tokens.

    Returns:
        The training record, as written to `training_record.json`.

    Raises:
        ValueError: no source files, a config whose tokens are not bytes, a state that belongs to another seed,
            batch, context, model or corpus, or an `out_dir` that holds a model but no state of its training.
        ModuleNotFoundError: optax is not installed.
    """
    from hybrid_jax.train.loop import train

    options = TrainOptions(
        steps=steps,
        minutes=minutes,
        seed=seed,
        batch=batch,
        context=context,
        learning_rate=learning_rate,
        eval_every=eval_every,
        save_minutes=save_minutes,
        config=None if config is None else str(config),
    )
    return train(Path(out_dir), options, resume=resume, sources=sources, progress=progress)


def train_mtp(
    out_dir: str | Path,
    model: str | Path | None = None,
    *,
    steps: int | None = TrainOptions.steps,
    minutes: float | None = TrainOptions.minutes,
    seed: int = TrainOptions.seed,
    resume: bool = True,
    batch: int = TrainOptions.batch,
    context: int = 1024,
    sources: str | Path | Sequence[str | Path] | None = None,
    progress: bool = True,
    learning_rate: float = 0.01,
    eval_every: int = 500,
    save_minutes: float = TrainOptions.save_minutes,
) -> dict:
    """Trains a head for multi-token prediction beside a model of bytes, and writes both as a Hugging Face directory.

    The model stays as it is. The head learns to predict what the model would predict, up to three tokens ahead: the
    loss is the KL divergence of the model's distribution from the head's, with smaller weights further ahead.

    Args:
        out_dir: where model and head go; the training state lies in its subfolder `training_state`.
        model: directory of a model that `train_tiny` can train; None for the bundled model.
        The others as in `train_tiny`, but for the defaults of context, learning_rate and eval_every.

    Returns:
        The training record, as written to `mtp_training_record.json`. Its `held_out["agreement"]` has, for one, two and
        three tokens ahead, how often the head's most likely token is the model's.

    Raises:
        As `train_tiny`.
    """
    from hybrid_jax.models.files import model_or_bundled
    from hybrid_jax.train.mtp import train

    options = TrainOptions(
        steps=steps,
        minutes=minutes,
        seed=seed,
        batch=batch,
        context=context,
        learning_rate=learning_rate,
        eval_every=eval_every,
        save_minutes=save_minutes,
    )
    folder = model_or_bundled(model)
    return train(Path(out_dir), folder, options, resume=resume, sources=sources, progress=progress)


def distill(
    out_dir: str | Path,
    model: str | Path | None = None,
    *,
    cut: int,
    kv_group: int = 1,
    state_group: int = 1,
    loss: Literal["kl", "lm"] = "kl",
    hidden: float = 0.0,
    all_later: bool = False,
    exit_head: bool = False,
    steps: int | None = TrainOptions.steps,
    minutes: float | None = TrainOptions.minutes,
    seed: int = TrainOptions.seed,
    resume: bool = True,
    batch: int = TrainOptions.batch,
    context: int = DISTILL.context,
    sources: str | Path | Sequence[str | Path] | None = None,
    progress: bool = True,
    learning_rate: float = DISTILL.learning_rate,
    eval_every: int = TrainOptions.eval_every,
    save_minutes: float = TrainOptions.save_minutes,
) -> dict:
    """Makes a model with a cut of one without, by distillation (SwiftKV, arXiv 2410.03960, section 3.3).

    The model stays as it is and is the teacher. Only what differs from it is written, so the model with the cut needs
    the directory of the model without.

    Args:
        out_dir: where it goes; the training state lies in its subfolder `training_state`.
        model: directory of a model with a tokenizer; None for the bundled model.
        cut: layers that the tokens of prompts go through.
        kv_group, state_group: how many attention layers after the cut share keys and values, and how many recurrent
            layers there share a state.
        loss: "kl" is the KL divergence of the teacher's distribution from the model's, both at temperature 2; "lm" is
            the cost of the tokens that follow.
        hidden: weight of the squared distance of the hidden states in front of the last layer, beside the loss.
        all_later: train all weights of the layers after the cut, and not only what they write and read with.
        exit_head: also train a head on the output of the cut, which drafts: `LLM(speculation="exit")`.
        sources: one or more directories with files whose names end in .py, .txt, .md or .rst. None or empty for the
            Python files of the running Python's standard library.
        learning_rate: of Adam.
        The others as in `train_tiny`, but for the default of context.

    Returns:
        The training record, as written to `distillation_record.json`. Its `held_out` has the distances to the teacher
        on up to 64 held-out rows, before ("untrained") and after ("trained"), in nats a token, and the share of the
        loss that was "recovered".

    Raises:
        As `train_tiny`, but for what it says of bytes.
        ValueError: as `hybrid_jax.config.with_cut`; an unknown loss; the model has no tokenizer.
    """
    from hybrid_jax.models.files import model_or_bundled
    from hybrid_jax.train.distillation import Goal, train

    for name, value in (("cut", cut), ("kv_group", kv_group), ("state_group", state_group)):
        natural(value, f"distill: {name}", least=None)
    if loss not in ("kl", "lm"):
        raise ValueError(f"distill: loss must be 'kl' or 'lm', got {loss!r}")
    options = TrainOptions(
        steps=steps,
        minutes=minutes,
        seed=seed,
        batch=batch,
        context=context,
        learning_rate=learning_rate,
        eval_every=eval_every,
        save_minutes=save_minutes,
    )
    return train(
        Path(out_dir),
        model_or_bundled(model),
        options,
        cut=cut,
        kv_group=kv_group,
        state_group=state_group,
        exit_head=exit_head,
        goal=Goal(loss, hidden, all_later),
        resume=resume,
        sources=sources,
        progress=progress,
    )


def cut_table(
    model: str | Path | None = None,
    *,
    cuts: Sequence[int] | None = None,
    kv_group: int = 1,
    state_group: int = 1,
    sources: str | Path | Sequence[str | Path] | None = None,
    rows: int = 16,
    context: int = 512,
) -> dict:
    """What a cut at each place would save and cost before any training, by which a cut is chosen for `distill`.

    Args:
        model, kv_group, state_group, sources: as of `distill`.
        cuts: those to look at; None for all that the model can have.
        rows: held-out rows to measure on. context: tokens of a row.

    Returns:
        Its "cuts" has for each the share of a prompt's FLOPs that it saves, for a prompt of 4,096 tokens; SimScore, how
        alike the inputs of later layers are to the output of the layer at the cut (arXiv 2410.03960, eq. 1), None for a
        cut in front of the last layer; and the distances to the model without, as in the record of `distill`.
        "refused" says why others are not there.

    Raises:
        ValueError: no cut is possible, or one of `cuts` is not; what `distill` says of data.
    """
    from hybrid_jax.models.files import model_or_bundled
    from hybrid_jax.train.cuts import cut_table as made

    if cuts is not None and not isinstance(cuts, Sequence):
        raise ValueError(f"cut_table: cuts must be a list of numbers or None, got {cuts!r}")
    if cuts is not None and not cuts:
        raise ValueError("cut_table: cuts must have a number at least, got none")
    for cut in cuts or ():
        natural(cut, "cut_table: cuts", least=None)
    numbers = {"rows": rows, "context": context, "kv_group": kv_group, "state_group": state_group}
    for name, value in numbers.items():
        natural(value, f"cut_table: {name}", least=1)
    return made(
        model_or_bundled(model),
        cuts=cuts,
        kv_group=kv_group,
        state_group=state_group,
        sources=sources,
        rows=rows,
        context=context,
    )
