"""`hybrid-jax cache`: what a folder holds, making it smaller, and finding what is damaged."""

from __future__ import annotations

import errno
import json
import logging
import os
from pathlib import Path

import numpy as np
import pytest

from hybrid_jax.cli import cache as module
from hybrid_jax.cli import main as cli
from hybrid_jax.tiers.chain import root_of
from hybrid_jax.tiers.folder import Folder, files_of
from hybrid_jax.tiers.parcel import Pieces

PART = {"pages.0": Pieces("uint32", (1000,), [np.arange(1000, dtype=np.uint32)])}
ROOTS = [root_of("a"), root_of("b")]


@pytest.fixture
def folder(tmp_path):
    for root in ROOTS:
        one = Folder(tmp_path / "cache", root, limit=1 << 20, about={"model": f"model {root[:2]}"})
        for kind in ("checkpoint-", "pages-"):
            one.write(f"{kind}{root}.safetensors", {}, PART)
    return tmp_path / "cache"


def said(capsys, *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["cache", *map(str, arguments)])
    out, err = capsys.readouterr()
    return ended.value.code or 0, out, err


def test_show(folder, capsys):
    code, out, err = said(capsys, "show", folder)
    assert (code, err) == (0, "")
    for root in ROOTS:
        assert f"{root}  1 checkpoint, " in out and f"model {root[:2]}" in out
    assert "of 2 models" in out
    code, out, _ = said(capsys, "show", folder, "--json")
    found = json.loads(out)
    assert found["bytes"] == sum(file.num_bytes for file in files_of(folder))
    assert {of["files"] for of in found["roots"].values()} == {2}


def test_prune(folder, capsys):
    code, out, _ = said(capsys, "prune", folder, "--to", "9KB", "--json")
    found = json.loads(out)
    assert code == 0 and found["removed_files"] == 2 and found["bytes"] < 9000
    code, out, _ = said(capsys, "prune", folder, "--to", "0")
    assert "2 files" in out and list(files_of(folder)) == []
    assert said(capsys, "show", folder)[1].split() == ["all", "0", "B", "of", "0", "models"]


def test_prune_says_what_it_cannot_remove(folder, capsys, monkeypatch):
    """Such as on a volume that is mounted to be read only."""

    def refuse(path, missing_ok=False):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        code, out, err = said(capsys, "prune", folder, "--to", "0")
    assert code == 1 and "0 files" in out and len(list(files_of(folder))) == 4
    assert err.count("cannot be removed: Read-only file system") == 4


def test_verify(folder, capsys):
    assert said(capsys, "verify", folder)[0] == 0
    file = folder / ROOTS[0] / f"pages-{ROOTS[0]}.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    other = folder / ROOTS[1] / f"pages-{ROOTS[1]}.safetensors"
    other.rename(other.with_name("pages-renamed.safetensors"))
    code, out, err = said(capsys, "verify", folder)
    assert code == 1 and "2 files" in out and f"{file} is damaged" in err and "renamed" in err
    code, out, _ = said(capsys, "verify", folder, "--remove", "--json")
    found = json.loads(out)
    assert code == 0 and found["files"] == 2 and len(found["damaged"]) == 2
    assert said(capsys, "verify", folder)[0] == 0 and len(list(files_of(folder))) == 2


def test_verify_leaves_what_cannot_be_read(folder, capsys, monkeypatch):
    """It may be whole: the disk, the rights or the number of open files may be to blame."""
    file = folder / ROOTS[0] / f"pages-{ROOTS[0]}.safetensors"
    read = module.read_part

    def refused(path):
        if path == file:
            raise OSError(5, "Input/output error", str(path))
        return read(path)

    with monkeypatch.context() as patch:
        patch.setattr(module, "read_part", refused)
        code, out, err = said(capsys, "verify", folder, "--remove")
        assert code == 1 and file.exists()
        assert f"{file} cannot be read: Input/output error" in err
        rows = dict(line.split("  ", 1) for line in out.splitlines())
        assert {name.strip(): row.strip() for name, row in rows.items()} == {
            "whole": "3 files",
            "damaged": "0 files",
            "removed": "0 files",
            "not readable": "1 file",
        }
        code, out, _ = said(capsys, "verify", folder, "--json")
        found = json.loads(out)
        assert code == 1 and found["unreadable"] == [str(file)] and found["damaged"] == []
    assert said(capsys, "verify", folder)[0] == 0


def test_verify_finds_files_of_another_model(folder, capsys):
    file = folder / ROOTS[0] / f"pages-{ROOTS[0]}.safetensors"
    target = folder / ROOTS[1] / file.name
    file.rename(target)
    code, _, err = said(capsys, "verify", folder)
    assert code == 1 and f"{target} is of another model, whose folder is {ROOTS[0]}" in err
    assert said(capsys, "verify", folder, "--remove")[0] == 0 and not target.exists()


def test_verify_says_what_it_cannot_remove(folder, capsys, monkeypatch):
    files = [folder / root / f"pages-{root}.safetensors" for root in ROOTS]
    for file in files:
        file.write_bytes(file.read_bytes()[:-4])
    unlink = module.Path.unlink

    def refused(path, **options):
        if path == files[0]:
            raise PermissionError(13, "Permission denied")
        unlink(path, **options)

    monkeypatch.setattr(module.Path, "unlink", refused)
    code, out, err = said(capsys, "verify", folder, "--remove", "--json")
    assert code == 1 and f"{files[0]} cannot be removed: Permission denied" in err
    assert json.loads(out)["removed"] == 1 and len(json.loads(out)["damaged"]) == 2
    assert files[0].exists() and not files[1].exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show", "none"], "cache: none does not exist"),
        (["prune", "FOLDER"], "prune needs --to"),
        (["prune", "FOLDER", "--to", "lots"], "--to"),
        (["show", "FOLDER", "--to", "1GB"], "--to goes with prune only, got 1GB"),
        (["show", "FOLDER", "--remove"], "--remove goes with verify only"),
        (["show", "OTHER"], "has other files in it"),
        (["shrink", "FOLDER"], "shrink"),
    ],
)
def test_mistakes_of_the_caller(folder, tmp_path, capsys, arguments, message):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("x")
    names = {"FOLDER": str(folder), "OTHER": str(tmp_path / "other")}
    code, out, err = said(capsys, *(names.get(word, word) for word in arguments))
    assert code == 2 and message in err and "Traceback" not in err
    assert len(list(files_of(folder))) == 4


def test_what_the_library_warns_of_is_a_line_of_the_command(folder, capsys, monkeypatch):
    def warned(*_):
        logging.getLogger("hybrid_jax.disk").warning("%s is full", folder)
        return []

    monkeypatch.setattr(module, "files_of", warned)
    code, _, err = said(capsys, "show", folder)
    assert (code, err) == (0, f"hybrid-jax: {folder} is full\n")
