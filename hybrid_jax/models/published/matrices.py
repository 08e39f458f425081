"""How the files of a directory keep the matrices of a model, as their headers tell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from hybrid_jax.config import ModelConfig
from hybrid_jax.config.formats import Format
from hybrid_jax.kinds.kind import placed
from hybrid_jax.models.family import MTP, Family
from hybrid_jax.models.headers import Entry
from hybrid_jax.models.names import spellings
from hybrid_jax.models.published.about import About
from hybrid_jax.models.published.runs import coded_runs, format_of, names_there


class Named(NamedTuple):
    """A tensor as its header describes it."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def matrices_in(
    entries: Mapping[str, Entry], family: Family, config: ModelConfig, about: About | None
) -> tuple[tuple[str, Format], ...]:
    """The format of each matrix that is kept as codes, as `ModelConfig.matrices` has it.

    Args:
        entries: the tensors of all files, by name.

    Raises:
        ValueError, NotImplementedError: as `runs_of`.
    """
    ways = []
    for _, spelling in spellings(entries, family):
        there = {
            spelling[name]: Named(name, entry.dtype, entry.shape) for name, entry in entries.items()
        }
        whole = config
        if family.mtp is not None and any(name.startswith(MTP) for name in there):
            whole = replace(config, mtp=family.mtp(config))
        tree = family.stored(whole, names_there(there))
        found = coded_runs(tree, there, about)
        parts = [part.name for _, leaf in placed(tree) for part in leaf.parts]
        ways.append((sum(name in there for name in parts) + len(found), found))
    _, best = max(ways, key=lambda way: way[0])
    return tuple((place, format_of(runs)) for place, runs in best.items())
