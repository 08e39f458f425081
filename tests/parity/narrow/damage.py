"""Quantised files that are damaged in one way each, and what an error must say.

`DAMAGES` has them. `make` gives the files and the words. Without words the files are odd and not wrong: such files are
published, and they must be read as if they were whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from tests.parity.narrow.files import BESIDE, CONFIG, INDEX, WEIGHTS, Files, files

Words = tuple[str, ...]
Change = Callable[[Files], Words]


@dataclass(frozen=True)
class Damage:
    """One way in which files are damaged.

    Attributes:
        variant: which files.
        wrong: what is wrong with them.
        change: damages them, and says which words the error must have.
    """

    variant: str
    wrong: str
    change: Change

    def make(self) -> tuple[Files, Words]:
        """The damaged files, and the words that the error must have; none if they must be read all the same."""
        made = files(self.variant)
        return made, self.change(made)


def find(made: Files, part: str) -> str:
    """The first tensor whose name ends so, of a layer that is quantised."""
    used = [name for weight in made.weights.values() for name in weight.tensors]
    return next(name for name in (*used, *made.tensors) if re.search(rf"(^|[._]){part}$", name))


# --- tensors --------------------------------------------------------------------------------------


def changed(part: str, change: Callable[[np.ndarray], Any], *words: str) -> Change:
    """Another tensor in place of one. An error names it, and its shape if that is another."""

    def damage(made: Files) -> Words:
        name = find(made, part)
        before = made.tensors[name]
        after = np.asarray(change(before.copy()))
        made.tensors[name] = after
        shape = (str(after.shape),) if after.shape != before.shape else ()
        return (name, *shape, *words)

    return damage


def typed(part: str, dtype: Any, shown: str) -> Change:
    """Another dtype, with the same numbers as far as it can hold them."""
    return changed(part, lambda tensor: tensor.astype(np.float32).astype(dtype), shown)


def odd(part: str, change: Callable[[np.ndarray], Any]) -> Change:
    """Another tensor that means the same."""

    def damage(made: Files) -> Words:
        name = find(made, part)
        made.tensors[name] = np.asarray(change(made.tensors[name].copy()))
        return ()

    return damage


def filled(part: str, value: float, *words: str) -> Change:
    """One number that is another."""

    def fill(tensor: np.ndarray) -> np.ndarray:
        tensor.reshape(-1)[tensor.size // 2] = value
        return tensor

    return changed(part, fill, *words)


def coded(part: str, code: int, *words: str) -> Change:
    """One byte that is another."""

    def fill(tensor: np.ndarray) -> np.ndarray:
        tensor.view(np.uint8).reshape(-1)[tensor.size // 2] = code
        return tensor

    return changed(part, fill, *words)


def removed(part: str) -> Change:
    """A tensor that is missing. An error names it."""

    def damage(made: Files) -> Words:
        name = find(made, part)
        del made.tensors[name]
        return (name,)

    return damage


def all_removed(part: str, *words: str) -> Change:
    """All tensors of a kind are missing; without words that is no damage."""

    def damage(made: Files) -> Words:
        for name in [name for name in made.tensors if name.endswith(f".{part}")]:
            del made.tensors[name]
        return words

    return damage


def added(module: str, part: str, tensor: np.ndarray) -> Change:
    """A tensor that has no place. An error names it."""

    def damage(made: Files) -> Words:
        name = f"{module}.{part}"
        made.tensors[name] = tensor
        return (name,)

    return damage


def beside(part: str, other: str, tensor: np.ndarray) -> Change:
    """A tensor that this format does not have, beside one that it has. An error names it."""

    def damage(made: Files) -> Words:
        name = find(made, part).removesuffix(part) + other
        made.tensors[name] = tensor
        return (name,)

    return damage


# --- what the JSON files say ----------------------------------------------------------------------

GONE = object()


def _put(content: Any, path: str, value: Any) -> None:
    *before, last = path.split("/")
    for step in before:
        content = content[step]
    if value is GONE:
        del content[last]
    else:
        content[last] = value


def said(path: str, value: Any, *words: str) -> Change:
    """config.json says something else of the quantisation; GONE for nothing. Without words that is no damage."""

    def damage(made: Files) -> Words:
        _put(made.config["quantization_config"], path, value)
        return words

    return damage


def said_beside(path: str, value: Any, *words: str) -> Change:
    """hf_quant_config.json says something else."""

    def damage(made: Files) -> Words:
        _put(made.beside, path, value)
        return words

    return damage


def weights(path: str, value: Any, *words: str) -> Change:
    """The arguments of weights in the first group of compressed-tensors are others."""
    return said(f"config_groups/group_0/weights/{path}", value, *words)


def configured(value: Any, *words: str) -> Change:
    """Another `quantization_config`."""

    def damage(made: Files) -> Words:
        made.config["quantization_config"] = value
        return words

    return damage


def replaced(name: str, content: bytes | None, *words: str) -> Change:
    """Other bytes in place of a file; None for no file."""

    def damage(made: Files) -> Words:
        made.replaced[name] = content
        return words

    return damage


def cut(count: int) -> Change:
    """Bytes are missing at the end of the weights."""

    def damage(made: Files) -> Words:
        made.cut = count
        return (WEIGHTS,)

    return damage


def cut_to(count: int) -> Change:
    """The file of weights is so short that its header is not whole."""

    def damage(made: Files) -> Words:
        made.replaced[WEIGHTS] = made.contents()[WEIGHTS][:count]
        return (WEIGHTS,)

    return damage


def of_kept(part: str, dtype: Any, shown: str) -> Change:
    """A tensor that is in 16 bits has another dtype, without a scale."""
    return typed(part, dtype, shown)


def first(*changes: Change) -> Change:
    """Several changes; an error names the first."""
    return lambda made: [change(made) for change in changes][0]


def both(*changes: Change) -> Change:
    """Several changes; the words of all."""
    return lambda made: tuple(word for change in changes for word in change(made))


NAN, INF = float("nan"), float("inf")
ONE_MORE_ROW = lambda tensor: np.concatenate([tensor, tensor[:1]])
ONE_LESS_ROW = lambda tensor: tensor[:-1]
ONE_LESS_COLUMN = lambda tensor: np.ascontiguousarray(tensor[..., :-1])
TURNED = lambda tensor: np.ascontiguousarray(tensor.T)
FLAT = lambda tensor: tensor.reshape(-1)
SHARD = "model-00002-of-00002.safetensors"

# By variant: what is wrong, and the change.
TABLE: dict[str, dict[str, Change]] = {
    "fp8_blocks": {
        "a scale of one row too many": changed("down_proj.weight_scale_inv", ONE_MORE_ROW),
        "scales turned around": changed("down_proj.weight_scale_inv", TURNED),
        "scales in one row": changed("down_proj.weight_scale_inv", FLAT),
        "one scale for a weight of two blocks": changed(
            "down_proj.weight_scale_inv", lambda tensor: tensor[0, 0]
        ),
        "no scale": removed("down_proj.weight_scale_inv"),
        "no weight to a scale": removed("down_proj.weight"),
        "a scale of a weight in 16 bits": added(
            "lm_head", "weight_scale_inv", np.ones((1, 1), np.float32)
        ),
        "scales as whole numbers": typed("down_proj.weight_scale_inv", np.int32, "I32"),
        "a scale that is no number": filled("down_proj.weight_scale_inv", NAN, "nan"),
        "an infinite scale": filled("down_proj.weight_scale_inv", INF, "inf"),
        "codes of int8": typed("down_proj.weight", np.int8, "I8"),
        "codes of the other FP8": typed("down_proj.weight", ml_dtypes.float8_e5m2, "F8_E5M2"),
        "a code that is no number": coded("down_proj.weight", 0x7F, "nan"),
        "a weight of one column less": changed("down_proj.weight", ONE_LESS_COLUMN),
        "a head in FP8 without a scale": of_kept(
            "lm_head.weight", ml_dtypes.float8_e4m3fn, "F8_E4M3"
        ),
        "a norm in FP8": of_kept("norm.weight", ml_dtypes.float8_e4m3fn, "F8_E4M3"),
        "an embedding in int8": of_kept("embed_tokens.weight", np.int8, "I8"),
        "blocks with one side": said("weight_block_size", [128], "weight_block_size", "[128]"),
        "blocks of nothing": said("weight_block_size", [0, 128], "weight_block_size", "[0, 128]"),
        "blocks as a text": said("weight_block_size", "128", "weight_block_size", "'128'"),
        "blocks of a fraction": said("weight_block_size", [128, 64.5], "weight_block_size", "64.5"),
        "blocks of another size": said("weight_block_size", [64, 64], "weight_scale_inv"),
        "blocks that are not said": said("weight_block_size", None, "weight_block_size"),
        "nothing on blocks": said("weight_block_size", GONE),
        "another method": said("quant_method", "fp9", "quant_method", "fp9"),
        "no method": said("quant_method", GONE, "quant_method"),
        "a number for a method": said("quant_method", 8, "quant_method", "8"),
        "a list for what is said": configured([], "quantization_config"),
        "a text for what is said": configured("fp8", "quantization_config", "fp8"),
        "nothing is said": configured(None, "F8_E4M3"),
        "a method for other tensors": said("quant_method", "awq", "awq"),
        "a text for the list of modules": said(
            "modules_to_not_convert", "lm_head", "modules_to_not_convert", "lm_head"
        ),
        "numbers in the list of modules": said(
            "modules_to_not_convert", [1], "modules_to_not_convert", "1"
        ),
        "scales that are said to be powers of two": said("scale_fmt", "ue8m0"),
        "a file that ends early": cut(1000),
        "a file that ends in its header": cut_to(500),
        "a file of eight bytes": cut_to(8),
        "a file without a byte": replaced(WEIGHTS, b"", WEIGHTS),
        "config.json is no JSON": replaced(CONFIG, b"{", CONFIG),
        "a list that names a quantised module": said(
            "modules_to_not_convert", ["lm_head", "model.layers.0.mlp.down_proj"]
        ),
        "no list of modules": said("modules_to_not_convert", GONE),
        "a field that nobody knows": said("some_field", 1),
        "scales in float64": odd("down_proj.weight_scale_inv", lambda t: t.astype(np.float64)),
    },
    "fp8_blocks_experts": {
        "a shard that is missing": replaced(SHARD, None, SHARD),
        "no scale of one expert": removed("experts.3.up_proj.weight_scale_inv"),
        "no index": replaced(INDEX, None),
        "an index that is no JSON": replaced(INDEX, b"{", INDEX),
    },
    "fp8_blocks_partial": {
        "no scale for the last block": changed("q_proj.weight_scale_inv", ONE_LESS_ROW),
    },
    "fp8_blocks_bf16_scales": {
        "one expert in 16 bits": changed(
            "experts.2.gate_proj.weight", lambda tensor: tensor.astype(ml_dtypes.bfloat16)
        ),
    },
    "fp8_static": {
        "two scales": changed("down_proj.weight_scale_inv", lambda tensor: np.stack([tensor] * 2)),
        "no scale": removed("down_proj.weight_scale_inv"),
        "a scale that is no number": filled("down_proj.weight_scale_inv", NAN, "nan"),
        "one scale in a list": odd("down_proj.weight_scale_inv", lambda t: t.reshape(1)),
        "no scales of activations": all_removed("activation_scale"),
    },
    "fp8_fbgemm": {
        "scales of one row less": changed("down_proj.weight_scale", ONE_LESS_ROW),
        "scales in a row": odd("down_proj.weight_scale", FLAT),
    },
    "compressed_fp8_channel": {
        "scales of one row less": changed(
            "out_proj.weight_scale|o_proj.weight_scale", ONE_LESS_ROW
        ),
        "no scale": removed("o_proj.weight_scale"),
        "one scale for each tensor, as is said": weights("strategy", "tensor", "weight_scale"),
        "a strategy that nobody knows": weights("strategy", "row", "strategy", "row"),
        "whole numbers, as is said": weights("type", "int", "F8_E4M3"),
    },
    "compressed_fp8_block": {
        "blocks that are not said": weights("block_structure", None, "block_structure"),
        "blocks of another size": weights("block_structure", [64, 64], "weight_scale"),
    },
    "compressed_w8a8": {
        "codes of uint8": typed("out_proj.weight", np.uint8, "U8"),
        "a scale that is no number": filled("out_proj.weight_scale", NAN, "nan"),
        "no groups": said("config_groups", {}, "config_groups"),
        "no word on groups": said("config_groups", GONE, "config_groups"),
        "a list of groups": said("config_groups", [], "config_groups"),
        "a group for other modules": said(
            "config_groups/group_0/targets", ["Conv2d"], "config_groups"
        ),
        "a group without weights": said("config_groups/group_0/weights", None, "weights"),
        "weights that lack numbers": said(
            "sparsity_config", {"format": "sparse-24-bitmask"}, "sparse-24-bitmask"
        ),
        "weights that are turned": said(
            "transform_config", {"config_groups": {"R1": {"type": "hadamard"}}}, "transform_config"
        ),
        "a format that nobody knows": both(
            said("format", "zip-quantized", "zip-quantized"),
            said("config_groups/group_0/format", "zip-quantized"),
        ),
        "no format in the group": said("config_groups/group_0/format", GONE),
    },
    "compressed_pack4_128": {
        "3 bits": weights("num_bits", 3, "num_bits", "3"),
        "bits as a text": weights("num_bits", "4", "num_bits", "'4'"),
        "8 bits, as is said": weights("num_bits", 8, "weight_packed"),
        "groups of nothing": weights("group_size", 0, "group_size", "0"),
        "groups of -5": weights("group_size", -5, "group_size", "-5"),
        "groups that do not divide rows": weights("group_size", 48, "group_size", "48"),
        "groups of another size": weights("group_size", 64, "weight_scale"),
        "no size of groups": weights("group_size", None, "group_size"),
        "zeros that are said and not there": weights("symmetric", False, "weight_zero_point"),
        "words of 64 bits": changed(
            "out_proj.weight_packed", lambda tensor: tensor.astype(np.int64), "I64"
        ),
        "a word too little": changed("out_proj.weight_packed", ONE_LESS_COLUMN),
        "another shape in words": changed(
            "out_proj.weight_shape", lambda tensor: tensor + [0, 8], "264"
        ),
        "three numbers for a shape": changed(
            "out_proj.weight_shape", lambda tensor: np.append(tensor, 1)
        ),
        "no shape": removed("out_proj.weight_shape"),
        "no words": removed("out_proj.weight_packed"),
        "scales of a column less": changed("out_proj.weight_scale", ONE_LESS_COLUMN),
        "no scale": removed("out_proj.weight_scale"),
        "a scale that is no number": filled("out_proj.weight_scale", NAN, "nan"),
        "a shape of 32 bits": odd("out_proj.weight_shape", lambda t: t.astype(np.int32)),
        "scales in float32": odd("out_proj.weight_scale", lambda t: t.astype(np.float32)),
    },
    "compressed_pack4_zeros": {
        "zeros of a column less": changed("o_proj.weight_zero_point", ONE_LESS_COLUMN),
        "zeros that are not packed": changed(
            "o_proj.weight_zero_point", lambda t: np.zeros((8 * len(t), *t.shape[1:]), np.int8)
        ),
        "no zeros": removed("o_proj.weight_zero_point"),
        "zeros though there are none": weights("symmetric", True, "weight_zero_point"),
    },
    "compressed_pack4_order": {
        "a group that is not there": filled("o_proj.weight_g_idx", 99, "99"),
        "a group below 0": filled("o_proj.weight_g_idx", -2, "-2"),
        "a group for each column but one": changed("o_proj.weight_g_idx", ONE_LESS_ROW),
        "no groups of columns": removed("o_proj.weight_g_idx"),
    },
    "compressed_nvfp4": {
        "no scale of the tensor": removed("o_proj.weight_global_scale"),
        "a scale of the tensor of 0": filled("o_proj.weight_global_scale", 0.0, "0.0"),
        "a scale of the tensor that is no number": filled("o_proj.weight_global_scale", NAN, "nan"),
        "two scales of the tensor": changed("o_proj.weight_global_scale", ONE_MORE_ROW),
        "scales of a column less": changed("o_proj.weight_scale", ONE_LESS_COLUMN),
        "a scale that is no number": coded("o_proj.weight_scale", 0x7F, "nan"),
        "a byte too little": changed("o_proj.weight_packed", ONE_LESS_COLUMN),
        "codes of int8": changed("o_proj.weight_packed", lambda t: t.view(np.int8), "I8"),
        "groups of 32, as is said": weights("group_size", 32, "weight_scale"),
        "no scales of activations": all_removed("input_global_scale"),
    },
    "compressed_mxfp4": {
        "a scale that is no number": coded("o_proj.weight_scale", 255, "255"),
        "scales of a column less": changed("o_proj.weight_scale", ONE_LESS_COLUMN),
        "scales in bfloat16": typed("o_proj.weight_scale", ml_dtypes.bfloat16, "BF16"),
    },
    "mxfp4_experts": {
        "blocks of 8 bytes": changed(
            "gate_up_proj_blocks",
            lambda t: t.reshape(*t.shape[:3], -1, 8).reshape(*t.shape[:2], -1, 8),
        ),
        "scales of a column less": changed("gate_up_proj_scales", ONE_LESS_COLUMN),
        "no scales": removed("gate_up_proj_scales"),
        "no blocks": removed("down_proj_blocks"),
        "one expert less": first(
            changed("down_proj_blocks", ONE_LESS_ROW), changed("down_proj_scales", ONE_LESS_ROW)
        ),
        "a scale that is no number": coded("gate_up_proj_scales", 255, "255"),
    },
    "modelopt_fp8": {
        "an algorithm that nobody knows": said_beside(
            "quantization/quant_algo", "FP7", "quant_algo", "FP7"
        ),
        "no algorithm": said_beside("quantization/quant_algo", GONE, "quant_algo"),
        "an algorithm with scales of columns": said_beside(
            "quantization/quant_algo", "W4A8_AWQ", "quant_algo", "W4A8_AWQ"
        ),
        "no word on the quantisation": said_beside("quantization", GONE, "quantization"),
        "hf_quant_config.json is no JSON": replaced(BESIDE, b"{", BESIDE),
        "hf_quant_config.json is a list": replaced(BESIDE, b"[]", BESIDE),
        "no hf_quant_config.json": replaced(BESIDE, None, "F8_E4M3"),
        "a text for the list of modules": said_beside(
            "quantization/exclude_modules", "lm_head", "exclude_modules"
        ),
        "no scale": removed("out_proj.weight_scale"),
        "two scales": changed("out_proj.weight_scale", lambda tensor: np.stack([tensor] * 2)),
        "scales of columns": beside(
            "out_proj.weight", "out_proj.pre_quant_scale", np.ones(256, np.float32)
        ),
        "an algorithm in small letters": said_beside("quantization/quant_algo", "fp8"),
        "no scales of activations": all_removed("input_scale"),
        "one scale in a list": odd("out_proj.weight_scale", lambda t: t.reshape(1)),
    },
    "modelopt_nvfp4_inside": {
        "two files that disagree": said_beside("quantization/quant_algo", "FP8", "FP8", "NVFP4"),
        "no second scale": removed("o_proj.weight_scale_2"),
        "two second scales": changed("o_proj.weight_scale_2", lambda t: np.stack([t] * 2)),
        "a second scale that is no number": filled("o_proj.weight_scale_2", NAN, "nan"),
        "groups of 32, as is said": both(
            said_beside("quantization/group_size", 32, "32"),
            said("config_groups/group_0/weights/group_size", 32),
        ),
        "scales of columns": beside(
            "o_proj.weight", "o_proj.pre_quant_scale", np.ones(128, np.float32)
        ),
    },
    "modelopt_mixed_mamba": {
        "a layer's algorithm that nobody knows": said_beside(
            "quantization/quantized_layers",
            {"backbone.layers.3.mixer.in_proj": {"quant_algo": "FP7"}},
            "FP7",
        ),
    },
    "awq": {
        "3 bits": said("bits", 3, "bits", "3"),
        "8 bits": said("bits", 8, "bits", "8"),
        "another form": said("version", "gemv", "version", "gemv"),
        "groups that do not divide rows": said("group_size", 96, "group_size", "96"),
        "groups of nothing": said("group_size", 0, "group_size", "0"),
        "groups of another size": said("group_size", 32, "scales"),
        "no zeros": removed("o_proj.qzeros"),
        "zeros of another length": changed("o_proj.qzeros", ONE_LESS_COLUMN),
        "zeros though there are none": said("zero_point", False, "zero_point"),
        "no scale": removed("o_proj.scales"),
        "scales turned around": changed("o_proj.scales", TURNED),
        "a scale that is no number": filled("o_proj.scales", NAN, "nan"),
        "words of 64 bits": changed("o_proj.qweight", lambda t: t.astype(np.int64), "I64"),
        "a word too little": changed("o_proj.qweight", ONE_LESS_COLUMN),
        "words packed along the other side": changed(
            "o_proj.qweight", lambda t: t.reshape(t.shape[0] // 8, t.shape[1] * 8)
        ),
        "the form in capital letters": said("version", "GEMM"),
        "scales in float32": odd("o_proj.scales", lambda t: t.astype(np.float32)),
    },
    "gptq_order": {
        "3 bits": said("bits", 3, "bits", "3"),
        "no bits": said("bits", GONE, "bits"),
        "8 bits, as is said": said("bits", 8, "qweight"),
        "zeros of another length": changed("o_proj.qzeros", ONE_LESS_COLUMN),
        "no zeros": removed("o_proj.qzeros"),
        "a group that is not there": filled("o_proj.g_idx", 99, "99"),
        "a group below 0": filled("o_proj.g_idx", -1, "-1"),
        "a group for each column but one": changed("o_proj.g_idx", ONE_LESS_ROW),
        "no groups of columns": removed("o_proj.g_idx"),
        "another form": said("checkpoint_format", "marlin", "checkpoint_format", "marlin"),
        "no scale": removed("o_proj.scales"),
        "groups of another size": said("group_size", 64, "scales"),
        "a row too little": changed("o_proj.qweight", ONE_LESS_ROW),
        "groups of 64 bits": odd("o_proj.g_idx", lambda t: t.astype(np.int64)),
    },
    "gptq": {
        "no groups of columns, which are in order": all_removed("g_idx"),
        "no word on the form": said("checkpoint_format", GONE),
        "groups of -2": said("group_size", -2, "group_size", "-2"),
    },
}


def damages() -> Iterator[Damage]:
    """All of them, in the order of the table."""
    for variant, ways in TABLE.items():
        for wrong, change in ways.items():
            yield Damage(variant, wrong, change)


DAMAGES = tuple(damages())
