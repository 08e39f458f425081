"""Checkpoints as int8: what they cost in log-probabilities, by layers, depth and resumes in a row, and how many fit.

    python benchmarks/cache/checkpoints.py [--json benchmarks/results/cache/checkpoints.json] [--png FILE] [--smoke]
    python benchmarks/cache/checkpoints.py --draw FILE.json --png FILE.png

Accuracy and bytes only; no times. The texts are held-out modules of Python's standard library, a token a byte.

- `formats`: a float32 engine computes a prefix; its checkpoint is rounded in NumPy to one format or another and put
  back; the next 128 tokens are judged from it, beside the same from the checkpoint as it was. Errors are those of the
  tokens' log-probabilities; `nats_a_byte` is what the text costs more. `bits` are those of a state's element, with
  scales.
- `resumes`: engines with float32 and int8 checkpoints read a text in one go, or in eleven prompts that each go on from
  the one before. Both judge the last 128 tokens.
- `prefixes`: 384 prefixes one after the other, twice, in an arena that holds them as int8 only (least recently used).
- `sizes`: checkpoints a byte, in frames, of models that are known by name.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[2]))  # when run as a file
from benchmarks.cache import tier_pictures
from benchmarks.common import header, measure_or_draw
from hybrid_jax.config import CacheConfig, EngineConfig
from hybrid_jax.config.sampling_params import SamplingParams
from hybrid_jax.engine.engine import Engine
from hybrid_jax.geometry import make_geometry
from hybrid_jax.models.files import known_names, model_folder
from hybrid_jax.models.known import load_known
from hybrid_jax.schedule.request import Request
from hybrid_jax.train.data import read_corpus, sources_of
from hybrid_jax.weights import load_model

MODELS = {"bundled": None, "tiny_gated_delta": "tiny_gated_delta", "tiny_cut": "tiny_cut"}
DEPTHS, JUDGED = (64, 256, 1024), 128  # tokens
RESUMES, STEP = 10, 96
TEXTS = 10
PREFIXES, PREFIX = 384, 64
SETTINGS = EngineConfig(max_rows=1, max_model_len=2048, memory=48 << 20)
FLOAT32, INT8 = CacheConfig(), CacheConfig(checkpoints="int8")

Format = Callable[[np.ndarray], np.ndarray]  # float32[units, m, scales] to the same, rounded


# --- formats --------------------------------------------------------------------------------------


def rounded(x: np.ndarray, most: int, axis: int | tuple[int, ...] = 1) -> np.ndarray:
    """As codes of -most .. most with a scale for all values along the axis."""
    scale = np.abs(x).max(axis, keepdims=True) / most
    scale[scale == 0] = 1
    return (np.rint(x / scale) * scale).astype(np.float32)


def bfloat16(x: np.ndarray) -> np.ndarray:
    """Rounded to the nearest bfloat16."""
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def with_residual(x: np.ndarray) -> np.ndarray:
    """int8, and int4 of what that leaves, with a scale of its own."""
    first = rounded(x, 127)
    return first + rounded(x - first, 7)


def worse_units_wide(x: np.ndarray) -> np.ndarray:
    """int8, but float32 for the eighth of the units that int8 rounds worst."""
    narrow = rounded(x, 127)
    error = np.linalg.norm((narrow - x).reshape(len(x), -1), axis=1)
    worst = np.argsort(error)[-max(1, len(x) // 8) :]
    narrow[worst] = x[worst]
    return narrow


def formats(values: int, keys: int) -> dict[str, tuple[float, Format]]:
    """Bits of an element, and the format, for units of [values, keys]."""
    each = 32 / values  # of a scale for each key
    return {
        "float32": (32, lambda x: x),
        "bfloat16": (16, bfloat16),
        "int8 + int4": (12 + 2 * each, with_residual),
        "int8": (8 + each, lambda x: rounded(x, 127)),
        "int8, an eighth of the units float32": ((8 + each) * 7 / 8 + 4, worse_units_wide),
        "int8, a scale for each value": (8 + 32 / keys, lambda x: rounded(x, 127, 2)),
        "int8, a scale for each unit": (8 + each / keys, lambda x: rounded(x, 127, (1, 2))),
        "int4": (4 + each, lambda x: rounded(x, 7)),
    }


# --- an engine that is asked for log-probabilities ------------------------------------------------


class Reader:
    """An engine, and what it thinks of texts."""

    def __init__(self, name: str, cache: CacheConfig = FLOAT32, **settings: Any) -> None:
        model = MODELS[name]
        folder = None if model is None else model_folder(model, name)
        config, params = load_model(folder, dtype="float32")
        self.engine = Engine(config, params, replace(SETTINGS, cache=cache, **settings))
        self._count = 0

    def read(self, tokens: list[int], judged_from: int | None = None) -> np.ndarray:
        """Puts a text into the cache; with `judged_from`, log-probabilities of its tokens from there on, [n]."""
        self._count += 1
        asked = 0 if judged_from is not None else None
        request = Request(
            request_id=str(self._count),
            prompt=tokens,
            params=SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=asked),
            seed=0,
            max_tokens=1,
            logprobs_from=(judged_from or 0) + 1,
        )
        self.engine.add(request)
        while self.engine.has_work:
            self.engine.step()
        self.hit = request.hit.num_tokens
        if judged_from is None:
            return np.zeros(0)
        return np.array([e.logprob for e in request.output.prompt_logprobs[judged_from + 1 :] if e])

    def frames(self, tokens: list[int]) -> np.ndarray:
        """Frames of the checkpoint at the end of a text."""
        memory = self.engine.scheduler.memory
        assert memory.tree is not None
        match = memory.tree.match(np.array([*tokens, 0]))
        assert match.hit_len == len(tokens), (match.hit_len, len(tokens))
        return np.array(memory.slots.frames(match.node.slots[0]))


def changed(frames: np.ndarray, reader: Reader, name: str) -> tuple[np.ndarray, list[float]]:
    """A checkpoint uint32[F, W] in another format, and the relative error of each layer's state."""
    found, errors = frames.copy(), []
    for group in reader.engine.geometry.groups:
        layout = group.layout
        if not layout.units:
            continue
        _, convert = formats(layout.unit_words // layout.scales, layout.scales)[name]
        used = group.units_per_frame * layout.unit_words
        for layer in range(group.num_layers):
            first = group.state_frame(layer)
            part = found[first : first + group.frames_per_layer, :used].view(np.float32)
            flat = part.reshape(-1, layout.unit_words)
            state = flat[: layout.units].reshape(layout.units, -1, layout.scales).copy()
            new = convert(state)
            errors.append(float(np.linalg.norm(new - state) / np.linalg.norm(state)))
            flat[: layout.units] = new.reshape(layout.units, -1)
            found[first : first + group.frames_per_layer, :used] = flat.reshape(part.shape).view(
                np.uint32
            )
    return found, errors


def measure_formats(name: str, texts: list[list[int]], depths: tuple[int, ...]) -> dict[str, Any]:
    reader, found = Reader(name), {}
    layout = next(g.layout for g in reader.engine.geometry.groups if g.layout.units)
    tried = formats(layout.unit_words // layout.scales, layout.scales)
    rows: dict[str, dict[int, list]] = {each: {d: [] for d in depths} for each in tried}
    errors: dict[str, list[float]] = {each: [] for each in tried}
    for depth in depths:
        for text in texts:
            whole = text[: depth + JUDGED + 1]
            reader.engine.reset_prefix_cache()
            reader.read(text[: depth + 1])
            places = reader.frames(text[:depth])
            kept = np.asarray(reader.engine.runner.state.arena)[places]
            before = reader.read(whole, depth)
            assert reader.hit == depth
            for each in tried:
                new, lost = changed(kept, reader, each)
                state = reader.engine.runner.state
                arena = state.arena.at[places].set(new)
                reader.engine.runner.state = state.replace(arena=arena)
                rows[each][depth].append(before - reader.read(whole, depth))
                assert reader.hit == depth
                errors[each] += lost
    for each, (bits, _) in tried.items():
        found[each] = {
            "bits": bits,
            "state_error": float(np.mean(errors[each])),
            "by_depth": {depth: _lost(np.stack(lost)) for depth, lost in rows[each].items()},
            **_lost(np.concatenate([np.stack(lost) for lost in rows[each].values()])),
        }
        print(f"{name:18} {each:38} {found[each]['nats_a_byte']:+.6f}", flush=True)
    reader.engine.close()
    return found


def _lost(lost: np.ndarray) -> dict[str, float]:
    """From differences [texts, tokens]: their mean with its standard error over texts, and how large they are."""
    means = lost.mean(axis=1)
    return {
        "nats_a_byte": float(means.mean()),
        "standard_error": float(means.std(ddof=1) / len(means) ** 0.5) if len(means) > 1 else 0.0,
        "mean_error": float(np.abs(lost).mean()),
        "largest_error": float(np.abs(lost).max()),
    }


def measure_resumes(name: str, texts: list[list[int]]) -> dict[str, Any]:
    """What ten resumes in a row lose, and one at the same place, beside none."""
    found: dict[str, list] = {"ten": [], "one": [], "none": []}
    exact, narrow = Reader(name), Reader(name, INT8)
    last = RESUMES * STEP
    for text in texts:
        whole = text[: last + JUDGED + 1]
        exact.engine.reset_prefix_cache()
        cold = exact.read(whole, last)
        assert exact.hit == 0
        for how, reader, steps in (
            ("ten", narrow, range(STEP, last + 1, STEP)),
            ("one", narrow, range(last, last + 1)),
            ("none", exact, range(last, last + 1)),
        ):
            reader.engine.reset_prefix_cache()
            hits = []
            for end in steps:
                reader.read(text[: end + 1])
                hits.append(reader.hit)
            lost = cold - reader.read(whole, last)
            assert hits == [0, *range(STEP, last, STEP)][: len(hits)] and reader.hit == last, hits
            found[how].append(lost)
    exact.engine.close()
    narrow.engine.close()
    return {how: _lost(np.stack(lost)) for how, lost in found.items()}


def measure_prefixes(count: int) -> dict[str, Any]:
    """Tokens skipped of those that might be, when prefixes come back that an arena holds as int8 only."""
    rng, found = np.random.default_rng(0), {}
    prefixes = rng.integers(0, 256, (count, PREFIX)).tolist()
    for form in ("float32", "int8"):
        cache = CacheConfig(policy="lru", checkpoints=form)
        reader = Reader("bundled", cache, max_model_len=256)
        geometry = reader.engine.geometry
        narrow = make_geometry(reader.engine.config, replace(SETTINGS, cache=INT8))
        each = (
            narrow.cached_state_frames + geometry.num_pages(PREFIX + 1) * geometry.frames_per_page
        )
        num_frames = 2 + count * each + 2 * geometry.row_frames(PREFIX + 8)
        reader.engine.close()
        fixed = reader.engine.sizes.row_bytes + (1 << 16)
        memory = fixed + num_frames * (geometry.frame_bytes + 16)
        reader = Reader("bundled", cache, max_model_len=256, memory=memory)
        for prefix in prefixes:
            reader.read([*prefix, 1])
        hits = []
        for prefix in prefixes:
            reader.read([*prefix, 2])
            hits.append(reader.hit)
        found[form] = {
            "frames": reader.engine.sizes.num_frames - 1,
            "reuse": sum(hits) / (count * PREFIX),
        }
        reader.engine.close()
    return {"prefixes": count, "tokens": PREFIX} | found


def measure_sizes() -> dict[str, Any]:
    """Frames and bytes of a checkpoint in both forms."""
    found = {}
    for name in ["bundled", *known_names()]:
        for dtype in ("float32", "bfloat16"):
            config = load_model(None)[0] if name == "bundled" else load_known(name)
            geometry = make_geometry(config, EngineConfig(dtype=dtype, cache=INT8))
            if geometry.narrow is not None:
                wide, narrow = geometry.checkpoint_frames
                words = sum(group.used_words for group in geometry.groups)
                found[f"{name}, {dtype}"] = {
                    "bytes": wide * geometry.frame_bytes,
                    "int8_bytes": narrow * geometry.frame_bytes,
                    "times_as_many": wide / narrow,
                    "without_padding": words / sum(map(sum, geometry.narrow.parts)),
                }
    return found


def measure(given: argparse.Namespace) -> dict[str, Any]:
    longest = max(DEPTHS[-1], RESUMES * STEP) + JUDGED + 1
    documents = read_corpus(sources_of(None)).held_out
    long = [list(d.content) for d in documents if len(d.content) > longest + 200]
    texts = [text[200 : 200 + longest] for text in long][:: max(1, len(long) // TEXTS)]
    texts = texts[:2] if given.smoke else texts[:TEXTS]
    report: dict[str, Any] = header() | {"dtype": "float32", "texts": len(texts)}
    report["sizes"] = measure_sizes()
    report["prefixes"] = measure_prefixes(24 if given.smoke else PREFIXES)
    print(report["prefixes"], flush=True)
    names = ["bundled"] if given.smoke else [*MODELS]
    report["resumes"] = {name: measure_resumes(name, texts) for name in names}
    print(report["resumes"], flush=True)
    depths = DEPTHS[:1] if given.smoke else DEPTHS
    report["formats"] = {name: measure_formats(name, texts, depths) for name in names}
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    measure_or_draw(parser, measure, tier_pictures.draw_checkpoints)


if __name__ == "__main__":
    main()
