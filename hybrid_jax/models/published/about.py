"""What config.json, or a file beside it, says of weights that are kept as codes."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybrid_jax.config.model_directory import read_json_if_there
from hybrid_jax.models.published.said import Said, check_format, check_lists, pair, said_of_group

BLOCK = 128, 128
FIELDS = ("quantization_config", "compression_config")  # of config.json
# Files that say it beside config.json: ModelOpt's, and others.
BESIDE = "hf_quant_config.json"
FILES = ("quantize_config.json", "quant_config.json")
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
        said: of all modules, or by the groups that they belong to; none where tensors tell.
        layers: of modules by their names, where each has its own.
        ordered: rows may lie in an order of their own (`desc_act`).
        zeros_less_one: files of GPTQ have zero points less one.
        zeros: there are zero points of AWQ.
    """

    method: str
    place: str
    bits: int | None = None
    group: int | None = None
    said: tuple[Said, ...] = ()
    layers: Mapping[str, Said] = field(default_factory=dict, hash=False)
    ordered: bool = False
    zeros_less_one: bool = True
    zeros: bool = True

    def of(self, modules: Sequence[str]) -> Said | None:
        """What is said of the weights of a module; None where tensors tell.

        Args:
            modules: its names: in the file, and as the model has it.

        Raises:
            ValueError: nothing is said, although something must be.
        """
        for module in modules:
            if module in self.layers:
                return self.layers[module]
        if self.method != "compressed-tensors":
            return self.said[0] if self.said else None
        best = max(self.said, key=lambda one: one.rank(modules), default=None)
        if best is None or not best.rank(modules):
            raise ValueError(
                f"load_model: no group in config_groups of {self.place} is for {modules[0]}, which is kept as codes; "
                + INSTEAD
            )
        if best.absent:
            raise ValueError(
                f"load_model: {best.place} must be an object, got None, and {modules[0]} is kept as codes; {INSTEAD}"
            )
        return best


def read_about(fields: Mapping[str, Any], folder: Path, where: str) -> About | None:
    """What a directory says of its codes; None if it says nothing.

    Args:
        fields: the contents of its config.json.

    Raises:
        NotImplementedError: a method that is not read. ValueError: a field is malformed.
    """
    texts = fields.get("text_config")
    beside = read_json_if_there(folder / BESIDE, where)
    if beside is not None:
        beside = _inner(beside, where)
    for name in FIELDS:
        for held in (fields, texts if isinstance(texts, Mapping) else {}):
            if (said := held.get(name)) is not None and said != {}:
                found = _of(said, f"{name} of config.json", where)
                _agree(found, said, beside, where)
                return found
    if beside:
        return _of({"quant_method": "modelopt"} | beside, BESIDE, where)
    for file in FILES:
        if said := read_json_if_there(folder / file, where):
            return _of(said, file, where)
    return None


def _inner(said: Any, where: str) -> dict:
    """What hf_quant_config.json says."""
    found = said.get("quantization") if isinstance(said, dict) else None
    if said and not isinstance(found, dict):
        raise ValueError(f"{where}: quantization in {BESIDE} must be an object, got {found!r}")
    return found or {}


def _agree(about: About, said: dict, beside: dict | None, where: str) -> None:
    """ValueError if hf_quant_config.json says something else than config.json."""
    if about.method != "modelopt" or not beside:
        return
    _modelopt(beside, BESIDE, where)
    own, other = said.get("quant_algo"), beside.get("quant_algo")
    if str(own).upper() != str(other).upper():
        raise ValueError(
            f"{where}: {about.place} says quant_algo {own}, and {BESIDE} says {other}; fetch the model again"
        )


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
    if not isinstance(method, str):
        raise ValueError(
            f"{where}: {place}: quant_method must be a text, got {method!r}; {INSTEAD}"
        )
    check_lists(said, place, where)
    if method not in makers:
        shown = OTHERS.get(str(method).removesuffix("_4bit").removesuffix("_8bit"), repr(method))
        raise NotImplementedError(
            f"{where}: {place} says that weights are quantised by {shown} (quant_method), which is not read; {INSTEAD}"
        )
    return makers[method](said, place, where)


def _fp8(said: dict, place: str, where: str) -> About:
    size, is_said = said.get("weight_block_size"), "weight_block_size" in said
    block = None if is_said else BLOCK  # as transformers has it, if the scales are those of blocks
    if size is not None:
        block = pair(size, f"{place}: weight_block_size", where)
    if "e5m2" in str(said.get("fmt", "")):
        raise NotImplementedError(f"{where}: {place} says fmt e5m2, only e4m3 is read; {INSTEAD}")
    own = Said(
        place=f"{place}: weight_block_size",
        kind="float",
        bits=8,
        strategy="block" if size else None,
        block=block,
    )
    return About(method="fp8", place=place, bits=8, said=(own,))


def _compressed(said: dict, place: str, where: str) -> About:
    groups = said.get("config_groups")
    if not isinstance(groups, dict):
        raise ValueError(f"{where}: {place}: config_groups must be an object, got {groups!r}")
    for name in ("sparsity_config", "transform_config"):
        other = said.get(name)
        if other is not None and not isinstance(other, dict):
            raise ValueError(f"{where}: {place}: {name} must be an object, got {other!r}")
        form = (other or {}).get("format", "dense")
        if form != "dense" or (other and name == "transform_config"):
            raise NotImplementedError(
                f"{where}: {place} has a {name} ({reprlib.repr(other)}), which is not read; {INSTEAD}"
            )
    check_format(said.get("format"), place, where)
    return About(
        method="compressed-tensors",
        place=place,
        said=tuple(said_of_group(name, one, place, where) for name, one in groups.items()),
    )


def _modelopt(said: dict, place: str, where: str) -> About:
    own = _of_algorithm(said, place, where)
    layers = said.get("quantized_layers") or {}
    if not isinstance(layers, dict) or not all(isinstance(one, dict) for one in layers.values()):
        raise ValueError(
            f"{where}: {place}: quantized_layers must have an object each, got {layers!r}"
        )
    by_name = {
        name: _of_algorithm(one, f"{place}: quantized_layers.{name}", where)
        for name, one in layers.items()
    }
    return About(
        method="modelopt",
        place=place,
        said=(own,),
        layers=by_name,
    )


def _of_algorithm(said: dict, place: str, where: str) -> Said:
    """What an algorithm of ModelOpt makes of weights."""
    algorithm = said.get("quant_algo")
    if not isinstance(algorithm, str) or not re.fullmatch(
        r"FP8\w*|NVFP4\w*|W4A16_NVFP4|MIXED_PRECISION", algorithm.upper()
    ):
        raise NotImplementedError(
            f"{where}: {place} says quant_algo {algorithm}, only FP8 and NVFP4 are read; {INSTEAD}"
        )
    if algorithm.upper() == "MIXED_PRECISION":
        return Said(place=place)
    size, four = said.get("group_size"), "NVFP4" in algorithm.upper()
    if four and size not in (None, 16):
        raise ValueError(f"{where}: {place}: group_size must be 16 for {algorithm}, got {size!r}")
    return Said(place=f"{place}: quant_algo", kind="float", bits=4 if four else 8)


def _awq(said: dict, place: str, where: str) -> About:
    bits = said.get("bits", said.get("w_bit", 4))
    version = str(said.get("version", "gemm")).lower()
    if bits != 4 or version != "gemm":
        raise NotImplementedError(
            f"{where}: {place} says {bits} bits and version {version}, only 4 bits of version gemm are read; {INSTEAD}"
        )
    group = said.get("group_size", said.get("q_group_size", 128))
    return About(
        method="awq",
        place=place,
        bits=4,
        group=_group(group, place, where),
        zeros=said.get("zero_point", True) is not False,
    )


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
