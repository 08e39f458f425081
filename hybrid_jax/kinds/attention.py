"""Grouped-query attention over pages of keys and values."""

from __future__ import annotations

from dataclasses import replace

from hybrid_jax.config import Attention
from hybrid_jax.kinds.kind import (
    FLOAT32_BYTES,
    Kind,
    PageEntry,
    Parts,
    StepSize,
    Weight,
    Weights,
    divided,
    shared,
)
from pallas_kernels.paged_attention.plan import choose_config, make_plan, why_unsupported
from pallas_kernels.plan import Chip


class AttentionKind(Kind):
    """See `config.Attention`."""

    name = operation = "attention"
    projection = "qkv", "qkv_bias"

    def weights(self, spec: Attention, width: int) -> Weights:
        q, _ = _sizes(spec)
        fused = tuple(self.parts(spec).own.values())
        tree = {
            "qkv": Weight(shape=(width, sum(fused)), draw="matrix", fused=fused),
            "out": Weight(shape=(q, width), draw="output"),
        }
        if spec.qkv_bias:
            tree["qkv_bias"] = Weight(shape=(sum(fused),), draw="zeros", fused=fused)
        if spec.out_bias:
            tree["out_bias"] = Weight(shape=(width,), draw="zeros", on_devices="first")
        if spec.qk_norm:
            norm = Weight(shape=(spec.head_dim,), draw="ones", float32=spec.float32_norms)
            tree |= {"q_norm": norm} | ({} if spec.source == "group" else {"k_norm": norm})
        return tree

    def shard(self, spec: Attention, count: int) -> Attention:
        heads, kv_heads = divided(spec, "num_heads", count), shared(spec, "num_kv_heads", count)
        return replace(spec, num_heads=heads, num_kv_heads=kv_heads)

    def parts(self, spec: Attention) -> Parts:
        q, size = _sizes(spec)
        first, last = {"q": q}, {"gate": q} if spec.gate else {}
        kv = {"k": size, "v": size}
        if spec.source == "own":
            return Parts(first | kv | last, {})
        return Parts(first | last, kv if spec.source == "cut" else {})

    def entry(self, spec: Attention) -> PageEntry:
        size = 2 * _sizes(spec)[1]
        return PageEntry(elements=size, scaled=spec.head_dim, window=spec.sliding_window, runs=2)

    def key_flops(self, spec: Attention) -> int:
        return 4 * _sizes(spec)[0]

    def why_unsupported(self, spec: Attention, dtype: str, chip: Chip) -> str | None:
        return why_unsupported(spec.head_dim)

    def row_bytes(self, spec: Attention, step: StepSize) -> int:
        q, _ = _sizes(spec)
        projected = step.product(_columns(spec))
        if spec.gate:  # it is needed again at the end
            return q * step.item + projected + _split_bytes(spec, step)
        return q * step.item + max(projected, _split_bytes(spec, step))

    def chunk_bytes(self, spec: Attention, step: StepSize) -> int:
        return self.row_bytes(spec, step) + _columns(spec) * step.item

    def xla_elements(self, spec: Attention, width: int) -> int:
        return 3 * _columns(spec)


def _sizes(spec: Attention) -> tuple[int, int]:
    """Channels of all queries, and of all keys."""
    return spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim


def _columns(spec: Attention) -> int:
    """Columns of the projection to queries, keys, values, and the gate."""
    q, kv = _sizes(spec)
    return (2 * q if spec.gate else q) + 2 * kv


def _split_bytes(spec: Attention, step: StepSize) -> int:
    """Bytes per token that the splits of the context leave to be joined."""
    queries = step.tokens * spec.num_heads // spec.num_kv_heads
    dtype = "float32" if step.item == FLOAT32_BYTES else "bfloat16"
    splits = make_plan(
        choose_config(dtype, spec.head_dim, queries, step.chip),
        (step.rows, step.tokens, spec.num_heads, spec.head_dim),
        spec.num_kv_heads,
        step.keys,
        window=spec.sliding_window,
        num_sms=step.chip.num_sms,
    ).splits
    return 0 if splits == 1 else FLOAT32_BYTES * splits * spec.num_heads * (spec.head_dim + 2)
