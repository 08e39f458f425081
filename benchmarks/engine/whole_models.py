r"""Our engine against transformers on the same random hybrid, in one process, taking turns.

    pip install -e '.[parity]'
    python benchmarks/engine/whole_models.py --model nemotron \
        [--dtype float32 bfloat16] [--only decode prefill ...] [--json FILE]

Models: `random_models.py`. Peer: torch on all cores, eager, and compiled with a StaticCache (minutes of compiling
a shape; `--peers eager` leaves it out). For `decode` and `prefill` there is also llama.cpp (`--peers
llama.cpp --llama-cpp SOURCE`, see `llama_cpp_peer.py`). Every round gives all sides the same random prompts; the side
that begins changes. Printed: median, 10th and 90th percentile of the value, and of ours over the side's in the same
round, same dtype; then our best dtype over the best of theirs.

- `limits`: what this machine streams (a sum over 512 MiB) and multiplies (512 rows with 16 Mi weights), the better of
  XLA and torch, and the tokens per second that allows: a decode step reads all weights but the embeddings and
  every row's checkpoint, a prefill takes `costs.prefill_flops`.
- `decode`: 128 tokens of prompt, then tokens per second at batch 1 and 8. Ours: the engine's steps while all rows
  decode. The peer's: forward calls and argmax alone. First the greedy tokens of both are compared.
- `prefill`: one prompt of 512, 2048, 4096 tokens to its first token.
- `shared`: 64 prompts of 400 common and 16 own tokens, 16 new tokens each, generated tokens per second: ours with
  and without the prefix cache, the peer in batches of 8 and 64 (equal lengths, so that it pads nothing); and 64
  prompts with nothing in common. Half the rounds of the others.
- `sampling`: milliseconds of the draw of 8 rows at a vocabulary of 131,072, and of the decode step it is part of.
- `memory`: peak resident memory of a process that prefills 2048 tokens and decodes 8 rows, less what it held
  before the model was loaded, over weights + `memory`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[2]))  # when run as a file
from benchmarks.common import header, quantiles, request, run, run_decode, turns, write_json
from benchmarks.engine.random_models import CONFIGS, write_model
from hybrid_jax.config import CacheConfig, EngineConfig
from hybrid_jax.config.arrays import ITEM_BYTES
from hybrid_jax.costs import prefill_flops, weight_count
from hybrid_jax.engine.engine import Engine
from hybrid_jax.engine.programs.compile_cache import enable_compile_cache
from hybrid_jax.engine.sampling import SamplingRows, sample
from hybrid_jax.geometry import (
    checkpoint_bytes,
)
from hybrid_jax.machine import peak_resident_bytes
from hybrid_jax.models.initialize import random_params
from hybrid_jax.products.xla import HIGHEST
from hybrid_jax.weights import load_model

CASES = ("memory", "sampling", "limits", "decode", "prefill", "shared")
PROMPT, STEPS, ROWS = 128, 64, 8
LENGTHS = (512, 2048, 4096)
COUNT, COMMON, OWN, NEW = 64, 400, 16, 16
WIDE = 1 << 17  # tokens of the vocabulary in `sampling`
DRAWN = 16  # draws that are timed together
MEMORY = 1 << 30
FIRST, LAST = 3, 20000  # token ids of random prompts
AGREE = (
    0.9  # share of greedy tokens that must be the same in float32: random weights have near ties
)
DRAWS = {
    "greedy": {"temperature": 0.0},
    "temperature": {},
    "top_k 50, top_p 0.9": {"top_k": 50, "top_p": 0.9},
    "top_k 1000": {"top_k": 1000},
    "min_p 0.05": {"min_p": 0.05},
    "top_p 0.95": {"top_p": 0.95},
}


class Ours:
    """The engine of a model directory, or of a model in memory."""

    def __init__(
        self, path: Path | None, dtype: str, *, cache: str = "adaptive", model=None
    ) -> None:
        self.config, self.params = model or load_model(path, dtype=dtype)
        settings = EngineConfig(
            dtype=dtype,
            memory=MEMORY,
            max_rows=ROWS,
            max_model_len=4608,
            cache=CacheConfig(policy=cache),
        )
        self.engine = Engine(self.config, self.params, settings)

    def _requests(self, prompts: np.ndarray, new: int) -> list:
        self.engine.reset_prefix_cache()
        return [request(f"r{i}", p, new) for i, p in enumerate(prompts.tolist())]

    def prefill(self, prompts: np.ndarray) -> float:
        return prompts.size / run(self.engine, self._requests(prompts, 1))

    def decode(self, prompts: np.ndarray) -> float:
        elapsed, tokens = run_decode(self.engine, self._requests(prompts, STEPS))
        return tokens / elapsed

    def batch(self, prompts: np.ndarray) -> float:
        return len(prompts) * NEW / run(self.engine, self._requests(prompts, NEW))

    def greedy(self, prompts: np.ndarray) -> np.ndarray:
        requests = self._requests(prompts, STEPS)
        run(self.engine, requests)
        return np.array([one.output.token_ids for one in requests])


class Theirs:
    """The peer under the same names.

    Args:
        source: folder of llama.cpp's source, for that peer.
    """

    def __init__(self, path: Path, dtype: str, name: str, source: Path | None = None) -> None:
        if name == "llama.cpp":
            from benchmarks.engine import llama_cpp_peer

            self.peer = llama_cpp_peer.Peer(path, source, dtype)
        else:
            from benchmarks.engine import transformers_peer

            self.peer = transformers_peer.Peer(path, dtype, compiled=name == "compiled")

    def prefill(self, prompts: np.ndarray) -> float:
        return prompts.size / self.peer.prefill(prompts)[0]

    def decode(self, prompts: np.ndarray) -> float:
        _, cache, token = self.peer.prefill(prompts, STEPS)
        return len(prompts) * STEPS / self.peer.decode(cache, token, STEPS)[0]

    def batch(self, prompts: np.ndarray, size: int) -> float:
        elapsed = 0.0
        for start in range(0, len(prompts), size):
            took, cache, token = self.peer.prefill(prompts[start : start + size], NEW)
            elapsed += took + self.peer.decode(cache, token, NEW - 1)[0]
        return len(prompts) * NEW / elapsed

    def greedy(self, prompts: np.ndarray) -> np.ndarray:
        _, cache, token = self.peer.prefill(prompts, STEPS)
        return np.array(self.peer.decode(cache, token, STEPS - 1)[1])


class Report:
    """Rates by case and side, shown as they come."""

    def __init__(self, fields: dict) -> None:
        self.fields = fields | {"cases": {}}

    def rates(self, case: str, values: dict[str, list[float]], dtypes: list[str]) -> None:
        """Sides are "name, dtype"; each is compared with "ours" of its dtype."""
        found = {}
        for side, own in values.items():
            base = values["ours, " + side.rsplit(", ", 1)[1]]
            ratio = quantiles([a / b for a, b in zip(base, own, strict=True)])
            found[side] = quantiles(own) | {"ours_over_it": ratio}
            self._line(case, side, found[side], ratio)
        peers = [side for side in values if not side.startswith("ours")]
        if peers and len(dtypes) > 1:
            best = lambda sides: max((values[s] for s in sides), key=np.median)  # noqa: E731
            pairs = zip(best(f"ours, {d}" for d in dtypes), best(peers), strict=True)
            found["best over best"] = quantiles([a / b for a, b in pairs])
            print(
                f"{case:16}best of ours over best of theirs: {found['best over best']['median']:.2f}x"
            )
        self.fields["cases"][case] = found

    def plain(self, case: str, found: dict) -> None:
        self.fields["cases"][case] = found
        for name, value in found.items():
            shown = f"{value['median']:.4g}" if isinstance(value, dict) else f"{value:.4g}"
            print(f"{case:16}{name:38}{shown:>12}", flush=True)

    def _line(self, case: str, side: str, value: dict, ratio: dict) -> None:
        spread = f"[{value['p10']:.1f}, {value['p90']:.1f}]"
        ratios = f"{ratio['median']:.2f}x [{ratio['p10']:.2f}, {ratio['p90']:.2f}]"
        print(f"{case:16}{side:38}{value['median']:10.1f} {spread:20}{ratios}", flush=True)


def random_prompts(rng: np.random.Generator, count: int, length: int) -> np.ndarray:
    return rng.integers(FIRST, LAST, (count, length))


def compare_tokens(
    report: Report, sides: dict, rng: np.random.Generator, dtypes: list[str]
) -> None:
    """Both sides run the same model: greedy tokens of ours and of each peer, as far as a row agrees."""
    prompts, shares = random_prompts(rng, ROWS, PROMPT), {}
    for dtype in dtypes:
        own = sides[f"ours, {dtype}"].greedy(prompts)
        for name, side in sides.items():
            if name.startswith("ours") or not name.endswith(dtype):
                continue
            same = np.cumprod(own == side.greedy(prompts), axis=1).mean()
            shares[name] = float(same)
            if dtype == "float32" and same < AGREE:
                raise SystemExit(
                    f"whole_models.py: {name} agrees on {same:.0%} of greedy tokens only"
                )
    report.plain("same tokens", shares)


def shared(report: Report, sides: dict, rounds: int, rng, dtypes: list[str]) -> None:
    calls, different = {}, {}
    for name, side in sides.items():
        what, dtype = name.rsplit(", ", 1)
        if what == "ours":
            off = Ours(None, dtype, cache="off", model=(side.config, side.params))
            calls |= {name: side.batch, f"ours without cache, {dtype}": off.batch}
            different |= {name: side.batch, f"ours without cache, {dtype}": off.batch}
            continue
        for size in (ROWS, COUNT):
            call = lambda prompts, side=side, size=size: side.batch(prompts, size)  # noqa: E731
            calls[f"{what} in batches of {size}, {dtype}"] = call

    def same() -> np.ndarray:
        common = np.broadcast_to(random_prompts(rng, 1, COMMON), (COUNT, COMMON))
        return np.concatenate([common, random_prompts(rng, COUNT, OWN)], 1)

    report.rates("shared prefix", turns(rounds, calls, same), dtypes)
    draw = lambda: random_prompts(rng, COUNT, COMMON + OWN)  # noqa: E731
    report.rates("nothing shared", turns(rounds, different, draw), dtypes)


def sampling(report: Report, ours: Ours, rounds: int, rng, dtype: str) -> None:
    """The draw on flat logits (standard normal), on peaked ones (4 times that), and on those of words by their rank."""
    config = replace(ours.config, vocab_size=WIDE)
    wide = Ours(None, dtype, model=(config, random_params(config, 0, dtype=dtype)))
    one = np.random.default_rng(0)
    flat = one.standard_normal((ROWS, WIDE)).astype(np.float32)
    ranked = np.stack([one.permutation(-1.4 * np.log1p(np.arange(WIDE))) for _ in range(ROWS)])
    inputs = {"flat": flat, "peaked": 4 * flat, "ranked": ranked.astype(np.float32)}
    draw, call = jax.jit(sample), itertools.count()

    def alone(logits: jax.Array, fields: dict) -> float:
        """Mean of draws at positions never used before: some rows need a second look, some do not."""
        fill = lambda name, kind, other: jnp.full(ROWS, fields.get(name, other), kind)  # noqa: E731
        rows = SamplingRows(
            seed=jnp.stack([jnp.arange(ROWS, dtype=jnp.uint32), jnp.zeros(ROWS, jnp.uint32)], 1),
            sample_index=jnp.zeros(ROWS, jnp.int32),
            temperature=fill("temperature", jnp.float32, 1.0),
            top_k=fill("top_k", jnp.int32, 0),
            top_p=fill("top_p", jnp.float32, 1.0),
            min_p=fill("min_p", jnp.float32, 0.0),
            min_end=jnp.zeros(ROWS, jnp.int32),
            stop_ids=jnp.full((ROWS, 1), -1, jnp.int32),
        )
        positions = [jnp.full(ROWS, next(call)).block_until_ready() for _ in range(DRAWN)]
        start = time.perf_counter()
        for position in positions:
            draw(logits, rows, position).block_until_ready()
        return 1e3 * (time.perf_counter() - start) / DRAWN

    sides = {"greedy step": lambda prompts: 1e3 * ROWS / wide.decode(prompts)}
    for kind, logits in inputs.items():
        logits = jnp.asarray(logits)
        for name, fields in DRAWS.items():
            sides[f"{name}, {kind}"] = lambda _, x=logits, f=fields: alone(x, f)
    values = turns(rounds, sides, lambda: random_prompts(rng, ROWS, PROMPT))
    step = float(np.median(values["greedy step"]))
    report.plain(f"sampling ms, {dtype}", {name: quantiles(own) for name, own in values.items()})
    shares = {n: float(np.median(own)) / step for n, own in values.items() if n != "greedy step"}
    report.plain(f"of a step, {dtype}", shares)


def limits(report: Report, ours: Ours, rounds: int, dtype: str) -> None:
    """Bytes and FLOPs per second of the machine, and the tokens per second they allow."""
    import torch

    words, rows, inner, outer = 1 << 27, 512, 4096, 4096
    stream = jax.jit(lambda x: x.sum(-1))
    product = jax.jit(lambda x, w: jnp.einsum("bi,io->bo", x, w, precision=HIGHEST))
    numbers, left = jnp.ones((64, words // 64)), jnp.ones((rows, inner), dtype)
    right, kind = jnp.ones((inner, outer), dtype), getattr(torch, dtype)
    torch_numbers = torch.ones(words)
    torch_left, torch_right = (
        torch.ones((rows, inner), dtype=kind),
        torch.ones((outer, inner), dtype=kind),
    )

    def rate(amount: int, call):
        def timed(_) -> float:
            start = time.perf_counter()
            call()
            return amount / (time.perf_counter() - start) / 1e9

        return timed

    read, flops = 4 * words, 2 * rows * inner * outer
    sides = {
        "GB/s, xla": rate(read, lambda: stream(numbers).block_until_ready()),
        "GB/s, torch": rate(read, lambda: torch_numbers.sum()),
        "GFLOP/s, xla": rate(flops, lambda: product(left, right).block_until_ready()),
        "GFLOP/s, torch": rate(flops, lambda: torch_left @ torch_right.T),
    }
    values = turns(5 * rounds, sides, lambda: None)
    report.plain(f"machine, {dtype}", {name: quantiles(own) for name, own in values.items()})
    peak = lambda unit: max(np.median(v) for n, v in values.items() if n.startswith(unit)) * 1e9  # noqa: E731
    model, geometry = ours.config, ours.engine.geometry
    count = weight_count(model) - (0 if model.tie_embeddings else model.vocab_size * model.width)
    step = lambda rows: count * ITEM_BYTES[dtype] + rows * checkpoint_bytes(geometry)  # noqa: E731
    floors = {f"decode, batch {rows}": rows * peak("GB/s") / step(rows) for rows in (1, ROWS)}
    floors |= {f"prefill {n}": n * peak("GFLOP/s") / prefill_flops(model, n) for n in LENGTHS}
    report.plain(f"floor, {dtype}", {name: float(value) for name, value in floors.items()})


def memory_here(path: Path, dtype: str) -> dict:
    """Run in a process of its own."""
    jax.devices()
    before = peak_resident_bytes()
    ours, rng = Ours(path, dtype), np.random.default_rng(0)
    ours.prefill(random_prompts(rng, 1, 2048))
    ours.decode(random_prompts(rng, ROWS, PROMPT))
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(ours.params))
    peak, known = peak_resident_bytes() - before, weights + MEMORY
    return {"peak_mb": peak / 1e6, "weights_mb": weights / 1e6, "memory_mb": MEMORY / 1e6} | {
        "ratio": peak / known
    }


def memory(path: Path, dtype: str) -> dict:
    command = [sys.executable, __file__, "--memory-of", str(path), "--dtype", dtype]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(
            f"whole_models.py: the process that measures memory failed:\n{done.stderr[-2000:]}"
        )
    return json.loads(done.stdout.splitlines()[-1])


def _versions(*packages: str) -> dict[str, str]:
    """The versions of those packages that are installed."""
    found = {}
    for package in packages:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def measure(path: Path, arguments: argparse.Namespace) -> dict:
    dtypes, rounds, only = arguments.dtype, arguments.rounds, arguments.only
    report = Report(
        header()
        | _versions("torch", "transformers", "llama-cpp-python")
        | {"cores": os.cpu_count()}
        | {"model": arguments.model, "rounds": rounds, "memory": MEMORY}
    )
    rng = np.random.default_rng(0)
    if "memory" in only:
        for dtype in dtypes:
            report.plain(f"memory, {dtype}", memory(path, dtype))
    sides = {f"ours, {dtype}": Ours(path, dtype) for dtype in dtypes}
    for dtype in dtypes:
        ours = sides[f"ours, {dtype}"]
        if "sampling" in only:
            sampling(report, ours, rounds, rng, dtype)
        if "limits" in only:
            limits(report, ours, rounds, dtype)
    for name in arguments.peers:
        sides |= {
            f"{name}, {dtype}": Theirs(path, dtype, name, arguments.llama_cpp) for dtype in dtypes
        }
    if set(arguments.peers) & {"eager", "compiled"}:
        import torch

        report.fields["torch_threads"] = torch.get_num_threads()
    if "decode" in only:
        compare_tokens(report, sides, rng, dtypes)
        calls = {name: side.decode for name, side in sides.items()}
        for rows in (1, ROWS):
            draw = lambda rows=rows: random_prompts(rng, rows, PROMPT)  # noqa: E731
            report.rates(f"decode, batch {rows}", turns(rounds, calls, draw), dtypes)
    if "prefill" in only:
        calls = {name: side.prefill for name, side in sides.items()}
        for length in LENGTHS:
            draw = lambda length=length: random_prompts(rng, 1, length)  # noqa: E731
            report.rates(f"prefill {length}", turns(rounds, calls, draw), dtypes)
    if "shared" in only:
        shared(report, sides, max(1, rounds // 2), rng, dtypes)
    return report.fields


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="nemotron", choices=list(CONFIGS))
    dtypes = ["float32", "bfloat16"]
    parser.add_argument("--dtype", nargs="+", default=dtypes, choices=dtypes)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", default=list(CASES), choices=CASES)
    peers = ["eager", "compiled"]
    parser.add_argument("--peers", nargs="*", default=peers, choices=[*peers, "llama.cpp"])
    parser.add_argument("--llama-cpp", type=Path, metavar="SOURCE", help="folder of its source")
    parser.add_argument("--models", type=Path, help="where models are kept between runs")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--memory-of", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if "llama.cpp" in arguments.peers:
        if arguments.llama_cpp is None or not (arguments.llama_cpp / "conversion").is_dir():
            parser.error("--peers llama.cpp needs --llama-cpp, a folder of its source")
        if set(arguments.only) - {"decode", "prefill"}:
            parser.error("--peers llama.cpp needs --only decode prefill")
    enable_compile_cache()
    if arguments.memory_of:
        print(json.dumps(memory_here(arguments.memory_of, arguments.dtype[0])))
        return
    with tempfile.TemporaryDirectory() as temporary:
        path = write_model(arguments.model, arguments.models or Path(temporary))
        report = measure(path, arguments)
    write_json(arguments.json, report)


if __name__ == "__main__":
    main()
