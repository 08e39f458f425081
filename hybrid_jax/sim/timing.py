"""How long a prefill takes: a stated model, or a measured table."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hybrid_jax.costs import Costs


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
        return f"{1e3 * self.overhead_s:g} ms + FLOPs / {self.flops_per_second / 1e12:g} TFLOP/s"


class MeasuredTable:
    """Times by the number of tokens to compute, between rows by straight lines, beyond the last by its slope.

    Args:
        path: CSV with the columns tokens and ms, tokens ascending, two rows at least.

    Raises:
        ValueError: something else; the message names file and line.
    """

    def __init__(self, path: Path | str):
        self._name = Path(path).name
        with open(path, newline="") as file:
            rows = list(csv.DictReader(file))
        try:
            self._tokens = np.array([float(row["tokens"]) for row in rows])
            self._seconds = np.array([float(row["ms"]) / 1000 for row in rows])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{self._name}: must have number columns tokens and ms, got {error}"
            ) from error
        if len(rows) < 2 or (np.diff(self._tokens) <= 0).any():
            raise ValueError(f"{self._name}: needs two rows at least, tokens ascending")

    def seconds(self, costs: Costs, num_tokens: int, hit_len: int) -> float:
        tokens, times, wanted = self._tokens, self._seconds, num_tokens - hit_len
        if wanted > tokens[-1]:
            slope = (times[-1] - times[-2]) / (tokens[-1] - tokens[-2])
            return float(times[-1] + slope * (wanted - tokens[-1]))
        return float(np.interp(wanted, tokens, times))

    def describe(self) -> str:
        return f"table {self._name}"


Timing = CostModel | MeasuredTable
