"""Models in and out: Hugging Face directories (safetensors) in, orbax directories out and in again.

Files are memory-mapped and each parameter is assembled on its own, so loading needs little more memory
than the model itself.
"""

from __future__ import annotations

import json
import reprlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jax
import ml_dtypes
import numpy as np

from hybrid_jax.config import DTYPES, ModelConfig
from hybrid_jax.models import FAMILIES, Family, config_from_hf
from hybrid_jax.models.hf_config import plain, token_ids
from hybrid_jax.models.stored_config import from_json, to_json
from hybrid_jax.models.tensors import Stored

Progress = Callable[[int, int], None]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]

CONFIG_FILE = "model_config.json"  # beside an orbax checkpoint; Hugging Face's is config.json
PARAMS_FOLDER = "params"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
ARRAY_DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
ITEM_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2}
PIECE = 1 << 24  # bytes compared at a time
BAND = 32  # rows transposed at a time: their cache lines stay in the cache until they are full


class CheckpointNotFound(FileNotFoundError, ValueError):
    """A file or directory of a model is not there."""


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a memory-mapped safetensors file: raw bytes, and what they mean."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: np.ndarray  # uint8[bytes]

    def array(self) -> np.ndarray:
        """A view of the file as an array.

        Raises:
            NotImplementedError: an integer or float8 tensor, that is, a quantised checkpoint.
        """
        if self.dtype not in ARRAY_DTYPES:
            raise NotImplementedError(
                f"load_model: tensor {self.name} has dtype {self.dtype}, only "
                f"{', '.join(ARRAY_DTYPES)} are supported; use an unquantised checkpoint"
            )
        return self.data.view(ARRAY_DTYPES[self.dtype]).reshape(self.shape)


def load_model(
    path: str | Path, *, dtype: Dtype = "auto", progress: Progress | None = None
) -> tuple[ModelConfig, dict]:
    """Reads a model from a Hugging Face directory or from one written by `save_orbax`.

    Args:
        path: a directory with config.json and model.safetensors (or its shards and their index), or an
            orbax directory.
        dtype: of the parameters; "auto" keeps the one they are stored in. A_log, D, dt_bias and the
            router's correction bias are never cast.
        progress: called with (bytes done, bytes in all) as the parameters arrive.

    Returns:
        The model's config, its dtype being that of the parameters, and the parameter tree of
        `models.decoder`.

    Raises:
        FileNotFoundError: a file is missing (it is a ValueError too).
        ValueError: an unknown family, a missing or malformed field, a truncated file, a missing,
            unexpected or wrongly shaped tensor.
        NotImplementedError: a field or a stored dtype that is not supported.

    Example:
        >>> config, params = load_model("gone")
        Traceback (most recent call last):
        ...
        hybrid_jax.checkpoint.CheckpointNotFound: load_model: gone does not exist; give a model directory
    """
    if dtype not in ("auto", *DTYPES):
        raise ValueError(f"load_model: dtype must be auto or one of {DTYPES}, got {dtype!r}")
    folder = _folder(path)
    config = load_config(folder)
    report = progress or (lambda done, total: None)
    if (folder / CONFIG_FILE).is_file():
        return _load_orbax(folder, config, dtype, report)
    return _load_hf(folder, config, dtype, report)


def load_config(path: str | Path) -> ModelConfig:
    """The config of a model directory, of either kind; reads no weights.

    Raises:
        FileNotFoundError, ValueError, NotImplementedError: as `load_model`.
    """
    folder = _folder(path)
    if (folder / CONFIG_FILE).is_file():
        return from_json(read_json(folder / CONFIG_FILE))
    if not (folder / "config.json").is_file():
        raise CheckpointNotFound(
            f"load_model: {folder} has no config.json and no {CONFIG_FILE}; "
            "give a Hugging Face directory or one written by save_orbax"
        )
    config = config_from_hf(read_json(folder / "config.json"))
    generation = folder / "generation_config.json"
    if not generation.is_file():
        return config
    ids = token_ids(plain(read_json(generation)).get("eos_token_id"))
    merged = dict.fromkeys((*ids, *config.eos_token_ids))  # in order, each once
    return replace(config, eos_token_ids=tuple(merged))


def save_orbax(
    path: str | Path, config: ModelConfig, params: dict, *, tokenizer_from: str | Path | None = None
) -> None:
    """Writes a model as an orbax checkpoint with its config beside it; `load_model` reads it back.

    Every array keeps its bits and dtype. An earlier model of the same kind at `path` is replaced.

    Args:
        path: directory to write; made if absent.
        config, params: the model.
        tokenizer_from: a directory whose tokenizer files are copied along, those it has.

    Raises:
        FileNotFoundError: `tokenizer_from` is not a directory.
        ValueError: `path` holds something else.
    """
    import orbax.checkpoint  # slow to import, and most loads never need it

    folder = Path(path).expanduser().resolve()
    if folder.exists() and not (folder / CONFIG_FILE).is_file() and any(folder.iterdir()):
        raise ValueError(
            f"save_orbax: {folder} exists and is not a saved model; choose another path"
        )
    source = _folder(tokenizer_from) if tokenizer_from is not None else None
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).unlink(missing_ok=True)  # an interrupted save is not a model
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / PARAMS_FOLDER, params, force=True)
    for name in TOKENIZER_FILES:
        if source is not None and (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    text = json.dumps(to_json(config), indent=2, allow_nan=False)
    (folder / CONFIG_FILE).write_text(text + "\n", encoding="utf-8")


# --- orbax ----------------------------------------------------------------------------------------


def _load_orbax(
    folder: Path, config: ModelConfig, dtype: str, progress: Progress
) -> tuple[ModelConfig, dict]:
    import orbax.checkpoint

    saved = folder / PARAMS_FOLDER
    if not saved.is_dir():
        raise CheckpointNotFound(f"load_model: {folder} has {CONFIG_FILE} but no {PARAMS_FOLDER}/")
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        try:
            tree = checkpointer.metadata(saved).item_metadata.tree
            target = jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here), tree
            )
            total = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(target))
            progress(0, total)
            params = checkpointer.restore(saved, target)
        except Exception as error:  # whatever the storage below raises, bare Exceptions too
            raise ValueError(
                f"load_model: {saved} is damaged or no orbax checkpoint; save it again"
            ) from error
    progress(total, total)
    if dtype in ("auto", config.dtype):
        return config, params
    kept = ("A_log", "D", "dt_bias", "router_bias")
    params = jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf if path[-1].key in kept else leaf.astype(dtype), params
    )
    return replace(config, dtype=dtype), params


# --- Hugging Face ---------------------------------------------------------------------------------


def _load_hf(
    folder: Path, config: ModelConfig, dtype: str, progress: Progress
) -> tuple[ModelConfig, dict]:
    family = FAMILIES[config.family]
    tensors = {family.canonical(name): tensor for name, tensor in _read_tensors(folder)}
    config = _settle_head(config, family, tensors)
    tree = family.stored(config)
    _check(tree, family, tensors, config)
    embed = tree["embed"].parts[0][0]
    stored_dtype = str(tensors[embed].array().dtype)
    config = replace(config, dtype=stored_dtype if dtype == "auto" else dtype)
    parts = [name for leaf in _leaves(tree) for name, _ in leaf.parts]
    total = sum(tensors[name].data.nbytes for name in parts if name in tensors)
    done = 0
    progress(done, total)

    def build(leaf: Stored) -> jax.Array:
        nonlocal done
        array = jax.device_put(_assemble(leaf, tensors, np.dtype(config.dtype)))
        done += sum(tensors[name].data.nbytes for name, _ in leaf.parts if name in tensors)
        progress(done, total)
        return array

    return config, jax.tree.map(build, tree)  # a Stored is a leaf


def _settle_head(
    config: ModelConfig, family: Family, tensors: dict[str, StoredTensor]
) -> ModelConfig:
    """Tied weights that a file stores twice are dropped when equal; different ones are both used."""
    head = tensors.get("lm_head.weight")
    if not config.tie_embeddings or head is None:
        return config
    embed = tensors.get(family.stored(config)["embed"].parts[0][0])
    if embed is None:
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
    tree: dict, family: Family, tensors: dict[str, StoredTensor], config: ModelConfig
) -> None:
    """Every tensor there, of the right shape, and none that the model would silently leave out."""
    expected = set()
    for leaf in _leaves(tree):
        for name, shape in leaf.parts:
            expected.add(name)
            if name not in tensors:
                if leaf.zeros_if_absent:
                    continue
                raise ValueError(
                    f"load_model: tensor {name} {shape} is missing, which a model of family "
                    f"{config.family} with this config.json has"
                )
            if tensors[name].shape != shape:
                raise ValueError(
                    f"load_model: tensor {tensors[name].name} has shape {tensors[name].shape}, "
                    f"config.json makes it {shape}"
                )
            tensors[name].array()  # refuses quantised ones before anything is read
    unexpected = [t.name for name, t in tensors.items() if name not in expected]
    unexpected = sorted(name for name in unexpected if not family.ignores(name))
    if unexpected:
        some = ", ".join(unexpected[:3]) + (", ..." if len(unexpected) > 3 else "")
        raise ValueError(
            f"load_model: {len(unexpected)} tensors have no place in a model of family "
            f"{config.family} with this config.json: {some}"
        )


def _leaves(tree: Any) -> Iterator[Stored]:
    yield from jax.tree.leaves(tree)


def _assemble(leaf: Stored, tensors: dict[str, StoredTensor], dtype: np.dtype) -> np.ndarray:
    """One parameter, from its parts, in its own memory."""
    if leaf.keep_dtype:
        dtype = tensors[leaf.parts[0][0]].array().dtype
    out = np.empty(leaf.shape, dtype)
    start = 0
    for index, (name, shape) in enumerate(leaf.parts):
        if leaf.join == "stack":
            place = out[index]
        else:
            width = out.shape[-1] if len(leaf.parts) == 1 else shape[0]
            place = out[..., start : start + width]
            start += width
        if name not in tensors:
            place[...] = 0
        else:
            _place(place, tensors[name].array(), leaf.layout)
    return out


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


# --- files ----------------------------------------------------------------------------------------


def _folder(path: str | Path) -> Path:
    folder = Path(path).expanduser()
    if not folder.is_dir():
        what = "is a file, not a directory" if folder.exists() else "does not exist"
        raise CheckpointNotFound(f"load_model: {folder} {what}; give a model directory")
    return folder


def read_json(file: Path) -> dict:
    """The object a JSON file holds; ValueError names the file that holds none."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"load_model: {file} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"load_model: {file} must hold an object, got {type(values).__name__}")
    return values


def _read_tensors(folder: Path) -> Iterator[tuple[str, StoredTensor]]:
    """Every tensor of model.safetensors, or of the shards its index names."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        yield from _read_safetensors(single).items()
        return
    if not index.is_file():
        others = sorted(file.name for file in folder.iterdir() if file.suffix in (".bin", ".pt"))
        hint = f"; convert {others[0]} to safetensors first" if others else ""
        raise CheckpointNotFound(
            f"load_model: {folder} has no {single.name} and no {index.name}{hint}"
        )
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict):
        raise ValueError(f"load_model: {index} has no weight_map")
    shards = {}
    for name, shard in places.items():
        if shard not in shards:
            shards[shard] = _read_safetensors(folder / shard)
        if name not in shards[shard]:
            raise ValueError(f"load_model: tensor {name} is not in {shard}, where {index} puts it")
        yield name, shards[shard][name]


def _read_safetensors(file: Path) -> dict[str, StoredTensor]:
    """Maps a safetensors file: 8 bytes of header length, a JSON header, the tensors' bytes."""
    if not file.is_file():
        raise CheckpointNotFound(f"load_model: {file} does not exist; the checkpoint is incomplete")
    size = file.stat().st_size
    if size < 8:
        raise ValueError(f"load_model: {file} is truncated, it has {size} bytes; fetch it again")
    raw = np.memmap(file, np.uint8, "r")
    length = int(raw[:8].view("<u8")[0])
    if 8 + length > size:
        raise ValueError(
            f"load_model: {file} is truncated or no safetensors file, its header should end at byte "
            f"{8 + length}, it has {size} bytes; fetch it again"
        )
    try:
        header = json.loads(raw[8 : 8 + length].tobytes())
        header.pop("__metadata__", None)
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"load_model: {file} has a malformed header: {error!r}") from error
    entries = {name: _read_entry(file, name, entry) for name, entry in header.items()}
    data = raw[8 + length :]
    end = max((stop for *_, stop in entries.values()), default=0)
    if end > data.size:
        raise ValueError(
            f"load_model: {file} is truncated, it should have {8 + length + end} bytes, it has "
            f"{size}; fetch it again"
        )
    tensors = {}
    for name, (dtype, shape, start, stop) in entries.items():
        need = int(np.prod(shape, dtype=np.int64)) * ITEM_BYTES.get(dtype, 1)
        if stop - start != need and dtype in ITEM_BYTES:
            raise ValueError(
                f"load_model: {file} is damaged, tensor {name} of shape {shape} and dtype {dtype} "
                f"needs {need} bytes, its header gives it {stop - start}; fetch it again"
            )
        tensors[name] = StoredTensor(name, dtype, shape, data[start:stop])
    return tensors


def _read_entry(file: Path, name: str, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    """(dtype, shape, start, stop) of one tensor, its place in bytes after the header."""
    try:
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        start, stop = offsets
        numbers = (*shape, start, stop)
    except (KeyError, TypeError, ValueError):
        numbers = None
    good = numbers is not None and isinstance(dtype, str) and all(type(n) is int for n in numbers)
    if not good or min(numbers) < 0:
        raise ValueError(
            f"load_model: {file} has a malformed header, tensor {name} must have a dtype, a shape and two "
            f"data_offsets, got {reprlib.repr(entry)}"
        )
    return dtype, tuple(shape), start, stop
