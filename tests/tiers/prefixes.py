"""Prefixes of tiny models with random content, for tests of their files."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hybrid_jax.config import EngineConfig
from hybrid_jax.geometry import Geometry, make_geometry
from hybrid_jax.tiers.parcel import Pieces, prefix_shapes
from tests.tiny_models import tiny_model

ENGINE = EngineConfig(max_rows=2, page_tokens=64)


def geometry_of(name: str, **settings) -> Geometry:
    """Of a tiny model, with other engine settings than `ENGINE`."""
    return make_geometry(tiny_model(name)[0], replace(ENGINE, **settings))


Arrays = dict[str, np.ndarray]


def random_prefix(geometry: Geometry, position: int, seed: int = 0) -> Arrays:
    """Random bits for all that resuming there takes."""
    rng = np.random.default_rng(seed)
    found = {}
    for name, (dtype, shape) in prefix_shapes(geometry, position).items():
        data = rng.integers(0, 256, int(np.prod(shape)) * np.dtype(dtype).itemsize, np.uint8)
        found[name] = data.view(dtype).reshape(shape)
    return found


def joined(pieces: dict[str, Pieces]) -> Arrays:
    """Each array in one piece."""
    return {name: each.joined() for name, each in pieces.items()}


def whole(arrays: Arrays) -> dict[str, Pieces]:
    """Arrays as one piece each."""
    return {name: Pieces(x.dtype.name, x.shape, [x]) for name, x in arrays.items()}


def same(a: Arrays, b: Arrays) -> bool:
    """Whether two have the same arrays, bit for bit."""
    return {n: (x.dtype, x.shape, x.tobytes()) for n, x in a.items()} == {
        n: (x.dtype, x.shape, x.tobytes()) for n, x in b.items()
    }
