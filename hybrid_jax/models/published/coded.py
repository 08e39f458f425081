"""Which tensors of a file stand for a matrix that is kept as codes, and in which format they are read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from hybrid_jax.config.formats import Scale, Scaled
from hybrid_jax.models.published.about import INSTEAD, About
from hybrid_jax.models.published.said import Said

WEIGHT = "weight"
REMEDY = "weights and config.json must be of the same model: fetch both again"
# As safetensors name dtypes.
SCALES: dict[str, Scale] = {
    "F64": "float32",
    "F32": "float32",
    "BF16": "bfloat16",
    "F16": "float16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "uint8",
    "U8": "uint8",
}
INT32_BITS = 32
AS_ONE = {"F8_E4M3": "fp8", "I8": "int8"}  # codes with an element each


class Tensor(Protocol):
    """A tensor of a file, as its header describes it."""

    @property
    def name(self) -> str:
        """In the file."""

    @property
    def dtype(self) -> str:
        """As safetensors name it."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""


@dataclass(frozen=True, kw_only=True)
class Coded:
    """A matrix [..., O, I] of a file that is kept as codes.

    Attributes:
        layout: how its codes lie: "rows", an element each, or two in a byte, [..., O, I]; "packed", int32 along I;
            "awq" and "gptq", int32 along O and along I of a matrix [I, O]; "blocks", bytes [..., O, I / 32, 16].
        format: in which they are read.
        tensors: names, by "codes", "scales", "zeros", "second" and "order".
        inverse: the second scale is divided by.
        less_one: zero points are stored less one.
        middle: all zero points of AWQ must be 8, the middle of the codes.
    """

    layout: str
    format: Scaled
    tensors: Mapping[str, str] = field(hash=False)
    inverse: bool = False
    less_one: bool = False
    middle: bool = False


def find_coded(
    name: str, shape: tuple[int, ...], there: Mapping[str, Tensor], about: About | None
) -> Coded | None:
    """How a file keeps a matrix; None if it is no code, or not there.

    Args:
        name: of the matrix, ending in "weight", or of those of all experts. shape: [..., O, I].
        there: the tensors of the file, by their names in the spelling of `name`.
        about: what config.json says; None for nothing.

    Raises:
        ValueError: tensors do not fit each other. NotImplementedError: codes that are not read.
    """
    fused = not name.endswith(f".{WEIGHT}")
    look = _Look(name + "_" if fused else name.removesuffix(WEIGHT), shape, there, about)
    if fused and (look.has("blocks") or look.has("scales")):
        return look.blocks()
    if look.has("qweight"):
        return look.transposed()
    if look.has("weight_packed"):
        return look.packed()
    own = there.get(name)
    if own is None and about is not None and look.has("weight_shape"):
        look.tensor("weight_packed")
    if own is None or own.dtype not in ("I8", "U8", "I32") and not own.dtype.startswith("F8"):
        return None
    return look.rows(name)


class _Look:
    """A look at the tensors of one matrix; `base` is what their names begin with."""

    def __init__(
        self, base: str, shape: tuple[int, ...], there: Mapping[str, Tensor], about: About | None
    ) -> None:
        self.base, self.there, self.about = base, there, about
        *lead, self.columns, self.inner = shape
        self.lead = tuple(lead)

    def has(self, end: str) -> bool:
        return self.base + end in self.there

    def tensor(self, end: str) -> Tensor:
        """A tensor that must be there."""
        if not self.has(end):
            raise ValueError(
                f"load_model: tensor {self.base}{end} is missing, beside codes that are there; fetch the model again"
            )
        return self.there[self.base + end]

    def names(self, **ends: str) -> dict[str, str]:
        return {role: self.base + end for role, end in ends.items() if self.has(end)}

    def must(self, tensor: Tensor, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> None:
        """ValueError unless a tensor has this shape and one of these dtypes."""
        if tensor.shape != shape or tensor.dtype not in dtypes:
            raise ValueError(
                f"load_model: tensor {tensor.name} must have shape {shape} and dtype {' or '.join(dtypes)}, got "
                f"{tensor.shape} and {tensor.dtype}; {REMEDY}"
            )

    def said(self, own: Tensor, bits: int, kind: str) -> Said:
        """What config.json says of these codes; an error if that is nothing, or something else."""
        if self.about is None:
            raise NotImplementedError(
                f"load_model: tensor {own.name} has dtype {own.dtype}, and config.json has no quantization_config that "
                f"says what its codes are; {INSTEAD}"
            )
        if self.about.method in ("awq", "gptq", "mxfp4"):
            raise ValueError(
                f"load_model: tensor {own.name} has dtype {own.dtype}, and {self.about.place} says quant_method "
                f"{self.about.method}, which has no such tensors; {REMEDY}"
            )
        found = self.about.of((own.name.rpartition(".")[0], self.base.rstrip("._")))
        found = found or Said(place=self.about.place)
        if (found.bits or bits, found.kind or kind) != (bits, kind):
            raise ValueError(
                f"load_model: tensor {own.name} has dtype {own.dtype} and codes of {kind}{bits}, {found.place} says "
                f"{found.kind}{found.bits}; {REMEDY}"
            )
        if found.group is not None and self.inner % found.group:
            raise ValueError(
                f"load_model: group_size {found.group} of {found.place} must divide the {self.inner} columns of "
                f"{own.name}; {INSTEAD}"
            )
        return found

    # --- layouts ----------------------------------------------------------------------------------

    def rows(self, name: str) -> Coded:
        """A tensor [..., O, I] with an element for each code, or one for two."""
        own, fused = self.there[name], not self.base.endswith(".")
        ends = ("scale_inv", "scale") if fused else ("weight_scale_inv", "weight_scale")
        if own.dtype == "U8":
            return self.nibbles(own, "weight", "weight_scale")
        if own.dtype not in AS_ONE:
            raise NotImplementedError(
                f"load_model: tensor {own.name} has dtype {own.dtype}, whose codes are not read; {INSTEAD}"
            )
        self.must(own, (*self.lead, self.columns, self.inner), (own.dtype,))
        said = self.said(own, 8, "float" if own.dtype == "F8_E4M3" else "int")
        end = next(filter(self.has, ends), None)
        if end is None:
            usual = ends[self.about is None or self.about.method != "fp8"]
            raise ValueError(
                f"load_model: tensor {own.name} has dtype {own.dtype} and no scales: {self.base}{usual} is missing; "
                + INSTEAD
            )
        scales = self.tensor(end)
        code: Any = AS_ONE[own.dtype]
        zeros = {} if fused else self.names(zeros="weight_zero_point")
        format = self.scaled(scales, code, said, zeros=bool(zeros))
        if zeros:
            self.must(self.there[zeros["zeros"]], scales.shape, ("I8",))
        found = {"codes": name, "scales": self.base + end, **zeros}
        return Coded(layout="rows", format=format, tensors=found)

    def scaled(self, scales: Tensor, code: Any, said: Said, *, zeros: bool = False) -> Scaled:
        """The format of codes [O, I] with a scale for a matrix, a column, a group of each column, or a block."""
        if scales.dtype not in SCALES:
            raise NotImplementedError(
                f"load_model: scales {scales.name} have dtype {scales.dtype}, which is not read; {INSTEAD}"
            )
        dtype, shape = SCALES[scales.dtype], scales.shape[len(self.lead) :]
        if len(shape) == 4 and shape[1] == shape[3] == 1:  # as ModelOpt writes those of blocks
            shape = shape[::2]
        columns, inner = said.block or (128, 128)
        blocks = (-(-self.columns // columns), -(-self.inner // inner))
        wanted: dict[str, list[tuple[int, ...]]] = {
            "tensor": [(), (1,)],
            "channel": [(self.columns,), (self.columns, 1)],
            "block": [blocks, *[()] * (math.prod(blocks) == 1)],
            "group": [(self.columns, self.inner // (said.group or self.inner))],
        }
        if (kind := (said.strategy or "").removeprefix("tensor_")) in wanted:
            known = wanted[kind]
            if shape not in known:
                raise ValueError(
                    f"load_model: scales {scales.name} must have shape {known[0]} as {said.place} says, got "
                    f"{scales.shape}; {REMEDY}"
                )
        elif said.place.endswith("weight_block_size") and said.block is None and shape == blocks:
            if math.prod(shape) > 1 and shape != (self.columns, 1):
                raise ValueError(
                    f"load_model: scales {scales.name} of shape {scales.shape} are of blocks, and {said.place} must "
                    f"say which, got null; {REMEDY}"
                )
        if shape == blocks and shape != (self.columns, 1) and not zeros:
            return Scaled(code=code, group=inner, columns=columns, scale=dtype)
        if math.prod(shape) == 1 or shape in ((self.columns,), (self.columns, 1)):
            return Scaled(code=code, scale=dtype, zeros=zeros)
        if len(shape) == 2 and shape[0] == self.columns and self.inner % shape[1] == 0:
            return Scaled(code=code, group=self.inner // shape[1], scale=dtype, zeros=zeros)
        raise ValueError(
            f"load_model: scales {scales.name} must have one element, {self.columns}, or {blocks} for blocks of "
            f"{columns} x {inner}, or one for each group of a column, got shape {scales.shape}; groups must divide "
            f"{self.inner}"
        )

    def nibbles(self, own: Tensor, codes: str, scales: str) -> Coded:
        """Floats of 4 bits, two in a byte, [..., O, I / 2]: NVFP4 with a second scale, MXFP4 without."""
        said = self.said(own, 4 if self.about else 8, "float")
        self.must(own, (*self.lead, self.columns, self.inner // 2), ("U8",))
        scale = self.tensor(scales)
        group = 16 if scale.dtype == "F8_E4M3" else 32
        dtypes = ("F8_E4M3",) if group == 16 else ("U8", "F8_E8M0")
        self.must(scale, (*self.lead, self.columns, -(-self.inner // group)), dtypes)
        if said.group not in (None, group):
            raise ValueError(
                f"load_model: scales {scale.name} of dtype {scale.dtype} are of groups of {group}, {said.place} says "
                f"group_size {said.group}; {REMEDY}"
            )
        modelopt = self.about is not None and self.about.method == "modelopt"
        end = "weight_scale_2" if modelopt else "weight_global_scale"
        second = self.names(second=end)
        if group == 16 and not second:
            self.tensor(end)
        if second:
            shape = self.there[second["second"]].shape
            self.must(self.tensor(end), (1,) if shape != () else (), ("F32", "F64", "BF16", "F16"))
        format = Scaled(code="fp4", group=group, scale=SCALES[scale.dtype], second=bool(second))
        found = self.names(codes=codes, scales=scales) | second
        return Coded(
            layout="rows",
            format=format,
            tensors=found,
            inverse=second.get("second", "").endswith("global_scale"),
        )

    def packed(self) -> Coded:
        """What compressed-tensors packs: integers in int32, or floats of 4 bits in bytes."""
        own = self.tensor("weight_packed")
        if own.dtype == "U8":
            return self.nibbles(own, "weight_packed", "weight_scale")
        if self.about is None or self.about.method != "compressed-tensors":
            self.said(own, 0, "int")
        words = own.shape[-1] if own.shape else 0
        bits = next((n for n in (4, 8) if words == -(-self.inner * n // INT32_BITS)), None)
        if bits is None:
            wanted = (self.columns, -(-self.inner * 4 // INT32_BITS))
            self.must(own, wanted, ("I32",))
        assert bits is not None
        self.must(own, (self.columns, words), ("I32",))
        said = self.said(own, bits, "int")
        self.must(self.tensor("weight_shape"), (2,), ("I32", "I64"))
        scales = self.tensor("weight_scale")
        zeros, order = self.names(zeros="weight_zero_point"), self.names(order="weight_g_idx")
        if said.symmetric is False:
            self.tensor("weight_zero_point")
        if said.symmetric and zeros:
            raise ValueError(
                f"load_model: tensor {self.base}weight_zero_point has zero points, and {said.place} says symmetric; "
                + REMEDY
            )
        if said.ordered:
            self.tensor("weight_g_idx")
        code: Any = f"int{bits}"
        format = self.scaled(scales, code, said, zeros=bool(zeros))
        groups = format.groups(self.inner)
        if zeros:
            packed = -(-self.columns * bits // INT32_BITS)
            self.must(self.there[zeros["zeros"]], (packed, groups), ("I32",))
        if order:
            self.must(self.there[order["order"]], (self.inner,), ("I32", "I64"))
            format = replace(format, ordered=True)
        found = self.names(codes="weight_packed", scales="weight_scale", shape="weight_shape")
        found |= zeros | order
        return Coded(layout="packed", format=format, tensors=found)

    def transposed(self) -> Coded:
        """What AWQ and GPTQ pack, of a matrix [I, O]."""
        about, own = self.about, self.tensor("qweight")
        if about is None or about.method not in ("awq", "gptq"):
            said = "no quantization_config" if about is None else f"quant_method {about.method}"
            raise ValueError(
                f"load_model: tensor {own.name} is of AWQ or GPTQ, and config.json has {said}; {REMEDY}"
            )
        assert about.bits is not None
        awq, each = about.method == "awq", INT32_BITS // about.bits
        group = about.group or self.inner
        if self.inner % group or self.columns % each or self.inner % each:
            raise ValueError(
                f"load_model: group_size {group} and words of {each} codes do not divide the matrix [{self.inner}, "
                f"{self.columns}] of {own.name}; {INSTEAD}"
            )
        groups = self.inner // group
        shape = (self.inner, self.columns // each) if awq else (self.inner // each, self.columns)
        self.must(own, shape, ("I32",))
        scales = self.tensor("scales")
        self.must(scales, (groups, self.columns), ("F16", "BF16", "F32", "F64"))
        self.must(self.tensor("qzeros"), (groups, self.columns // each), ("I32",))
        if not awq and about.ordered:
            self.tensor("g_idx")
        order = {} if awq else self.names(order="g_idx")
        if order:
            self.must(self.there[order["order"]], (self.inner,), ("I32", "I64"))
        code: Any = f"int{about.bits}"
        format = Scaled(
            code=code,
            group=about.group,
            scale=SCALES[scales.dtype],
            zeros=True,
            ordered=bool(order) and about.ordered,
        )
        found = self.names(codes="qweight", scales="scales", zeros="qzeros") | order
        return Coded(
            layout=about.method,
            format=format,
            tensors=found,
            less_one=not awq and about.zeros_less_one,
            middle=awq and not about.zeros,
        )

    def blocks(self) -> Coded:
        """MXFP4 of all experts in one: bytes [E, O, I / 32, 16]."""
        own, scales = self.tensor("blocks"), self.tensor("scales")
        groups = -(-self.inner // 32)
        self.must(own, (*self.lead, self.columns, groups, 16), ("U8",))
        self.must(scales, (*self.lead, self.columns, groups), ("U8", "F8_E8M0"))
        format = Scaled(code="fp4", group=32, scale="uint8")
        return Coded(
            layout="blocks", format=format, tensors=self.names(codes="blocks", scales="scales")
        )
