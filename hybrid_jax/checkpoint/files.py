"""The directory of a model and its small files; progress as all formats report it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

Progress = Callable[[int, int], None]  # (bytes done, bytes in all)


class CheckpointNotFound(FileNotFoundError, ValueError):
    """A file or directory of a model is not there."""


def model_folder(path: str | Path) -> Path:
    """The directory that `path` names; CheckpointNotFound when it is none."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        what = "is a file, not a directory" if folder.exists() else "does not exist"
        raise CheckpointNotFound(f"load_model: {folder} {what}; give a model directory")
    return folder


def read_json(file: Path) -> dict:
    """The object a JSON file holds; ValueError names the file that holds none."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"load_model: {file} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"load_model: {file} must hold an object, got {type(values).__name__}")
    return values
