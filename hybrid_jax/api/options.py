"""The options of `LLM`: how keywords become an `EngineConfig`, and the model's own sampling defaults."""

from __future__ import annotations

import os
import reprlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from hybrid_jax.byte_sizes import parse_size
from hybrid_jax.config import CacheConfig, EngineConfig, SpeculationConfig
from hybrid_jax.config.backend import Kernels
from hybrid_jax.config.formats import Quantize
from hybrid_jax.config.mesh import TP, read_mesh
from hybrid_jax.config.model_directory import GENERATION_FILE, read_json_if_there
from hybrid_jax.config.other_names import refuse_name
from hybrid_jax.config.sampling_params import SamplingParams
from hybrid_jax.config.speculation import METHODS
from hybrid_jax.text.given_tokenizer import TokenizerLike

if TYPE_CHECKING:
    from jax.sharding import Mesh

# Fields of generation_config.json about sampling, and their names here.
GENERATION_FIELDS = {
    **{name: name for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")},
    "max_new_tokens": "max_tokens",
}
# Keywords of `LLM` that are not fields of `EngineConfig`.
OWN_OPTIONS = ("model", "dtype", "replicas", "tokenizer", "quiet", "progress")
OFF = "off"  # no speculation
# What replicas that only compute prompts may have otherwise than those that go on from them.
OF_PREFILL = (
    *("cache", "grain", "host_memory", "kernels", "max_rows", "memory", "mesh", "page_tokens"),
    *("prefill_tokens", "shapes", "steps_per_dispatch"),
)


class RareOptions(TypedDict, total=False):
    """Fields of `EngineConfig` that are not in the signature of `LLM`; None for the default."""

    grain: int | None
    page_tokens: int | None
    prefill_tokens: int | None
    steps_per_dispatch: int | None
    shapes: Literal["fine", "coarse"] | None
    kernels: Kernels | None
    kv_cache_dtype: Literal["auto", "fp8"] | None
    quantize: Quantize | None


class EngineOptions(RareOptions, total=False):
    """Fields of `EngineConfig` that `LLM.from_params` takes, except the dtype; None for the default."""

    memory: int | str | None
    host_memory: int | str | None
    cache_dir: str | Path | None
    disk_memory: int | str | None
    max_rows: int | None
    max_model_len: int | None
    cache: str | CacheConfig | None
    speculation: str | SpeculationConfig | None
    seed: int | None
    exact: bool | None
    mesh: str | Mesh | None
    prefill_options: Mapping[str, Any] | None


class LoadOptions(EngineOptions, total=False):
    """What `LLM` takes beside the model, `progress` and `replicas`."""

    dtype: str
    tokenizer: TokenizerLike | None
    quiet: bool


class LLMOptions(LoadOptions, total=False):
    """What `LLM` takes beside the model and `progress`."""

    replicas: int | str | None


class BatchOptions(LLMOptions, total=False):
    """What `run_batch` takes for a new `LLM`; `ray` is the `address` of `hybrid_jax.ray.start_llm`."""

    ray: str | None


class ChatOptions(TypedDict, total=False):
    """How a conversation becomes a prompt, as in `LLM.chat`."""

    add_generation_prompt: bool | None
    chat_template: str | None
    chat_template_kwargs: Mapping[str, Any] | None
    continue_final_message: bool
    tools: Sequence[Mapping[str, Any]] | None
    cache_breakpoints: Sequence[int] | None


# How messages begin that name what callers of `LLM` did not write, and what stands there for them.
FINDERS = {"CacheConfig: policy": "LLM: cache", "EngineConfig: ": "LLM: ", "load_model: ": "LLM: "}


@contextmanager
def named_as_llm() -> Iterator[None]:
    """Lets errors name `LLM` and its arguments instead of the part of the package that found them."""
    try:
        yield
    except (ValueError, NotImplementedError) as error:
        text = str(error)
        if begin := next(filter(text.startswith, FINDERS), None):
            error.args = (FINDERS[begin] + text.removeprefix(begin),)
        raise


@named_as_llm()
def engine_options(
    given: Mapping[str, Any], *, own: Collection[str] = OWN_OPTIONS
) -> dict[str, Any]:
    """Fields of an `EngineConfig`, made of keywords of `LLM`. Those that are None are left to the device's defaults.

    Args:
        given: the keywords.
        own: other keywords of the caller, which may be meant by a wrong name.

    Raises:
        ValueError, NotImplementedError, TypeError: as `LLM` describes.
    """
    options = dict(given)
    mesh = read_mesh(options.pop("mesh", None))
    options.pop("prefill_options", None)
    known = {field.name for field in fields(EngineConfig)} - {"dtype", "tp"}
    for name in options:
        if name not in known:
            others = {"mesh", "prefill_options", *own}
            refuse_name("LLM", name, known | others, what="option")
    options = {name: value for name, value in options.items() if value is not None}
    options |= {"tp": mesh.tp} if mesh.tp != 1 else {}
    if "cache_dir" in options:
        folder = options["cache_dir"]
        if not isinstance(folder, str | os.PathLike):
            raise TypeError(f"LLM: cache_dir must be the path of a folder, got {folder!r}")
        options["cache_dir"] = os.fspath(folder)
    for name in ("memory", "host_memory", "disk_memory"):
        if name in options and (name, options[name]) != ("host_memory", 0):
            options[name] = parse_size(options[name], name=name)
    cache = options.get("cache")
    if cache is not None and not isinstance(cache, CacheConfig):
        options["cache"] = CacheConfig(policy=cache)
    wanted = options.get("speculation")
    if wanted == OFF:
        options["speculation"] = None
    elif wanted is not None and not isinstance(wanted, SpeculationConfig):
        options["speculation"] = _speculation(wanted)
    EngineConfig(**options)  # mistakes show before anything is loaded
    return options


def options_of_prefill(given: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords of `LLM` as replicas have them that only compute prompts, each for itself.

    Args:
        given: the keywords, whose `prefill_options` are for these replicas.

    Raises:
        TypeError, ValueError: these are not what they should be.
    """
    own = given.get("prefill_options") or {}
    if not isinstance(own, Mapping):
        raise TypeError(
            f"LLM: prefill_options must be options by name, like {{'max_rows': 2}}, got {own!r}"
        )
    for name in own:
        if name not in OF_PREFILL:
            raise ValueError(
                f"LLM: prefill_options must be among {', '.join(OF_PREFILL)}, got {name!r}; what is the same for all "
                "replicas is an option of LLM itself"
            )
    shape = read_mesh(given.get("mesh"))
    mesh = own.get("mesh", f"{TP}={shape.tp}")
    if read_mesh(mesh).num_replicas != 1:
        raise ValueError(
            f"LLM: mesh in prefill_options says how each of these replicas is divided, like 'tp=2'; got {mesh!r}"
        )
    return {**given, **own, "mesh": mesh, "prefill_options": None}


def options_of_sides(
    given: Mapping[str, Any], *, have_sides: bool = False, own: Collection[str] = OWN_OPTIONS
) -> tuple[dict[str, Any], dict[str, Any]]:
    """As `engine_options`: of replicas that generate, and of those that only compute prompts.

    Args:
        given, own: as in `engine_options`.
        have_sides: there are such replicas, whatever the mesh says.

    Raises:
        As `engine_options` and `options_of_prefill`; ValueError for `prefill_options` without such replicas.
    """
    found = engine_options(given, own=own), engine_options(options_of_prefill(given), own=own)
    if given.get("prefill_options") and not (have_sides or read_mesh(given.get("mesh")).prefill):
        raise ValueError(
            "LLM: prefill_options are for replicas that only compute prompts, and there are none; add "
            "mesh='prefill=1,decode=1', or leave prefill_options out"
        )
    return found


def _speculation(wanted: Any) -> SpeculationConfig:
    """The settings that one word stands for."""
    method, _, model = wanted.partition(":") if isinstance(wanted, str) else ("", "", "")
    if method not in METHODS or (method == "draft") != bool(model):
        names = ", ".join((OFF, *METHODS)).replace("draft", "draft:DIRECTORY")
        raise ValueError(
            f"LLM: speculation must be one of {names}, or a SpeculationConfig, got {wanted!r}"
        )
    return SpeculationConfig(method=method, model=model or None)


# --- sampling -------------------------------------------------------------------------------------


# Further ones that change what transformers generates, and the values that do not.
OTHER_FIELDS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("num_beams", "num_beam_groups", "encoder_repetition_penalty"), (1,)),
    **dict.fromkeys(("typical_p", "guidance_scale", "length_penalty"), (1,)),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "penalty_alpha", "diversity_penalty"), (0,)),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "top_h"), (0,)),
    **dict.fromkeys(("min_length", "min_new_tokens"), (0,)),
    **dict.fromkeys(
        ("bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "sequence_bias"), ([], {})
    ),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "forced_decoder_ids"), ([],)),
    **dict.fromkeys(
        ("exponential_decay_length_penalty", "stop_strings", "watermarking_config"), ([],)
    ),
    "max_length": (20,),
}


def unused_defaults(folder: Path) -> list[str]:
    """A line for the fields of a model's generation_config.json that would change results and are not used, if any."""
    generation = read_json_if_there(folder / GENERATION_FILE, "LLM")
    found = [
        f"{name} {reprlib.repr(generation[name])}"
        for name, without in OTHER_FIELDS.items()
        if generation.get(name) is not None and generation[name] not in without
    ]
    return [f"{GENERATION_FILE}: {', '.join(found)}"] if found else []


def default_params(folder: Path) -> SamplingParams:
    """The parameters in a model's generation_config.json; greedy if its do_sample is false."""
    file = folder / GENERATION_FILE
    generation = read_json_if_there(file, "LLM")
    found = {
        ours: generation[theirs]
        for theirs, ours in GENERATION_FIELDS.items()
        if generation.get(theirs) is not None
    }
    if generation.get("do_sample") is False:
        found["temperature"] = 0.0
    try:
        return SamplingParams(**found)
    except ValueError as error:
        raise ValueError(f"LLM: {file}: {error}") from error
