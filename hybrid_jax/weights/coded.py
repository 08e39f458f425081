"""Codes and scales of files, laid out as products take them (`config.formats.Scaled`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from hybrid_jax.config.arrays import ArraySpec
from hybrid_jax.config.formats import CODES, DENSE, Scaled, part_name
from hybrid_jax.kinds.tensors import Part, Rows, Stored
from hybrid_jax.models.published.about import INSTEAD
from hybrid_jax.models.published.coded import REMEDY, Coded
from hybrid_jax.models.published.runs import Run
from hybrid_jax.weights.safetensors import ARRAY_DTYPES, StoredTensor

Arrays = dict[str, np.ndarray]
# From a part whose numbers are kept as they are, and where they go.
Dense = Callable[[Part, np.ndarray], None]
BESIDE = (
    *("input_scale", "input_global_scale", "input_zero_point", "activation_scale", "weight_shape"),
    *("output_scale", "input_scale_ub"),
)
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where the codes of columns 0 to 7 lie in a word
ONES = {"int4": 0x11111111, "int8": 0x01010101}  # a word of codes of 1
NOT_A_SCALE = 255  # NaN among scales that are powers of two
FP8_NAN = 0x7F  # without its sign


def assemble(
    leaf: Stored,
    runs: tuple[Run, ...],
    tensors: Mapping[str, StoredTensor],
    dtype: str,
    dense: Dense,
) -> Any:
    """The arrays of a parameter: by name, or those of several formats side by side.

    Args:
        runs: its columns by how they are kept. dtype: of numbers that are kept as they are.
        dense: writes the numbers of a part into [..., I, O].

    Raises:
        ValueError: what is stored is damaged, or contradicts config.json.
    """
    made = [_run(leaf, run, tensors, dtype, dense) for run in runs]
    return made[0] if len(made) == 1 else {part_name(index): own for index, own in enumerate(made)}


def goes_with_codes(
    name: str, coded: Mapping[str, Coded], tensors: Mapping[str, StoredTensor]
) -> bool:
    """Whether a tensor belongs to a matrix of codes and changes nothing: scales of activations, or a bias of zeros."""
    base, _, end = name.rpartition(".")
    if f"{base}.weight" not in coded:
        return False
    if end == "bias" and tensors[name].dtype in ARRAY_DTYPES:
        return not tensors[name].array().any()
    return end in BESIDE


def _run(
    leaf: Stored, run: Run, tensors: Mapping[str, StoredTensor], dtype: str, dense: Dense
) -> Any:
    shape = (*leaf.shape[:-1], run.stop - run.start)
    specs = run.format.specs(shape, dtype)
    if run.format == DENSE:
        assert isinstance(specs, ArraySpec)
        out: np.ndarray = np.empty(specs.shape, specs.dtype)
        for part, _ in run.parts:
            dense(part, out[(*part.place[:-1], _columns(part, run))])
        return out
    assert isinstance(specs, dict) and isinstance(run.format, Scaled)
    found: Arrays = {
        name: np.empty(spec.shape, spec.dtype)
        for name, spec in specs.items()
        if isinstance(spec, ArraySpec)
    }
    for part, coded in run.parts:
        assert coded is not None, part
        own = _part(part, coded, run.format, {n: tensors[t] for n, t in coded.tensors.items()})
        lead, columns, shared = part.place[:-2], _columns(part, run), run.format.columns
        blocks = slice(columns.start // shared, -(-columns.stop // shared))
        for name, array in own.items():
            place = {"second": (columns,), "order": (), "scales": (blocks, slice(None))}
            found[name][(*lead, ..., *place.get(name, (columns, slice(None))))] = array
    return found


def _columns(part: Part, run: Run) -> slice:
    """The columns of a part in those of its run."""
    own = part.place[-1]
    assert isinstance(own, slice), part
    return slice(own.start - run.start, own.stop - run.start)


def _part(part: Part, coded: Coded, format: Scaled, there: Mapping[str, StoredTensor]) -> Arrays:
    """The arrays of one tensor's rows."""
    columns, inner = part.shape[-2:]
    found = UNPACK[coded.layout](coded, there, columns, inner)
    if coded.format.code == "fp8":
        _check_codes(there["codes"], found["codes"])
    found["scales"] = _scales(there["scales"], found["scales"], coded.format, columns)
    if coded.format.second:
        second: np.ndarray = there["second"].raw().astype(np.float32).reshape(-1)
        _check_scales(there["second"], second)
        if coded.inverse and not second.all():
            raise ValueError(
                f"load_model: scales {there['second'].name} of {there['second'].file} hold 0.0, and numbers are "
                "divided by them; the weights are damaged"
            )
        if coded.inverse:
            second = np.float32(1) / second
        found["second"] = np.broadcast_to(second, columns)
    if "order" in there:
        found |= _ordered(found, there["order"], coded, format)
    if format.columns != (shared := coded.format.columns):
        found["scales"] = np.repeat(found["scales"], shared, axis=-2)[..., :columns, :]
    if part.rows is not None:
        for name in found.keys() - {"order"}:
            axis = found[name].ndim - (1 if name == "second" else 2)
            each = format.columns if name == "scales" else 1
            found[name] = rows_of(found[name], part.rows, axis, each)
    if part.factor != 1.0:
        found["scales"] = found["scales"].astype(np.float32) * np.float32(part.factor)
    return found


def rows_of(array: np.ndarray, rows: Rows, axis: int = 0, shared: int = 1) -> np.ndarray:
    """Some rows of a tensor, along the axis in which an array has one for `shared` of them."""
    size, start, stop = rows.size // shared, rows.start // shared, rows.stop // shared
    blocks = array.reshape(*array.shape[:axis], rows.blocks, size, *array.shape[axis + 1 :])
    kept = blocks[(*(slice(None),) * axis, slice(None), slice(start, stop))]
    return kept.reshape(*array.shape[:axis], -1, *array.shape[axis + 1 :])


def _scales(tensor: StoredTensor, scales: np.ndarray, format: Scaled, columns: int) -> np.ndarray:
    """Scales [..., columns / shared, groups], and none of them NaN."""
    _check_scales(tensor, scales)
    if format.group is not None:
        return scales.squeeze((1, 3)) if scales.ndim == 4 else scales
    lead = scales.shape[:-2] if scales.ndim > 2 else ()
    return np.broadcast_to(scales.reshape(*lead, -1, 1), (*lead, columns, 1))


def _check_scales(tensor: StoredTensor, scales: np.ndarray) -> None:
    wide: np.ndarray = scales.astype(np.float32)
    wrong = ~np.isfinite(wide) if scales.dtype != np.uint8 else scales == NOT_A_SCALE
    if wrong.any():
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise ValueError(
            f"load_model: scales {tensor.name} of {tensor.file} hold {wide[at]} at {at}; the weights are damaged"
        )


def _check_codes(tensor: StoredTensor, codes: np.ndarray) -> None:
    flat: np.ndarray = codes.reshape(-1).view(np.uint8)
    wrong = np.flatnonzero((flat & FP8_NAN) == FP8_NAN)
    if wrong.size:
        raise ValueError(
            f"load_model: tensor {tensor.name} of {tensor.file} holds nan at {int(wrong[0])}; the weights are damaged"
        )


# --- layouts --------------------------------------------------------------------------------------


def _of_rows(coded: Coded, there: Mapping[str, StoredTensor], columns: int, inner: int) -> Arrays:
    found = {name: there[name].raw() for name in ("codes", "scales")}
    if "zeros" in there:
        found["zeros"] = there["zeros"].raw().astype(np.int16)
    return found


def _of_blocks(coded: Coded, there: Mapping[str, StoredTensor], columns: int, inner: int) -> Arrays:
    codes = there["codes"].raw()
    return {"codes": codes.reshape(*codes.shape[:-2], -1), "scales": there["scales"].raw()}


def _of_packed(coded: Coded, there: Mapping[str, StoredTensor], columns: int, inner: int) -> Arrays:
    """Codes lie in int32 along I, and zero points along O; both are stored plus half of their range."""
    shape = there["shape"].raw().tolist()
    if shape != [columns, inner]:
        raise ValueError(
            f"load_model: tensor {there['shape'].name} of {there['shape'].file} must be {[columns, inner]}, got "
            f"{shape}; {REMEDY}"
        )
    codes: np.ndarray = (
        there["codes"].raw().view(np.uint8)[:, : -(-inner // CODES[coded.format.code][1])]
    )
    found = {"codes": _signed(codes, coded.format), "scales": there["scales"].raw()}
    if "zeros" in there:
        words = np.ascontiguousarray(there["zeros"].raw().T)  # [groups, O / each]
        found["zeros"] = _zeros(_words(words, coded.format)[:, :columns], coded.format)
    return found


def _of_gptq(coded: Coded, there: Mapping[str, StoredTensor], columns: int, inner: int) -> Arrays:
    """Codes [I, O] lie in int32 along I, zero points [groups, O] along O."""
    words = np.ascontiguousarray(there["codes"].raw().T)  # [O, I / each]
    packed: np.ndarray = there["zeros"].raw().view(np.uint32)
    if coded.less_one:  # 1 was taken from whole words, so that a code may have borrowed it
        packed = packed + np.uint32(ONES[coded.format.code])
    return {
        "codes": _signed(words.view(np.uint8), coded.format),
        "scales": there["scales"].raw().T,
        "zeros": _zeros(_words(np.ascontiguousarray(packed), coded.format), coded.format),
    }


def _of_awq(coded: Coded, there: Mapping[str, StoredTensor], columns: int, inner: int) -> Arrays:
    """Codes [I, O] and zero points [groups, O] lie in int32 along O, in an order of their own."""
    wide, zeros = (
        _in_columns(_words(np.ascontiguousarray(there[name].raw()), coded.format))
        for name in ("codes", "zeros")
    )
    if coded.middle and (zeros != 8).any():
        raise ValueError(
            f"load_model: tensor {there['zeros'].name} of {there['zeros'].file} must hold 8 alone, since zero_point is "
            f"false in config.json, got {int(zeros[zeros != 8][0])}; {REMEDY}"
        )
    return {
        "codes": _pairs(np.ascontiguousarray(wide.T)),  # of [O, I]
        "scales": there["scales"].raw().T,
        "zeros": _zeros(zeros, coded.format),
    }


UNPACK = {
    "rows": _of_rows,
    "blocks": _of_blocks,
    "packed": _of_packed,
    "gptq": _of_gptq,
    "awq": _of_awq,
}


def _words(words: np.ndarray, format: Scaled) -> np.ndarray:
    """The codes of int32 [..., n], the lowest bits first: uint8 [..., n x codes of a word]."""
    found: np.ndarray = words.view(np.uint8)
    return found if CODES[format.code][1] == 1 else _halves(found)


def _halves(codes: np.ndarray) -> np.ndarray:
    """The two codes of each byte, the lower half first."""
    return np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:-1], -1)


def _pairs(codes: np.ndarray) -> np.ndarray:
    """Codes of 4 bits, two in a byte."""
    return codes[..., ::2] | codes[..., 1::2] << 4


def _signed(codes: np.ndarray, format: Scaled) -> np.ndarray:
    """Bytes of codes; those of 8 bits are stored plus 128."""
    return codes if format.code == "int4" else (codes ^ 0x80).view(np.int8)


def _zeros(zeros: np.ndarray, format: Scaled) -> np.ndarray:
    """Zero points uint8[groups, O] as [O, groups]; those of codes of 8 bits are stored plus 128."""
    wide: np.ndarray = zeros.T.astype(format.zero_dtype)
    return wide if format.code == "int4" else wide - wide.dtype.type(128)


def _in_columns(codes: np.ndarray) -> np.ndarray:
    """Codes of AWQ, whose words have them in an order of their own."""
    by_word = codes.reshape(*codes.shape[:-1], -1, len(AWQ_ORDER))
    return by_word[..., AWQ_ORDER].reshape(codes.shape)


def _ordered(found: Arrays, tensor: StoredTensor, coded: Coded, format: Scaled) -> Arrays:
    """Codes by the group of each element: in its order, which activations then take."""
    group_of: np.ndarray = tensor.raw().astype(np.int64)
    if (group_of == -1).all():  # as compressed-tensors says that they are in order
        group_of = np.arange(group_of.size) // (format.group or group_of.size)
    groups = found["scales"].shape[-1]
    inner = group_of.size
    each = format.group or inner
    order = np.argsort(group_of, kind="stable")
    wrong = group_of[(group_of < 0) | (group_of >= groups)]
    if wrong.size:
        raise ValueError(
            f"load_model: tensor {tensor.name} of {tensor.file} must have groups from 0 to {groups - 1}, got "
            f"{wrong[0]}; the weights are damaged"
        )
    if not np.array_equal(group_of[order], np.arange(inner) // each):
        raise ValueError(
            f"load_model: tensor {tensor.name} of {tensor.file} must give each of {groups} groups {each} elements; "
            + INSTEAD
        )
    if not format.ordered:
        if np.array_equal(order, np.arange(inner)):
            return {}
        raise ValueError(
            f"load_model: tensor {tensor.name} of {tensor.file} permutes elements, and config.json says that desc_act "
            f"is false; {REMEDY}"
        )
    codes = found["codes"]
    in_bytes = CODES[format.code][1] == 2
    codes = _pairs(_halves(codes)[:, order]) if in_bytes else codes[:, order]
    return {"codes": codes, "order": order.astype(np.int32)}
