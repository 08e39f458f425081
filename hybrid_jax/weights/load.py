"""Reading a model, whichever format its directory is in."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal, cast

from hybrid_jax.config import DTYPES, LayerSpec, ModelConfig, SpeculationConfig
from hybrid_jax.models import FAMILIES
from hybrid_jax.models.family import NO_HEAD
from hybrid_jax.models.files import (
    CUT_FILE,
    STORED_CONFIG_FILE,
    CheckpointNotFound,
    ReportBytes,
    base_of,
    config_of,
    model_folder,
    model_or_bundled,
    stored_cut,
)
from hybrid_jax.models.weight_files import stored_dtype
from hybrid_jax.process.own_settings import own_settings
from hybrid_jax.weights.cut import add_cut
from hybrid_jax.weights.hugging_face import family_of, load_hf
from hybrid_jax.weights.orbax import load_orbax

Dtype = Literal["auto", "float32", "bfloat16", "float16"]


@own_settings()
def load_model(
    path: str | Path | None = None,
    *,
    dtype: Dtype = "auto",
    mtp: bool = False,
    exit_head: bool = False,
    progress: ReportBytes | None = None,
) -> tuple[ModelConfig, dict]:
    """Reads a model from a Hugging Face directory or from one written by `save_orbax`.

    Args:
        path: a directory with config.json and safetensors files, an orbax directory, or a directory with what a model
            with a cut changes of another one; None for the bundled model.
        dtype: of the parameters; "auto" takes the one in which most of their bytes are stored, and float32 for
            float64. A_log, D, dt_bias and the router's correction bias are float32 always.
        mtp: also read the head for multi-token prediction, into params["mtp"].
        exit_head: also read the head on the model's cut, into params["exit"].
        progress: called with (bytes done, bytes in all) as the parameters arrive.

    Returns:
        The model's config, its dtype being that of the parameters, and the parameter tree of
        `models.decoder`.

    Raises:
        FileNotFoundError: a file is missing (it is a ValueError too).
        ValueError: an unknown family, a missing or malformed field, a truncated file, a missing,
            unexpected or wrongly shaped tensor, or NaN in a vector or among 1024 values of a matrix of a
            Hugging Face checkpoint.
        NotImplementedError: a field that is not supported, quantised weights, an adapter, or the layout of another
            program.

    Example:
        >>> config, params = load_model()
        >>> config.family, params["embed"].shape == (config.vocab_size, config.width)
        ('granitemoehybrid', True)
        >>> config, params = load_model("gone")
        Traceback (most recent call last):
        ...
        hybrid_jax.models.files.CheckpointNotFound: load_model: gone does not exist; give a ...
    """
    if dtype not in ("auto", *DTYPES):
        raise ValueError(f"load_model: dtype must be auto or one of {DTYPES}, got {dtype!r}")
    folder = model_or_bundled(path)
    if (folder / CUT_FILE).is_file():
        _refuse_head(folder, mtp)
        base = base_of(folder)
        plain = _load_plain(base, dtype, False, progress)
        return add_cut(folder, *plain, exit_head=exit_head)
    _refuse_exit(folder, exit_head)
    return _load_plain(folder, dtype, mtp, progress)


def _load_plain(
    folder: Path, dtype: Dtype, mtp: bool, progress: ReportBytes | None
) -> tuple[ModelConfig, dict]:
    """A model without a cut of its own."""
    config = _plain_config(folder, mtp)
    report = progress or (lambda done, total: None)
    if (folder / STORED_CONFIG_FILE).is_file():
        stored, params = load_orbax(folder, config_of(folder), dtype, report)
        if stored.mtp and not mtp:
            params.pop("mtp")
        return replace(stored, mtp=config.mtp), params
    return load_hf(folder, config, dtype, report)


def _mtp_layers(folder: Path, config: ModelConfig) -> tuple[LayerSpec, ...]:
    stored = (folder / STORED_CONFIG_FILE).is_file() or config.family not in FAMILIES
    make = None if stored else family_of(folder, config).mtp
    if make is None:
        known = ", ".join(name for name, family in FAMILIES.items() if family.mtp)
        raise ValueError(
            f"load_model: {folder} of family {config.family} has no head for multi-token prediction that is "
            f"supported; Hugging Face checkpoints of {known} may have one; {NO_HEAD}"
        )
    return make(config)


def load_with_drafter(
    path: str | Path,
    speculation: SpeculationConfig | None,
    *,
    dtype: Dtype = "auto",
    progress: ReportBytes | None = None,
) -> tuple[ModelConfig, dict]:
    """Reads a model and what is to draft for it: its head, or the second model, in the same dtype.

    Args:
        path, dtype, progress: as in `load_model`.
        speculation: how an engine is to draft; None for not at all.

    Returns:
        Config and parameters as `load_model`. A second model is in `ModelConfig.draft` and params["draft"].

    Raises:
        As `load_model`.
        ValueError: the second model has another vocabulary.
    """
    config, params = load_model(path, dtype=dtype, progress=progress, **_heads(speculation))
    return add_draft(config, params, speculation, dtype=config.dtype, progress=progress)


def load_config_with_drafter(
    path: str | Path, speculation: SpeculationConfig | None
) -> ModelConfig:
    """The config that `load_with_drafter` would return, but for the dtype; reads no weights."""
    config = load_config(path, **_heads(speculation))
    return config if speculation is None else _with_second(config, speculation)


def _heads(speculation: SpeculationConfig | None) -> dict[str, bool]:
    """Which of a model's heads are to draft, as `load_model` takes them."""
    method = None if speculation is None else speculation.method
    return {"mtp": method == "mtp", "exit_head": method == "exit"}


def add_draft(
    config: ModelConfig,
    params: dict,
    speculation: SpeculationConfig | None,
    *,
    dtype: str,
    progress: ReportBytes | None = None,
) -> tuple[ModelConfig, dict]:
    """A model in memory, in `dtype`, and beside it the second model that `speculation` names, if it names one.

    Raises:
        As `load_with_drafter`.
    """
    if speculation is None or speculation.model is None:
        return config, params
    _with_second(config, speculation)
    draft, weights = load_model(speculation.model, dtype=cast(Dtype, dtype), progress=progress)
    return with_draft(config, draft, speculation.model), params | {"draft": weights}


def _with_second(config: ModelConfig, speculation: SpeculationConfig) -> ModelConfig:
    """A model's config with the second model that `speculation` names, if it names one."""
    if speculation.model is None:
        return config
    try:
        draft = load_config(speculation.model)
    except CheckpointNotFound as error:
        raise CheckpointNotFound(f"the second model: {error}") from error
    return with_draft(config, draft, speculation.model)


def with_draft(config: ModelConfig, draft: ModelConfig, path: str) -> ModelConfig:
    """A model's config with a second model, read from `path`, that drafts for it.

    Raises:
        ValueError: the second model has another vocabulary.
    """
    if draft.vocab_size != config.vocab_size:
        raise ValueError(
            f"SpeculationConfig: model must have the vocabulary of the model that it drafts for, {config.vocab_size} "
            f"tokens, and {path} has {draft.vocab_size}; use a smaller model of the same family"
        )
    return replace(config, mtp=(), draft=draft)


def load_config(path: str | Path, *, mtp: bool = False, exit_head: bool = False) -> ModelConfig:
    """The config of a model directory, of either kind; of weights it reads only in which dtype most bytes are.

    Args:
        path, mtp, exit_head: as in `load_model`.

    Raises:
        FileNotFoundError, ValueError, NotImplementedError: as `load_model`.
    """
    folder = model_folder(path)
    if (folder / CUT_FILE).is_file():
        _refuse_head(folder, mtp)
        base = _plain_config(base_of(folder), False)
        return stored_cut(folder, base, exit_head=exit_head)
    _refuse_exit(folder, exit_head)
    return _plain_config(folder, mtp)


def _refuse_head(folder: Path, mtp: bool) -> None:
    if mtp:
        raise ValueError(
            f"load_model: {folder} has a cut, so the tokens of prompts have no last hidden states, from which a head "
            f"for multi-token prediction drafts; {NO_HEAD}"
        )


def _refuse_exit(folder: Path, exit_head: bool) -> None:
    if exit_head:
        raise ValueError(
            f"load_model: {folder} was not made by `hybrid-jax distill`, so it has no head on a cut that drafts; "
            "choose another speculation than 'exit'"
        )


def _plain_config(folder: Path, mtp: bool) -> ModelConfig:
    """The config of a model without a cut of its own."""
    config = config_of(folder)
    if not (folder / STORED_CONFIG_FILE).is_file():
        config = replace(config, dtype=stored_dtype(folder) or config.dtype)
    if not mtp:
        return replace(config, mtp=())
    return config if config.mtp else replace(config, mtp=_mtp_layers(folder, config))
