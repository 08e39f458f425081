"""Our engine against transformers on the same random hybrid, in one process, taking turns.

    pip install -e '.[parity]'
    python benchmarks/engine.py --model nemotron [--dtype bfloat16] [--json FILE] [--only decode prefill ...]

Models: `random_models.py`. Peer: torch on all cores, eager and compiled with a StaticCache, both listed (`--peers`).
Cases, each in rounds of one measurement per side, so that a slow minute of the machine falls on both:

- `decode`: 128 tokens of prompt, then tokens per second of batch 1 and 8. Ours: everything from the moment
  all rows decode to the last token on the host. The peer's: forward calls and argmax alone.
- `prefill`: one prompt of 512, 2048, 4096 tokens to its first token.
- `shared`: 64 prompts of 400 common and 16 own tokens, 16 new tokens each: ours with and without the prefix
  cache, the peer in batches of 8 and 64 (its prompts have equal lengths, so that it pads nothing); and 64 prompts
  with nothing in common, ours with and without the cache. Half the rounds of the others.
- `sampling`: milliseconds of a decode step of 8 rows at a vocabulary of 131,072, and of the draw alone.
- `limits`: what this machine streams (a sum over 512 MiB) and multiplies (512 rows with matrices of 16 Mi weights), the
  better of XLA and torch; from that, the floors: a decode step reads all weights but the embeddings' and every row's
  checkpoint, a prefill takes `geometry.prefill_flops`.
- `memory`: peak resident memory of a process that prefills 2048 tokens and decodes 8 rows, less what it held
  before the model was loaded, over weights + `memory`.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from common import header, quantiles, request, run, write_json

from hybrid_jax.config import CacheConfig, EngineConfig
from hybrid_jax.engine.engine import Engine
from hybrid_jax.geometry import ITEM_BYTES, checkpoint_bytes, prefill_flops, weight_count
from hybrid_jax.machine import peak_resident_bytes

CASES = ("limits", "decode", "prefill", "shared", "sampling", "memory")
PROMPT, STEPS = 128, 64
LENGTHS = (512, 2048, 4096)
COUNT, COMMON, OWN, NEW = 64, 400, 16, 16
MEMORY = 1 << 30
FIRST, LAST = 3, 20000  # token ids of random prompts


class Ours:
    """The engine of a model directory; `rows` decode together."""

    def __init__(self, path: Path, dtype: str, *, cache: str = "lru", rows: int = 8, params=None):
        from hybrid_jax.checkpoint import load_model
        from hybrid_jax.compile_cache import enable_compile_cache

        enable_compile_cache()
        self.config, self.params = params or load_model(path, dtype=dtype)
        settings = EngineConfig(
            dtype=dtype,
            memory=MEMORY,
            max_rows=rows,
            max_model_len=4608,
            cache=CacheConfig(policy=cache),
        )
        self.engine = Engine(self.config, self.params, settings)

    def prefill(self, prompt: np.ndarray) -> float:
        one = request("p", prompt.tolist(), 1)
        start = time.perf_counter()
        run(self.engine, [one])
        return time.perf_counter() - start

    def decode(self, prompts: np.ndarray, steps: int, **sampling) -> tuple[float, list[list[int]]]:
        """Tokens per second from the moment all rows decode, and the tokens."""
        requests = [request(f"d{i}", p, steps, **sampling) for i, p in enumerate(prompts.tolist())]
        for one in requests:
            self.engine.add(one)
        while any(not one.output for one in requests):
            self.engine.step()
        before = sum(len(one.output) for one in requests)
        start = time.perf_counter()
        while self.engine.has_work:
            self.engine.step()
        elapsed = time.perf_counter() - start
        count = sum(len(one.output) for one in requests) - before
        return count / elapsed, [one.output for one in requests]

    def batch(self, prompts: np.ndarray, new: int) -> float:
        self.engine.reset_prefix_cache()
        requests = [request(f"s{i}", p, new) for i, p in enumerate(prompts.tolist())]
        start = time.perf_counter()
        run(self.engine, requests)
        return time.perf_counter() - start


def peers(path: Path, dtype: str, names: list[str]) -> dict:
    if not names:
        return {}
    import torch
    from transformers_peer import Peer

    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads", flush=True)
    return {name: Peer(path, dtype, compiled=name == "compiled") for name in names}


def turns(rounds: int, sides: dict) -> dict[str, dict[str, float]]:
    """Calls each side once unmeasured, then in rounds that start with another side each."""
    for name, call in sides.items():
        start = time.perf_counter()
        call()
        print(f"  {name}: first call {time.perf_counter() - start:.1f} s", flush=True)
    values: dict[str, list[float]] = {name: [] for name in sides}
    names = list(sides)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            values[name].append(sides[name]())
    return {name: quantiles(taken) for name, taken in values.items()}


def decode(ours: Ours, others: dict, rounds: int, rng) -> dict:
    report = {}
    for rows in (1, 8):
        prompts = lambda: rng.integers(FIRST, LAST, (rows, PROMPT))  # noqa: B023, E731

        def peer(one, rows=rows, prompts=prompts) -> float:
            _, cache, token = one.prefill(prompts(), STEPS)
            return rows * STEPS / one.decode(cache, token, STEPS)[0]

        sides = {"ours": lambda prompts=prompts: ours.decode(prompts(), STEPS)[0]}
        sides |= {name: lambda one=one, peer=peer: peer(one) for name, one in others.items()}
        report[f"decode_b{rows}"] = turns(rounds, sides)
    return report


def prefill(ours: Ours, others: dict, rounds: int, rng) -> dict:
    report = {}
    for length in LENGTHS:
        prompt = lambda length=length: rng.integers(FIRST, LAST, length)  # noqa: E731
        sides = {"ours": lambda p=prompt, n=length: n / ours.prefill(p())}
        for name, one in others.items():
            sides[name] = lambda one=one, p=prompt, n=length: n / one.prefill(p()[None])[0]
        report[f"prefill_{length}"] = turns(rounds, sides)
    return report


def shared(ours: Ours, others: dict, rounds: int, rng, path: Path, dtype: str) -> dict:
    """Generated tokens per second over the whole batch."""
    off = Ours(path, dtype, cache="off", params=(ours.config, ours.params))
    common = np.broadcast_to(rng.integers(FIRST, LAST, (1, COMMON)), (COUNT, COMMON))

    def same() -> np.ndarray:
        return np.concatenate([common, rng.integers(FIRST, LAST, (COUNT, OWN))], 1)

    def different() -> np.ndarray:
        return rng.integers(FIRST, LAST, (COUNT, COMMON + OWN))

    def peer(one, size: int) -> float:
        prompts, elapsed = same(), 0.0
        for start in range(0, COUNT, size):
            took, cache, token = one.prefill(prompts[start : start + size], NEW)
            elapsed += took + one.decode(cache, token, NEW - 1)[0]
        return COUNT * NEW / elapsed

    rate = lambda side, prompts: COUNT * NEW / side.batch(prompts(), NEW)  # noqa: E731
    sides = {"ours": lambda: rate(ours, same), "ours, cache off": lambda: rate(off, same)}
    for name, one in others.items():
        for size in (8, COUNT):
            sides[f"{name}, batches of {size}"] = lambda one=one, size=size: peer(one, size)
    report = {"shared_prefix": turns(rounds, sides)}
    sides = {"ours": lambda: rate(ours, different), "ours, cache off": lambda: rate(off, different)}
    return report | {"nothing_shared": turns(rounds, sides)}


def sampling(ours: Ours, rounds: int, rng, dtype: str) -> dict:
    """Milliseconds of one step at 8 rows of this model with a vocabulary of 131,072, and of the draw alone in it."""
    import jax
    import jax.numpy as jnp

    from hybrid_jax.engine.sampling import SamplingRows, sample
    from hybrid_jax.models.initialize import random_params

    rows, vocab = 8, 1 << 17
    config = replace(ours.config, vocab_size=vocab)
    wide = Ours(None, dtype, params=(config, random_params(config, 0, dtype=dtype)))
    logits = jax.random.normal(jax.random.key(0), (rows, vocab), jnp.float32)
    draw, positions = jax.jit(sample), jnp.arange(rows) + 1000

    def step(fields: dict) -> float:
        prompts = rng.integers(FIRST, LAST, (rows, PROMPT))
        return 1e3 * rows / wide.decode(prompts, STEPS, **fields)[0]

    def alone(fields: dict) -> float:
        fill = lambda name, kind, other: jnp.full(rows, fields.get(name, other), kind)  # noqa: E731
        drawn = SamplingRows(
            seed=jnp.ones((rows, 2), jnp.uint32),
            sample_index=jnp.zeros(rows, jnp.int32),
            temperature=fill("temperature", jnp.float32, 1.0),
            top_k=fill("top_k", jnp.int32, 0),
            top_p=fill("top_p", jnp.float32, 1.0),
            min_p=fill("min_p", jnp.float32, 0.0),
            min_end=jnp.zeros(rows, jnp.int32),
            stop_ids=jnp.full((rows, 1), -1, jnp.int32),
        )
        start = time.perf_counter()
        for _ in range(8):
            draw(logits, drawn, positions).block_until_ready()
        return 1e3 * (time.perf_counter() - start) / 8

    kinds = {
        "greedy": {"temperature": 0.0},
        "temperature 0.8": {"temperature": 0.8},
        "top_k 50, top_p 0.9": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
    }
    sides = {}
    for name, fields in kinds.items():
        sides[name] = lambda fields=fields: step(fields)
        sides[f"{name}, the draw alone"] = lambda fields=fields: alone(fields)
    return {"sampling_b8_ms": turns(rounds, sides)}


def limits(ours: Ours, others: dict, rounds: int, dtype: str) -> dict:
    """Bytes and FLOPs per second of the machine, and the tokens per second they allow."""
    import jax
    import jax.numpy as jnp

    words, rows, inner, outer = 1 << 27, 512, 4096, 4096
    stream = jax.jit(lambda x: jax.lax.map(jnp.sum, x))
    product = jax.jit(
        lambda x, w: jnp.einsum("bi,io->bo", x, w, precision=jax.lax.Precision.HIGHEST)
    )
    numbers, left = jnp.ones((64, words // 64)), jnp.ones((rows, inner), dtype)
    right = jnp.ones((inner, outer), dtype)
    calls = {
        "bytes": {"xla": lambda: stream(numbers).block_until_ready()},
        "flops": {"xla": lambda: product(left, right).block_until_ready()},
    }
    if others:
        import torch

        torch_numbers = torch.ones(words)
        torch_left = torch.ones((rows, inner), dtype=getattr(torch, dtype))
        torch_right = torch.ones((outer, inner), dtype=getattr(torch, dtype))
        calls["bytes"]["torch"] = lambda: torch_numbers.sum()
        calls["flops"]["torch"] = lambda: torch_left @ torch_right.T
    work = {"bytes": 4 * words, "flops": 2 * rows * inner * outer}

    def rate(call, amount: int) -> float:
        start = time.perf_counter()
        call()
        return amount / (time.perf_counter() - start) / 1e9

    report = {
        f"giga_{kind}_per_s": turns(
            5 * rounds,
            {name: lambda c=call, k=kind: rate(c, work[k]) for name, call in sides.items()},
        )
        for kind, sides in calls.items()
    }
    peak = {
        kind: 1e9 * max(side["median"] for side in report[f"giga_{kind}_per_s"].values())
        for kind in calls
    }
    model, geometry = ours.config, ours.engine.geometry
    count = weight_count(model) - (0 if model.tie_embeddings else model.vocab_size * model.width)
    floors = {
        f"decode_b{rows}": rows
        * peak["bytes"]
        / (count * ITEM_BYTES[dtype] + rows * checkpoint_bytes(geometry))
        for rows in (1, 8)
    }
    floors |= {f"prefill_{n}": n * peak["flops"] / prefill_flops(model, n) for n in LENGTHS}
    return report | {"floors_tokens_per_s": floors}


def memory_here(path: Path, dtype: str) -> dict:
    """Run in a process of its own."""
    import jax

    jax.devices()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    ours, rng = Ours(path, dtype), np.random.default_rng(0)
    ours.prefill(rng.integers(FIRST, LAST, 2048))
    ours.decode(rng.integers(FIRST, LAST, (8, PROMPT)), STEPS)
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(ours.params))
    known = weights + ours.engine.sizes.total_bytes
    peak = peak_resident_bytes() - before
    return {
        "peak_bytes": peak,
        "weights_bytes": weights,
        "memory_bytes": known - weights,
        "ratio": peak / known,
    }


def memory(path: Path, dtype: str) -> dict:
    command = [sys.executable, __file__, "--memory-of", str(path), "--dtype", dtype]
    out = subprocess.run(command, capture_output=True, text=True, check=True)
    return {"memory": json.loads(out.stdout.splitlines()[-1])}


def show(name: str, sides: dict) -> None:
    if name in ("memory", "floors_tokens_per_s"):
        print(f"{name:20} {sides}")
        return
    base = sides.get("ours") or sides.get("greedy") or next(iter(sides.values()))
    for side, value in sides.items():
        print(
            f"{name:18} {side:26}{value['median']:10.1f}  [{value['p10']:.1f}, {value['p90']:.1f}]"
            f"   {base['median'] / value['median']:5.2f}x",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="nemotron", choices=["nemotron", "granite"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="*", default=list(CASES), choices=CASES)
    parser.add_argument("--peers", nargs="*", default=["eager"], choices=["eager", "compiled"])
    parser.add_argument("--models", type=Path, help="where models are kept between runs")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--memory-of", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.memory_of:
        print(json.dumps(memory_here(arguments.memory_of, arguments.dtype)))
        return
    from random_models import write_model

    with tempfile.TemporaryDirectory() as temporary:
        path = write_model(arguments.model, arguments.models or Path(temporary))
        report = measure(path, arguments)
    write_json(arguments.json, report)


def measure(path: Path, arguments: argparse.Namespace) -> dict:
    dtype, rounds, only = arguments.dtype, arguments.rounds, arguments.only
    report = {**header(), "model": arguments.model, "dtype": dtype, "cases": {}}
    rng = np.random.default_rng(0)

    def add(found: dict) -> None:
        report["cases"] |= found
        for name, sides in found.items():
            show(name, sides)

    if "memory" in only:
        add(memory(path, dtype))
    ours = Ours(path, dtype)
    if "sampling" in only:
        add(sampling(ours, rounds, rng, dtype))
    others = peers(path, dtype, arguments.peers)
    if "limits" in only:
        add(limits(ours, others, rounds, dtype))
    if "decode" in only:
        add(decode(ours, others, rounds, rng))
    if "prefill" in only:
        add(prefill(ours, others, rounds, rng))
    if "shared" in only:
        add(shared(ours, others, max(1, rounds // 2), rng, path, dtype))
    return report


if __name__ == "__main__":
    main()
