"""The engine's steps on Pallas kernels, interpreted here, against the same by XLA; and their names on a GPU."""

import math
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from hybrid_jax.config import (
    PALLAS,
    XLA,
    EngineConfig,
    Layer,
    ModelConfig,
    SpeculationConfig,
    with_cut,
)
from hybrid_jax.config.sampling_params import SamplingParams
from hybrid_jax.engine.kernel_choice import why_unsupported
from hybrid_jax.engine.steps.verify import Verify
from hybrid_jax.geometry import make_geometry
from hybrid_jax.products import kernels as products
from hybrid_jax.schedule.bucket import DecodeBucket
from hybrid_jax.schedule.request import Request
from hybrid_jax.sizing.room import left_to_xla
from pallas_kernels.row_product import plan as row_plan
from pallas_kernels.ssd_window import kernel as ssd_window_kernel
from tests.drawing import EVERYTHING, left_to_all
from tests.engine.on_kernels import SMALL, engine_of, engine_on, outputs, requests, step_and_specs
from tests.exactness.engines import one_shape
from tests.exactness.jobs import Job, Run, drive
from tests.exactness.planted import Planted, planting, with_mistakes
from tests.exactness.speculation_matrix import Maker, with_drafter
from tests.kernels.lowered import kernels_in
from tests.tiny_models import VOCAB, redrawn, tiny_model

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "bamba",
        "lfm2",
        "qwen3_next",
        "jamba",
        "with_cut_delta",
        *(pytest.param(name, marks=left_to_all) for name in ("windowed", "granite")),
    ],
)
@left_to_all("bamba", "lfm2", "jamba", "with_cut_delta")
def test_tokens_are_those_of_xla(name):
    room = {"memory": 192 << 10} if name == "with_cut_delta" else {}
    with one_shape(16):
        got, hits = outputs(engine_on("pallas", name, **room), adjusted=EVERYTHING)
        want, same_hits = outputs(engine_on("xla", name, **room), adjusted=EVERYTHING)
    assert got == want
    assert hits == same_hits > 0
    assert [len(tokens) for tokens in got] == [20] * (5 + EVERYTHING)


def sharing(name: str) -> ModelConfig:
    """Models whose layers after the cut share.

    "two_groups": of Mamba-2 layers that share a state; the first of them stands beside attention. "few_layers": one of
    Mamba-2, and after the cut two of attention beside Mamba-2, which share both.
    """
    plain = tiny_model("with_cut")[0].without_cut
    own, near = plain.layers[4], plain.layers[5]
    (block, *rest) = own.blocks
    beside = replace(block, parts=(*block.parts, *near.mixers))
    beside = Layer(blocks=(beside, *rest))
    if name == "few_layers":
        return with_cut(replace(plain, layers=(own, beside, beside)), 1, kv_group=2, state_group=2)
    layers = (*plain.layers[:3], beside, own, own, own, near)
    return with_cut(replace(plain, layers=layers), 3, state_group=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "few_layers",
        pytest.param("with_cut", marks=left_to_all),
        pytest.param("two_groups", marks=left_to_all),
    ],
)
def test_tokens_are_those_of_xla_where_layers_after_a_cut_share(name):
    """Attention layers share keys and values, and Mamba-2 layers a state; one prompt goes through all layers."""
    if name == "with_cut":
        config, params = tiny_model(name)
    else:
        config = sharing(name)
        params = redrawn(config, seed=0)
    assert config.state_group == 2
    found = {}
    for kernels in ("pallas", "xla"):
        with one_shape(16):
            engine = engine_of(kernels, config, params, memory=384 << 10)
            got = outputs(engine, adjusted=False)
            asked = SamplingParams(temperature=0.0, prompt_logprobs=1)
            last = replace(requests()[2], request_id="scored", params=asked, max_tokens=4)
            engine.add(last)
            while engine.has_work:
                engine.step()
        scores = [entry.logprob for entry in last.output.prompt_logprobs[1:]]
        found[kernels] = (*got, last.output.token_ids), np.array(scores)
    assert found["pallas"][0] == found["xla"][0] and found["xla"][0][1] > 0
    np.testing.assert_allclose(found["pallas"][1], found["xla"][1], atol=1e-4)


@pytest.mark.slow
def test_tokens_are_those_of_xla_where_products_are_split():
    """Products in parts that sum in the kernels, which no tiny model has by itself; those of a lone row too."""

    def many(rows: int, inner: int, columns: int, num_sms: int) -> int:
        return math.gcd(inner, 4)

    of_a_row = mock.patch.multiple(row_plan, BLOCK_INNER=8, LEAST=8)
    with mock.patch.object(products, "num_parts", side_effect=many) as split, of_a_row:
        got, _ = outputs(engine_on("pallas", "bamba"), adjusted=False)
        assert row_plan.num_parts(32, 64, PALLAS.chip.num_sms) == 4
    assert split.call_count > 10
    assert got == outputs(engine_on("xla", "bamba"), adjusted=False)[0]


@pytest.mark.slow
@left_to_all
def test_bfloat16_runs_and_a_stream_repeats():
    first, hits = outputs(engine_on("pallas", "mamba2", "bfloat16"))
    again, _ = outputs(engine_on("pallas", "mamba2", "bfloat16"))
    assert first == again and hits > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bamba", pytest.param("with_cut", marks=left_to_all)])
def test_exact_mode_gives_the_same_bits_cold_and_from_the_cache(name):
    settings = {"grain": 8, "max_rows": 2, "prefill_tokens": 16, "memory": 192 << 10}
    engine = engine_on("pallas", name, exact=True, **settings)
    prompt = np.random.default_rng(1).integers(0, VOCAB, 21).tolist()
    runs = []
    for i in range(2):
        params = SamplingParams(temperature=0.0, logprobs=2)
        runs.append(Request(request_id=str(i), prompt=prompt, params=params, seed=0, max_tokens=12))
        engine.add(runs[-1])
        while engine.has_work:
            engine.step()
    cold, hit = runs
    assert cold.hit.num_tokens == 0 < hit.hit.num_tokens
    assert (
        cold.output.token_ids == hit.output.token_ids
        and cold.output.logprobs == hit.output.logprobs
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, tree",
    [
        ("mamba2", None),
        pytest.param("bamba", None, marks=left_to_all),
        pytest.param("jamba", (0, 0, 2, 3), marks=left_to_all),
        pytest.param("qwen3_next", (0, 0, 2, 3), marks=left_to_all),
        ("bamba", (0, 0, 2, 3)),
        pytest.param("with_cut", (0, 0, 2, 3), marks=left_to_all),
    ],
)
@left_to_all("mamba2")
def test_windows_of_which_some_tokens_stay_give_plain_tokens(name, tree):
    rng, planted = np.random.default_rng(1), Planted()
    jobs = few_jobs()
    with one_shape(16), planting(planted):
        want = drive(engine_on("xla", name), jobs).outputs
        for job, output in zip(jobs, want, strict=True):
            planted.outputs[job.prompt] = with_mistakes(output, rng, 0.3)
        speculation = SpeculationConfig(num_tokens=3, tree=tree, adaptive=False)
        run = judged_on_pallas(*tiny_model(name), speculation, jobs)
    assert run.outputs == want
    assert {accepted for r in run.requests for _, accepted in r.course.drafts.windows} == {
        0,
        1,
        2,
        3,
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, method, tree",
    [
        ("jamba", "draft", None),
        pytest.param("bamba", "draft", (0, 0, 2, 3), marks=left_to_all),
        pytest.param("qwen3_next", "draft", None, marks=left_to_all),
        pytest.param("parallel", "mtp", None, marks=left_to_all),
        pytest.param("parallel", "mtp", (0, 0, 2, 3), marks=left_to_all),
    ],
)
@left_to_all("jamba")
def test_layers_draft_on_kernels_what_they_draft_by_xla(name, method, tree):
    """The same drafts are accepted. A second model like the first is always right along a chain."""
    settings = SpeculationConfig(method=method, num_tokens=3, tree=tree, adaptive=False)
    given, jobs = with_drafter(Maker(name, settings)), few_jobs()
    with one_shape(16):
        want = drive(engine_of("xla", *given, speculation=settings, memory=512 << 10), jobs)
        run = judged_on_pallas(*given, settings, jobs)
    assert run.outputs == want.outputs
    windows = [request.course.drafts.windows for request in run.requests]
    assert windows == [request.course.drafts.windows for request in want.requests]
    accepted = sum(windows, Counter())
    if method == "draft" and tree is None:
        assert not [drafted for drafted, right in accepted if right < drafted]
    else:
        assert len({right for _, right in accepted}) > 1


def few_jobs() -> list[Job]:
    rng = np.random.default_rng(1)
    return [
        Job(prompt=tuple(rng.integers(0, VOCAB, n).tolist()), logprobs=None) for n in (5, 17, 30)
    ]


def judged_on_pallas(
    config: ModelConfig, params: dict, speculation: SpeculationConfig, jobs: list[Job]
) -> Run:
    """Only windows and what drafts them run on Pallas kernels. XLA computes the prompts, into the same state."""

    def static(step: Verify, bucket: DecodeBucket) -> dict:
        return {"model": replace(step.model, backend=PALLAS), "max_steps": bucket.steps}

    with mock.patch.object(Verify, "static", static):
        engine = engine_of("xla", config, params, speculation=speculation, memory=512 << 10)
        run = drive(engine, jobs)
    assert engine.stats()["folds_in_place"] > 0
    return run


def test_windows_and_rings_that_are_too_long_for_a_kernel_are_said_at_once():
    engine = EngineConfig(**SMALL | {"grain": 64, "prefill_tokens": 64})
    config, _ = tiny_model("bamba")
    geometry = make_geometry(config, engine)

    def reason(tokens: int) -> str | None:
        with mock.patch.object(EngineConfig, "decode_tokens", tokens):
            return why_unsupported(config, geometry, engine)

    assert reason(1) is reason(4) is reason(32) is None
    assert reason(33) == "a window must have at most 32 tokens for 'pallas', got 33; use 'xla'"
    with mock.patch.object(ssd_window_kernel, "MAX_SLOTS", 64 + 3):
        assert reason(4) is None
        assert reason(5) == "a ring must have at most 67 slots for 'pallas', got 68; use 'xla'"
    with mock.patch.object(EngineConfig, "decode_tokens", 33):
        with pytest.raises(NotImplementedError, match="kernels='pallas': a window .*, got 33"):
            engine_on("pallas", "bamba", grain=64, prefill_tokens=64, memory=1 << 20)


def test_too_many_experts_for_a_kernel_are_left_to_xla():
    engine = EngineConfig(**SMALL)
    config, _ = tiny_model("granite")
    geometry = make_geometry(config, engine)
    attention, experts = config.layers[1].parts
    many = config.layers[1].with_parts((attention, replace(experts, num_experts=1025)))
    config = replace(config, layers=(config.layers[0], many))
    reason = "there must be at most 1024 experts for 'pallas', got 1025; use 'xla'"
    assert why_unsupported(config, geometry, engine) is None
    assert left_to_xla(config, engine, PALLAS) == {"experts": reason}
    assert left_to_xla(config, engine, XLA) == {}


BETWEEN = {"gated_rmsnorm", "residual_rmsnorm", "append_kv", "paged_attention"}
WINDOW = BETWEEN | {"causal_conv_window", "ssd_window"}
KERNELS = {
    "decode": WINDOW | {"ssd_fold", "store_columns", "sample_tokens"},
    "lone": WINDOW | {"ssd_fold", "store_columns", "sample_tokens", "row_product"},
    "prefill": {
        *("causal_conv", "ssd_scan", "store_tail", *BETWEEN),
        *("copy_frames", "read_frames", "sample_tokens"),
    },
    "exact": WINDOW | {"ssd_fold", "store_columns", "copy_frames", "read_frames", "sample_tokens"},
}


# Beside them, those of models with other kinds of layers.
OF_KINDS = {
    "with_cut": {
        "decode": {"causal_conv_window", "ssd_window", "ssd_window_scores"},
        "prefill": {"causal_conv", "ssd_scan", "store_tail"},
    },
    "qwen3_next": {
        "decode": {"causal_conv_window", "gated_delta_window", "ssd_fold", "store_columns"},
        "prefill": {"causal_conv", "gated_delta_solve", "gated_delta_scan", "store_tail"},
    },
    "lfm2": {
        "decode": {"short_conv_window", "store_columns"},
        "prefill": {"short_conv", "store_short_tail"},
    },
    "jamba": {
        "decode": {"short_conv_window", "scan_inputs", "selective_window", "store_states"},
        "prefill": {"short_conv", "scan_inputs", "selective_scan", "store_short_tail"},
    },
}
EXPERTS = {"expert_visits", "expert_up", "expert_down"}  # of a model that has them
# Kernels that need shapes these steps do not have.
ELSEWHERE = {"ssd_scan_segments", "ssd_scan_starts", "paged_attention_join", "move_words"}


def test_no_kernel_exists_unused():
    files = (ROOT / "pallas_kernels").rglob("*.py")
    names = {name for file in files for name in re.findall(r'name="(\w+)",', file.read_text())}
    found = [own for steps in (KERNELS, *OF_KINDS.values()) for own in steps.values()]
    assert set().union(*found) | EXPERTS | ELSEWHERE == names


@pytest.mark.parametrize("kind", sorted(KERNELS))
def test_on_a_gpu_the_steps_call_their_kernels(kind):
    step, specs = step_and_specs(kind)
    assert set(kernels_in(step, *specs)) >= KERNELS[kind]
    assert kernels_in(*_with_specs(step_and_specs(kind, "xla"))) == []


@pytest.mark.parametrize("kind", ["decode", "prefill"])
@pytest.mark.parametrize("name", OF_KINDS)
def test_on_a_gpu_other_kinds_of_layers_call_their_kernels(name, kind):
    step, specs = step_and_specs(kind, name=name)
    assert set(kernels_in(step, *specs)) >= OF_KINDS[name][kind]
    assert kernels_in(*_with_specs(step_and_specs(kind, "xla", name))) == []


@pytest.mark.parametrize("kind", ["decode", "lone", "prefill"])
def test_on_a_gpu_a_layer_with_experts_calls_each_of_their_kernels_once(kind):
    step, specs = step_and_specs(kind, name="granite")
    found = Counter(name for name in kernels_in(step, *specs) if name in EXPERTS)
    once = dict.fromkeys(EXPERTS - ({"expert_visits"} if kind == "lone" else set()), 2)
    assert found == Counter(once)
    assert kernels_in(*_with_specs(step_and_specs(kind, "xla", "granite"))) == []


def _with_specs(step_and_its_specs):
    step, specs = step_and_its_specs
    return step, *specs
