"""Splits of the context, trees of new tokens, and what is refused."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.paged_attention import AttentionArrays, AttentionOptions, PageLayout
from pallas_kernels.paged_attention.e4m3 import from_codes, to_codes
from pallas_kernels.paged_attention.kernel import paged_attention_pallas
from pallas_kernels.paged_attention.layout import FP8, pack, unpack
from pallas_kernels.paged_attention.plan import Config, choose_config, make_plan
from pallas_kernels.plan import H200
from tests.kernels.attention_cases import BITS, CASE, FAST, TOLERANCE, expected, run
from tests.kernels.by_name import paged_attention
from tests.kernels.cases.paged_attention import CASES, TREE, Case, make_inputs
from tests.kernels.compare import assert_same_bits, relative_error
from tests.kernels.lowered import kernels_in

# Blocks of 16 queries, tiles of 16 keys, splits of 32 keys wherever the context is longer.
SPLIT = Config(block_q=16, block_k=16, programs_per_sm=10**6, min_split=32)


@functools.partial(jax.jit, static_argnames=("case", "dtype", "config"))
def split_attend(inputs: dict, case: Case, dtype: str, config: Config = SPLIT) -> jax.Array:
    options = AttentionOptions(
        layout=case.layout(dtype),
        scale=case.head_dim**-0.5,
        sliding_window=case.window,
        soft_cap=case.soft_cap,
    )
    return paged_attention_pallas(AttentionArrays(**inputs), options=options, config=config)


def plan_of(case: Case, config: Config):
    q_shape = (case.rows, case.tokens, case.heads, case.head_dim)
    keys = case.pages * case.page_tokens
    return make_plan(config, q_shape, case.kv_heads, keys, window=case.window, num_sms=H200.num_sms)


class TestSplits:
    @pytest.mark.parametrize(
        ("name", "splits", "blocks"),
        [
            ("decode", 6, 1),
            ("decode_all_inert", 6, 1),
            ("decode_groups_of_3", 6, 1),
            ("chunk_partly_there", 6, 6),
            ("window", 2, 1),
            ("window_skips_tiles", 2, 1),
            ("window_and_soft_cap", 4, 4),
            ("tree_and_window", 2, 2),
            ("tree_and_long_window", 3, 1),
            ("groups_of_7", 6, 7),
            ("long_pages", 12, 1),
            ("pages_of_24", 3, 1),
        ],
    )
    def test_splits_and_blocks_change_nothing(self, name, splits, blocks):
        case = CASE[name]
        dtype = "bfloat16" if name in ("decode_groups_of_3", "tree_and_window") else "float32"
        plan = plan_of(case, SPLIT)
        assert (plan.splits, plan.blocks) == (splits, blocks)
        inputs = make_inputs(case, dtype=dtype)
        got = split_attend(inputs, case, dtype)
        assert np.isfinite(got).all()
        want = run(case, inputs, "reference", dtype)
        assert relative_error(got, want) <= TOLERANCE["pallas"][dtype]

    def test_more_splits_than_are_joined_at_once(self):
        case = replace(CASE["decode"], pages=40, base=(600, 0), heads=2)
        config = replace(SPLIT, min_split=16)
        assert plan_of(case, config).splits == 40
        inputs = make_inputs(case)
        got = split_attend(inputs, case, "float32", config)
        assert relative_error(got, run(case, inputs, "reference")) <= 1e-6

    def test_a_row_has_the_same_bits_alone_and_beside_others(self):
        for case in (BITS, replace(BITS, window=40)):
            inputs = make_inputs(case)
            together = split_attend(inputs, case, "float32")
            for row in range(case.rows):
                only = jnp.arange(case.rows) == row
                alone = inputs | {"end": jnp.where(only, inputs["end"], 0)}
                assert_same_bits(split_attend(alone, case, "float32")[row], together[row])

    def test_large_scores_do_not_overflow(self):
        inputs = make_inputs(BITS)
        inputs["q"] = inputs["q"] * 1e4
        got = split_attend(inputs, BITS, "float32")
        assert relative_error(got, run(BITS, inputs, "reference")) <= 1e-3

    def test_a_plan_covers_every_key_that_a_block_can_see(self):
        rng = np.random.default_rng(0)
        for _ in range(300):
            keys, tokens = int(rng.integers(1, 5000)), int(rng.integers(1, 40))
            window = None if rng.random() < 0.3 else int(rng.integers(1, 3000))
            config = Config(
                block_q=int(2 ** rng.integers(4, 8)),
                block_k=int(2 ** rng.integers(4, 8)),
                programs_per_sm=int(rng.integers(1, 9)),
                min_split=int(rng.integers(1, 1000)),
            )
            rows, kv_heads, group = (int(x) for x in rng.integers(1, 9, 3))
            q_shape = (rows, tokens, kv_heads * group, 8)
            num_sms = int(rng.integers(1, 200))
            plan = make_plan(config, q_shape, kv_heads, keys, window=window, num_sms=num_sms)
            assert plan.blocks * plan.block_q >= tokens * group
            assert plan.split_tokens % plan.block_k == 0 and plan.block_q >= 16
            programs = plan.splits * plan.blocks * rows * kv_heads
            extra = 1 if window is None else 2
            assert plan.splits == 1 or programs <= extra * num_sms * config.programs_per_sm
            for base in rng.integers(0, keys, 5):
                lower = 0 if window is None else max(int(base) - window + 1, 0)
                upper = min(int(base) + tokens, keys)
                first = lower // plan.split_tokens
                assert (first + plan.splits) * plan.split_tokens >= upper

    def test_only_long_contexts_of_few_rows_are_split_and_joined(self):
        def kernels(rows: int, pages: int) -> list[str]:
            case = Case(name="shape", tokens=1, base=(0,) * rows, pages=pages, page_tokens=64)
            layout = case.layout("bfloat16")
            attend = functools.partial(paged_attention, layout=layout, scale=1.0)
            spec = jax.ShapeDtypeStruct
            return kernels_in(
                lambda given: attend(**given),
                {
                    "q": spec((rows, 1, 4, 8), jnp.bfloat16),
                    "arena": spec((9, layout.page_words), jnp.uint32),
                    "table": spec((rows, pages), jnp.int32),
                    **dict.fromkeys(("base", "end"), spec((rows,), jnp.int32)),
                },
            )

        assert kernels(2, 64) == ["paged_attention", "paged_attention_join"]
        assert kernels(2, 4) == kernels(600, 64) == ["paged_attention"]

    def test_long_chunks_have_a_config_of_their_own(self):
        chosen = functools.partial(choose_config, "bfloat16", 128, chip=H200)
        assert chosen(queries=64) == chosen(queries=1)
        assert chosen(queries=65).block_q == 128


@pytest.mark.parametrize("implementation", FAST)
class TestTree:
    @pytest.mark.parametrize("window", [None, 4, 60])
    def test_a_node_is_the_end_of_its_own_chain(self, implementation, window):
        """Every node gives what the last of a chain would whose keys and values are those of its path."""
        case = replace(CASE["tree"], window=window, page_tokens=128, pages=1)
        inputs = make_inputs(case)
        got = run(case, inputs, implementation)
        page_words = case.layout("float32").page_words
        for node, bits in enumerate(TREE):
            path = jnp.asarray([j for j in range(case.tokens) if bits >> j & 1])
            chain = {name: inputs[name] for name in ("table", "base")}
            chain["q"] = inputs["q"][:, path]
            chain["end"] = inputs["base"] + len(path)
            arena = inputs["arena"]
            for row, base in enumerate(case.base):
                frame = inputs["table"][row, 0]
                page = arena[frame, :page_words].reshape(case.page_tokens, -1)
                page = page.at[base : base + len(path)].set(page[base + path])
                arena = arena.at[frame, :page_words].set(page.reshape(-1))
            own = replace(case, tokens=len(path), tree=None)
            want = expected(own, chain | {"arena": arena}, "float32")[:, -1]
            assert relative_error(got[:, node], want) <= TOLERANCE[implementation]["float32"]

    @pytest.mark.parametrize("name", ["verify", "window"])
    def test_a_chain_as_a_tree_is_a_chain(self, implementation, name):
        case = CASE[name]
        inputs = make_inputs(case)
        chain = jnp.broadcast_to((1 << jnp.arange(1, 6)) - 1, (case.rows, 5))
        got = run(case, inputs | {"ancestors": chain}, implementation)
        want = run(case, inputs, "reference")
        assert relative_error(got, want) <= TOLERANCE[implementation]["float32"]

    def test_another_tree_exceeds_the_tolerance(self, implementation):
        case = CASE["tree"]
        inputs = make_inputs(case)
        got = run(case, inputs, implementation)
        tree = inputs["ancestors"].at[:, 3].set(0b001101)
        other = run(case, inputs | {"ancestors": tree}, implementation)
        assert relative_error(got[:, 3], other[:, 3]) > 1e-3
        assert_same_bits(got[:, :3], other[:, :3])


@pytest.mark.parametrize("implementation", ["reference", *FAST])
def test_the_result_has_the_dtype_asked_for(implementation):
    inputs = make_inputs(BITS, dtype="bfloat16")
    given = {"layout": BITS.layout("bfloat16"), "scale": 0.25, "implementation": implementation}
    wide = paged_attention(**inputs, **given)
    got = paged_attention(**inputs, **given, dtype=jnp.bfloat16)
    assert got.dtype == jnp.bfloat16 and wide.dtype == jnp.float32
    assert_same_bits(got.astype(jnp.float32), wide.astype(jnp.bfloat16).astype(jnp.float32))


def test_shapes_a_kernel_cannot_take_are_refused_by_name_and_run_by_default():
    case = replace(BITS, head_dim=320, heads=2, kv_heads=1)
    inputs = make_inputs(case)
    with pytest.raises(NotImplementedError, match="head_dim must be at most 256 .* got 320"):
        run(case, inputs, "pallas")
    given = {"layout": case.layout("float32"), "scale": 1.0}
    assert kernels_in(lambda inputs: paged_attention(**inputs, **given), inputs) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"table": jnp.ones((4, 3), jnp.uint32)}, "table must be int32, got uint32"),
        ({"table": jnp.ones((3, 3), jnp.int32)}, r"table must have shape \(4, 3\), got \(3, 3\)"),
        ({"arena": jnp.ones((9, 1024))}, "arena must be uint32, got float32"),
        ({"arena": jnp.ones((9, 1023), jnp.uint32)}, r"words \[0, 1024\) .* 1023; correct"),
        ({"ancestors": jnp.ones((4, 3), jnp.int32)}, r"ancestors must have shape \(4, 4\), got"),
        (
            {"q": jnp.ones((4, 32, 6, 16)), "ancestors": jnp.ones((4, 32), jnp.int32)},
            "at most 31 new tokens, got 32; split it",
        ),
    ],
)
def test_a_wrong_argument_is_named(change, message):
    given = {"layout": BITS.layout("float32"), "scale": 1.0} | make_inputs(BITS)
    with pytest.raises(ValueError, match=f"paged_attention: .*{message}"):
        paged_attention(**given | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "int8"}, "PageLayout: dtype must be one of .* got 'int8'"),
        ({"head_dim": 9, "dtype": "bfloat16"}, "head_dim must be a multiple of 2 for bf.*, got 9"),
        ({"head_dim": 10, "dtype": FP8}, "head_dim must be a multiple of 4 for float8.*, got 10"),
    ],
)
def test_a_wrong_layout_is_named(change, message):
    sizes = {"offset": 0, "page_tokens": 16, "num_kv_heads": 1, "head_dim": 8, "dtype": "float32"}
    with pytest.raises(ValueError, match=message):
        PageLayout(**sizes | change)


@pytest.mark.parametrize("shape", [(8,), (2, 3, 2, 4, 16), (0, 4)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pack_then_unpack_gives_every_bit_back(dtype, shape):
    bits = {"float32": np.uint32, "bfloat16": np.uint16}[dtype]
    rng = np.random.default_rng(0)
    raw = rng.integers(0, np.iinfo(bits).max, shape, bits, endpoint=True)
    x = jax.lax.bitcast_convert_type(jnp.asarray(raw), jnp.dtype(dtype))
    words, scales = jax.jit(functools.partial(pack, dtype=dtype))(x)
    assert scales is None
    assert words.dtype == jnp.uint32
    assert words.shape == (*shape[:-1], shape[-1] // (1 if dtype == "float32" else 2))
    back = jax.jit(functools.partial(unpack, dtype=dtype))(words)
    assert back.dtype == jnp.float32 and back.shape == shape
    wide = np.asarray(back).view(np.uint32)
    want = raw if dtype == "float32" else raw.astype(np.uint32) << 16
    np.testing.assert_array_equal(wide, want)


def test_a_packed_word_holds_element_j_low_and_j_plus_half_high():
    x = jnp.arange(8, dtype=jnp.float32).astype(jnp.bfloat16)
    bits = np.asarray(jax.lax.bitcast_convert_type(x, jnp.uint16), np.uint32)
    np.testing.assert_array_equal(pack(x, "bfloat16")[0], bits[:4] | bits[4:] << 16)


def test_an_fp8_word_holds_elements_a_quarter_of_a_head_apart():
    x = jnp.array([448, 2, -3, 4, 0.5, 0, -1, 8], jnp.float32)
    words, scale = pack(x, FP8)
    codes = np.asarray(x).astype(ml_dtypes.float8_e4m3fn).view(np.uint8).astype(np.uint32)
    want = codes[0:2] | codes[2:4] << 8 | codes[4:6] << 16 | codes[6:8] << 24
    np.testing.assert_array_equal(words, want)
    assert np.asarray(scale).view(np.float32) == 1.0


def fp8_numbers() -> np.ndarray:
    """All finite ones, in order."""
    every = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    return np.unique(every[np.isfinite(every)])


def test_codes_are_the_nearest_fp8_numbers():
    """All numbers, what lies halfway between two and beside that, and random numbers of all sizes."""
    numbers = fp8_numbers()
    halfway = (numbers[1:] + numbers[:-1]) / 2
    beside = [np.nextafter(halfway, np.float32(side)) for side in (-np.inf, np.inf)]
    rng = np.random.default_rng(0)
    drawn = rng.uniform(-448, 448, 4000) * 2.0 ** -rng.integers(0, 40, 4000)
    x = np.concatenate([numbers, -numbers, halfway, *beside, drawn, [-0.0]]).astype(np.float32)
    codes = jax.jit(to_codes)(x)
    want = x.astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(codes, want.view(np.uint8))
    np.testing.assert_array_equal(jax.jit(from_codes)(codes), want.astype(np.float32))


def test_an_fp8_head_is_off_by_a_sixteenth_at_most():
    """Of each element, or of the smallest step; the largest element keeps its value."""
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((500, 16)) * 10.0 ** rng.integers(-12, 12, (500, 1))).astype(
        np.float32
    )
    words, scales = jax.jit(functools.partial(pack, dtype=FP8))(x)
    scales = np.asarray(scales).view(np.float32)[:, None]
    back = np.asarray(unpack(words, FP8)) * scales
    assert (np.abs(back - x) <= np.maximum(np.abs(x) / 16, scales * 2**-10) * 1.0001).all()
    largest = np.abs(x).argmax(1)[:, None]
    kept = [np.take_along_axis(array, largest, 1) for array in (back, x)]
    np.testing.assert_allclose(*kept, rtol=1e-6)


@pytest.mark.parametrize("size", [0.0, 1e-35])
def test_fp8_heads_of_nearly_nothing_become_zeros(size):
    words, scales = pack(jnp.full((2, 8), size, jnp.float32), FP8)
    assert not np.asarray(words).any()
    assert np.isfinite(np.asarray(scales).view(np.float32)).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_does_not_become_one_in_fp8(value):
    x = jnp.ones((2, 8), jnp.float32).at[1, 3].set(value)
    words, scales = pack(x, FP8)
    back = unpack(words, FP8) * jax.lax.bitcast_convert_type(scales, jnp.float32)[:, None]
    assert np.isfinite(back[0]).all() and not np.isfinite(back[1]).any()


def test_cases_cover_what_the_kernels_tell_apart():
    assert {case.heads // case.kv_heads for case in CASES} >= {1, 2, 3, 4, 5, 7, 8}
    assert {case.tokens for case in CASES} >= {1, 5, 16, 32}
