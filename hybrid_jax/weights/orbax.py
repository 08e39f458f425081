"""Orbax directories: a model as the engine holds it, written and read back bit by bit."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from hybrid_jax.config import ModelConfig
from hybrid_jax.config.model_directory import copy_carried
from hybrid_jax.kinds.kind import map_weights
from hybrid_jax.kinds.table import model_weights
from hybrid_jax.models.files import STORED_CONFIG_FILE as CONFIG_FILE
from hybrid_jax.models.files import CheckpointNotFound, ReportBytes, model_folder
from hybrid_jax.models.stored_config import to_json
from hybrid_jax.process.own_settings import own_settings

PARAMS_FOLDER = "params"


def check_target(path: str | Path, where: str) -> Path:
    """The directory to write, as a full path.

    Raises:
        ValueError: it is a file, or holds something else than a saved model.
    """
    folder = Path(path).expanduser().resolve()
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{where}: {folder} is a file; choose another path")
    if folder.exists() and not (folder / CONFIG_FILE).is_file() and any(folder.iterdir()):
        raise ValueError(f"{where}: {folder} exists and is not a saved model; choose another path")
    return folder


@own_settings()
def save_orbax(
    path: str | Path, config: ModelConfig, params: dict, *, tokenizer_from: str | Path | None = None
) -> None:
    """Writes a model as an orbax checkpoint with its config beside it; `load_model` reads it back.

    Every array keeps its bits and dtype. An earlier model of the same kind at `path` is replaced.

    Args:
        path: directory to write; made if absent.
        config, params: the model.
        tokenizer_from: a model's directory whose tokenizer, chat templates and generation_config.json are copied
            along, as far as it has them (`hybrid_jax.config.model_directory.FILES`).

    Raises:
        FileNotFoundError: `tokenizer_from` is not a directory.
        ValueError: `path` holds something else.

    Example:
        >>> import tempfile
        >>> from hybrid_jax import load_model
        >>> config, params = load_model()
        >>> folder = tempfile.mkdtemp()
        >>> save_orbax(folder, config, params)
        >>> load_model(folder)[0] == config
        True
    """
    import orbax.checkpoint  # slow to import, and most loads never need it

    folder = check_target(path, "save_orbax")
    source = None if tokenizer_from is None else model_folder(tokenizer_from).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    new = folder / f"{PARAMS_FOLDER}.new"
    # Weights hardly compress, and unpacking them takes as long as reading them.
    handler = orbax.checkpoint.PyTreeCheckpointHandler(use_compression=False)
    with orbax.checkpoint.Checkpointer(handler) as checkpointer:
        checkpointer.save(new, args=orbax.checkpoint.args.PyTreeSave(params), force=True)
    if source is not None:
        copy_carried(source, folder)
    (folder / CONFIG_FILE).unlink(missing_ok=True)  # from here to the end it is not a model
    shutil.rmtree(folder / PARAMS_FOLDER, ignore_errors=True)
    new.rename(folder / PARAMS_FOLDER)
    text = json.dumps(to_json(config), indent=2, allow_nan=False)
    (folder / CONFIG_FILE).write_text(text + "\n", encoding="utf-8")


def load_orbax(
    folder: Path, config: ModelConfig, dtype: str, progress: ReportBytes
) -> tuple[ModelConfig, dict]:
    """What `save_orbax` wrote, on jax's default device; cast where `dtype` is another than the saved one."""
    import orbax.checkpoint

    saved = (folder / PARAMS_FOLDER).resolve()  # orbax finds nothing at a relative path
    if not saved.is_dir():
        raise CheckpointNotFound(f"load_model: {folder} has {CONFIG_FILE} but no {PARAMS_FOLDER}/")
    here = jax.device_put(0).sharding  # the device where jax puts arrays
    damaged = f"load_model: {saved} is damaged or not an orbax checkpoint; save it again"
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        try:
            tree = checkpointer.metadata(saved).item_metadata.tree
        except Exception as error:  # whatever the storage below raises, bare Exceptions too
            raise ValueError(damaged) from error
        # Damaged sizes would ask for any amount of memory.
        _check_shapes(saved, config, tree)
        try:
            target = jax.tree.map(
                lambda leaf, to: jax.ShapeDtypeStruct(leaf.shape, to, sharding=here),
                tree,
                _dtypes(config, tree, dtype),
            )
            total = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(target))
            progress(0, total)
            params = checkpointer.restore(saved, target)
        except Exception as error:
            raise ValueError(damaged) from error
    progress(total, total)
    return config if dtype == "auto" else replace(config, dtype=dtype), params


def _check_shapes(saved: Path, config: ModelConfig, stored: Any) -> None:
    """ValueError unless the arrays have the names and shapes that the config asks for."""
    wanted, found = (
        {
            jax.tree_util.keystr(path): leaf.shape
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        }
        for tree in (_specs(config, config.dtype), stored)
    )
    for name in wanted.keys() | found.keys():
        if wanted.get(name) != found.get(name):
            raise ValueError(
                f"load_model: {saved} has {name} of shape {found.get(name)}, {CONFIG_FILE} asks for "
                f"{wanted.get(name)}; save it again"
            )


def _dtypes(config: ModelConfig, stored: dict, dtype: str) -> dict:
    """The dtype that each array is to have: orbax casts one by one, so the model is never there in both."""
    if dtype in ("auto", config.dtype):
        return jax.tree.map(lambda leaf: leaf.dtype, stored)
    return jax.tree.map(lambda spec: jax.numpy.dtype(spec.dtype), _specs(config, dtype))


def _specs(config: ModelConfig, dtype: str) -> dict:
    """The arrays of a model in this dtype, in a tree like its parameters."""
    return map_weights(lambda weight: weight.specs(dtype), model_weights(config))
