"""How attention over pages is cut up. No jax."""

from __future__ import annotations

from dataclasses import dataclass

from pallas_kernels.plan import Chip, cdiv, over_limit, power_of_two

MAX_HEAD_DIM = 256
SMALLEST = 16  # sides of a product on tensor cores


@dataclass(frozen=True, kw_only=True)
class Config:
    """Launch parameters.

    Attributes:
        block_q: most queries (tokens times the query heads of a KV head) of a program.
        block_k: keys of a tile.
        num_warps, num_stages: of a program; stages of the loop's loads.
        programs_per_sm: programs that a multiprocessor may get; up to that, the context is split.
        min_split: tokens that a split has at least, so that joining stays small beside reading.
    """

    block_q: int
    block_k: int
    num_warps: int = 4
    num_stages: int = 2
    programs_per_sm: int = 8
    min_split: int = 256


def why_unsupported(head_dim: int) -> str | None:
    """Why the kernels cannot take heads of this size, or None."""
    return over_limit(("head_dim must be at most {}", MAX_HEAD_DIM, head_dim))


def choose_config(dtype: str, head_dim: int, queries: int, chip: Chip) -> Config:
    """The launch parameters for pages of a dtype, and T g queries per row and KV head.

    Chosen from what compiling reports at H = 128, with bfloat16 pages; no timing is behind them.
    """
    if dtype == "float32":
        # Without tensor cores. 64 registers; larger tiles, or loads ahead of their use, spill.
        return Config(block_q=32, block_k=16, num_warps=8, num_stages=1)
    if queries <= 64:
        # Bound by reading. Table and pages are loaded one after the other, so 5 stages are two tiles ahead: 4 to 5
        # programs on an SM (96 to 122 registers) keep 128 to 160 KB on the way, several times what hides latency.
        return Config(block_q=64, block_k=32, num_warps=4, num_stages=5)
    if head_dim > 128:
        return Config(block_q=64, block_k=32, num_warps=8, num_stages=3, programs_per_sm=1)
    # Bound by tensor cores and by shared memory, through which each tile goes twice, packed and apart: 128 queries
    # share that. 170 registers, 88 KB. Operands that go through registers leave room for half as many keys.
    block_k = 64 if chip.reads_shared else 32
    return Config(block_q=128, block_k=block_k, num_warps=8, num_stages=3, programs_per_sm=1)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How one call is cut up; follows from shapes alone, never from lengths.

    Attributes:
        block_q, block_k: queries of a program, keys of a tile.
        blocks: query blocks of a row and KV head.
        splits: programs that share a block's context. split_tokens: context of each, whole tiles.
    """

    block_q: int
    block_k: int
    blocks: int
    splits: int
    split_tokens: int


def make_plan(
    config: Config,
    q_shape: tuple[int, ...],
    kv_heads: int,
    keys: int,
    *,
    window: int | None,
    num_sms: int,
) -> Plan:
    """Splits the context into as many parts as multiprocessors have room for, none shorter than `min_split`.

    Splits lie at absolute positions, so which keys share one does not depend on the rows' lengths. Under a
    window a block counts them from the first that it sees, and only as many as a window can touch exist.
    """
    rows, tokens, heads, _ = q_shape
    queries = tokens * (heads // kv_heads)
    block_q = min(config.block_q, max(power_of_two(queries), SMALLEST))
    blocks = cdiv(queries, block_q)
    wanted = max(num_sms * config.programs_per_sm // (rows * kv_heads * blocks), 1)
    seen = keys if window is None else min(keys, window + tokens)
    split = max(cdiv(seen, wanted), config.min_split)
    split = cdiv(split, config.block_k) * config.block_k
    splits = cdiv(keys, split)
    if window is not None:
        splits = min(splits, cdiv(seen, split) + 1)
    if wanted == 1 or splits == 1:
        splits, split = 1, cdiv(keys, config.block_k) * config.block_k
    return Plan(
        block_q=block_q, block_k=config.block_k, blocks=blocks, splits=splits, split_tokens=split
    )
