"""How each published format stores a weight, and what config.json says of it.

A format draws codes and scales for a weight. It gives the tensors of the file, and the `Quantised` weight they stand
for. `tests/parity/goldens/narrow.json` tells which libraries agree.

O is the number of rows of a weight as transformers has it, I of columns, G of groups of columns, E of experts. F8 is
float8_e4m3fn. FP4 is E2M1, two to a byte, the first in the low half. Words are int32 with unsigned codes of b bits, the
first in the lowest bits. [] is a single number. Tensors are named after the module: `mlp.up_proj.weight_scale`.

| `quant_method` | tensors, and what a weight is |
| --- | --- |
| fp8 | `weight` F8[O, I]; `weight_scale_inv` float32 or bfloat16 [ceil(O/128), ceil(I/128)]: w * s |
| .. `weight_block_size` null | `weight_scale_inv`, `activation_scale` bfloat16 []: w * s |
| .. by AutoFP8 | `weight_scale`, `input_scale` float32 []; the list is called `ignored_layers`: w * s |
| fbgemm_fp8 | `weight` F8; `weight_scale` float32 [O, 1]: w * s |
| compressed-tensors | by the `format` of a group in `config_groups`: |
| .. float-quantized | `weight` F8; `weight_scale` [1], [O, 1] or [ceil(O/128), ceil(I/128)]; `input_scale` [1]: w * s |
| .. int-quantized | `weight` int8; `weight_scale` [O, 1] or [1]; `input_scale` [1]: w * s |
| .. pack-quantized | `weight_packed` words [O, ceil(I * b / 32)] of code + 2^(b - 1); `weight_shape` int64 [2]; |
| | `weight_scale` [O, G]: c * s |
| .. .. asymmetric | `weight_zero_point` words [ceil(O * b / 32), G] of zero + 2^(b - 1), along O: (c - z) * s |
| .. .. actorder "group" | `weight_g_idx` int32 [I]: the group of each column |
| .. nvfp4-pack-quantized | `weight_packed` FP4 uint8 [O, I/2]; `weight_scale` F8 [O, I/16]; |
| | `weight_global_scale`, `input_global_scale` float32 [1]: c * (s / t) |
| .. mxfp4-pack-quantized | `weight_packed` FP4 uint8 [O, I/2]; `weight_scale` uint8 [O, I/32]: c * 2^(e - 127) |
| modelopt | by `quant_algo` in hf_quant_config.json or config.json: |
| .. FP8 | `weight` F8; `weight_scale`, `input_scale` float32 []: w * s |
| .. FP8_PER_CHANNEL_PER_TOKEN | `weight` F8; `weight_scale` float32 [O]: w * s |
| .. FP8_PB_WO | `weight` F8; `weight_scale` float32 [O/128, 1, I/128, 1]: w * s |
| .. NVFP4, W4A16_NVFP4 | `weight` FP4 uint8 [O, I/2]; `weight_scale` F8 [O, I/16]; |
| | `weight_scale_2`, `input_scale` float32 []: c * (s * t) |
| .. MIXED_PRECISION | by module, in `quantized_layers` |
| awq | `qweight` words [I, O/8], in each the columns 0 2 4 6 1 3 5 7 of eight; `qzeros` words [G, O/8] likewise; |
| | `scales` float16 [G, O]: (c - z) * s |
| gptq | `qweight` words [I * b / 32, O] along I; `qzeros` words [G, O * b / 32] along O of zero - 1; |
| | `scales` float16 [G, O]; `g_idx` int32 [I], the group of each column: (c - z) * s |
| .. `checkpoint_format` gptq_v2 | `qzeros` of the zeros as they are |
| mxfp4 | experts `X` in one tensor: `X_blocks` FP4 uint8 [E, O, I/32, 16]; `X_scales` uint8 [E, O, I/32]: |
| | c * 2^(e - 127) |

What else counts:

- A partial last block has a scale of its own. transformers 5.24 divides a weight evenly among its scales instead: it
  refuses a weight of 576 rows with 5 scales, and reads one of 132 rows with 2 wrongly and in silence.
- GPTQ: 1 is taken from a zero in its word. GPTQModel subtracts 0x11111111 from the word (0x01010101 for 8 bits), so a
  zero of 0 borrows from its neighbour, and adding the same to the word gives all zeros back. AutoGPTQ adds 1 to each
  code, so a stored 15 is 16 there. The two differ in words with a zero of 0 alone. Symmetric files store 7 for a zero
  of 8, and 127 for 128. A file without `checkpoint_format` is of the first version.
- Groups of GPTQ are of equal size with `desc_act` too; `g_idx` is stored without it as well, in order. A `group_size`
  of -1 is one group.
- transformers 5.24 leaves out `weight_global_scale` where it joins experts, and all scales of ModelOpt's and AutoFP8's
  FP8, in silence: what it makes of a whole directory is no measure ("read whole" in the answers).
- Each tensor has its own scales here. In published files q, k and v mostly share a `weight_global_scale`, and so do
  gate and up.
- `weight_scale_2` of ModelOpt is a factor, and `weight_global_scale` of compressed-tensors its reciprocal. Both form
  the scale of a group in float32 first; that matters in the last bit.
- compressed-tensors has no `weight_g_idx` since 0.20, and refuses actorder "group". 0.12 reads it, and takes a -1 in it
  for columns in order. actorder "weight" changes nothing in a file.
- Rows of pack-quantized may end within a word: `weight_shape` counts. So may the zeros, which are packed along O.
- Lists of modules (`modules_to_not_convert`, `ignore`, `exclude_modules`) have names, beginnings of names, regular
  expressions ("re:..."), or names with "*". Some published files list a module and quantise it all the same. The
  tensors tell.
- Official FP8 files keep lm_head, embeddings, norms, conv1d, routers (`mlp.gate`), `shared_expert_gate`, `in_proj_ba`
  and the head for multi-token prediction in 16 bits. Experts are one tensor each, with scales of their own.
- `input_scale`, `activation_scale`, `input_global_scale`, `k_scale` and `v_scale` are of activations and caches. The
  last two are in `k_proj` and `v_proj` for ModelOpt, and in `self_attn` for compressed-tensors, where they have a shape
  of [1].
- `pre_quant_scale` of ModelOpt's AWQ algorithms scales columns of activations. It must not be left out.
- An exponent of 255 is no number; transformers makes infinity of it. `scale_fmt` "ue8m0" beside float32 scales says no
  more than that they are powers of two.
- The sign of a zero differs between libraries: ModelOpt reads the FP4 code 8 as 0, others as -0.

Sources: compressed_tensors/compressors and entrypoints/convert; transformers/integrations/finegrained_fp8.py, mxfp4.py
and fbgemm_fp8.py; modelopt/torch/export and quantization/qtensor; awq/utils/packing_utils.py;
gptqmodel/nn_modules/qlinear and utils/model.py; auto_gptq/nn_modules/qlinear; vllm's quantization/modelopt.py.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.parity.narrow.drawing import bell, below, even, order
from tests.parity.narrow.models import BFLOAT16, FLOAT16, Model
from tests.parity.narrow.quantised import (
    E2M1,
    E4M3,
    INTERLEAVED,
    Quantised,
    nibbles,
    spans,
    words,
)

FLOAT32 = np.dtype(np.float32)
Tensors = dict[str, np.ndarray]
Config = dict[str, Any]
RARE = 64  # one code in so many is any code at all


class Format(ABC):
    """One format, with its options."""

    dtype = BFLOAT16  # of what is not quantised

    @abstractmethod
    def encode(self, key: str, name: str, shape: tuple[int, ...]) -> tuple[Tensors, Quantised]:
        """The tensors of a weight, and what they stand for."""

    @abstractmethod
    def config(self, model: Model, kept: list[str]) -> Config:
        """`quantization_config` of config.json. `kept` are the modules that stay in 16 bits."""

    def hf_quant_config(self, model: Model, kept: list[str]) -> Config | None:
        """What a file of ModelOpt beside config.json says."""
        return None

    def extras(self, key: str, module: str) -> Tensors:
        """Scales for values of a cache, which lie with a module."""
        return {}


# --- FP8 ------------------------------------------------------------------------------------------


def fp8_codes(key: str, shape: tuple[int, ...]) -> np.ndarray:
    """FP8 with all finite codes among them."""
    usual = (64 * bell(key, shape)).astype(np.float32).astype(E4M3).view(np.uint8)
    chosen = below(f"{key} which", shape, RARE) == 0
    codes = np.where(chosen, below(f"{key} any", shape, 256), usual).astype(np.uint8)
    codes -= (codes & 0x7F) == 0x7F  # no NaN
    return codes.view(E4M3)


@dataclass(frozen=True, kw_only=True)
class FP8(Format):
    """FP8 with one scale for each block of a weight, in any of its dialects.

    Attributes:
        block: rows and columns that have one scale; None for all there are.
        scale, scale_dtype: of weights: what comes after the module's name, and its dtype.
        scale_shape: "" for [blocks, blocks]; "[1]", "[]", "[O]"; or "4" for [blocks, 1, blocks, 1].
        input_scale, input_shape: of activations; "" for none.
        about: what config.json says.
        lists: the field that lists the modules which are left alone.
        cache: whether attention has scales for keys and values.
    """

    block: tuple[int | None, int | None]
    scale: str = "weight_scale_inv"
    scale_dtype: np.dtype = FLOAT32
    scale_shape: str = ""
    input_scale: str = ""
    input_shape: tuple[int, ...] = ()
    about: Config
    lists: str = "modules_to_not_convert"
    cache: bool = False

    def encode(self, key: str, name: str, shape: tuple[int, ...]) -> tuple[Tensors, Quantised]:
        module = name.removesuffix(".weight")
        codes = fp8_codes(key, shape)
        rows, columns = (spans(n, size) for n, size in zip(shape, self.block, strict=True))
        count = (rows[-1] + 1, columns[-1] + 1)
        near = 1.0 / math.sqrt(shape[-1]) / 75
        scales = even(f"{key} scale", count, 0.7 * near, 1.4 * near).astype(self.scale_dtype)
        tensors = {
            name: codes,
            f"{module}.{self.scale}": self._shaped(scales),
        }
        if self.input_scale:
            scale = even(f"{key} input", self.input_shape, 0.01, 0.1).astype(self.scale_dtype)
            tensors[f"{module}.{self.input_scale}"] = scale
        return tensors, Quantised(
            name=name,
            tensors=(name, f"{module}.{self.scale}"),
            codes=codes.astype(np.float32),
            scales=scales,
            rows=rows,
            columns=columns,
        )

    def _shaped(self, scales: np.ndarray) -> np.ndarray:
        if self.scale_shape == "4":
            return scales[:, None, :, None]
        shapes: dict[str, tuple[int, ...]] = {
            "": scales.shape,
            "[1]": (1,),
            "[]": (),
            "[O]": (scales.size,),
        }
        return scales.reshape(shapes[self.scale_shape])

    def extras(self, key: str, module: str) -> Tensors:
        found = re.fullmatch(r"(.*)\.([kv])_proj", module)
        if not self.cache or found is None:
            return {}
        scale = even(f"{key} {module} cache", (1,), 0.01, 0.1).astype(BFLOAT16)
        return {f"{found[1]}.{found[2]}_scale": scale}

    def config(self, model: Model, kept: list[str]) -> Config:
        return self.about | {self.lists: kept}


def fp8_blocks(scale_dtype: np.dtype = FLOAT32) -> FP8:
    """As Qwen, DeepSeek and others publish it."""
    about = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
    return FP8(
        block=(128, 128),
        scale_dtype=scale_dtype,
        about=about | {"weight_block_size": [128, 128]},
    )


# --- compressed-tensors ---------------------------------------------------------------------------


def weights_of(**fields: Any) -> Config:
    """The arguments of weights, as that library writes them."""
    usual = {
        "num_bits": 8,
        "type": "float",
        "symmetric": True,
        "strategy": "channel",
        "dynamic": False,
        "group_size": None,
        "block_structure": None,
        "actorder": None,
        "observer": "minmax",
        "observer_kwargs": {},
    }
    return usual | fields


def activations_of(**fields: Any) -> Config:
    """Those of activations."""
    usual = {"strategy": "token", "dynamic": True, "observer": None}
    return weights_of(**(usual | fields))


def compressed(
    file_format: str, weights: Config, inputs: Config | None = None, targets: tuple = ("Linear",)
) -> Config:
    """config.json of one group of modules."""
    group = {
        "targets": list(targets),
        "weights": weights,
        "input_activations": inputs,
        "output_activations": None,
        "format": file_format,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": file_format,
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "config_groups": {"group_0": group},
    }


def compressed_fp8(strategy: str, *, static: bool = False) -> FP8:
    """float-quantized. `static` is with scales of activations, keys and values."""
    blocks = {"tensor": (None, None), "channel": (1, None), "block": (128, 128)}
    weights = weights_of(strategy=strategy)
    inputs = activations_of()
    if strategy == "block":
        weights["block_structure"] = [128, 128]
        inputs = activations_of(strategy="group", group_size=128)
    if static:
        inputs = activations_of(strategy="tensor", dynamic=False)
    about = compressed("float-quantized", weights, inputs)
    if static:
        about["kv_cache_scheme"] = inputs
    return FP8(
        block=blocks[strategy],
        scale="weight_scale",
        scale_dtype=FLOAT32 if strategy == "tensor" else BFLOAT16,
        scale_shape="[1]" if strategy == "tensor" else "",
        input_scale="input_scale" if static else "",
        input_shape=(1,),
        about=about,
        lists="ignore",
        cache=static,
    )


def _ignored(kept: list[str], patterns: bool) -> list[str]:
    """The list of modules, or regular expressions that match them."""
    if not patterns:
        return kept
    made = [f"re:.*{'.'.join(name.split('.')[-2:])}$" for name in kept if name[:4] != "mtp."]
    head = ["re:^mtp.*"] if len(made) < len(kept) else []
    return (
        list(dict.fromkeys("lm_head" if name == "re:.*lm_head$" else name for name in made)) + head
    )


@dataclass(frozen=True, kw_only=True)
class CompressedInt8(Format):
    """int-quantized: int8 as it is, one scale a row."""

    inputs: bool = True  # activations of 8 bits too

    def encode(self, key: str, name: str, shape: tuple[int, ...]) -> tuple[Tensors, Quantised]:
        codes = int_codes(key, shape, 8)
        near = 1.0 / math.sqrt(shape[-1]) / 40
        scales = even(f"{key} scale", (shape[0], 1), 0.7 * near, 1.4 * near).astype(BFLOAT16)
        at = f"{name}_scale"
        return {name: codes.astype(np.int8), at: scales}, Quantised(
            name=name,
            tensors=(name, at),
            codes=codes.astype(np.float32),
            scales=scales,
            rows=np.arange(shape[0]),
            columns=spans(shape[1], None),
        )

    def config(self, model: Model, kept: list[str]) -> Config:
        inputs = activations_of(type="int") if self.inputs else None
        about = compressed("int-quantized", weights_of(type="int"), inputs)
        return about | {"ignore": kept}


def int_codes(key: str, shape: tuple[int, ...], count: int) -> np.ndarray:
    """Signed whole numbers of so many bits, all of them."""
    half = 1 << (count - 1)
    if count == 4:
        return below(key, shape, 16) - half
    usual = np.rint(32 * bell(key, shape)).clip(-half, half - 1)
    chosen = below(f"{key} which", shape, RARE) == 0
    return np.where(chosen, below(f"{key} any", shape, 2 * half) - half, usual).astype(np.int32)


@dataclass(frozen=True, kw_only=True)
class CompressedPacked(Format):
    """pack-quantized: int4 or int8 in words.

    Attributes:
        group: columns of a group; None for whole rows.
        zeros: whether groups have zeros, so that the format is asymmetric.
        order: "group" for columns that are in groups of their own, "weight" where that is said but not stored.
        patterns: whether config.json lists modules by regular expressions.
    """

    num_bits: int = 4
    group: int | None = 128
    zeros: bool = False
    order: str | None = None
    scale_dtype: np.dtype = BFLOAT16
    patterns: bool = False

    def encode(self, key: str, name: str, shape: tuple[int, ...]) -> tuple[Tensors, Quantised]:
        module = name.removesuffix(".weight")
        half = 1 << (self.num_bits - 1)
        codes = int_codes(key, shape, self.num_bits)
        columns = spans(shape[1], self.group)
        if self.order == "group":
            columns = columns[order(f"{key} order", shape[1])]
        count = (shape[0], int(columns.max()) + 1)
        near = 1.0 / math.sqrt(shape[-1]) / (4.6 if self.num_bits == 4 else 40)
        scales = even(f"{key} scale", count, 0.7 * near, 1.4 * near).astype(self.scale_dtype)
        tensors = {
            f"{module}.weight_packed": words(codes + half, self.num_bits, 1),
            f"{module}.weight_scale": scales,
            f"{module}.weight_shape": np.array(shape, np.int64),
        }
        zeros = None
        if self.zeros:
            zeros = int_codes(f"{key} zeros", count, self.num_bits)
            packed = words(zeros + half, self.num_bits, 0)
            tensors[f"{module}.weight_zero_point"] = packed
        if self.order == "group":
            tensors[f"{module}.weight_g_idx"] = columns.astype(np.int32)
        return tensors, Quantised(
            name=name,
            tensors=tuple(tensors),
            codes=codes.astype(np.float32),
            zeros=None if zeros is None else zeros.astype(np.float32),
            scales=scales,
            rows=np.arange(shape[0]),
            columns=columns,
        )

    def config(self, model: Model, kept: list[str]) -> Config:
        weights = weights_of(
            num_bits=self.num_bits,
            type="int",
            symmetric=not self.zeros,
            strategy="channel" if self.group is None else "group",
            group_size=self.group,
            actorder=self.order,
        )
        about = compressed("pack-quantized", weights)
        return about | {"ignore": _ignored(kept, self.patterns)}


def fp4_scales(key: str, shape: tuple[int, ...]) -> np.ndarray:
    """FP8 scales around 200, few of them of any size."""
    usual = even(key, shape, 140.0, 280.0).astype(np.float32).astype(E4M3).view(np.uint8)
    chosen = below(f"{key} which", shape, RARE) == 0
    codes = np.where(chosen, below(f"{key} any", shape, 128), usual).astype(np.uint8)
    return np.minimum(codes, 0x7E).view(E4M3)


@dataclass(frozen=True, kw_only=True)
class CompressedNVFP4(Format):
    """nvfp4-pack-quantized: FP4 in groups of 16, whose FP8 scales are divided by one number."""

    inputs: bool = False  # activations of 4 bits too

    def encode(self, key: str, name: str, shape: tuple[int, ...]) -> tuple[Tensors, Quantised]:
        module = name.removesuffix(".weight")
        codes = below(key, shape, 16)
        scales = fp4_scales(f"{key} scale", (shape[0], shape[1] // 16))
        near = 200 * math.sqrt(shape[1]) * 2.93
        second = even(f"{key} second", (1,), 0.8 * near, 1.2 * near).astype(np.float32)
        tensors = {
            f"{module}.weight_packed": nibbles(codes),
            f"{module}.weight_scale": scales,
            f"{module}.weight_global_scale": second,
        }
        made = Quantised(
            name=name,
            tensors=tuple(tensors),
            codes=E2M1[codes],
            scales=scales,
            rows=np.arange(shape[0]),
            columns=spans(shape[1], 16),
            second=second[0],
            divides=True,
        )
        if self.inputs:
            scale = even(f"{key} input", (1,), 100.0, 900.0).astype(np.float32)
            tensors[f"{module}.input_global_scale"] = scale
        return tensors, made

    def config(self, model: Model, kept: list[str]) -> Config:
        fields = {"num_bits": 4, "strategy": "tensor_group", "group_size": 16}
        fields |= {"scale_dtype": "torch.float8_e4m3fn", "zp_dtype": "torch.float8_e4m3fn"}
        inputs = activations_of(**fields, dynamic="local") if self.inputs else None
        return compressed("nvfp4-pack-quantized", weights_of(**fields), inputs) | {"ignore": kept}


def exponents(key: str, shape: tuple[int, ...], columns: int) -> np.ndarray:
    """uint8 exponents + 127 of scales for FP4."""
    return (119 + below(key, shape, 4) + (columns < 256)).astype(np.uint8)


def powers(codes: np.ndarray) -> np.ndarray:
    """float32 powers of two from exponents + 127, exactly."""
    return np.ldexp(np.float32(1), codes.astype(np.int32) - 127).astype(np.float32)


@dataclass(frozen=True, kw_only=True)
class CompressedMXFP4(Format):
    """mxfp4-pack-quantized: FP4 in groups of 32, whose scales are powers of two."""

    def encode(self, key: str, name: str, shape: tuple[int, ...]) -> tuple[Tensors, Quantised]:
        module = name.removesuffix(".weight")
        codes = below(key, shape, 16)
        scales = exponents(f"{key} scale", (shape[0], shape[1] // 32), shape[1])
        tensors = {f"{module}.weight_packed": nibbles(codes), f"{module}.weight_scale": scales}
        return tensors, Quantised(
            name=name,
            tensors=tuple(tensors),
            codes=E2M1[codes],
            scales=powers(scales),
            rows=np.arange(shape[0]),
            columns=spans(shape[1], 32),
        )

    def config(self, model: Model, kept: list[str]) -> Config:
        weights = weights_of(num_bits=4, strategy="group", group_size=32)
        weights |= {"scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
        return compressed("mxfp4-pack-quantized", weights) | {"ignore": kept}


@dataclass(frozen=True, kw_only=True)
class CompressedMixed(Format):
    """mixed-precision: int4 in MLPs, FP8 elsewhere, as two groups that name their modules by regular expressions."""

    def encode(self, key: str, name: str, shape: tuple[int, ...]) -> tuple[Tensors, Quantised]:
        part = CompressedPacked(group=32) if ".mlp." in name else compressed_fp8("channel")
        return part.encode(key, name, shape)

    def config(self, model: Model, kept: list[str]) -> Config:
        weights = weights_of(num_bits=4, type="int", strategy="group", group_size=32)
        first = compressed("pack-quantized", weights, targets=(r"re:.*mlp\..*_proj$",))
        targets = (r"re:.*self_attn\..*_proj$", r"re:.*linear_attn\..*_proj.*")
        second = compressed("float-quantized", weights_of(), activations_of(), targets)
        groups = {"group_0": first["config_groups"]["group_0"]}
        groups |= {"group_1": second["config_groups"]["group_0"]}
        return first | {"format": "mixed-precision", "config_groups": groups, "ignore": kept}


# --- ModelOpt -------------------------------------------------------------------------------------

PRODUCER = {"name": "modelopt", "version": "0.47.0"}


@dataclass(frozen=True, kw_only=True)
class ModelOpt(Format):
    """Files of ModelOpt, which says what it did in hf_quant_config.json, in config.json, or in both.

    Attributes:
        algorithm: "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4", "W4A16_NVFP4", or "MIXED_PRECISION": NVFP4
            in MLPs and in the head, FP8 elsewhere.
        beside, inside: whether hf_quant_config.json and config.json say it.
        cache: whether there are scales for keys and values.
    """

    algorithm: str
    beside: bool = True
    inside: bool = False
    cache: bool = False

    def encode(self, key: str, name: str, shape: tuple[int, ...]) -> tuple[Tensors, Quantised]:
        algorithm = self._of(name)
        if "NVFP4" not in algorithm:
            return self._fp8(algorithm).encode(key, name, shape)
        module = name.removesuffix(".weight")
        codes = below(key, shape, 16)
        scales = fp4_scales(f"{key} scale", (shape[0], shape[1] // 16))
        near = 1 / (200 * math.sqrt(shape[1]) * 2.93)
        second = even(f"{key} second", (), 0.8 * near, 1.2 * near).astype(np.float32)
        tensors = {
            name: nibbles(codes),
            f"{module}.weight_scale": scales,
            f"{module}.weight_scale_2": second,
        }
        made = Quantised(
            name=name,
            tensors=tuple(tensors),
            codes=E2M1[codes],
            scales=scales,
            rows=np.arange(shape[0]),
            columns=spans(shape[1], 16),
            second=second,
        )
        if algorithm == "NVFP4":
            scale = even(f"{key} input", (), 0.001, 0.01).astype(np.float32)
            tensors[f"{module}.input_scale"] = scale
        return tensors, made

    def _of(self, name: str) -> str:
        if self.algorithm != "MIXED_PRECISION":
            return self.algorithm
        wide = re.search(r"\.mlp\.|lm_head|mixer\.(up|down)_proj", name) is None
        return "FP8" if wide else "NVFP4"

    @staticmethod
    def _fp8(algorithm: str) -> FP8:
        blocks = {"FP8": (None, None), "FP8_PER_CHANNEL_PER_TOKEN": (1, None)}
        shapes = {"FP8": "[]", "FP8_PER_CHANNEL_PER_TOKEN": "[O]"}
        return FP8(
            block=blocks.get(algorithm, (128, 128)),
            scale="weight_scale",
            scale_shape=shapes.get(algorithm, "4"),
            input_scale="input_scale" if algorithm == "FP8" else "",
            about={},
        )

    def extras(self, key: str, module: str) -> Tensors:
        found = re.search(r"\.([kv])_proj$", module)
        if not self.cache or found is None:
            return {}
        scale = even(f"{key} {module} cache", (), 0.01, 0.1).astype(np.float32)
        return {f"{module}.{found[1]}_scale": scale}

    def _layers(self, model: Model, kept: list[str]) -> dict[str, Config]:
        modules = [name.removesuffix(".weight") for name in model.linears]
        made: dict[str, Config] = {}
        for module in modules:
            if module not in kept:
                made[module] = {"quant_algo": self._of(f"{module}.weight")}
                if made[module]["quant_algo"] == "NVFP4":
                    made[module]["group_size"] = 16
        return made

    def hf_quant_config(self, model: Model, kept: list[str]) -> Config | None:
        if not self.beside:
            return None
        about: Config = {"quant_algo": self.algorithm, "kv_cache_quant_algo": None}
        if self.cache:
            about["kv_cache_quant_algo"] = "FP8"
        if "NVFP4" in self.algorithm:
            about["group_size"] = 16
        if self.algorithm == "MIXED_PRECISION":
            about["quantized_layers"] = self._layers(model, kept)
        else:
            about["exclude_modules"] = _starred(model, kept)
        return {"producer": PRODUCER, "quantization": about}

    def config(self, model: Model, kept: list[str]) -> Config:
        if not self.inside:
            return {}
        eight = {"dynamic": False, "num_bits": 8, "type": "float"}
        four = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
        sides = {
            "FP8": {"input_activations": eight, "weights": eight},
            "NVFP4": {"input_activations": four, "weights": four},
            "W4A16_NVFP4": {"weights": four},
        }
        about: Config = {"ignore": _starred(model, kept), "quant_algo": self.algorithm}
        if self.algorithm == "MIXED_PRECISION":
            layers = self._layers(model, kept)
            groups: dict[str, Config] = {}
            for index, algorithm in enumerate(("FP8", "NVFP4")):
                targets = [name for name, of in layers.items() if of["quant_algo"] == algorithm]
                groups[f"group_{index}"] = sides[algorithm] | {"targets": sorted(targets)}
            about |= {"config_groups": groups, "quantized_layers": layers}
        elif self.algorithm in sides:
            groups = {"group_0": sides[self.algorithm] | {"targets": ["Linear"]}}
            about["config_groups"] = groups
        if self.cache:
            about["kv_cache_scheme"] = eight
        return about | {"producer": PRODUCER, "quant_method": "modelopt"}


def _starred(model: Model, kept: list[str]) -> list[str]:
    """Names with a star at the end where all that begins so is left alone."""
    others = [f"{name.removesuffix('.weight')}" for name in model.others if "conv1d" in name]
    names = sorted({*kept, *(other.removesuffix(".bias") for other in others)})
    return [n for n in names if not n.startswith("mtp.")] + ["mtp*"] * any(
        n.startswith("mtp.") for n in names
    )


# --- AWQ and GPTQ ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class AWQ(Format):
    """AWQ in its form for matrix products ("gemm")."""

    dtype = FLOAT16
    group: int = 128

    def encode(self, key: str, name: str, shape: tuple[int, ...]) -> tuple[Tensors, Quantised]:
        module = name.removesuffix(".weight")
        columns = spans(shape[1], self.group)
        count = (shape[0], int(columns[-1]) + 1)
        codes = below(key, shape, 16)
        zeros = below(f"{key} zeros", count, 16)
        near = 1.0 / math.sqrt(shape[-1]) / 6.5
        scales = even(f"{key} scale", count, 0.7 * near, 1.4 * near).astype(FLOAT16)
        tensors = {
            f"{module}.qweight": self._packed(codes.T),
            f"{module}.qzeros": self._packed(zeros.T),
            f"{module}.scales": np.ascontiguousarray(scales.T),
        }
        return tensors, Quantised(
            name=name,
            tensors=tuple(tensors),
            codes=codes.astype(np.float32),
            zeros=zeros.astype(np.float32),
            scales=scales,
            rows=np.arange(shape[0]),
            columns=columns,
        )

    @staticmethod
    def _packed(codes: np.ndarray) -> np.ndarray:
        mixed = codes.reshape(len(codes), -1, 8)[:, :, list(INTERLEAVED)]
        return words(mixed.reshape(codes.shape), 4, 1)

    def config(self, model: Model, kept: list[str]) -> Config:
        about = {"quant_method": "awq", "bits": 4, "group_size": self.group, "zero_point": True}
        more = [name for name in kept if name != "lm_head"]
        return about | {"version": "gemm", "modules_to_not_convert": more or None}


@dataclass(frozen=True, kw_only=True)
class GPTQ(Format):
    """GPTQ, in its first and second version.

    Attributes:
        symmetric: all zeros in the middle.
        ordered: columns are in groups of their own (`desc_act`).
        borrowed: zeros of 0 occur, of which the first version takes 1 from the word.
    """

    dtype = FLOAT16
    num_bits: int = 4
    group: int | None = 128
    symmetric: bool = True
    ordered: bool = False
    version: str = "gptq"
    borrowed: bool = False

    def encode(self, key: str, name: str, shape: tuple[int, ...]) -> tuple[Tensors, Quantised]:
        module = name.removesuffix(".weight")
        half = 1 << (self.num_bits - 1)
        columns = spans(shape[1], self.group)
        if self.ordered:
            columns = columns[order(f"{key} order", shape[1])]
        count = (shape[0], int(columns.max()) + 1)
        codes = int_codes(key, shape, self.num_bits) + half
        zeros = np.full(count, half)
        if not self.symmetric:
            zeros = half - 8 + below(f"{key} zeros", count, 16)
            if not self.borrowed:
                zeros = np.maximum(zeros, 1)
        near = 1.0 / math.sqrt(shape[-1]) / (4.6 if self.num_bits == 4 else 40)
        scales = even(f"{key} scale", count, 0.7 * near, 1.4 * near).astype(FLOAT16)
        packed = words(zeros.T, self.num_bits, 1)
        if self.version == "gptq":
            packed = packed - np.int32(0x11111111 if self.num_bits == 4 else 0x01010101)
        tensors = {
            f"{module}.qweight": words(codes.T, self.num_bits, 0),
            f"{module}.qzeros": packed,
            f"{module}.scales": np.ascontiguousarray(scales.T),
            f"{module}.g_idx": columns.astype(np.int32),
        }
        return tensors, Quantised(
            name=name,
            tensors=tuple(tensors),
            codes=codes.astype(np.float32),
            zeros=zeros.astype(np.float32),
            scales=scales,
            rows=np.arange(shape[0]),
            columns=columns,
        )

    def config(self, model: Model, kept: list[str]) -> Config:
        about = {
            "quant_method": "gptq",
            "bits": self.num_bits,
            "group_size": -1 if self.group is None else self.group,
            "desc_act": self.ordered,
            "sym": self.symmetric,
            "damp_percent": 0.1,
            "static_groups": False,
            "true_sequential": True,
            "lm_head": False,
            "checkpoint_format": self.version,
        }
        more = [name for name in kept if name != "lm_head"]
        if more:
            about["dynamic"] = {f"-:{re.escape(name)}$": {} for name in more}
        return about


# --- MXFP4 of experts in one tensor ---------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class MXFP4(Format):
    """As gpt-oss has it: experts alone, all of them in one tensor."""

    def encode(self, key: str, name: str, shape: tuple[int, ...]) -> tuple[Tensors, Quantised]:
        codes = below(key, shape, 16)
        scales = exponents(f"{key} scale", (*shape[:-1], shape[-1] // 32), shape[-1])
        blocks = nibbles(codes).reshape(*scales.shape, 16)
        tensors = {f"{name}_blocks": blocks, f"{name}_scales": scales}
        return tensors, Quantised(
            name=name,
            tensors=tuple(tensors),
            codes=E2M1[codes],
            scales=powers(scales),
            rows=np.arange(shape[-2]),
            columns=spans(shape[-1], 32),
        )

    def config(self, model: Model, kept: list[str]) -> Config:
        alone = [
            "model.layers.*.self_attn",
            "model.layers.*.linear_attn",
            "model.layers.*.mlp.gate",
        ]
        alone += ["model.layers.*.mlp.shared_expert*", "model.embed_tokens", "mtp", "lm_head"]
        return {"quant_method": "mxfp4", "modules_to_not_convert": alone}
