"""Writes a trained model as a Hugging Face directory: config, safetensors, byte tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import tokenizers
from safetensors.numpy import save_file

from hybrid_jax.config import MLP, Attention, Mamba2, ModelConfig
from hybrid_jax.kinds.tensors import Stored
from hybrid_jax.models import FAMILIES
from hybrid_jax.text.tokenizer import byte_alphabet
from hybrid_jax.train.data import END, PAD, SPECIAL_TOKENS

WEIGHTS_FILE = "model.safetensors"


def write_model(folder: Path, params: dict, config: ModelConfig) -> None:
    """Writes config.json, model.safetensors, tokenizer.json and their small neighbours into `folder`.

    Matrices, embeddings and norms are stored in bfloat16; A_log, D and dt_bias in float32. Each file
    is replaced in one piece, weights last.

    Args:
        folder: made if absent; files of the same names are replaced.
        params: float32 parameters as in `models.decoder`.
        config: a Granite-4 shaped model; see `hf_config`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ids = {"bos_token_id": END, "eos_token_id": END, "pad_token_id": PAD}
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
    _write(folder / "config.json", _json(hf_config(config) | ids))
    _write(folder / "generation_config.json", _json(ids | {"do_sample": False}))
    _write(folder / "tokenizer_config.json", _json(tokenizer_config))
    _write(folder / "tokenizer.json", byte_tokenizer().to_str(pretty=True))
    partial = folder / f"{WEIGHTS_FILE}.partial"
    save_file(hf_tensors(params, config), partial, metadata={"format": "pt"})
    partial.replace(folder / WEIGHTS_FILE)


def hf_config(config: ModelConfig) -> dict:
    """The fields of config.json for a dense `granitemoehybrid`.

    Raises:
        NotImplementedError: layers that such a file cannot describe.
    """
    attention, mamba = config.attention, next(iter(config.mixers(Mamba2)), None)
    mlps = {layer.mlp for layer in config.layers}
    if (
        config.family != "granitemoehybrid"
        or attention is None
        or mamba is None
        or any(len(layer.mixers) != 1 for layer in config.layers)
        or len(mlps) != 1
        or not isinstance(mlp := next(iter(mlps)), MLP)
        or mamba.inner_size % config.width
        or attention.num_heads * attention.head_dim != config.width
    ):
        raise NotImplementedError(
            "hf_config: needs a granitemoehybrid of attention and Mamba-2 layers with one kind of MLP, "
            f"inner sizes that are multiples of the width, got {config}"
        )
    kinds = ["attention" if isinstance(s.mixers[0], Attention) else "mamba" for s in config.layers]
    return {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "num_hidden_layers": len(kinds),
        "layer_types": kinds,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "attention_bias": attention.qkv_bias,
        "attention_dropout": 0.0,
        "attention_multiplier": attention.softmax_scale,
        "position_embedding_type": "nope" if attention.rope is None else "rope",
        "mamba_n_heads": mamba.num_heads,
        "mamba_d_head": mamba.head_dim,
        "mamba_d_state": mamba.state_size,
        "mamba_n_groups": mamba.num_groups,
        "mamba_d_conv": mamba.conv_width,
        "mamba_expand": mamba.inner_size // config.width,
        "mamba_chunk_size": 64,
        "mamba_conv_bias": mamba.conv_bias,
        "mamba_proj_bias": mamba.proj_bias,
        "hidden_act": "silu",
        "intermediate_size": mlp.width,
        "shared_intermediate_size": mlp.width,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "rms_norm_eps": config.norm_eps,
        "embedding_multiplier": config.embedding_multiplier,
        "residual_multiplier": config.residual_multiplier,
        "logits_scaling": 1.0 / config.logits_multiplier,
        "max_position_embeddings": config.max_position,
        "tie_word_embeddings": config.tie_embeddings,
        "initializer_range": 0.02,
        "use_cache": True,
    }


def hf_tensors(params: dict, config: ModelConfig) -> dict[str, np.ndarray]:
    """Our parameter tree as the named tensors of its family, the inverse of loading."""
    tree = FAMILIES[config.family].stored(config)
    tensors: dict[str, np.ndarray] = {}

    def write(leaf: Stored, value: jax.Array) -> None:
        value = np.asarray(value, np.float32)
        sizes = [shape[0] for _, shape in leaf.parts] if len(leaf.parts) > 1 else []
        pieces = np.split(value, np.cumsum(sizes)[:-1], axis=-1) if sizes else [value]
        dtype = np.float32 if leaf.keep_dtype else ml_dtypes.bfloat16
        for (name, shape), piece in zip(leaf.parts, pieces, strict=True):
            if leaf.layout == "linear":
                piece = np.swapaxes(piece, -1, -2)
            elif leaf.layout == "conv":
                piece = piece.T[:, None]  # [W, E] to [E, 1, W]
            assert piece.shape == shape, f"{name}: {piece.shape}, its family says {shape}"
            tensors[name] = np.ascontiguousarray(piece.astype(dtype))

    jax.tree.map(write, tree, params, is_leaf=lambda leaf: isinstance(leaf, Stored))
    return tensors


def rounded(params: dict, config: ModelConfig) -> dict:
    """The parameters as they are after storing: through bfloat16 where `hf_tensors` rounds."""
    tree = FAMILIES[config.family].stored(config)

    def through(leaf: Stored, value: jax.Array) -> jax.Array:
        return value if leaf.keep_dtype else value.astype(jax.numpy.bfloat16).astype(value.dtype)

    return jax.tree.map(through, tree, params, is_leaf=lambda leaf: isinstance(leaf, Stored))


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


def _json(fields: dict) -> str:
    return json.dumps(fields, indent=1) + "\n"


def _write(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
