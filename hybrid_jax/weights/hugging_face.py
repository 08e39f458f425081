"""From the tensors of a Hugging Face directory to the parameters of a model: checked, cast, put in place."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np

from hybrid_jax.config import ModelConfig
from hybrid_jax.kinds.tensors import Rows, Stored
from hybrid_jax.models import FAMILIES, Family
from hybrid_jax.models.family import MTP, NO_HEAD
from hybrid_jax.models.files import CONFIG_FILE, ReportBytes, read_json
from hybrid_jax.models.hf_config import HFConfig
from hybrid_jax.weights.safetensors import StoredTensor, read_tensors

PIECE = 1 << 24  # bytes compared at a time
REMEDY = "weights and config.json must be of the same model: fetch both again"
# Tensors of quantised weights, as the usual tools call them.
SCALES = r"\.(weight_scale(_inv)?|input_scale|qweight|qzeros|scales|absmax|quant_state.*)$"
UNQUANTISED = (
    "they belong to quantised weights, which are not supported: fetch an unquantised checkpoint"
)
OTHER_HEAD = (
    "they belong to a head for multi-token prediction with more parts than the one that is supported; "
    + NO_HEAD
)
SAMPLES = 1024  # values of a matrix that are looked at for NaN; vectors are looked at whole
BAND = 32  # rows transposed at a time: their cache lines stay in the cache until they are full


def load_hf(
    folder: Path, config: ModelConfig, dtype: str, progress: ReportBytes
) -> tuple[ModelConfig, dict]:
    """Parameters from safetensors, and the config with what only the tensors tell: the dtype and whether heads are
    tied."""
    family = family_of(folder, config)
    tensors = {family.canonical(tensor.name): tensor for tensor in read_tensors(folder)}
    config = _settle_head(config, family, tensors)
    tree = family.stored(config, tensors)
    _check(tree, family, tensors, config, folder)
    stored_dtype = str(tensors[family.embed].array().dtype)
    config = replace(config, dtype=stored_dtype if dtype == "auto" else dtype)
    parts = [name for leaf in jax.tree.leaves(tree) for name in _names(leaf)]
    total = sum(tensors[name].data.nbytes for name in parts if name in tensors)
    done = 0
    progress(done, total)

    def build(leaf: Stored) -> jax.Array:
        nonlocal done
        array = jax.device_put(_assemble(leaf, tensors, np.dtype(config.dtype)))
        read = [tensors[name] for name in _names(leaf) if name in tensors]
        for tensor in read:
            tensor.let_go()
        done += sum(tensor.data.nbytes for tensor in read)
        progress(done, total)
        return array

    return config, jax.tree.map(build, tree)  # a Stored is a leaf


def family_of(folder: Path, config: ModelConfig) -> Family:
    """The family of the model in a Hugging Face directory, by its config.json."""
    return FAMILIES[config.family].of(HFConfig(read_json(folder / CONFIG_FILE), config.family))


def _settle_head(
    config: ModelConfig, family: Family, tensors: dict[str, StoredTensor]
) -> ModelConfig:
    """Tied weights that a file stores twice are dropped when equal; different ones are both used."""
    head, embed = tensors.get("lm_head.weight"), tensors.get(family.embed)
    if not config.tie_embeddings or head is None or embed is None:
        return config
    same = (embed.dtype, embed.shape) == (head.dtype, head.shape)
    if same and all(
        np.array_equal(embed.data[start : start + PIECE], head.data[start : start + PIECE])
        for start in range(0, embed.data.size, PIECE)
    ):
        del tensors["lm_head.weight"]
        return config
    return replace(config, tie_embeddings=False)


def _check(
    tree: dict, family: Family, tensors: dict[str, StoredTensor], config: ModelConfig, folder: Path
) -> None:
    """Checks that every tensor is there, in the right shape, and that no tensor would be ignored silently."""
    expected = set()
    for leaf in jax.tree.leaves(tree):
        for part in leaf.parts:
            name, shape = part.name, part.shape
            expected.add(name)
            if name not in tensors:
                if family.may_lack(name):
                    continue
                if name.startswith(MTP) and not any(other.startswith(MTP) for other in tensors):
                    raise ValueError(
                        f"load_model: {folder} has no head for multi-token prediction: tensor {name} {shape} is "
                        f"missing from its safetensors files, as are all others of the head; {NO_HEAD}"
                    )
                raise ValueError(
                    f"load_model: tensor {name} {shape} is missing from the safetensors files of {folder}, "
                    f"which a model of family {config.family} with this config.json has; {REMEDY}"
                )
            if tensors[name].shape != shape:
                raise ValueError(
                    f"load_model: tensor {tensors[name].name} of {tensors[name].file} has shape "
                    f"{tensors[name].shape}, config.json makes it {shape}; {REMEDY}"
                )
            tensors[name].array()  # refuses quantised ones before anything is read
    spare = [tensor.name for name, tensor in tensors.items() if name not in expected]
    unexpected = sorted(name for name in spare if not family.ignores(name, config))
    if unexpected:
        some = ", ".join(unexpected[:3]) + (", ..." if len(unexpected) > 3 else "")
        quantised = any(re.search(SCALES, name) for name in unexpected)
        headed = bool(config.mtp) and all(name.startswith(MTP) for name in unexpected)
        remedy = UNQUANTISED if quantised else OTHER_HEAD if headed else REMEDY
        raise ValueError(
            f"load_model: {len(unexpected)} tensors of {folder} have no place in a model of family "
            f"{config.family} with this config.json: {some}; {remedy}"
        )


def _names(leaf: Stored) -> list[str]:
    """The tensors that a leaf is made from, each once."""
    return list(dict.fromkeys(part.name for part in leaf.parts))


def _assemble(leaf: Stored, tensors: dict[str, StoredTensor], dtype: np.dtype) -> np.ndarray:
    """One parameter, from its parts, in its own memory."""
    out = np.empty(leaf.shape, np.float32 if leaf.float32 else dtype)
    for part in leaf.parts:
        if part.name not in tensors:
            out[part.place] = 0
            continue
        _check_finite(tensors[part.name])
        source = _rows(tensors[part.name].array(), part.rows)
        if part.plus or part.factor != 1.0:
            source = source.astype(np.float32) * np.float32(part.factor) + np.float32(part.plus)
        _place(out[part.place], source, leaf.layout)
    return out


def _rows(source: np.ndarray, rows: Rows | None) -> np.ndarray:
    """Some rows of a tensor."""
    if rows is None:
        return source
    blocks = source.reshape(rows.blocks, rows.size, *source.shape[1:])
    return blocks[:, rows.start : rows.stop].reshape(-1, *source.shape[1:])


def _check_finite(tensor: StoredTensor) -> None:
    """Refuses NaN and infinity where they are cheap to see; a diverged training leaves them everywhere."""
    flat = tensor.array().reshape(-1)
    step = 1 if len(tensor.shape) == 1 else max(1, flat.size // SAMPLES)
    wrong = np.flatnonzero(~np.isfinite(flat[::step]))
    if wrong.size:
        at = tuple(int(i) for i in np.unravel_index(wrong[0] * step, tensor.shape))
        raise ValueError(
            f"load_model: tensor {tensor.name} of {tensor.file} holds {flat[wrong[0] * step]} at {at}; "
            "its weights are damaged, or their training diverged"
        )


def _place(out: np.ndarray, source: np.ndarray, layout: str) -> None:
    """Copies `source` as stored into `out`, cast and transposed as `Stored.layout` says."""
    if layout == "conv":
        source = source[:, 0]
    if layout == "same" or source.ndim < 2:
        out[...] = source
    elif source.ndim == 3:
        for index in range(source.shape[0]):
            _place(out[index], source[index], "linear")
    else:
        for row in range(0, source.shape[0], BAND):
            out[:, row : row + BAND] = source[row : row + BAND].astype(out.dtype, copy=False).T
