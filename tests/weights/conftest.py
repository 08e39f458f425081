"""A golden of which something was changed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.weights.checkpoints import GOLDEN, read, write


@pytest.fixture
def edit(tmp_path):
    """Copies a golden and changes its tensors and config: edit(name, tensors=function, **fields)."""

    def make(name: str, tensors=None, **fields) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        for file in GOLDEN[name].iterdir():
            if file.name != "answers.npz":
                shutil.copyfile(file, folder / file.name)
        values = json.loads((folder / "config.json").read_text()) | fields
        (folder / "config.json").write_text(json.dumps(values))
        if tensors is not None:
            stored = read(folder / "model.safetensors")
            stored = tensors(stored) or stored
            write(folder / "model.safetensors", stored)
        return folder

    return make
