"""How long a prefill takes: a stated model, or a measured table."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hybrid_jax.cache.tree.node import DISK, HOSTS_MEMORY
from hybrid_jax.costs import Costs
from hybrid_jax.schedule.tiers.speeds import Rate, Speeds

PERCENTILES = (5, 50, 95)


def summary(seconds: Sequence[float]) -> dict[str, float]:
    """{"p5", "p50", "p95", "mean"} of some times."""
    percentiles = {f"p{p}": float(np.percentile(seconds, p)) for p in PERCENTILES}
    return percentiles | {"mean": float(np.mean(seconds))}


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Seconds = overhead + FLOPs / rate; loading KV and state takes nothing.

    The defaults are one H200 at 40 % of its dense bfloat16 rate, and an overhead as measured for Jamba-1.5-Mini in the
    Marconi artifact (17.8 ms).
    """

    flops_per_second: float = 0.4 * 989e12
    overhead_s: float = 0.0178

    def seconds(self, costs: Costs, num_tokens: int, hit_len: int) -> float:
        """Time to the first token of a prompt whose first `hit_len` tokens are cached."""
        return self.overhead_s + costs.flops(num_tokens, start=hit_len) / self.flops_per_second

    def describe(self) -> str:
        """The formula, with its numbers."""
        return f"{1e3 * self.overhead_s:g} ms + FLOPs / {self.flops_per_second / 1e12:g} TFLOP/s"


@dataclass(frozen=True, kw_only=True)
class DeviceModel:
    """Seconds of a plan: a dispatch, FLOPs of its prefill, bytes of each decode step.

    A step reads the active weights, two bytes for every two FLOPs of a token, and what its rows have cached. Copies
    from and to the host's memory wait for each other and for the steps. The defaults are one H200: 40 % of 989 TFLOP/s,
    75 % of 4.3 TB/s, and 75 % of the 64 GB/s of PCIe 5.
    """

    flops_per_second: float = 0.4 * 989e12
    bytes_per_second: float = 0.75 * 4.3e12
    dispatch_s: float = 0.001
    host_bytes_per_second: float = 0.75 * 64e9
    disk_read_bytes_per_second: float = 0.65e9
    disk_write_bytes_per_second: float = 1.38e9

    def copy_seconds(self, num_bytes: int) -> float:
        """Time to copy so much between the device and the host's memory."""
        return num_bytes / self.host_bytes_per_second

    def read_seconds(self, num_bytes: int) -> float:
        """Time to read so much from the disk."""
        return num_bytes / self.disk_read_bytes_per_second

    def write_seconds(self, num_bytes: int) -> float:
        """Time to write so much to the disk."""
        return num_bytes / self.disk_write_bytes_per_second

    def speeds(self) -> Speeds:
        """These rates, for what is loaded and what is computed."""
        tiers = {HOSTS_MEMORY: self.host_bytes_per_second, DISK: self.disk_read_bytes_per_second}
        return Speeds(
            prompts=Rate(self.flops_per_second, 1.0),
            tiers={tier: Rate(rate, 1.0) for tier, rate in tiers.items()},
        )

    def seconds(
        self, costs: Costs, *, flops: float, num_steps: int, bytes_per_step: float
    ) -> float:
        """Time of one plan.

        Args:
            costs: of the model.
            flops: of the chunks.
            num_steps: decode steps. bytes_per_step: KV and states that one of them reads, over all rows.
        """
        step = (costs.flops_per_token + bytes_per_step) / self.bytes_per_second
        return self.dispatch_s + flops / self.flops_per_second + num_steps * step

    def describe(self, *, copies: bool = False, disk: bool = False) -> str:
        """The formula, with its numbers, and those of copies and of the disk if there are any."""
        told = (
            f"{1e3 * self.dispatch_s:g} ms + FLOPs / {self.flops_per_second / 1e12:g} TFLOP/s + "
            f"bytes / {self.bytes_per_second / 1e12:g} TB/s"
        )
        if copies or disk:
            told += f", copies at {self.host_bytes_per_second / 1e9:g} GB/s"
        if disk:
            reads, writes = self.disk_read_bytes_per_second, self.disk_write_bytes_per_second
            told += f", the disk reads {reads / 1e9:g} GB/s and writes {writes / 1e9:g} GB/s"
        return told


class MeasuredTable:
    """Times by the number of tokens to compute, between rows by straight lines, beyond the last by its slope.

    A last slope below 0 counts as 0, so that noise in the last two rows never gives times below 0.

    Args:
        path: CSV with the columns tokens and ms, tokens ascending, at least two rows. Fewer tokens than the first
            row's take as long as that row.

    Raises:
        ValueError: the file has another form; the message names it, and the line that is wrong.
    """

    def __init__(self, path: Path | str):
        self._name = Path(path).name
        rows = self._rows(path)
        if len(rows) < 2:
            raise ValueError(f"{self._name}: needs two rows at least, got {len(rows)}")
        self._tokens, milliseconds = np.array(rows).T
        self._seconds = milliseconds / 1000

    def _rows(self, path: Path | str) -> list[tuple[float, float]]:
        rows: list[tuple[float, float]] = []
        with open(path, newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file, skipinitialspace=True)
            try:
                for row in reader:
                    where = f"{self._name}, line {reader.line_num}"
                    rows.append((_number(row, "tokens", where), _number(row, "ms", where)))
                    if len(rows) > 1 and rows[-1][0] <= rows[-2][0]:
                        raise ValueError(
                            f"{where}: tokens must ascend, got {rows[-1][0]:g} after {rows[-2][0]:g}"
                        )
            except (csv.Error, UnicodeDecodeError) as error:
                raise ValueError(f"{self._name}: cannot be read as CSV: {error}") from error
        return rows

    def seconds(self, costs: Costs, num_tokens: int, hit_len: int) -> float:
        """Time to the first token of a prompt whose first `hit_len` tokens are cached."""
        tokens, times, wanted = self._tokens, self._seconds, num_tokens - hit_len
        if wanted > tokens[-1]:
            slope = (times[-1] - times[-2]) / (tokens[-1] - tokens[-2])
            return float(times[-1] + max(0.0, slope) * (wanted - tokens[-1]))
        return float(np.interp(wanted, tokens, times))

    def describe(self) -> str:
        """Name of the file."""
        return f"table {self._name}"


def _number(row: dict[str, str | None], column: str, where: str) -> float:
    if column not in row:
        raise ValueError(f"{where}: must have the columns tokens and ms, got {list(row)}")
    try:
        value = float(row[column] or "")
    except (TypeError, ValueError):
        value = -1.0
    if not 0 <= value < math.inf:
        raise ValueError(f"{where}: {column} must be a number of at least 0, got {row[column]!r}")
    return value


Timing = CostModel | MeasuredTable
