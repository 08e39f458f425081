"""Models by their sizes alone: known ones, a few that are no real models, and files of the form of these."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from hybrid_jax.config import ModelConfig, RecurrentMixer, source_of, with_asked_cut
from hybrid_jax.config.checks import natural
from hybrid_jax.costs import Costs, ModelPart, part_costs, state_elements, token_costs
from hybrid_jax.kinds.kind import FLOAT32_BYTES
from hybrid_jax.kinds.table import KINDS, kind_of, recurrent_kind
from hybrid_jax.models.known import find, known, load_known

FOLDER = Path(__file__).parent / "specs"
PAPER_CONV_WIDTH = 4


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model as a cache study sees it.

    Attributes:
        name: of its file.
        about: one line on what it is.
        costs: FLOPs of a prefill, and bytes of a token and a checkpoint.
        blocks: (how many, block) pairs; none where only a paper's own counts are known.
        decode: of tokens that go through all layers, where those of a prompt do not; with the bytes that they read.
        narrow_bytes: of a checkpoint that is kept as int8; 0 where the blocks are not known.
    """

    name: str
    about: str
    costs: Costs
    blocks: tuple[tuple[int, ModelPart], ...] = ()
    decode: Costs | None = None
    narrow_bytes: int = 0


def names() -> list[str]:
    """The models that are known by name."""
    return sorted([*(path.stem for path in FOLDER.glob("*.toml")), *known()])


def load_spec(
    name: str, *, cut: int | None = None, kv_group: int = 1, state_group: int = 1
) -> ModelSpec:
    """A model by its name, or the name of its repository on the hub, or from a .toml file.

    Args:
        cut, kv_group, state_group: as of `config.with_cut`, for a model whose layers are known one by one.

    Raises:
        ValueError: no such name or file, or a file that does not describe a model; a cut that the model cannot have.
    """
    path = Path(name) if name.endswith(".toml") else FOLDER / f"{name}.toml"
    if not path.is_file() and (own := find(name)) is not None:
        config = load_known(own)
        config = with_asked_cut(config, cut, kv_group=kv_group, state_group=state_group)
        return _of_config(config, own, known()[own]["_source"])
    if cut is not None or max(kv_group, state_group) > 1:
        raise ValueError(
            f"model spec: a cut and its groups need a model whose layers are known one by one ({', '.join(known())}), "
            f"got {name!r}"
        )
    if not path.is_file():
        raise ValueError(
            f"model spec: no model {name!r}; known are {', '.join(names())}, or the path of a .toml file"
        )
    try:
        return parse_spec(tomllib.loads(path.read_text(encoding="utf-8")), path.stem)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"model spec {path.name}: {error}") from error


def parse_spec(entry: dict[str, Any], name: str) -> ModelSpec:
    """A model from what its file says.

    Raises:
        ValueError: a key that is unknown or missing, or a bad value. The message names it.
    """
    where = f"model spec {name}"
    _check_keys(entry, {"about", "paper"} if "paper" in entry else SPEC_KEYS, where)
    blocks: tuple[tuple[int, ModelPart], ...] = ()
    narrow = 0
    if "paper" in entry:
        costs = _paper(entry["paper"], where)
    else:
        costs, blocks, narrow = _stack(entry, where)
    if not costs.kv_bytes + costs.checkpoint_bytes:
        raise ValueError(f"{where}: needs an attention or a recurrent block to cache, got none")
    about = entry.get("about", "")
    return ModelSpec(name=name, about=about, costs=costs, blocks=blocks, narrow_bytes=narrow)


def _of_config(config: ModelConfig, name: str, about: str) -> ModelSpec:
    """A model by its config, with K, V and columns of 2 bytes an element."""
    blocks = tuple((count, block) for block, count in Counter(b for b, _ in config.parts).items())
    kept = [(count, block) for count, block in blocks if source_of(block) != "group"]
    both, narrow = [], _narrow_bytes(kept)
    for whole in (False, True):
        # Each layer reads, also what its group shares.
        sizes = _costs(blocks if whole else kept, config.width)
        cached = {"kv_bytes": sizes.kv_bytes, "checkpoint_bytes": sizes.checkpoint_bytes}
        both.append(token_costs(config, whole=whole, **cached))
    if config.cut is None:
        costs = both[0]
        return ModelSpec(name=name, about=about, costs=costs, blocks=blocks, narrow_bytes=narrow)
    about = f"{about} With a cut after layer {config.cut}."
    return ModelSpec(name=name, about=about, costs=both[0], decode=both[1], narrow_bytes=narrow)


def _costs(
    blocks: Sequence[tuple[int, ModelPart]], width: int, kv_item: int = 2, state_item: int = 4
) -> Costs:
    """Costs of blocks, given the bytes of an element of KV or columns, and of a state."""
    token_bytes = checkpoint = 0
    for count, block in blocks:
        kind = kind_of(block)
        token_bytes += count * kind.token_elements(block) * kv_item
        if isinstance(block, RecurrentMixer):
            state, columns = state_elements(block)
            checkpoint += count * (state * state_item + columns * kv_item)
    stack = [(count, block, kind_of(block).weights(block, width)) for count, block in blocks]
    return part_costs(stack, kv_bytes=token_bytes, checkpoint_bytes=checkpoint)


def _narrow_bytes(
    blocks: Sequence[tuple[int, ModelPart]], column_item: int = 2, state_item: int = 4
) -> int:
    """Bytes of a checkpoint kept as int8 (`geometry.NarrowForm`), given those of an element of columns and of a state
    that stays as it is."""
    total = 0
    for count, block in blocks:
        if isinstance(block, RecurrentMixer):
            layout = recurrent_kind(block).layout(block)
            state = layout.state_words * (1 if layout.scales else state_item)
            scales = FLOAT32_BYTES * layout.units * layout.scales
            total += count * (state + scales + layout.columns * layout.channels * column_item)
    return total


def _stack(
    entry: dict[str, Any], where: str
) -> tuple[Costs, tuple[tuple[int, ModelPart], ...], int]:
    """Costs of a model that lists its blocks, the blocks, and the bytes of a checkpoint as int8."""
    missing = sorted({"width", "blocks"} - entry.keys())
    if missing:
        raise ValueError(f"{where}: must have the key {missing[0]!r}")
    listed = entry["blocks"]
    if not isinstance(listed, list) or not all(isinstance(item, dict) for item in listed):
        raise ValueError(f"{where}: blocks must be a list of tables, got {listed!r}")
    blocks = [_block(block, where) for block in listed]
    kv_item = _whole(entry, "kv_item_bytes", where, default=2)
    state_item = _whole(entry, "state_item_bytes", where, default=4)
    width = _whole(entry, "width", where)
    narrow = _narrow_bytes(blocks, kv_item, state_item)
    return _costs(blocks, width, kv_item, state_item), tuple(blocks), narrow


SPEC_KEYS = {"about", "width", "blocks", "kv_item_bytes", "state_item_bytes"}


def _paper(sizes: Any, where: str) -> Costs:
    """Costs as the paper counts them."""
    where = f"{where}: paper"
    keys = ("width", "state_size", "attention", "ssm", "mlp")
    _check_keys(_table(sizes, where), set(keys), where)
    least = {"width": 1, "state_size": 1}
    return paper_costs(**{key: _whole(sizes, key, where, least=least.get(key, 0)) for key in keys})


def _block(entry: dict[str, Any], where: str) -> tuple[int, ModelPart]:
    """(how many, block) of one entry."""
    known = {kind.name: spec for spec, kind in KINDS.items()}
    kinds = sorted(entry.keys() - {"count"})
    if len(kinds) != 1 or kinds[0] not in known:
        raise ValueError(f"{where}: a block is one of {', '.join(known)}, got {kinds}")
    make, inside = known[kinds[0]], f"{where}: {kinds[0]}"
    sizes = _table(entry[kinds[0]], inside)
    settings = {field.name: field for field in fields(make) if field.name != "rope"}
    _check_keys(sizes, set(settings), inside)
    for key in sizes:
        if settings[key].type == "int":
            _whole(sizes, key, inside, least=0)
    count = _whole(entry, "count", where, default=1)
    try:
        return count, make(**sizes)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{inside}: {error}") from error


def _check_keys(entry: dict[str, Any], known: set[str], where: str) -> None:
    for key in sorted(entry.keys() - known):
        raise ValueError(f"{where}: unknown key {key!r}; known are {', '.join(sorted(known))}")


def _table(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where} must be a table, got {value!r}")
    return value


def _whole(
    entry: dict[str, Any], key: str, where: str, *, default: int | None = None, least: int = 1
) -> int:
    return natural(entry.get(key, default), f"{where}: {key}", least=least)


def paper_costs(*, width: int, state_size: int, attention: int, ssm: int, mlp: int) -> Costs:
    """FLOPs and bytes of a {attention, ssm, mlp} model as Marconi counts them (arXiv 2411.19379, table 1).

    For L tokens a layer of width D and state N takes: attention 8 L D^2 + 4 L^2 D FLOPs and 4 L D bytes; MLP
    16 L D^2 FLOPs; SSM 12 L D^2 + 16 L D N + 10 L D FLOPs and 2 D N bytes, and its convolution 2 W (2 D + 2 N) bytes
    with W = 4, which the table leaves out and the paper's experiments count. (The table says 10 L; the published code,
    followed here, 10 L D.)
    """
    D, N = width, state_size
    per_token = attention * 8 * D * D + mlp * 16 * D * D + ssm * (12 * D * D + 16 * D * N + 10 * D)
    convolution = 2 * PAPER_CONV_WIDTH * (2 * D + 2 * N)
    return Costs(
        # 4 D L^2 are the keys 1 .. L that L queries see, at 8 D each, less 4 D per query.
        flops_per_token=per_token - attention * 4 * D,
        flops_per_key=attention * 8 * D,
        kv_bytes=attention * 4 * D,
        checkpoint_bytes=ssm * (2 * D * N + convolution),
    )
