"""A token for each row of logits: greedy, and drawn from what top-p or top-k keep.

    python -m benchmarks.kernels.token_sampling [--smoke] [--cases 131k] [--out FILE]

Sides: the kernel in Pallas and in Triton; "xla", the definition by sorting; and "engine xla", XLA's form, which an
engine runs on a CPU and which does not sort. All draw the same tokens. Peer: torch's argmax, or softmax and multinomial
after a filter by sorting; its random numbers are others, so its draws are not compared. There are no launch parameters
to sweep.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # when run as a file
from benchmarks.kernels import report
from benchmarks.kernels.harness import Case, Peer, Side, Work
from benchmarks.kernels.peers import NotInstalled, need, to_torch
from pallas_kernels import jax_triton
from pallas_kernels.token_sampling import SamplingArrays, sample_tokens

SPREAD = 3.0  # standard deviation of the logits
KINDS = {  # temperature, top_k, top_p
    "greedy": (0.0, 0, 1.0),
    "top_p": (1.0, 0, 0.9),
    "top_k": (1.0, 50, 1.0),
    "top_k_top_p": (1.0, 50, 0.9),
    "plain": (1.0, 0, 1.0),
}
ROWS, VOCABS = (64, 8), {"32k": 32 * 1024, "131k": 128 * 1024}


@dataclass(frozen=True)
class Shape:
    """Rows of logits over a vocabulary, all asking for one kind of draw."""

    name: str
    rows: int
    vocab: int
    kind: str


def draw(shape: Shape, key: jax.Array):
    """The rows' wishes."""
    keys = jax.random.split(key)
    temperature, top_k, top_p = KINDS[shape.kind]
    full = functools.partial(jnp.full, shape.rows)
    inputs = {
        "logits": SPREAD * jax.random.normal(keys[0], (shape.rows, shape.vocab)),
        "keys": jax.random.bits(keys[1], (shape.rows, 2)),
        "position": full(0, jnp.int32),
        "temperature": full(temperature, jnp.float32),
        "top_k": full(top_k, jnp.int32),
        "top_p": full(top_p, jnp.float32),
        "min_p": full(0.0, jnp.float32),
        "banned": jnp.full((shape.rows, 1), -1, jnp.int32),
    }
    return (), inputs


def call(implementation: str, carry, inputs):
    return sample_tokens(SamplingArrays(**inputs), implementation=implementation), carry


def triton(carry, inputs):
    reason = jax_triton.why_unavailable()
    if reason is not None:
        raise NotInstalled(f"not there: {reason}")
    return call("triton", carry, inputs)


def torch_sample(shape: Shape, carry, inputs):
    torch = need("torch")
    (logits,) = to_torch(inputs["logits"])
    temperature, top_k, top_p = KINDS[shape.kind]

    def greedy():
        return torch.argmax(logits, dim=-1).to(torch.int32)

    def random():
        kept, ids = logits / temperature, None
        if top_k:  # sorted, too
            kept, ids = torch.topk(kept, top_k, dim=-1)
        elif top_p < 1:
            kept, ids = torch.sort(kept, dim=-1, descending=True)
        weights = torch.softmax(kept, dim=-1)
        if top_p < 1:
            ahead = torch.cumsum(weights, dim=-1) - weights
            weights = torch.where(ahead < top_p, weights, 0.0)
        place = torch.multinomial(weights, 1)
        return (place if ids is None else ids.gather(-1, place)).squeeze(-1).to(torch.int32)

    return random if temperature else greedy


def case_of(shape: Shape) -> Case:
    names = {"pallas": "pallas", "xla": "reference", "engine xla": "xla"}
    calls = {name: functools.partial(call, way) for name, way in names.items()}
    random = shape.kind != "greedy"
    peer = Peer(
        name="torch multinomial" if random else "torch argmax",
        build=functools.partial(torch_sample, shape),
        note="other random numbers: not compared" if random else "",
        compared=not random,
    )
    return Case(
        operation="token_sampling",
        name=shape.name,
        draw=functools.partial(draw, shape),
        truth=calls["xla"],
        sides=(
            *(Side(name=name, call=run) for name, run in calls.items()),
            Side(name="triton", call=triton, gpu_only=True),
        ),
        peers=(peer,),
        configs={},
        # Sums in another order may move an edge across a token.
        tolerance=0.05 if random else 0.0,
        work=Work(bytes=4.0 * shape.rows * shape.vocab, tokens=shape.rows),
    )


def cases(*, smoke: bool) -> list[Case]:
    if smoke:
        return [case_of(Shape(f"{kind}_4x300", 4, 300, kind)) for kind in ("greedy", "top_p")]
    return [
        case_of(Shape(f"{kind}_{rows}x{name}", rows, vocab, kind))
        for rows in ROWS
        for name, vocab in reversed(VOCABS.items())
        for kind in KINDS
    ]


if __name__ == "__main__":
    report.main("token_sampling", __doc__.splitlines()[0], cases)
