"""Reading a model, whichever format its directory is in."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

from hybrid_jax.config import DTYPES, LayerSpec, ModelConfig
from hybrid_jax.models import FAMILIES
from hybrid_jax.models.files import (
    CONFIG_FILE,
    STORED_CONFIG_FILE,
    CheckpointNotFound,
    ReportBytes,
    model_folder,
    read_config,
    read_json,
)
from hybrid_jax.models.hf_config import check_token_ids, plain
from hybrid_jax.weights.hugging_face import load_hf
from hybrid_jax.weights.orbax import load_orbax

Dtype = Literal["auto", "float32", "bfloat16", "float16"]


def load_model(
    path: str | Path,
    *,
    dtype: Dtype = "auto",
    mtp: bool = False,
    progress: ReportBytes | None = None,
) -> tuple[ModelConfig, dict]:
    """Reads a model from a Hugging Face directory or from one written by `save_orbax`.

    Args:
        path: a directory with config.json and model.safetensors (or its shards and their index), or an
            orbax directory.
        dtype: of the parameters; "auto" keeps the one they are stored in. A_log, D, dt_bias and the
            router's correction bias are float32 always.
        mtp: also read the head for multi-token prediction, into params["mtp"].
        progress: called with (bytes done, bytes in all) as the parameters arrive.

    Returns:
        The model's config, its dtype being that of the parameters, and the parameter tree of
        `models.decoder`.

    Raises:
        FileNotFoundError: a file is missing (it is a ValueError too).
        ValueError: an unknown family, a missing or malformed field, a truncated file, a missing,
            unexpected or wrongly shaped tensor, or NaN in a vector or among 1024 values of a matrix of a
            Hugging Face checkpoint.
        NotImplementedError: a field or a stored dtype that is not supported.

    Example:
        >>> config, params = load_model("gone")
        Traceback (most recent call last):
        ...
        hybrid_jax.models.files.CheckpointNotFound: load_model: gone does not exist; give a ...
    """
    if dtype not in ("auto", *DTYPES):
        raise ValueError(f"load_model: dtype must be auto or one of {DTYPES}, got {dtype!r}")
    folder = model_folder(path)
    config = load_config(folder)
    if mtp and not config.mtp:
        config = replace(config, mtp=_mtp_layers(folder, config))
    report = progress or (lambda done, total: None)
    if (folder / STORED_CONFIG_FILE).is_file():
        config, params = load_orbax(folder, config, dtype, report)
        if config.mtp and not mtp:
            params.pop("mtp")
            config = replace(config, mtp=())
        return config, params
    return load_hf(folder, config, dtype, report)


def _mtp_layers(folder: Path, config: ModelConfig) -> tuple[LayerSpec, ...]:
    make = FAMILIES[config.family].mtp if config.family in FAMILIES else None
    if make is None or (folder / STORED_CONFIG_FILE).is_file():
        known = ", ".join(name for name, family in FAMILIES.items() if family.mtp)
        raise ValueError(
            f"load_model: mtp=True, and {folder} of family {config.family} has no head for multi-token prediction "
            f"that is supported; Hugging Face checkpoints of {known} may have one"
        )
    return make(config)


def load_config(path: str | Path) -> ModelConfig:
    """The config of a model directory, of either kind; reads no weights.

    Raises:
        FileNotFoundError, ValueError, NotImplementedError: as `load_model`.
    """
    folder = model_folder(path)
    if (folder / STORED_CONFIG_FILE).is_file():
        return read_config(folder / STORED_CONFIG_FILE)
    if not (folder / CONFIG_FILE).is_file():
        raise CheckpointNotFound(
            f"load_model: {folder} has no {CONFIG_FILE} and no {STORED_CONFIG_FILE}; "
            "give a Hugging Face directory or one written by save_orbax"
        )
    config = read_config(folder / CONFIG_FILE)
    generation = folder / "generation_config.json"
    if not generation.is_file():
        return config
    ids = plain(read_json(generation)).get("eos_token_id")
    try:
        ids = check_token_ids("eos_token_id", ids, config.vocab_size)
    except ValueError as error:
        raise ValueError(f"{generation}: {error}") from error
    merged = dict.fromkeys((*ids, *config.eos_token_ids))  # in order, each once
    return replace(config, eos_token_ids=tuple(merged))
