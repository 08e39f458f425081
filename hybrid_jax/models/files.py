"""Where models are: directories, names, and the errors that say what is missing. Needs no jax."""

from __future__ import annotations

import difflib
import re
import reprlib
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from os import PathLike
from pathlib import Path

from hybrid_jax.config.model_directory import CONFIG_FILE as CONFIG_FILE
from hybrid_jax.config.model_directory import hub_name, hub_snapshot
from hybrid_jax.config.model_directory import read_json as read_json

PACKAGE = Path(__file__).resolve().parents[1]
BUNDLED = PACKAGE / "bundled"  # the model where none is named
# Models that are known by name: a link to configs/models; installed packages have a copy.
KNOWN_MODELS = PACKAGE / "known_models"


def _more_models() -> Path:
    """Where the models of the distribution hybrid-jax-models are: in a clone, or where it is installed."""
    clone = PACKAGE.parent / "models" / "hybrid_jax_models"
    found = None if clone.is_dir() else find_spec(clone.name)
    return clone if found is None or found.origin is None else Path(found.origin).parent


# Models with weights that have a name.
PACKED = {name: _more_models() / name for name in ("tiny_gated_delta", "tiny_cut")}
TRAINING = "training_state"  # in a directory whose model is being trained, or was
ReportBytes = Callable[[int, int], None]  # bytes done, bytes in all, while a model is read
STORED_CONFIG_FILE = "model_config.json"  # beside an orbax checkpoint
CUT_FILE = "cut.json"  # of a model with a cut: where the model without lies, and these numbers of `with_cut`
FETCH_ORIGINAL = "fetch the original model, in safetensors and not quantised"


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
        require_packed(path, where)
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


def require_packed(path: str | Path, where: str) -> None:
    """Raises CheckpointNotFound if this names a model of hybrid-jax-models, which is not there."""
    if str(path) in PACKED and not PACKED[str(path)].is_dir():
        raise CheckpointNotFound(
            f"{where}: {path} is a model of hybrid-jax-models, which is not installed; run pip install ./models in a "
            "clone of the repository, or give a model directory"
        )


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
