"""How a parameter is put together from matrices that files keep as codes, and from others."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hybrid_jax.config.formats import DENSE, Format, Joined, Scaled
from hybrid_jax.kinds.kind import placed
from hybrid_jax.kinds.tensors import Part, Stored
from hybrid_jax.models.published.about import INSTEAD, About
from hybrid_jax.models.published.coded import Coded, Tensor, find_coded

BLOCKS = re.compile(r"(?<=_proj)_(blocks|scales)$")


@dataclass(frozen=True, kw_only=True)
class Run:
    """Columns of a parameter that lie side by side and are kept alike.

    Attributes:
        start, stop: columns. format: DENSE or codes.
        parts: what they are made of, and how each of them is kept; None for numbers as they are.
    """

    start: int
    stop: int
    format: Format
    parts: tuple[tuple[Part, Coded | None], ...]


def runs_of(leaf: Stored, there: Mapping[str, Tensor], about: About | None) -> tuple[Run, ...]:
    """The columns of a parameter by how they are kept; none if all are numbers as they are.

    Raises:
        ValueError, NotImplementedError: as `find_coded`; or the columns of different experts are not kept alike.
    """
    found = [(part, _coded(part, leaf, there, about)) for part in leaf.parts]
    if all(coded is None for _, coded in found):
        return ()
    by_columns: dict[tuple[int, int], list[tuple[Part, Coded | None]]] = {}
    for part, coded in found:
        columns = part.place[-1]
        assert isinstance(columns, slice), part
        by_columns.setdefault((columns.start, columns.stop), []).append((part, coded))
    runs: list[Run] = []
    for (start, stop), parts in sorted(by_columns.items()):
        run = Run(start=start, stop=stop, format=_format(parts, there), parts=tuple(parts))
        if runs and (joined := _joined(runs[-1], run)):
            runs[-1] = joined
        else:
            runs.append(run)
    return tuple(runs)


def format_of(runs: tuple[Run, ...]) -> Format:
    """How a parameter of these columns is kept."""
    if not runs:
        return DENSE
    if len(runs) == 1:
        return runs[0].format
    return Joined(parts=tuple((run.stop - run.start, run.format) for run in runs))


def names_there(names: Iterable[str]) -> set[str]:
    """The names of a file's tensors, and those that what is kept in blocks would have as numbers."""
    names = set(names)
    return names | {BLOCKS.sub("", name) for name in names if BLOCKS.search(name)}


def coded_runs(
    tree: Any, there: Mapping[str, Tensor], about: About | None
) -> dict[str, tuple[Run, ...]]:
    """The columns of each parameter of a tree of `Stored` that is not kept as it is, by its place."""
    found = {place: runs_of(leaf, there, about) for place, leaf in placed(tree)}
    return {place: runs for place, runs in found.items() if runs}


def _coded(
    part: Part, leaf: Stored, there: Mapping[str, Tensor], about: About | None
) -> Coded | None:
    if leaf.layout != "linear":
        return None
    found = find_coded(part.name, part.shape, there, about)
    if found is None:
        return None
    if not leaf.is_matrix:
        raise NotImplementedError(
            f"load_model: {part.name} is kept as {found.format.about}, and a matrix of its kind is only read in 16 or "
            f"32 bits; {INSTEAD}"
        )
    return found


def _format(parts: list[tuple[Part, Coded | None]], there: Mapping[str, Tensor]) -> Format:
    """How some columns are kept, which experts must keep alike."""
    formats = [DENSE if coded is None else _own(part, coded) for part, coded in parts]
    (usual, count), *others = Counter(formats).most_common()
    if others:
        at = next(index for index, format in enumerate(formats) if format != usual)
        raise NotImplementedError(
            f"load_model: experts of one layer must be kept alike, {parts[at][0].name} is kept {_shown(formats[at])}, "
            f"{count} others {_shown(usual)}; {INSTEAD}"
        )
    return usual


def _shown(format: Format) -> str:
    return format.about if format == DENSE else f"as {format.about}"


def _own(part: Part, coded: Coded) -> Scaled:
    """The format of a part of which some rows of the tensor are left out, and which may be multiplied by a factor."""
    format = coded.format
    if part.factor != 1.0:
        format = replace(format, scale="float32")
    shared, rows = format.columns, part.rows
    if shared > 1 and rows is not None:
        if any(size % shared for size in (rows.start, rows.stop, rows.size)):
            format = replace(format, columns=1)
    return format


def _joined(first: Run, second: Run) -> Run | None:
    """Two runs as one, if they are kept alike; scales that columns share may then be repeated for each."""
    one, other = first.format, second.format
    if isinstance(one, Scaled) and isinstance(other, Scaled):
        if one.ordered or other.ordered:
            return None
        if one != other and replace(one, columns=1) == replace(other, columns=1):
            one = other = replace(one, columns=1)
        if one.columns > 1 and (second.start - first.start) % one.columns:
            one = other = replace(one, columns=1)
    if one != other:
        return None
    parts = (*first.parts, *second.parts)
    return Run(start=first.start, stop=second.stop, format=one, parts=parts)
