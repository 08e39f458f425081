"""What an LLM says about itself: a few lines for people, and a digest that tells models apart."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from hybrid_jax.api.threads.questions import EngineFacts
from hybrid_jax.byte_sizes import counted, format_size
from hybrid_jax.config import PALLAS, EngineConfig, ModelConfig, SpeculationConfig
from hybrid_jax.config.backend import interpreted, said_of_others
from hybrid_jax.config.mesh import MeshShape
from hybrid_jax.config.sampling_params import SamplingParams
from hybrid_jax.config.speculation import METHODS
from hybrid_jax.geometry import (
    Geometry,
    cached_checkpoint_bytes,
    kv_bytes_per_token,
    make_geometry,
)
from hybrid_jax.kinds.quantize import bytes_by_format, said_of_formats
from hybrid_jax.mesh.split import shard_config
from hybrid_jax.sizing.budget import MemorySplit
from hybrid_jax.sizing.devices import Device
from hybrid_jax.text.tokenizer import Tokenizer

# What is said of Triton kernels, by what they do.
TRITON = {
    ("scan", "sampling"): "prompts are scanned and tokens drawn by Triton kernels",
    ("scan",): "prompts are scanned by Triton kernels; tokens are not drawn by them: {sampling}",
    ("sampling",): "tokens are drawn by Triton kernels; prompts are not scanned by them: {scan}",
    (): "prompts are not scanned by Triton kernels: {scan}; tokens are not drawn by them: {sampling}",
}

ONE = MeshShape()


def overview(
    engine: EngineFacts,
    *,
    weight_bytes: int,
    sampling: SamplingParams,
    stored_dtype: str | None = None,
    tokenizer: Tokenizer | None = None,
    unread: Sequence[str] = (),
    loops: str = "",
    mesh: MeshShape = ONE,
    where: str = "",
) -> str:
    """A line for each of: the model, where its memory goes, what its cache can do, and so on.

    Args:
        engine: what runs.
        weight_bytes: of all weights.
        sampling: the model's own parameters; a temperature of None means that the model names none.
        stored_dtype: in which dtype most weights are stored, if that is known.
        tokenizer: what reads texts, if anything does.
        unread: what the model's directory has that is not read, a line each.
        mesh: engines like this one, and their devices. where: they are, if not in this process.
        loops: where the loop over the steps of a dispatch runs; "" where there is no choice.
    """
    model, config, sizes = engine.config, engine.engine_config, engine.sizes
    scans = bool(model.recurrent) and not config.exact
    geometry = make_geometry(shard_config(model, config.tp), config)
    codes = bytes_by_format(model, config.dtype)
    made = engine.backend.made
    if slow := interpreted(engine.backend.name, engine.device.platform):
        made += f", {slow}"
    made += said_of_others(engine.left_to_xla)
    lines = {
        "model": f"{model.family}, {counted(len(model.layers), 'layer')} of width {model.width}{_cut(model)}",
        "device": _device(engine.device, sizes, weight_bytes),
        **_replicas(mesh, where),
        "weights": f"{format_size(weight_bytes)} {config.dtype}{_stored(config.dtype, stored_dtype)}",
        **({"codes": said_of_formats(codes)} if codes else {}),
        "arena": f"{format_size(sizes.arena_bytes)} in {counted(sizes.num_frames, 'frame')}"
        + ", keys and values in FP8" * (config.kv_cache_dtype == "fp8"),
        **({"host": _host(sizes)} if sizes.host_frames else {}),
        **({"disk": engine.about_disk} if engine.about_disk else {}),
        "rings": f"{format_size(sizes.ring_bytes)} for {counted(config.max_rows, 'row')}",
        "tables": f"{format_size(sizes.table_bytes)} for {counted(sizes.max_slots, 'checkpoint')}",
        "logits": f"{format_size(sizes.logits_bytes)} during a step, {format_size(sizes.adjust_bytes)} for "
        "penalties and biases",
        "sequences": f"up to {counted(engine.max_model_len, 'token')}, {config.max_rows:,} at a time",
        "steps": f"chunks of up to {counted(config.prefill_tokens, 'prompt token')}, "
        f"{counted(config.steps_per_dispatch, 'token')} a row and dispatch, {made}",
        **({"products": engine.about_products} if engine.about_products else {}),
        **({"loop": f"of {counted(config.steps_per_dispatch, 'step')}: {loops}"} if loops else {}),
        **(_triton(engine.not_triton, scans) if engine.backend.name == PALLAS.name else {}),
        **(_drafts(model, config.speculation) if config.speculation else {}),
        **_ends(model, tokenizer),
        **({"left out": "; ".join(unread)} if unread else {}),
        **({"windows": geometry.about_windows} if geometry.windowed else {}),
        "cache": _cache(geometry, config, sizes),
        "sampling": _sampling(sampling),
    }
    return "\n".join(f"{name:<10}{value}" for name, value in lines.items())


def _stored(dtype: str, stored: str | None) -> str:
    """What the weights were, if that was something else."""
    if stored in (None, dtype):
        return ""
    if (stored, dtype) == ("float16", "bfloat16"):
        return ", stored as float16, which has 3 bits more; dtype='float32' keeps them"
    return f", stored as {stored}"


def _ends(model: ModelConfig, tokenizer: Tokenizer | None) -> dict[str, str]:
    """A line on the tokens that end answers, if the files of the model do not agree on them."""
    own = None if tokenizer is None else tokenizer.eos_token_id
    others = [token for token in model.eos_token_ids if token != own]
    if tokenizer is None or own not in model.eos_token_ids or not others:
        return {}
    names = {token: f"{token} {tokenizer.token_name(token)}".strip() for token in (*others, own)}
    listed = ", ".join(names[token] for token in others)
    return {"ends": f"at {names[own]}, which the tokenizer names, and {listed}"}


def _cut(model: ModelConfig) -> str:
    """How many layers prompts go through, if not all, and what layers after the cut share."""
    if model.cut is None:
        return ""
    said = f"; prompts go through {model.cut}"
    if model.kv_group > 1:
        said += f", keys and values in groups of {model.kv_group} layers"
    if model.state_group > 1:
        said += f", states in groups of {model.state_group} layers"
    return said


def _replicas(mesh: MeshShape, where: str) -> dict[str, str]:
    """The lines on replicas and on their devices."""
    if not where:
        return {"mesh": _mesh(mesh)} if mesh.num_devices > 1 else {}
    own = MeshShape(tp=mesh.tp)
    said = f"{mesh.num_replicas} in {where}"
    if mesh.prefill:
        said += f", {mesh.prefill} of them to compute prompts, {mesh.dp} to go on from them"
    if mesh.prefill and mesh.counts[0] != mesh.tp:
        said += f" on {counted(mesh.counts[0], 'device')} and {counted(mesh.tp, 'device')} each"
    lines = {"replicas": f"{said}; sizes are those of one"}
    return lines | ({"mesh": _mesh(own)} if mesh.tp > 1 else {})


def _mesh(mesh: MeshShape) -> str:
    """How many devices divide the model, and how many replicas there are."""
    if mesh.num_replicas == 1:
        return f"{mesh.words}: so many devices divide the model, and sizes are those of each"
    each = counted(mesh.tp, "device")
    if mesh.prefill:
        of_prefill = counted(mesh.counts[0], "device")
        return (
            f"{mesh.words}: {counted(mesh.prefill, 'replica')} of {of_prefill} to compute prompts, "
            f"{counted(mesh.dp, 'replica')} of {each} to go on from them; sizes are those of one device"
        )
    return f"{mesh.words}: {mesh.dp} replicas of {each} each; sizes are those of one device"


def device_words(device: Device) -> str:
    """What a device is: "cpu", or "gpu, NVIDIA H200"."""
    return f"{device.platform}, {device.name}" if device.name else device.platform


def _device(device: Device, sizes: MemorySplit, weight_bytes: int) -> str:
    """Where it runs, and how much of its memory the engine takes."""
    name = device_words(device)
    if device.num_bytes is None:
        return f"{name}; its memory is not known"
    taken = weight_bytes + sizes.total_bytes
    return (
        f"{name}; weights and memory take {format_size(taken)} of {format_size(device.num_bytes)}"
    )


def _host(sizes: MemorySplit) -> str:
    """What lies below the arena."""
    size, frames = format_size(sizes.host_bytes), counted(sizes.host_frames - 1, "frame")
    return f"{size} in {frames} of the host's memory, for what the arena evicts"


def _triton(reasons: dict[str, str], scans: bool) -> dict[str, str]:
    """A line on what Triton kernels do; `reasons` says why they do not, by operation."""
    scan, sampling = reasons.get("scan"), reasons.get("sampling")
    if not scans:
        said = "tokens are drawn by Triton kernels" if sampling is None else f"not used: {sampling}"
    elif scan is not None and scan == sampling:
        said = f"not used: {scan}"
    else:
        used = tuple(name for name in ("scan", "sampling") if name not in reasons)
        said = TRITON[used].format(**reasons)
    return {"triton": said}


def _drafts(model: ModelConfig, speculation: SpeculationConfig) -> dict[str, str]:
    """A line on where draft tokens come from, and how many a step judges."""
    said = f"{counted(speculation.num_tokens, 'token')} a step"
    if speculation.tree is not None:
        said += f" in a tree of depth {max(speculation.depths)}"
    said += f", {METHODS[speculation.method]}"
    if model.draft is not None:
        said += f": {model.draft.family}, {counted(len(model.draft.layers), 'layer')} of width {model.draft.width}"
    if speculation.unjudged_above is not None:
        said += f"; kept unjudged above probability {speculation.unjudged_above:g}, which changes the output"
    if speculation.adaptive:
        said += "; while that pays"
    return {"drafts": said}


def _sampling(own: SamplingParams) -> str:
    """The temperature of requests that give none, and where it comes from."""
    source = "the model names none" if own.temperature is None else "from generation_config.json"
    return f"temperature {own.engine_temperature:g} unless a request gives one; {source}"


def _cache(geometry: Geometry, engine: EngineConfig, sizes: MemorySplit) -> str:
    """Where prompts can resume, what a resume point costs, and how many of them fit."""
    if engine.cache.policy == "off":
        return "off: every prompt is computed in full"
    said = f"{engine.cache.policy}; prompts resume at multiples of {geometry.grain} tokens"
    if not geometry.has_state:
        return f"{said}, {format_size(kv_bytes_per_token(geometry))} of KV a token"
    size = cached_checkpoint_bytes(geometry)
    said += f" with a checkpoint of {format_size(size)}"
    said += " as int8" * (geometry.narrow is not None)
    if geometry.has_pages:
        said += f", as much as {counted(round(size / kv_bytes_per_token(geometry)), 'token')} of KV"
    return f"{said}; {(sizes.num_frames - 1) // geometry.cached_state_frames} of them fit"


def fingerprint(digest_of_weights: str, tokenizer: Tokenizer | None) -> str:
    """A digest of a model, whose `weights_digest` is given, and of its tokenizer."""
    digest = hashlib.blake2b(digest_of_weights.encode(), digest_size=16)
    if tokenizer is not None:
        digest.update(tokenizer.identity().encode())
        beside = [tokenizer.special_tokens, tokenizer.chat_templates]
        digest.update(json.dumps(beside, sort_keys=True).encode())
    return digest.hexdigest()
