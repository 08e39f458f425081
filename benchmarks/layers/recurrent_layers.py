"""One recurrent layer of each kind over a prompt, beside a Mamba-2 layer of the same width and with as large a state.

    python benchmarks/layers/recurrent_layers.py [--rounds 7] [--json benchmarks/results/layers/recurrent_layers.json]

Inside the clock: a whole layer (projections, convolution, scan, gate) of one row in float32, as `decoder.forward` runs
it; and the scans of Mamba-2 and of the gated delta net alone. Mamba and the short convolution have smaller states by
their nature; they are here to be compared. Medians of rounds taken in turns, with 10th and 90th percentiles.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp

sys.path.append(str(Path(__file__).resolve().parents[2]))  # when run as a file
from benchmarks.common import header, quantiles, turns, write_json
from hybrid_jax.config import GatedDelta, Mamba1, Mamba2, ModelConfig, ShortConv, residual_layer
from hybrid_jax.models.decoder import MIXERS
from hybrid_jax.models.initialize import random_params
from pallas_kernels import ssd_scan
from pallas_kernels.gated_delta import gated_delta_scan

TOKENS = (512, 2048)
SIZES = {  # width of the model, heads, groups or key heads, elements of a head's state on each side
    "width 768, 24 heads, states of 64 x 64": (768, 24, 12, 64),
    "width 2048, 32 heads, states of 128 x 128": (2048, 32, 16, 128),
}


def layers(width: int, heads: int, key_heads: int, side: int) -> dict:
    """A mixer of each kind."""
    inner = heads * side
    return {
        "mamba2": Mamba2(num_heads=heads, head_dim=side, state_size=side),
        "gated_delta": GatedDelta(
            num_key_heads=key_heads, num_value_heads=heads, key_dim=side, value_dim=side
        ),
        "mamba1": Mamba1(inner_size=inner, state_size=16, dt_rank=width // 16),
        "short_conv": ShortConv(size=width),
    }


def layer_calls(size: tuple[int, ...]) -> dict:
    """A whole layer of each kind: h [1, T, D] to what it adds."""

    def call_of(mixer):
        config = ModelConfig(
            family="llama",
            layers=(residual_layer(mixers=(mixer,), mlp=None),),
            width=size[0],
            vocab_size=64,
        )
        (params,) = random_params(config, seed=0)["layers"][0]["mixers"]

        def call(h):
            lengths = jnp.full(h.shape[0], h.shape[1])
            positions = jnp.broadcast_to(jnp.arange(h.shape[1]), h.shape[:2])
            return MIXERS[type(mixer)](params, h, positions, lengths, mixer)

        return jax.jit(call)

    return {name: call_of(mixer) for name, mixer in layers(*size).items()}


def scan_calls(size: tuple[int, ...]) -> dict:
    """The scans of Mamba-2 and of the gated delta net, of what is drawn from h [1, T, D]."""
    _, heads, key_heads, side = size

    def drawn(h, *shape):
        """Numbers of the given shape for each token, different for each h."""
        key = jax.random.key(jnp.abs(h[0, 0, 0] * 1e4).astype(jnp.int32))
        return jax.random.normal(key, (*h.shape[:2], *shape))

    def mamba2(x, dt, A, B, C):
        state = jnp.zeros((x.shape[0], heads, side, side))
        return ssd_scan(x, dt, A, B, C, initial_state=state)

    def gated_delta(v, log_decay, beta, k, q):
        state = jnp.zeros((v.shape[0], heads, side, side))
        return gated_delta_scan(q, k, v, log_decay, beta, initial_state=state)

    def of_mamba2(h):
        dt = 0.01 + 0.1 * jax.nn.sigmoid(drawn(h, heads))
        BC = drawn(h, 1, side)
        return drawn(h, heads, side), dt, -jnp.ones(heads), BC, BC

    def of_gated_delta(h):
        k = drawn(h, key_heads, side)
        k = k / jnp.linalg.norm(k, axis=-1, keepdims=True)
        decay = -0.05 * jax.nn.sigmoid(drawn(h, heads))
        return drawn(h, heads, side), decay, jax.nn.sigmoid(drawn(h, heads)), k, k

    return {
        "mamba2": (jax.jit(mamba2), jax.jit(of_mamba2)),
        "gated_delta": (jax.jit(gated_delta), jax.jit(of_gated_delta)),
    }


def timed(call, draw=None):
    """Seconds of a call, whose inputs are drawn outside the clock."""

    def seconds(h) -> float:
        inputs = (h,) if draw is None else draw(h)
        jax.block_until_ready(inputs)
        start = time.perf_counter()
        jax.block_until_ready(call(*inputs))
        return time.perf_counter() - start

    return seconds


def measure(name: str, tokens: int, rounds: int) -> list[dict]:
    """A row for each side of a case."""
    size, rows = SIZES[name], []
    keys = iter(jax.random.split(jax.random.key(tokens), rounds + 16))
    draw = lambda: jax.random.normal(next(keys), (1, tokens, size[0]))  # noqa: E731
    whole = {kind: timed(call) for kind, call in layer_calls(size).items()}
    scans = {kind: timed(*pair) for kind, pair in scan_calls(size).items()}
    for what, sides in (("layer", whole), ("scan", scans)):
        print(f"{what}, {name}, {tokens} tokens", flush=True)
        seconds = turns(rounds, sides, draw)
        base = quantiles(seconds["mamba2"])["median"]
        for kind, values in seconds.items():
            ms = {key: 1e3 * value for key, value in quantiles(values).items()}
            row = {"what": what, "case": name, "tokens": tokens, "kind": kind, "ms": ms}
            rows.append(row | {"over_mamba2": ms["median"] / base / 1e3})
            print(f"  {kind:12} {ms['median']:8.1f} ms  {rows[-1]['over_mamba2']:.2f}x")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {options.rounds}")
    rows = [
        row for name in SIZES for tokens in TOKENS for row in measure(name, tokens, options.rounds)
    ]
    write_json(options.json, {**header(), "rounds": options.rounds, "rows": rows})


if __name__ == "__main__":
    main()
