"""New tokens' queries, keys and values: against the definition, and nothing touched beside their pages."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.append_kv.api import IMPLEMENTATIONS
from pallas_kernels.paged_attention.layout import FP8, unpack
from tests.kernels.by_name import append_kv
from tests.kernels.cases.append_kv import SMALL_CASES, Case, frequencies, make_inputs
from tests.kernels.compare import assert_same_bits, relative_error
from tests.kernels.lowered import kernels_in

FAST = sorted(set(IMPLEMENTATIONS) - {"reference"})
TOLERANCE = {
    "float32": 2e-6,
    "bfloat16": 4e-3,
    FP8: 2e-3,
}  # of the norm; FP8: few codes differ, by one step
EPS = 1e-3
BY_NAME = {case.name: case for case in SMALL_CASES}
every_case = pytest.mark.parametrize("case", SMALL_CASES, ids=lambda case: case.name)
every_dtype = pytest.mark.parametrize("dtype", ["float32", "bfloat16", FP8])


def inputs_of(case: Case, dtype: str) -> dict:
    """Inputs for pages of a dtype; those for FP8 pages are float32."""
    if case.head_dim % (4 if dtype == FP8 else 1):
        pytest.skip("head_dim is no multiple of 4")
    return make_inputs(case, "float32" if dtype == FP8 else dtype)


@functools.partial(jax.jit, static_argnames=("case", "dtype", "implementation"))
def run(case: Case, dtype: str, inputs: dict, implementation: str):
    static = {
        "layout": case.layout(dtype),
        "page_frame": case.page_frame,
        "eps": EPS,
        "dtype": "float32" if dtype == FP8 else dtype,
        "num_heads": case.heads if case.gate else None,
    }
    return append_kv(**inputs, **static, implementation=implementation)


def records_of(case: Case, dtype: str, arena) -> np.ndarray:
    """What lies in all frames' pages, float32[U, page_tokens, 2, K, H]."""
    layout = case.layout(dtype)
    pages = jnp.asarray(arena)[:, layout.offset : layout.offset + layout.page_words]
    words, scales = layout.split(pages)
    found = unpack(words, dtype)
    return np.asarray(found if scales is None else found * scales[..., None])


def expected(case: Case, inputs: dict) -> tuple[np.ndarray, dict]:
    """Queries [B, T, N, H], and by (frame, slot) keys and values [2, K, H], in float64."""
    given = {name: np.asarray(x, np.float64) for name, x in inputs.items()}
    qkv = given["qkv"].sum(0) if case.parts else given["qkv"]
    heads = qkv.reshape(case.rows, case.tokens, -1, case.head_dim)
    heads = heads[:, :, : heads.shape[2] - case.gate]
    split = np.split(heads, [case.heads, case.heads + case.kv_heads], axis=2)
    for index, norm in enumerate(("q_norm", "k_norm")):
        x = split[index].copy()
        if case.normed:
            x = x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * given[norm]
        half = case.rotated // 2
        for row, token in np.ndindex(case.rows, case.tokens):
            for j in range(half):
                # In float32, as everywhere: an angle of 100,000 has few digits after the point.
                angle = np.float32(case.base[row] + token) * frequencies(case)[j]
                turn = np.exp(1j * np.float64(angle))
                pair = (x[row, token, :, j] + 1j * x[row, token, :, j + half]) * turn
                x[row, token, :, j], x[row, token, :, j + half] = pair.real, pair.imag
        split[index] = x
    written = {}
    table = np.asarray(inputs["table"])[:, case.page_frame]
    for row, token in np.ndindex(case.rows, case.tokens):
        position = case.base[row] + token
        if inputs["begin"][row] <= position < inputs["end"][row]:
            place = int(table[row, position // case.page_tokens]), position % case.page_tokens
            written[place] = np.stack([split[1][row, token], split[2][row, token]])
    return split[0], written


@every_case
def test_the_reference_is_the_definition(case):
    inputs = make_inputs(case)
    q, arena = run(case, "float32", inputs, "reference")
    want, written = expected(case, inputs)
    assert relative_error(q, want) <= 1e-6
    records = records_of(case, "float32", arena)
    assert written
    for place, record in written.items():
        assert relative_error(records[place], record) <= 1e-6


@pytest.mark.parametrize("implementation", FAST)
class TestImplementation:
    @every_case
    @every_dtype
    def test_equals_the_reference(self, implementation, case, dtype):
        inputs = inputs_of(case, dtype)
        q, arena = run(case, dtype, inputs, implementation)
        want_q, want_arena = run(case, dtype, inputs, "reference")
        assert q.dtype == inputs["qkv"].dtype or case.parts
        assert q.shape == (case.rows, case.tokens, case.heads, case.head_dim)
        assert relative_error(q, want_q) <= TOLERANCE[dtype]
        _, written = expected(case, inputs)
        got, want = (records_of(case, dtype, array) for array in (arena, want_arena))
        for place in written:
            assert relative_error(got[place], want[place]) <= TOLERANCE[dtype]

    @every_case
    @every_dtype
    def test_writes_its_tokens_and_no_other_word(self, implementation, case, dtype):
        inputs, layout = inputs_of(case, dtype), case.layout(dtype)
        _, arena = run(case, dtype, inputs, implementation)
        same = np.array(arena) == np.asarray(inputs["arena"])
        _, written = expected(case, inputs)
        for frame, slot in written:
            places = [
                (layout.offset, layout.token_words),
                (layout.scale_offset, layout.scale_words),
            ]
            for offset, count in places:
                words = slice(offset + slot * count, offset + (slot + 1) * count)
                assert count == 0 or not same[frame, words].all()
                same[frame, words] = True
        assert same[1:].all()

    @pytest.mark.parametrize("name", ["decode_inert_rows", "chunk"])
    @every_dtype
    def test_what_is_not_new_changes_nothing(self, implementation, name, dtype):
        case = BY_NAME[name]
        inputs = inputs_of(case, dtype)
        position = np.array(case.base)[:, None] + np.arange(case.tokens)
        new = (position >= inputs["begin"][:, None]) & (position < inputs["end"][:, None])
        assert not new.all()
        poisoned = inputs | {"qkv": jnp.where(new[..., None], inputs["qkv"], jnp.nan)}
        got = run(case, dtype, poisoned, implementation)
        want = run(case, dtype, inputs, implementation)
        assert_same_bits(np.asarray(got[0])[new], np.asarray(want[0])[new])
        assert_same_bits(got[1][1:], want[1][1:])

    @pytest.mark.as_users
    @every_dtype
    def test_a_row_does_not_depend_on_others(self, implementation, dtype):
        case = BY_NAME["heads_normed"]
        inputs = inputs_of(case, dtype)
        q, arena = run(case, dtype, inputs, implementation)
        rows = {n: inputs[n][1:2] for n in ("table", "base", "begin", "end", "cos", "sin")}
        alone = inputs | rows | {"qkv": inputs["qkv"][:, 1:2]}
        one = Case(**vars(case) | {"base": case.base[1:2]})
        own_q, own = run(one, dtype, alone, implementation)
        frames = np.ravel(rows["table"])
        if (implementation, dtype) == ("pallas", FP8):
            # Interpreted, another number of rows may sum a norm's few elements in another order.
            assert relative_error(own_q[0], q[1]) <= TOLERANCE["float32"]
            found, want = (records_of(case, dtype, array) for array in (own, arena))
            _, written = expected(one, alone)
            assert len(written) == case.tokens
            for place in written:
                assert relative_error(found[place], want[place]) <= TOLERANCE[FP8]
            return
        assert_same_bits(own_q[0], q[1])
        assert_same_bits(own[frames], arena[frames])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parts_are_the_sum_that_the_projection_would_round(dtype):
    case = BY_NAME["decode_in_parts"]
    inputs = inputs_of(case, dtype)
    whole = inputs | {"qkv": inputs["qkv"].sum(0).astype(dtype)}
    got = run(case, dtype, inputs, "pallas")
    want = run(Case(**vars(case) | {"parts": 0}), dtype, whole, "pallas")
    assert relative_error(got[0], want[0]) <= TOLERANCE[dtype] / 4


def test_on_a_gpu_it_is_one_kernel():
    case = BY_NAME["heads_normed"]
    call = functools.partial(run, case, "bfloat16", implementation=None)
    assert kernels_in(call, make_inputs(case, "bfloat16")) == ["append_kv"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"page_frame": 3}, "page_frame must be one of the table's 1 frames per page, got 3"),
        (
            {"qkv": jnp.ones((4, 1, 100))},
            r"qkv must have \(N \+ 2 x 2\) heads x 16 columns .* got 100",
        ),
        ({"qkv": jnp.ones((4, 1, 64))}, r"columns with N > 0, got 64"),
        ({"num_heads": 9}, r"heads x 16 columns or more, with N = 9 >= 0, got 128"),
        ({"q_norm": jnp.ones(16)}, "q_norm and k_norm must be given together, or neither"),
        (
            {"q_norm": jnp.ones(8), "k_norm": jnp.ones(16)},
            r"q_norm must have shape \(16,\), got \(8,\)",
        ),
        ({"cos": None}, "cos and sin likewise"),
        (
            {"cos": jnp.ones((4, 1, 9)), "sin": jnp.ones((4, 1, 9))},
            "cos must have at most 8 columns for heads of 16 channels, got 9",
        ),
        ({"dtype": "int32"}, "dtype must be float32 or bfloat16 or float16, got int32"),
    ],
)
def test_a_wrong_argument_is_named(change, message):
    case = BY_NAME["decode"]
    given = make_inputs(case) | {"layout": case.layout("float32")} | change
    with pytest.raises(ValueError, match=f"append_kv: .*{message}"):
        append_kv(**given)


def test_keys_and_values_without_queries_are_written_as_with_them():
    case = next(case for case in SMALL_CASES if case.normed and case.rotated and not case.parts)
    inputs, static = make_inputs(case, "float32"), {"page_frame": case.page_frame, "eps": EPS}
    static |= {"layout": case.layout("float32"), "dtype": "float32"}
    end = (case.heads + 2 * case.kv_heads) * case.head_dim
    alone = inputs["qkv"][..., case.heads * case.head_dim : end]
    for name in IMPLEMENTATIONS:
        _, want = append_kv(**inputs, **static, num_heads=case.heads, implementation=name)
        given = inputs | {"qkv": alone}
        q, found = append_kv(**given, **static, num_heads=0, implementation=name)
        assert q.shape[2] == 0
        want, found = (records_of(case, "float32", arena) for arena in (want, found))
        np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-6)
