"""The files of a model's directory: what each is for, and how the small ones are read.

One table, `FILES`, says which files are read, which of them are copied when a model is written anew, and which are left
out although they may matter.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

LOG = logging.getLogger("hybrid_jax.files")
MAX_SMALL = 1 << 26  # bytes of a file that is read as a whole
MAX_DEPTH = 100  # of lists and objects in each other
LFS_POINTER = b"version https://git-lfs"
ANNEX_POINTER = b"/annex/objects/"
# What begins a text in another encoding; a longer mark stands before one that begins it.
MARKS = {
    b"\xef\xbb\xbf": "UTF-8 with a byte order mark",
    b"\xff\xfe\x00\x00": "UTF-32",
    b"\x00\x00\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}
CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
ADDED_TOKENS_FILE = "added_tokens.json"
TEMPLATE_FILE = "chat_template.jinja"
OLD_TEMPLATE_FILE = "chat_template.json"
MORE_TEMPLATES = "additional_chat_templates"  # a folder of further ones
# read: and written anew with a model. carried: read, and copied when a model is written elsewhere. left out: not read,
# though it may matter. tokenizer: not read, and not missed beside a tokenizer.json. adapter: refused.
Role = Literal["read", "carried", "left out", "tokenizer", "adapter"]


@dataclass(frozen=True)
class KnownFile:
    """One kind of file of a model's directory.

    Attributes:
        pattern: its path from the directory, as `Path.glob` reads it.
        role: see `Role`.
        why: for what is left out, what that means for results.
    """

    pattern: str
    role: Role
    why: str = ""


IMAGES = "images, audio and video are not read"
OWN_CODE = "code that comes with a model is not run"
POOLING = "vectors are pooled and normalized as the call says"
FILES = (
    KnownFile(CONFIG_FILE, "read"),
    KnownFile("*.safetensors", "read"),
    KnownFile("*.safetensors.index*.json", "read"),
    *(
        KnownFile(name, "carried")
        for name in (
            *(TOKENIZER_FILE, TOKENIZER_CONFIG_FILE, SPECIAL_TOKENS_FILE, ADDED_TOKENS_FILE),
            *(TEMPLATE_FILE, OLD_TEMPLATE_FILE, f"{MORE_TEMPLATES}/*.jinja", GENERATION_FILE),
        )
    ),
    *(
        KnownFile(pattern, "tokenizer")
        for pattern in ("*.model", "*.tiktoken", "tekken.json", "vocab.*", "merges.txt")
    ),
    *(KnownFile(pattern, "adapter") for pattern in ("adapter_*", "adapters.*")),
    KnownFile("*processor_config.json", "left out", IMAGES),
    *(
        KnownFile(pattern, "left out", OWN_CODE)
        for pattern in ("modeling_*.py", "configuration_*.py", "tokenization_*.py")
    ),
    KnownFile("custom_generate/generate.py", "left out", OWN_CODE),
    *(
        KnownFile(name, "read")
        for name in ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
    ),
    *(
        KnownFile(name, "left out", POOLING)
        for name in ("modules.json", "config_sentence_transformers.json", "*_Pooling/config.json")
    ),
)
NO_TOKENIZER = (
    "only tokenizer.json is read as a tokenizer; `AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)` of "
    "transformers writes one"
)
MERGE = (
    "merge it into the whole model first, in peft with `model.merge_and_unload().save_pretrained(OUT)`, "
    "and give OUT"
)


# --- which files are there ------------------------------------------------------------------------


def is_there(file: Path, where: str) -> bool:
    """Whether a file of this name can be read.

    Raises:
        ValueError: something else is there: a directory, or a link to nothing.
    """
    if file.is_file():
        return True
    if file.is_symlink() and not file.exists():
        raise ValueError(f"{where}: {dangling(file)}")
    if file.exists():
        what = "a directory" if file.is_dir() else "no ordinary file"
        raise ValueError(f"{where}: {file} must be a file, it is {what}")
    return False


def dangling(link: Path) -> str:
    """What is wrong with a link to a file that does not exist, and what to do."""
    target = link.readlink()
    if ".git/annex" in target.as_posix():
        return f"{link} is a link of git-annex, and its content is not here; run `git annex get` in its directory"
    return (
        f"{link} is a link to {target}, which does not exist; fetch the model again, or copy its directory with the "
        "files that its links name (`cp -rL`)"
    )


def files_of(folder: Path, *roles: Role) -> Iterator[tuple[Path, KnownFile]]:
    """The files of a directory that have one of these roles, in the order of the table."""
    for known in FILES:
        if known.role not in roles:
            continue
        if "*" in known.pattern:
            for file in sorted(folder.glob(known.pattern)):
                yield file, known
        elif (file := folder / known.pattern).exists() or file.is_symlink():
            yield file, known


def carried(folder: Path) -> list[Path]:
    """The paths, from a model's directory, of the files that are copied when the model is written elsewhere.

    Raises:
        ValueError: something that is no file has one of their names.
    """
    found = [file for file, _ in files_of(folder, "carried")]
    return [file.relative_to(folder) for file in found if is_there(file, "load_model")]


def check_small_files(folder: Path, where: str) -> None:
    """Refuses a directory with a small file that is not what it should be. A tokenizer.json is not looked into.

    Raises:
        ValueError: a file cannot be read, or is no JSON object or text. The message names it.
    """
    for path in carried(folder):
        if path.suffix != ".json":
            read_text(folder / path, where)
        elif path.name != TOKENIZER_FILE:
            read_json(folder / path, where)


def copy_carried(source: Path, target: Path) -> None:
    """Copies the files that belong to a model, and removes what an earlier model left there under these names.

    Args:
        source: a model's directory. target: another one, which exists; nothing is done if it is the same.

    Raises:
        ValueError: as `carried`. OSError: a file cannot be copied.
    """
    if source.resolve() == target.resolve():
        return
    paths = carried(source)
    for path in carried(target):
        if path not in paths:
            (target / path).unlink()
    for path in paths:
        (target / path).parent.mkdir(exist_ok=True)
        shutil.copyfile(source / path, target / path)


def refuse_adapter(folder: Path, where: str) -> None:
    """Refuses a directory with an adapter (LoRA and its like), even if it also has whole weights.

    Raises:
        NotImplementedError: there is one.
    """
    found = [file.name for file, _ in files_of(folder, "adapter")]
    if not found:
        return
    beside = any(folder.glob("model*.safetensors"))
    base = {}
    if (file := folder / "adapter_config.json").is_file():
        base = read_json(file, where)
    name = base.get("base_model_name_or_path")
    of = f" of {name}" if isinstance(name, str) and name else ""
    raise NotImplementedError(
        f"{where}: {folder} has an adapter{of} ({', '.join(found)}), and adapters are not supported; {MERGE}"
        + ("; or move its files away to use the weights without it" if beside else "")
    )


def left_out(folder: Path, tokenizer: bool = True) -> list[str]:
    """What a model's directory has that is not read although it may matter, a line for each reason.

    Args:
        tokenizer: its own one is used.
    """
    reasons: dict[str, list[str]] = {}
    for file, known in files_of(folder, "left out"):
        reasons.setdefault(known.why, []).append(file.relative_to(folder).as_posix())
    if tokenizer and not (folder / TOKENIZER_FILE).is_file():
        for file, _ in files_of(folder, "tokenizer"):
            reasons.setdefault(NO_TOKENIZER, []).append(file.name)
    return [f"{', '.join(dict.fromkeys(names))}: {why}" for why, names in reasons.items()]


def other_tokenizers(folder: Path) -> list[str]:
    """The names of files there that hold a tokenizer in a format that is not read."""
    return [file.name for file, _ in files_of(folder, "tokenizer")]


def hub_snapshot(folder: Path, where: str) -> Path:
    """The snapshot of a model in the hub's cache, if `folder` is the model's folder there; else `folder`.

    Such a cache has models--ORG--NAME/snapshots/HASH, and names the newest HASH in refs/main.

    Raises:
        ValueError: it is not clear which snapshot is meant, or there is none.
    """
    if folder.name == "snapshots" and folder.parent.name.startswith("models--"):
        folder = folder.parent
    if (folder / CONFIG_FILE).exists():
        return folder
    ours = folder.name.startswith("models--") or (folder / "blobs").is_dir()
    if not ours or not (folder / "snapshots").is_dir():
        kept = sorted(path.name for path in folder.glob("models--*"))
        if folder.name.startswith("models--"):
            raise ValueError(f"{where}: {folder} is a folder of the hub's cache without snapshots")
        if kept:
            some = ", ".join(kept[:5]) + (", ..." if len(kept) > 5 else "")
            raise ValueError(f"{where}: {folder} is a cache of the hub; name a model in it: {some}")
        return folder
    snapshots = sorted(path for path in (folder / "snapshots").iterdir() if path.is_dir())
    main = folder / "refs" / "main"
    if main.is_file():
        newest = folder / "snapshots" / read_text(main, where).strip()
        if newest in snapshots:
            return newest
    if len(snapshots) == 1:
        return snapshots[0]
    names = ", ".join(path.name for path in snapshots) or "none"
    raise ValueError(
        f"{where}: {folder} is a folder of the hub's cache and does not say which of its snapshots is meant; give "
        f"{folder / 'snapshots'}/HASH (it has: {names})"
    )


# --- reading --------------------------------------------------------------------------------------


def pointer(start: bytes) -> str:
    """What to do about a file that stands for another one, from how it begins; empty for any other file."""
    if start.startswith(LFS_POINTER):
        return "is a git-lfs pointer, not the content; run `git lfs pull` in its directory"
    if start.startswith(ANNEX_POINTER):
        return "is a git-annex pointer, not the content; run `git annex get` in its directory"
    return ""


def read_text(file: Path, where: str) -> str:
    """The text of a small file.

    Raises:
        ValueError: it cannot be read, is too large for a small file, or is not in UTF-8. The message names the file.
    """
    try:
        if (size := file.stat().st_size) > MAX_SMALL:
            raise ValueError(f"{where}: {file} has {size} bytes; at most {MAX_SMALL} are read")
        raw = file.read_bytes()
    except OSError as error:
        if file.is_symlink() and not file.exists():
            raise ValueError(f"{where}: {dangling(file)}") from error
        raise ValueError(f"{where}: {file} cannot be read: {error.strerror}") from error
    if said := pointer(raw):
        raise ValueError(f"{where}: {file} {said}")
    other = next((name for mark, name in MARKS.items() if raw.startswith(mark)), None)
    if other is None and b"\0" in raw[:4]:
        other = "UTF-16 or no text"
    if other is not None:
        raise ValueError(f"{where}: {file} must be plain UTF-8 text, it is {other}; save it anew")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{where}: {file} must be plain UTF-8 text, byte {error.start} is 0x{raw[error.start]:02x}; save it anew"
        ) from error


def read_json(file: Path, where: str = "load_model") -> dict[str, Any]:
    """The object in a JSON file.

    If an object has a name twice, the last value counts, as in transformers, and the log says so.

    Raises:
        ValueError: the file cannot be read or holds something else. The message names the file.
    """
    text = read_text(file, where)
    if not text.strip():
        raise ValueError(f"{where}: {file} is not valid JSON: it is empty")

    def last(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) < len(pairs):
            twice = sorted({key for key, value in pairs if values[key] != value})
            if twice:
                LOG.warning("%s has %r more than once; the last one counts", file, twice[0])
        return values

    try:
        values = json.loads(text, object_pairs_hook=last)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: {file} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{where}: {file} must hold an object, got {type(values).__name__}")
    if _deeper(values, MAX_DEPTH):
        raise ValueError(
            f"{where}: {file} nests lists and objects more than {MAX_DEPTH} deep; that is no file of a model"
        )
    try:
        json.dumps(values, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{where}: {file} has half of a surrogate pair in a text, {error.object[error.start]!r}, "
            "which is no character"
        ) from error
    return values


def read_json_if_there(file: Path, where: str = "load_model") -> dict[str, Any]:
    """As `read_json`; empty if there is no such file."""
    return read_json(file, where) if is_there(file, where) else {}


def read_text_if_there(file: Path, where: str = "load_model") -> str | None:
    """As `read_text`; None if there is no such file."""
    return read_text(file, where) if is_there(file, where) else None


def _deeper(value: Any, limit: int) -> bool:
    """Whether lists and objects lie in each other deeper than that."""
    level = [value]
    for _ in range(limit):
        inner: list[Any] = []
        for item in level:
            inner += (
                item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
            )
        level = [item for item in inner if isinstance(item, dict | list)]
    return bool(level)


def hub_name(given: str) -> str | None:
    """ORG/NAME, if a caller gave the name of a model on a hub, alone or as an address; else None."""
    found = re.fullmatch(r"(?:[a-z]+://(?:[\w.-]+\.\w+/)?)?(\w[\w.-]*/\w[\w.-]*?)/?", given)
    return found[1] if found else None
