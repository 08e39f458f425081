"""Which kernels serve: by settings and device, and Triton's only where they pass a trial."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hybrid_jax.config import PALLAS, XLA, EngineConfig
from hybrid_jax.engine import engine as engines
from hybrid_jax.engine import kernel_choice, trial_errors
from hybrid_jax.engine.engine import Engine
from hybrid_jax.engine.kernel_choice import (
    Kernels,
    Trials,
    choose_backend,
    choose_kernels,
    try_sampling,
)
from hybrid_jax.engine.mixers.mamba2_pallas import try_scan
from hybrid_jax.engine.programs.store import ProgramStore
from hybrid_jax.engine.this_device import as_device
from hybrid_jax.geometry import make_geometry
from hybrid_jax.products import kernels as products
from hybrid_jax.products.cpu import calls
from hybrid_jax.sizing.devices import Device, card
from pallas_kernels import jax_triton
from pallas_kernels.gated_delta import scan_kernel as delta_kernel
from pallas_kernels.grouped_linear import kernel as experts_kernel
from pallas_kernels.paged_attention import kernel as attention_kernel
from pallas_kernels.plan import H200, Chip
from pallas_kernels.row_product import kernel as row_product
from pallas_kernels.ssd_scan import kernel as scan_kernel
from pallas_kernels.ssd_scan.api import FRAMES
from pallas_kernels.token_sampling.api import IMPLEMENTATIONS as SAMPLING
from tests.drawing import left_to_all
from tests.engine.on_kernels import SMALL, engine_on, outputs, step_and_specs
from tests.kernels.lowered import kernels_in
from tests.tiny_models import tiny_model

HOPPER = Device(platform="gpu", capability="9.0")
BROKEN = "they failed a trial: RuntimeError: no kernel image is available"


def backend_for(device: Device, unsupported: str | None = None, name: str = "llama", **settings):
    config, _ = tiny_model(name)
    return choose_backend(config, EngineConfig(**settings), device, unsupported)


def steps_of(device: Device, unsupported: str | None = None, **settings) -> str:
    return backend_for(device, unsupported, **settings).name


@pytest.mark.parametrize(
    ("platform", "capability", "kernels"),
    [
        ("gpu", "9.0", "pallas"),
        ("gpu", "8.0", "pallas"),
        ("gpu", "12.0", "pallas"),
        ("gpu", "7.5", "xla"),
    ],
)
def test_auto_is_what_the_device_can_run(platform, capability, kernels):
    device = Device(platform=platform, capability=capability)
    assert steps_of(device) == kernels
    assert steps_of(device, kernels="xla") == "xla"


@pytest.mark.parametrize(
    ("platform", "capability", "words"),
    [
        ("gpu", "gfx942", "not on AMD GPUs"),
        ("tpu", None, "not on TPUs"),
        ("METAL", None, "not on Apple GPUs"),
        ("neuron", None, "not on neuron"),
    ],
)
def test_a_platform_without_a_backend_is_refused_by_name_or_asked_for(platform, capability, words):
    device = Device(platform=platform, capability=capability)
    with pytest.raises(NotImplementedError, match=f"CPUs, NVIDIA GPUs, {words}; JAX_PLATFORMS=cpu"):
        steps_of(device)
    assert steps_of(device, kernels="xla") == "xla"


def test_auto_is_xla_on_a_cpu():
    config, params = tiny_model("bamba")
    engine = Engine(config, params, EngineConfig(**SMALL))
    # Products of few rows are our own where they can be made (tests/products/test_cpu_start.py).
    assert replace(engine.backend, products=XLA.products, version="") == XLA
    assert engine.backend.products in (XLA.products, calls.__name__)
    assert engine_on("xla", "bamba").backend == XLA


def test_what_kernels_cannot_run_is_said_at_once_and_auto_runs_without():
    reason = "at most 32 tokens for 'pallas', got 64"
    with pytest.raises(NotImplementedError, match=f"kernels='pallas': .*{reason}"):
        engine_on("pallas", "bamba", exact=True, grain=64, prefill_tokens=64, memory=1 << 20)
    assert steps_of(HOPPER, reason) == "xla"
    assert engine_on("auto", "bamba", exact=True, grain=64, prefill_tokens=64, memory=1 << 20)


def test_unknown_kernels_are_refused():
    with pytest.raises(ValueError, match="kernels must be auto, xla or pallas, got 'triton'"):
        EngineConfig(kernels="triton")


# --- Triton ---------------------------------------------------------------------------------------


def chosen(
    platform: str = "gpu",
    capability: str | None = "9.0",
    name: str = "bamba",
    store: ProgramStore | None = None,
    **settings,
) -> Kernels:
    """For a tiny model, with states of 16 x 16 if it has any."""
    config, _ = tiny_model(name)
    engine = EngineConfig(**{"dtype": "bfloat16", "kernels": "pallas"} | settings)
    device = Device(platform=platform, capability=capability)
    return choose_kernels(config, make_geometry(config, engine), engine, device, store=store)


@pytest.mark.parametrize(
    ("device", "count"),
    [(card("a100"), 108), (card("h200"), 132), (Device(platform="gpu", capability="8.0"), 132)],
)
def test_kernels_fill_the_multiprocessors_that_the_device_has(device, count):
    assert backend_for(device) == replace(PALLAS, chip=device.chip)
    assert device.chip.num_sms == count


def test_jax_says_what_a_device_has_for_the_programs_of_a_kernel():
    told = {"platform": "gpu", "device_kind": "A100", "compute_capability": "8.0"}
    more = {"core_count": 108, "shared_memory_per_block_optin": 150_000}
    assert as_device(SimpleNamespace(**told)).chip == Chip(
        num_sms=132, shared_bytes=166_912, capability=(8, 0)
    )
    found = as_device(SimpleNamespace(**told, **more)).chip
    assert found == Chip(num_sms=108, shared_bytes=150_000, capability=(8, 0))


@pytest.mark.parametrize("capability", ["7.5", "8.0", "8.6", "8.7"])
def test_fp8_pages_are_refused_by_name_where_no_kernel_converts_them(capability):
    device = Device(platform="gpu", name="a card", capability=capability)
    message = (
        r"EngineConfig: kv_cache_dtype='fp8' needs a GPU of compute capability 8.9 or more \(Ada, Hopper, Blackwell\), "
        rf"found {capability} \(a card\); leave it out, or take kernels='xla', which is slower"
    )
    for kernels in ("auto", "pallas"):
        with pytest.raises(NotImplementedError, match=message):
            steps_of(device, kv_cache_dtype="fp8", kernels=kernels)
    assert steps_of(device) == ("xla" if capability == "7.5" else "pallas")
    assert steps_of(device, kv_cache_dtype="fp8", kernels="xla") == "xla"


def test_kernels_are_refused_by_name_on_a_card_that_runs_none():
    device = Device(platform="gpu", name="a card", capability="7.5")
    with pytest.raises(NotImplementedError, match=r"8.0 or more .* found 7.5 \(a card\); leave it"):
        steps_of(device, kernels="pallas")
    assert steps_of(Device(), kernels="pallas") == "pallas"  # an interpreter runs them


@pytest.mark.parametrize("capability", [None, "8.9", "9.0", "10.0", "12.0"])
def test_fp8_pages_are_taken_where_kernels_convert_them(capability):
    device = Device(platform="gpu", capability=capability)
    assert steps_of(device, kv_cache_dtype="fp8") == "pallas"
    assert steps_of(Device(), kv_cache_dtype="fp8") == "xla"


SMALL_CARD = Device(platform="gpu", capability="8.9", shared_bytes=16 << 10)
WANTED = (
    "a tile of experts wants at least 32,768 bytes of shared memory for 'pallas', and this GPU has "
    "16,384; use 'xla'"
)


def test_what_does_not_fit_a_card_is_left_to_xla_alone():
    found = backend_for(SMALL_CARD, name="granite", dtype="bfloat16")
    assert found == replace(PALLAS, chip=SMALL_CARD.chip, without=("experts",))
    assert [found.runs(name) for name in ("experts", "attention")] == ["xla", "pallas"]
    assert backend_for(SMALL_CARD, dtype="bfloat16").without == ()  # a model without experts
    with pytest.raises(NotImplementedError, match=f"kernels='pallas': experts: {WANTED}"):
        backend_for(SMALL_CARD, name="granite", dtype="bfloat16", kernels="pallas")


def test_an_engine_says_which_operations_are_left_to_xla():
    config, _ = tiny_model("granite")
    engine = EngineConfig(dtype="bfloat16")
    geometry = make_geometry(config, engine)
    found = choose_kernels(config, geometry, engine, SMALL_CARD)
    assert found.left_to_xla == {"experts": WANTED} and found.backend.without == ("experts",)
    with mock.patch.object(kernel_choice, "residual_unsupported", lambda width: "too wide"):
        whole = choose_kernels(config, geometry, engine, SMALL_CARD)
        assert whole.backend == XLA and whole.left_to_xla == {"all operations": "too wide"}
        assert not choose_kernels(config, geometry, engine, Device()).left_to_xla


@pytest.mark.parametrize("kind", ["decode", "prefill"])
@left_to_all("prefill")
def test_a_step_keeps_the_kernels_of_all_that_is_not_left_to_xla(kind):
    step, specs = step_and_specs(kind, name="granite", without=("attention", "experts"))
    found = set(kernels_in(step, *specs))
    assert {"append_kv", "residual_rmsnorm", "gated_rmsnorm"} <= found
    assert not [name for name in found if name.startswith(("expert", "paged_attention"))]


@left_to_all
def test_an_engine_that_leaves_operations_to_xla_gives_the_same_tokens(monkeypatch):
    backend = replace(PALLAS, without=("attention", "experts"))
    found = Kernels(backend=backend, not_triton={})
    monkeypatch.setattr(engines, "choose_kernels", lambda *given, **more: found)
    mixed = engine_on("pallas", "granite")
    monkeypatch.undo()
    assert mixed.backend is backend
    want = outputs(engine_on("xla", "granite"), adjusted=False)
    assert outputs(mixed, adjusted=False) == want


@pytest.mark.parametrize("kind", ["lone", "decode", "prefill"])
def test_every_launch_that_fills_a_gpu_is_told_how_many_multiprocessors(kind, monkeypatch):
    """In a step of all kernels that ask: experts, attention, the scan, products of one row and of few."""
    told = Counter()

    def watched(module, name):
        asked = getattr(module, name)

        def watch(*args, num_sms=None, **given):
            told[name, args[-1] if num_sms is None else num_sms] += 1
            return asked(*args, **given, **({} if num_sms is None else {"num_sms": num_sms}))

        monkeypatch.setattr(module, name, watch)

    names = {"make_plan", "num_parts"}
    for module in (attention_kernel, experts_kernel):
        watched(module, "make_plan")
    watched(products, "num_parts")
    if kind == "lone":
        watched(row_product.plan, "part_length")
        names = {"make_plan", "part_length"}
    if kind == "prefill":
        watched(scan_kernel, "num_segments")
        names |= {"num_segments"}
    step, specs = step_and_specs(kind, name="granite", chip=replace(H200, num_sms=77))
    jax.eval_shape(step, *specs)
    assert {name for name, _ in told} == names
    assert {count for _, count in told} == {77}


TILES = {
    "attention": ("granite", attention_kernel, "choose_config"),
    "experts": ("granite", experts_kernel, "choose_config"),
    "scan": ("granite", scan_kernel, "config_of"),
    "gated delta rule": ("qwen3_next", delta_kernel, "config_of"),
}


@pytest.mark.parametrize("kernel", TILES)
def test_tiles_of_prompts_are_chosen_by_the_chip_of_the_backend(kernel, monkeypatch):
    name, module, function = TILES[kernel]
    choose, chip, told = getattr(module, function), card("l40s").chip, []

    def watch(*args, **given):
        told.append(given.get("chip", args[-1]))
        return choose(*args, **given)

    monkeypatch.setattr(module, function, watch)
    step, specs = step_and_specs("prefill", name=name, chip=chip)
    jax.eval_shape(step, *specs)
    assert set(told) == {chip}


@pytest.fixture
def triton(monkeypatch):
    """As if Triton were installed and did what the Pallas kernels do; what it does can be replaced."""
    monkeypatch.setattr(jax_triton, "why_unavailable", lambda: None)
    monkeypatch.setattr(jax_triton, "load", lambda: None)
    monkeypatch.setitem(FRAMES, "triton", FRAMES["pallas"])
    monkeypatch.setitem(SAMPLING, "triton", SAMPLING["pallas"])
    return monkeypatch


def test_triton_serves_on_hopper(triton):
    every = {"scan": "triton", "sampling": "triton"}
    assert (
        chosen()
        == chosen(kernels="auto")
        == Kernels(backend=replace(PALLAS, **every), not_triton={})
    )
    draws = Kernels(backend=replace(PALLAS, sampling="triton"), not_triton={})
    assert chosen(name="llama") == chosen(exact=True, grain=16) == draws
    reason = "inputs must be bfloat16 for 'triton', got float32; use 'pallas'"
    assert chosen(dtype="float32") == replace(draws, not_triton={"scan": reason})


@pytest.mark.parametrize(
    ("platform", "capability", "reason"),
    [
        ("cpu", None, "needs a GPU of compute capability 9.0 (Hopper), found cpu"),
        ("gpu", "8.0", "needs a GPU of compute capability 9.0 (Hopper), found a GPU of 8.0"),
        ("gpu", "10.0", "needs a GPU of compute capability 9.0 (Hopper), found a GPU of 10.0"),
    ],
)
def test_no_other_device_tries_triton(triton, platform, capability, reason):
    triton.setattr(Trials, "_tried", lambda *given: pytest.fail("tried"))
    for dtype in ("bfloat16", "float32"):
        found = chosen(platform, capability, dtype=dtype)
        chip = Device(platform=platform, capability=capability).chip
        backend = replace(PALLAS, chip=chip)
        assert found == Kernels(backend=backend, not_triton={"scan": reason, "sampling": reason})
    assert chosen(platform, capability, "llama").not_triton == {"sampling": reason}


def test_without_jax_triton_or_with_steps_of_xla_triton_is_not_tried(triton):
    triton.setattr(Trials, "_tried", lambda *given: pytest.fail("tried"))
    assert set(chosen(kernels="xla").not_triton.values()) == {
        "the steps are made of what XLA compiles"
    }
    triton.setattr(jax_triton, "why_unavailable", lambda: "needs the package triton: pip")
    found = chosen()
    assert found.backend == PALLAS
    assert set(found.not_triton.values()) == {"needs the package triton: pip"}


def broken(*args, **kwargs):
    raise RuntimeError("no kernel image is available\nand more")


def test_too_little_memory_for_a_trial_is_no_verdict(triton):
    def full(*args, **kwargs):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    triton.setitem(FRAMES, "triton", full)
    with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):
        chosen()


def test_a_compiler_that_compiles_nothing_at_the_moment_is_no_verdict(triton, tmp_path):
    store = ProgramStore(tmp_path, jax.devices()[0])
    triton.setitem(SAMPLING, "triton", broken)
    triton.setattr(trial_errors, "compile_something", broken)
    with pytest.raises(RuntimeError, match="no kernel image"):
        chosen(store=store)
    assert not list(tmp_path.iterdir())


def test_a_failed_trial_of_the_scan_leaves_it_to_pallas_and_says_why(triton, caplog):
    def wrong(*args, **kwargs):
        y, arena = FRAMES["xla"](*args, **kwargs)
        return y + 1, arena

    off = "they failed a trial: outputs of 321 tokens are off by "
    for scan, reason in ((broken, BROKEN), (wrong, off)):
        triton.setitem(FRAMES, "triton", scan)
        found = chosen()
        assert (found.backend.scan, found.backend.sampling) == ("pallas", "triton")
        assert list(found.not_triton) == ["scan"] and found.not_triton["scan"].startswith(reason)
        assert "Triton kernels failed a trial" in caplog.text


def test_a_device_that_a_trial_has_broken_is_said(triton):
    def breaks(*args, **kwargs):
        triton.setattr(trial_errors, "copy_there_and_back", broken)
        return broken()

    triton.setitem(SAMPLING, "triton", breaks)
    with pytest.raises(
        RuntimeError, match="stopped working in a trial .* pip uninstall jax-triton"
    ):
        chosen()


def test_a_trial_that_was_passed_is_not_run_again_in_the_next_process(triton, tmp_path):
    store = ProgramStore(tmp_path / "programs", jax.devices()[0])
    triton.setitem(FRAMES, "triton", broken)
    assert [chosen(store=store).backend.scan for _ in range(2)] == [
        "pallas",
        "pallas",
    ]  # tried each time
    triton.setitem(FRAMES, "triton", FRAMES["xla"])
    assert chosen(store=store).backend.scan == "triton"
    triton.setitem(FRAMES, "triton", broken)
    triton.setitem(SAMPLING, "triton", broken)
    found = chosen(store=store)
    assert (found.backend.scan, found.backend.sampling) == ("triton", "triton")
    assert chosen(store=store, grain=16).backend.scan == "pallas"  # another geometry
    assert chosen().not_triton.keys() == {"scan", "sampling"}


def test_a_trial_runs_where_the_engine_does(triton):
    place, found = jax.devices()[0], []
    triton.setattr(
        kernel_choice, "try_sampling", lambda size: found.append(jax.config.jax_default_device)
    )
    Trials(place).of_sampling(100)
    assert found == [place]


CARELESS = {
    "read": lambda given: given | {"read": jnp.zeros_like(given["read"])},
    "write": lambda given: given | {"write": given["read"]},
    "exists": lambda given: given | {"exists": jnp.ones_like(given["exists"])},
    "every checkpoint": lambda given: given | {"exists": jnp.zeros_like(given["exists"])},
    "dt": lambda given: given | {"dt": jnp.full_like(given["dt"], 0.05)},
    "A": lambda given: given | {"A": jnp.full_like(given["A"], -8.0)},
    "D": lambda given: given | {"D": None},
    "lengths": lambda given: given | {"lengths": jnp.full_like(given["lengths"], 321)},
    "state_lengths": lambda given: given | {"state_lengths": given["lengths"]},
    "first_frame": lambda given: given | {"first_frame": 0},
}


@pytest.mark.parametrize("ignored", CARELESS)
def test_the_trial_of_the_scan_sees_every_argument(triton, ignored):
    def careless(arrays, **static):
        given = CARELESS[ignored](arrays._asdict() | static)
        changed = arrays._replace(**{name: given.pop(name) for name in arrays._fields})
        return FRAMES["xla"](changed, **given)

    triton.setitem(FRAMES, "triton", careless)
    config, _ = tiny_model("mamba2")
    geometry = make_geometry(config, EngineConfig(dtype="bfloat16"))
    (group,) = geometry.groups
    assert "tokens are off by" in try_scan(group, geometry)
    triton.setitem(FRAMES, "triton", FRAMES["xla"])
    assert try_scan(group, geometry) is None


def test_a_failed_trial_of_sampling_leaves_it_to_pallas_and_says_why(triton):
    def wrong(arrays):
        tokens = SAMPLING["pallas"](arrays)
        return tokens.at[3].set(tokens[3] ^ 1)

    one = "they failed a trial: 2 of 28 tokens are not the Pallas kernel's"
    for sampling, reason in ((broken, BROKEN), (wrong, one)):
        triton.setitem(SAMPLING, "triton", sampling)
        found = chosen()
        assert (found.backend.scan, found.backend.sampling) == ("triton", "pallas")
        assert found.not_triton == {"sampling": reason}


@pytest.mark.parametrize("ignored", ["keys", "temperature", "top_k", "top_p", "min_p", "banned"])
def test_the_trial_of_sampling_sees_every_argument(triton, ignored):
    nothing = {"top_p": 1, "banned": -1, "temperature": 1}.get(ignored, 0)

    def careless(arrays):
        same = jnp.full_like(getattr(arrays, ignored), nothing)
        return SAMPLING["pallas"](arrays._replace(**{ignored: same}))

    triton.setitem(SAMPLING, "triton", careless)
    assert "of 28 tokens are not" in try_sampling(3000)


def test_the_rows_of_the_trial_draw_many_tokens_by_other_keys_in_each_step(triton):
    seen = []

    def watched(arrays):
        tokens = SAMPLING["pallas"](arrays)
        jax.debug.callback(lambda tokens: seen.append(np.asarray(tokens)), tokens)
        return tokens

    triton.setitem(SAMPLING, "triton", watched)
    assert try_sampling(3000) is None
    first, second = seen
    assert len(set(first)) > 8 and (first != second).sum() > 8


def test_an_engine_takes_what_was_chosen(triton):
    backend = replace(PALLAS, scan="triton", sampling="triton")
    found = Kernels(backend=backend, not_triton={"scan": "why"})
    triton.setattr(engines, "choose_kernels", lambda *given, **more: found)
    engine = engine_on("pallas", "bamba")
    assert engine.backend is engine.runner.model.backend is backend
    assert engine.not_triton == {"scan": "why"}


@pytest.mark.parametrize("kind", ["decode", "prefill", "exact"])
def test_a_step_draws_its_tokens_by_what_was_chosen(triton, kind):
    drawn = []

    def watched(arrays):
        drawn.append(arrays.logits.shape)
        return SAMPLING["pallas"](arrays)

    triton.setitem(SAMPLING, "triton", watched)
    for sampling in ("pallas", "triton"):
        assert not drawn
        step, specs = step_and_specs(kind, sampling=sampling)
        jax.eval_shape(step, *specs)
    assert drawn


def test_on_a_cpu_all_is_pallas():
    engine = engine_on("pallas", "bamba")
    assert engine.backend == PALLAS
    assert all("found cpu" in reason for reason in engine.not_triton.values())
    assert engine_on("xla", "bamba").backend == XLA


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_programs_of_other_kernels_are_other_programs(kind):
    """A program of Triton kernels is so never loaded by an engine that has not chosen them."""
    runner = engine_on("pallas", "bamba").runner
    shape = next(step.buckets()[0] for step in runner.kinds if step.name == kind)
    own, identities = runner.programs, set()
    for scan, sampling in itertools.product(("pallas", "triton"), repeat=2):
        own.model = replace(own.model, backend=replace(PALLAS, scan=scan, sampling=sampling))
        identities.add(own._new(kind, shape)._identity)
    assert len(identities) == 4
