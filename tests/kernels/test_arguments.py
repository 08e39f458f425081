"""What the kernel packages say to wrong arguments: dtypes, ranks, empty arrays, what is no array, derivatives."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import causal_conv, fold, gated_rmsnorm, residual_rmsnorm, ssd_scan
from pallas_kernels.causal_conv import ProjectionLayout
from pallas_kernels.frame_io import copy_frames, move_words, read_frames, write_frames
from pallas_kernels.paged_attention import PageLayout
from pallas_kernels.ssd_window import RecordSizes
from tests.drawing import EVERYTHING, nothing_to_check
from tests.kernels.by_name import (
    append_kv,
    causal_conv_window,
    fold_frames,
    paged_attention,
    sample_tokens,
    ssd_scan_frames,
    ssd_window_frames,
    ssd_window_rings,
    store_columns,
    store_tail,
)

RECORDS = RecordSizes(num_heads=2, head_dim=4, num_groups=1, state_size=16)
PROJECTION = ProjectionLayout(num_heads=2, head_dim=4, num_groups=1, state_size=3)
LAYOUT = PageLayout(offset=0, page_tokens=16, num_kv_heads=1, head_dim=8, dtype="float32")


def ones(*shape: int, dtype=jnp.float32) -> jax.Array:
    return jnp.ones(shape, dtype)


words = functools.partial(ones, dtype=jnp.uint32)
halves = functools.partial(ones, dtype=jnp.uint16)
ints = functools.partial(ones, dtype=jnp.int32)
flags = functools.partial(ones, dtype=bool)
dense = {"x": ones(1, 32, 2, 4), "dt": ones(1, 32, 2), "A": -ones(2), "B": ones(1, 32, 1, 16)}
rings = {"xB": ones(1, 1, 32, 24), "dt": ones(1, 1, 32, 2), "A": -ones(1, 2), "records": RECORDS}
window = {"starts": ints(1), "num_valid": ints(1)}
layer = {"projected": ones(1, 1, 24), "weight": ones(4, 14), "bias": ones(14), "dt_bias": ones(2)}
GOOD = {
    ssd_scan: dense | {"C": ones(1, 32, 1, 16), "lengths": ints(1), "state_lengths": ints(1)},
    ssd_scan_frames: {
        **{"arena": words(5, 128), "read": ints(1, 1), "write": ints(1, 1), "exists": flags(1)},
        **{"xBC": ones(1, 8, 40), "dt": ones(1, 8, 2), "A": -ones(2), "D": ones(2)},
        **{"records": RECORDS, "lengths": ints(1), "state_lengths": ints(1)},
    },
    ssd_window_frames: {
        **{"arena": words(5, 128), "frames": ints(1, 1), "exists": flags(1)},
        **{**dense, **window, "C": ones(1, 1, 1, 16), "ancestors": ints(1, 1)},
    },
    ssd_window_rings: {
        **{"arena": words(5, 128), "frames": ints(1, 1), "exists": flags(1), "C": ones(1, 1, 16)},
        **{**rings, **window, "D": ones(2), "scores": ones(1, 1, 1, 32), "layer": 0},
    },
    fold: dense | {"state": ones(1, 2, 4, 16), "lengths": ints(1)},
    fold_frames: {
        **{"arena": words(5, 128), "read": ints(1, 1), "write": ints(1, 1), "exists": flags(1)},
        **{**rings, "lengths": ints(1), "per_layer": 1},
    },
    causal_conv: layer | {"history": ones(1, 3, 14), "lengths": ints(1), "layout": PROJECTION},
    causal_conv_window: {
        **{**layer, **window, "first": ints(1) - 1, "layer": 0, "layout": PROJECTION},
        **{"conv": ones(1, 1, 4, 14), "xB": ones(1, 1, 32, 11), "dt": ones(1, 1, 32, 2)},
    },
    paged_attention: {
        **{"q": ones(1, 1, 4, 8), "arena": words(3, LAYOUT.page_words), "table": ints(1, 2)},
        **{"base": ints(1), "end": 2 * ints(1), "layout": LAYOUT, "scale": 1.0},
    },
    read_frames: {"arena": words(5, 8), "ids": ints(2)},
    write_frames: {"arena": words(5, 8), "ids": ints(2), "values": words(2, 8)},
    copy_frames: {"arena": words(5, 8), "sources": ints(2), "targets": ints(2)},
    move_words: {
        **{"arena": words(5, 8), "sources": ints(1, 2, 2), "targets": ints(1, 2, 2), "words": 3}
    },
    append_kv: {
        **{"qkv": ones(1, 2, 32), "arena": words(3, LAYOUT.page_words), "table": ints(1, 1, 2)},
        **{"base": ints(1), "begin": ints(1), "end": 3 * ints(1), "layout": LAYOUT},
        **{"cos": ones(1, 2, 4), "sin": ones(1, 2, 4)},
        **{"q_norm": ones(8), "k_norm": ones(8), "eps": 1e-6},
    },
    store_columns: {
        **{"arena": words(5, 64), "frames": ints(1, 1), "folds": ints(1)},
        **{"conv": halves(1, 1, 4, 14), "columns": 3},
    },
    store_tail: {
        **{"arena": words(5, 64), "conv": halves(1, 1, 8, 14), "xB": halves(1, 1, 32, 11)},
        **{"dt": ones(1, 1, 32, 2), "projected": ones(1, 5, 24, dtype=jnp.bfloat16)},
        **{"history": halves(1, 3, 14), "xBC": ones(1, 5, 14, dtype=jnp.bfloat16)},
        **{"steps": ones(1, 5, 2), "frames": ints(1, 1), "rows": ints(1) - 1, "layout": PROJECTION},
        **{"lengths": ints(1), "state_lengths": ints(1), "layer": 0},
    },
    sample_tokens: {
        **{"logits": ones(1, 5), "keys": words(1, 2), "temperature": ones(1)},
        **{"top_k": ints(1), "top_p": ones(1), "min_p": ones(1), "banned": ints(1, 1)},
    },
}
ARRAYS = [
    pytest.param(function, name, id=f"{function.__name__}-{name}")
    for function, given in GOOD.items()
    for name, value in given.items()
    if isinstance(value, jax.Array)
]
XLA = {ssd_scan, ssd_scan_frames, ssd_window_frames, fold, paged_attention, append_kv}
XLA |= {read_frames, write_frames, copy_frames, move_words}
NO_KERNEL = {ssd_window_frames, fold, write_frames}
every_function = pytest.mark.parametrize("function", GOOD, ids=lambda function: function.__name__)


def implementations(function) -> list[str | None]:
    """What the function takes, besides "triton"."""
    faster = ["xla"] * (function in XLA) + ["pallas"] * (function not in NO_KERNEL)
    return [None, "reference", *faster]


def refused(function, kind, message: str, **changes) -> None:
    """All implementations refuse the changed arguments, each before it runs."""
    for implementation in implementations(function):
        with pytest.raises(kind, match=rf"^{function.__name__}: {message}"):
            function(**GOOD[function] | changes, implementation=implementation)


@pytest.mark.parametrize(("function", "name"), ARRAYS)
def test_a_wrong_array_is_named_with_what_it_is(function, name):
    right = GOOD[function][name]
    wrong = right.astype(jnp.complex64)
    refused(function, ValueError, f"{name} must be .*, got complex64", **{name: wrong})
    if name != "ids":  # of any shape
        deep = ones(1, 1, 1, 1, 1, dtype=right.dtype)
        refused(function, ValueError, rf"{name} must .*, got .*\(1, 1, 1, 1, 1\)", **{name: deep})
    refused(function, TypeError, f"{name} must be an array, got list", **{name: right.tolist()})


@pytest.mark.parametrize(
    ("function", "name"),
    [param for param in ARRAYS if GOOD[param.values[0]][param.values[1]].dtype == jnp.int32],
)
def test_floats_are_no_integers(function, name):
    wrong = GOOD[function][name].astype(jnp.float32)
    message = f"{name} must be int32, got float32; convert it"
    refused(function, ValueError, message, **{name: wrong})


@every_function
def test_rows_that_are_none_are_refused(function):
    given = GOOD[function]
    rows = {"read_frames": ["ids"], "write_frames": ["ids", "values"]}
    rows |= {"copy_frames": ["sources", "targets"], "store_columns": ["frames", "folds"]}
    rows |= {"move_words": ["sources", "targets"]}
    shared = {"arena", "A", "D", "weight", "bias", "dt_bias", "conv", "xB"}
    if {"xB", "conv"} & set(given):
        shared |= {"dt"}
    names = rows.get(function.__name__, [n for n, v in given.items() if isinstance(v, jax.Array)])
    empty = {name: given[name][:0] for name in names if name not in shared}
    refused(function, ValueError, r"\w+ must not be empty, got shape \(0,.*leave", **empty)


@every_function
def test_arrays_of_numpy_do_as_well(function):
    given = GOOD[function]
    arrays = {n: np.asarray(v) for n, v in given.items() if isinstance(v, jax.Array)}
    for implementation in implementations(function):
        call = functools.partial(function, implementation=implementation)
        run = jax.jit if EVERYTHING else lambda call: functools.partial(jax.eval_shape, call)
        want = run(functools.partial(call, **given))()
        got = run(functools.partial(call, **given | arrays))()
        if EVERYTHING:
            jax.tree.map(np.testing.assert_array_equal, got, want)
        else:
            assert got == want


@every_function
@pytest.mark.parametrize("unknown", ["cuda", ["pallas"]])
def test_an_unknown_implementation_is_named(function, unknown):
    with pytest.raises(ValueError, match="implementation must be one of .*, got .*(cuda|pallas)"):
        function(**GOOD[function], implementation=unknown)


def test_queries_of_other_rows_than_the_rings_are_refused():
    two = ones(2, 1, 1, 16)
    refused(ssd_window_frames, ValueError, r"C must have shape \(1, 1, 1, 16\), got \(2, 1", C=two)


def test_tokens_of_other_rows_than_their_pages_are_refused():
    for name in ("base", "begin", "end"):
        message = rf"{name} must have shape \(1,\), got \(2,\)"
        refused(append_kv, ValueError, message, **{name: ints(2)})
    message = r"table must have shape \(1, 1, 2\), got \(3, 1, 2\)"
    refused(append_kv, ValueError, message, table=ints(3, 1, 2))


def test_no_groups_are_refused():
    none = ones(1, 32, 0, 16)
    refused(
        ssd_scan, ValueError, r"B must not be empty, got shape \(1, 32, 0, 16\)", B=none, C=none
    )


def test_no_token_need_be_banned():
    given = GOOD[sample_tokens] | {"banned": ints(1, 0)}
    names = implementations(sample_tokens)
    tokens = [sample_tokens(**given, implementation=name).item() for name in names]
    assert tokens == tokens[:1] * 3


def test_a_fold_never_reads_past_its_ring():
    given = GOOD[fold_frames] | {"xB": jnp.arange(768.0).reshape(1, 1, 32, 24)}
    want = fold_frames(**given | {"lengths": ints(1) * 32}, implementation="pallas")
    got = fold_frames(**given | {"lengths": ints(1) * 40}, implementation="pallas")
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    "function", [f for f in GOOD if f not in {ssd_scan, *NO_KERNEL}]
)  # which have one
def test_a_kernel_has_no_derivative_rather_than_a_wrong_one(function):
    """Before, a kernel's derivative by the state was zero: it reads the state as bits."""
    given = GOOD[function]
    name = next((n for n, v in given.items() if getattr(v, "dtype", None) == jnp.float32), None)
    if name is None:
        nothing_to_check("it has no argument of floats")
    call = lambda x: function(**given | {name: x}, implementation="pallas")
    with pytest.raises(NotImplementedError, match=f"^{function.__name__}: 'pallas' has no deriv"):
        jax.jvp(call, (given[name],), (given[name],))


@pytest.mark.parametrize(
    ("function", "by"), [(fold, "state"), (fold, "x"), (ssd_window_frames, "x")]
)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_the_chosen_implementation_has_the_derivative_of_the_reference(function, by, wrap):
    def gradient(implementation):
        def total(x):
            made = function(**GOOD[function] | {by: x}, implementation=implementation)
            return jnp.sum(jax.tree.leaves(made)[0] ** 2)

        return wrap(jax.grad(total))(GOOD[function][by])

    found, want = gradient(None), gradient("reference")
    assert jnp.any(want != 0)
    np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-5)


@every_function
def test_a_batch_of_calls_is_the_calls(function):
    given = GOOD[function]
    arrays = {n: jnp.stack([v, v]) for n, v in given.items() if isinstance(v, jax.Array)}
    static = {n: v for n, v in given.items() if n not in arrays}
    for implementation in (None, implementations(function)[-1]):
        call = lambda arrays, name=implementation: function(**arrays, **static, implementation=name)
        want = jax.jit(call)({name: both[1] for name, both in arrays.items()})
        got = jax.tree.map(lambda x: x[1], jax.jit(jax.vmap(call))(arrays))
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), got, want)


@pytest.mark.parametrize(
    ("first", "message"),
    [
        (ints(2, 8), "must be float32 or bfloat16 or float16, got int32; convert it"),
        (jnp.ones((0, 8)), r"must not be empty, got shape \(0, 8\)"),
        (jnp.float32(1), r"must have 1 dimensions, got shape \(\); they are \[channels\]"),
    ],
)
def test_norms_name_what_they_cannot_take(first, message):
    for function, name in ((gated_rmsnorm, "y"), (residual_rmsnorm, "h")):
        with pytest.raises(ValueError, match=f"^{function.__name__}: {name} {message}"):
            function(first, jnp.ones(first.shape), jnp.ones(8), eps=0.0)
    with pytest.raises(
        ValueError, match="residual_rmsnorm: valid must be bool or int32, got float32"
    ):
        residual_rmsnorm(
            jnp.ones((2, 8)), jnp.ones((2, 8)), jnp.ones(8), eps=0.0, valid=jnp.ones(2)
        )
