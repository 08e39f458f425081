"""From the tensors of a Hugging Face directory to the parameters of a model: checked, cast, put in place."""

from __future__ import annotations

import functools
import logging
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from hybrid_jax.config import ModelConfig
from hybrid_jax.config.formats import DENSE
from hybrid_jax.kinds.tensors import Part, Stored
from hybrid_jax.models import Family
from hybrid_jax.models.checkpoint import Checkpoint
from hybrid_jax.models.family import HEAD, MTP, NO_HEAD
from hybrid_jax.models.files import ReportBytes
from hybrid_jax.models.headers import read_header
from hybrid_jax.models.matrices import place_of
from hybrid_jax.models.names import Spelling, nearest, spellings
from hybrid_jax.models.published.coded import REMEDY, Coded
from hybrid_jax.models.published.runs import Run, coded_runs, format_of, names_there
from hybrid_jax.models.weight_files import WeightFiles, find_weight_files, most_bytes
from hybrid_jax.products.operations import encoded
from hybrid_jax.weights.coded import assemble, goes_with_codes, rows_of
from hybrid_jax.weights.put import Put
from hybrid_jax.weights.recognize import recognized
from hybrid_jax.weights.safetensors import ARRAY_DTYPES, StoredTensor, read_tensors

LOG = logging.getLogger("hybrid_jax.files")
PIECE = 1 << 24  # bytes compared at a time
OTHER_HEAD = (
    "they belong to a head for multi-token prediction with more parts than the one that is supported; "
    + NO_HEAD
)
# Tensors in layers that follow from config.json, belong to a training, or count only for values of 8 bits.
BUFFERS = (
    r"(\.rotary_emb\.\w+|\._extra_state|\.(masked_bias|position_ids|num_batches_tracked)|attn\.bias"
    r"|\.(exp_avg|exp_avg_sq|momentum_buffer)"
    r"|\.(q|k|v|kv|prob|q_proj\.q|k_proj\.k|v_proj\.v)_(scale|zero_point))$"
)
SAMPLES = 1024  # values of a matrix that are looked at for NaN; vectors are looked at whole
BAND = 32  # rows transposed at a time: their cache lines stay in the cache until they are full


class Arranged(NamedTuple):
    """A checkpoint that has all that a model needs.

    Attributes:
        config: with what only the tensors tell.
        tree: a `Stored` at each leaf.
        tensors: by the names in it.
        runs: by the place of a parameter, its columns by how they are kept, of those that are not kept as they are.
    """

    config: ModelConfig
    tree: dict
    tensors: dict[str, StoredTensor]
    runs: dict[str, tuple[Run, ...]]


def load_hf(
    checkpoint: Checkpoint,
    config: ModelConfig,
    dtype: str,
    progress: ReportBytes,
    put: Put | None = None,
) -> tuple[ModelConfig, dict]:
    """Parameters from safetensors, and the config with what only the tensors tell: the dtype and whether heads are
    tied.

    Args:
        put: puts each of them where it belongs, or keeps none of it; None for jax's default device.
    """
    config, tree, tensors, runs = _find(checkpoint, config)
    coded = tuple((place, format_of(found)) for place, found in runs.items())
    config = replace(config, matrices=tuple((dict(config.matrices) | dict(coded)).items()))
    sizes: Counter[str] = Counter()
    for leaf in jax.tree.leaves(tree):
        for name in _names(leaf):
            if name in tensors:
                sizes[tensors[name].dtype] += tensors[name].data.nbytes
    config = replace(
        config, dtype=(most_bytes(sizes) or config.dtype) if dtype == "auto" else dtype
    )
    total = sizes.total()
    done = 0
    progress(done, total)

    def build(path: jax.tree_util.KeyPath, leaf: Stored) -> Any:
        nonlocal done
        found = runs.get(place_of(path))
        read = [tensors[name] for name in _names(leaf) if name in tensors]
        if found is None:
            made = _assemble(leaf, tensors, np.dtype(config.dtype))
            array = jax.device_put(made) if put is None else put(config, path, made)
            if leaf.format != DENSE:
                array = encoded(array, leaf.format)
        else:
            write = functools.partial(_write, layout=leaf.layout, tensors=tensors)
            array = jax.device_put(assemble(leaf, found, tensors, config.dtype, write))
            coded = [own for run in found for _, own in run.parts if own is not None]
            read += [tensors[name] for own in coded for name in own.tensors.values()]
        for tensor in read:
            tensor.let_go()
        done += sum(tensors[name].data.nbytes for name in _names(leaf) if name in tensors)
        progress(done, total)
        return array

    return config, jax.tree_util.tree_map_with_path(build, tree)  # a Stored is a leaf


def _find(checkpoint: Checkpoint, config: ModelConfig) -> Arranged:
    """The tensors of a directory, from model.safetensors if that is whole, else from the shards of an index.

    Raises:
        As `load_model`.
    """
    folder, family = checkpoint.folder, checkpoint.family
    first, *rest = checkpoint.weights or find_weight_files(folder)
    try:
        found = _arrange(first, checkpoint, family, config)
    except (ValueError, NotImplementedError) as error:
        for other in rest:
            try:
                found = _arrange(other, checkpoint, family, config)
            except (ValueError, NotImplementedError) as second:
                raise type(second)(
                    f"{second} (read as {other.name} says; {first.name} beside it does not fit either)"
                ) from error
            LOG.warning("%s: %s beside %s is left out: %s", folder, first.name, other.name, error)
            return found
        raise
    if rest:
        LOG.warning("%s: %s is read; %s beside it is left out", folder, first.name, rest[0].name)
    return found


def _arrange(
    files: WeightFiles, checkpoint: Checkpoint, family: Family, config: ModelConfig
) -> Arranged:
    """Reads the names of all tensors, and finds the spelling in which they make the model.

    Raises:
        As `load_model`.
    """
    folder = checkpoint.folder
    raw = {tensor.name: tensor for tensor in read_tensors(files)}
    elsewhere = [name for name in files.places if name not in raw]
    ways: list[tuple[int, str, Arranged, Spelling]] = []
    for prefix, spelling in spellings((*raw, *elsewhere), family):
        tensors = {spelling[name]: tensor for name, tensor in raw.items()}
        settled = _settle_head(config, family, tensors)
        tree = _as_turned(family.stored(settled, names_there(tensors)), tensors)
        try:
            runs = coded_runs(tree, tensors, checkpoint.about)
        except (ValueError, NotImplementedError) as error:
            for name in elsewhere:
                read_header(files.places[name])  # says what is wrong with a file that is not there
            other = recognized(checkpoint, _parts(tree), tensors)
            raise (other if checkpoint.about is None and other else error) from error
        found = Arranged(settled, tree, tensors, runs)
        there = tensors.keys() | _coded_parts(found)
        lacks = sum(name not in there and not family.may_lack(name) for name in _parts(tree))
        ways.append((lacks, prefix, found, spelling))
        if not lacks and not prefix:
            break  # the names are as they should be
    whole = [prefix for lacks, prefix, *_ in ways if not lacks]
    if len(whole) > 1:
        raise ValueError(
            f"load_model: {folder} has several models of this kind, whose tensors begin with {', '.join(whole)}; leave "
            "one in its files"
        )
    _, prefix, found, spelling = min(ways, key=lambda way: way[0])
    if prefix not in ("", family.root):
        LOG.info("%s: names of tensors are read without %s", folder, prefix)
    absent = {spelling[name]: (name, files.places[name]) for name in elsewhere}
    _check(found, checkpoint, files, absent)
    return found


def _coded_parts(found: Arranged) -> dict[str, Coded]:
    """What is made from codes, by the name that it would have as numbers."""
    return {
        part.name: coded
        for runs in found.runs.values()
        for run in runs
        for part, coded in run.parts
        if coded is not None
    }


def _parts(tree: dict) -> dict[str, Part]:
    """What a tree is made from, by the names of the tensors."""
    return {part.name: part for leaf in jax.tree.leaves(tree) for part in leaf.parts}


def _as_turned(tree: dict, tensors: dict[str, StoredTensor]) -> dict:
    """The tree for files whose fused experts are stored as [E, in, out]; as it is for [E, out, in].

    Where a matrix is square, the others tell.
    """

    def fused(leaf: Stored) -> bool:
        return leaf.layout == "linear" and len(leaf.parts[0].shape) == 3

    def turned(shape: tuple[int, ...]) -> tuple[int, ...]:
        return (shape[0], shape[2], shape[1])

    def turn(leaf: Stored) -> Stored:
        if not fused(leaf):
            return leaf
        parts = tuple(replace(part, shape=turned(part.shape)) for part in leaf.parts)
        return replace(leaf, layout="same", parts=parts)

    stored = [
        (part.shape, tensors[part.name].shape)
        for leaf in jax.tree.leaves(tree)
        if fused(leaf)
        for part in leaf.parts
        if part.name in tensors and tensors[part.name].dtype in ARRAY_DTYPES
    ]
    unequal = [pair for pair in stored if pair[0] != turned(pair[0])]
    if unequal and all(there == turned(shape) for shape, there in unequal):
        return jax.tree.map(turn, tree)
    return tree


def _settle_head(
    config: ModelConfig, family: Family, tensors: dict[str, StoredTensor]
) -> ModelConfig:
    """Tied weights that a file stores twice are dropped when equal; different ones are both used.

    A file may also store them as the head alone.
    """
    head, embed = tensors.get(HEAD), tensors.get(family.embed)
    if not config.tie_embeddings or head is None:
        return config
    if embed is None:
        tensors[family.embed] = tensors.pop(HEAD)
        return config
    same = (embed.dtype, embed.shape) == (head.dtype, head.shape)
    if same and all(
        np.array_equal(embed.data[start : start + PIECE], head.data[start : start + PIECE])
        for start in range(0, embed.data.size, PIECE)
    ):
        del tensors[HEAD]
        return config
    return replace(config, tie_embeddings=False)


def _check(
    found: Arranged,
    checkpoint: Checkpoint,
    files: WeightFiles,
    absent: dict[str, tuple[str, Path]],
) -> None:
    """Checks that every tensor is there, in the right shape, and that no tensor of a layer would be ignored.

    Args:
        absent: tensors that an index names and no file has: their names there, and the file in which it puts them.
    """
    config, tree, tensors, _ = found
    coded, folder, family = _coded_parts(found), checkpoint.folder, checkpoint.family
    expected = {name: part for name, part in _parts(tree).items() if name not in coded}
    missing = [name for name in expected if name not in tensors and not family.may_lack(name)]
    wrong = [
        name
        for name, part in expected.items()
        if name in tensors and tensors[name].shape != part.shape
    ]
    packed = [
        name for name in expected if name in tensors and tensors[name].dtype not in ARRAY_DTYPES
    ]
    used = {name for own in coded.values() for name in own.tensors.values()}
    used |= {name for name in tensors if goes_with_codes(name, coded, tensors)}
    spare = sorted(
        name
        for name in tensors.keys() - used
        if name not in expected and not family.ignores(name, config)
    )
    layers = {name: _layer_of(name, family) for name in spare}
    later = {number for number in layers.values() if number >= len(config.layers)}
    unknown = [n for n in spare if layers[n] not in later and _matters(n, family)]
    if not coded and (missing or wrong or packed or unknown):
        other = recognized(checkpoint, expected, tensors)
        if other is not None:
            raise other
    for name in absent:  # as the index has them
        if name in missing:
            stored_as, shard = absent[name]
            read_header(shard)  # says what is wrong with a file that is not there
            raise ValueError(
                f"load_model: tensor {stored_as} is not in {shard.name}, where {folder / files.name} puts it"
            )
    if missing:
        raise _lacks(missing[0], expected[missing[0]].shape, found, family, folder)
    for name in wrong:
        raise ValueError(
            f"load_model: tensor {tensors[name].name} of {tensors[name].file} has shape {tensors[name].shape}, "
            f"config.json makes it {expected[name].shape}; {REMEDY}"
        )
    if unknown:
        some = ", ".join(tensors[name].name for name in unknown[:3]) + ", ..." * (len(unknown) > 3)
        headed = bool(config.mtp) and all(name.startswith(MTP) for name in unknown)
        raise ValueError(
            f"load_model: {len(unknown)} tensors of {folder} have no place in a model of family {config.family} with "
            f"this config.json: {some}; {OTHER_HEAD if headed else REMEDY}"
        )
    if later:
        LOG.warning(
            "%s: config.json says %d layers; the weights have more (layer %d), which are left out",
            folder,
            len(config.layers),
            max(later),
        )
    if unread := [tensors[name].name for name in spare]:
        some = ", ".join(unread[:3]) + ", ..." * (len(unread) > 3)
        LOG.info(
            "%s: %d tensors that the model does not use are left out: %s", folder, len(unread), some
        )


def _layer_of(name: str, family: Family) -> int:
    """The number of the layer that a tensor belongs to; -1 for others."""
    found = re.match(rf"{re.escape(family.layers)}\.(\d+)\.", name)
    return -1 if found is None else int(found[1])


def _matters(name: str, family: Family) -> bool:
    """Whether a tensor that nothing reads may be a part of the layers, so that it would change their results.

    Other parts of a model, such as a vision tower, a head that scores, or an optimizer, change nothing.
    """
    if re.search(BUFFERS, name):
        return False
    root, layers = re.escape(family.root), re.escape(family.layers)
    if re.match(rf"{layers}\.\d+\.|{root}[a-z_]*(norm|embed)\w*\.|lm_head\.|{MTP}", name) is None:
        return False
    return not name.startswith(MTP) or family.mtp is not None


def _lacks(
    name: str, shape: tuple[int, ...], found: Arranged, family: Family, folder: Path
) -> ValueError:
    """The error for a tensor that is not there."""
    config, tensors = found.config, found.tensors
    expected = _parts(found.tree)
    unused = [tensor.name for key, tensor in tensors.items() if key not in expected]
    if name.startswith(MTP) and not any(other.startswith(MTP) for other in tensors):
        return ValueError(
            f"load_model: {folder} has no head for multi-token prediction: tensor {name} {shape} is missing from its "
            f"safetensors files, as are all others of the head; {NO_HEAD}"
        )
    if name == HEAD and family.embed in tensors:
        return ValueError(
            f"load_model: tensor {name} {shape} is missing from the safetensors files of {folder}, and its config.json "
            f"does not tie it to the embedding {tensors[family.embed].name}; this model was saved without its head: "
            "save the whole model (`AutoModelForCausalLM` in transformers)"
        )
    close = nearest(name, unused or [tensor.name for tensor in tensors.values()])
    there = f"; the nearest name there is {close}" if close is not None else ""
    return ValueError(
        f"load_model: tensor {name} {shape} is missing from the safetensors files of {folder}, which a model of family "
        f"{config.family} with this config.json has{there}; {REMEDY}"
    )


def _names(leaf: Stored) -> list[str]:
    """The tensors that a leaf is made from, each once."""
    return list(dict.fromkeys(part.name for part in leaf.parts))


def _assemble(leaf: Stored, tensors: dict[str, StoredTensor], dtype: np.dtype) -> np.ndarray:
    """One parameter, from its parts, in its own memory."""
    out: np.ndarray = np.empty(leaf.shape, np.float32 if leaf.float32 else dtype)
    for part in leaf.parts:
        _write(part, out[part.place], layout=leaf.layout, tensors=tensors)
    return out


def _write(
    part: Part, out: np.ndarray, *, layout: str, tensors: Mapping[str, StoredTensor]
) -> None:
    """Writes a tensor's share of a parameter."""
    if part.name not in tensors:
        out[...] = 0
        return
    _check_finite(tensors[part.name])
    source = tensors[part.name].array()
    if part.rows is not None:
        source = rows_of(source, part.rows)
    if part.plus or part.factor != 1.0:
        source = source.astype(np.float32) * np.float32(part.factor) + np.float32(part.plus)
    _place(out, source, layout)


def _check_finite(tensor: StoredTensor) -> None:
    """Refuses NaN and infinity where they are cheap to see; a diverged training leaves them everywhere."""
    flat = tensor.array().reshape(-1)
    step = 1 if len(tensor.shape) == 1 else max(1, flat.size // SAMPLES)
    wrong = np.flatnonzero(~np.isfinite(flat[::step]))
    if wrong.size:
        at = tuple(int(i) for i in np.unravel_index(wrong[0] * step, tensor.shape))
        raise ValueError(
            f"load_model: tensor {tensor.name} of {tensor.file} holds {flat[wrong[0] * step]} at {at}; "
            "its weights are damaged, or their training diverged"
        )


def _place(out: np.ndarray, source: np.ndarray, layout: str) -> None:
    """Copies `source` as stored into `out`, cast and transposed as `Stored.layout` says."""
    if layout == "conv":
        source = source[:, 0]
    if layout == "same" or source.ndim < 2:
        out[...] = source
    elif source.ndim == 3:
        for index in range(source.shape[0]):
            _place(out[index], source[index], "linear")
    else:
        for row in range(0, source.shape[0], BAND):
            out[:, row : row + BAND] = source[row : row + BAND].astype(out.dtype, copy=False).T
