"""Models with a cut as directories: the weights that differ from a model without, and where that model lies."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.tree_util import KeyPath
from jax.tree_util import tree_leaves_with_path as leaves_with_path
from safetensors.numpy import save

from hybrid_jax.config import ModelConfig
from hybrid_jax.config.model_directory import copy_carried
from hybrid_jax.kinds.kind import Weight
from hybrid_jax.kinds.table import kind_of, model_weights
from hybrid_jax.models.checkpoint import CUT_NUMBERS, EXIT_HEAD
from hybrid_jax.models.files import BUNDLED, CUT_FILE, CheckpointNotFound
from hybrid_jax.models.matrices import place_of
from hybrid_jax.weights.digest import sample
from hybrid_jax.weights.put import Put
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
            for path, leaf in leaves_with_path(layer):
                found[f"layers.{index}.{place_of(path)}"] = leaf
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
        BASE + place_of(path): sample(leaf, BASE_VALUES).astype(np.float32)
        for path, leaf in leaves_with_path(params)
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


class CutWeights:
    """The weights of a model with a cut, while those of the model without are read.

    A weight of the model without is compared with what is stored of it, and put where it belongs if the model with the
    cut has it, too. So no weight that a cut replaces is ever on a device.

    Args:
        folder: the directory of the model with the cut. config: of that model, or of more than it.
        base: config of the model without. put: as in `load_hf`.

    Raises:
        ValueError: the files do not fit the model. CheckpointNotFound: there are no weights.
    """

    def __init__(
        self, folder: Path, config: ModelConfig, base: ModelConfig, put: Put | None
    ) -> None:
        if base.matrices:
            place, format = base.matrices[0]
            raise ValueError(
                f"load_model: the model beside which {folder} was made must have weights of 16 or 32 bits, and its "
                f"{place} is {format.about}"
            )
        self._file = folder / WEIGHTS_FILE
        if not self._file.is_file():
            raise CheckpointNotFound(f"load_model: {folder} has {CUT_FILE} but no {WEIGHTS_FILE}")
        stored = read_file(self._file)
        self._config = config
        self._put: Put = put or (lambda config, path, weight: jax.device_put(weight))
        self._samples = {name: stored[name] for name in stored if name.startswith(BASE)}
        left = (BASE,) if config.exit_head else (BASE, "exit.")
        self._own = {name: stored[name] for name in stored if not name.startswith(left)}
        _check_own(self._file, self._own, self._of(base))
        before, after = (
            {place_of(path) for path, _ in leaves_with_path(model_weights(model))}
            for model in (base, self._of(base))
        )
        self._gone = (before - after) | self._own.keys()

    def put(self, base: ModelConfig, path: KeyPath, weight: np.ndarray) -> jax.Array | None:
        """A weight of the model without a cut; None if it is not one of the model with the cut.

        Raises:
            ValueError: it is not a weight of the model beside which the cut was trained.
        """
        _check_base(self._file, place_of(path), weight, self._samples)
        return None if place_of(path) in self._gone else self._put(self._of(base), path, weight)

    def complete(self, base: ModelConfig, params: dict) -> tuple[ModelConfig, dict]:
        """Config and parameters of the model with the cut, in the dtype of `base`, from what `put` has returned."""
        config, read = self._of(base), dict(leaves_with_path(params))

        def found(path: KeyPath, weight: Weight) -> jax.Array | None:
            if place_of(path) not in self._own:
                return read[path]
            tensor, dtype = self._own[place_of(path)], "float32" if weight.float32 else config.dtype
            made = np.array(tensor.array(), dtype)  # a copy: not the memory of the file
            tensor.let_go()
            return self._put(config, path, made)

        return config, jax.tree_util.tree_map_with_path(found, model_weights(config))

    def _of(self, base: ModelConfig) -> ModelConfig:
        """The config of the model with the cut, with what only the tensors tell of the model without."""
        cut = self._config
        return replace(base, layers=cut.layers, cut=cut.cut, exit_head=cut.exit_head)


def _check_own(file: Path, found: dict[str, StoredTensor], config: ModelConfig) -> None:
    """ValueError unless these are tensors that a model with a cut has of its own."""
    weights = model_weights(config)
    known = own_tensors(weights, config, all_later=True)
    if missing := sorted(own_tensors(weights, config).keys() - found.keys()):
        raise ValueError(f"load_model: {file} has no tensor {missing[0]}")
    for name in sorted(found):
        if name not in known:
            raise ValueError(f"load_model: {file} has a tensor that the model does not use, {name}")
        if found[name].shape != known[name].shape:
            raise ValueError(
                f"load_model: {file}: {name} must have shape {known[name].shape}, got {found[name].shape}; correct "
                f"{CUT_FILE}, or distill again"
            )


def _check_base(
    file: Path, place: str, weight: np.ndarray, samples: dict[str, StoredTensor]
) -> None:
    """Refuses a weight of a model without a cut that is not the one that the tensors were trained beside.

    Both may have been rounded, to bfloat16 at the coarsest.
    """
    if BASE + place not in samples:
        raise ValueError(f"load_model: {file} has no tensor {BASE}{place}")
    stored = samples[BASE + place].array()
    values: np.ndarray = sample(weight, BASE_VALUES).astype(np.float32)
    if stored.shape != values.shape or not np.allclose(stored, values, rtol=2**-7, atol=1e-6):
        raise ValueError(
            f"load_model: {file} was made beside another model than the one that {CUT_FILE} names: its {place} "
            f"differs; correct base in {CUT_FILE}, or distill again"
        )
