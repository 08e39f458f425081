"""What a card has for the programs of kernels, which operations are left to XLA, and how that is said."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hybrid_jax.config import (
    MLP,
    PALLAS,
    XLA,
    Attention,
    EngineConfig,
    ModelConfig,
    MoE,
    residual_layer,
)
from hybrid_jax.config.backend import said_of_others
from hybrid_jax.inspection.facts import model_facts
from hybrid_jax.inspection.report import ModelReport, inspect_model
from hybrid_jax.models.known import known, load_known
from hybrid_jax.sizing.devices import Device, card, cards
from hybrid_jax.sizing.room import backend_on, find_room, left_to_xla
from hybrid_jax.sizing.temporaries import kernel_step_bytes
from pallas_kernels.plan import H200

ENGINE = EngineConfig(dtype="bfloat16", memory=1 << 22, max_rows=2, max_model_len=256)
SMALL = Device(platform="gpu", name="small", capability="8.9", shared_bytes=16 << 10)
WANTED = (
    "a tile of experts wants at least 32,768 bytes of shared memory for 'pallas', and this GPU has "
    "16,384; use 'xla'"
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
    for device in cards():
        for dtype in ("bfloat16", "float32"):
            backend = replace(PALLAS, chip=card(device).chip)
            assert left_to_xla(config, EngineConfig(dtype=dtype), backend) == {}


def test_inspecting_says_what_is_left_to_xla_and_why():
    def said(config: ModelConfig, device: Device) -> str:
        found = model_facts(config, ENGINE, device)
        return ModelReport(found | {"left_out": [], "weights_problem": None}).lines()["kernels"]

    found = model_facts(mixture(), ENGINE, SMALL)
    assert (found["kernels"], found["left_to_xla"]) == ("pallas", {"experts": WANTED})
    assert said(mixture(), SMALL) == f"Pallas; XLA does experts: {WANTED}"
    assert said(mixture(), card("l40s")) == said(model(), SMALL) == "Pallas"
    assert said(mixture(), card("h200")) == "Pallas; Triton draws tokens"
    assert said(mixture(), Device(platform="gpu")) == "Pallas; on Hopper Triton draws tokens"
    assert said(mixture(), Device()) == "what XLA compiles"
    many = said(mixture(1025), card("h200"))
    assert many.endswith(
        "; XLA does experts: there must be at most 1024 experts for 'pallas', got 1025; use 'xla'"
    )


def test_several_operations_are_said_one_after_another():
    assert said_of_others({}) == ""
    assert said_of_others({"b": "two", "a": "one"}) == "; XLA does a: one; XLA does b: two"


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
