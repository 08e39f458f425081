"""The tier on disk of an engine: its folder, and the root under which its prefixes have their names."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from hybrid_jax.config import EngineConfig, ModelConfig
from hybrid_jax.geometry import Geometry
from hybrid_jax.tiers.chain import RUN_TOKENS, root_of
from hybrid_jax.tiers.disk import Disk
from hybrid_jax.tiers.folder import CacheFolderError, Folder, default_limit, least_limit
from hybrid_jax.tiers.form import Form
from hybrid_jax.tiers.part_file import VERSION

BLOCK_BYTES = 64 << 20
MOST_THREADS = 8


def open_disk(
    config: ModelConfig, params: Any, engine: EngineConfig, form: Form, device: jax.Device
) -> Disk | None:
    """The tier on disk that `engine.cache_dir` asks for; None without one.

    Raises:
        ValueError: the folder cannot be used, or `engine.disk_memory` is too small.
    """
    if engine.cache_dir is None:
        return None
    path = Path(engine.cache_dir).expanduser()
    root, geometry = root_of_engine(config, params, engine, form, device), form.geometry
    layers = f"{len(geometry.states)} layers with a state and {len(geometry.kv)} with pages"
    pages = "" if geometry.kv_dtype == geometry.dtype else f", pages in {geometry.kv_dtype}"
    exact = ", exact" if engine.exact else ""
    about = {"model": f"{config.family} with {layers}, {geometry.dtype}{pages}{exact}"}
    try:
        limit = default_limit(path) if engine.disk_memory is None else engine.disk_memory
        least_limit(path, limit, _least_bytes(geometry))
        return Disk(Folder(path, root, limit=limit, about=about), geometry, form)
    except CacheFolderError as error:
        raise ValueError(f"EngineConfig: cache_dir {error}") from error


def _least_bytes(geometry: Geometry) -> int:
    pages = geometry.num_pages(RUN_TOKENS) * geometry.frames_per_page
    return (pages + geometry.cached_state_frames) * geometry.frame_bytes


def root_of_engine(
    config: ModelConfig, params: Any, engine: EngineConfig, form: Form, device: jax.Device
) -> str:
    """A digest of all that a prefix's values depend on beside its tokens.

    That is every weight, what the model does with them, the dtypes, and which layers cache what. An exact engine
    promises bits, and these also depend on the grain, and on what compiles and runs the steps.
    """
    computed = replace(config, dtype="float32", eos_token_ids=(), bos_token_id=None)
    marks: list[object] = [VERSION, computed, form.identity]
    marks += checksums(params)
    if engine.exact:
        marks += [
            "exact",
            form.geometry.grain,
            engine.tp,
            jax.__version__,
            device.device_kind,
            engine.kernels,
        ]
    return root_of(*marks)


def checksums(params: Any) -> list[tuple]:
    """Name, shape, dtype and CRC-32s of every array of weights. No single value can change without a CRC changing."""

    def of(item: tuple) -> tuple:
        path, leaf = item
        name = jax.tree_util.keystr(path)
        return (
            name,
            leaf.shape,
            str(leaf.dtype),
            tuple(zlib.crc32(part.data) for part in _blocks(leaf)),
        )

    leaves = jax.tree_util.tree_leaves_with_path(params)
    with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1)) as threads:
        return list(threads.map(of, leaves))


def _blocks(leaf: jax.Array) -> Iterator[np.ndarray]:
    data = np.ascontiguousarray(np.asarray(leaf)).reshape(-1).view(np.uint8)
    for begin in range(0, data.size, BLOCK_BYTES):
        yield data[begin : begin + BLOCK_BYTES]
