"""A file system that is read only, for tests that may run as a user whom no rights hold back."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def refuse_writing(patch: pytest.MonkeyPatch) -> None:
    """Every call fails that a file system refuses when it is mounted to be read only."""
    opened = Path.open

    def refused(*args, **options):
        raise OSError(30, "Read-only file system")

    def made(path, *args, exist_ok=False, **options):
        if not (exist_ok and path.is_dir()):
            refused()

    def asked(path, mode="r", *args, **options):
        return refused() if set(mode) & set("wax+") else opened(path, mode, *args, **options)

    for where, names in ((os, ("replace", "utime", "unlink")), (Path, ("unlink",))):
        for name in names:
            patch.setattr(where, name, refused)
    patch.setattr(Path, "mkdir", made)
    patch.setattr(Path, "open", asked)
