"""The command `cache`: what a folder of cached prefixes holds, making it smaller, and reading all of it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from hybrid_jax.byte_sizes import counted, format_size, parse_size
from hybrid_jax.cli.exits import JsonOption, note, write_json, write_rows
from hybrid_jax.tiers.folder import CHECKPOINT, about_root, check_form, files_of, prune
from hybrid_jax.tiers.part_file import Damaged, read_part

ACTIONS = ("show", "prune", "verify")
SECONDS = {"day": 86_400, "hour": 3_600, "minute": 60}


def cache(
    action: Annotated[
        str,
        typer.Argument(
            metavar="ACTION",
            help="show: what models the folder has prefixes of. prune: remove what was not used for longest, down to "
            "--to. verify: read every file, and name those that are damaged.",
        ),
    ],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder, LLM's cache_dir.")],
    to: Annotated[
        str | None,
        typer.Option(
            help="prune: the bytes that may stay, like 5GB or 5GiB, or 0.", show_default="none"
        ),
    ] = None,
    remove: Annotated[
        bool, typer.Option("--remove", help="verify: remove the files that are damaged.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show, shrink or check a folder of cached prefixes (LLM's cache_dir).

    Engines may use the folder meanwhile. The exit code of verify is 1 if damaged files are left, or files that
    cannot be read. Those are not removed, for they may be whole. That of prune is 1 if a file cannot be removed.
    """
    if action not in ACTIONS:
        raise ValueError(f"cache: ACTION must be show, prune or verify, got {action!r}")
    if to is not None and action != "prune":
        raise ValueError(f"--to goes with prune only, got {to}")
    if remove and action != "verify":
        raise ValueError("--remove goes with verify only")
    if not folder.exists():
        raise FileNotFoundError(f"cache: {folder} does not exist")
    check_form(folder)
    if action == "show":
        found = _show(folder)
    elif action == "prune":
        found = _prune(folder, to)
    else:
        found = _verify(folder, remove=remove)
    rows, failed = found.pop("rows"), found.pop("failed", False)
    if as_json:
        write_json(found)
    else:
        write_rows(rows)
    if failed:
        raise typer.Exit(1)


def _show(folder: Path) -> dict[str, Any]:
    roots: dict[str, dict[str, Any]] = {}
    for file in files_of(folder):
        name = file.path.parent.name
        if name not in roots:
            roots[name] = dict(about_root(file.path.parent))
            roots[name] |= {"checkpoints": 0, "files": 0, "bytes": 0, "used": file.used}
        of_root = roots[name]
        of_root["files"] += 1
        of_root["checkpoints"] += file.path.name.startswith(CHECKPOINT)
        of_root["bytes"] += file.num_bytes
        of_root["used"] = max(of_root["used"], file.used)
    total = sum(of_root["bytes"] for of_root in roots.values())
    rows = {name: _line(of_root) for name, of_root in roots.items()}
    rows["all"] = f"{format_size(total)} of {counted(len(roots), 'model')}"
    return {"roots": roots, "bytes": total, "rows": rows}


def _line(of_root: Mapping[str, Any]) -> str:
    kept = f"{counted(of_root['checkpoints'], 'checkpoint')}, {format_size(of_root['bytes'])}"
    return f"{kept}, used {_ago(of_root['used'])}; {of_root.get('model', 'a model')}"


def _ago(when: float) -> str:
    seconds = max(0.0, time.time() - when)
    for unit, length in SECONDS.items():
        if seconds >= length:
            return f"{counted(int(seconds // length), unit)} ago"
    return "just now"


def _prune(folder: Path, to: str | None) -> dict[str, Any]:
    if to is None:
        raise ValueError(
            "cache: prune needs --to, the bytes that may stay, like --to 5GiB or --to 0"
        )
    removed = prune(folder, 0 if to.strip() == "0" else parse_size(to, name="--to"))
    for file, error in removed.failed:
        _note_kept(file.path, error)
    rest = sum(file.num_bytes for file in files_of(folder))
    rows = {
        "removed": f"{counted(removed.num_files, 'file')}, {format_size(removed.num_bytes)}",
        "left": format_size(rest),
    }
    found = {"removed_files": removed.num_files, "removed_bytes": removed.num_bytes, "bytes": rest}
    return {**found, "rows": rows, "failed": bool(removed.failed)}


def _verify(folder: Path, *, remove: bool) -> dict[str, Any]:
    count, damaged, unreadable, removed = 0, [], [], 0
    for file in files_of(folder):
        try:
            _check(file.path)
            count += 1
        except FileNotFoundError:  # an engine has removed it
            continue
        except OSError as error:
            unreadable.append(str(file.path))
            note(f"{file.path} cannot be read: {error.strerror or error}")
        except Damaged as error:
            damaged.append(str(file.path))
            note(str(error))
            removed += remove and _removed(file.path)
    rows = {"whole": counted(count, "file"), "damaged": counted(len(damaged), "file")}
    if remove:
        rows["removed"] = counted(removed, "file")
    if unreadable:
        rows["not readable"] = counted(len(unreadable), "file")
    failed = bool(unreadable) or removed < len(damaged)
    found = {"files": count, "damaged": damaged, "removed": removed, "unreadable": unreadable}
    return {**found, "rows": rows, "failed": failed}


def _check(file: Path) -> None:
    """Raises Damaged if a file is damaged, or is not what its place says, and OSError if it cannot be read."""
    marks = read_part(file).marks
    if marks.get("name") != file.name:
        raise Damaged(f"{file} holds {marks.get('name')}")
    if marks.get("root") != file.parent.name:
        raise Damaged(f"{file} is of another model, whose folder is {marks.get('root')}")


def _removed(file: Path) -> bool:
    """Removes a damaged file; returns whether it is gone."""
    try:
        file.unlink(missing_ok=True)
    except OSError as error:
        _note_kept(file, error)
        return False
    return True


def _note_kept(file: Path, error: OSError) -> None:
    note(f"{file} cannot be removed: {error.strerror or error}")
