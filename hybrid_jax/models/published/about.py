"""What config.json, or a file beside it, says of weights that are kept as codes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybrid_jax.config.model_directory import read_json_if_there

FIELDS = ("quantization_config", "compression_config")  # of config.json
# Files that say it beside config.json, and where in them.
FILES = {
    "hf_quant_config.json": "quantization",
    "quantize_config.json": None,
    "quant_config.json": None,
}
READ = "FP8, compressed-tensors, ModelOpt, AWQ, GPTQ or MXFP4"
INSTEAD = f"fetch the model as it was published, or in a form that is read: {READ}"
# Methods that are not read, as messages call them.
OTHERS = {
    "bitsandbytes": "bitsandbytes",
    "torchao": "torchao",
    "hqq": "HQQ",
    "quanto": "quanto",
    "aqlm": "AQLM",
    "exl2": "EXL2",
    "exl3": "EXL3",
    "eetq": "EETQ",
    "vptq": "VPTQ",
    "spqr": "SpQR",
    "higgs": "HIGGS",
    "bitnet": "BitNet",
    "gguf": "GGUF",
    "mlx": "MLX",
}


@dataclass(frozen=True, kw_only=True)
class About:
    """What is said of the codes of a directory. Tensors tell the rest.

    Attributes:
        method: "fp8", "compressed-tensors", "modelopt", "awq", "gptq" or "mxfp4".
        place: the file that says it, and where in it, for messages.
        bits: of a code; None where tensors tell.
        group: elements of the inner dimension that share a scale; None where tensors tell, or for all.
        block: columns and elements of the inner dimension of a block of FP8.
        ordered: rows may lie in an order of their own (`desc_act`).
        zeros_less_one: files of GPTQ have zero points less one.
        activations: activations were to be rounded, too.
    """

    method: str
    place: str
    bits: int | None = None
    group: int | None = None
    block: tuple[int, int] = (128, 128)
    ordered: bool = False
    zeros_less_one: bool = True
    activations: bool = False


def read_about(fields: Mapping[str, Any], folder: Path, where: str) -> About | None:
    """What a directory says of its codes; None if it says nothing.

    Args:
        fields: the contents of its config.json.

    Raises:
        NotImplementedError: a method that is not read. ValueError: a field is malformed.
    """
    texts = fields.get("text_config")
    for name in FIELDS:
        for held in (fields, texts if isinstance(texts, Mapping) else {}):
            if held.get(name):
                return _of(held[name], f"{name} of config.json", where)
    for file, inner in FILES.items():
        said = read_json_if_there(folder / file, where)
        if said and (found := said.get(inner) if inner else said):
            named = {"quant_method": "modelopt"} if inner else {}
            return _of(named | found if isinstance(found, dict) else found, file, where)
    return None


def _of(said: Any, place: str, where: str) -> About:
    if not isinstance(said, dict):
        raise ValueError(f"{where}: {place} must be an object, got {said!r}")
    method = said.get("quant_method", "gptq" if "desc_act" in said else None)
    if isinstance(method, str) and "auto" in method and "round" in method:
        method = _packed_by_auto_round(said, place, where)
    makers = {
        "fp8": _fp8,
        "fbgemm_fp8": _fp8,
        "compressed-tensors": _compressed,
        "modelopt": _modelopt,
        "modelopt_fp4": _modelopt,
        "awq": _awq,
        "gptq": _gptq,
        "mxfp4": lambda said, place, where: About(method="mxfp4", place=place, group=32),
    }
    if method not in makers:
        shown = OTHERS.get(str(method).removesuffix("_4bit").removesuffix("_8bit"), repr(method))
        raise NotImplementedError(
            f"{where}: {place} says that weights are quantised by {shown}, which is not read; {INSTEAD}"
        )
    return makers[method](said, place, where)


def _fp8(said: dict, place: str, where: str) -> About:
    size = said.get("weight_block_size")
    block = (128, 128) if size is None else _pair(size, f"{place}: weight_block_size", where)
    if "e5m2" in str(said.get("fmt", "")):
        raise NotImplementedError(f"{where}: {place} says fmt e5m2, only e4m3 is read; {INSTEAD}")
    dynamic = said.get("activation_scheme") in ("dynamic", "static")
    return About(method="fp8", place=place, bits=8, block=block, activations=dynamic)


def _compressed(said: dict, place: str, where: str) -> About:
    groups = said.get("config_groups")
    if not isinstance(groups, dict) or not all(isinstance(one, dict) for one in groups.values()):
        raise ValueError(
            f"{where}: {place} must have config_groups with an object each, got {groups!r}"
        )
    for name in ("sparsity_config", "transform_config"):
        if (other := said.get(name)) and other.get("format", "dense") != "dense":
            raise NotImplementedError(
                f"{where}: {place} has a {name}, which is not read; {INSTEAD}"
            )
    return About(
        method="compressed-tensors",
        place=place,
        activations=any(one.get("input_activations") for one in groups.values()),
    )


def _modelopt(said: dict, place: str, where: str) -> About:
    algorithm = str(said.get("quant_algo"))
    if not re.fullmatch(r"FP8\w*|NVFP4\w*|W4A16_NVFP4|MIXED_PRECISION", algorithm):
        raise NotImplementedError(
            f"{where}: {place} says quant_algo {algorithm}, only FP8 and NVFP4 are read; {INSTEAD}"
        )
    return About(method="modelopt", place=place, activations=not algorithm.startswith("W4A16"))


def _awq(said: dict, place: str, where: str) -> About:
    bits = said.get("bits", said.get("w_bit", 4))
    version = str(said.get("version", "gemm")).lower()
    if bits != 4 or version != "gemm":
        raise NotImplementedError(
            f"{where}: {place} says {bits} bits and version {version}, only 4 bits of version gemm are read; {INSTEAD}"
        )
    group = said.get("group_size", said.get("q_group_size", 128))
    return About(method="awq", place=place, bits=4, group=_group(group, place, where))


def _gptq(said: dict, place: str, where: str) -> About:
    bits = said.get("bits")
    if bits not in (4, 8):
        raise NotImplementedError(
            f"{where}: {place} says {bits} bits, only 4 and 8 are read; {INSTEAD}"
        )
    kind = said.get("checkpoint_format", said.get("format", "gptq"))
    if kind not in ("gptq", "gptq_v2"):
        raise NotImplementedError(
            f"{where}: {place} says checkpoint_format {kind!r}, only gptq and gptq_v2 are read; {INSTEAD}"
        )
    return About(
        method="gptq",
        place=place,
        bits=bits,
        group=_group(said.get("group_size", 128), place, where),
        ordered=bool(said.get("desc_act", False)),
        zeros_less_one=kind == "gptq",
    )


def _packed_by_auto_round(said: dict, place: str, where: str) -> str:
    """The method whose layout AutoRound wrote."""
    packing = str(said.get("packing_format", said.get("backend", "")))
    found = next((name for name in ("gptq", "awq") if name in packing), None)
    if found is None:
        raise NotImplementedError(
            f"{where}: {place} says packing_format {packing!r} of AutoRound, only those of GPTQ and AWQ are read; "
            + INSTEAD
        )
    return found


def _group(size: Any, place: str, where: str) -> int | None:
    if size == -1:
        return None
    if type(size) is not int or size <= 0:
        raise ValueError(f"{where}: {place}: group_size must be positive or -1, got {size!r}")
    return size


def _pair(size: Any, what: str, where: str) -> tuple[int, int]:
    is_pair = isinstance(size, Sequence) and len(size) == 2
    if not is_pair or any(type(n) is not int or n <= 0 for n in size):
        raise ValueError(f"{where}: {what} must be two positive numbers, got {size!r}")
    return size[0], size[1]
