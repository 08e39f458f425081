"""A `ModelConfig` as JSON: each dataclass is an object whose "type" names its class. Needs no jax."""

from __future__ import annotations

import dataclasses
import math
import reprlib
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from hybrid_jax.config import (
    Block,
    Layer,
    LowRank,
    ModelConfig,
    Residual,
    Rope,
    RopeScaling,
    residual_layer,
)
from hybrid_jax.config.formats import FORMATS
from hybrid_jax.kinds.table import KINDS
from hybrid_jax.models.hf_config import plain

# Fields that stored models may still have, with the only value that is read: the one that changes nothing. ANY is said
# of those that follow from others.
ANY = object()
FORMER_FIELDS = {"own_readout": False, "kv_group": ANY, "state_group": ANY}
# What stored models may have in place of blocks: layers of two, with one gain for all.
FORMER_LAYER, FORMER_GAIN = "LayerSpec", "residual_multiplier"
FORMER_MATRICES = "dense"  # in place of the format of each matrix that is not kept as it is


def without_former_fields(fields: dict) -> dict:
    """The fields that models have today, of those that are stored.

    Raises:
        ValueError: one that models no longer have asks for something.
    """
    for name, value in FORMER_FIELDS.items():
        if value is not ANY and fields.get(name, value) != value:
            raise ValueError(
                f"{name} is no longer supported, since it gained nothing, got {fields[name]!r}; make the model again "
                "without it, as with `hybrid-jax distill`"
            )
    return {name: value for name, value in fields.items() if name not in FORMER_FIELDS}


def to_json(value: Any) -> Any:
    """A `ModelConfig`, or a value in one, as JSON data; infinity becomes {"__float__": "Infinity"}."""
    if dataclasses.is_dataclass(value):
        fields = {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"type": type(value).__name__} | fields
    if isinstance(value, tuple):
        return [to_json(item) for item in value]
    if isinstance(value, float) and math.isinf(value):
        return {"__float__": "Infinity" if value > 0 else "-Infinity"}
    return value


def from_json(data: dict) -> ModelConfig:
    """The inverse of `to_json`.

    Raises:
        ValueError: an unknown type or field, named; or what the dataclasses refuse.
    """
    config = _decode(plain(data))
    if not isinstance(config, ModelConfig):
        raise ValueError(f"model config: type must be 'ModelConfig', got {data.get('type')!r}")
    return config


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_decode(item) for item in value)
    if not isinstance(value, dict):
        return value
    joints = (Block, Layer, LowRank, ModelConfig, Residual, Rope, RopeScaling, *FORMATS)
    types = {cls.__name__: cls for cls in (*KINDS, *joints)}
    fields = without_former_fields(value)
    name = fields.pop("type", None)
    if name == FORMER_LAYER:
        return _former_layer(fields)
    gain = fields.pop(FORMER_GAIN, 1.0) if name == ModelConfig.__name__ else 1.0
    if fields.get("matrices") == FORMER_MATRICES:
        del fields["matrices"]
    if not isinstance(name, str) or name not in types:
        raise ValueError(f"model config: type {name!r} is unknown, only {', '.join(sorted(types))}")
    known = {f.name for f in dataclasses.fields(types[name])}
    unknown = sorted(fields.keys() - known)
    if unknown:
        raise ValueError(f"model config: {name} has no field {unknown[0]!r}")
    found = {key: _decode(item) for key, item in fields.items()}
    hints = get_type_hints(types[name])
    for key, item in found.items():
        if not _fits(item, hints[key]):
            raise ValueError(f"model config: {key} of {name} must not be {reprlib.repr(item)}")
    if gain != 1.0:
        found |= {
            key: tuple(layer.with_gain(gain) for layer in found.get(key, ()))
            for key in ("layers", "mtp")
        }
    return types[name](**found)


def _former_layer(fields: dict) -> Layer:
    """A layer as it was stored before layers had blocks."""
    if fields.pop("weights_of", None) is not None:
        raise ValueError(
            "model config: weights_of is no longer read; blocks share weights (`Block.weights`)"
        )
    found = {name: _decode(value) for name, value in fields.items()}
    for name, value in found.items():
        parts = value if name == "mixers" else (value,)
        known = name in ("mixers", "mlp") and isinstance(parts, tuple)
        if not known or any(type(part) not in (*KINDS, type(None)) for part in parts):
            raise ValueError(f"model config: {name} of {FORMER_LAYER} must not be {value!r}")
    return residual_layer(**found)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a decoded value is of the type that a field asks for."""
    inner = get_args(hint)
    if get_origin(hint) in (Union, UnionType):
        return any(_fits(value, one) for one in inner)
    if get_origin(hint) is Literal:
        return value in inner
    if get_origin(hint) is tuple:
        if not isinstance(value, tuple):
            return False
        wanted = inner[:1] * len(value) if inner[-1] is ... else inner
        return len(wanted) == len(value) and all(map(_fits, value, wanted))
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    # A mixer may be of a kind that was registered later.
    return isinstance(value, hint) or (type(value) in KINDS and hint in KINDS)
