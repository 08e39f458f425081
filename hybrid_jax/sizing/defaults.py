"""The settings of an engine on a device that its user leaves open. A pure function of model and device; no jax.

On a CPU the defaults are those of `EngineConfig`. For a GPU they are:

- Long chunks of prompts, because a product of few tokens reads all weights as well. They are shorter if the temporaries
  of a step would take more than an eighth of what the weights leave.
- As many rows as memory holds at `DEFAULT_LENGTH` tokens each, up to 256. A decode step reads the weights once for all
  rows.
- Few steps a dispatch. The device is not idle between dispatches, because the host plans ahead, and the engine notices
  sooner what has arrived or ended.
- Few and large shapes, because a program takes long to compile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hybrid_jax.config import EngineConfig, ModelConfig
from hybrid_jax.geometry import make_geometry
from hybrid_jax.sizing.budget import DEFAULT_LENGTH
from hybrid_jax.sizing.devices import Device
from hybrid_jax.sizing.room import Room, find_room

GPU_DEFAULTS: dict[str, Any] = {"steps_per_dispatch": 4, "shapes": "coarse"}
GPU_CHUNKS = (8192, 4096, 2048, 1024, 512)  # tokens
GPU_ROWS = (256, 128, 64, 32, 16, 8, 4, 2, 1)
ROWS_UNKNOWN = 64  # if a GPU's memory is not known
STEP_SHARE = 8  # a step's temporaries may take an eighth of what weights leave


def choose_settings(
    model: ModelConfig,
    device: Device,
    given: Mapping[str, Any],
    change: Mapping[str, Any] | None = None,
    *,
    dtype: str,
    held: int | None = None,
) -> EngineConfig:
    """The settings of an engine. `memory` stays None if it was not given; `find_room` then chooses it.

    Args:
        model: what it runs.
        device: where it runs.
        given: fields of `EngineConfig` that its user set. change: others in place of these, to try what they do.
        dtype: of the weights, unless it is given.
        held: bytes of the weights if they are in memory already.

    Raises:
        ValueError: a given value is wrong, alone or together with the model.

    Example:
        >>> from hybrid_jax.config import Attention, Layer, residual_layer
        >>> from hybrid_jax.sizing.devices import card
        >>> attention = Attention(num_heads=4, num_kv_heads=2, head_dim=64)
        >>> model = ModelConfig(
        ...     family="llama", vocab_size=256, width=256, layers=(residual_layer(mixers=(attention,)),)
        ... )
        >>> engine = choose_settings(model, card("h200"), {"max_rows": 32}, dtype="bfloat16")
        >>> engine.max_rows, engine.prefill_tokens
        (32, 8192)
    """
    given = {"dtype": dtype, **given, **(change or {})}
    as_given = EngineConfig(**given)  # names what is wrong as the user gave it
    if device.platform != "gpu":
        return as_given
    settings = GPU_DEFAULTS | given
    settings["steps_per_dispatch"] = min(settings["steps_per_dispatch"], settings.get("grain", 32))

    def fits(fitting: Callable[[Room], bool], **tried: int) -> bool:
        engine = EngineConfig(**settings | tried)
        try:
            return fitting(find_room(model, engine, device, held=held))
        except ValueError:  # for so many rows, this memory cannot even hold one sequence
            return False

    if device.num_bytes is None:
        settings = {"max_rows": ROWS_UNKNOWN, "prefill_tokens": GPU_CHUNKS[0]} | settings
    if "prefill_tokens" not in settings:
        rows = {"max_rows": settings.get("max_rows", 1)}
        sizes = (n for n in GPU_CHUNKS if fits(_is_light, prefill_tokens=n, **rows))
        settings["prefill_tokens"] = next(sizes, GPU_CHUNKS[-1])
    if "max_rows" not in settings:
        counts = (n for n in GPU_ROWS if fits(_holds_its_rows, max_rows=n))
        settings["max_rows"] = next(counts, GPU_ROWS[-1])
    return EngineConfig(**settings)


def _is_light(room: Room) -> bool:
    """Whether a step's temporaries are a small part of what weights leave."""
    left = (room.device.num_bytes or 0) - room.weight_bytes
    return STEP_SHARE * room.temporary_bytes <= left


def _holds_its_rows(room: Room) -> bool:
    """Whether all rows fit at `DEFAULT_LENGTH` tokens, each with a checkpoint and one to fold into."""
    geometry = make_geometry(room.model, room.engine)
    tokens = min(room.sizes.max_model_len, DEFAULT_LENGTH)
    needed = room.engine.max_rows * (geometry.row_frames(tokens) + geometry.state_frames)
    return needed < room.sizes.num_frames
