"""`inspect_model`: whether a model fits, what it costs, and what `LLM()` would use, for people and as data."""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

from hybrid_jax.byte_sizes import counted, format_size, parse_size
from hybrid_jax.config import XLA, CacheConfig, ModelConfig, resolve_dtype, with_asked_cut
from hybrid_jax.config.backend import said_of_others
from hybrid_jax.config.mesh import read_mesh
from hybrid_jax.config.model_directory import check_small_files, left_out, refuse_adapter
from hybrid_jax.config.other_names import refuses_other_options
from hybrid_jax.costs import SAVED_AT, weight_count
from hybrid_jax.display import html_table, text_rows, text_table
from hybrid_jax.inspection.facts import model_facts
from hybrid_jax.kinds.quantize import quantized, said_of_formats
from hybrid_jax.machine import has_accelerator, wants_missing_gpu
from hybrid_jax.mesh.split import shard_config
from hybrid_jax.models import known as known_models
from hybrid_jax.models.checkpoint import base_of, open_checkpoint, stored_cut
from hybrid_jax.models.checkpoint import read_config as read_config_file
from hybrid_jax.models.files import (
    BUNDLED,
    CONFIG_FILE,
    CUT_FILE,
    STORED_CONFIG_FILE,
    CheckpointNotFound,
    here_or_packed,
    how_to_get,
    known_names,
    require_packed,
    similar,
)
from hybrid_jax.models.weight_files import weights_problem
from hybrid_jax.sizing.budget import DEFAULT_LENGTH
from hybrid_jax.sizing.defaults import choose_settings
from hybrid_jax.sizing.devices import (
    FIRST_WITH_FP8,
    FIRST_WITH_KERNELS,
    Device,
    card,
    host,
    installed_gpu,
    with_memory,
)
from hybrid_jax.sizing.room import GPU_MEMORY_SHARE, require_pinned

# Columns of the table of what fits: the parts of `shares`, and their titles.
SHARES = {
    "weight_bytes": "weights",
    "sequence_bytes": "sequences",
    "row_bytes": "rows' own",
    "temporary_bytes": "temporaries",
    "cache_bytes": "cache",
    "free_bytes": "free",
    "reserved_bytes": "for CUDA",
}
LEAST_MEMORY = 1 << 24  # bytes of a device
CAPABILITY = re.compile(r"\d{1,2}\.\d")
ABOVE_SHARES = "The most rows (sequences at once) of one length, if the engine is made for them, and where memory goes:"


@refuses_other_options("LLM")
def inspect_model(
    model: str | Path | None = None,
    *,
    device: str | None = None,
    device_memory: int | str | None = None,
    memory: int | str | None = None,
    max_rows: int | None = None,
    max_model_len: int | None = None,
    dtype: str = "auto",
    kv_cache_dtype: str = "auto",
    quantize: str | None = None,
    grain: int | None = None,
    page_tokens: int | None = None,
    cut: int | None = None,
    kv_group: int = 1,
    state_group: int = 1,
    kernels: str = "auto",
    capability: str | None = None,
    checkpoints: str = "float32",
    host_memory: int | str | None = None,
    mesh: str | None = None,
) -> ModelReport:
    """Says whether a model fits, what it costs, and what `LLM()` would use. No weights are read.

    Args:
        model: directory of a model, a config.json, or the name of a known model; None for the model in the package.
        device: what would run it: "cpu" or a card, such as "h100"; None for this machine, or with `device_memory` for a
            GPU of which nothing else is known.
        device_memory: all memory of the device, as a number of bytes or like "24GB"; None for what it is known to have.
        memory, max_rows, max_model_len, dtype, kv_cache_dtype, quantize, grain, page_tokens, kernels: as in `LLM`; if
            they are None, what suits the device.
        cut: try the model with a cut after this many layers (SwiftKV).
        kv_group, state_group: how many layers after that cut share keys and values, or a state.
        capability: NVIDIA's compute capability of a GPU that is told by `device_memory`, such as "8.9"; None if it is
            not known.
        checkpoints: as in `CacheConfig`.
        host_memory: as in `LLM`. On a CPU it lies in the same memory, and counts.
        mesh: devices like this one that divide the model, such as "tp=2", or replicas of it, such as "dp=2,tp=2"; None
            for one. Sizes and costs are then those of each device.

    Raises:
        TypeError: an option has another name. The message has the name that was probably meant.
        FileNotFoundError: the model is not there.
        ValueError, NotImplementedError: its config or a setting is wrong or not supported. That the model does not fit
            is an answer, not an error. A `host_memory` beside a GPU that is more than XLA pins is an error.

    Example:
        >>> report = inspect_model("hybrid_7b", device="h100")
        >>> report["fits"], report["max_rows"]
        (True, 128)
    """
    plain = read_config(model if model is not None else BUNDLED)
    if quantize is not None:
        plain = quantized(plain, quantize)
    whole = with_asked_cut(plain, cut, kv_group=kv_group, state_group=state_group)
    shape = read_mesh(mesh)
    shards = shape.tp
    config = shard_config(whole, shards)
    size = None if device_memory is None else parse_size(device_memory, name="device_memory")
    if size is not None and size < LEAST_MEMORY:
        raise ValueError(
            f"device_memory: {device_memory} are {format_size(size)}, which no device has; give a unit, such as 24GB"
        )
    where = _device(device, size, capability)
    if where.is_host and where.num_bytes is not None:  # all devices of a host share its memory
        where = replace(where, num_bytes=where.num_bytes // shape.num_devices)
    given: dict[str, Any] = {
        "memory": None if memory is None else parse_size(memory, name="memory"),
        "host_memory": None if host_memory is None else parse_size(host_memory, name="host_memory"),
        "max_rows": max_rows,
        "max_model_len": max_model_len,
        "grain": grain,
        "page_tokens": page_tokens,
        "kv_cache_dtype": kv_cache_dtype,
        "kernels": kernels,
        "quantize": quantize,
        "cache": CacheConfig(checkpoints=checkpoints),  # type: ignore[arg-type]  # it checks that
        "tp": shards,
    }
    given = {name: value for name, value in given.items() if value is not None}
    dtype = resolve_dtype(dtype, config.dtype, on_cpu=where.is_host)
    choose = functools.partial(choose_settings, config, where, given, dtype=dtype)
    folder = None if model is None else here_or_packed(model, "inspect_model")
    engine = choose({})
    require_pinned(engine, where)
    found = model_facts(config, engine, where, choose)
    found |= {"left_out": [], "weights_problem": None}
    found["parameters"] = weight_count(whole)
    found |= {"replicas": shape.num_replicas, "prefill_replicas": shape.prefill}
    if folder is not None and folder.is_dir():
        found["left_out"] = left_out(folder)
        # orbax has those of a stored model, and a model with a cut names another directory
        if not any((folder / name).is_file() for name in (STORED_CONFIG_FILE, CUT_FILE)):
            found["weights_problem"] = weights_problem(folder)
    elif model is not None:
        try:
            require_packed(model, "inspect_model")
        except CheckpointNotFound as error:
            found["weights_problem"] = str(error).removeprefix("inspect_model: ")
    return ModelReport(found)


def _device(name: str | None, num_bytes: int | None, capability: str | None) -> Device:
    """The device of this name, or with so much memory; this machine's if neither is given."""
    if capability is not None:
        if name is not None:
            raise ValueError(
                f"capability: a named device has its own, got {capability!r} with device={name!r}; leave it out"
            )
        if num_bytes is None:
            raise ValueError(
                f"capability: {capability!r} alone does not describe a GPU; give device_memory='24GB', or what it has"
            )
        if CAPABILITY.fullmatch(capability) is None:
            raise ValueError(
                f"capability must be NVIDIA's compute capability, such as 8.9, got {capability!r}"
            )
    if num_bytes is not None:
        return with_memory(None if name is None else card(name), num_bytes, capability)
    if name is not None:
        return card(name)
    if wanted := wants_missing_gpu():
        raise ValueError(
            f"JAX_PLATFORMS={wanted} asks for a GPU, and this machine has none; name a card, as in device='h100', or "
            "unset it"
        )
    return installed_gpu() if has_accelerator() else host()


class ModelReport(dict[str, Any]):
    """What `inspect_model` found: the keys of `model_facts`. `print` and a notebook show it in words.

    Example:
        >>> print(str(inspect_model("hybrid_7b", device="h100")).splitlines()[3])
        blocks           24 Mamba2, 28 MLP, 4 Attention
    """

    def __str__(self) -> str:
        text = text_rows(self.lines())
        if cells := self.table():
            text += ["", ABOVE_SHARES, *text_table(cells)]
        return "\n".join(text)

    def _repr_html_(self) -> str:
        html = html_table(list(self.lines().items()), numbers=())
        if cells := self.table():
            html += f"<p>{escape(ABOVE_SHARES)}</p>"
            html += html_table(cells[1:], cells[0], numbers=range(len(cells[0])))
        return html

    def lines(self) -> dict[str, str]:
        """What was found, in words, by name. What the model does not have is left out."""
        device = self["device"] or ("this machine" if self["platform"] == "cpu" else "this GPU")
        told = {
            device: _fits_device(self),
            **({"card": _card(self)} if self["platform"] == "gpu" else {}),
            **_mesh(self["replicas"], self["shards"], self["prefill_replicas"]),
            "family": f"{self['family']}, width {self['width']:,}, vocabulary {self['vocab_size']:,}",
            "blocks": ", ".join(f"{count} {kind}" for kind, count in self["layers"].items()),
            "dtype": f"{self['dtype']}, stored as {self['stored_dtype']} (auto: float32 on a CPU, elsewhere as "
            "stored, and bfloat16 for float16)",
            "parameters": f"{self['parameters']:,} ({format_size(self['weight_bytes'])} {self['dtype']}"
            + " on each device)" * (self["shards"] > 1)
            + ")" * (self["shards"] == 1),
            **({"codes": said_of_formats(self["codes"])} if self["codes"] else {}),
            "prefill": f"{self['flops_per_token'] / 1e9:.3g} GFLOP a token",
            "context": counted(self["max_position"], "token"),
        }
        if self["kv_bytes_per_token"]:
            told["KV"] = f"{format_size(self['kv_bytes_per_token'])} a token, {self['kv_dtype']}"
        if self["frames_per_checkpoint"]:
            told["checkpoint"] = (
                f"{format_size(self['checkpoint_bytes'])} in {counted(self['frames_per_checkpoint'], 'frame')} "
                f"({self['checkpoint_padding']:.1%} padding)"
            )
        if self["cut"]:
            told["cut"] = (
                f"after layer {self['cut']} of {self['num_layers']}; saves {self['cut_saves']:.0%} of the FLOPs of a "
                f"prompt of {SAVED_AT:,} tokens"
            )
        for name, what in (("kv_group", "KV"), ("state_group", "checkpoint")):
            if taken := self["groups"].get(name):
                by_group = (f"{group}: {format_size(size)}" for group, size in taken.items())
                told[f"{what} by {name}"] = ", ".join(by_group)
        if self["page_tokens"]:
            told["page"] = (
                f"{counted(self['page_tokens'], 'token')} in {counted(self['frames_per_page'], 'frame')} "
                f"({self['page_padding']:.1%} padding)"
            )
        if self["windows"]:
            told["windows"] = self["windows"]
        told["frame"] = format_size(self["frame_bytes"])
        if self["ring_bytes_per_row"]:
            told["ring"] = f"{format_size(self['ring_bytes_per_row'])} a row"
        told |= {
            "steps": f"{counted(self['max_rows'], 'row')}, chunks of up to "
            f"{counted(self['prefill_tokens'], 'prompt token')}, "
            f"{counted(self['steps_per_dispatch'], 'token')} a row and dispatch",
            "kernels": _kernels(self),
            "default memory": _default_memory(self),
        }
        if self["fits"] is not False:
            told |= self._what_fits()
        told["prefix cache"] = self["cache"]
        if self["weights_problem"]:
            told["weights"] = f"cannot be loaded: {self['weights_problem']}"
        return told | ({"left out": "; ".join(self["left_out"])} if self["left_out"] else {})

    def _what_fits(self) -> dict[str, str]:
        fit = self["fit"]
        rows = (f"{counted(count, 'row')} of {length:,}" for length, count in fit["rows"].items())
        return {
            "budget": f"{format_size(fit['memory'])}: arena {format_size(fit['arena_bytes'])} in "
            f"{counted(fit['num_frames'], 'frame')}, rings {format_size(fit['ring_bytes'])} for "
            f"{counted(self['max_rows'], 'row')}, tables {format_size(fit['table_bytes'])} for "
            f"{counted(fit['num_slots'], 'checkpoint')}, logits {format_size(fit['logits_bytes'])}, penalties and "
            f"biases {format_size(fit['adjust_bytes'])}",
            "longest context": counted(fit["longest_context"], "token"),
            "most rows": ", ".join(rows) or "none",
        }

    def table(self) -> list[list[str]]:
        """How much fits, as text: titles, then a line for each length. Empty if the model does not fit."""
        if not self["shares"]:
            return []
        parts = [name for name in SHARES if name != "reserved_bytes" or self["platform"] == "gpu"]
        told = [["tokens", "rows", *(SHARES[part] for part in parts), "in all"]]
        for share in self["shares"]:
            sizes = [share[part] for part in parts]
            cells = [format_size(size) for size in (*sizes, sum(sizes))]
            told.append([f"{share['tokens']:,}", f"{share['rows']:,}", *cells])
        return told


def _mesh(replicas: int, shards: int, prefill: int) -> dict[str, str]:
    """A line on devices, if there are several."""
    if replicas == shards == 1:
        return {}
    said = "all sizes and costs below are those of each, but for the parameters"
    if replicas == 1:
        said = f"{shards} devices divide it; {said}"
    elif shards == 1:
        said = f"{replicas} replicas of one device each; all sizes and costs below are those of one"
    else:
        said = f"{replicas} replicas, each divided over {shards} devices; {said.replace('each', 'each device')}"
    if prefill:
        said += f". {prefill} of the replicas compute prompts for the others"
    return {"mesh": said}


def _fits_device(found: dict[str, Any]) -> str:
    """Whether the model fits the device, and why."""
    num_bytes, total, needs = found["machine_bytes"], found["total_bytes"], found["needs"]
    if num_bytes is None:
        return f"its memory is not known here; {needs}"
    has = f"of {format_size(num_bytes)}"
    if total is not None:
        has += (
            f" ({num_bytes / total:.0%} of the card's {format_size(total)}; the rest is for CUDA)"
        )
    if not found["fits"]:
        return f"does not fit; {needs}, {has}; {found['remedy']}"
    return f"fits; {needs} {has}, {format_size(num_bytes - found['needed_bytes'])} left"


def _default_memory(found: dict[str, Any]) -> str:
    """How much the engine takes unless it is told, and why."""
    size, is_host = format_size(found["default_memory"]), found["platform"] == "cpu"
    if found["default_fits"] and not is_host:
        return (
            f"{size}: {GPU_MEMORY_SHARE:.0%} of the memory that is left after weights and temporaries; less if XLA "
            "needs room to try out its largest matrix product"
        )
    length = min(found["max_model_len"], DEFAULT_LENGTH)
    said = f"{size} for {counted(found['max_rows'], 'row')} of up to {counted(length, 'token')}"
    if not is_host:
        return said
    return (
        f"{said}; less where that is more than 1/4 of a host's RAM, or than 1/2 of what is free beside the "
        "weights"
    )


def _card(found: dict[str, Any]) -> str:
    """What a GPU is and can do, and whether it is taken to have more memory than it has."""
    if found["capability"] is None:
        said = (
            f"its compute capability is not known; kernels need {_version(FIRST_WITH_KERNELS)} or more, FP8 pages "
            f"{_version(FIRST_WITH_FP8)} or more, Triton 9.0"
        )
    else:
        said = found["capability"]
        if found["architecture"]:
            said += f" ({found['architecture']})"
        if found["num_sms"]:
            said += f", {counted(found['num_sms'], 'multiprocessor')}"
        can = {
            "kernels": found["runs_kernels"],
            "FP8 pages": found["fp8_pages"],
            "Triton": found["runs_triton"],
        }
        said += "; " + ", ".join(f"{what} {'yes' if can[what] else 'no'}" for what in can)
    has, given = found["card_bytes"], found["total_bytes"]
    if has is not None and given > has:
        said += f"; counted with {format_size(given)}, but this card has {format_size(has)}"
    return said


def _version(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def _kernels(found: dict[str, Any]) -> str:
    """What steps are made of, what Triton does, and what is left to XLA."""
    if found["kernels"] == XLA.name:
        without = found["runs_kernels"] is False and found["platform"] == "gpu"
        return (
            XLA.made
            + f", as kernels need compute capability {_version(FIRST_WITH_KERNELS)} or more"
            * without
        )
    said = "Pallas"
    if found["runs_kernels"] is None:
        said += f", if the card is of compute capability {_version(FIRST_WITH_KERNELS)} or more"
    if found["runs_triton"] is not False:
        where = "on Hopper " if found["runs_triton"] is None else ""
        scans = " and scans prompts" if found["scanned_by_triton"] else ""
        said += f"; {where}with jax-triton, Triton draws tokens{scans}"
    return said + said_of_others(found["left_to_xla"])


def read_config(path: str | Path) -> ModelConfig:
    """The config of a model directory, of a config.json given by itself, or of a known model by its name.

    There need not be any weights; if there are, they tell the dtype. Nothing is downloaded.

    Raises:
        FileNotFoundError: nothing is there.
        ValueError, NotImplementedError: the config is malformed or not supported.
    """
    given = here_or_packed(path, "inspect_model")
    if (given / CUT_FILE).is_file():
        return stored_cut(given, read_config(base_of(given)))
    if not given.exists() and (name := known_models.find(str(path))) is not None:
        return known_models.load_known(name)
    if given.is_file():
        return read_config_file(given, "inspect_model")
    if given.is_dir():
        refuse_adapter(given, "inspect_model")
        check_small_files(given, "inspect_model")
    files = [given / name for name in (STORED_CONFIG_FILE, CONFIG_FILE)]
    if not any(file.exists() or file.is_symlink() for file in files):
        require_packed(path, "inspect_model")
        what = f"it has no {CONFIG_FILE}" if given.exists() else "it does not exist"
        names = known_names()
        named = path if "://" in str(path) else given  # a Path writes an address with one slash
        raise CheckpointNotFound(
            f"inspect_model: {named} is not a model directory: {what}; {how_to_get(path, CONFIG_FILE)}; or give a "
            f"known model: {', '.join(names)}{similar(path, names)}"
        )
    return open_checkpoint(given, "inspect_model").config
