"""What a checkpoint is that cannot be read: quantised, an adapter, a file of another program; and what to do then."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybrid_jax.config.model_directory import MERGE
from hybrid_jax.kinds.tensors import Part
from hybrid_jax.models.checkpoint import Checkpoint
from hybrid_jax.models.files import FETCH_ORIGINAL
from hybrid_jax.models.published.about import INSTEAD
from hybrid_jax.weights.safetensors import ARRAY_DTYPES, CODE_DTYPES, StoredTensor

# Tensors that ways of quantising that are not read leave beside or in place of the weights, the more telling ones
# first.
QUANTISED = {
    "bitsandbytes": r"\.(absmax|quant_map|nested_absmax|nested_quant_map|quant_state\..*|SCB|weight_format)$",
    "torchao": r"(\._?weight_(qdata|zero_point)|:_data)$",
    "HQQ": r"\.(W_q|meta)$",
    "quanto": r"\.weight\._(data|scale|shift)$",
    "AQLM": r"\.(codes|codebooks)$",
    "MLX": r"\.(biases)$",
    "": r"\.(scale|zeros|zero_point|weight_scales)$",
}
ADAPTER = re.compile(
    r"\.(lora_[A-Za-z_]+|base_layer|ia3_l|modules_to_save|hada_w\d_[ab]|oft_[a-zA-Z]+|vera_lambda_[bd])(\.|$)"
)
# Names of the same model in the layout of those who trained it.
ORIGINAL = re.compile(
    r"^(layers\.\d+\.(attention|feed_forward)\.w\w+\.weight|tok_embeddings\.weight|blk\.\d+\..*|token_embd\.weight)$"
)
# Experts as MLX stacks them.
MLX_NAMES = re.compile(r"\.switch_mlp\.")


def recognized(
    checkpoint: Checkpoint, expected: Mapping[str, Part], tensors: Mapping[str, StoredTensor]
) -> NotImplementedError | None:
    """An error that says what a directory holds if it is no plain checkpoint; None if it looks like one.

    Args:
        expected: what the model is made from, by name.
        tensors: what its files hold, by name, those of the model as `expected` names them.
    """
    folder = checkpoint.folder
    adapted = next((t for t in tensors.values() if ADAPTER.search(t.name)), None)
    if adapted is not None:
        return NotImplementedError(
            f"load_model: {folder} holds an adapter that is not merged (tensor {adapted.name}), which is not "
            f"supported; {MERGE}"
        )
    return _quantised(checkpoint, expected, tensors) or _of_another_program(
        folder, expected, tensors
    )


def _quantised(
    checkpoint: Checkpoint, expected: Mapping[str, Part], tensors: Mapping[str, StoredTensor]
) -> NotImplementedError | None:
    modules = {name[: dot.start()] for name in expected for dot in re.finditer(r"\.|$", name)}
    found = [
        (kind, tensor)
        for kind, pattern in QUANTISED.items()
        for name, tensor in tensors.items()
        if (match := re.search(pattern, name)) and _stem(name[: match.start()]) in modules
    ]
    packed = [t for name, t in tensors.items() if name in expected and t.dtype not in ARRAY_DTYPES]
    if not found and all(t.dtype in CODE_DTYPES for t in packed):
        return None
    kind, tensor = found[0] if found else ("", packed[0])
    bits = _mlx_bits(checkpoint.fields.get("quantization"))
    if bits is not None and any(t.dtype == "U32" for t in packed):
        kind = f"MLX{bits}"
    of = f" ({kind})" if kind else ""
    shown = packed[0] if packed else tensor
    return NotImplementedError(
        f"load_model: {checkpoint.folder} holds quantised weights{of}, which are not read: tensor {shown.name} of "
        f"{shown.file.name} has dtype {shown.dtype}"
        + (f", and {tensor.name} is there" if tensor is not shown else "")
        + f"; {INSTEAD}"
    )


def _stem(name: str) -> str:
    """What a name without its end is a part of: itself, or the experts that are fused under it."""
    outer = name.rpartition(".")[0]
    return outer if outer.endswith(".experts") else name


def _mlx_bits(about: Any) -> str | None:
    """How many bits the `quantization` of MLX in config.json says; None if there is none."""
    if not isinstance(about, dict):
        return None
    return f", {about['bits']} bits" if isinstance(about.get("bits"), int) else ""


def _of_another_program(
    folder: Path, expected: Mapping[str, Part], tensors: Mapping[str, StoredTensor]
) -> NotImplementedError | None:
    """Layouts of other programs: MLX has the taps of convolutions in the middle, and Llama's own has short names."""
    turned = [
        tensor
        for name, tensor in tensors.items()
        if name in expected
        and len(shape := expected[name].shape) == 3
        and shape[1] == 1 != shape[2]
        and tensor.shape == (shape[0], shape[2], 1)
    ]
    turned += [tensor for tensor in tensors.values() if MLX_NAMES.search(tensor.name)]
    if turned:
        return NotImplementedError(
            f"load_model: {folder} has weights in the layout of MLX, which is not read (tensor {turned[0].name} of "
            f"shape {turned[0].shape}); {FETCH_ORIGINAL}"
        )
    own = next((tensor for tensor in tensors.values() if ORIGINAL.match(tensor.name)), None)
    if own is not None:
        return NotImplementedError(
            f"load_model: {folder} has weights under the names of the original code or of llama.cpp, which are not "
            f"read (tensor {own.name} of {own.file.name}); fetch the files in the layout of transformers"
        )
    return None
