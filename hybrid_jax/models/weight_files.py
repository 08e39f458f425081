"""Which files of a directory hold the weights, and in which dtype most of them are. Needs no jax."""

from __future__ import annotations

import functools
import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hybrid_jax.config.model_directory import dangling, is_there, read_json
from hybrid_jax.models.files import FETCH_ORIGINAL, CheckpointNotFound
from hybrid_jax.models.headers import Header, read_header

LOG = logging.getLogger("hybrid_jax.files")
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD = re.compile(
    r"(?P<stem>.+)-(?P<number>\d{1,6})-of-(?P<count>\d{1,6})(?P<end>.*\.safetensors)"
)
# Safetensors files that hold something else than a model, by how their names begin.
OTHER_CONTENT = ("adapter", "cut.", "optimizer", "scheduler", "random_states", "training")
DTYPES = {"F64": "float32", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
PICKLED = (
    "weights pickled by torch; `AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(OUT)` of transformers writes "
    "them as safetensors"
)
EXPORTED = "an export for another program, which is not read; " + FETCH_ORIGINAL
# What weights that are not safetensors are, by pattern, and what to do.
OTHER_FORMATS = {
    "*.gguf": f"a file of llama.cpp, which is not read; {FETCH_ORIGINAL}",
    "pytorch_model*.bin": PICKLED,
    "model*.bin": PICKLED,
    "consolidated*.pth": "the original layout of Llama or Mistral; fetch the files in the layout of transformers",
    "*.pth": PICKLED,
    "*.pt": PICKLED,
    "*.ckpt": PICKLED,
    "*.bin": PICKLED,
    "*.msgpack": EXPORTED,
    "*.h5": EXPORTED,
    "*.onnx": EXPORTED,
    "*.npz": EXPORTED,
    "*.tflite": EXPORTED,
}


@dataclass(frozen=True, kw_only=True)
class WeightFiles:
    """Safetensors files that hold a model together.

    Attributes:
        name: what messages call them: the one file, or the index of several.
        files: the files, each once.
        places: from the name of a tensor to the file in which an index puts it.
    """

    name: str
    files: tuple[Path, ...]
    places: Mapping[str, Path] = field(default_factory=dict)

    @functools.cached_property
    def headers(self) -> dict[Path, Header]:
        """Of the files; not of those that are not there although an index names them."""
        there = (file for file in self.files if not self.places or file.is_file())
        return {file: read_header(file) for file in there}


def find_weight_files(folder: Path) -> list[WeightFiles]:
    """The files with the weights: those of the usual names, else any others that can only be these.

    Returns:
        One, or two if a directory has model.safetensors and an index.

    Raises:
        CheckpointNotFound: there are none, not all, or it is not clear which. ValueError: an index is malformed.
    """
    single = is_there(folder / SINGLE, "load_model")
    usual = [WeightFiles(name=SINGLE, files=(folder / SINGLE,))] if single else []
    if not is_there(folder / INDEX, "load_model"):
        return usual or [_by_another_name(folder)]
    try:
        return [*usual, _of_index(folder / INDEX)]
    except ValueError as error:
        if not usual:
            raise
        LOG.warning("%s is read alone: %s", folder / SINGLE, error)
        return usual


def _of_index(index: Path) -> WeightFiles:
    """The shards that an index names."""
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise ValueError(f"load_model: {index} has no weight_map")
    for name, shard in places.items():
        if (
            not isinstance(shard, str)
            or not shard
            or ".." in Path(shard).parts
            or Path(shard).is_absolute()
        ):
            raise ValueError(
                f"load_model: weight_map in {index} must give the name of a file for each tensor, got {shard!r} for "
                f"{name}"
            )
    found = {name: index.parent / shard for name, shard in places.items()}
    return WeightFiles(name=index.name, files=tuple(dict.fromkeys(found.values())), places=found)


def _by_another_name(folder: Path) -> WeightFiles:
    """The only file, index or complete set of shards there is under other names."""
    candidates = [_of_index(index) for index in sorted(folder.glob("*.safetensors.index*.json"))]
    covered = {file for candidate in candidates for file in candidate.files}
    shards: dict[tuple[str, str, str], list[Path]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        if file.is_symlink() and not file.exists():
            raise CheckpointNotFound(f"load_model: {dangling(file)}")
        if file in covered or file.name.startswith(OTHER_CONTENT):
            continue
        if found := SHARD.fullmatch(file.name):
            stem, count, end = found.group("stem", "count", "end")
            shards.setdefault((stem, count, end), []).append(file)
        else:
            candidates.append(WeightFiles(name=file.name, files=(file,)))
    candidates += [_whole(folder, *parts, files) for parts, files in shards.items()]
    if len(candidates) == 1:
        return candidates[0]
    if candidates:
        names = ", ".join(candidate.name for candidate in candidates)
        raise CheckpointNotFound(
            f"load_model: {folder} has no {SINGLE} and no {INDEX}, and it is not clear which of {names} is meant; "
            f"rename one to {SINGLE}, or move the others away"
        )
    raise CheckpointNotFound(
        f"load_model: {folder} has no {SINGLE} and no {INDEX}; {_instead(folder)}"
    )


def _whole(folder: Path, stem: str, count: str, end: str, files: list[Path]) -> WeightFiles:
    """Shards that come without an index; raises CheckpointNotFound if some are missing."""
    wanted = [
        folder / f"{stem}-{number:0{len(count)}}-of-{count}{end}"
        for number in range(1, int(count) + 1)
    ]
    if missing := [file.name for file in wanted if file not in files]:
        some = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        raise CheckpointNotFound(
            f"load_model: {folder} has {len(files)} of {int(count)} shards and no {INDEX}; fetch {some} too"
        )
    return WeightFiles(name=f"{stem}-*-of-{count}{end}", files=tuple(wanted))


def _instead(folder: Path) -> str:
    """What a directory without safetensors has instead, and what to do."""
    for pattern, words in OTHER_FORMATS.items():
        if found := sorted(folder.glob(pattern)):
            return f"{found[0].name} is {words}"
    return "fetch the weights too"


def stored_dtype(found: Sequence[WeightFiles]) -> str | None:
    """The dtype in which most bytes of a directory's weights are stored; None if that cannot be told.

    Raises:
        As `read_header`.
    """
    if any(len(files.headers) < len(files.files) for files in found):
        return None
    sizes: list[Counter[str]] = [
        sum((_bytes_by_dtype(read) for read in files.headers.values()), Counter[str]())
        for files in found
    ]
    largest = max(sizes, key=Counter.total)
    return most_bytes(largest)


def weights_problem(folder: Path) -> str | None:
    """Why the weights of a directory cannot be loaded, as far as names, sizes and headers of files show; else None."""
    try:
        for found in find_weight_files(folder):
            for file in found.files:
                read_header(file)
    except (OSError, ValueError) as error:
        return str(error).removeprefix("load_model: ")
    return None


def most_bytes(sizes: Mapping[str, int]) -> str | None:
    """The dtype of most bytes, from bytes by safetensors' names of dtypes. None if there are none of a known one."""
    known = {name: size for name, size in sizes.items() if name in DTYPES}
    return DTYPES[max(known, key=lambda name: known[name])] if known else None


def _bytes_by_dtype(header: Header) -> Counter[str]:
    found = Counter[str]()
    for dtype, _, start, stop in header.entries.values():
        found[dtype] += stop - start
    return found
