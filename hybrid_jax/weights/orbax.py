"""Orbax directories: a model as the engine holds it, written and read back bit by bit."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.tree_util import KeyPath
from jax.tree_util import tree_leaves_with_path as leaves_with_path
from jax.tree_util import tree_map_with_path as map_with_path

from hybrid_jax.config import ModelConfig
from hybrid_jax.config.formats import Format
from hybrid_jax.config.model_directory import copy_carried
from hybrid_jax.kinds.kind import map_weights
from hybrid_jax.kinds.table import model_weights
from hybrid_jax.models.checkpoint import Checkpoint
from hybrid_jax.models.files import STORED_CONFIG_FILE as CONFIG_FILE
from hybrid_jax.models.files import CheckpointNotFound, ReportBytes, model_folder
from hybrid_jax.models.matrices import place_of
from hybrid_jax.models.stored_config import to_json
from hybrid_jax.process.own_settings import own_settings
from hybrid_jax.products.operations import encoded
from hybrid_jax.weights.put import Put

PARAMS_FOLDER = "params"
# Arrays that are read side by side. Each group costs orbax about 10 ms for a hundred arrays of the model.
GROUP_BYTES = 1 << 28


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
    checkpoint: Checkpoint,
    config: ModelConfig,
    dtype: str,
    progress: ReportBytes,
    put: Put | None = None,
) -> tuple[ModelConfig, dict]:
    """What `save_orbax` wrote, cast where `dtype` is another than the saved one.

    Arrays are read in groups of at most `GROUP_BYTES`, or of one array; those of a group side by side.

    Args:
        config: of the model, or of the model without its head for multi-token prediction, which is then not read.
        put: as in `load_hf`.
    """
    import orbax.checkpoint as ocp

    saved = (checkpoint.folder / PARAMS_FOLDER).resolve()  # orbax finds nothing at a relative path
    if not saved.is_dir():
        raise CheckpointNotFound(
            f"load_model: {checkpoint.folder} has {CONFIG_FILE} but no {PARAMS_FOLDER}/"
        )
    made = config if dtype == "auto" else replace(config, dtype=dtype)
    # Those that are to be kept otherwise than they are saved.
    formats = dict(config.matrices) if not checkpoint.config.matrices else {}
    here = None if put else jax.device_put(0).sharding  # the device where jax puts arrays

    def way(to: Any) -> ocp.RestoreArgs:
        if here is None:
            return ocp.RestoreArgs(restore_type=np.ndarray, dtype=to)
        return ocp.ArrayRestoreArgs(restore_type=jax.Array, dtype=to, sharding=here)

    def read(group: Collection[KeyPath]) -> dict[KeyPath, Any]:
        """Some of the arrays, where they belong."""
        item = map_with_path(lambda path, leaf: leaf if path in group else ocp.PLACEHOLDER, tree)
        args = ocp.args.PyTreeRestore(item=item, restore_args=jax.tree.map(way, dtypes))
        with _reading(saved):
            found = dict(leaves_with_path(checkpointer.restore(saved, args=args)))
        arrays = {path: put(made, path, found[path]) if put else found[path] for path in group}
        return {
            path: _as_wanted(array, formats.get(place_of(path))) for path, array in arrays.items()
        }

    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        with _reading(saved):
            tree = checkpointer.metadata(saved).item_metadata.tree
        # Damaged sizes would ask for any amount of memory.
        _check_shapes(saved, checkpoint.config, tree)
        with _reading(saved):
            dtypes = _dtypes(checkpoint.config, tree, dtype)
        sizes = _sizes(tree, dtypes, leave_out=() if config.mtp else ("mtp",))
        arrays, total = dict[KeyPath, Any](), sum(sizes.values())
        progress(0, total)
        for group in _groups(sizes):
            arrays |= read(group)
            progress(sum(sizes[path] for path in arrays), total)
    params = map_with_path(lambda path, leaf: arrays.get(path), tree)
    return made, params if config.mtp else {k: v for k, v in params.items() if k != "mtp"}


def _as_wanted(array: jax.Array, format: Format | None) -> Any:
    """An array, or the codes that stand for it."""
    return array if format is None else encoded(array, format)


@contextmanager
def _reading(saved: Path) -> Iterator[None]:
    """Says that a directory is damaged, whatever orbax and the storage below it raise, bare Exceptions too."""
    try:
        yield
    except Exception as error:
        raise ValueError(
            f"load_model: {saved} is damaged or not an orbax checkpoint; save it again"
        ) from error


def _sizes(tree: Any, dtypes: Any, *, leave_out: Collection[str]) -> dict[KeyPath, int]:
    """Bytes of the arrays in these dtypes, by their paths."""
    pairs = zip(leaves_with_path(tree), jax.tree.leaves(dtypes), strict=True)
    return {
        path: math.prod(leaf.shape) * to.itemsize
        for (path, leaf), to in pairs
        if path[0].key not in leave_out
    }


def _groups(sizes: Mapping[KeyPath, int]) -> Iterator[list[KeyPath]]:
    """All paths, in groups of at most `GROUP_BYTES`, or of one array."""
    group, total = list[KeyPath](), 0
    for path, size in sizes.items():
        if group and total + size > GROUP_BYTES:
            yield group
            group, total = [], 0
        group.append(path)
        total += size
    yield group


def _check_shapes(saved: Path, config: ModelConfig, stored: Any) -> None:
    """ValueError unless the arrays have the names and shapes that the config asks for."""
    wanted, found = (
        {jax.tree_util.keystr(path): leaf.shape for path, leaf in leaves_with_path(tree)}
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
