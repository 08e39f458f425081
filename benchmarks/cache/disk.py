"""The tier on disk: rates, a decode step beside saves, prompts that never come back, first tokens.

    python benchmarks/cache/disk.py [--json benchmarks/results/cache/disk.json] [--png FILE] [--folder FOLDER] [--smoke]
    python benchmarks/cache/disk.py --draw FILE.json --png FILE.png

A random Nemotron-H of 173 M parameters (`random_models.nemotron_model`). Sides are measured in turns in one process, in
medians with 10th and 90th percentiles. Files are dropped from the system's cache before each read, as far as it lets
go of them. Rates are shares of what reading and writing plain files of the same sizes reaches in the same folder.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[2]))  # when run as a file
from benchmarks.cache import tier_pictures
from benchmarks.cache.tier_runs import (
    NUMBERS,
    SHARED,
    changing_plans,
    decode_beside,
    first_tokens,
    never_back,
    prompt_of,
    rates_beside,
)
from benchmarks.common import header, measure_or_draw
from benchmarks.engine.random_models import nemotron_model
from hybrid_jax.config import CacheConfig, EngineConfig
from hybrid_jax.engine.engine import Engine
from hybrid_jax.engine.tiers.open_disk import checksums
from hybrid_jax.models.initialize import random_params
from hybrid_jax.schedule.plan import Outgoing, Plan
from hybrid_jax.schedule.tiers.arrivals import places_in, wanted_frames
from hybrid_jax.tiers.folder import files_of


def forget(files: list[Path]) -> None:
    """Has the system drop files from its cache."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def rates(engine: Engine, rounds: int) -> dict[str, Any]:
    """Bytes a second of a prefix that is written and read, and their shares of plain files' of the same sizes."""
    disk, geometry = engine.disk, engine.geometry
    rng = np.random.default_rng(0)
    places = places_in(wanted_frames(geometry, SHARED))
    words = rng.integers(0, 1 << 32, geometry.frame_words, np.uint32)
    plain = disk.folder.path / "plain"
    plain.mkdir()

    def own_files() -> list[Path]:
        return [file.path for file in files_of(disk.folder.path)]

    def clear() -> None:
        for file in own_files():
            file.unlink()
        disk.folder.scan()

    tokens = np.array(prompt_of(rng, SHARED, engine.config.vocab_size), np.int32)
    save = disk.wants(disk.chain(tokens), SHARED)
    copies = [words] * (len(places) + geometry.cached_state_frames)
    disk.save(save, copies)
    disk.flush()
    sizes = [file.stat().st_size for file in own_files()]

    def write(_) -> float:
        clear()
        start = time.perf_counter()
        disk.save(save, copies)
        disk.flush()
        return sum(sizes) / (time.perf_counter() - start)

    def read(_) -> float:
        forget(own_files())
        start = time.perf_counter()
        found = disk.read(disk.chain(tokens), SHARED, places)
        assert found.wait(600) and not found.failed
        return found.num_bytes / (time.perf_counter() - start)

    def plain_write(_) -> float:
        for file in plain.iterdir():
            file.unlink()
        data, start = words.view(np.uint8), time.perf_counter()
        for number, size in enumerate(sizes):
            with (plain / str(number)).open("wb") as file:
                for begin in range(0, size, data.size):
                    file.write(data[: min(data.size, size - begin)].data)
        return sum(sizes) / (time.perf_counter() - start)

    def plain_read(_) -> float:
        files = sorted(plain.iterdir())
        forget(files)
        start = time.perf_counter()
        total = sum(np.fromfile(file, np.uint8).size for file in files)
        return total / (time.perf_counter() - start)

    plain_write(None)
    sides = {"write": write, "plain write": plain_write, "read": read, "plain read": plain_read}
    beside = {name: f"plain {name}" for name in ("write", "read")}
    values, share = rates_beside(rounds, sides, beside)
    clear()
    return {"bytes": sum(sizes), "bytes_per_s": values, "share_of_plain": share}


def saving(engine: Engine, num_frames: int) -> AbstractContextManager[None]:
    """Each plan hands so many frames to the writer, which packs and writes them."""
    disk, rng = engine.disk, np.random.default_rng(next(NUMBERS))

    def save_frames(plan: Plan) -> None:
        if disk.has_room:
            tokens = np.array(prompt_of(rng, 64, engine.config.vocab_size), np.int32)
            save = disk.wants(disk.chain(tokens), 64)
            frames = np.arange(1, 1 + num_frames, dtype=np.int32)
            plan.to_disk = [
                *plan.to_disk,
                Outgoing(arena=frames, give=lambda copies: disk.save(save, copies)),
            ]

    return changing_plans(save_frames)


def write_all(engine: Engine) -> None:
    """Waits until all that the cache has taken is on disk."""
    while engine.has_saves or engine.has_work:
        engine.step()
    engine.disk.flush()


def to_disk(engine: Engine) -> None:
    """The cache in memory is emptied, and so is the system's cache of files."""
    engine.reset_prefix_cache()
    forget([file.path for file in files_of(engine.disk.folder.path)])


def measure(given: argparse.Namespace) -> dict[str, Any]:
    rounds = 2 if given.smoke else 9
    config = nemotron_model()
    params = random_params(config, 0)
    report: dict[str, Any] = header() | {"model": "nemotron_173m", "dtype": "float32"}
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        settings = EngineConfig(
            max_rows=8,
            max_model_len=SHARED + 256,
            cache=CacheConfig(loads="always"),
            cache_dir=f"{folder}/large",
            disk_memory=8 << 30,
        )
        start = time.perf_counter()
        checksums(params)
        report["checksums_s"] = time.perf_counter() - start
        engine = Engine(config, params, settings)
        report["rates"] = rates(engine, rounds)
        print(report["rates"]["share_of_plain"], flush=True)
        num_frames = engine.geometry.cached_state_frames + engine.geometry.frames_per_page
        report["decode_beside_saves"] = decode_beside(
            engine, lambda: saving(engine, num_frames), rounds, 64
        ) | {"frames_per_plan": num_frames}
        print("decode beside saves", report["decode_beside_saves"]["ratio"], flush=True)
        report["first_tokens"] = first_tokens(
            engine,
            2 if given.smoke else 5,
            tier="from disk",
            loaded="disk_loaded_tokens",
            send_down=lambda: to_disk(engine),
            settle=lambda: write_all(engine),
        )
        print(report["first_tokens"]["over_cold"], flush=True)
        engine.close()
        small = replace(settings, memory=400 << 20, max_model_len=512)
        engines = {
            "off": Engine(config, params, replace(small, cache_dir=None, disk_memory=None)),
            "on": Engine(
                config, params, replace(small, cache_dir=f"{folder}/small", disk_memory=1 << 30)
            ),
        }
        report["never_back"] = never_back(engines, rounds, 16, "disk_saves")
        print("never back", report["never_back"]["ratio"], flush=True)
        engines["on"].close()
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--folder", type=Path, help="where the files go; a temporary folder if left out"
    )
    measure_or_draw(parser, measure, tier_pictures.draw_tier)


if __name__ == "__main__":
    main()
