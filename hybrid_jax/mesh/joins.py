"""How the arrays of a parcel are divided over devices: as the heads and channels that they belong to."""

from __future__ import annotations

from dataclasses import replace

from hybrid_jax.config import EngineConfig, ModelConfig
from hybrid_jax.geometry import Geometry, NarrowForm, make_geometry, narrow_parts
from hybrid_jax.kinds.table import entry_of
from hybrid_jax.mesh.split import Split
from hybrid_jax.tiers.form import Form, Join, NarrowJoin
from hybrid_jax.tiers.parcel import NARROW


def divided_form(model: ModelConfig, engine: EngineConfig, geometry: Geometry) -> Form:
    """The parcels of an engine that several devices may run.

    Args:
        model: on one device. geometry: the engine's own, of each of its `engine.tp` devices.
    """
    count = engine.tp
    if count == 1:
        return Form(geometry)
    whole = make_geometry(model, replace(engine, tp=1))
    narrow = geometry.narrow and NarrowForm(num_frames=0, parts=narrow_parts(whole.groups))
    whole = replace(whole, narrow=narrow)
    joins = _of_pages(model, whole, geometry, count)
    states = _of_states(whole, geometry, count)
    joins |= states if narrow is None else {NARROW: NarrowJoin(whole, geometry, states)}
    return Form(geometry, whole, joins, count)


def _of_pages(model: ModelConfig, whole: Geometry, part: Geometry, count: int) -> dict[str, Join]:
    found: dict[str, Join] = {}
    for number, spec in enumerate(model.paged):
        entry, places = entry_of(spec), (whole.kv[number], part.kv[number])
        prefix = "pages" if entry.window is None else "window"
        words = [place.token_words // entry.runs for place in places]
        found[f"{prefix}.{number}"] = _split(words, count, runs=entry.runs)
        if places[0].scale_words:
            scales = [place.scale_words // entry.runs for place in places]
            name = f"{'scales' if entry.window is None else 'window_scales'}.{number}"
            found[name] = _split(scales, count, runs=entry.runs)
    return found


def _split(sizes: list[int], count: int, *, runs: int) -> Split:
    whole, part = sizes
    return Split(count=count, axis=1, whole=(whole,) * runs, part=(part,) * runs)


def _of_states(whole: Geometry, part: Geometry, count: int) -> dict[str, Join]:
    """Of the arrays of checkpoints, as rows have them and narrow ones."""
    found: dict[str, Join] = {}
    for number in range(len(whole.states)):
        layouts = [geometry.states[number].of(geometry).layout for geometry in (whole, part)]
        units = [(layout.units,) for layout in layouts]
        fused = [layout.fused or (layout.channels,) for layout in layouts]
        by_units = Split(count=count, axis=0, whole=units[0], part=units[1])
        found |= {f"{name}.{number}": by_units for name in ("state", "codes", "scales")}
        columns = Split(count=count, axis=1, whole=fused[0], part=fused[1])
        found[f"columns.{number}"] = columns
    return found
