"""The directory of a model, its small files, and the errors that name them. Needs no jax."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import reprlib
from collections.abc import Callable, Iterable
from os import PathLike
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from hybrid_jax.config import LayerSpec, ModelConfig, Rope, RopeScaling, with_cut
from hybrid_jax.config.checks import natural
from hybrid_jax.config.model_directory import CONFIG_FILE as CONFIG_FILE
from hybrid_jax.config.model_directory import (
    GENERATION_FILE,
    hub_name,
    hub_snapshot,
    is_there,
    read_json_if_there,
    refuse_adapter,
)
from hybrid_jax.config.model_directory import read_json as read_json
from hybrid_jax.kinds.table import KINDS
from hybrid_jax.models import config_from_hf
from hybrid_jax.models.hf_config import check_token_ids, plain

PACKAGE = Path(__file__).resolve().parents[1]
BUNDLED = PACKAGE / "bundled"  # the model where none is named
# Models that are known by name: a link to configs/models; installed packages have a copy.
KNOWN_MODELS = PACKAGE / "known_models"
PACKED = {  # those that come with weights
    "tiny_gated_delta": PACKAGE / "bundled_gated_delta",
    "tiny_cut": PACKAGE / "bundled_cut",  # the bundled model with a cut
}
TRAINING = "training_state"  # in a directory whose model is being trained, or was
ReportBytes = Callable[[int, int], None]  # bytes done, bytes in all, while a model is read
STORED_CONFIG_FILE = "model_config.json"  # beside an orbax checkpoint
CUT_FILE = "cut.json"  # of a model with a cut: where the model without lies, and these numbers of `with_cut`
FETCH_ORIGINAL = "fetch the original model, in safetensors and not quantised"
CUT_NUMBERS = ("cut", "kv_group", "state_group")
EXIT_HEAD = "exit_head"  # true if there is a head on the cut
# Fields that stored models may still have, with the only value that is read: the one that changes nothing. ANY is said
# of those that follow from others.
ANY = object()
FORMER_FIELDS = {"own_readout": False, "kv_group": ANY, "state_group": ANY}


class CheckpointNotFound(FileNotFoundError, ValueError):
    """A file or directory of a model is not there."""


def model_path(path: str | Path, where: str = "load_model") -> Path:
    """A path as a caller gives it; raises ValueError when it is not one."""
    if not isinstance(path, str | PathLike) or not str(path) or "\0" in str(path):
        raise ValueError(f"{where}: a model is the path of a directory, got {reprlib.repr(path)}")
    try:
        return Path(path).expanduser()
    except RuntimeError as error:  # ~somebody
        raise CheckpointNotFound(f"{where}: {path}: {error}") from error


def here_or_packed(path: str | Path, where: str = "load_model") -> Path:
    """As `model_path`; the directory in the package if nothing of that name is here.

    A folder of the hub's cache stands for the snapshot in it.

    Raises:
        ValueError: as `hub_snapshot`.
    """
    given = model_path(path, where)
    if given.is_dir():
        return hub_snapshot(given, where)
    return given if given.exists() else PACKED.get(str(path), given)


def model_folder(path: str | Path, where: str = "load_model") -> Path:
    """The directory that `path` names; raises CheckpointNotFound when there is none."""
    folder = here_or_packed(path, where)
    if not folder.is_dir():
        what = "is a file, not a directory" if folder.exists() else "does not exist"
        if folder.suffix == ".gguf" and folder.exists():
            what = f"is a file of llama.cpp, which is not read; {FETCH_ORIGINAL}"
        if str(path) in known_names():
            what = "is known by its sizes alone, without weights"
        named = path if "://" in str(path) else folder  # a Path writes an address with one slash
        raise CheckpointNotFound(
            f"{where}: {named} {what}; {how_to_get(path)}{similar(path, PACKED)}"
        )
    return folder


def model_or_bundled(path: str | Path | None) -> Path:
    """As `model_folder`, but None is the bundled model: for functions whose model may be left out."""
    return BUNDLED if path is None else model_folder(path)


def known_names() -> list[str]:
    """The names of the models that are known, without a look into their files."""
    return sorted(file.parent.name for file in KNOWN_MODELS.glob(f"*/{CONFIG_FILE}"))


def how_to_get(path: str | Path, files: str = "") -> str:
    """What to do about a model that is not there: nothing is downloaded here.

    Args:
        files: those that are enough, if not all are needed.
    """
    name = hub_name(str(path))
    if name is not None and not Path(path).parent.is_dir():  # else it is a relative path
        command = " ".join(["hf download", name, *files.split(), "--local-dir DIR"])
        return (
            f"give a model directory; nothing is downloaded: `{command}` gets "
            f"{files or 'a model'} of that name, then give DIR"
        )
    return "give a model directory (nothing is downloaded)"


def similar(path: str | Path, names: Iterable[str]) -> str:
    """A question after the name that was meant, or nothing. The last part of the path is what is compared.

    Example:
        >>> similar("~/models/Tiny-Cutt/", ["tiny_cut", "tiny_gated_delta"])
        '; did you mean tiny_cut?'
    """
    # Names here have "_" where those on the hub have "-" and ".".
    name = re.sub(r"[-.]", "_", re.split(r"[/\\]", str(path).rstrip("/\\"))[-1].lower())
    found = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {found[0]}?" if found else ""


def read_config(file: Path, where: str = "load_model") -> ModelConfig:
    """The model that a config.json or a model_config.json describes; every error names the file.

    Raises:
        ValueError, NotImplementedError: as `config_from_hf` and `from_json`.
    """
    values = read_json(file, where)
    try:
        return from_json(values) if file.name == STORED_CONFIG_FILE else config_from_hf(values)
    except NotImplementedError as error:
        raise NotImplementedError(f"{file}: {error}") from error
    except (ValueError, TypeError) as error:  # a TypeError for a field that a dataclass misses
        raise ValueError(f"{file}: {error}") from error


def config_of(folder: Path, where: str = "load_model") -> ModelConfig:
    """The config of the model in a directory, without a cut of its own, and the end tokens of all files that name some.

    Raises:
        CheckpointNotFound: there is none.
        NotImplementedError: the directory has an adapter. ValueError: as `read_config`.
    """
    refuse_adapter(folder, where)
    names = (STORED_CONFIG_FILE, CONFIG_FILE)
    file = next((folder / name for name in names if is_there(folder / name, where)), None)
    if file is None:
        raise CheckpointNotFound(
            f"{where}: {folder} has no {CONFIG_FILE} and no {STORED_CONFIG_FILE}; {_instead(folder)}"
        )
    config = read_config(file, where)
    generation = folder / GENERATION_FILE
    try:
        ids = plain(read_json_if_there(generation, where)).get("eos_token_id")
        ids = check_token_ids("eos_token_id", ids, config.vocab_size)
    except ValueError as error:
        raise ValueError(named_once(generation, error)) from error
    merged = dict.fromkeys((*ids, *config.eos_token_ids))  # in order, each once
    return dataclasses.replace(config, eos_token_ids=tuple(merged))


def named_once(file: Path, error: Exception) -> str:
    """The text of an error, with the name of the file that it is about in front unless it is in it."""
    return str(error) if str(file) in str(error) else f"{file}: {error}"


def _instead(folder: Path) -> str:
    """What a directory without a config has instead, and what to do."""
    if (folder / TRAINING).is_dir():
        return "a training there has not ended, and its command goes on"
    if (folder / "params.json").is_file():
        return (
            "its params.json is of the original layout of Mistral or Llama; fetch the files in the layout of "
            "transformers, or convert them with the script that transformers has for this model"
        )
    if found := sorted(folder.glob("*.gguf")):
        return f"{found[0].name} is a file of llama.cpp, which is not read; {FETCH_ORIGINAL}"
    return "give a Hugging Face directory or one written by save_orbax"


# --- a model with a cut, beside the model without ---------------------------------------------------


def base_of(folder: Path) -> Path:
    """The directory of the model without the cut: a path from this one, or the bundled model's if none is named.

    Raises:
        ValueError: what is named is no path. CheckpointNotFound: there is no such directory.
    """
    link = read_json(folder / CUT_FILE).get("base")
    if link is None:
        return BUNDLED
    if not isinstance(link, str) or not link:
        raise ValueError(
            f"load_model: base in {folder / CUT_FILE} must be the path of a directory or null, got {link!r}"
        )
    base = folder / link
    if not base.is_dir():
        raise CheckpointNotFound(
            f"load_model: {folder} changes the model in {base}, which does not exist; put it there, or correct base in "
            f"{CUT_FILE}"
        )
    return base


def stored_cut(folder: Path, config: ModelConfig, *, exit_head: bool = False) -> ModelConfig:
    """The config of the model with the cut, from that of the model without.

    Args:
        exit_head: with its head on the cut.

    Raises:
        ValueError: as `with_cut`, a field is no whole number, or there is no such head.
    """
    values = read_json(folder / CUT_FILE)
    if exit_head and values.get(EXIT_HEAD) is not True:
        raise ValueError(
            f"load_model: {folder} has no head on its cut that drafts; `hybrid-jax distill --exit-head` trains one; or "
            "choose another speculation than 'exit'"
        )
    try:
        numbers = {name: natural(values.get(name), name, least=1) for name in CUT_NUMBERS}
        without_former_fields(values)
        found = with_cut(config, numbers.pop("cut"), **numbers)
        return dataclasses.replace(found, exit_head=exit_head)
    except ValueError as error:
        text = str(error).removeprefix("with_cut: ")
        raise ValueError(f"{folder / CUT_FILE}: {text}") from error


def without_former_fields(fields: dict) -> dict:
    """The fields that models have today, of those that are stored.

    Raises:
        ValueError: one that models no longer have asks for something.
    """
    for name, value in FORMER_FIELDS.items():
        if value is not ANY and fields.get(name, value) != value:
            raise ValueError(
                f"{name} is no longer supported, since it gained nothing, got {fields[name]!r}; make the model again "
                "without it, as with `hybrid-jax distill`"
            )
    return {name: value for name, value in fields.items() if name not in FORMER_FIELDS}


# --- a `ModelConfig` as JSON: each dataclass is an object whose "type" names its class ---------------


def to_json(value: Any) -> Any:
    """A `ModelConfig`, or a value in one, as JSON data; infinity becomes {"__float__": "Infinity"}."""
    if dataclasses.is_dataclass(value):
        fields = {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"type": type(value).__name__} | fields
    if isinstance(value, tuple):
        return [to_json(item) for item in value]
    if isinstance(value, float) and math.isinf(value):
        return {"__float__": "Infinity" if value > 0 else "-Infinity"}
    return value


def from_json(data: dict) -> ModelConfig:
    """The inverse of `to_json`.

    Raises:
        ValueError: an unknown type or field, named; or what the dataclasses refuse.
    """
    config = _decode(plain(data))
    if not isinstance(config, ModelConfig):
        raise ValueError(f"model config: type must be 'ModelConfig', got {data.get('type')!r}")
    return config


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_decode(item) for item in value)
    if not isinstance(value, dict):
        return value
    types = {cls.__name__: cls for cls in (*KINDS, LayerSpec, ModelConfig, Rope, RopeScaling)}
    fields = without_former_fields(value)
    name = fields.pop("type", None)
    if not isinstance(name, str) or name not in types:
        raise ValueError(f"model config: type {name!r} is unknown, only {', '.join(sorted(types))}")
    known = {f.name for f in dataclasses.fields(types[name])}
    unknown = sorted(fields.keys() - known)
    if unknown:
        raise ValueError(f"model config: {name} has no field {unknown[0]!r}")
    found = {key: _decode(item) for key, item in fields.items()}
    hints = get_type_hints(types[name])
    for key, item in found.items():
        if not _fits(item, hints[key]):
            raise ValueError(f"model config: {key} of {name} must not be {reprlib.repr(item)}")
    return types[name](**found)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a decoded value is of the type that a field asks for."""
    inner = get_args(hint)
    if get_origin(hint) in (Union, UnionType):
        return any(_fits(value, one) for one in inner)
    if get_origin(hint) is Literal:
        return value in inner
    if get_origin(hint) is tuple:
        if not isinstance(value, tuple):
            return False
        wanted = inner[:1] * len(value) if inner[-1] is ... else inner
        return len(wanted) == len(value) and all(map(_fits, value, wanted))
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    # A mixer may be of a kind that was registered later.
    return isinstance(value, hint) or (type(value) in KINDS and hint in KINDS)
