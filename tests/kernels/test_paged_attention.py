"""Paged attention beside its definition, what may not be read, and the bits of exact mode."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention.layout import FP8
from tests.kernels.attention_cases import BITS, CASE, FAST, TOLERANCE, expected, run, seen_keys
from tests.kernels.by_name import paged_attention
from tests.kernels.cases.paged_attention import CASES, make_inputs
from tests.kernels.compare import assert_same_bits, relative_error
from tests.kernels.lowered import kernels_in

DTYPES = ["float32", "bfloat16", FP8]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_reference_is_softmax_attention(case, dtype):
    inputs = make_inputs(case, dtype=dtype)
    got = run(case, inputs, "reference", dtype)
    assert relative_error(got, expected(case, inputs, dtype)) <= TOLERANCE["reference"][dtype]


@pytest.mark.parametrize("implementation", FAST)
class TestImplementation:
    @pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_equals_the_reference_and_reads_no_nan(self, implementation, case, dtype):
        """Every word that must not be read is NaN, see `make_inputs`."""
        inputs = make_inputs(case, dtype=dtype)
        got = run(case, inputs, implementation, dtype)
        assert got.dtype == jnp.float32 and got.shape == inputs["q"].shape
        assert np.isfinite(got).all()
        want = run(case, inputs, "reference", dtype)
        assert relative_error(got, want) <= TOLERANCE[implementation][dtype]
        rows = list(zip(case.base, case.lengths, strict=True))
        sees = [[seen_keys(case, b, t, end) for t in range(case.tokens)] for b, end in rows]
        blind = np.asarray([[not keys for keys in row] for row in sees])
        assert not np.asarray(got)[blind].any()

    @pytest.mark.parametrize(
        "name", ["decode_inert_rows", "verify", "chunk_partly_there", "window"]
    )
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_what_lies_in_unread_words_changes_no_bit(self, implementation, name, dtype):
        case = CASE[name]
        inputs = make_inputs(case, dtype=dtype)
        unread = inputs["arena"] == jnp.uint32(0xFFFFFFFF)
        assert unread.any() and not unread.all()
        got = run(case, inputs, implementation, dtype)
        for garbage in (0x7F800000, 0x3F803F80, 0):  # infinity, numbers, zero
            other = jnp.where(unread, jnp.uint32(garbage), inputs["arena"])
            assert_same_bits(run(case, inputs | {"arena": other}, implementation, dtype), got)

    def test_the_queries_of_an_idle_row_are_not_read(self, implementation):
        case = CASE["decode_inert_rows"]
        inputs = make_inputs(case)
        spoiled = inputs | {"q": inputs["q"].at[jnp.array([0, 2])].set(jnp.nan)}
        assert_same_bits(run(case, spoiled, implementation), run(case, inputs, implementation))

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_wrong_operands_exceed_the_tolerance(self, implementation, dtype):
        case = CASE["verify_odd_kv_heads"]
        inputs = make_inputs(case, dtype=dtype)
        want = run(case, inputs, "reference", dtype)
        layout = case.layout(dtype)
        size = case.page_tokens * layout.token_words
        pages = inputs["arena"][:, :size].reshape(-1, case.page_tokens, 2, layout.token_words // 2)
        swapped = jnp.concatenate(  # K for V; scales stay
            [pages[:, :, ::-1].reshape(-1, size), inputs["arena"][:, size:]], axis=1
        )
        full = inputs["table"].at[:, 0].set(inputs["table"][:, 1])  # row 1 has one page
        late = inputs | {"base": inputs["base"] - 1}
        other_page = inputs | {"table": full.at[1, 0].set(inputs["table"][0, 0])}
        other_query = inputs | {"q": inputs["q"][:, :, ::-1]}
        for wrong in (inputs | {"arena": swapped}, late, other_page, other_query):
            error = relative_error(run(case, wrong, implementation, dtype), want)
            assert error > 0.1 >= 20 * TOLERANCE[implementation][dtype]

    def test_wrong_scales_exceed_the_tolerance(self, implementation):
        """Of keys those of values, or of another token."""
        case = CASE["verify_odd_kv_heads"]
        inputs = make_inputs(case, dtype=FP8)
        layout = case.layout(FP8)
        start, shape = layout.scale_offset, (-1, case.page_tokens, 2, case.kv_heads)
        pages = inputs["arena"][:, start : layout.offset + layout.page_words].reshape(shape)
        want = run(case, inputs, "reference", FP8)
        for axis in (1, 2):
            flat = jnp.roll(pages, 1, axis=axis).reshape(len(pages), -1)
            flat = jnp.where(flat == jnp.uint32(0xFFFFFFFF), jnp.uint32(0x3F800000), flat)  # 1.0
            arena = inputs["arena"].at[:, start : start + flat.shape[1]].set(flat)
            error = relative_error(run(case, inputs | {"arena": arena}, implementation, FP8), want)
            assert error > 0.05 >= 10 * TOLERANCE[implementation][FP8]

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_other_rows_lengths_change_no_bit(self, implementation, dtype):
        """However far others make the loop run, and wherever a window lets it begin."""
        for case in (BITS, replace(BITS, window=40)):
            inputs = make_inputs(case, dtype=dtype)
            together = run(case, inputs, implementation, dtype)
            for row in range(case.rows):
                only = jnp.arange(case.rows) == row
                alone = inputs | {"end": jnp.where(only, inputs["end"], 0)}
                assert_same_bits(run(case, alone, implementation, dtype)[row], together[row])

    @pytest.mark.parametrize("tokens", [1, 4, 32])
    def test_a_row_has_the_same_bits_at_any_place(self, implementation, tokens):
        case = replace(BITS, tokens=tokens, base=(0, 30, 97, 150), pages=12)
        inputs = make_inputs(case)
        want = run(case, inputs, implementation)
        for shift in range(1, case.rows):
            rows = (jnp.arange(case.rows) + shift) % case.rows
            moved = {k: v if k == "arena" else v[rows] for k, v in inputs.items()}
            assert_same_bits(run(case, moved, implementation), want[rows])

    @pytest.mark.parametrize("t", [0, 1, 17, 31])
    def test_a_query_has_the_same_bits_alone_and_in_a_chunk(self, implementation, t):
        """Exact mode's decode: the same window, with one query that counts and no keys after it."""
        case = replace(BITS, tokens=32, base=(0, 32, 96, 160))
        inputs = make_inputs(case)
        together = run(case, inputs, implementation)
        alone = inputs | {
            "q": jnp.zeros_like(inputs["q"]).at[:, t].set(inputs["q"][:, t]),
            "end": inputs["base"] + t + 1,
        }
        assert_same_bits(run(case, alone, implementation)[:, t], together[:, t])

    def test_frames_in_another_order_change_no_bit(self, implementation):
        inputs = make_inputs(BITS)
        order = jnp.asarray(
            np.random.default_rng(1).permutation(np.arange(1, len(inputs["arena"]))), jnp.int32
        )
        arena = inputs["arena"].at[order].set(inputs["arena"][1:])
        table = jnp.where(inputs["table"] > 0, order[inputs["table"] - 1], 0)
        moved = inputs | {"arena": arena, "table": table}
        assert (table != inputs["table"]).any()
        assert_same_bits(run(BITS, moved, implementation), run(BITS, inputs, implementation))

    def test_large_scores_do_not_overflow(self, implementation):
        inputs = make_inputs(BITS)
        inputs["q"] = inputs["q"] * 1e4
        got = run(BITS, inputs, implementation)
        assert np.isfinite(got).all()
        assert (
            relative_error(got, run(BITS, inputs, "reference")) <= 1e-3
        )  # scores of 1e5 carry 1e-2


def test_none_chooses_by_platform_and_a_name_is_obeyed():
    inputs = make_inputs(BITS)

    def with_name(name):
        return lambda given: paged_attention(
            **given, layout=BITS.layout("float32"), scale=1.0, implementation=name
        )

    assert kernels_in(with_name(None), inputs) == kernels_in(with_name("pallas"), inputs)
    assert kernels_in(with_name("pallas"), inputs) == ["paged_attention"]
    assert kernels_in(with_name("xla"), inputs) == kernels_in(with_name("reference"), inputs) == []
    inputs = make_inputs(BITS, dtype="bfloat16")
    default = run(BITS, inputs, None, "bfloat16")
    assert_same_bits(default, run(BITS, inputs, "xla", "bfloat16"))
    others = [run(BITS, inputs, name, "bfloat16") for name in ("pallas", "reference")]
    assert all((default != other).any() for other in others)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"implementation": "tpu"}, "paged_attention: implementation .* got 'tpu'"),
        ({"q": jnp.ones((4, 4))}, r"q must have 4 dimensions, got shape \(4, 4\)"),
        ({"table": jnp.ones(4, jnp.int32)}, r"table .* 2 dimensions, or 3 .* got shape \(4,\)"),
        ({"base": jnp.ones(3, jnp.int32)}, r"base must have shape \(4,\), got \(3,\)"),
        ({"end": jnp.ones(5, jnp.int32)}, r"end must have shape \(4,\), got \(5,\)"),
        ({"q": jnp.ones((4, 4, 5, 16))}, "q heads 5 x 16 do not fit 2 KV heads x 16"),
        ({"q": jnp.ones((4, 4, 6, 8))}, "q heads 6 x 8 do not fit 2 KV heads x 16"),
    ],
)
def test_a_wrong_argument_is_named(change, message):
    given = {"layout": BITS.layout("float32"), "scale": 1.0} | make_inputs(BITS)
    with pytest.raises(ValueError, match=message):
        paged_attention(**given | change)
