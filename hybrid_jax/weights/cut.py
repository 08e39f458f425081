"""Models with a cut as directories: the weights that differ from a model without, and where that model lies."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save

from hybrid_jax.config import ModelConfig
from hybrid_jax.config.model_directory import copy_carried
from hybrid_jax.kinds.table import kind_of
from hybrid_jax.models.checkpoint import CUT_NUMBERS, EXIT_HEAD, stored_cut
from hybrid_jax.models.cut import cut_params, exit_params
from hybrid_jax.models.files import BUNDLED, CUT_FILE, CheckpointNotFound
from hybrid_jax.weights.digest import sample
from hybrid_jax.weights.safetensors import StoredTensor, read_file

WEIGHTS_FILE = "cut.safetensors"
BASE = "base."  # what the names of samples of the base's weights begin with
BASE_VALUES = 8  # about so many of each array
Tensors = dict[str, Any]  # by place in the tree of parameters, such as "layers.5.mixers.0.in_proj"


def own_tensors(params: dict, config: ModelConfig, *, all_later: bool = False) -> Tensors:
    """What a model with a cut has of its own: the cut's weights, and those with which later layers read.

    The head on the cut is among them if the config has it.

    Args:
        params: of the model with the cut, or a tree like that.
        all_later: all weights of the layers after the cut.
    """
    parts = ("cut", "exit") if config.exit_head else ("cut",)
    found = {f"{part}.{name}": leaf for part in parts for name, leaf in params[part].items()}
    for index in config.later:
        layer = params["layers"][index]
        if all_later:
            for path, leaf in jax.tree_util.tree_leaves_with_path(layer):
                place = jax.tree_util.keystr(path, simple=True, separator=".")
                found[f"layers.{index}.{place}"] = leaf
            continue
        for number, mixer in enumerate(config.layers[index].mixers):
            for name in kind_of(mixer).projection:
                if name in layer["mixers"][number]:
                    found[f"layers.{index}.mixers.{number}.{name}"] = layer["mixers"][number][name]
    return found


def with_tensors(params: dict, tensors: Tensors) -> dict:
    """The parameters with other arrays in the given places."""
    for place, leaf in tensors.items():
        params = _put(params, place.split("."), leaf)
    return params


def _put(tree: Any, path: list[str], leaf: Any) -> Any:
    """A copy of a tree of dictionaries and lists with another leaf at a path."""
    if not path:
        return leaf
    first, *rest = path
    if isinstance(tree, list):
        return [_put(part, rest, leaf) if i == int(first) else part for i, part in enumerate(tree)]
    return tree | {first: _put(tree[first], rest, leaf)}


def base_samples(params: dict) -> Tensors:
    """A few values of each array of the model without a cut, by which it is known again, float32."""
    return {
        BASE + jax.tree_util.keystr(path, simple=True, separator="."): sample(
            leaf, BASE_VALUES
        ).astype(np.float32)
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }


def save_cut(
    folder: Path, config: ModelConfig, tensors: Tensors, *, base: Path, base_params: dict
) -> None:
    """Writes a model with a cut beside the model without: what differs, and the tokenizer's files.

    Args:
        folder: made if absent. config: of the model with the cut.
        tensors: what differs, by place, in the dtypes in which it is stored.
        base_params: weights of the model without. A few of their values are stored, so that another model in its
            place is noticed.
        base: directory of the model without. It is named by a path from `folder`; the bundled model by none.
    """
    folder.mkdir(parents=True, exist_ok=True)
    copy_carried(base, folder)
    partial = folder / f"{WEIGHTS_FILE}.partial"
    stored = {name: np.asarray(leaf) for name, leaf in tensors.items()}
    partial.write_bytes(save(stored | base_samples(base_params)))  # by the user's umask
    partial.replace(folder / WEIGHTS_FILE)
    link = None if base.samefile(BUNDLED) else os.path.relpath(base, folder)
    names = (*CUT_NUMBERS, EXIT_HEAD)
    values = {"base": link} | {name: getattr(config, name) for name in names}
    (folder / CUT_FILE).write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def add_cut(
    folder: Path, base: ModelConfig, params: dict, *, exit_head: bool = False
) -> tuple[ModelConfig, dict]:
    """Config and parameters of the model with the cut, from those of the model without, in its dtype.

    Args:
        exit_head: also read its head on the cut, into params["exit"].

    Raises:
        ValueError: the files do not fit the model. CheckpointNotFound: there are no weights.
    """
    if base.matrices != "dense":
        raise ValueError(
            f"load_model: the model with the cut in {folder} must have dense matrices, got {base.matrices!r}"
        )
    config, file = stored_cut(folder, base, exit_head=exit_head), folder / WEIGHTS_FILE
    if not file.is_file():
        raise CheckpointNotFound(f"load_model: {folder} has {CUT_FILE} but no {WEIGHTS_FILE}")
    found = read_file(file)
    _check_base(file, found, params)
    params = cut_params(params, config)
    if exit_head:
        params |= {"exit": exit_params(params, config)}
    known = own_tensors(params, config, all_later=True)
    if missing := sorted(own_tensors(params, config).keys() - found.keys()):
        raise ValueError(f"load_model: {file} has no tensor {missing[0]}")
    left = (BASE,) if exit_head else (BASE, "exit.")
    found = {name: tensor for name, tensor in found.items() if not name.startswith(left)}
    for name in sorted(found):
        if name not in known:
            raise ValueError(f"load_model: {file} has a tensor that the model does not use, {name}")
        if found[name].shape != known[name].shape:
            raise ValueError(
                f"load_model: {file}: {name} must have shape {known[name].shape}, got {found[name].shape}"
            )
    cast = {name: jnp.asarray(found[name].array(), known[name].dtype) for name in found}
    return config, with_tensors(params, jax.device_put(cast))


def _check_base(file: Path, found: dict[str, StoredTensor], params: dict) -> None:
    """Refuses a model without a cut that is not the one that the tensors were trained beside.

    Both may have been rounded, to bfloat16 at the coarsest.
    """
    for name, values in base_samples(params).items():
        if name not in found:
            raise ValueError(f"load_model: {file} has no tensor {name}")
        stored = found[name].array()
        if stored.shape != values.shape or not np.allclose(stored, values, rtol=2**-7, atol=1e-6):
            raise ValueError(
                f"load_model: {file} was made beside another model than the one that {CUT_FILE} names: its "
                f"{name.removeprefix(BASE)} differs; correct base in {CUT_FILE}, or distill again"
            )
