"""Models by their sizes: every named one against numbers worked out here, and files that say something wrong."""

from __future__ import annotations

import re
import tomllib

import pytest

from hybrid_jax.config import CacheConfig, EngineConfig, with_cut
from hybrid_jax.costs import prefill_flops
from hybrid_jax.geometry import make_geometry
from hybrid_jax.kinds.table import KINDS
from hybrid_jax.models.files import KNOWN_MODELS as KNOWN
from hybrid_jax.models.known import load_known
from hybrid_jax.sim.model_specs import FOLDER, load_spec, names, paper_costs, parse_spec

# name: (bytes of a token's K and V, bytes of a checkpoint). K and V and convolution columns take 2 bytes an element,
# states 4; a checkpoint is layers * (state * 4 + columns * 2), columns are 3 of each convolved channel.
MAMBA2 = (
    128 * 64 * 128 * 4 + 3 * (128 * 64 + 2 * 8 * 128) * 2
)  # 128 heads x 64, state 128, 8 groups
ONE_GROUP = 128 * 64 * 128 * 4 + 3 * (128 * 64 + 2 * 128) * 2
TINY = 48 * 64 * 128 * 4 + 3 * (48 * 64 + 2 * 128) * 2
NANO = 64 * 64 * 128 * 4 + 3 * (64 * 64 + 2 * 8 * 128) * 2
DELTA = 32 * 128 * 128 * 4 + 3 * (16 + 16 + 32) * 128 * 2
BYTES = {
    "bamba_9b": (3 * 2 * 8 * 128 * 2, 29 * ONE_GROUP),
    "granite_4_h_small": (4 * 2 * 8 * 128 * 2, 36 * ONE_GROUP),
    # 4 layers of 2 * 8 heads * 128 channels; 8192 channels of 16
    "jamba_1_5_mini": (4 * 2 * 8 * 128 * 2, 28 * (8192 * 16 * 4 + 3 * 8192 * 2)),
    "codestral_mamba_7b": (0, 64 * MAMBA2),
    "nemotron_h_8b": (4 * 2 * 8 * 128 * 2, 24 * MAMBA2),
    "llama_3_1_8b_swiftkv": (32 * 2 * 8 * 128 * 2, 0),
    "qwen2_7b": (28 * 2 * 4 * 128 * 2, 0),
    # table 1: 4 D bytes of KV; 2 D N of state and, for the convolution, 2 * 4 * (2 D + 2 N)
    "paper_7b": (4 * 4 * 4096, 24 * (2 * 4096 * 128 + 8 * (2 * 4096 + 2 * 128))),
    # a KV head per query head; 64 heads x 64 are the paper's 4096 channels, of 128 elements each
    "paper_7b_float32": (4 * 4 * 4096, 24 * (4096 * 128 * 4 + 3 * (4096 + 2 * 128) * 2)),
    "paper_7b_real": (4 * 2 * 8 * 128 * 2, 24 * MAMBA2),
    "granite_4_h_tiny": (4 * 2 * 4 * 128 * 2, 36 * TINY),
    "hybrid_7b": (4 * 2 * 8 * 128 * 2, 24 * MAMBA2),
    "nemotron_3_nano_30b": (6 * 2 * 2 * 128 * 2, 23 * NANO),
    "qwen3_5_35b_a3b": (10 * 2 * 2 * 256 * 2, 30 * DELTA),
    "qwen3_5_9b": (8 * 2 * 4 * 256 * 2, 24 * DELTA),
    "tiny_gated_delta": (2 * 2 * 64 * 2, 6 * (6 * 64 * 64 * 4 + 3 * 12 * 64 * 2)),
    # 32 heads of 128 x 128; q and k of 16 heads and v of 32, each 128 channels
    "qwen3_next_80b": (
        12 * 2 * 2 * 256 * 2,
        36 * DELTA,
    ),
    "llama_3_1_8b": (32 * 2 * 8 * 128 * 2, 0),
    # 64 layers of 8,192 or 5,120 channels of 16; columns of a convolution of 4 taps
    "falcon_mamba_7b": (0, 64 * (8192 * 16 * 4 + 3 * 8192 * 2)),
    "mamba_2_8b": (0, 64 * (5120 * 16 * 4 + 3 * 5120 * 2)),
    # attention and Mamba-2 side by side in 36 layers
    "falcon_h1_0_5b": (36 * 2 * 2 * 64 * 2, 36 * (24 * 64 * 128 * 4 + 3 * (24 * 64 + 2 * 128) * 2)),
    "lfm2_1_2b": (6 * 2 * 8 * 64 * 2, 10 * 2 * 2048 * 2),
}


@pytest.fixture(autouse=True)
def without_kinds_of_other_tests(monkeypatch):
    """Messages list the kinds that there are."""
    for spec in [spec for spec in KINDS if not spec.__module__.startswith("hybrid_jax.")]:
        monkeypatch.delitem(KINDS, spec)


def test_every_named_model_has_its_numbers_here():
    assert names() == sorted(BYTES)


@pytest.mark.parametrize("name", BYTES)
def test_bytes_of_a_token_and_a_checkpoint(name):
    costs = load_spec(name).costs
    assert (costs.kv_bytes, costs.checkpoint_bytes) == BYTES[name]


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("jamba_1_5_mini", 980),
        ("nemotron_h_8b", 6234),
        ("paper_7b_real", 6234),
        ("qwen3_next_80b", 3144),
        ("paper_7b", 408.75),
        ("llama_3_1_8b", 0),
        ("codestral_mamba_7b", None),  # no KV
    ],
)
def test_tokens_whose_kv_takes_as_much_as_a_checkpoint(name, tokens):
    costs = load_spec(name).costs
    found = costs.checkpoint_bytes / costs.kv_bytes if costs.kv_bytes else None
    assert found == tokens


def test_the_papers_model_takes_the_bytes_that_its_authors_count():
    costs = load_spec("paper_7b").costs
    assert (costs.kv_bytes, costs.checkpoint_bytes) == (65_536, 26_787_840)


@pytest.mark.parametrize("length", [1, 1_000, 32_768])
def test_the_papers_model_takes_the_flops_of_its_table(length):
    L, D, N = length, 4096, 128
    attention, mlp = 8 * L * D**2 + 4 * L**2 * D, 16 * L * D**2
    ssm = 12 * L * D**2 + 16 * L * D * N + 10 * L * D
    assert load_spec("paper_7b").costs.flops(L) == 4 * attention + 28 * mlp + 24 * ssm


def test_the_papers_flops_after_a_cached_prefix_are_what_is_left():
    costs = paper_costs(width=8, state_size=4, attention=1, ssm=2, mlp=3)
    assert costs.flops(10, start=4) == costs.flops(10) - costs.flops(4)


# Active weights of each kind of block, and the FLOPs beside them, worked out from the published sizes.
def test_flops_of_nemotron_h():
    D, inner, groups = 4096, 8192, 2 * 8 * 128
    attention = D * (2 * 32 * 128 + 2 * 8 * 128)  # q and out, k and v
    in_proj = D * (2 * inner + groups + 128)  # z and x, B and C, dt
    convolution = (inner + groups) * 5  # 4 taps and a bias
    mamba = in_proj + convolution + inner * D + 3 * 128 + inner  # A, D, dt bias; the norm
    weights = 4 * attention + 24 * mamba + 24 * 2 * D * 21504
    costs = load_spec("nemotron_h_8b").costs
    assert costs.flops_per_token == 2 * weights + 24 * 6 * inner * 128
    assert costs.flops_per_key == 4 * 4 * 32 * 128
    assert costs.flops(3) == 3 * costs.flops_per_token + 6 * costs.flops_per_key


def test_flops_of_jamba_count_the_experts_in_use_alone():
    D, inner, rank, state = 4096, 8192, 256, 16
    attention = D * (2 * 32 * 128 + 2 * 8 * 128)
    mamba = 3 * D * inner + inner * (rank + 2 * state) + (rank + 1) * inner  # in and out; x; dt
    mamba += inner * 5 + inner * (state + 1)  # convolution; A and D
    mamba += rank + 2 * state  # norms of step sizes, B and C
    expert = 3 * D * 14336
    weights = 4 * attention + 28 * mamba + 16 * expert + 16 * (2 * expert + 16 * D)
    costs = load_spec("jamba_1_5_mini").costs
    assert costs.flops_per_token == 2 * weights + 28 * 6 * inner * state


def test_flops_of_qwen3_next():
    D, key, value = 2048, 16 * 128, 32 * 128
    attention = D * (3 * 16 * 256 + 2 * 2 * 256) + 2 * 256  # q, its gate, out; k, v; two norms
    delta = D * (2 * key + 2 * value + 2 * 32) + value * D  # q, k, v, z, two gates a head; out
    delta += 4 * (2 * key + value) + 2 * 32 + 128  # convolution; A, dt bias; the norm
    experts = (
        11 * 3 * D * 512 + 512 * D + D
    )  # ten and the shared one; the router; the shared one's gate
    weights = 12 * attention + 36 * delta + 48 * experts
    costs = load_spec("qwen3_next_80b").costs
    assert costs.flops_per_token == 2 * weights + 36 * 8 * 32 * 128 * 128


def test_flops_of_a_transformer():
    weights = 32 * (4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 14336)
    costs = load_spec("llama_3_1_8b").costs
    assert costs.flops_per_token == 2 * weights
    assert costs.flops(100) == 200 * weights + 32 * 4 * 4096 * 5050


def test_a_cut_in_half_of_a_hybrid():
    """FLOPs as `costs.prefill_flops` counts them; bytes of what is cached, each group once."""
    config = load_known("nemotron_h_8b")
    plain = load_spec("nemotron_h_8b").costs
    for group in (1, 2):
        spec = load_spec("nemotron_h_8b", cut=26, kv_group=group, state_group=group)
        changed = with_cut(config, 26, kv_group=group, state_group=group)
        assert spec.costs.flops(8191) == pytest.approx(prefill_flops(changed, 8191))
        assert spec.decode.flops(8191) == pytest.approx(prefill_flops(changed, 8191, whole=True))
        # Of 4 attention layers and of 24 recurrent ones, half are after the cut.
        assert spec.costs.kv_bytes == plain.kv_bytes * (2 + 2 // group) // 4
        assert spec.costs.checkpoint_bytes == plain.checkpoint_bytes * (12 + 12 // group) // 24
        # What a decode step reads is the same.
        assert spec.decode.kv_bytes == plain.kv_bytes
        assert spec.decode.checkpoint_bytes == plain.checkpoint_bytes
    saved = 1 - spec.costs.flops(8191) / plain.flops(8191)
    assert saved == pytest.approx(0.466, abs=2e-3)


def test_a_cut_needs_layers_one_by_one():
    with pytest.raises(
        ValueError, match="a cut and its groups need a model whose layers .* got 'paper_7b'"
    ):
        load_spec("paper_7b", cut=4)
    with pytest.raises(ValueError, match="cut must be at least 1 and below .*, 32, got 40"):
        load_spec("llama_3_1_8b", cut=40)
    with pytest.raises(ValueError, match="cut must be below the number of layers, 32, got 32"):
        load_spec("llama_3_1_8b", cut=32)


def test_every_named_model_says_what_it_is():
    assert all(len(load_spec(name).about) > 20 for name in names())


def test_the_named_models_are_installed_with_the_package(root):
    package = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]
    globs = package["package-data"]["hybrid_jax"]
    installed = {path for glob in globs for path in (root / "hybrid_jax").glob(glob)}
    assert {*FOLDER.glob("*.toml"), *KNOWN.glob("*/config.json")} <= installed


# --- files ----------------------------------------------------------------------------------------


def test_a_file_names_a_model_of_its_own(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(
        "width = 8\nkv_item_bytes = 1\nstate_item_bytes = 2\n"
        "[[blocks]]\ncount = 3\nattention = { num_heads = 2, num_kv_heads = 1, head_dim = 4 }\n"
        "[[blocks]]\nmamba1 = { inner_size = 16, state_size = 2, dt_rank = 1 }\n"
    )
    spec = load_spec(str(path))
    assert (spec.name, spec.about) == ("small", "")
    assert (spec.costs.kv_bytes, spec.costs.checkpoint_bytes) == (3 * 2 * 4, 16 * 2 * 2 + 3 * 16)


@pytest.mark.parametrize("name", ["gpt_9", "nowhere.toml"])
def test_an_unknown_name_is_an_error_with_the_known_ones(name):
    known = ", ".join(names())
    with pytest.raises(
        ValueError,
        match=re.escape(f"model spec: no model {name!r}; known are {known}, or the path"),
    ):
        load_spec(name)


@pytest.mark.parametrize(
    ("content", "reason"), [(b"width = ", "Invalid value"), (b"\xff", "can't decode byte 0xff")]
)
def test_a_file_that_is_no_toml_is_an_error_that_names_it(tmp_path, content, reason):
    path = tmp_path / "broken.toml"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"^model spec broken\.toml: .*" + reason):
        load_spec(str(path))


BLOCKS = "attention, mamba1, mamba2, gated_delta, short_conv, mlp, moe"
ATTENTION = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 4}
PAPER = {"width": 8, "state_size": 4, "attention": 1, "ssm": 2, "mlp": 3}
COUNTS = "must be a whole number of at least"


def stack(**changes):
    return {"width": 8, "blocks": [{"attention": ATTENTION}]} | changes


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (stack(depth=3), ": unknown key 'depth'; known are about, blocks, kv_item_bytes, state_item_bytes, width"),
        ({"paper": PAPER, "width": 8}, ": unknown key 'width'; known are about, paper"),
        ({"width": 8}, ": must have the key 'blocks'"),
        ({"blocks": []}, ": must have the key 'width'"),
        (stack(width=0), f": width {COUNTS} 1, got 0"),
        (stack(width="wide"), f": width {COUNTS} 1, got 'wide'"),
        (stack(kv_item_bytes=0.5), f": kv_item_bytes {COUNTS} 1, got 0.5"),
        (stack(state_item_bytes=-4), f": state_item_bytes {COUNTS} 1, got -4"),
        (stack(blocks=5), ": blocks must be a list of tables, got 5"),
        (stack(blocks=[5]), ": blocks must be a list of tables, got [5]"),
        (stack(blocks=[{"count": 2}]), f": a block is one of {BLOCKS}, got []"),
        (
            stack(blocks=[{"mamba3": {}}]),
            f": a block is one of {BLOCKS}, got ['mamba3']",
        ),
        (
            stack(blocks=[{"mlp": {"width": 4}, "attention": ATTENTION}]),
            f": a block is one of {BLOCKS}, got ['attention', 'mlp']",
        ),
        (stack(blocks=[{"count": 0, "attention": ATTENTION}]), f": count {COUNTS} 1, got 0"),
        (stack(blocks=[{"count": "4", "attention": ATTENTION}]), f": count {COUNTS} 1, got '4'"),
        (stack(blocks=[{"attention": 5}]), ": attention must be a table, got 5"),
        (
            stack(blocks=[{"mlp": {"width": 4, "depth": 1}}]),
            ": mlp: unknown key 'depth'; known are bias, kind, width",
        ),
        (
            stack(blocks=[{"attention": ATTENTION | {"num_heads": 1.5}}]),
            f": attention: num_heads {COUNTS} 0, got 1.5",
        ),
        (
            stack(blocks=[{"attention": {"num_heads": 2, "num_kv_heads": 1}}]),
            ": attention: Attention.__init__() missing 1 required keyword-only argument: 'head_dim'",
        ),
        (
            stack(blocks=[{"attention": ATTENTION | {"num_kv_heads": 3}}]),
            ": attention: Attention: num_heads must be a multiple of num_kv_heads, got 2 and 3",
        ),
        (
            stack(blocks=[{"mlp": {"width": 4}}]),
            ": needs an attention or a recurrent block to cache, got none",
        ),
        ({"paper": 5}, ": paper must be a table, got 5"),
        (
            {"paper": PAPER | {"layers": 2}},
            ": paper: unknown key 'layers'; known are attention, mlp, ssm, state_size, width",
        ),
        ({"paper": PAPER | {"ssm": -1}}, f": paper: ssm {COUNTS} 0, got -1"),
        ({"paper": PAPER | {"width": 0}}, f": paper: width {COUNTS} 1, got 0"),
        ({"paper": {"width": 8}}, f": paper: state_size {COUNTS} 1, got None"),
        (
            {"paper": PAPER | {"ssm": 0, "attention": 0}},
            ": needs an attention or a recurrent block to cache, got none",
        ),
    ],
)  # fmt: skip
def test_a_bad_entry_is_named_with_its_value(entry, reason):
    with pytest.raises(ValueError) as error:
        parse_spec(entry, "mine")
    assert str(error.value) == f"model spec mine{reason}"


@pytest.mark.parametrize("name", ["hybrid_7b", "qwen3_next_80b", "jamba_1_5_mini"])
def test_narrow_checkpoints_are_those_of_an_engine(name):
    engine = EngineConfig(dtype="bfloat16", cache=CacheConfig(checkpoints="int8"))
    form = make_geometry(load_known(name), engine).narrow
    assert load_spec(name).narrow_bytes == 4 * sum(map(sum, form.parts))


def test_a_paper_says_nothing_of_narrow_checkpoints():
    assert load_spec("paper_7b").narrow_bytes == 0
