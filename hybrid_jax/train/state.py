"""What a training needs to continue: parameters, optimizer, step and clock, in one file."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

import jax
import numpy as np

# What may differ between two trainings, where the values themselves would say little.
OTHER = {
    "model": "another model, cut, groups of layers or head",
    "corpus": "other texts",
    "goal": "another loss, or other weights to train",
    "weights": "other weights of the model that is trained from",
}


@dataclass(kw_only=True)
class TrainProgress:
    """Where a training stands; everything but the arrays.

    Attributes:
        step: optimizer steps done; the data position follows from it.
        seconds: wall clock spent, over all runs.
        row_len: row length in force in the current group of steps.
        identity: what must not change between runs: seed, batch, context, corpus digest, model.
        history: one entry per held-out measurement.
        runs: one entry per start: the step it went on from and its options.
    """

    step: int = 0
    seconds: float = 0.0
    row_len: int = 0
    identity: dict = field(default_factory=dict)
    history: list = field(default_factory=list)
    runs: list = field(default_factory=list)


def save(path: Path, arrays: dict, progress: TrainProgress) -> None:
    """Writes a pytree of arrays and the progress to `path` (.npz) in one atomic replacement."""
    named = {jax.tree_util.keystr(k): np.asarray(v) for k, v in jax.tree.leaves_with_path(arrays)}
    named["progress"] = np.asarray(json.dumps(asdict(progress)))
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    with open(partial, "wb") as file:
        np.savez(file, **named)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def load(path: Path, template: dict, identity: dict) -> tuple[dict, TrainProgress]:
    """Reads what `save` wrote.

    Args:
        path: the .npz file.
        template: a pytree of the same structure and shapes.
        identity: must equal the saved one.

    Raises:
        ValueError: the state belongs to another training, naming the first field that differs.
    """
    with np.load(path, allow_pickle=False) as file:
        progress = TrainProgress(**json.loads(str(file["progress"])))
        for name, value in identity.items():
            if (saved := progress.identity.get(name)) != value:
                short = max(len(repr(saved)), len(repr(value))) < 30
                words = f"{name} {saved!r}, this run has {value!r}"
                what = words if short else OTHER.get(name, f"another {name}")
                raise ValueError(
                    f"load_state: {path.name} was made with {what}; use another output directory or resume=False"
                )

        def read(key: tuple, leaf: jax.Array) -> jax.Array:
            return jax.numpy.asarray(file[jax.tree_util.keystr(key)], leaf.dtype)

        return jax.tree_util.tree_map_with_path(read, template), progress
