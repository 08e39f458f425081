"""Products of few rows by machine code of our own, against sums in float64."""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hybrid_jax.config import XLA
from hybrid_jax.products.cpu import calls, ffi
from hybrid_jax.products.cpu.build import Recipe, object_code
from hybrid_jax.products.cpu.calls import call
from hybrid_jax.products.cpu.source import TARGETS, Target, source, target_name
from hybrid_jax.products.cpu.variants import VARIANTS, fitting
from hybrid_jax.products.matrix import (
    Matrix,
    mixed,
    product,
    product_in_float32,
    product_transposed,
)
from hybrid_jax.products.xla import linear, linear_transposed
from tests.products.cpu_code import ALONE, DTYPES, NAMES, SHARED, best, numbers, registered

# K and N: one block; blocks that come out even and that do not; several bands of columns; more rows than one unit has.
SIZES = [(64, 64), (96, 100), (1056, 1100), (64, 8300)]
MATRICES = 2


def given(target: Target, K: int, N: int, x_dtype: str, rows: int = 33):
    """x, weights as a target takes them, the number of a matrix or None, and x and weights in float64."""
    x = numbers(rows, K, dtype=x_dtype)
    many = numbers(MATRICES, K, N, dtype=target.weights, seed=1)
    own = many if target.chosen else many[1].T if target.layout == "rows" else many[1]
    which = jnp.array([1], jnp.int32) if target.chosen else None
    return x, jnp.array(own), which, np.asarray(x, np.float64), np.asarray(many[1], np.float64)


def allowed(x: np.ndarray, w: np.ndarray, dtype: str) -> np.ndarray:
    """How far products may be off: K products and sums round in float32, and the result in its own dtype."""
    most = np.abs(x) @ np.abs(w) * (x.shape[1] + 2) * 2.0**-24
    return most + np.abs(x @ w) * {"f32": 0.0, "bf16": 2.0**-8}[dtype]


def products(made: Recipe, target: Target, x, w, which=None, counts=(33,)) -> list[np.ndarray]:
    """Products of the first rows of x, for so many rows."""
    run = jax.jit(
        lambda x, w, which: [call(made.version, target, x[:rows], w, which) for rows in counts]
    )
    return [np.asarray(y) for y in run(x, w, which)]


def of_each(targets=TARGETS):
    return pytest.mark.parametrize("target", targets, ids=lambda target: target.name)


@pytest.mark.parametrize("x_dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_each_product_is_the_sum_of_its_terms(name, x_dtype):
    made = registered(name)
    for K, N in SIZES:
        of_targets = [given(target, K, N, x_dtype) for target in TARGETS]
        run = lambda arrays: [
            call(made.version, target, *each) for target, each in zip(TARGETS, arrays, strict=True)
        ]
        found = jax.jit(run)([each[:3] for each in of_targets])
        for target, y, (x, *_, rows, exact) in zip(TARGETS, found, of_targets, strict=True):
            assert y.dtype == x.dtype and y.shape == (33, N)
            off = np.abs(np.asarray(y, np.float64) - rows @ exact)
            assert (off <= allowed(rows, exact, x_dtype)).all(), target


@pytest.mark.parametrize("target", TARGETS[:2], ids=lambda target: target.name)
@pytest.mark.parametrize("K", [66, 98, 1038])
def test_steps_that_make_no_unit_are_summed(target, K):
    assert target.layout == "columns"
    x, w, _, rows, exact = given(target, K, 100, "bf16")
    [found] = products(registered(best()), target, x, w)
    assert (np.abs(found.astype(np.float64) - rows @ exact) <= allowed(rows, exact, "bf16")).all()


@of_each()
def test_a_term_that_is_left_out_is_seen(target):
    made = registered(best())
    x, w, which, rows, exact = given(target, 1056, 1100, "f32")
    [found] = products(made, target, x, w, which)
    exact[-1] = 0
    assert (np.abs(found - rows @ exact) > allowed(rows, exact, "f32")).any()


@of_each()
def test_a_row_is_the_same_alone_and_among_others(target):
    made = registered(best())
    x, w, which, *_ = given(target, 160, 100, "bf16")
    found = products(made, target, x, w, which, counts=range(1, 34))
    assert all((part == found[-1][: len(part)]).all() for part in found)


@pytest.mark.parametrize("name", NAMES)
def test_a_row_is_the_same_in_every_place(name):
    made = registered(name)
    for target, x_dtype in itertools.product(TARGETS[:4], DTYPES):
        x, w, which, *_ = given(target, 160, 100, x_dtype)
        [found, some] = products(made, target, x, w, which, counts=[33, 5])
        [turned] = products(made, target, x[::-1], w, which)
        assert (turned == found[::-1]).all() and (some == found[:5]).all()


@of_each(TARGETS[:4])
def test_threads_change_no_bit(target):
    x, w, which, *_ = given(target, 1056, 2100, "bf16", rows=5)
    several, one = (registered(best(), sharing) for sharing in (SHARED, ALONE))
    assert several.version != one.version
    run = jax.jit(lambda x, made: call(made.version, target, x, w, which), static_argnums=1)
    wanted = np.asarray(run(x, one)).tobytes()
    assert all(np.asarray(run(x, several)).tobytes() == wanted for _ in range(300))


@of_each()
@pytest.mark.parametrize("x_dtype", DTYPES)
def test_what_is_no_number_stays_in_its_row_and_column(target, x_dtype):
    made = registered(best())
    x, w, which, *_ = given(target, 96, 100, x_dtype, rows=9)
    [clean] = products(made, target, x, w, which, counts=[9])
    spoilt = x.at[2, 5].set(jnp.nan).at[6, 90].set(jnp.inf)
    [found] = products(made, target, spoilt, w, which, counts=[9])
    others = [0, 1, 3, 4, 5, 7, 8]
    assert np.isnan(found[2]).all() and not np.isfinite(found[6]).any()
    assert (found[others] == clean[others]).all()
    one = (..., 7, 3) if target.layout == "columns" else (3, 7)
    [found] = products(made, target, x, w.at[one].set(jnp.nan), which, counts=[9])
    assert np.isnan(found[:, 3]).all()
    assert (np.delete(found, 3, axis=1) == np.delete(clean, 3, axis=1)).all()


def test_a_number_chooses_the_matrix():
    made, target = registered(best()), Target("columns", "f32", chosen=True)
    x, w = numbers(2, 64), numbers(MATRICES, 64, 64)
    run = jax.jit(lambda which: call(made.version, target, x, w, which))
    for number in range(MATRICES):
        own = call(made.version, Target("columns", "f32"), x, w[number])
        assert (run(jnp.array([number], jnp.int32)) == own).all()
    # Nothing is read behind the last matrix.
    assert (run(jnp.array([-1], jnp.int32)) == run(jnp.array([99], jnp.int32))).all()


def test_bfloat16_results_are_rounded_to_even():
    made = registered(best())
    w = jnp.zeros((64, 64)).at[0].set(1.0)
    ties = np.float32([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-15, 1 + 2**-8 - 2**-15])
    halves = np.concatenate([ties, -ties[:1], ties[:1] * 2.0**120]).astype(np.float32)
    x = jnp.zeros((6, 64)).at[:, 0].set(jnp.asarray(halves))
    wide = call(made.version, Target("columns", "f32"), x, w)
    bits = jax.lax.bitcast_convert_type(wide.astype(jnp.bfloat16), jnp.uint16)
    # x in bfloat16 would be rounded already, so the sum of two terms is what is rounded.
    low = (halves - np.asarray(jnp.asarray(halves, jnp.bfloat16), np.float32)).astype(np.float32)
    pair = jnp.zeros((6, 64), jnp.bfloat16)
    pair = (
        pair.at[:, 0]
        .set(jnp.asarray(halves).astype(jnp.bfloat16))
        .at[:, 1]
        .set(jnp.asarray(low, jnp.bfloat16))
    )
    narrow = call(made.version, Target("columns", "f32"), pair, w.at[1].set(1.0))
    assert (jax.lax.bitcast_convert_type(narrow, jnp.uint16) == bits).all()


# --- calls ------------------------------------------------------------------------------------------


WRONG = {
    "shapes": ((2, 64), (96, 64), (2, 64)),
    "few columns": ((2, 64), (64, 8), (2, 8)),
    "rows": ((2, 64), (64, 64), (3, 64)),
    "rank": ((2, 64), (1, 64, 64), (2, 64)),
    "nothing": ((0, 64), (64, 64), (0, 64)),
    "an odd K": ((2, 65), (65, 64), (2, 64)),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("layout", ["columns", "rows"])
def test_what_does_not_fit_is_refused(wrong, layout):
    x, w, y = WRONG[wrong]
    w = (*w[:-2], w[-1], w[-2]) if layout == "rows" else w
    name = target_name(registered(best()).version, f"{layout}_f32")
    run = jax.ffi.ffi_call(name, jax.ShapeDtypeStruct(y, jnp.float32))
    if wrong == "nothing":  # XLA does not call for an empty result
        return
    with pytest.raises(Exception, match="products on a CPU: shapes"):
        jax.block_until_ready(run(jnp.zeros(x), jnp.zeros(w)))


def test_other_dtypes_and_counts_are_refused():
    name = target_name(registered(best()).version, "columns_f32")
    x, w = jnp.zeros((2, 64)), jnp.zeros((64, 64))
    run = jax.ffi.ffi_call(name, jax.ShapeDtypeStruct((2, 64), jnp.float32))
    for arrays in [(x, w.astype(jnp.bfloat16)), (x.astype(jnp.float16), w)]:
        with pytest.raises(Exception, match="products on a CPU: dtypes"):
            jax.block_until_ready(run(*arrays))
    other = jax.ffi.ffi_call(name, jax.ShapeDtypeStruct((2, 64), jnp.bfloat16))
    with pytest.raises(Exception, match="products on a CPU: dtypes"):
        jax.block_until_ready(other(x, w))
    with pytest.raises(Exception, match="products on a CPU: number of arguments or results"):
        jax.block_until_ready(run(x, w, w))


def backend():
    made = registered(best())
    return XLA.__class__(
        **{**vars(XLA), "products": calls.__name__, "version": made.version, "name": "own"}
    )


def text_of(function, *arrays) -> str:
    return jax.jit(function).lower(*arrays).as_text()


TAKEN = [  # rows, K, N, dtype; whether our own code multiplies
    (1, 64, 64, "f32", True),
    (32, 64, 64, "bf16", True),
    (33, 64, 64, "f32", False),
    (0, 64, 64, "f32", False),
    (1, 32, 64, "f32", False),
    (1, 65, 64, "f32", False),
    (1, 64, 63, "f32", False),
]


@pytest.mark.parametrize(("rows", "K", "N", "dtype", "own"), TAKEN)
def test_products_that_do_not_fit_stay_with_xla(rows, K, N, dtype, own):
    x, w = numbers(rows, K, dtype=dtype), numbers(K, N, dtype=dtype)
    matrix, turned = Matrix(w, backend=backend()), Matrix(w.T, backend=backend())
    bias = numbers(N, dtype=dtype)
    forms = [
        (lambda x: product(x, matrix, bias), lambda x: linear(x, w, bias)),
        (lambda x: product_transposed(x, turned), lambda x: linear_transposed(x, w.T)),
        (
            lambda x: product_in_float32(x, matrix),
            lambda x: linear(x.astype(jnp.float32), w.astype(jnp.float32)),
        ),
    ]
    for form, plain in forms:
        assert ("hybrid_jax_" in text_of(form, x)) == own
        found, wanted = jax.jit(form)(x), jax.jit(plain)(x)
        assert found.dtype == wanted.dtype and found.shape == wanted.shape
        near = {"float32": 1e-5, "bfloat16": 2e-2}[found.dtype.name] * np.sqrt(K)
        assert np.allclose(*(np.asarray(y, np.float32) for y in (found, wanted)), atol=near)


def test_a_head_needs_whole_vectors_along_its_rows():
    x, w = numbers(1, 80), numbers(64, 80)
    assert calls.takes(x, w.T) and not calls.takes(x, w.T, "rows")
    assert "hybrid_jax_" not in text_of(
        lambda x: product_transposed(x, Matrix(w, backend=backend())), x
    )


def test_axes_in_front_are_kept():
    x, w = numbers(2, 3, 64), numbers(64, 96)
    found = product(x, Matrix(w, backend=backend()))
    assert found.shape == (2, 3, 96) and np.allclose(found, x @ w, atol=1e-4)


def test_matrices_of_two_dtypes_stay_with_xla_but_in_float32():
    x, w = numbers(2, 64), numbers(64, 64, dtype="bf16")
    with jax.numpy_dtype_promotion("standard"):
        assert "hybrid_jax_" not in text_of(lambda x: product(x, Matrix(w, backend=backend())), x)
    wide = product_in_float32(x, Matrix(w, backend=backend()))
    assert "hybrid_jax_" in text_of(
        lambda x: product_in_float32(x, Matrix(w, backend=backend())), x
    )
    assert np.allclose(wide, x @ w.astype(jnp.float32), atol=1e-4)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_experts_are_found_by_their_number(tokens, dtype):
    up, down = numbers(5, 64, 192, dtype=dtype) / 8, numbers(5, 96, 64, dtype=dtype) / 8
    ids = np.stack(
        [np.random.default_rng(i).permutation(6)[:3] for i in range(tokens)]
    )  # 5: no visit
    x, weights = numbers(tokens, 64, dtype=dtype), numbers(tokens, 3)
    run = lambda backend: jax.jit(
        lambda x, ids, weights: mixed(
            x,
            ids,
            weights,
            up=Matrix(up, backend=backend),
            down=Matrix(down, backend=backend),
            up_bias=None,
            down_bias=None,
            kind="gated_silu",
        )
    )
    ids = jnp.asarray(ids, jnp.int32)
    own = run(backend())
    assert "hybrid_jax_columns" in own.lower(x, ids, weights).as_text()
    found, wanted = (np.asarray(each(x, ids, weights), np.float32) for each in (own, run(XLA)))
    near = {"f32": 1e-5, "bf16": 3e-2}[dtype]
    assert np.abs(found - wanted).max() <= near * np.abs(wanted).max()
    if tokens > 1:  # a token's experts give the same, whoever visits them beside it
        turned = np.asarray(own(x[::-1], ids[::-1], weights[::-1]), np.float32)
        assert (turned == found[::-1]).all()


def test_loops_and_products_side_by_side_give_the_same_bits():
    made, target = registered(best(), SHARED), Target("columns", "f32")
    x, w = numbers(3, 128), numbers(128, 128) / 12
    own = jax.jit(lambda x: call(made.version, target, x, w))
    wanted = x
    for _ in range(20):
        wanted = own(wanted)
    step = lambda _, x: call(made.version, target, x, w)
    looped = jax.jit(lambda x: jax.lax.fori_loop(0, 20, step, x), donate_argnums=0)
    assert (looped(jnp.array(x)) == wanted).all()
    many = jax.jit(lambda x: [call(made.version, target, x + i, w) for i in range(8)])(x)
    assert all((y == own(x + i)).all() for i, y in enumerate(many))


def test_several_threads_call_at_once():
    made, target = registered(best(), SHARED), Target("columns", "bf16")
    w = numbers(512, 1100, dtype="bf16")
    run = jax.jit(lambda x: call(made.version, target, x, w))
    rows = [numbers(3, 512, dtype="bf16", seed=i) for i in range(6)]
    wanted = [np.asarray(run(x)).tobytes() for x in rows]
    begin = threading.Barrier(6)

    def many(i):
        begin.wait()
        return all(np.asarray(run(rows[i])).tobytes() == wanted[i] for _ in range(50))

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(many, range(6)))


def test_there_is_no_derivative():
    made, x, w = registered(best()), numbers(2, 64), numbers(64, 64)
    with pytest.raises(ValueError, match="cannot be differentiated"):
        jax.grad(lambda x: call(made.version, Target("columns", "f32"), x, w).sum())(x)


# --- how they are made ------------------------------------------------------------------------------


def test_a_processor_takes_the_best_variant_that_it_runs():
    every = dict.fromkeys({need for variant in VARIANTS for need in variant.needs}, True)
    names = lambda features, machine: [v.name for v in fitting(features, machine)]
    assert names(every, "x86_64") == ["avx512_bf16", "avx512", "avx2"]
    assert names(every | {"avx512bf16": False}, "AMD64") == ["avx512", "avx2"]
    assert names(every | {"avx512bw": False}, "x86_64") == ["avx2"]
    assert names(every | {"fma": False}, "x86_64") == []
    assert names({}, "arm64") == names({}, "aarch64") == ["neon"]
    assert names(every, "riscv64") == []


@pytest.mark.parametrize("triple", ["aarch64-unknown-linux-gnu", "arm64-apple-macosx14"])
def test_code_for_arm_is_made_on_any_machine(triple):
    best()  # there is a compiler
    neon = VARIANTS[-1]
    image = object_code(Recipe(neon, source(neon, ffi.KNOWN[0]), "any"), triple)
    assert len(image) > 10_000 and all(target.name.encode() in image for target in TARGETS)


def test_the_version_changes_with_the_code():
    text = source(VARIANTS[0], (0, 3))
    versions = [
        Recipe(VARIANTS[0], text, "llvm").version,
        Recipe(VARIANTS[0], text + "\n", "llvm").version,
        Recipe(VARIANTS[1], text, "llvm").version,
        Recipe(VARIANTS[0], text, "llvm 2").version,
    ]
    assert len(set(versions)) == 4


OFFSETS = {
    "XLA_FFI_CallFrame": (
        ffi.FRAME,
        {
            "struct_size": "struct_size",
            "extension": "extension_start",
            "api": "api",
            "context": "ctx",
            "stage": "stage",
            "num_arguments": "args.size",
            "arguments": "args.args",
            "num_results": "rets.size",
            "results": "rets.rets",
        },
    ),
    "XLA_FFI_Metadata": (
        ffi.METADATA,
        {
            "major": "api_version.major_version",
            "minor": "api_version.minor_version",
            "traits": "traits",
        },
    ),
    "XLA_FFI_Metadata_Extension": (
        ffi.EXTENSION,
        {"type": "extension_base.type", "metadata": "metadata"},
    ),
    "XLA_FFI_Api": (
        ffi.API,
        {
            "major": "api_version.major_version",
            "minor": "api_version.minor_version",
            "error_create": "XLA_FFI_Error_Create",
            "error_destroy": "XLA_FFI_Error_Destroy",
            "schedule": "XLA_FFI_ThreadPool_Schedule",
            "num_threads": "XLA_FFI_ThreadPool_NumThreads",
        },
    ),
    "XLA_FFI_Buffer": (
        ffi.BUFFER,
        {"dtype": "dtype", "data": "data", "rank": "rank", "dims": "dims"},
    ),
}


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_offsets_are_those_of_the_header(tmp_path):
    asked = [
        (f"{struct} {name}", struct, place, offsets[name])
        for struct, (offsets, places) in OFFSETS.items()
        for name, place in places.items()
    ]
    assert len(asked) == sum(len(offsets) for offsets, _ in OFFSETS.values())
    lines = "".join(
        f'printf("%zu\\n", offsetof(struct {struct}, {place}));\n' for _, struct, place, _ in asked
    )
    file = tmp_path / "offsets.c"
    file.write_text(
        "#include <stdio.h>\n#include <stddef.h>\n#include <stdbool.h>\n"
        f'#include "xla/ffi/api/c_api.h"\nint main(void) {{\n{lines}return 0; }}\n'
    )
    program = tmp_path / "offsets"
    include = jax.ffi.include_dir()
    subprocess.run(["cc", "-w", f"-I{include}", str(file), "-o", str(program)], check=True)
    found = subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout
    assert dict(zip([name for name, *_ in asked], map(int, found.split()), strict=True)) == {
        name: offset for name, _, _, offset in asked
    }


CHILD = """
import hashlib, os, sys
cores, folder = sys.argv[1:]
if cores == "one" and hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, list(os.sched_getaffinity(0))[:1])
import jax
jax.config.update("jax_compilation_cache_dir", folder)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event) if "cache_hits" in event else None)
from hybrid_jax.products.cpu.build import object_code, recipe, register
from hybrid_jax.products.cpu.calls import call
from hybrid_jax.products.cpu.source import Target
import jax.numpy as jnp
made = recipe()
register(made, object_code(made))
x = jnp.sin(jnp.arange(3 * 1056.0)).reshape(3, 1056)
w = jnp.cos(jnp.arange(1056 * 4500.0)).reshape(1056, 4500)
run = jax.jit(lambda x, w: call(made.version, Target("columns", "f32"), x, w))
print(hashlib.sha256(bytes(memoryview(jax.device_get(run(x, w))))).hexdigest(), len(hits) > 0)
"""


def test_a_kept_program_runs_in_another_process_and_on_one_core(tmp_path):
    best()
    said = [
        subprocess.run(
            [sys.executable, "-c", CHILD, cores, str(tmp_path)],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        for cores in ("all", "one")
    ]
    (first, cold), (second, kept) = said
    assert re.fullmatch("[0-9a-f]{64}", first) and first == second
    assert (cold, kept) == ("False", "True")
