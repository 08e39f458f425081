"""Asks the libraries that own the formats of quantised files what the tiny ones of `tests.parity.narrow` mean.

    python -m tests.parity.make_narrow_goldens                     write all answers anew
    python -m tests.parity.make_narrow_goldens --only gptq awq     show those of some, and write nothing

Needs the extra `parity` and what the Makefile installs beside it. Of every weight the answers have digests: of what a
library makes of it in float32, and as it rounds by itself. Logits are those of transformers in float32, with the
weights in float32. Where transformers reads a directory without a GPU, they are compared with what it makes of that.

Functions import the libraries they ask: an older one is asked in a process of its own, which lacks what others need.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import importlib.util
import json
import os
import pickle
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors.torch
import torch
import transformers

from tests.parity.make_goldens import follow_published_limits
from tests.parity.narrow.answers import ANSWERS, LOGITS
from tests.parity.narrow.drawing import digest
from tests.parity.narrow.files import (
    CONFIG,
    VARIANTS,
    WEIGHTS,
    Files,
    files,
    fingerprint,
    plain,
    weights_file,
)
from tests.parity.narrow.models import MODELS

OLDER = Path(sys.prefix) / "older"  # a compressed-tensors that knows `weight_g_idx`
LIBRARIES = (
    "torch",
    "transformers",
    "compressed-tensors",
    "gptqmodel",
    "autoawq",
    "nvidia-modelopt",
)
Tensors = dict[str, torch.Tensor]
# By the name of a weight: what a library makes of it.
Weights = dict[str, torch.Tensor]
# A library, how it rounds (`Quantised.rounded`), and the weights.
Answer = tuple[str, str, Weights]


def as_numpy(tensor: torch.Tensor) -> np.ndarray:
    """The same bits."""
    tensor = tensor.detach().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def read(folder: Path) -> Tensors:
    """All tensors of a directory, by the library itself."""
    tensors: Tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= safetensors.torch.load_file(file)
    return tensors


# --- FP8 with blocks, and one scale a tensor -------------------------------------------------------


def of_fp8(made: Files, tensors: Tensors) -> Iterator[Answer]:
    """transformers, where a weight can be divided evenly; compressed-tensors, for blocks."""
    from compressed_tensors.entrypoints.convert.converters import FP8BlockDequantizer
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    about = made.config["quantization_config"]
    if about.get("weight_block_size"):
        for rule, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
            whole = FP8BlockDequantizer(targets=["re:.*"], dtype=dtype)
            weights = {
                name: whole._create_dequantized_weight(*(tensors[t] for t in weight.tensors))
                for name, weight in made.weights.items()
            }
            yield "compressed-tensors", rule, weights
    if "ignored_layers" in about or about["quant_method"] == "fbgemm_fp8":
        strategy = "channel" if about["quant_method"] == "fbgemm_fp8" else "tensor"
        yield "compressed-tensors", "float32", plainly(made, tensors, strategy)
        return
    own = Fp8Dequantize(None)
    for rule, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        weights = {}
        for name, weight in made.weights.items():
            codes, scales = (tensors[t] for t in weight.tensors)
            if scales.ndim == 0 or _even(codes.shape, scales.shape):
                weights[name] = own._dequantize_one(codes, scales, dtype)
        yield "transformers", rule, weights


def _even(shape: torch.Size, scales: torch.Size) -> bool:
    """Whether all blocks are whole, or there is but one."""
    return all(n % 128 == 0 or count == 1 for n, count in zip(shape, scales, strict=True))


def plainly(made: Files, tensors: Tensors, strategy: str) -> Weights:
    """One scale for each row, or one for all."""
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    args = QuantizationArgs(num_bits=8, type="float", strategy=strategy)
    return {
        name: dequantize(*(tensors[t] for t in weight.tensors), args=args)
        for name, weight in made.weights.items()
    }


# --- compressed-tensors ---------------------------------------------------------------------------


def of_compressed(made: Files, tensors: Tensors) -> Iterator[Answer]:
    """compressed-tensors by the scheme that config.json gives a module; an older one for columns out of order."""
    about = made.config["quantization_config"]
    if any(name.endswith("weight_g_idx") for name in tensors):
        yield from _of_older(made, tensors)
        return
    from compressed_tensors.quantization import QuantizationConfig

    config = QuantizationConfig.model_validate(about)
    groups = list(config.config_groups.values())
    schemes = {name: _scheme(name, groups, config.ignore, tensors) for name in made.weights}
    for rule in ("float32", "own"):
        weights = {
            name: _decompressed(made, name, schemes[name], tensors, exact=rule == "float32")
            for name in made.weights
        }
        yield "compressed-tensors", rule, weights
        if rule == "float32":
            for name, weight in weights.items():
                _check_packing(made, name, schemes[name], weight, tensors)


def _check_packing(
    made: Files, name: str, scheme: Any, weight: torch.Tensor, tensors: Tensors
) -> None:
    """The library packs what it has unpacked into the same words.

    It cannot where a scale is 0; and it leaves the exponents of powers of two to the scales.
    """
    from compressed_tensors.compressors import BaseCompressor

    if scheme.weights.type == "float" and scheme.weights.num_bits == 4:
        return
    held, module = made.weights[name], name.removesuffix(".weight")
    state = {"weight": weight, "weight_scale": torch.from_numpy(held.scale())}
    if scheme.weights.strategy == "tensor":
        state["weight_scale"] = state["weight_scale"][0]
    if held.zeros is not None:
        state["weight_zero_point"] = torch.from_numpy(held.zeros).to(torch.int8)
    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    for part, tensor in compressor.compress(state, scheme).items():
        if part != "weight_scale":
            there = as_bytes(tensors[f"{module}.{part}"])
            assert np.array_equal(there, as_bytes(tensor)), f"{name}: {part} is packed otherwise"


def as_bytes(tensor: torch.Tensor) -> np.ndarray:
    """Its shape is lost. FP8 has two zeros, which are one here."""
    raw = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    return np.where(raw == 0x80, 0, raw) if tensor.dtype == torch.float8_e4m3fn else raw


def _scheme(name: str, groups: list, ignore: list[str], tensors: Tensors) -> Any:
    """The one group that takes a module."""
    from compressed_tensors.utils.match import match_name

    module = name.removesuffix(".weight")
    assert not any(match_name(module, pattern) for pattern in ignore), f"{module} is to be ignored"
    found = [
        group
        for group in groups
        if any(target == "Linear" or match_name(module, target) for target in group.targets)
    ]
    assert len(found) == 1, f"{module} is in {len(found)} groups"
    return found[0]


def _decompressed(
    made: Files, name: str, scheme: Any, tensors: Tensors, exact: bool
) -> torch.Tensor:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.mx_utils import decompress_mx_scale
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    module = name.removesuffix(".weight")
    own = {
        tensor.removeprefix(f"{module}."): tensors[tensor] for tensor in made.weights[name].tensors
    }
    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    if not exact:
        return compressor.decompress(own, scheme)["weight"]
    if scheme.weights.type == "float" and scheme.weights.num_bits == 4:
        codes, scale = own["weight_packed"], own["weight_scale"]
        codes = unpack_fp4_from_uint8(codes, *_unpacked(codes.shape), dtype=torch.float32)
        scale = decompress_mx_scale(scale) if scale.dtype == torch.uint8 else scale
        more = {"global_scale": own.get("weight_global_scale"), "dtype": torch.float32}
        return dequantize(codes, scale.float(), args=scheme.weights, **more)
    own["weight_scale"] = own["weight_scale"].float()
    return compressor.decompress(own, scheme)["weight"]


def _unpacked(shape: torch.Size) -> tuple[int, int]:
    return shape[0], 2 * shape[1]


def _of_older(made: Files, tensors: Tensors) -> Iterator[Answer]:
    """Asks the older library in a process of its own."""
    asked = {
        name: {tensor.rpartition(".")[2]: as_numpy(tensors[tensor]) for tensor in weight.tensors}
        for name, weight in made.weights.items()
    }
    about = made.config["quantization_config"]["config_groups"]["group_0"]["weights"]
    result = subprocess.run(
        [sys.executable, "-m", "tests.parity.make_narrow_goldens", "--older"],
        input=pickle.dumps((about, asked)),
        env=os.environ | {"PYTHONPATH": f"{OLDER}{os.pathsep}{os.environ.get('PYTHONPATH', '.')}"},
        capture_output=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr.decode()
    version, rules = pickle.loads(result.stdout)
    for rule, weights in rules.items():
        yield (
            f"compressed-tensors {version}",
            rule,
            {
                name: torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
                if array.dtype == ml_dtypes.bfloat16
                else torch.from_numpy(array)
                for name, array in weights.items()
            },
        )


def answer_as_older() -> None:
    """What the older library says, between its standard streams."""
    from compressed_tensors.compressors.quantized_compressors.pack_quantized import (
        unpack_from_int32,
    )
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    about, asked = pickle.loads(sys.stdin.buffer.read())
    args = QuantizationArgs(**about)
    rules: dict[str, dict[str, np.ndarray]] = {"float32": {}, "own": {}}
    for name, arrays in asked.items():
        own = {
            part: torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
            if array.dtype == ml_dtypes.bfloat16
            else torch.from_numpy(array)
            for part, array in arrays.items()
        }
        shape, scale = torch.Size(own["weight_shape"].tolist()), own["weight_scale"]
        codes = unpack_from_int32(own["weight_packed"], args.num_bits, shape)
        zeros = own.get("weight_zero_point")
        if zeros is not None:
            shape = torch.Size((shape[0], scale.shape[1]))
            zeros = unpack_from_int32(zeros, args.num_bits, shape, packed_dim=0)
        for rule, used in (("float32", scale.float()), ("own", scale)):
            weight = dequantize(codes, used, zeros, args=args, g_idx=own["weight_g_idx"])
            rules[rule][name] = as_numpy(weight)
    version = importlib.metadata.version("compressed-tensors")
    sys.stdout.buffer.write(pickle.dumps((version, rules)))


# --- ModelOpt -------------------------------------------------------------------------------------


def of_modelopt(made: Files, tensors: Tensors) -> Iterator[Answer]:
    """ModelOpt's tensors; and compressed-tensors, which converts its FP4."""
    from modelopt.torch.quantization.qtensor import FP8QTensor, NVFP4QTensor

    for rule, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        weights = {}
        for name, weight in made.weights.items():
            codes, scale, *second = (tensors[t] for t in weight.tensors)
            shape = torch.Size(weight.codes.shape)
            if second:
                held: Any = NVFP4QTensor(shape, dtype, codes)
                more = {"scale": scale, "double_scale": second[0], "block_sizes": {-1: 16}}
                weights[name] = held.dequantize(dtype, **more)
            elif rule == "float32":  # in 16 bits it rounds scales first: nobody reads files so
                held = FP8QTensor(shape, dtype, codes)
                blocks = {"block_sizes": {-1: 128, -2: 128}} if scale.ndim == 4 else {}
                scale = (
                    scale[:, None]
                    if scale.ndim == 1
                    else scale.squeeze((1, 3))
                    if blocks
                    else scale
                )
                weights[name] = held.dequantize(dtype, scale=scale, **blocks)
        yield "nvidia-modelopt", rule, weights


# --- AWQ and GPTQ ---------------------------------------------------------------------------------


@functools.cache
def auto_awq() -> Any:
    """The file of AutoAWQ that packs, without the rest of the library, which needs more."""
    root = next(p for p in map(Path, sys.path) if (p / "awq/utils/packing_utils.py").is_file())
    spec = importlib.util.spec_from_file_location("packing", root / "awq/utils/packing_utils.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def of_awq(made: Files, tensors: Tensors) -> Iterator[Answer]:
    """AutoAWQ, GPTQModel, and compressed-tensors, which converts."""
    from compressed_tensors.entrypoints.convert.converters import AutoAWQConverter
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import dequantize
    from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm

    about = made.config["quantization_config"]
    size, asked = about["group_size"], ("qweight", "qzeros", "scales")
    converter = AutoAWQConverter.from_autoawq_config(about)
    args = QuantizationArgs(num_bits=4, symmetric=False, strategy="group", group_size=size)
    found: dict[tuple[str, str], Weights] = {}
    for name in made.weights:
        module = name.removesuffix(".weight")
        codes, zeros, scales = (tensors[f"{module}.{part}"] for part in asked)
        for library, read_by in (
            ("autoawq", auto_awq().dequantize_gemm),
            ("gptqmodel", dequantize_gemm),
        ):
            for rule, used in (("float32", scales.float()), ("own", scales)):
                weight = read_by(codes, zeros, used, 4, size).T
                found.setdefault((library, rule), {})[name] = weight
        turned, scale, zero = converter._convert_gemm_module(codes, scales, zeros)
        weight = dequantize(turned, scale.float(), zero, args=args)
        found.setdefault(("compressed-tensors", "float32"), {})[name] = weight
    for (library, rule), weights in found.items():
        yield library, rule, weights


def of_gptq(made: Files, tensors: Tensors) -> Iterator[Answer]:
    """GPTQModel's layer for PyTorch alone."""
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module

    about = made.config["quantization_config"]
    found: dict[str, Weights] = {"float32": {}, "own": {}}
    for name, weight in made.weights.items():
        module = name.removesuffix(".weight")
        rows, columns = weight.codes.shape
        for rule, made_by in found.items():
            layer = TorchLinear(
                bits=about["bits"],
                group_size=about["group_size"],
                sym=about["sym"],
                desc_act=about["desc_act"],
                in_features=columns,
                out_features=rows,
                bias=False,
                pack_dtype=torch.int32,
                register_buffers=True,
            )
            for part in ("qweight", "qzeros", "scales", "g_idx"):
                tensor = tensors[f"{module}.{part}"].clone()
                there = getattr(layer, part)
                assert there.shape == tensor.shape, (name, part, there.shape, tensor.shape)
                assert there.dtype == tensor.dtype, (name, part, there.dtype, tensor.dtype)
                if part == "scales" and rule == "float32":
                    tensor = tensor.float()
                setattr(layer, part, tensor)
            if about["checkpoint_format"] == "gptq":
                convert_gptq_v1_to_v2_format_module(layer, about["bits"], torch.int32)
            layer.post_init()
            made_by[name] = layer.dequantize_weight().T
    for rule, weights in found.items():
        yield "gptqmodel", rule, weights


# --- MXFP4 ----------------------------------------------------------------------------------------


def of_mxfp4(made: Files, tensors: Tensors) -> Iterator[Answer]:
    """transformers."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    for rule, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        weights = {}
        for name, weight in made.weights.items():
            codes, scales = (tensors[t] for t in weight.tensors)
            weights[name] = convert_moe_packed_tensors(codes, scales, dtype=dtype).transpose(1, 2)
        yield "transformers", rule, weights


ASKED: dict[str, Callable[[Files, Tensors], Iterator[Answer]]] = {
    "fp8": of_fp8,
    "fbgemm_fp8": of_fp8,
    "compressed-tensors": of_compressed,
    "modelopt": of_modelopt,
    "awq": of_awq,
    "gptq": of_gptq,
    "mxfp4": of_mxfp4,
}


def method_of(made: Files) -> str:
    """`quant_method`; hf_quant_config.json alone means ModelOpt."""
    return made.config.get("quantization_config", {}).get("quant_method", "modelopt")


# --- logits ---------------------------------------------------------------------------------------


@torch.no_grad()
def logits_of(
    folder: Path, prompt: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> np.ndarray:
    """float32[tokens, V] of a directory."""
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=dtype,
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
    )
    assert not report["missing_keys"], report["missing_keys"]
    follow_published_limits(model.eval())
    return model(torch.tensor([list(prompt)]), use_cache=False).logits[0].float().numpy()


def logits(made: Files, folder: Path, prompt: tuple[int, ...]) -> np.ndarray:
    """Those of the weights in float32."""
    folder.mkdir()
    config = {k: v for k, v in made.config.items() if k != "quantization_config"}
    (folder / CONFIG).write_text(json.dumps(config))
    (folder / WEIGHTS).write_bytes(weights_file(plain(made)))
    return logits_of(folder, prompt)


def difference(folder: Path, prompt: tuple[int, ...], expected: np.ndarray) -> float | str:
    """How far logits are from those that transformers has when it reads the quantised files; or why it does not."""
    try:
        return _apart(logits_of(folder, prompt), expected)
    except AssertionError:
        return "finds no tensors for some parameters"
    except Exception as error:
        why = error
    if "dtype" in str(why):  # what it makes of FP4 is bfloat16, whatever the model is
        try:
            return f"{_apart(logits_of(folder, prompt, torch.bfloat16), expected)} in bfloat16"
        except Exception as error:
            why = error
    return type(why).__name__


def _apart(found: np.ndarray, expected: np.ndarray) -> float:
    return float(f"{np.abs(found - expected).max():.1e}")


# --- answers --------------------------------------------------------------------------------------


def rule_of(made: Files, name: str, weight: np.ndarray, rule: str) -> str:
    """The rule by which a library rounds by itself: in the dtype of the scales, or in the end."""
    if rule != "own":
        return rule
    held = made.weights[name]
    direct = held.second is None and held.scales.dtype == weight.dtype
    return "scales" if direct else str(weight.dtype)


def answer(name: str, folder: Path) -> tuple[dict[str, Any], np.ndarray]:
    """All about one variant, and its logits."""
    made = files(name)
    made.write(folder / "quantised")
    tensors = read(folder / "quantised")
    assert tensors.keys() == made.tensors.keys()
    said: dict[str, dict[str, dict[str, str]]] = {}
    for library, rule, weights in ASKED[method_of(made)](made, tensors):
        for weight, tensor in weights.items():
            array = as_numpy(tensor)
            used = rule_of(made, weight, array, rule)
            ours = made.weights[weight].rounded(used)
            assert ours.shape == array.shape, (name, weight, ours.shape, array.shape)
            if digest(ours) != digest(array):
                far = np.abs(ours.astype(np.float64) - array.astype(np.float64)).max()
                print(f"  {name}: {library} {used} {weight} differs by {far}", flush=True)
            said.setdefault(library, {}).setdefault(used, {})[weight] = digest(array)
    prompt = MODELS[VARIANTS[name].model].prompt
    values = logits(made, folder / "plain", prompt)
    apart = difference(folder / "quantised", prompt, values)
    agreed = {
        library: {rule: f"{len(weights)} of {len(made.weights)}" for rule, weights in rules.items()}
        for library, rules in said.items()
    }
    print(f"{name:32} logits {values.std():.2f} {apart} {agreed}", flush=True)
    return {"files": fingerprint(made), "read whole": apart, "weights": said}, values


def main() -> None:
    """Asks, and writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=VARIANTS, metavar="NAME", help="show these")
    parser.add_argument("--older", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.older:
        answer_as_older()
        return
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    answers, values = {}, {}
    with tempfile.TemporaryDirectory() as held:
        for name in args.only or VARIANTS:
            answers[name], values[name] = answer(name, Path(held) / name)
    if args.only:
        return
    versions = {name: importlib.metadata.version(name) for name in LIBRARIES}
    text = json.dumps({"versions": versions, "variants": answers}, indent=1)
    ANSWERS.write_text(text + "\n", encoding="utf-8")
    np.savez_compressed(LOGITS, **values)
    print(*(f"{file.name}: {file.stat().st_size} bytes" for file in (ANSWERS, LOGITS)))


if __name__ == "__main__":
    main()
