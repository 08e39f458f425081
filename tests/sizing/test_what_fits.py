"""What a card has for the programs of kernels, which operations are left to XLA, and how that is said."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

from hybrid_jax.config import (
    MLP,
    PALLAS,
    XLA,
    Attention,
    EngineConfig,
    GatedDelta,
    Mamba2,
    ModelConfig,
    MoE,
    residual_layer,
)
from hybrid_jax.config.backend import said_of_others
from hybrid_jax.engine.mixers.table import LAYER_STEPS
from hybrid_jax.inspection.facts import model_facts
from hybrid_jax.inspection.report import ModelReport, inspect_model
from hybrid_jax.kinds.table import recurrent_kind
from hybrid_jax.models.known import known, load_known
from hybrid_jax.sizing.devices import Device, card, cards
from hybrid_jax.sizing.room import backend_on, find_room, left_to_xla
from hybrid_jax.sizing.temporaries import kernel_step_bytes
from pallas_kernels import jax_triton
from pallas_kernels.plan import H200, cause

ENGINE = EngineConfig(dtype="bfloat16", memory=1 << 22, max_rows=2, max_model_len=256)
SMALL = Device(platform="gpu", name="small", capability="8.9", shared_bytes=16 << 10)
WANTED = (
    "a tile of experts wants at least 32,768 bytes of shared memory for 'pallas', and this GPU has "
    "16,384"
)


def model(mlp: MLP | MoE | None = None, head_dim: int = 32) -> ModelConfig:
    """Two layers of attention and an MLP."""
    attention = Attention(num_heads=8, num_kv_heads=4, head_dim=head_dim)
    layers = (residual_layer(mixers=(attention,), mlp=mlp or MLP(width=512)),) * 2
    return ModelConfig(family="llama", vocab_size=512, width=256, max_position=1024, layers=layers)


def mixture(num_experts: int = 4) -> ModelConfig:
    return model(MoE(num_experts=num_experts, top_k=2, width=64))


@pytest.mark.parametrize(
    ("name", "num_sms", "shared_bytes", "capability"),
    [
        ("h200", 132, 232_448, (9, 0)),
        ("h100", 132, 232_448, (9, 0)),
        ("b200", 148, 232_448, (10, 0)),
        ("a100", 108, 166_912, (8, 0)),
        ("l40s", 142, 101_376, (8, 9)),
        ("rtx-3090", 82, 101_376, (8, 6)),
        ("rtx-5090", 170, 101_376, (12, 0)),
        ("v100-16gb", 80, 98_304, (7, 0)),
        ("t4", 40, 65_536, (7, 5)),
    ],
)
def test_a_card_has_what_its_capability_says(name, num_sms, shared_bytes, capability):
    chip = card(name).chip
    assert (chip.num_sms, chip.shared_bytes, chip.capability) == (num_sms, shared_bytes, capability)


def test_what_is_not_known_of_a_device_is_an_h200s_and_of_a_new_capability_the_least():
    assert card("h200").chip == Device().chip == Device(platform="gpu").chip == H200
    new = Device(platform="gpu", capability="13.0").chip
    assert (new.shared_bytes, new.capability) == (101_376, (13, 0))
    assert Device(platform="gpu", capability="gfx942").chip == H200


@pytest.mark.parametrize("name", sorted(known()))
def test_no_known_card_leaves_an_operation_of_a_known_model_to_xla(name):
    config = load_known(name)
    for device in (name for name in cards() if card(name).runs_kernels):
        for dtype in ("bfloat16", "float32"):
            backend = replace(PALLAS, chip=card(device).chip)
            assert left_to_xla(config, EngineConfig(dtype=dtype), backend) == {}


def said(config: ModelConfig, device: Device, line: str = "kernels", **settings) -> str:
    """A line of what `inspect` says of a model on a device."""
    found = model_facts(config, replace(ENGINE, **settings), device)
    return ModelReport(found | {"left_out": [], "weights_problem": None}).lines()[line]


def test_inspecting_says_what_is_left_to_xla_and_why():
    found = model_facts(mixture(), ENGINE, SMALL)
    assert (found["kernels"], found["left_to_xla"]) == ("pallas", {"experts": WANTED})
    slower = "; only this is slower"
    assert said(mixture(), SMALL) == f"Pallas; XLA does experts: {WANTED}{slower}"
    assert said(mixture(), card("l40s")) == said(model(), SMALL) == "Pallas"
    assert said(mixture(), Device()) == "compiled by XLA"
    assert said(mixture(), card("h200"), kernels="xla") == "compiled by XLA"
    many = said(mixture(1025), card("h200"))
    assert many.endswith(
        f"; XLA does experts: there must be at most 1024 experts for 'pallas', got 1025{slower}"
    )


def test_several_operations_are_said_one_after_another_and_that_they_are_slower_once():
    assert said_of_others({}) == ""
    found = said_of_others({"b": "two; convert them, or use 'xla'", "a": "one; use 'xla'"})
    assert found == "; XLA does a: one; XLA does b: two; only these are slower"
    assert said_of_others({"all operations": "one; use 'xla'"}) == "; XLA does all operations: one"


@pytest.mark.parametrize(
    ("reason", "without"),
    [
        ("at most 256, got 512; use 'xla'", "at most 256, got 512"),
        ("one; two; convert them, or use 'xla'", "one; two"),
        ("one; two", "one; two"),
    ],
)
def test_a_cause_is_a_reason_without_its_advice(reason, without):
    assert cause(reason) == without


def recurrent(state_size: int = 64, other: GatedDelta | None = None) -> ModelConfig:
    """Layers of Mamba-2, and one of another kind."""
    mixer = Mamba2(num_heads=8, head_dim=64, state_size=state_size)
    mixers = (mixer, mixer, *([other] if other else []))
    layers = tuple(residual_layer(mixers=(mixer,), mlp=MLP(width=512)) for mixer in mixers)
    return ModelConfig(family="test", vocab_size=512, width=256, max_position=1024, layers=layers)


DELTA = GatedDelta(num_key_heads=4, num_value_heads=4, key_dim=32, value_dim=32)


@pytest.mark.parametrize(
    ("config", "settings", "scans"),
    [
        (recurrent(), {}, True),
        (recurrent(), {"dtype": "float32"}, False),
        (recurrent(), {"exact": True}, False),
        (recurrent(128), {}, True),
        (recurrent(1024), {"memory": 1 << 26}, False),
        (recurrent(other=DELTA), {}, False),
        (model(), {}, False),
    ],
)
def test_triton_is_said_to_scan_what_its_kernels_take_and_with_the_package_that_it_needs(
    config, settings, scans
):
    does = "with jax-triton, Triton draws tokens" + " and scans prompts" * scans
    assert said(config, card("h200"), **settings) == f"Pallas; {does}"
    assert said(config, card("b200"), **settings) == "Pallas"
    condition = "if the card is of compute capability 8.0 or more"
    anything = Device(platform="gpu")
    assert said(config, anything, **settings) == f"Pallas, {condition}; on Hopper {does}"


def test_the_host_and_the_kernels_agree_on_what_triton_scans(monkeypatch):
    monkeypatch.setattr(jax_triton, "why_unavailable", lambda: None)
    specs = {spec for name in known() for spec in load_known(name).recurrent}
    specs |= {spec for size in (16, 128, 129, 1024) for spec in recurrent(size).recurrent}
    answers = set()
    for spec in specs:
        for dtype in ("bfloat16", "float32"):
            engine = SimpleNamespace(dtype=dtype)
            by_kernels = LAYER_STEPS["pallas"][type(spec)].triton_unsupported(spec, engine)
            by_host = recurrent_kind(spec).triton_unsupported(spec, dtype)
            assert by_host == by_kernels
            answers.add(by_host is None)
    assert answers == {True, False}


@pytest.mark.parametrize(
    ("device", "line"),
    [
        (card("t4"), "7.5 (Turing), 40 multiprocessors; kernels no, FP8 pages no, Triton no"),
        (card("v100-32gb"), "7.0 (Volta), 80 multiprocessors; kernels no, FP8 pages no, Triton no"),
        (card("a100"), "8.0 (Ampere), 108 multiprocessors; kernels yes, FP8 pages no, Triton no"),
        (card("l40s"), "8.9 (Ada), 142 multiprocessors; kernels yes, FP8 pages yes, Triton no"),
        (card("h200"), "9.0 (Hopper), 132 multiprocessors; kernels yes, FP8 pages yes, Triton yes"),
        (
            card("rtx-5090"),
            "12.0 (Blackwell), 170 multiprocessors; kernels yes, FP8 pages yes, Triton no",
        ),
        (
            Device(platform="gpu", capability="8.6"),
            "8.6 (Ampere); kernels yes, FP8 pages no, Triton no",
        ),
        (Device(platform="gpu", capability="6.1"), "6.1; kernels no, FP8 pages no, Triton no"),
        (
            Device(platform="gpu"),
            "its compute capability is not known; kernels need 8.0 or more, FP8 pages 8.9 or more, Triton 9.0",
        ),
    ],
)
def test_inspecting_says_what_a_card_is_and_can_do(device, line):
    assert said(model(), device, "card") == line
    found = model_facts(model(), ENGINE, device)
    can = [found[name] for name in ("runs_kernels", "fp8_pages", "runs_triton")]
    if device.capability is None:
        assert can == [None] * 3
    else:
        assert can == [f"{what} yes" in line for what in ("kernels", "FP8 pages", "Triton")]
        assert line.startswith(found["capability"]) and found["num_sms"] == device.num_sms


def test_a_cpu_has_no_line_of_a_card():
    assert "card" not in ModelReport(inspect_model("hybrid_7b", device="cpu")).lines()


@pytest.mark.parametrize("name", ["t4", "v100-16gb", "v100-32gb"])
def test_older_cards_run_what_xla_compiles_and_no_kernels(name):
    needs = "compiled by XLA, as kernels need compute capability 8.0 or more"
    assert said(model(), card(name)) == needs
    found = r"kernels='pallas' needs a GPU of compute capability 8.0 or more .* found 7.\d \("
    with pytest.raises(NotImplementedError, match=found + name):
        inspect_model("hybrid_7b", device=name, kernels="pallas")


def test_what_is_not_known_of_a_gpu_can_be_told():
    def found(capability: str | None, **settings) -> ModelReport:
        return inspect_model("hybrid_7b", device_memory="32GB", capability=capability, **settings)

    assert (found("7.0")["kernels"], found("8.6")["kernels"]) == ("xla", "pallas")
    assert found(None, kv_cache_dtype="fp8")["fp8_pages"] is None
    assert found("8.9", kv_cache_dtype="fp8")["fp8_pages"]
    with pytest.raises(NotImplementedError, match="8.9 or more .* found 7.0"):
        found("7.0", kv_cache_dtype="fp8")
    for wrong in ("8", "sm_89", "8.9.1", ""):
        with pytest.raises(ValueError, match=f"capability must be .* such as 8.9, got '{wrong}'"):
            found(wrong)
    with pytest.raises(ValueError, match="capability: a named device has its own, got '8.9' with"):
        inspect_model("hybrid_7b", device="h100", device_memory="94GB", capability="8.9")
    with pytest.raises(ValueError, match="capability: '8.9' alone .*; give device_memory='24GB'"):
        inspect_model("hybrid_7b", capability="8.9")


@pytest.mark.parametrize(
    ("written", "name"),
    [
        *((name, name) for name in sorted(cards())),
        *((name.upper().replace("-", " "), name) for name in sorted(cards())),
        ("rtx5090", "rtx-5090"),
        ("RTX_5090", "rtx-5090"),
        ("NVIDIA GeForce RTX 3090", "rtx-3090"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100 80GB PCIe", "a100"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("a100-pcie-40gb", "a100-40gb"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("h100-80gb", "h100"),
        ("NVIDIA H200", "h200"),
        ("Tesla V100-SXM2-16GB", "v100-16gb"),
        ("Tesla V100-PCIE-32GB", "v100-32gb"),
        ("Tesla T4", "t4"),
        ("NVIDIA RTX A6000", "a6000"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtx-pro-6000"),
        ("NVIDIA GH200 480GB", "gh200"),
    ],
)
def test_a_card_is_found_however_its_name_is_written(written, name):
    assert card(written) == card(name) and card(written).name == name
    assert card(" CPU ").is_host


@pytest.mark.parametrize(
    ("written", "answer"),
    [
        ("v100", "'v100' is not a known card; did you mean v100-16gb or v100-32gb?"),
        ("rtx 6000", "'rtx 6000' is not a known card; did you mean rtx-6000-ada?"),
        ("H100-PCIe", "'H100-PCIe' is not a known card; did you mean h100?"),
        ("NVIDIA H100 NVL", "'NVIDIA H100 NVL' is not a known card; did you mean h100?"),
        ("b300", "'b300' is not a known card; did you mean b200?"),
        ("GeForce RTX 4090 D", "did you mean rtx-4090?"),
        ("gpu", "'gpu' does not say which; name a card, such as h100, or for another NVIDIA GPU"),
        (
            "quadro p400",
            f"known cards, {', '.join(sorted(cards()))}; got 'quadro p400'; for another",
        ),
        ("", f"known cards, {', '.join(sorted(cards()))}; got ''; for another"),
    ],
)
def test_another_name_of_a_device_is_refused_with_the_one_that_may_be_meant(written, answer):
    with pytest.raises(ValueError, match="^device") as refused:
        inspect_model("hybrid_7b", device=written)
    assert answer in str(refused.value)
    assert "for another NVIDIA GPU give device_memory='24GB', or what it has" in str(refused.value)


@pytest.mark.parametrize("written", ["mi300x", "TPU", "tpu-v5e", "AMD Instinct MI250", "m3 max"])
def test_devices_of_others_are_refused_without_advice_that_cannot_help(written):
    with pytest.raises(
        ValueError, match="CPUs and NVIDIA GPUs only, got '.*'; give cpu, or a card"
    ) as refused:
        inspect_model("hybrid_7b", device=written)
    assert repr(written) in str(refused.value) and "device_memory" not in str(refused.value)


@pytest.mark.parametrize(
    ("given", "kind", "answer"),
    [
        ({"max_row": 3}, TypeError, "unknown option 'max_row'; did you mean max_rows?"),
        ({"max_num_seqs": 3}, TypeError, "unknown option 'max_num_seqs'; did you mean max_rows?"),
        (
            {"temperature": 1},
            TypeError,
            "unknown option 'temperature'; it has capability, checkpoints, cut, ",
        ),
        ({"quantization": "awq"}, NotImplementedError, "weight quantisation is not built yet"),
        ({"enforce_eager": True}, TypeError, "; leave it out"),
    ],
)
def test_an_unknown_option_is_refused_with_the_one_that_may_be_meant(given, kind, answer):
    with pytest.raises(kind, match="^inspect_model: ") as refused:
        inspect_model("hybrid_7b", **given)
    assert answer in str(refused.value)


def test_inspecting_takes_kernels_and_counts_what_they_take():
    auto, by_xla = (
        inspect_model("hybrid_7b", device="a100", kernels=kernels) for kernels in ("auto", "xla")
    )
    assert (auto["kernels"], by_xla["kernels"]) == ("pallas", "xla")
    assert by_xla["temporary_bytes"] > auto["temporary_bytes"]
    fp8 = inspect_model("hybrid_7b", device="a100", kernels="xla", kv_cache_dtype="fp8")
    assert fp8["kv_bytes_per_token"] < by_xla["kv_bytes_per_token"]
    with pytest.raises(ValueError, match="kernels must be auto, xla or pallas, got 'triton'"):
        inspect_model("hybrid_7b", kernels="triton")


def test_more_memory_than_a_card_of_that_name_has_is_said():
    def line(size: str) -> str:
        return inspect_model("hybrid_7b", device="h100", device_memory=size).lines()["card"]

    note = "; counted with 466 GiB, but this card has 79.1 GiB"
    assert line("500GB").endswith(f"Triton yes{note}")
    assert line("40GB").endswith("Triton yes")


def test_one_of_a_thing_is_said_as_one():
    report = inspect_model("hybrid_7b", device="h100", max_rows=1, memory="240MiB")
    report["fit"] |= {"num_frames": 1, "num_slots": 1, "longest_context": 1, "rows": {1: 1}}
    text = str(report)
    assert "1 row," in text and not re.search(r"\b1 (rows|tokens|frames|checkpoints)\b", text)


@pytest.mark.parametrize("tokens", [1, 64])
def test_a_step_holds_more_where_xla_does_the_experts(tokens):
    counted = [
        kernel_step_bytes(
            mixture(), ENGINE, rows=2, tokens=tokens, backend=backend_on(device, ENGINE, mixture())
        )
        for device in (card("l40s"), SMALL)
    ]
    # Of each token its hidden units twice and what an expert makes of it, for two experts, in float32.
    assert counted[1] - counted[0] > 2 * tokens * 4 * 2 * (3 * 64 + 256)


def test_attention_that_no_kernel_takes_is_left_to_xla():
    wide = model(head_dim=512)
    found = backend_on(card("h200"), ENGINE, wide)
    assert found.without == ("attention",) and found.runs("experts") == "pallas"
    assert find_room(wide, ENGINE, card("h200")).fits


FP8 = (
    r"EngineConfig: kv_cache_dtype='fp8' needs a GPU of compute capability 8.9 or more \(Ada, Hopper, Blackwell\), "
    r"found 8.0 \(a100\); leave it out, or take kernels='xla', which is slower"
)


def test_fp8_pages_are_refused_by_name_on_older_cards():
    engine = replace(ENGINE, kv_cache_dtype="fp8")
    for ask in (
        lambda: inspect_model("hybrid_7b", device="a100", kv_cache_dtype="fp8"),
        lambda: find_room(model(), engine, card("a100")),
        lambda: backend_on(card("a100"), replace(engine, kernels="pallas"), model()),
    ):
        with pytest.raises(NotImplementedError, match=FP8):
            ask()
    assert inspect_model("hybrid_7b", device="l40s", kv_cache_dtype="fp8")["kernels"] == "pallas"
    by_xla = backend_on(card("a100"), replace(engine, kernels="xla"), model())
    assert by_xla.name == XLA.name


def test_a_mesh_divides_what_each_device_holds():
    one, two = (
        inspect_model("qwen3_next_80b", device="h200", mesh=mesh) for mesh in (None, "tp=2")
    )
    assert not one["fits"] and two["fits"]
    assert two["parameters"] == one["parameters"]
    assert 1.9 * two["weight_bytes"] < one["weight_bytes"] < 2 * two["weight_bytes"]
    assert 1.8 * two["kv_bytes_per_token"] < one["kv_bytes_per_token"]
    assert "2 devices divide it" in str(two) and "mesh" not in str(one)


def test_replicas_have_what_one_has():
    """On a card; those on a CPU share the host's memory."""
    found = {
        mesh: inspect_model("hybrid_7b", device="h200", mesh=mesh)
        for mesh in (None, "dp=3", "tp=2", "tp=2,dp=3")
    }
    for one, several in ((None, "dp=3"), ("tp=2", "tp=2,dp=3")):
        assert {**found[several], "replicas": 1} == found[one] | {"replicas": 1}
        assert found[several]["replicas"] == 3
    assert "3 replicas of one device each; all sizes" in str(found["dp=3"])
    assert "3 replicas, each divided over 2 devices; all sizes" in str(found["tp=2,dp=3"])
    one, four = (inspect_model(device="cpu", mesh=mesh) for mesh in (None, "dp=4"))
    assert four["machine_bytes"] == one["machine_bytes"] // 4
