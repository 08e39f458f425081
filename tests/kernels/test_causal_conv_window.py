"""The convolution of windows: against its definition, the engine's layer, and what must stay as it was."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hybrid_jax.config import Mamba2
from hybrid_jax.layers.mamba2 import MAMBA2
from pallas_kernels.causal_conv.api import WINDOWS, causal_conv
from pallas_kernels.causal_conv.kernel import Config, causal_conv_window_pallas
from pallas_kernels.causal_conv.reference import ConvWindow
from pallas_kernels.operands import floats, stored
from tests.kernels.by_name import causal_conv_window
from tests.kernels.cases.causal_conv import (
    SMALL,
    WINDOW_CASES,
    Case,
    WindowCase,
    make_inputs,
    make_window_inputs,
)
from tests.kernels.compare import assert_same_bits, relative_error
from tests.kernels.conv_windows import STATIC, TOLERANCE, assert_close, new_tokens
from tests.kernels.lowered import kernels_in

FAST = sorted(set(WINDOWS) - {"reference"})
OUTPUTS = ("conv", "xB", "dt", "C", "scores")
CASE = {case.name: case for case in WINDOW_CASES}
VERIFY = CASE["verify"]
window = functools.partial(jax.jit, static_argnames=STATIC)(causal_conv_window)


def run(case: WindowCase, inputs: dict, implementation) -> dict:
    static = {"layout": case.layout, "layer": case.layer, "implementation": implementation}
    # Arrays of NumPy, because what a test does with those of jax is compiled, operation by operation.
    return dict(zip(OUTPUTS, map(np.asarray, window(**inputs, **static)), strict=True))


def written(case: WindowCase, inputs: dict) -> dict:
    """Which entries [L, B', entry] of each ring a call may change."""
    new, history = new_tokens(case), case.layout.history
    live = new.any(1)
    out = {name: np.zeros(inputs[name].shape[:3], bool) for name in ("conv", "xB", "dt")}
    for b in range(case.rows):
        for t in np.flatnonzero(new[b]):
            out["xB"][case.layer, b, case.starts[b] + t] = True
            out["dt"][case.layer, b, case.starts[b] + t] = True
        if live[b]:
            behind = slice(history + max(case.first[b], 0), history + case.tokens)
            out["conv"][case.layer, b, behind] = True
            if case.num_valid[b] == case.tokens and case.tree is None:
                out["conv"][case.layer, b, :history] = True
    return out


def poisoned(case: WindowCase, inputs: dict) -> dict:
    """The same call with NaN in everything that it must not read."""
    new, history, layout = new_tokens(case), case.layout.history, case.layout
    projected = np.array(inputs["projected"].astype(jnp.float32))
    projected[~new] = np.nan
    projected[..., : layout.conv_start] = np.nan
    inputs = inputs | {"projected": jnp.asarray(projected, inputs["projected"].dtype)}
    keep = {name: np.zeros(inputs[name].shape[:3], bool) for name in ("conv", "xB", "dt")}
    for b in np.flatnonzero(new.any(1)):
        held = max(case.first[b], 0)
        keep["conv"][case.layer, b, : history + held] = True
        keep["xB"][case.layer, b, : case.starts[b] + held] = True
    for name, mask in keep.items():
        ring = floats(inputs[name])
        if name == "xB":
            mask = mask[..., None] & (np.arange(layout.record_size) >= layout.inner_size)
        else:
            mask = mask[..., None]
        inputs[name] = stored(jnp.where(mask, ring, jnp.nan), inputs[name].dtype)
    return inputs


def test_the_reference_is_the_definition():
    """Row by row and token by token, in float64."""
    case, layout = replace(VERIFY, spare_columns=0), VERIFY.layout
    inputs = make_window_inputs(case)
    got = run(case, inputs, "reference")
    wide = {name: np.asarray(floats(inputs[name]), np.float64) for name in ("conv", "xB", "dt")}
    conv, xB, dt = (wide[name][case.layer] for name in ("conv", "xB", "dt"))
    weight, bias, dt_bias = (
        np.asarray(inputs[n], np.float64) for n in ("weight", "bias", "dt_bias")
    )
    raw, own_dt = layout.split(np.asarray(inputs["projected"], np.float64))
    for b in range(case.rows):
        columns = list(conv[b, :3])
        for t in range(case.num_valid[b]):
            slot = case.starts[b] + t
            if t < case.first[b]:
                columns.append(conv[b, 3 + t])
                continue
            columns.append(np.asarray(raw[b, t]))
            y = (np.stack(columns[-4:]) * weight).sum(0) + bias
            y = y / (1 + np.exp(-y))
            xB[b, slot], C = y[: layout.record_size], y[layout.record_size :]
            dt[b, slot] = np.log1p(np.exp(own_dt[b, t] + dt_bias))
            assert relative_error(got["C"][b, t], C) < 1e-6
            B = xB[b, : slot + 1, layout.inner_size :].reshape(-1, 2, 16)
            scores = np.einsum("gr,sgr->gs", C.reshape(2, 16), B)
            assert relative_error(got["scores"][b, t, :, : slot + 1], scores) < 1e-6
            assert not np.asarray(got["scores"])[b, t, :, slot + 1 :].any()
        conv[b, 3:] = columns[3:] + [np.zeros_like(columns[0])] * (case.tokens - len(columns) + 3)
        if case.num_valid[b] == case.tokens and case.first[b] < case.tokens:
            conv[b, :3] = columns[-3:]
        elif case.num_valid[b] <= case.first[b]:
            conv[b] = wide["conv"][case.layer, b] = floats(inputs["conv"])[case.layer, b]
        rows = {"conv": conv, "xB": xB, "dt": dt}
        for name, want in rows.items():
            assert relative_error(floats(got[name])[case.layer, b], want[b]) < 1e-6, name


@pytest.mark.parametrize("implementation", FAST)
class TestImplementation:
    @pytest.mark.parametrize("case", WINDOW_CASES, ids=lambda case: case.name)
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_equals_the_reference_and_changes_nothing_else(self, implementation, case, dtype):
        inputs = make_window_inputs(case, dtype=dtype)
        want, got = run(case, inputs, "reference"), run(case, inputs, implementation)
        for name, mask in written(case, inputs).items():
            for out in (want, got):
                assert_same_bits(np.asarray(out[name])[~mask], np.asarray(inputs[name])[~mask])
            assert_close(got[name][mask], want[name][mask], name)
        assert_same_bits(got["conv"], want["conv"])
        for name in ("C", "scores"):
            assert_close(got[name], want[name], name)
            assert not np.asarray(got[name])[~new_tokens(case)].any()

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_a_projection_in_parts_counts_as_their_sum(self, implementation, dtype):
        inputs = make_window_inputs(VERIFY, dtype=dtype)
        parts = [make_window_inputs(VERIFY, seed=seed)["projected"] for seed in range(3)]
        parts = jnp.stack(parts).astype(jnp.float32)
        want = run(VERIFY, inputs | {"projected": parts.sum(0).astype(dtype)}, "reference")
        absent = ~new_tokens(VERIFY)[None, ..., None]
        got = run(VERIFY, inputs | {"projected": jnp.where(absent, jnp.nan, parts)}, implementation)
        for name in OUTPUTS:
            assert_close(got[name], want[name], name)
        got = run(VERIFY, inputs | {"projected": parts[1:]}, implementation)
        assert relative_error(floats(got["C"]), floats(want["C"])) > 0.1

    @pytest.mark.parametrize("case", WINDOW_CASES, ids=lambda case: case.name)
    def test_what_must_not_be_read_changes_no_bit(self, implementation, case):
        inputs = make_window_inputs(case)
        want = run(case, inputs, implementation)
        spoiled = poisoned(case, inputs)
        got = run(case, spoiled, implementation)
        for name, mask in written(case, inputs).items():
            assert_same_bits(np.asarray(got[name])[mask], np.asarray(want[name])[mask])
            assert_same_bits(np.asarray(got[name])[~mask], np.asarray(spoiled[name])[~mask])
        for name in ("C", "scores"):
            assert_same_bits(got[name], want[name])

    def test_rings_of_floats_are_rings_of_bits(self, implementation):
        inputs = make_window_inputs(VERIFY, dtype="bfloat16")
        want = run(VERIFY, inputs, implementation)
        as_floats = {name: floats(inputs[name]) for name in ("conv", "xB")}
        got = run(VERIFY, inputs | as_floats, implementation)
        for name in OUTPUTS:
            assert_same_bits(got[name], floats(want[name]))

    def test_swapped_operands_exceed_the_tolerance(self, implementation):
        inputs = make_window_inputs(VERIFY)
        want = run(VERIFY, inputs, "reference")
        limit = 100 * TOLERANCE["float32"]
        for change, names in (
            ({"weight": inputs["weight"][::-1]}, ("xB", "C", "scores")),
            ({"bias": -inputs["bias"]}, ("xB", "C", "scores")),
            ({"dt_bias": inputs["dt_bias"][::-1]}, ("dt",)),
            ({"starts": inputs["starts"] - inputs["first"]}, ("xB", "dt", "scores")),
            ({"first": jnp.zeros_like(inputs["first"])}, ("conv", "xB", "dt", "C")),
        ):
            got = run(VERIFY, inputs | change, implementation)
            for name in names:
                assert relative_error(floats(got[name]), floats(want[name])) > limit, name

    @pytest.mark.parametrize("tokens", [1, 4])
    def test_windows_give_the_engines_records_of_the_whole_sequence(self, implementation, tokens):
        """A sequence of 24 tokens, `tokens` at a time, beside what the layer makes of all of it."""
        spec = Mamba2(num_heads=4, head_dim=8, state_size=16, num_groups=2)
        rng = np.random.default_rng(3)
        case = replace(CASE["decode"], tokens=tokens, layers=1, layer=0, slots=32)
        inputs = make_window_inputs(case, dtype="bfloat16")
        params = {
            "in_proj": jnp.asarray(rng.normal(size=(24, SMALL.projected_size)), jnp.bfloat16) / 5,
            "conv": inputs["weight"],
            "conv_bias": inputs["bias"],
            "dt_bias": inputs["dt_bias"],
        }
        h = jnp.asarray(rng.normal(size=(3, 24, 24)), jnp.bfloat16)

        @jax.jit
        def layer(h):
            before = floats(inputs["conv"])[0, :3, : SMALL.history]
            made = MAMBA2.tokens(params, *MAMBA2.project(params, h, spec), before, spec)
            return jnp.einsum("btd,dp->btp", h, params["in_proj"]), *made

        projected, own, columns = layer(h)
        rings = {name: inputs[name] for name in ("conv", "xB", "dt")}
        static = {"first": jnp.zeros(3, jnp.int32), "num_valid": jnp.full(3, tokens)}
        for start in range(0, 24, tokens):
            now = {"projected": projected[:, start : start + tokens], "starts": jnp.full(3, start)}
            got = run(case, inputs | rings | static | now, implementation)
            rings = {name: got[name] for name in rings}
            assert_close(got["C"], own.q[:, start : start + tokens])
        assert_close(floats(rings["xB"])[0, :3, :24], own.records["uk"])
        assert_close(rings["dt"][0, :3, :24], own.records["dt"])
        assert_same_bits(floats(rings["conv"])[0, :3, : SMALL.history], columns[:, 24:])

    def test_windows_of_which_some_tokens_stay_give_the_records_of_all_that_stay(
        self, implementation
    ):
        """A sequence of 24 tokens, of which each window has one to four. What it has after them does not stay."""
        chunk = make_inputs(Case(name="sequence", tokens=24, lengths=(24,) * 3))
        xBC, dt = causal_conv(**chunk, layout=SMALL, implementation="reference")
        case = replace(CASE["decode"], tokens=4, slots=27, layers=1)
        inputs = make_window_inputs(case) | {n: chunk[n] for n in ("weight", "bias", "dt_bias")}
        rows, history = np.arange(3)[:, None], np.arange(SMALL.history)
        conv = np.array(floats(inputs["conv"]))
        conv[0, :3, history] = np.swapaxes(chunk["history"], 0, 1)
        rng, done, ends = np.random.default_rng(4), np.zeros(3, int), set()
        while (done < 24).any():
            stay = np.minimum(rng.integers(1, 5, 3), 24 - done)
            end = np.where(stay > 0, rng.integers(stay, 5), 0)
            places = np.minimum(done[:, None] + np.arange(4), 23)
            stays = np.arange(4) < stay[:, None]
            noise = rng.normal(size=(3, 4, SMALL.projected_size))
            own = np.where(stays[..., None], np.asarray(chunk["projected"])[rows, places], noise)
            now = {
                "projected": jnp.asarray(own, jnp.float32),
                "conv": stored(jnp.asarray(conv), jnp.uint32),
                "starts": jnp.asarray(done),
                "num_valid": jnp.asarray(end),
            }
            got = run(case, inputs | now | {"moves": False}, implementation)
            inputs |= {name: got[name] for name in ("xB", "dt")}
            want = np.asarray(xBC)[rows, places, SMALL.record_size :]
            assert_close(np.asarray(got["C"])[stays], want[stays])
            conv = np.array(floats(got["conv"]))
            conv[0, :3, : SMALL.history] = conv[0, rows, stay[:, None] + history]
            ends |= set(zip(stay, end, strict=True))
            done += stay
        assert len(ends) > 8  # of the ten pairs of tokens that stay and tokens of a window
        assert_close(floats(inputs["xB"])[0, :3, :24], xBC[..., : SMALL.record_size])
        assert_close(inputs["dt"][0, :3, :24], dt)
        raw, _ = SMALL.split(chunk["projected"])
        assert_same_bits(conv[0, :3, : SMALL.history], raw[:, -SMALL.history :])

    def test_a_node_of_a_tree_is_the_end_of_its_own_chain(self, implementation):
        """Every node gives what a window over its path alone would give."""
        case = replace(CASE["tree"], first=(0,) * 3, num_valid=(7,) * 3)
        inputs = make_window_inputs(case)
        got = run(case, inputs, implementation)
        for node, bits in enumerate(case.tree):
            path = [t for t in range(case.tokens) if bits >> t & 1]
            alone = replace(case, tree=None, num_valid=(len(path),) * 3)
            padded = path + [node] * (case.tokens - len(path))
            chain = {
                "projected": inputs["projected"][:, jnp.asarray(padded)],
                "ancestors": None,
                "num_valid": jnp.full(3, len(path)),
            }
            want = run(alone, inputs | chain, "reference")
            assert_close(got["C"][:, node], want["C"][:, len(path) - 1])
            for row, start in enumerate(case.starts):
                for name in ("xB", "dt"):
                    a, b = (floats(out[name])[case.layer, row] for out in (got, want))
                    assert_close(a[start + node], b[start + len(path) - 1], name)

    def test_a_chain_as_a_tree_is_a_chain_whose_history_stays(self, implementation):
        inputs = make_window_inputs(VERIFY)
        chain = jnp.broadcast_to((1 << jnp.arange(1, 6)) - 1, (VERIFY.rows, 5))
        got = run(VERIFY, inputs | {"ancestors": chain}, implementation)
        want = run(VERIFY, inputs, implementation)
        for name in ("xB", "dt", "C", "scores"):
            assert_close(got[name], want[name], name)
        assert_same_bits(got["conv"][:, :, 3:], want["conv"][:, :, 3:])
        assert_same_bits(got["conv"][:, :, :3], inputs["conv"][:, :, :3])

    def test_a_window_that_is_decided_later_leaves_its_history(self, implementation):
        inputs = make_window_inputs(VERIFY) | {"num_valid": jnp.full(VERIFY.rows, VERIFY.tokens)}
        moved = run(VERIFY, inputs, implementation)
        got = run(VERIFY, inputs | {"moves": False}, implementation)
        for name in ("xB", "dt", "C", "scores"):
            assert_same_bits(got[name], moved[name])
        rows, layer = VERIFY.rows, VERIFY.layer
        assert_same_bits(got["conv"][:, :, 3:], moved["conv"][:, :, 3:])
        assert_same_bits(got["conv"][:, :, :3], inputs["conv"][:, :, :3])
        assert (
            floats(moved["conv"])[layer, :rows, :3] != floats(inputs["conv"])[layer, :rows, :3]
        ).any()


@pytest.mark.parametrize("config", [Config(8, 8, 1, 4), Config(8, 64, 2, 64)])
def test_blocks_of_any_size_give_the_same_rings(config):
    inputs = make_window_inputs(VERIFY)
    want = run(VERIFY, inputs, "pallas")
    call = functools.partial(causal_conv_window_pallas, layout=SMALL, layer=1, config=config)
    for name, got in zip(OUTPUTS, jax.jit(call)(ConvWindow(**inputs)), strict=True):
        if name == "scores":
            assert_close(got, want[name])
        else:
            assert_same_bits(got, want[name])


def test_none_chooses_by_platform_and_a_name_is_obeyed():
    case = CASE["decode"]
    inputs = make_window_inputs(case, dtype="bfloat16")

    def with_name(name):
        static = {"layout": case.layout, "layer": case.layer}
        return lambda inputs: causal_conv_window(**inputs, **static, implementation=name)

    for name in (None, "pallas"):
        assert kernels_in(with_name(name), inputs) == ["causal_conv_window"]
    assert kernels_in(with_name("reference"), inputs) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": 33, "slots": 64}, "at most 32 tokens for 'pallas', got 33"),
        ({"layout": replace(SMALL, state_size=257)}, "at most 256 columns for 'pallas', got 257"),
        (
            {"layout": replace(SMALL, num_heads=1026, head_dim=1)},
            "at most 1024 heads for 'pallas', got 1026",
        ),
    ],
)
def test_shapes_a_kernel_cannot_take_are_refused_by_name_and_run_by_default(change, message):
    case = replace(CASE["decode"], **change)
    inputs = make_window_inputs(case)
    call = functools.partial(causal_conv_window, layout=case.layout, layer=case.layer)
    with pytest.raises(NotImplementedError, match=message):
        call(**inputs, implementation="pallas")
    assert kernels_in(lambda inputs: call(**inputs), inputs) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"implementation": "tpu"}, "causal_conv_window: implementation .* got 'tpu'"),
        ({"projected": jnp.ones((5, 132))}, r"projected must have 3 dim.* got shape \(5, 132\)"),
        ({"projected": jnp.ones((5, 5, 131))}, r"projected .* \(5, 5, 132\), got \(5, 5, 131\)"),
        ({"projected": jnp.ones((5, 9, 132))}, r"room for 3 \+ 9 columns, got 11"),
        ({"conv": jnp.ones((2, 7, 11, 95))}, r"conv .* 96\), got \(2, 7, 11, 95\)"),
        ({"conv": jnp.ones((2, 6, 11, 96))}, r"conv .* 96\), got \(2, 6, 11, 96\)"),
        ({"xB": jnp.ones((2, 7, 36, 65))}, r"xB .* 64\), got \(2, 7, 36, 65\)"),
        ({"dt": jnp.ones((2, 7, 35, 4))}, r"dt .* \(2, 7, 36, 4\), got \(2, 7, 35, 4\)"),
        ({"dt": jnp.ones((7, 36, 4))}, r"dt must have 4 dimensions, got shape \(7, 36, 4\)"),
        ({"layer": 2}, r"layer 2 and 5 rows must lie within the rings \(2, 7\)"),
        ({"starts": jnp.ones(4, jnp.int32)}, r"starts .* \(5,\), got \(4,\)"),
        ({"first": jnp.ones(4, jnp.int32)}, r"first .* \(5,\), got \(4,\)"),
        ({"num_valid": jnp.ones(4, jnp.int32)}, r"num_valid .* \(5,\), got \(4,\)"),
        ({"ancestors": jnp.ones((5, 4), jnp.int32)}, r"ancestors .* \(5, 5\), got \(5, 4\)"),
        ({"weight": jnp.ones((3, 96))}, r"weight .* \(4, 96\), got \(3, 96\)"),
    ],
)
def test_a_wrong_argument_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        causal_conv_window(**{"layout": SMALL, "layer": 1} | make_window_inputs(VERIFY) | change)


def test_trees_have_no_more_nodes_than_bits():
    inputs = make_window_inputs(CASE["whole_ring"])
    with pytest.raises(ValueError, match="a tree must have at most 31 new tokens, got 32"):
        causal_conv_window(
            **inputs | {"ancestors": jnp.ones((4, 32), jnp.int32)}, layout=SMALL, layer=1
        )
