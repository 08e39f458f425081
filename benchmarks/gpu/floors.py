"""What `hybrid_7b.py` measures against: the bytes and FLOPs of a step, at the device's two ceilings."""

from __future__ import annotations

from dataclasses import dataclass

import jax

from benchmarks.common import Ceilings
from hybrid_jax.config import ModelConfig
from hybrid_jax.config.arrays import ITEM_BYTES
from hybrid_jax.costs import prefill_flops, state_elements
from hybrid_jax.geometry import (
    Geometry,
    kv_bytes_per_token,
    ring_specs,
)

DATASHEET_FLOPS = 989e12  # dense bfloat16 of an H100 or H200 SXM, multiply and add counted apart


@dataclass(frozen=True, kw_only=True)
class Work:
    """The least a step must do.

    Attributes:
        parts: bytes by what they are.
        flops: 2 per multiply-add.
    """

    parts: dict[str, int]
    flops: int

    @property
    def num_bytes(self) -> int:
        return sum(self.parts.values())

    def floor_s(self, ceilings: Ceilings) -> float:
        """Seconds no version can beat: of the bytes or of the FLOPs, whichever takes longer."""
        return ceilings.floor(self.num_bytes, self.flops)


def weight_bytes(config: ModelConfig, params: dict) -> int:
    """Bytes of weights that every step reads: all but the embedding, unless it is the head too."""
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    return total if config.tie_embeddings else total - params["embed"].nbytes


def state_bytes(config: ModelConfig) -> int:
    """Bytes of one row's recurrent state, float32, over all layers."""
    return 4 * sum(state_elements(mixer)[0] for mixer in config.recurrent)


def ring_bytes(config: ModelConfig, geometry: Geometry) -> int:
    """Bytes a decode step reads of one row's rings: half a grain of records, and the convolutions' columns."""
    rings = ring_specs(geometry, num_rows=1, window=1)
    records = [spec for ring in rings for name, spec in ring.items() if name != "conv"]
    columns = sum(group.num_layers * group.column_words for group in geometry.groups)
    return sum(spec.num_bytes for spec in records) // 2 + 4 * columns


def decode_work(
    config: ModelConfig, params: dict, geometry: Geometry, *, rows: int, context: int
) -> Work:
    """One decode step of `rows` rows with `context` tokens each; what it writes is left out.

    Weights once, and of the embedding one line per row; states, rings and KV of every row once.
    """
    line = config.width * ITEM_BYTES[geometry.dtype]
    logits = 2 * config.width * config.vocab_size
    return Work(
        parts={
            "weights": weight_bytes(config, params) + rows * line,
            "states": rows * state_bytes(config),
            "rings": rows * ring_bytes(config, geometry),
            "kv": rows * context * kv_bytes_per_token(geometry),
        },
        flops=rows * (prefill_flops(config, 1, start=context) + logits),
    )


def prefill_work(
    config: ModelConfig,
    params: dict,
    geometry: Geometry,
    *,
    length: int,
    chunk: int,
    start: int = 0,
) -> Work:
    """Tokens `start .. length` of one prompt in chunks; activations are left out.

    Per chunk: weights once, the state read and written, the KV of all tokens so far. FLOPs as
    `costs.prefill_flops` counts them, without the logits.
    """
    ends = [min(begin + chunk, length) for begin in range(start, length, chunk)]
    tokens = (length - start) + sum(ends)  # written once, read by every chunk from theirs on
    return Work(
        parts={
            "weights": len(ends) * weight_bytes(config, params),
            "states": 2 * len(ends) * state_bytes(config),
            "kv": tokens * kv_bytes_per_token(geometry),
        },
        flops=prefill_flops(config, length - start, start),
    )
