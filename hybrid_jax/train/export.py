"""Writes a trained model as a Hugging Face directory, with a byte tokenizer and the record of its training."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import tokenizers
from safetensors.numpy import save_file

from hybrid_jax.config import MLP, Layer, ModelConfig, MoE
from hybrid_jax.kinds.table import kind_of
from hybrid_jax.kinds.tensors import Stored
from hybrid_jax.models import FAMILIES, config_from_hf
from hybrid_jax.models.stored_config import to_json
from hybrid_jax.text.tokenizer import byte_alphabet
from hybrid_jax.train import TrainOptions
from hybrid_jax.train.data import HELD_OUT_SHARE, SPECIAL_TOKENS, Corpus
from hybrid_jax.train.state import TrainProgress

WEIGHTS_FILE = "model.safetensors"
PACKAGES = ("jax", "jaxlib", "numpy", "optax")  # whose versions the record names


def write_model(folder: Path, params: dict, fields: dict, mtp: tuple[Layer, ...] = ()) -> None:
    """Writes config.json, model.safetensors, tokenizer.json and their small neighbours into `folder`.

    Matrices, embeddings and norms are stored in bfloat16; A_log, D and dt_bias in float32. Each file
    is replaced in one piece, weights last.

    Args:
        folder: made if absent; files of the same names are replaced.
        params: float32 parameters as in `models.decoder`.
        fields: the contents of config.json, with the ids of the special tokens.
        mtp: layers of the head for multi-token prediction, if `params` has one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = replace(config_from_hf(fields), mtp=mtp)
    ids = {name: fields[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    end, pad = SPECIAL_TOKENS[0], SPECIAL_TOKENS[1]
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.max_position,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
        "bos_token": end,
        "eos_token": end,
        "pad_token": pad,
    }
    _write(folder / "config.json", _json(fields))
    _write(folder / "generation_config.json", _json(ids | {"do_sample": False}))
    _write(folder / "tokenizer_config.json", _json(tokenizer_config))
    _write(folder / "tokenizer.json", byte_tokenizer().to_str(pretty=True))
    partial = folder / f"{WEIGHTS_FILE}.partial"
    save_file(hf_tensors(params, config), partial, metadata={"format": "pt"})
    partial.replace(folder / WEIGHTS_FILE)


def hf_tensors(params: dict, config: ModelConfig) -> dict[str, np.ndarray]:
    """Our parameter tree as the named tensors of its family, the inverse of loading."""
    tree = FAMILIES[config.family].stored(config)
    tensors: dict[str, np.ndarray] = {}

    def write(leaf: Stored, value: jax.Array) -> None:
        value = np.asarray(value, np.float32)
        dtype = np.float32 if leaf.float32 else ml_dtypes.bfloat16
        for part in leaf.parts:
            piece = (value[part.place] - np.float32(part.plus)) / np.float32(part.factor)
            if leaf.layout == "linear":
                piece = np.swapaxes(piece, -1, -2)
            elif leaf.layout == "conv":
                piece = piece.T[:, None]  # [W, E] to [E, 1, W]
            tensor = tensors.setdefault(part.name, np.empty(part.shape, dtype))
            if (rows := part.rows) is None:
                tensor[...] = piece
            else:
                blocks = tensor.reshape(rows.blocks, rows.size, *part.shape[1:])
                blocks[:, rows.start : rows.stop] = piece.reshape(rows.blocks, -1, *part.shape[1:])

    jax.tree.map(write, tree, params)  # a Stored is a leaf
    return tensors


def rounded(params: dict, config: ModelConfig) -> dict:
    """The parameters as they are after storing: through bfloat16 where `hf_tensors` rounds."""
    tree = FAMILIES[config.family].stored(config)

    def through(leaf: Stored, value: jax.Array) -> jax.Array:
        return value if leaf.float32 else value.astype(jax.numpy.bfloat16).astype(value.dtype)

    return jax.tree.map(through, tree, params)


def byte_tokenizer() -> tokenizers.Tokenizer:
    """Bytes as tokens: id = byte value, no merges, the special tokens from 256 on.

    No token is added to a prompt: a prompt need not be the start of a file.
    """
    alphabet = byte_alphabet()
    vocabulary = {character: byte for byte, character in enumerate(alphabet)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [tokenizers.AddedToken(name, special=True, normalized=False) for name in SPECIAL_TOKENS]
    )
    return tokenizer


def training_record(
    config: ModelConfig,
    params: dict,
    corpus: Corpus,
    options: TrainOptions,
    at: TrainProgress,
    sources: Sequence[Path],
    held_out: dict,
    command: str = "train_tiny",
    more: dict | None = None,
) -> dict:
    """The contents of training_record.json; names directories by their last part only.

    Args:
        config, params, corpus, sources: the model, what was trained of it, and on what.
        options: what `command` was given. more: its other arguments.
        at: where the training ended.
        held_out: measurements by name, see `evaluate.bits_per_byte`.
    """
    arguments = {k: v for k, v in asdict(options).items() if v is not None} | (more or {})
    arguments["sources"] = [source.name for source in sources]
    if options.config is not None:
        arguments["config"] = Path(*Path(options.config).parts[-2:]).as_posix()
    call = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    seen = at.step * options.batch * options.context
    return {
        "command": f"{command}(OUT, {call})",
        "held_out": held_out,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(params)),
        "steps": at.step,
        "tokens_seen": seen,
        "epochs": round(seen / sum(document.num_tokens for document in corpus.train), 3),
        "runs": at.runs,
        "wall_minutes": round(at.seconds / 60, 1),
        "seed": options.seed,
        "device": next(iter(jax.device_put(0).devices())).platform,
        "versions": {"python": platform.python_version()}
        | {name: metadata.version(name) for name in PACKAGES},
        "config": _summary(config),
        "corpus": {
            "sha256": corpus.digest(),
            "train_files": len(corpus.train),
            "train_bytes": sum(len(d.content) for d in corpus.train),
            "held_out_files": len(corpus.held_out),
            "held_out_bytes": sum(len(d.content) for d in corpus.held_out),
            "held_out_share": HELD_OUT_SHARE,
            "duplicates_left_out": corpus.duplicates,
            "near_copies_of_held_out_left_out": list(corpus.copies),
            "held_out_names": [d.name for d in corpus.held_out],
        },
        "history": at.history,
    }


def _summary(config: ModelConfig) -> dict:
    mlp = next((part for part in config.layers[0].parts if isinstance(part, MLP | MoE)), None)
    mixers: dict[str, Any] = {}
    for mixer in (mixer for layer in config.layers for mixer in layer.mixers):
        mixers.setdefault(kind_of(mixer).name, to_json(mixer))
    return {
        "pattern": "".join(type(mixer).__name__[0] for s in config.layers for mixer in s.mixers),
        "width": config.width,
        "mlp_width": None if mlp is None else mlp.width,
        "vocab_size": config.vocab_size,
        "max_position": config.max_position,
    } | mixers


def _json(fields: dict) -> str:
    return json.dumps(fields, indent=1) + "\n"


def _write(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
