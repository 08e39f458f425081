"""Models that are known by name: their config.json without weights, as `configs/models` has them. Needs no jax."""

from __future__ import annotations

import functools
import json
from typing import Any

from hybrid_jax.config import ModelConfig
from hybrid_jax.models.checkpoint import read_config
from hybrid_jax.models.files import CONFIG_FILE, KNOWN_MODELS, known_names


@functools.cache
def known() -> dict[str, dict[str, Any]]:
    """The contents of each config.json by the name of its folder.

    Beside the fields of transformers there are `_source`, where the sizes come from, and `_repositories`, the names of
    the repositories of models on the hub that have them.
    """
    return {
        name: json.loads((KNOWN_MODELS / name / CONFIG_FILE).read_text("utf-8"))
        for name in known_names()
    }


def find(name: str) -> str | None:
    """The name here of a model that is given by that name, or by the name of its repository on the hub."""
    repositories = {
        repository.lower(): own
        for own, fields in known().items()
        for repository in fields.get("_repositories", ())
    }
    return name if name in known() else repositories.get(name.lower())


def load_known(name: str) -> ModelConfig:
    """The config of a known model; `name` is one of `known`."""
    return read_config(KNOWN_MODELS / name / CONFIG_FILE)
