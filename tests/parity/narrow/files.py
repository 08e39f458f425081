"""Quantised checkpoints as they are published, tiny and made without torch.

`VARIANTS` names them. `files(name)` makes one: the tensors, what the JSON files say, and what each quantised weight
stands for. `write(folder, name)` puts it into a directory. The formats are described in formats.py; what the libraries
that own them make of these files is in goldens/narrow.json and goldens/narrow.npz, which make_narrow_goldens.py writes.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from tests.parity.narrow.formats import (
    AWQ,
    FP8,
    GPTQ,
    MXFP4,
    CompressedInt8,
    CompressedMixed,
    CompressedMXFP4,
    CompressedNVFP4,
    CompressedPacked,
    Format,
    ModelOpt,
    compressed_fp8,
    fp8_blocks,
)
from tests.parity.narrow.models import BFLOAT16, FLOAT16, MODELS, Model
from tests.parity.narrow.quantised import Quantised

CONFIG, BESIDE, WEIGHTS = "config.json", "hf_quant_config.json", "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = {
    np.dtype(np.float64): "F64",
    np.dtype(np.float32): "F32",
    np.dtype(np.float16): "F16",
    np.dtype(ml_dtypes.bfloat16): "BF16",
    np.dtype(ml_dtypes.float8_e4m3fn): "F8_E4M3",
    np.dtype(ml_dtypes.float8_e5m2): "F8_E5M2",
    np.dtype(np.int8): "I8",
    np.dtype(np.uint8): "U8",
    np.dtype(np.int16): "I16",
    np.dtype(np.int32): "I32",
    np.dtype(np.int64): "I64",
}


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One checkpoint.

    Attributes:
        model: a name in `MODELS`.
        form: how its weights are stored.
        left: a regular expression for modules that stay in 16 bits, beside those that always do.
        quantised: the same for such as are quantised although official files keep them.
        fused: whether the experts of a layer are one tensor.
        shards: in how many files the tensors lie; a weight and its scale are then in different ones.
    """

    model: str
    form: Format
    left: str = ""
    quantised: str = ""
    fused: bool = False
    shards: int = 1


@dataclass
class Files:
    """What a directory holds. It may be changed before it is written.

    Attributes:
        config: config.json.
        beside: hf_quant_config.json, or None.
        tensors: by name.
        weights: what each quantised weight stands for, by the name it has in an unquantised file.
        shards: as in `Variant`.
        cut: bytes that are missing at the end of the last file of weights.
        replaced: the bytes of files that are written in the end, by name; None for a file that is removed.
    """

    config: dict[str, Any]
    beside: dict[str, Any] | None
    tensors: dict[str, np.ndarray]
    weights: dict[str, Quantised]
    shards: int = 1
    cut: int = 0
    replaced: dict[str, bytes | None] = field(default_factory=dict)

    def write(self, folder: Path) -> Path:
        """Writes all files into a new directory."""
        folder.mkdir(parents=True)
        for name, content in self.contents().items():
            (folder / name).write_bytes(content)
        return folder

    def contents(self) -> dict[str, bytes]:
        """The bytes of each file, by its name."""
        made: dict[str, bytes | None] = {CONFIG: _json(self.config)}
        if self.beside is not None:
            made[BESIDE] = _json(self.beside)
        made |= self._weights()
        last = max(name for name in made if name.endswith(".safetensors"))
        content = made[last]
        if self.cut and content is not None:
            made[last] = content[: -self.cut]
        made |= self.replaced
        return {name: content for name, content in made.items() if content is not None}

    def _weights(self) -> dict[str, bytes]:
        if self.shards == 1:
            return {WEIGHTS: weights_file(self.tensors)}
        parts: list[dict[str, np.ndarray]] = [{} for _ in range(self.shards)]
        places = {}
        for index, name in enumerate(sorted(self.tensors)):
            number = index % self.shards
            parts[number][name] = self.tensors[name]
            places[name] = f"model-{number + 1:05}-of-{self.shards:05}.safetensors"
        size = sum(tensor.nbytes for tensor in self.tensors.values())
        index_file = {"metadata": {"total_size": size}, "weight_map": places}
        return {places[min(part)]: weights_file(part) for part in parts} | {
            INDEX: _json(index_file)
        }


def _json(content: Any) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()


def weights_file(tensors: Mapping[str, np.ndarray]) -> bytes:
    """A safetensors file, the widest dtypes first."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    pieces, start = [], 0
    for name in sorted(tensors, key=lambda name: (-tensors[name].itemsize, name)):
        tensor = tensors[name]
        stop = start + tensor.nbytes
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, stop],
        }
        pieces.append(tensor.tobytes())
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + b"".join(pieces)


def static_fp8(scale: str, **options: Any) -> FP8:
    """FP8 with one scale a tensor, for weights and for activations."""
    about = {"quant_method": "fp8", "activation_scheme": "static"}
    return FP8(block=(None, None), scale=scale, about=about | options.pop("about", {}), **options)


MISTRAL = static_fp8(
    "weight_scale_inv",
    scale_dtype=BFLOAT16,
    scale_shape="[]",
    input_scale="activation_scale",
    about={"weight_block_size": None, "dequantize": False},
)
AUTO_FP8 = static_fp8(
    "weight_scale", scale_shape="[]", input_scale="input_scale", lists="ignored_layers"
)
FBGEMM = FP8(
    block=(1, None),
    scale="weight_scale",
    about={"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
)
LAYER_0 = r"\.layers\.0\."

VARIANTS: dict[str, Variant] = {
    # FP8 with blocks
    "fp8_blocks": Variant(model="qwen2", form=fp8_blocks()),
    "fp8_blocks_partial": Variant(model="llama", form=fp8_blocks()),
    "fp8_blocks_mamba": Variant(model="nemotron_h", form=fp8_blocks()),
    "fp8_blocks_experts": Variant(model="qwen3_next", form=fp8_blocks(), shards=2),
    "fp8_blocks_bf16_scales": Variant(model="qwen3_next", form=fp8_blocks(BFLOAT16)),
    "fp8_blocks_bf16_scales_partial": Variant(model="llama", form=fp8_blocks(BFLOAT16)),
    # FP8 with one scale a tensor or a row
    "fp8_static": Variant(model="qwen2", form=MISTRAL),
    "fp8_auto": Variant(model="llama", form=AUTO_FP8),
    "fp8_fbgemm": Variant(model="llama", form=FBGEMM, left=LAYER_0),
    "compressed_fp8_static": Variant(model="qwen2", form=compressed_fp8("tensor", static=True)),
    "compressed_fp8_tensor": Variant(model="nemotron_h", form=compressed_fp8("tensor")),
    "compressed_fp8_channel": Variant(
        model="qwen3_next", form=compressed_fp8("channel"), left=r"\.linear_attn\."
    ),
    "compressed_fp8_channel_mamba": Variant(model="nemotron_h", form=compressed_fp8("channel")),
    "compressed_fp8_block": Variant(model="llama", form=compressed_fp8("block")),
    "modelopt_fp8": Variant(model="nemotron_h", form=ModelOpt(algorithm="FP8", cache=True)),
    "modelopt_fp8_inside": Variant(
        model="qwen3_next", form=ModelOpt(algorithm="FP8", beside=False, inside=True, cache=True)
    ),
    "modelopt_fp8_left": Variant(
        model="nemotron_h", form=ModelOpt(algorithm="FP8", inside=True), left=LAYER_0
    ),
    "modelopt_fp8_channel": Variant(
        model="llama", form=ModelOpt(algorithm="FP8_PER_CHANNEL_PER_TOKEN", inside=True)
    ),
    "modelopt_fp8_blocks": Variant(model="qwen2", form=ModelOpt(algorithm="FP8_PB_WO")),
    # int8
    "compressed_w8a8": Variant(model="nemotron_h", form=CompressedInt8()),
    "compressed_w8a8_experts": Variant(model="qwen3_next", form=CompressedInt8()),
    "compressed_w8a16": Variant(model="qwen2", form=CompressedInt8(inputs=False)),
    "compressed_pack8_channel": Variant(
        model="llama", form=CompressedPacked(num_bits=8, group=None)
    ),
    "compressed_pack8": Variant(
        model="qwen2", form=CompressedPacked(num_bits=8, group=128, scale_dtype=FLOAT16)
    ),
    # int4 in groups
    "compressed_pack4_32": Variant(
        model="qwen3_next", form=CompressedPacked(group=32, patterns=True)
    ),
    "compressed_pack4_128": Variant(model="nemotron_h", form=CompressedPacked(), left=LAYER_0),
    "compressed_pack4_zeros": Variant(model="qwen2", form=CompressedPacked(zeros=True)),
    "compressed_pack4_zeros_32": Variant(
        model="qwen3_next", form=CompressedPacked(group=32, zeros=True)
    ),
    "compressed_pack4_channel": Variant(
        model="llama", form=CompressedPacked(group=None, zeros=True)
    ),
    "compressed_pack4_order": Variant(
        model="qwen2", form=CompressedPacked(group=32, order="group", scale_dtype=FLOAT16)
    ),
    "compressed_pack4_order_zeros": Variant(
        model="nemotron_h", form=CompressedPacked(group=32, order="group", zeros=True)
    ),
    "compressed_pack4_order_weight": Variant(
        model="qwen2", form=CompressedPacked(group=128, order="weight")
    ),
    "compressed_mixed": Variant(model="qwen3_next", form=CompressedMixed()),
    "awq": Variant(model="qwen2", form=AWQ()),
    "awq_64": Variant(model="nemotron_h", form=AWQ(group=64), left=LAYER_0),
    "awq_experts": Variant(model="qwen3_next", form=AWQ(group=32)),
    "gptq": Variant(model="qwen2", form=GPTQ()),
    "gptq_order": Variant(model="qwen2", form=GPTQ(group=32, ordered=True)),
    "gptq_zeros": Variant(model="qwen3_next", form=GPTQ(group=32, symmetric=False)),
    "gptq_zeros_borrowed": Variant(
        model="qwen2", form=GPTQ(group=32, symmetric=False, borrowed=True)
    ),
    "gptq_whole_rows": Variant(model="nemotron_h", form=GPTQ(group=None)),
    "gptq_v2": Variant(
        model="nemotron_h",
        form=GPTQ(group=64, symmetric=False, borrowed=True, ordered=True, version="gptq_v2"),
    ),
    "gptq_8": Variant(model="qwen2", form=GPTQ(num_bits=8)),
    "gptq_8_order": Variant(
        model="qwen3_next", form=GPTQ(num_bits=8, group=32, ordered=True, symmetric=False)
    ),
    # FP4
    "compressed_nvfp4": Variant(model="qwen2", form=CompressedNVFP4(inputs=True)),
    "compressed_nvfp4a16": Variant(model="qwen3_next", form=CompressedNVFP4()),
    "compressed_nvfp4a16_mamba": Variant(model="nemotron_h", form=CompressedNVFP4(), left=LAYER_0),
    "modelopt_nvfp4": Variant(model="nemotron_h", form=ModelOpt(algorithm="NVFP4", cache=True)),
    "modelopt_nvfp4_inside": Variant(
        model="qwen3_next", form=ModelOpt(algorithm="NVFP4", inside=True)
    ),
    "modelopt_nvfp4a16": Variant(
        model="qwen2", form=ModelOpt(algorithm="W4A16_NVFP4", beside=False, inside=True)
    ),
    "modelopt_mixed": Variant(
        model="qwen3_next",
        form=ModelOpt(algorithm="MIXED_PRECISION", inside=True),
        quantised="^lm_head$",
    ),
    "modelopt_mixed_mamba": Variant(
        model="nemotron_h", form=ModelOpt(algorithm="MIXED_PRECISION"), left=LAYER_0
    ),
    "compressed_mxfp4": Variant(model="qwen2", form=CompressedMXFP4()),
    "compressed_mxfp4_experts": Variant(model="qwen3_next", form=CompressedMXFP4()),
    "mxfp4_experts": Variant(model="qwen3_next", form=MXFP4(), left=".", fused=True),
}
FUSED = re.compile(r"(model\.layers\.\d+\.mlp\.experts)\.0\.(gate|down)_proj\.weight")


def _left(variant: Variant, model: Model) -> list[str]:
    """Modules that stay in 16 bits, in the order of the model."""
    kept = []
    for name in model.linears:
        module = name.removesuffix(".weight")
        if variant.quantised and re.search(variant.quantised, module):
            continue
        if name in model.kept or (variant.left and re.search(variant.left, module)):
            kept.append(module)
    return kept


def _fused(model: Model) -> dict[str, tuple[int, ...]]:
    """Shapes of the weights that hold all experts of a layer."""
    shapes: dict[str, tuple[int, ...]] = {}
    count = model.config["num_experts"]
    for name, (rows, columns) in model.linears.items():
        if found := FUSED.fullmatch(name):
            if found[2] == "gate":
                shapes[f"{found[1]}.gate_up_proj"] = (count, 2 * rows, columns)
            else:
                shapes[f"{found[1]}.down_proj"] = (count, rows, columns)
    return shapes


def files(name: str) -> Files:
    """Makes one variant."""
    made = _files(name)
    return replace(
        made,
        config=json.loads(json.dumps(made.config)),
        beside=json.loads(json.dumps(made.beside)),
        tensors=dict(made.tensors),
        replaced={},
    )


@functools.cache
def _files(name: str) -> Files:
    variant = VARIANTS[name]
    model, form = MODELS[variant.model], variant.form
    kept = _left(variant, model)
    shapes: dict[str, tuple[int, ...]] = {
        weight: shape
        for weight, shape in model.linears.items()
        if weight.removesuffix(".weight") not in kept
    }
    alone = [weight for weight in model.linears if weight not in shapes]
    if variant.fused:
        shapes = dict(_fused(model))
        alone = [weight for weight in alone if not re.match(r"model\..*\.experts\.", weight)]
    tensors: dict[str, np.ndarray] = {}
    weights: dict[str, Quantised] = {}
    for weight, shape in shapes.items():
        own, weights[weight] = form.encode(f"{name} {weight}", weight, shape)
        own |= form.extras(name, weight.removesuffix(".weight"))
        tensors |= {tensor: np.asarray(array) for tensor, array in own.items()}
    for plain in (*alone, *model.others):
        tensors[plain] = model.drawn(name, plain, form.dtype)
    config = dict(model.config)
    config["torch_dtype"] = "float16" if form.dtype == FLOAT16 else "bfloat16"
    if about := form.config(model, kept):
        config["quantization_config"] = about
    return Files(
        config=config,
        beside=form.hf_quant_config(model, kept),
        tensors=tensors,
        weights=weights,
        shards=variant.shards,
    )


def write(folder: Path, name: str) -> Path:
    """Writes one variant into a new directory."""
    return files(name).write(folder)


def plain(made: Files) -> dict[str, np.ndarray]:
    """All tensors in float32, as an unquantised file would have them."""
    used = {tensor for weight in made.weights.values() for tensor in weight.tensors}
    tensors = {name: weight.weight() for name, weight in made.weights.items()}
    for name, tensor in made.tensors.items():
        if name not in used and not name.endswith("_scale"):  # others are of activations
            tensors[name] = tensor.astype(np.float32)
    return tensors


def fingerprint(made: Files) -> str:
    """Tells whether the files are those that the libraries were asked about."""
    whole = hashlib.sha256()
    for name, content in sorted(made.contents().items()):
        whole.update(name.encode() + b"\0" + content)
    return whole.hexdigest()[:16]
