"""Products with codes and scales (`config.formats.Scaled`) as XLA makes them: the definition of what a product is.

For each group along the inner dimension, in order: the scale times the float32 sum of (code - zero point) x activation.
These are summed in float32. The second scale multiplies last. A few groups are widened at a time, in a loop.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hybrid_jax.config.formats import CODES, MIDDLE, Scaled
from hybrid_jax.products.xla import HIGHEST

Arrays = dict[str, jax.Array]
# What 4 bits stand for, and the bounds between one of them and the next; on a bound the even code wins.
FP4 = np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
FP4_BOUNDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
LARGEST = {"int8": 127.0, "int4": 7.0, "fp8": 448.0, "fp4": 6.0}  # that `encode` makes
FP4_EXPONENT = 2  # of its largest
LEAST = 1e-30  # what numbers are divided by in place of 0
SCALE_BIAS = 127  # of scales that are powers of two


def product(x: jax.Array, arrays: Arrays, format: Scaled) -> jax.Array:
    """x [..., I] times the matrix [I, O] that the arrays stand for, float32[..., O]."""
    inner, columns = x.shape[-1], arrays["codes"].shape[0]
    if format.ordered:
        x = jnp.take(x, arrays["order"], axis=-1)
    count, each = format.tile(inner)

    def add(total: jax.Array, start: Any, count: int, each: int) -> jax.Array:
        """The sum with that of `count` more groups, or with a part of the only one."""
        size = count * each
        part = _cut(arrays, format, start, size)
        xs = jax.lax.dynamic_slice_in_dim(x, start, size, axis=-1)
        xs = xs.reshape(*x.shape[:-1], count, each)
        sums = _dots(xs, _codes(part, format, each).reshape(columns, count, each))
        if format.group is None:
            return total + sums[0]
        scales = _scales(part["scales"], format, columns)
        for index in range(count):
            total = total + scales[:, index] * sums[index]
        return total

    # This zero only exists once x does. From a constant, XLA would widen tiles of all layers first.
    zero = jnp.minimum(jnp.signbit(x.reshape(-1)[0]).astype(jnp.int32), 0)
    total = jnp.zeros((*x.shape[:-1], columns), jnp.float32)
    steps, size = inner // (count * each), count * each
    if steps == 1:
        total = add(total, zero, count, each)
    else:
        total = jax.lax.fori_loop(0, steps, lambda n, sum_: add(sum_, n * size, count, each), total)
    if whole := (inner - steps * size) // each:  # groups that make no tile
        total = add(total, zero + steps * size, whole, each)
    if rest := inner % each:  # a group that is not whole
        total = add(total, zero + (inner - rest), 1, rest)
    if format.group is None:
        total = total * _scales(arrays["scales"], format, columns)[:, 0]
    return total * arrays["second"] if format.second else total


def values(arrays: Arrays, format: Scaled) -> jax.Array:
    """All numbers of the matrices, float32[..., I, O]."""
    if arrays["codes"].ndim > 2:
        return jax.vmap(lambda own: values(own, format))(arrays)
    columns, inner = arrays["codes"].shape[0], inner_size(arrays, format)
    each = format.group or inner
    scales = _scales(arrays["scales"], format, columns)
    wide = _codes(arrays, format, each) * jnp.repeat(scales, each, axis=1)[:, :inner]
    if format.second:
        wide = wide * arrays["second"][:, None]
    return (wide[:, jnp.argsort(arrays["order"])] if format.ordered else wide).T


def inner_size(arrays: Arrays, format: Scaled) -> int:
    """I of matrices [..., I, O]."""
    return arrays["codes"].shape[-1] * CODES[format.code][1]


def of_columns(arrays: Arrays, format: Scaled, which: slice) -> tuple[Arrays, Scaled]:
    """The arrays of some columns of [I, O], and their format: another one if columns with one scale are cut apart."""
    scales, (start, stop, _) = arrays["scales"], which.indices(arrays["codes"].shape[0])
    if start % format.columns == 0:
        scales = scales[start // format.columns : -(-stop // format.columns)]
    else:
        scales = jnp.repeat(scales, format.columns, axis=0)[start:stop]
        format = replace(format, columns=1)
    cut = {name: array if name == "order" else array[start:stop] for name, array in arrays.items()}
    return cut | {"scales": scales}, format


def encode(numbers: jax.Array, format: Scaled) -> Arrays:
    """The arrays that stand for numbers [..., I, O], each rounded to the nearest. Scales are those of the largest."""
    if numbers.ndim > 2:  # one after the other: what is held beside them is of one matrix
        return jax.lax.map(lambda own: encode(own, format), numbers)
    wide, found = numbers.astype(jnp.float32).T, Arrays()
    columns, inner = wide.shape
    if format.ordered:
        found["order"] = jnp.argsort(-jnp.abs(wide).sum(0)).astype(jnp.int32)
        wide = wide[:, found["order"]]
    each = format.group or inner
    groups = jnp.pad(wide, ((0, 0), (0, -inner % each))).reshape(columns, -1, each)
    low, high = jnp.minimum(groups.min(-1), 0), jnp.maximum(groups.max(-1), 0)
    if format.zeros:  # the whole range from the least to the largest number is cut up
        spread = (high - low) / (2 * LARGEST[format.code] + 1)
    else:
        spread = jnp.maximum(high, -low) / LARGEST[format.code]
    shared = jnp.pad(spread, ((0, -columns % format.columns), (0, 0)))
    shared = shared.reshape(-1, format.columns, spread.shape[1]).max(1)
    if format.second:
        largest = jnp.maximum(shared.max(), LEAST) / LARGEST["fp8"]
        found["second"] = jnp.full(columns, largest, jnp.float32)
        shared = shared / largest
    if format.scale == "uint8":
        exponent = jnp.floor(jnp.log2(jnp.maximum(shared * LARGEST["fp4"], LEAST))) - FP4_EXPONENT
        found["scales"] = (exponent + SCALE_BIAS).clip(0, 2 * SCALE_BIAS).astype(jnp.uint8)
    else:
        found["scales"] = shared.astype(format.scale)
    steps = _scales(found["scales"], format, columns)
    if format.second:
        steps = steps * found["second"][:, None]
    ratios = groups / jnp.maximum(steps, LEAST)[..., None]
    if format.zeros:
        least = _least(format)
        zeros = jnp.round(least - low / jnp.maximum(steps, LEAST)).clip(least, _most(format))
        found["zeros"] = zeros.astype(format.zero_dtype)
        ratios = ratios + zeros[..., None]
    elif format.code in MIDDLE:
        ratios = ratios + MIDDLE[format.code]
    flat = ratios.reshape(columns, -1)[:, :inner]
    return found | {"codes": _encoded(flat, format)}


def _least(format: Scaled) -> int:
    """The least code that is an integer."""
    return -128 if format.code == "int8" else 0


def _most(format: Scaled) -> int:
    """The largest code that is an integer."""
    return 127 if format.code == "int8" else 15


def _encoded(ratios: jax.Array, format: Scaled) -> jax.Array:
    """Codes [O, I], or two in a byte, of numbers that are divided by their scales."""
    if format.code == "fp8":
        return ratios.clip(-LARGEST["fp8"], LARGEST["fp8"]).astype(jnp.float8_e4m3fn)
    if format.code == "fp4":
        # A bound belongs to the code below it if that is even.
        sizes = jnp.abs(ratios)
        above = [
            sizes > bound if index % 2 == 0 else sizes >= bound
            for index, bound in enumerate(FP4_BOUNDS)
        ]
        codes = (
            jnp.stack(above).sum(0).astype(jnp.uint8) | jnp.signbit(ratios).astype(jnp.uint8) << 3
        )
    else:
        codes = jnp.round(ratios).clip(_least(format), _most(format))
        if format.code == "int8":
            return codes.astype(jnp.int8)
        codes = codes.astype(jnp.uint8)
    return codes[:, ::2] | codes[:, 1::2] << 4


def _cut(arrays: Arrays, format: Scaled, start: Any, size: int) -> Arrays:
    """The arrays of some elements of the inner dimension: whole groups, or a part of the only one."""
    per_byte = CODES[format.code][1]

    def cut(name: str, each: int) -> jax.Array:
        count, array = -(-size // each), arrays[name]
        if (
            array.dtype == jnp.float8_e4m3fn
        ):  # XLA for CPUs would widen the whole array before it cuts it
            array = jax.lax.bitcast_convert_type(array, jnp.uint8)
        return jax.lax.dynamic_slice_in_dim(array, start // each, count, axis=-1)

    found = {"codes": cut("codes", per_byte)}
    for name in ("scales", "zeros"):
        if name in arrays:
            found[name] = arrays[name] if format.group is None else cut(name, format.group)
    return found


def _codes(arrays: Arrays, format: Scaled, each: int) -> jax.Array:
    """Codes [O, I] less their zero points, float32."""
    codes = arrays["codes"]
    if CODES[format.code][1] == 2:
        codes = jnp.stack([codes & 15, codes >> 4], axis=-1).reshape(codes.shape[0], -1)
    if format.code == "fp4":
        return jnp.take(jnp.asarray(FP4), codes)
    if format.code == "fp8" and codes.dtype == jnp.uint8:
        return jax.lax.platform_dependent(codes, cpu=_fp8_by_halves, default=_fp8)
    wide = codes.astype(jnp.float32)
    if format.zeros:
        zeros = jnp.repeat(arrays["zeros"].astype(jnp.float32), each, axis=1)
        return wide - zeros[:, : wide.shape[1]]
    return wide - MIDDLE[format.code] if MIDDLE.get(format.code) else wide


def _fp8(bits: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(bits, jnp.float8_e4m3fn).astype(jnp.float32)


def _fp8_by_halves(bits: jax.Array) -> jax.Array:
    """Float8 e4m3 as float16, whose exponent has one bit more, and 8 more in its bias; NaN is not looked for."""
    wide = bits.astype(jnp.uint16)
    halves = jax.lax.bitcast_convert_type((wide & 0x80) << 8 | (wide & 0x7F) << 7, jnp.float16)
    return halves.astype(jnp.float32) * 256


def _scales(scales: jax.Array, format: Scaled, columns: int) -> jax.Array:
    """Scales float32[O, groups] of all columns, one for each."""
    if scales.dtype == jnp.uint8 and format.scale == "float8_e4m3fn":
        wide = jax.lax.platform_dependent(scales, cpu=_fp8_by_halves, default=_fp8)
    elif scales.dtype == jnp.uint8:  # the exponent of a float32
        wide = jax.lax.bitcast_convert_type(scales.astype(jnp.uint32) << 23, jnp.float32)
    else:
        wide = scales.astype(jnp.float32)
    return jnp.repeat(wide, format.columns, axis=0)[:columns] if format.columns > 1 else wide


def _dots(x: jax.Array, codes: jax.Array) -> jax.Array:
    """Sums float32[G, ..., O] of x [..., G, i] times codes float32[O, G, i].

    Codes are exact in 16 bits, too, and a GPU multiplies those faster.
    """

    def dots(x: jax.Array, codes: jax.Array) -> jax.Array:
        return jnp.einsum(
            "...gi,ogi->g...o", x, codes, precision=HIGHEST, preferred_element_type=jnp.float32
        )

    def in_float32(x: jax.Array, codes: jax.Array) -> jax.Array:
        return dots(x.astype(jnp.float32), codes)

    def as_they_are(x: jax.Array, codes: jax.Array) -> jax.Array:
        return dots(x, codes.astype(x.dtype))

    return jax.lax.platform_dependent(x, codes, cpu=in_float32, default=as_they_are)
