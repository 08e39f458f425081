"""The training record: what a model was trained on, how, and how good it became."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from hybrid_jax.config import ModelConfig
from hybrid_jax.train.data import HELD_OUT_SHARE, Corpus
from hybrid_jax.train.state import Progress

PACKAGES = ("jax", "jaxlib", "numpy", "optax")


def training_record(
    config: ModelConfig,
    params: dict,
    corpus: Corpus,
    options: Any,
    at: Progress,
    sources: Sequence[Path],
    held_out: dict,
) -> dict:
    """The contents of training_record.json; names directories by their last part only.

    Args:
        config, params, corpus, sources: the model and what it was trained on.
        options: the `TrainOptions`. at: where the training ended.
        held_out: measurements by name, see `evaluate.bits_per_byte`.
    """
    arguments = {k: v for k, v in asdict(options).items() if v is not None}
    arguments["sources"] = [source.name for source in sources]
    call = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    step_bytes = options.batch * options.context
    return {
        "command": f"train_tiny(OUT, {call})",
        "held_out": held_out,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(params)),
        "steps": at.step,
        "bytes_seen": at.step * step_bytes,
        "epochs": round(at.step * step_bytes / sum(len(d.content) + 1 for d in corpus.train), 3),
        "runs": at.runs,
        "wall_minutes": round(at.seconds / 60, 1),
        "seed": options.seed,
        "device": jax.devices()[0].platform,
        "versions": {"python": platform.python_version()}
        | {name: metadata.version(name) for name in PACKAGES},
        "config": _summary(config),
        "corpus": {
            "sha256": corpus.digest(),
            "train_files": len(corpus.train),
            "train_bytes": sum(len(d.content) for d in corpus.train),
            "held_out_files": len(corpus.held_out),
            "held_out_bytes": sum(len(d.content) for d in corpus.held_out),
            "held_out_share": HELD_OUT_SHARE,
            "duplicates_left_out": corpus.duplicates,
            "near_copies_of_held_out_left_out": list(corpus.copies),
            "held_out_names": [d.name for d in corpus.held_out],
        },
        "history": at.history,
    }


def _summary(config: ModelConfig) -> dict:
    mamba, attention = config.recurrent[0], config.attention
    return {
        "pattern": "".join(type(s.mixers[0]).__name__[0] for s in config.layers),
        "width": config.width,
        "mlp_width": config.layers[0].mlp.width,
        "vocab_size": config.vocab_size,
        "max_position": config.max_position,
        type(mamba).__name__.lower(): asdict(mamba)
        | {"dt_limits": [str(v) for v in mamba.dt_limits]},
        "attention": asdict(attention),
    }
