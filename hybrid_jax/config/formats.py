"""How matrices of weights are kept: as one array of numbers, or as narrow codes with scales. The host counts by it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from hybrid_jax.config.arrays import ArraySpec
from hybrid_jax.config.checks import must, one_of, require

Code = Literal["int8", "fp8", "int4", "fp4"]
Scale = Literal["float32", "bfloat16", "float16", "float8_e4m3fn", "uint8"]
Specs = ArraySpec | dict[str, "Specs"]
# Of a code: the dtype of the array that has it, and how many lie in one element.
CODES: dict[Code, tuple[str, int]] = {
    "int8": ("int8", 1),
    "fp8": ("float8_e4m3fn", 1),
    "int4": ("uint8", 2),
    "fp4": ("uint8", 2),
}
MIDDLE = {"int8": 0, "int4": 8}  # the code that stands for zero, where no zero points are kept
TILE, MOST_GROUPS = (
    512,
    8,
)  # elements of the inner dimension that are widened at a time, or one group; groups
FLOAT32_BYTES = 4


@dataclass(frozen=True)
class Format:
    """A way to keep a matrix. An entry of `products.operations.OPERATIONS` computes with it."""

    @property
    def about(self) -> str:
        """It in a few words."""
        raise NotImplementedError

    def specs(self, shape: tuple[int, ...], dtype: str) -> Specs:
        """The arrays that stand for a matrix [..., I, O] of a model in `dtype`: one, or several by name.

        Raises:
            ValueError: a matrix of this shape has no such form.
        """
        raise NotImplementedError

    def tile_bytes(self, shape: tuple[int, ...], dtype: str) -> int:
        """Bytes that a product with a matrix [..., I, O] holds of its numbers in another form, whatever the tokens."""
        return 0

    def token_bytes(self, shape: tuple[int, ...], dtype: str) -> int:
        """Bytes that a product holds for each token, beside what goes in and comes out."""
        return 0


@dataclass(frozen=True)
class Dense(Format):
    """One array with every number."""

    @property
    def about(self) -> str:
        return "as it is"

    def specs(self, shape: tuple[int, ...], dtype: str) -> Specs:
        return ArraySpec(shape, dtype)


@dataclass(frozen=True, kw_only=True)
class Scaled(Format):
    """Codes of 8 or 4 bits, and scales for groups of them.

    A number of the matrix is (code - zero point) x scale x second scale. A product is, for each group in order, the
    scale times the float32 sum of (code - zero point) x activation; these are summed in float32, and the second scale
    multiplies last. For a matrix [..., I, O] the arrays are, by name:

        codes: [..., O, I], or of 4 bits uint8 [..., O, I / 2], the even element in the lower bits.
        scales: [..., O / columns, I / group], both rounded up. In uint8 they are powers of two: 2 ** (scale - 127).
        zeros: [..., O, I / group], if there are zero points.
        second: float32 [..., O], if there are second scales.
        order: int32 [..., I], if activations are permuted: element i of the codes meets activation order[i].

    Attributes:
        code: "int8"; "fp8", float8 e4m3; "int4", 0 to 15, whose zero point is 8 unless others are kept; "fp4", e2m1: 0,
            0.5, 1, 1.5, 2, 3, 4, 6, and the same below zero.
        group: elements of the inner dimension that share a scale; None for all.
        columns: columns that share a scale.
        scale: dtype of the scales.
        zeros, second, ordered: there are zero points; second scales; an order.
    """

    code: Code
    group: int | None = None
    columns: int = 1
    scale: Scale = "float32"
    zeros: bool = False
    second: bool = False
    ordered: bool = False

    def __post_init__(self) -> None:
        one_of(self, "code", tuple(CODES))
        one_of(self, "scale", get_args(Scale))
        per_byte = CODES[self.code][1]
        whole = self.group is None or (self.group > 0 and self.group % per_byte == 0)
        must(self, "group", whole, f"a positive multiple of {per_byte}, or None for all elements")
        require(self.columns > 0, "Scaled", f"columns must be positive, got {self.columns}")
        must(
            self, "zeros", not self.zeros or self.code in MIDDLE, "False for codes that are floats"
        )
        alone = self.columns == 1 or not self.zeros
        must(self, "columns", alone, "1 where there are zero points", str(self.columns))

    @property
    def about(self) -> str:
        names = {("fp4", "float8_e4m3fn"): "nvfp4", ("fp4", "uint8"): "mxfp4"}
        found = names.get((self.code, self.scale), self.code)
        if self.group is None:
            shared = "column" if self.columns == 1 else f"{self.columns} columns"
        elif self.columns == 1:
            shared = str(self.group)
        else:
            shared = f"{self.group} x {self.columns}"
        beside = [" with zero points"] * self.zeros + [" in an order of its own"] * self.ordered
        return f"{found}, a scale per {shared}" + " and".join(beside)

    @property
    def zero_dtype(self) -> str:
        """The dtype of zero points: one more bit than codes have."""
        return "int8" if self.code == "int4" else "int16"

    def groups(self, inner: int) -> int:
        """How many groups an inner dimension has."""
        return 1 if self.group is None else -(-inner // self.group)

    def specs(self, shape: tuple[int, ...], dtype: str) -> Specs:
        *lead, inner, columns = shape
        code, per_byte = CODES[self.code]
        if inner % per_byte:
            raise ValueError(
                f"codes of 4 bits need an even inner dimension, got a matrix of shape {shape}"
            )
        groups = self.groups(inner)
        found: dict[str, Specs] = {
            "codes": ArraySpec((*lead, columns, inner // per_byte), code),
            "scales": ArraySpec((*lead, -(-columns // self.columns), groups), self.scale),
        }
        if self.zeros:
            found["zeros"] = ArraySpec((*lead, columns, groups), self.zero_dtype)
        if self.second:
            found["second"] = ArraySpec((*lead, columns), "float32")
        if self.ordered:
            found["order"] = ArraySpec((*lead, inner), "int32")
        return found

    def tile(self, inner: int) -> tuple[int, int]:
        """How many groups are widened at a time, and how many elements each of them has: half of the matrix at most.

        If all elements are one group, it is cut into parts.
        """
        if self.group is None:
            return 1, min(TILE, inner // 4 * 2) or inner
        groups = min(TILE // self.group, MOST_GROUPS, inner // self.group // 2)
        return max(groups, 1), min(self.group, inner)

    def tile_bytes(self, shape: tuple[int, ...], dtype: str) -> int:
        """Of one of several experts: those are visited one after the other."""
        *lead, inner, columns = shape
        groups, each = self.tile(inner)
        tile = (
            FLOAT32_BYTES * groups * each * columns * (3 if groups > 1 else 1)
        )  # XLA turns it round
        if lead:  # a copy of the expert that is visited
            tile += sum(spec.num_bytes for spec in arrays_of(self.specs((inner, columns), dtype)))
        return tile

    def token_bytes(self, shape: tuple[int, ...], dtype: str) -> int:
        """Activations in float32, the sums so far, and those of the groups that are widened."""
        inner, columns = shape[-2:]
        return FLOAT32_BYTES * (inner + columns * (2 + self.tile(inner)[0]))


@dataclass(frozen=True)
class Joined(Format):
    """Columns of several formats side by side.

    Attributes:
        parts: of each format, in order: how many columns it has, and the format.
    """

    parts: tuple[tuple[int, Format], ...]

    def __post_init__(self) -> None:
        require(len(self.parts) > 1, "Joined", "needs two parts or more")
        alone = all(isinstance(format, Dense | Scaled) for _, format in self.parts)
        require(alone, "Joined", "takes no parts that are joined")

    @property
    def about(self) -> str:
        return " | ".join(f"{format.about} ({columns})" for columns, format in self.parts)

    def specs(self, shape: tuple[int, ...], dtype: str) -> Specs:
        total = sum(columns for columns, _ in self.parts)
        if total != shape[-1]:
            raise ValueError(f"parts with {total} columns do not make a matrix of shape {shape}")
        return {
            part_name(index): format.specs((*shape[:-1], columns), dtype)
            for index, (columns, format) in enumerate(self.parts)
        }

    def tile_bytes(self, shape: tuple[int, ...], dtype: str) -> int:
        return max(f.tile_bytes((*shape[:-1], n), dtype) for n, f in self.parts)

    def token_bytes(self, shape: tuple[int, ...], dtype: str) -> int:
        """Also the results, before they lie side by side."""
        own = max(f.token_bytes((*shape[:-1], n), dtype) for n, f in self.parts)
        return own + ArraySpec(shape[-1:], dtype).num_bytes


DENSE = Dense()


def part_name(index: int) -> str:
    """What the arrays of a part of a `Joined` matrix are under."""
    return f"part{index}"


FORMATS: tuple[type[Format], ...] = (Dense, Scaled, Joined)
# What layers are quantised to, by the name that users give.
Quantize = Literal["int8", "fp8", "int4"]
QUANTIZED: dict[Quantize, Scaled] = {
    "int8": Scaled(code="int8"),
    "fp8": Scaled(code="fp8", group=128, columns=128),
    "int4": Scaled(code="int4", group=32, scale="bfloat16"),
}


def arrays_of(specs: Specs) -> list[ArraySpec]:
    """All arrays that stand for a matrix."""
    if isinstance(specs, ArraySpec):
        return [specs]
    return [array for part in specs.values() for array in arrays_of(part)]
