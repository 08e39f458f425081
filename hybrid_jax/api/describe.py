"""An LLM in a few lines: the model, where its memory goes, and what its cache can do."""

from __future__ import annotations

from hybrid_jax.config import EngineConfig, ModelConfig
from hybrid_jax.config.sampling_params import SamplingParams
from hybrid_jax.geometry import Geometry, checkpoint_bytes, kv_bytes_per_token, make_geometry
from hybrid_jax.sizes import format_size
from hybrid_jax.sizing.budget import Sizes
from hybrid_jax.sizing.devices import Device

KERNEL_WORDS = {"xla": "what XLA compiles", "pallas": "Pallas kernels"}


def describe(
    model: ModelConfig,
    engine: EngineConfig,
    sizes: Sizes,
    *,
    device: Device,
    kernels: str,
    not_triton: dict[str, str],
    weight_bytes: int,
    max_model_len: int,
    sampling: SamplingParams,
) -> str:
    """Lines of a name and what there is to say about it.

    Args:
        model, engine, sizes: of the engine that runs. device: where. kernels: what its steps are made of.
        not_triton: why Triton kernels do not serve, by operation (`Engine.not_triton`).
        weight_bytes: of all weights.
        max_model_len: longest sequence that model and memory allow, in tokens.
        sampling: the model's own parameters; a temperature of None says that it names none.
    """
    lines = {
        "model": f"{model.family}, {len(model.layers)} layers of width {model.width}",
        "device": _device(device, sizes, weight_bytes),
        "weights": f"{format_size(weight_bytes)} {engine.dtype}",
        "arena": f"{format_size(sizes.arena_bytes)} in {sizes.num_frames} frames",
        "rings": f"{format_size(sizes.ring_bytes)} for {engine.max_rows} rows",
        "tables": f"{format_size(sizes.table_bytes)} for {sizes.max_slots} checkpoints",
        "logits": f"{format_size(sizes.logits_bytes)} during a step, {format_size(sizes.adjust_bytes)} for "
        "penalties and biases",
        "sequences": f"up to {max_model_len} tokens, {engine.max_rows} at a time",
        "steps": f"chunks of up to {engine.prefill_tokens} prompt tokens, {engine.steps_per_dispatch} tokens a row "
        f"and dispatch, made of {KERNEL_WORDS[kernels]}",
        **_triton(kernels, not_triton, scans=bool(model.recurrent) and not engine.exact),
        "cache": _cache(make_geometry(model, engine), engine, sizes),
        "sampling": _sampling(sampling),
    }
    return "\n".join(f"{name:<10}{value}" for name, value in lines.items())


def _device(device: Device, sizes: Sizes, weight_bytes: int) -> str:
    """Where it runs, and how much of its memory the engine takes."""
    name = f"{device.platform}, {device.name}" if device.name else device.platform
    if device.num_bytes is None:
        return f"{name}; its memory is not known"
    taken = weight_bytes + sizes.total_bytes
    return (
        f"{name}; weights and memory take {format_size(taken)} of {format_size(device.num_bytes)}"
    )


def _triton(kernels: str, not_triton: dict[str, str], *, scans: bool) -> dict[str, str]:
    """A line on what Triton kernels do, where there is a choice."""
    if kernels != "pallas":
        return {}
    scan, sampling = not_triton.get("scan"), not_triton.get("sampling")
    if not scans:
        said = "tokens are drawn by Triton kernels" if sampling is None else f"not used: {sampling}"
    elif scan is None and sampling is None:
        said = "prompts are scanned and tokens drawn by Triton kernels"
    elif scan is None:
        said = f"prompts are scanned by Triton kernels; tokens are not drawn by them: {sampling}"
    elif sampling is None:
        said = f"tokens are drawn by Triton kernels; prompts are not scanned by them: {scan}"
    elif scan == sampling:
        said = f"not used: {scan}"
    else:
        said = f"prompts are not scanned by Triton kernels: {scan}; tokens are not drawn by them: {sampling}"
    return {"triton": said}


def _sampling(own: SamplingParams) -> str:
    """The temperature of requests that give none, and who says so."""
    source = "the model names none" if own.temperature is None else "from generation_config.json"
    return f"temperature {own.engine_temperature:g} unless a request gives one; {source}"


def _cache(geometry: Geometry, engine: EngineConfig, sizes: Sizes) -> str:
    """Where prompts may resume, what a resume point costs, and how many of them fit."""
    if engine.cache.policy == "off":
        return "off: every prompt is computed in full"
    said = f"{engine.cache.policy}; prompts resume at multiples of {geometry.grain} tokens"
    if not geometry.has_state:
        return f"{said}, {format_size(kv_bytes_per_token(geometry))} of KV a token"
    size = checkpoint_bytes(geometry)
    said += f" with a checkpoint of {format_size(size)}"
    if geometry.has_pages:
        said += f", as much as {round(size / kv_bytes_per_token(geometry))} tokens of KV"
    return f"{said}; {(sizes.num_frames - 1) // geometry.state_frames} of them fit"
