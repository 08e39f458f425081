"""A model's directory, opened once: what its small files say, and which files hold its weights. Needs no jax."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hybrid_jax.config import ModelConfig, with_cut
from hybrid_jax.config.checks import natural
from hybrid_jax.config.formats import Format
from hybrid_jax.config.model_directory import (
    GENERATION_FILE,
    is_there,
    read_json_if_there,
    refuse_adapter,
)
from hybrid_jax.models import FAMILIES, Family, config_from_hf
from hybrid_jax.models.files import (
    BUNDLED,
    CONFIG_FILE,
    CUT_FILE,
    FETCH_ORIGINAL,
    STORED_CONFIG_FILE,
    TRAINING,
    CheckpointNotFound,
    read_json,
)
from hybrid_jax.models.hf_config import HFConfig, check_token_ids, plain
from hybrid_jax.models.published.about import About, read_about
from hybrid_jax.models.published.matrices import matrices_in
from hybrid_jax.models.stored_config import from_json, without_former_fields
from hybrid_jax.models.weight_files import DTYPES, WeightFiles, find_weight_files, stored_dtype

CUT_NUMBERS = ("cut", "kv_group", "state_group")
EXIT_HEAD = "exit_head"  # true if there is a head on the cut


@dataclass(frozen=True, kw_only=True, eq=False)
class Checkpoint:
    """The directory of a model, without what a cut of its own changes. Its small files are read once, at the opening.

    Attributes:
        folder: the directory.
        is_stored: `save_orbax` wrote it. If not, it has the layout of Hugging Face.
        fields: the contents of config.json, or of what `save_orbax` wrote in its place.
        config: the model that they describe, with the end tokens of all files that name some, in the dtype in which
            most bytes of its weights are.
        weights: as `find_weight_files` has them; none if it raises.
        about: what is said of weights that are kept as codes; None for nothing.
    """

    folder: Path
    is_stored: bool
    fields: dict[str, Any]
    config: ModelConfig
    weights: Sequence[WeightFiles]
    about: About | None = None

    @functools.cached_property
    def family(self) -> Family:
        """What its tensors are called in the layout of Hugging Face."""
        name = self.config.family
        return FAMILIES[name].of(HFConfig(self.fields, name))


def open_checkpoint(folder: Path, where: str = "load_model") -> Checkpoint:
    """Reads the small files of a directory, and the headers of its weights, which tell the dtype.

    What is wrong with the weights shows when they are loaded.

    Raises:
        CheckpointNotFound: there is no config.
        NotImplementedError: the directory has an adapter. ValueError: as `read_config`.
    """
    refuse_adapter(folder, where)
    names = (STORED_CONFIG_FILE, CONFIG_FILE)
    file = next((folder / name for name in names if is_there(folder / name, where)), None)
    if file is None:
        raise CheckpointNotFound(
            f"{where}: {folder} has no {CONFIG_FILE} and no {STORED_CONFIG_FILE}; {_instead(folder)}"
        )
    fields = read_json(file, where)
    config = _described(file, fields)
    generation = folder / GENERATION_FILE
    try:
        ids = plain(read_json_if_there(generation, where)).get("eos_token_id")
        ids = check_token_ids("eos_token_id", ids, config.vocab_size)
    except ValueError as error:
        named = str(error) if str(generation) in str(error) else f"{generation}: {error}"
        raise ValueError(named) from error
    merged = dict.fromkeys((*ids, *config.eos_token_ids))  # in order, each once
    config = replace(config, eos_token_ids=tuple(merged))
    is_stored, weights = file.name == STORED_CONFIG_FILE, list[WeightFiles]()
    if not is_stored:
        with suppress(OSError, ValueError):
            weights = find_weight_files(folder)
            config = replace(config, dtype=stored_dtype(weights) or config.dtype)
    about = None if is_stored else read_about(fields, folder, where)
    found = Checkpoint(
        folder=folder,
        is_stored=is_stored,
        fields=fields,
        config=config,
        weights=weights,
        about=about,
    )
    return replace(found, config=replace(config, matrices=_matrices(found)))


def _matrices(checkpoint: Checkpoint) -> tuple[tuple[str, Format], ...]:
    """How the files of a directory keep matrices, as their headers tell: of its head, too, if they have one."""
    if not checkpoint.weights or checkpoint.is_stored:
        return checkpoint.config.matrices
    with suppress(OSError, ValueError, NotImplementedError):
        headers = checkpoint.weights[0].headers
        entries = {name: one for header in headers.values() for name, one in header.entries.items()}
        if checkpoint.about is None and all(one.dtype in DTYPES for one in entries.values()):
            return ()
        return matrices_in(entries, checkpoint.family, checkpoint.config, checkpoint.about)
    return ()


def read_config(file: Path, where: str = "load_model") -> ModelConfig:
    """The model that a config.json or a model_config.json describes; every error names the file.

    Raises:
        ValueError, NotImplementedError: as `config_from_hf` and `from_json`.
    """
    return _described(file, read_json(file, where))


def _described(file: Path, fields: dict[str, Any]) -> ModelConfig:
    try:
        return from_json(fields) if file.name == STORED_CONFIG_FILE else config_from_hf(fields)
    except NotImplementedError as error:
        raise NotImplementedError(f"{file}: {error}") from error
    except (ValueError, TypeError) as error:  # a TypeError for a field that a dataclass misses
        raise ValueError(f"{file}: {error}") from error


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
        return replace(found, exit_head=exit_head)
    except ValueError as error:
        text = str(error).removeprefix("with_cut: ")
        raise ValueError(f"{folder / CUT_FILE}: {text}") from error
