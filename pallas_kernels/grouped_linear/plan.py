"""How the products of experts are cut up, and what fits a chip. No jax."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pallas_kernels.plan import Chip, cdiv, over_limit

MAX_EXPERTS = 1024  # every program looks at all of them to find its own
MANY = 2  # programs of a multiprocessor that keep it reading
ROWS = (16, 32, 64, 128)  # most visits of a tile
WIDTHS = (128, 64, 32)  # columns of a tile of few visits, over all of its matrices
LEAST_STAGES = 2  # with fewer, loads do not run ahead of the products
LEAST_ASYNC = 64  # rows of a product whose operands tensor cores read from shared memory, at least
BARRIER_BYTES = 16  # of a product that Blackwell's tensor cores make while the program goes on


@dataclass(frozen=True, kw_only=True)
class Config:
    """Launch parameters of a product.

    Attributes:
        rows: most visits of a tile. columns: columns of each matrix that a program takes; a gated block has two.
        inner: elements of the inner dimension in a step.
        num_warps, num_stages: of a program; stages of the loop's loads.
    """

    rows: int
    columns: int
    inner: int
    num_warps: int = 4
    num_stages: int = 4


def shared_bytes(config: Config, dtype: str, *, matrices: int, chip: Chip) -> int:
    """Shared memory of a program that multiplies its rows with `matrices` matrices, as the compiler lays it out.

    Each stage of loads has room for the operands of a step. Where operands go on to registers, the newest of them are
    there already, and there is room for one stage less.
    """
    step = (config.rows + matrices * config.columns) * config.inner * _item(dtype)
    if not chip.reads_shared or config.rows < LEAST_ASYNC or dtype == "float32":
        return step * (config.num_stages - 1)
    barriers = matrices * BARRIER_BYTES if chip.capability[0] == 10 else 0
    return step * config.num_stages + barriers


def why_unsupported(num_experts: int, dtype: str, chip: Chip) -> str | None:
    """Why the kernels cannot take so many experts of a dtype on a chip, for any number of visits; None if they can."""
    reason = over_limit(("there must be at most {} experts", MAX_EXPERTS, num_experts))
    if reason is not None:
        return reason
    every = (
        _config(rows, width, dtype, matrices=1, chip=chip) for rows in ROWS for width in WIDTHS
    )
    wanted = max(shared_bytes(config, dtype, matrices=1, chip=chip) for config in every)
    if wanted <= chip.shared_bytes:
        return None
    return (
        f"a tile of experts wants at least {wanted:,} bytes of shared memory for 'pallas', and this GPU has "
        f"{chip.shared_bytes:,}; use 'xla'"
    )


def choose_config(
    visits: int,
    num_experts: int,
    columns: int,
    dtype: str,
    *,
    matrices: int,
    chip: Chip,
) -> Config:
    """The launch parameters of a product.

    Chosen from what compiling reports; no timing is behind them.

    Args:
        visits: of all tokens. columns: of one matrix.
        matrices: 2 if a program multiplies its rows with gate and up, else 1.
    """
    # Half as many rows again as an expert has visits in the mean.
    rows = next((rows for rows in ROWS if 2 * rows * num_experts >= 3 * visits), ROWS[-1])
    # With few visits bound by reading weights: small tiles, so several programs share a multiprocessor.
    width, experts = WIDTHS[0], min(num_experts, visits)
    while width > 32 * matrices and experts * cdiv(matrices * columns, width) < MANY * chip.num_sms:
        width //= 2
    return _config(rows, width, dtype, matrices=matrices, chip=chip)


def _config(rows: int, width: int, dtype: str, *, matrices: int, chip: Chip) -> Config:
    """Launch parameters of tiles of so many rows, and of few rows of so many columns over all matrices."""
    if dtype == "float32":
        # Without tensor cores, and bound by registers.
        config = Config(rows=min(rows, 32), columns=64 // matrices, inner=32, num_stages=2)
    elif rows == ROWS[-1]:
        # Bound by tensor cores and by what the caches deliver, so a program has the largest tile that registers hold.
        width = 256 if chip.reads_shared else 128
        config = Config(rows=rows, columns=width // matrices, inner=64, num_warps=8)
    else:
        # The narrower, the longer: the same bytes are on their way.
        config = Config(
            rows=rows,
            columns=width // matrices,
            inner=8192 // max(width, 64),
            num_stages=3 if rows > 16 else 4,
        )
    while (
        config.num_stages > LEAST_STAGES
        and shared_bytes(config, dtype, matrices=matrices, chip=chip) > chip.shared_bytes
    ):
        config = replace(config, num_stages=config.num_stages - 1)
    return config


def _item(dtype: str) -> int:
    """Bytes of an element."""
    return 4 if dtype == "float32" else 2


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a product is cut up; follows from shapes alone, never from ids.

    Attributes:
        config: launch parameters. blocks: of columns.
        tiles: that the grid has room for. lone: there is one token, so no visits share an expert.
        length: elements of the inner dimension in a part. parts: how many there are.
    """

    config: Config
    blocks: int
    tiles: int
    lone: bool
    length: int
    parts: int


def make_plan(
    config: Config,
    ids_shape: tuple[int, int],
    num_experts: int,
    inner: int,
    columns: int,
    *,
    num_sms: int,
    most_parts: int = 1,
) -> Plan:
    """Cuts a product of visits with matrices [inner, columns], gate and up counted once."""
    tokens, top_k = ids_shape
    visits, lone = tokens * top_k, tokens == 1
    # As many full tiles as the visits fill, and one that is not full for each expert.
    experts = min(num_experts, visits)
    tiles = visits if lone else experts + (visits - experts) // config.rows
    blocks, parts = cdiv(columns, config.columns), 1
    while blocks * tiles * parts < MANY * num_sms and parts < most_parts:
        if inner < 4 * parts * config.inner:
            break
        parts *= 2
    length = cdiv(cdiv(inner, parts), config.inner) * config.inner
    return Plan(
        config=config,
        blocks=blocks,
        tiles=tiles,
        lone=lone,
        length=length,
        parts=cdiv(inner, length),
    )
