"""Workloads under patterns of arrivals: read from files, or a committed one with its clock changed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from hybrid_jax.sim.prefix_cache.traces import TraceRequest, read_trace

FOLDER = Path(__file__).resolve().parents[2] / "traces"
FILES = {
    "chat": "lmsys_s1_sps{sps:g}",
    "short": "sharegpt_s1_sps{sps:g}",
    "agents": "swebench_s1_sps{sps:g}_art{art:g}",
    "log": "mooncake_conv_first1500",
}


@dataclass(frozen=True, kw_only=True)
class Load:
    """A workload and how fast it comes.

    Attributes:
        name: of the workload, one of FILES.
        sps: new sessions a second; art: mean seconds between an agent's turns. None: as recorded.
    """

    name: str
    sps: float | None = None
    art: float | None = None

    @property
    def file(self) -> str:
        """Name of the file that would hold it, without the folder."""
        return FILES[self.name].format(sps=self.sps, art=self.art) + ".seg.jsonl.gz"

    def __str__(self) -> str:
        parts = [self.name]
        parts += [f"{self.sps:g} sessions/s"] if self.sps is not None else []
        parts += [f"{self.art:g} s a turn"] if self.art is not None else []
        return ", ".join(parts)


COMMITTED = {
    "chat": Load(name="chat", sps=0.5),
    "short": Load(name="short", sps=1),
    "agents": Load(name="agents", sps=5, art=10),
    "log": Load(name="log"),
}


def retimed(
    trace: list[TraceRequest], *, starts: float = 1.0, pauses: float = 1.0
) -> list[TraceRequest]:
    """The same requests at other times: when sessions start, and how long after it their turns come, times a "
    "factor."""
    first: dict[int | str, float] = {}
    for request in trace:
        first.setdefault(request.session_id, request.arrival_s)
    moved = [
        replace(
            request,
            arrival_s=starts * first[request.session_id]
            + pauses * (request.arrival_s - first[request.session_id]),
        )
        for request in trace
    ]
    # Of requests at one time the older session's comes first, whatever the last bit of a product says.
    rank = {session: number for number, session in enumerate(first)}
    return sorted(moved, key=lambda one: (round(one.arrival_s, 6), rank[one.session_id]))


class Traces:
    """Requests of a load, made once.

    Args:
        folder: more traces, preferred to a committed one whose clock is changed; a file is found by `Load.file`.
        limit: only the first requests of each.
    """

    def __init__(self, folder: Path | None = None, *, limit: int | None = None):
        if folder is not None and not folder.is_dir():
            raise ValueError(f"--trace-folder: must be a folder, got {folder}")
        self._folder, self._limit = folder, limit
        self._made: dict[Load, list[TraceRequest]] = {}

    def __getitem__(self, load: Load) -> list[TraceRequest]:
        if load not in self._made:
            self._made[load] = self._make(load)
        return self._made[load]

    def _make(self, load: Load) -> list[TraceRequest]:
        for folder in (self._folder, FOLDER):
            if folder is not None and (folder / load.file).is_file():
                return read_trace(folder / load.file, limit=self._limit)
        known = COMMITTED[load.name]
        starts = known.sps / load.sps if load.sps else 1.0
        pauses = load.art / known.art if load.art else 1.0
        return retimed(self[known], starts=starts, pauses=pauses)
