"""Codes with scales: what they stand for, and products with them."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hybrid_jax.config.arrays import ArraySpec
from hybrid_jax.config.formats import CODES, DENSE, Joined, Scaled, arrays_of
from hybrid_jax.products.matrix import Matrix, mixed, product, product_in_float32
from hybrid_jax.products.narrow import FP4, encode
from hybrid_jax.products.operations import operations_of
from pallas_kernels.grouped_linear import activate

# As models are published.
FORMATS = {
    "int8": Scaled(code="int8"),
    "int8 in groups with zero points": Scaled(code="int8", group=64, zeros=True, scale="float16"),
    "fp8": Scaled(code="fp8", scale="bfloat16"),
    "fp8 in blocks": Scaled(code="fp8", group=128, columns=128),
    "int4": Scaled(code="int4", group=32, scale="bfloat16"),
    "int4 per column": Scaled(code="int4"),
    "int4 with zero points": Scaled(code="int4", group=128, zeros=True, scale="float16"),
    "int4 in an order": Scaled(code="int4", group=128, zeros=True, ordered=True),
    "nvfp4": Scaled(code="fp4", group=16, scale="float8_e4m3fn", second=True),
    "mxfp4": Scaled(code="fp4", group=32, scale="uint8"),
}
# Whole tiles of groups; groups that make none; a last group that is not whole; one group in parts, and not in parts.
INNER = [1024, 1088, 320, 100]
COLUMNS = 200


def drawn(inner: int, columns: int = COLUMNS, seed: int = 0) -> jax.Array:
    rng = np.random.default_rng(seed)
    sizes = rng.uniform(0.2, 2, (1, columns)) / np.sqrt(inner)
    return jnp.asarray(rng.standard_normal((inner, columns)) * sizes, jnp.float32)


def defined(x: np.ndarray, arrays: dict, format: Scaled) -> tuple[np.ndarray, np.ndarray]:
    """A product in float64, group by group, with nothing but Python's loops; and the sum of the sizes of its terms."""
    found = {name: np.asarray(array) for name, array in arrays.items()}
    codes, scales = found["codes"], found["scales"]
    if CODES[format.code][1] == 2:
        halves = np.empty((codes.shape[0], 2 * codes.shape[1]), np.uint8)
        halves[:, ::2], halves[:, 1::2] = codes % 16, codes // 16
        codes = halves
    inner = codes.shape[1]
    wide = FP4[codes].astype(np.float64) if format.code == "fp4" else codes.astype(np.float64)
    scale = (
        2.0 ** (scales.astype(np.float64) - 127)
        if format.scale == "uint8"
        else scales.astype(np.float64)
    )
    x = x[:, found["order"]] if format.ordered else x
    each = format.group or inner
    y, size = np.zeros((2, x.shape[0], codes.shape[0]))
    for column in range(codes.shape[0]):
        for group, start in enumerate(range(0, inner, each)):
            zero = found["zeros"][column, group] if format.zeros else 8 * (format.code == "int4")
            terms = x[:, start : start + each] * (wide[column, start : start + each] - float(zero))
            factor = scale[column // format.columns, group]
            y[:, column] += factor * terms.sum(1)
            size[:, column] += factor * np.abs(terms).sum(1)
    second = found["second"].astype(np.float64) if format.second else 1.0
    return y * second, size * second


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("name", FORMATS)
def test_a_product_is_what_it_is_defined_to_be(name, inner):
    format = FORMATS[name]
    arrays = encode(drawn(inner), format)
    x = np.random.default_rng(1).standard_normal((3, inner))
    for dtype in ("float32", "bfloat16"):
        rounded = jnp.asarray(x, dtype)
        want, size = defined(np.asarray(rounded, np.float64), arrays, format)
        matrix = Matrix(arrays, format)
        exact = jax.jit(lambda x, m=matrix: product_in_float32(x, m))(rounded)
        assert exact.dtype == jnp.float32
        assert np.all(np.abs(np.asarray(exact, np.float64) - want) <= 1e-6 * size)
        got = jax.jit(lambda x, m=matrix: product(x, m, jnp.ones(COLUMNS, x.dtype)))(rounded)
        assert got.dtype == dtype
        rounding = {"float32": 1e-6, "bfloat16": 2**-6}[dtype]
        np.testing.assert_allclose(
            np.float64(got), np.float64(exact) + 1, rtol=rounding, atol=rounding
        )


# Faults that a reader or a kernel may have.
FAULTS = {
    "the scale of the next group": ("scales", lambda array: np.roll(array, 1, axis=-1)),
    "the scale of the next column": ("scales", lambda array: np.roll(array, 1, axis=0)),
    "swapped halves of a byte": ("codes", lambda array: array << 4 | array >> 4),
    "a zero point off by one": ("zeros", lambda array: array + 1),
    "the order of another matrix": ("order", lambda array: np.roll(array, 1)),
    "second scales of another column": ("second", lambda array: np.roll(array, 1)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_comparison_sees_every_fault(fault):
    """In each format that can have it, most results are outside the bound."""
    part, damage = FAULTS[fault]
    seen = 0
    for format in FORMATS.values():
        arrays = encode(drawn(1024), format)
        has = part in arrays and (fault != "swapped halves of a byte" or "4" in format.code)
        if not has or (fault == "the scale of the next group" and format.group is None):
            continue
        if part == "second":  # encoded ones are the same for all columns
            arrays["second"] = arrays["second"] * jnp.tile(jnp.float32([1, 2]), COLUMNS // 2)
        wrong = damage(np.asarray(arrays[part]))
        x = np.random.default_rng(1).standard_normal((3, 1024))
        want, size = defined(np.float32(x), arrays, format)
        got = product_in_float32(
            jnp.float32(x), Matrix(arrays | {part: jnp.asarray(wrong)}, format)
        )
        assert np.mean(np.abs(np.float64(got) - want) > 1e-6 * size) > 0.5, format.about
        seen += 1
    assert seen


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("name", FORMATS)
def test_arrays_are_those_that_are_counted_and_their_values_those_of_products(name, inner):
    format = FORMATS[name]
    arrays = encode(drawn(inner), format)
    there = {key: ArraySpec(array.shape, array.dtype.name) for key, array in arrays.items()}
    assert there == format.specs((inner, COLUMNS), "float32")
    matrix = Matrix(arrays, format)
    assert matrix.shape == (inner, COLUMNS) == matrix.values.shape
    want, size = defined(np.eye(inner)[[0, 7, inner - 1]], arrays, format)
    got = np.asarray(matrix.values)[[0, 7, inner - 1]]
    assert np.all(np.abs(got - want) <= 1e-6 * size)
    np.testing.assert_array_equal(matrix.rows(jnp.array([7])), got[1:2])


@pytest.mark.parametrize("name", FORMATS)
def test_numbers_are_rounded_to_the_nearest_code(name):
    format, numbers = FORMATS[name], drawn(256)
    values = np.asarray(Matrix(encode(numbers, format), format).values)
    arrays = encode(numbers, format)
    steps = {"int8": 1 / 127, "int4": 1 / 7, "fp8": 1 / 14, "fp4": 1 / 3}[format.code]
    largest = np.abs(numbers).max()
    assert 0 < np.abs(values - numbers).max() <= 0.51 * steps * largest * (1 + format.zeros)
    # Encoding what a matrix stands for gives the same values, if its scales are not rounded away.
    if format.columns == 1 and not format.zeros and not format.second and format.scale != "uint8":
        again = Matrix(encode(jnp.asarray(values), format), format).values
        np.testing.assert_allclose(again, values, rtol=0.01, atol=1e-3 * largest)
    assert all(np.isfinite(np.asarray(array, np.float32)).all() for array in arrays.values())


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("cut", [slice(0, 128), slice(128, 200), slice(37, 151)])
def test_columns_are_those_of_the_whole(name, cut):
    matrix = Matrix(encode(drawn(320), FORMATS[name]), FORMATS[name])
    part = matrix.columns(cut)
    np.testing.assert_array_equal(part.values, matrix.values[:, cut])
    x = jnp.asarray(np.random.default_rng(1).standard_normal((2, 320)), jnp.float32)
    np.testing.assert_allclose(product(x, part), product(x, matrix)[:, cut], rtol=1e-5, atol=1e-5)


def test_columns_of_several_formats_side_by_side():
    format = Joined(parts=((96, FORMATS["fp8 in blocks"]), (24, DENSE), (80, FORMATS["int4"])))
    numbers = drawn(256)
    matrix = Matrix(operations_of(format).encode(numbers), format)
    np.testing.assert_array_equal(matrix.values[:, 96:120], numbers[:, 96:120])
    x = jnp.asarray(np.random.default_rng(1).standard_normal((2, 256)), jnp.float32)
    want = np.concatenate([product_in_float32(x, part) for part in matrix.parts], axis=-1)
    np.testing.assert_array_equal(product(x, matrix), want)
    np.testing.assert_array_equal(product_in_float32(x, matrix), want)
    np.testing.assert_array_equal(product(x, matrix, jnp.ones(200)), want + 1)
    for cut in (slice(0, 50), slice(50, 100), slice(90, 130), slice(10, 190)):
        part = matrix.columns(cut)
        np.testing.assert_array_equal(part.values, matrix.values[:, cut])
        assert isinstance(part.format, Joined) == (cut != slice(0, 50))
    assert matrix.shape == (256, 200)
    with pytest.raises(ValueError, match=r"parts with 200 columns .* shape \(256, 199\)"):
        format.specs((256, 199), "float32")


@pytest.mark.parametrize("name", ["int8", "fp8 in blocks", "int4 in an order", "nvfp4"])
@pytest.mark.parametrize("tokens", [1, 9])
def test_experts_multiply_with_their_own_codes(name, tokens):
    """Each visit is the product with the matrix of its expert alone."""
    format, (count, width, hidden) = FORMATS[name], (5, 128, 64)
    rng = np.random.default_rng(2)
    up, down = (
        Matrix(encode(jnp.asarray(rng.standard_normal(shape), jnp.float32) / 8, format), format)
        for shape in ((count, width, 2 * hidden), (count, hidden, width))
    )
    x = jnp.asarray(rng.standard_normal((tokens, width)), jnp.float32)
    ids = jnp.asarray(np.stack([rng.permutation(count)[:2] for _ in range(tokens)]))
    ids = ids.at[0, 1].set(count)  # no visit
    weights = jnp.asarray(rng.uniform(size=ids.shape), jnp.float32)
    biases = [
        jnp.asarray(rng.standard_normal((count, n)), jnp.float32) for n in (2 * hidden, width)
    ]
    got = jax.jit(
        lambda x, ids, weights: mixed(x, ids, weights, up, down, *biases, kind="gated_silu")
    )(x, ids, weights)
    want = np.zeros(x.shape)
    for token, (experts, shares) in enumerate(zip(ids.tolist(), weights.tolist(), strict=True)):
        for expert, share in zip(experts, shares, strict=True):
            if expert == count:
                continue
            one = [
                Matrix(jax.tree.map(lambda a, e=expert: a[e], m.arrays), format) for m in (up, down)
            ]
            hid = activate(product(x[token], one[0], biases[0][expert]), "gated_silu")
            want[token] += share * np.asarray(product(hid, one[1], biases[1][expert]))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", FORMATS)
def test_a_product_never_holds_the_wide_matrix(name):
    """By the compiler's count: a tile of it, what is counted for the tokens, and nothing of the size of the matrix."""
    format, inner, columns = FORMATS[name], 4096, 1024
    shapes = {
        key: jax.ShapeDtypeStruct(spec.shape, spec.dtype)
        for key, spec in format.specs((inner, columns), "bfloat16").items()
    }
    for rows in (1, 64):
        x = jax.ShapeDtypeStruct((rows, inner), "bfloat16")
        step = jax.jit(lambda x, arrays: product(x, Matrix(arrays, format)))
        held = step.lower(x, shapes).compile().memory_analysis().temp_size_in_bytes
        counted = format.tile_bytes((inner, columns), "bfloat16")
        counted += rows * format.token_bytes((inner, columns), "bfloat16")
        assert held <= 2.5 * counted, (rows, held, counted)
        assert held < 2 * inner * columns + rows * 40 * (inner + columns), (rows, held)


def test_a_format_says_what_it_is():
    said = {name: format.about for name, format in FORMATS.items()}
    assert said["int8"] == "int8, a scale per column"
    assert said["fp8 in blocks"] == "fp8, a scale per 128 x 128"
    assert said["nvfp4"] == "nvfp4, a scale per 16" and said["mxfp4"] == "mxfp4, a scale per 32"
    assert said["int4 with zero points"] == "int4, a scale per 128 with zero points"
    joined = Joined(parts=((8, FORMATS["int8"]), (2, DENSE)))
    assert joined.about == "int8, a scale per column (8) | as it is (2)"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"code": "int3"}, "code must be int8, fp8, int4 or fp4, got 'int3'"),
        ({"code": "int4", "group": 7}, "group must be a positive multiple of 2"),
        ({"code": "fp8", "zeros": True}, "zeros must be False for codes that are floats"),
        ({"code": "int8", "zeros": True, "columns": 8}, "columns must be 1 .* got 8"),
        ({"code": "int8", "columns": 0}, "columns must be positive, got 0"),
        ({"code": "int8", "scale": "float64"}, "scale must be float32, .* got 'float64'"),
    ],
)
def test_formats_that_are_none(settings, message):
    with pytest.raises(ValueError, match=message):
        Scaled(**settings)


def test_four_bits_need_pairs():
    with pytest.raises(ValueError, match=r"even inner dimension, got a matrix of shape \(7, 4\)"):
        FORMATS["int4"].specs((7, 4), "float32")


def test_bytes_are_those_of_all_arrays():
    shape, format = (3, 256, 100), replace(FORMATS["int4 in an order"], second=True)
    specs = format.specs(shape, "bfloat16")
    assert {spec.num_bytes for spec in arrays_of(specs)} == {
        3 * 100 * 128, 3 * 100 * 2 * 4, 3 * 100 * 2, 3 * 100 * 4, 3 * 256 * 4
    }  # fmt: skip
