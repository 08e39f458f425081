"""`ModelConfig` as JSON and back: each dataclass is an object whose "type" names its class."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from hybrid_jax import config as model
from hybrid_jax.config import ModelConfig
from hybrid_jax.kinds.table import KINDS
from hybrid_jax.models.hf_config import plain

TYPES = {
    cls.__name__: cls
    for cls in (
        *KINDS,
        model.LayerSpec,
        model.ModelConfig,
        model.Rope,
        model.RopeScaling,
    )
}


def to_json(config: ModelConfig) -> dict:
    """A `ModelConfig` as JSON data; infinity becomes {"__float__": "Infinity"}."""
    return _encode(config)


def from_json(data: dict) -> ModelConfig:
    """The inverse of `to_json`.

    Raises:
        ValueError: an unknown type or field, named; or what the dataclasses refuse.
    """
    config = _decode(plain(data))
    if not isinstance(config, ModelConfig):
        raise ValueError(f"model config: type must be 'ModelConfig', got {data.get('type')!r}")
    return config


def _encode(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        fields = {f.name: _encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"type": type(value).__name__} | fields
    if isinstance(value, tuple):
        return [_encode(item) for item in value]
    if isinstance(value, float) and math.isinf(value):
        return {"__float__": "Infinity" if value > 0 else "-Infinity"}
    return value


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_decode(item) for item in value)
    if not isinstance(value, dict):
        return value
    fields = dict(value)
    name = fields.pop("type", None)
    if name not in TYPES:
        raise ValueError(f"model config: type {name!r} is unknown, only {', '.join(sorted(TYPES))}")
    known = {f.name for f in dataclasses.fields(TYPES[name])}
    unknown = sorted(fields.keys() - known)
    if unknown:
        raise ValueError(f"model config: {name} has no field {unknown[0]!r}")
    return TYPES[name](**{key: _decode(item) for key, item in fields.items()})
