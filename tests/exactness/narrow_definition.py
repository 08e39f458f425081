"""Narrow checkpoints as NumPy makes them, unit by unit: the definition of `hybrid_jax.engine.steps.narrow`."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hybrid_jax.geometry import Geometry, StateGroup


def narrow(frames: np.ndarray, geometry: Geometry) -> np.ndarray:
    """A checkpoint in a row's form, uint32[F, W], in narrow form, uint32[N, W]."""
    parts: list[np.ndarray] = []
    for group in geometry.groups:
        codes, scales = [], []
        for unit in _units(frames, group):
            if group.layout.scales:
                scale, code = quantize(unit.view(np.float32).reshape(-1, group.layout.scales))
                scales.append(scale.view(np.uint32))
                codes.append(code.reshape(-1))
            else:
                codes.append(unit)
        if group.layout.scales:
            flat = np.concatenate(codes)
            codes = [np.pad(flat, (0, -len(flat) % 4)).view(np.uint32)]
        columns = frames[group.columns].reshape(-1)[: group.num_layers * group.column_words]
        parts += [*codes, *scales, columns]
    words = np.concatenate(parts)
    size = geometry.frame_words
    return np.pad(words, (0, -len(words) % size)).reshape(-1, size)


def widen(frames: np.ndarray, geometry: Geometry) -> np.ndarray:
    """The other way round: uint32[N, W] to uint32[F, W], with zeros where a row's form has nothing."""
    words = iter(frames.reshape(-1))
    found: np.ndarray = np.zeros((geometry.state_frames, geometry.frame_words), np.uint32)
    take = lambda count: np.array([next(words) for _ in range(count)], np.uint32)  # noqa: E731
    for group in geometry.groups:
        layout, units = group.layout, list(_units(found, group))
        size = len(units) * layout.unit_words
        if layout.scales:
            codes = take(-(-size // 4)).view(np.int8)[:size].reshape(len(units), -1, layout.scales)
            for unit, code in zip(units, codes, strict=True):
                scale = take(layout.scales).view(np.float32)
                unit[:] = (code.astype(np.float32) * scale).reshape(-1).view(np.uint32)
        else:
            for unit in units:
                unit[:] = take(layout.unit_words)
        columns = found[group.columns].reshape(-1)
        count = group.num_layers * group.column_words
        columns[:count] = take(count)
    return found


def rounded(frames: np.ndarray, geometry: Geometry) -> np.ndarray:
    """What a row goes on from, of a checkpoint that the cache has kept."""
    return widen(narrow(frames, geometry), geometry)


def quantize(unit: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of a unit float32[m, n] the scales float32[n] and codes int8[m, n]."""
    sizes, tiny = np.abs(unit), np.finfo(np.float32).tiny
    largest = sizes.max(axis=0)
    finite = np.isfinite(largest)
    scale = np.where(finite, largest, np.float32(0)) * np.float32(1 / 127)
    zero = scale < tiny
    scale = ((scale.view(np.uint32) + 64) // 128 * 128).view(np.float32)  # 17 of 24 bits
    scale = np.where(zero, np.float32(0), scale)
    used = ~zero & (sizes >= tiny)
    codes = np.rint(np.where(used, unit, np.float32(0)) / np.where(zero, np.float32(1), scale))
    scale = np.where(finite, scale, np.float32(np.nan))
    return scale, codes.astype(np.int8)


def _units(frames: np.ndarray, group: StateGroup) -> Iterator[np.ndarray]:
    """Views uint32[unit_words] of a group's units in a row's checkpoint, layer after layer."""
    size, per_frame = group.layout.unit_words, group.units_per_frame
    for layer in range(group.num_layers):
        for unit in range(group.layout.units):
            frame, place = divmod(unit, per_frame)
            line = frames[group.state_frame(layer) + frame]
            yield line[place * size : (place + 1) * size]
