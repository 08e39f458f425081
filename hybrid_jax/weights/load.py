"""Reading a model, whichever format its directory is in."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, cast

from hybrid_jax.config import DTYPES, Layer, ModelConfig, SpeculationConfig
from hybrid_jax.config.formats import Quantize
from hybrid_jax.kinds.quantize import quantized
from hybrid_jax.models import FAMILIES
from hybrid_jax.models.checkpoint import Checkpoint, base_of, open_checkpoint, stored_cut
from hybrid_jax.models.family import NO_HEAD
from hybrid_jax.models.files import CUT_FILE, CheckpointNotFound, ReportBytes, model_or_bundled
from hybrid_jax.process.own_settings import own_settings
from hybrid_jax.weights.cut import CutWeights
from hybrid_jax.weights.hugging_face import load_hf
from hybrid_jax.weights.orbax import load_orbax
from hybrid_jax.weights.put import Put

Dtype = Literal["auto", "float32", "bfloat16", "float16"]


@own_settings()
def load_model(
    path: str | Path | None = None,
    *,
    dtype: Dtype = "auto",
    mtp: bool = False,
    exit_head: bool = False,
    quantize: Quantize | None = None,
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
        quantize: matrices of layers become codes, one after the other, as `EngineConfig.quantize` says.
        progress: called with (bytes done, bytes in all) as the parameters arrive.

    Returns:
        The model's config, its dtype being that of the parameters, and the parameter tree of
        `models.decoder`.

    Raises:
        FileNotFoundError: a file is missing (it is a ValueError too).
        ValueError: an unknown family, a missing or malformed field, a truncated file, a missing,
            unexpected or wrongly shaped tensor, or NaN in a vector or among 1024 values of a matrix of a
            Hugging Face checkpoint.
        NotImplementedError: a field or a way of quantising that is not supported, an adapter, or the layout of another
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
    opened = open_model(path, mtp=mtp, exit_head=exit_head)
    if quantize is not None:
        opened = opened.quantized(quantize)
    return opened.load(dtype=dtype, progress=progress)


def load_config(path: str | Path, *, mtp: bool = False, exit_head: bool = False) -> ModelConfig:
    """The config of a model directory, of either kind; of weights it reads only in which dtype most bytes are.

    Args:
        path, mtp, exit_head: as in `load_model`.

    Raises:
        FileNotFoundError, ValueError, NotImplementedError: as `load_model`.
    """
    return open_model(path, mtp=mtp, exit_head=exit_head).config


@dataclass(frozen=True, kw_only=True, eq=False)
class OpenModel:
    """A model whose small files have been read, and whose weights have not.

    Attributes:
        checkpoint: of the model without a cut.
        plain: its config, with the head for multi-token prediction if that is asked for.
        config: of the whole model: with its cut, and with the second model.
        cut: the directory with what a cut changes; None for a model without one.
        second: a second model that drafts, or None.
    """

    checkpoint: Checkpoint
    plain: ModelConfig
    config: ModelConfig
    cut: Path | None = None
    second: OpenModel | None = None

    def quantized(self, name: Quantize) -> OpenModel:
        """The same with matrices that become codes while they are read; a second model stays as it is.

        Raises:
            ValueError: they are codes already. NotImplementedError: the model has a cut.
        """
        if self.cut is not None:
            raise NotImplementedError(
                f"load_model: a model with a cut is not quantised yet, and {self.cut} has one; leave quantize out"
            )
        plain = quantized(self.plain, name)
        return replace(self, plain=plain, config=replace(self.config, matrices=plain.matrices))

    def load(
        self,
        *,
        dtype: Dtype = "auto",
        progress: ReportBytes | None = None,
        put: Put | None = None,
    ) -> tuple[ModelConfig, dict]:
        """Config and parameters as `load_model`. A second model is in `ModelConfig.draft` and params["draft"].

        Args:
            put: as in `load_hf`; the config that it is given is that of the model or of the second model.

        Raises:
            As `load_model`.
        """
        report = progress or (lambda done, total: None)
        cut = None
        if self.cut is not None:
            cut = CutWeights(self.cut, self.config, self.plain, put)
        read = load_orbax if self.checkpoint.is_stored else load_hf
        config, params = read(
            self.checkpoint, self.plain, dtype, report, put if cut is None else cut.put
        )
        if cut is not None:
            config, params = cut.complete(config, params)
        return add_second(
            config, params, self.second, dtype=config.dtype, progress=progress, put=put
        )


def open_model(path: str | Path | None, *, mtp: bool = False, exit_head: bool = False) -> OpenModel:
    """Reads the small files of a model's directory; the arguments are those of `load_model`.

    Raises:
        As `load_model`.
    """
    folder = model_or_bundled(path)
    if (folder / CUT_FILE).is_file():
        if mtp:
            raise ValueError(
                f"load_model: {folder} has a cut, so the tokens of prompts have no last hidden states, from which a "
                f"head for multi-token prediction drafts; {NO_HEAD}"
            )
        base = open_checkpoint(base_of(folder))
        plain = replace(base.config, mtp=())
        config = stored_cut(folder, plain, exit_head=exit_head)
        return OpenModel(checkpoint=base, plain=plain, config=config, cut=folder)
    if exit_head:
        raise ValueError(
            f"load_model: {folder} was not made by `hybrid-jax distill`, so it has no head on a cut that drafts; "
            "choose another speculation than 'exit'"
        )
    checkpoint = open_checkpoint(folder)
    head = (checkpoint.config.mtp or _mtp_layers(checkpoint)) if mtp else ()
    config = replace(checkpoint.config, mtp=head)
    return OpenModel(checkpoint=checkpoint, plain=config, config=config)


def _mtp_layers(checkpoint: Checkpoint) -> tuple[Layer, ...]:
    config = checkpoint.config
    make = None if checkpoint.is_stored else checkpoint.family.mtp
    if make is None:
        known = ", ".join(name for name, family in FAMILIES.items() if family.mtp)
        raise ValueError(
            f"load_model: {checkpoint.folder} of family {config.family} has no head for multi-token prediction that is "
            f"supported; Hugging Face checkpoints of {known} may have one; {NO_HEAD}"
        )
    return make(config)


# --- what drafts for a model ------------------------------------------------------------------------


def open_with_drafter(path: str | Path, speculation: SpeculationConfig | None) -> OpenModel:
    """As `open_model`, with what is to draft for the model: its head, or a second model.

    Args:
        path: as in `load_model`.
        speculation: how an engine is to draft; None for not at all.

    Raises:
        As `load_model`.
        ValueError: the second model has another vocabulary.
    """
    method = None if speculation is None else speculation.method
    opened = open_model(path, mtp=method == "mtp", exit_head=method == "exit")
    second = open_second(opened.config, speculation)
    if second is None:
        return opened
    return replace(opened, second=second, config=with_draft(opened.config, second.config))


def open_second(config: ModelConfig, speculation: SpeculationConfig | None) -> OpenModel | None:
    """The second model that `speculation` names, if it names one, for a model with this config.

    Raises:
        As `open_with_drafter`.
    """
    if speculation is None or speculation.model is None:
        return None
    try:
        second = open_model(speculation.model)
    except CheckpointNotFound as error:
        raise CheckpointNotFound(f"the second model: {error}") from error
    if second.config.vocab_size != config.vocab_size:
        raise ValueError(
            f"SpeculationConfig: model must have the vocabulary of the model that it drafts for, {config.vocab_size} "
            f"tokens, and {speculation.model} has {second.config.vocab_size}; use a smaller model of the same family"
        )
    return second


def with_draft(config: ModelConfig, draft: ModelConfig) -> ModelConfig:
    """A model's config with a second model that drafts for it."""
    return replace(config, mtp=(), draft=draft)


def add_second(
    config: ModelConfig,
    params: dict,
    second: OpenModel | None,
    *,
    dtype: str,
    progress: ReportBytes | None = None,
    put: Put | None = None,
) -> tuple[ModelConfig, dict]:
    """A model in memory, in `dtype`, and beside it the second model, if there is one.

    Args:
        put: of the second model's weights, as in `load_hf`.
    """
    if second is None:
        return config, params
    draft, weights = second.load(dtype=cast(Dtype, dtype), progress=progress, put=put)
    return with_draft(config, draft), params | {"draft": weights}
