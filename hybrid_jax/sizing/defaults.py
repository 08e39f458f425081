"""What an engine is set to for a device where its user says nothing. A pure function of the two; no jax.

On a CPU the defaults are those of `EngineConfig`. A GPU's are chosen by what one is good at:

- Chunks of prompts are long, for a product of few tokens reads all weights as well. They get shorter where the
  temporaries of a step would take more than an eighth of what weights leave.
- As many rows as memory holds at `DEFAULT_LENGTH` tokens each, up to 256: a decode step reads the weights once for all
  rows.
- Few steps a dispatch: the device is never idle between dispatches anyway, since the host plans ahead, and what has
  arrived or ended is seen sooner.
- Few and large shapes, for a program takes long to compile there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hybrid_jax.config import EngineConfig, ModelConfig
from hybrid_jax.geometry import make_geometry
from hybrid_jax.sizing.budget import DEFAULT_LENGTH
from hybrid_jax.sizing.devices import Device
from hybrid_jax.sizing.room import Change, Choose, Room, find_room

GPU_DEFAULTS = {"steps_per_dispatch": 4, "shapes": "coarse"}
GPU_CHUNKS = (8192, 4096, 2048, 1024, 512)  # tokens
GPU_ROWS = (256, 128, 64, 32, 16, 8, 4, 2, 1)
ROWS_UNKNOWN = 64  # where a GPU's memory is not known
STEP_SHARE = 8  # one part in so many of what weights leave may go to a step's temporaries


def choose_settings(
    model: ModelConfig,
    device: Device,
    given: Mapping[str, Any],
    *,
    dtype: str,
    held: int | None = None,
) -> EngineConfig:
    """The settings of an engine; `memory` stays None where `find_room` is to choose it.

    Args:
        model: what it runs. device: where.
        given: fields of `EngineConfig` that its user set.
        dtype: of the weights. held: their bytes if they are in memory already.

    Raises:
        ValueError: a given value is not what it should be, alone or together with the model.

    Example:
        >>> from hybrid_jax.config import Attention, LayerSpec
        >>> from hybrid_jax.sizing.devices import card
        >>> attention = Attention(num_heads=4, num_kv_heads=2, head_dim=64)
        >>> model = ModelConfig(
        ...     family="llama", vocab_size=256, width=256, layers=(LayerSpec(mixers=(attention,)),)
        ... )
        >>> engine = choose_settings(model, card("h200"), {"max_rows": 32}, dtype="bfloat16")
        >>> engine.max_rows, engine.prefill_tokens
        (32, 8192)
    """
    if device.platform != "gpu":
        return EngineConfig(dtype=dtype, **given)
    EngineConfig(dtype=dtype, **given)  # names what is wrong as the user gave it
    settings = GPU_DEFAULTS | dict(given)
    settings["steps_per_dispatch"] = min(settings["steps_per_dispatch"], settings.get("grain", 32))

    def fits(fitting: Callable[[Room], bool], **tried: int) -> bool:
        engine = EngineConfig(dtype=dtype, **settings | tried)
        try:
            return fitting(find_room(model, engine, device, held=held))
        except ValueError:  # this memory does not even hold one sequence for so many rows
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
    return EngineConfig(dtype=dtype, **settings)


def chooser(
    model: ModelConfig,
    device: Device,
    given: Mapping[str, Any],
    *,
    dtype: str,
    held: int | None = None,
) -> Choose:
    """`choose_settings` of these arguments after a change of some given settings."""

    def choose(change: Change) -> EngineConfig:
        changed = {**given, **change}
        own = str(changed.pop("dtype", dtype))
        return choose_settings(model, device, changed, dtype=own, held=held)

    return choose


def _is_light(room: Room) -> bool:
    """A step's temporaries are a small part of what weights leave."""
    left = room.device.num_bytes - room.weight_bytes
    return STEP_SHARE * room.temporary_bytes <= left


def _holds_its_rows(room: Room) -> bool:
    """All rows fit at `DEFAULT_LENGTH` tokens, each with a checkpoint and one to fold into."""
    geometry = make_geometry(room.model, room.engine)
    tokens = min(room.sizes.max_model_len, DEFAULT_LENGTH)
    needed = room.engine.max_rows * (geometry.row_frames(tokens) + geometry.state_frames)
    return needed < room.sizes.num_frames
