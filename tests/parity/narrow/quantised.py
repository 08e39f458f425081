"""A quantised weight in one form for all formats, what it stands for, and how numbers are packed into words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
# By code: a sign, two bits of exponent, one of mantissa.
E2M1 = np.array(
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0],
    np.float32,
)
INTERLEAVED = (
    0,
    2,
    4,
    6,
    1,
    3,
    5,
    7,
)  # AWQ: which column lies at each place of a word, from the lowest bits on


@dataclass(frozen=True, kw_only=True)
class Quantised:
    """One weight: (code - zero) * scale, with the zero and the scale of the place it has.

    The scale of row r and column c is `scales[..., rows[r], columns[c]]`, times or divided by `second`. With experts in
    one tensor, all arrays but `rows` and `columns` have an axis for them in front.

    Attributes:
        name: of the weight, as an unquantised file has it.
        tensors: names of the tensors that the weight is made from.
        codes: float32[.., O, I] values of the codes; every format has only such as float32 holds exactly.
        zeros: float32[.., R, G] whole numbers, or None.
        scales: [.., R, G], in the dtype of the file; powers of two, of which a file has the exponents, in float32.
        rows, columns: int[O], int[I].
        second: one float32 for the whole tensor (or one an expert), or None.
        divides: whether the file has its reciprocal, so that it divides.
    """

    name: str
    tensors: tuple[str, ...]
    codes: np.ndarray
    scales: np.ndarray
    rows: np.ndarray
    columns: np.ndarray
    zeros: np.ndarray | None = None
    second: np.ndarray | None = None
    divides: bool = False

    def scale(self, dtype: Any = np.float32) -> np.ndarray:
        """[.., R, G] with the second scale in it. Computed in `dtype`: one rounding."""
        scales = self.scales.astype(dtype)
        if self.second is None:
            return scales
        second = self.second.astype(dtype)
        return scales / second if self.divides else scales * second

    def weight(self, dtype: Any = np.float32) -> np.ndarray:
        """[.., O, I] what it stands for: the definition, in float32 or float64."""
        return self._times(self.scale(dtype), dtype)

    def rounded(self, rule: str) -> np.ndarray:
        """[.., O, I] as a library rounds it.

        Args:
            rule: "float32" for the definition; "scales" for the same in the dtype of the scales; otherwise the name of
                a dtype to which the definition is rounded in the end.
        """
        if rule == "float32":
            return self.weight()
        if rule == "scales":
            return self._times(self.scales, self.scales.dtype)
        return self.weight().astype(np.dtype(getattr(ml_dtypes, rule, None) or rule))

    def _times(self, scale: np.ndarray, dtype: Any) -> np.ndarray:
        codes = self.codes.astype(dtype)
        if self.zeros is not None:
            codes = codes - self._spread(self.zeros.astype(dtype))
        return codes * self._spread(scale)

    def _spread(self, array: np.ndarray) -> np.ndarray:
        """[.., R, G] to [.., O, I]."""
        return array[..., self.rows[:, None], self.columns[None, :]]


def spans(count: int, size: int | None) -> np.ndarray:
    """The number of the span each place is in, of `size` places each; one span of all for None."""
    return np.arange(count) // (size or count)


def nibbles(codes: np.ndarray) -> np.ndarray:
    """uint8[.., I/2] from numbers below 16: the first of two in the low half."""
    codes = codes.astype(np.uint8)
    return codes[..., 0::2] | codes[..., 1::2] << 4


def words(codes: np.ndarray, bits: int, axis: int) -> np.ndarray:
    """int32 words of unsigned codes along an axis, the first in the lowest bits; the last word is filled with zeros."""
    codes = np.moveaxis(codes, axis, -1).astype(np.uint32)
    each = 32 // bits
    codes = np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, -codes.shape[-1] % each)])
    codes = codes.reshape(*codes.shape[:-1], -1, each) << np.arange(each, dtype=np.uint32) * bits
    packed = np.bitwise_or.reduce(codes.astype(np.uint32), axis=-1).view(np.int32)
    return np.ascontiguousarray(np.moveaxis(packed, -1, axis))
