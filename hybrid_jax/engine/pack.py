"""The int32 array of a dispatch: the columns of its rows, written with numpy and read inside the step."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hybrid_jax.schedule.request import Request

MAX_STOP_IDS = 16

SAMPLING = (
    ("seed", 2),
    ("sample_index", 1),
    ("temperature", 1),  # float32 bits
    ("top_k", 1),
    ("top_p", 1),  # float32 bits
    ("min_p", 1),  # float32 bits
    ("min_end", 1),
    ("reported", 1),
    ("stop_ids", MAX_STOP_IDS),  # -1 where unused
)


@dataclass(frozen=True)
class Layout:
    """Named column ranges of an int32[rows, size] array.

    Attributes:
        fields: (name, columns) in order.
    """

    fields: tuple[tuple[str, int], ...]

    @functools.cached_property
    def size(self) -> int:
        """How many columns a row has."""
        return sum(width for _, width in self.fields)

    @functools.cached_property
    def spans(self) -> dict[str, slice]:
        """The columns of each field, as a slice."""
        ends = itertools.accumulate(width for _, width in self.fields)
        return {
            name: slice(end - width, end)
            for (name, width), end in zip(self.fields, ends, strict=True)
        }

    def has(self, name: str) -> bool:
        """Whether there is such a field."""
        return name in self.spans

    def get(self, batch: Any, name: str) -> Any:
        """The columns of one field: [rows] if it has one column, else [rows, width]; numpy or jax."""
        span = self.spans[name]
        return batch[:, span.start] if span.stop - span.start == 1 else batch[:, span]

    def set(
        self, batch: np.ndarray, row: int, name: str, value: int | Sequence[int] | np.ndarray
    ) -> None:
        """Writes one field of one row; a sequence that is shorter than the field fills its front."""
        start = self.spans[name].start
        if isinstance(value, int | np.integer):
            batch[row, start] = value
        else:
            batch[row, start : start + len(value)] = value


def row_layout(numbers: Sequence[str], *fields: tuple[str, int]) -> Layout:
    """A layout of columns that hold one number each, then those for sampling, then other fields."""
    return Layout((*((name, 1) for name in numbers), *SAMPLING, *fields))


def adjust_fields(vocab_size: int) -> tuple[tuple[str, int], ...]:
    """Further columns of a row in a step that may adjust logits."""
    return (
        ("adjusted", 1),
        ("presence", 1),  # float32 bits, like the next two
        ("frequency", 1),
        ("repetition", 1),
        ("masked", 1),
        ("mask", -(-vocab_size // 32)),
    )


def page_fields(width: int, frames_per_page: int) -> tuple[tuple[str, int], ...]:
    """Columns of a row's page table, `width` pages wide."""
    return (("table", max(frames_per_page * width, 1)),)


def copy_fields(frames_per_page: int) -> tuple[tuple[str, int], ...]:
    """Columns for the page that a row copies before it writes."""
    return (("sources", max(frames_per_page, 1)), ("targets", max(frames_per_page, 1)))


def float_bits(value: float) -> int:
    """A float32 as the int32 with the same bits."""
    return int(np.float32(value).view(np.int32))


def set_sampling(layout: Layout, batch: np.ndarray, row: int, request: Request) -> None:
    """Writes a request's sampling columns. They never change, so they are made once."""
    sampling = request.notes.sampling
    if sampling is None:
        sampling = request.notes.sampling = _sampling(request)
    start = layout.spans[SAMPLING[0][0]].start
    batch[row, start : start + len(sampling)] = sampling
    set_adjust(layout, batch, row, request)


def _sampling(request: Request) -> np.ndarray:
    """A request's columns `SAMPLING`."""
    layout, params = Layout(SAMPLING), request.params
    batch: np.ndarray = np.zeros((1, layout.size), np.int32)
    seed = np.array([request.seed & 0xFFFFFFFF, request.seed >> 32], np.uint32).view(np.int32)
    layout.set(batch, 0, "seed", seed)
    layout.set(batch, 0, "sample_index", request.sample_index)
    layout.set(batch, 0, "temperature", float_bits(params.engine_temperature))
    layout.set(batch, 0, "top_k", max(params.top_k, 0))
    layout.set(batch, 0, "top_p", float_bits(params.top_p))
    layout.set(batch, 0, "min_p", float_bits(params.min_p))
    layout.set(batch, 0, "min_end", len(request.prompt) + params.min_tokens)
    layout.set(batch, 0, "reported", int(params.logprobs is not None))
    stops = sorted(request.stop_ids)
    layout.set(batch, 0, "stop_ids", stops + [-1] * (MAX_STOP_IDS - len(stops)))
    return batch[0]


def set_pages(layout: Layout, batch: np.ndarray, row: int, pages: np.ndarray) -> None:
    """Writes a page table: [frames_per_page, width] flattened."""
    if pages.size:
        count, per_page = pages.shape
        table = batch[row, layout.spans["table"]].reshape(per_page, -1)
        table[:, :count] = pages.T


def get_pages(layout: Layout, batch: Any, frames_per_page: int) -> Any:
    """The page tables of all rows, [rows, frames_per_page, width]."""
    return batch[:, layout.spans["table"]].reshape(len(batch), max(frames_per_page, 1), -1)


def set_copies(layout: Layout, batch: np.ndarray, row: int, copies: list) -> None:
    """Writes the page that a row copies before it writes, if there is one."""
    for source, target in copies:
        layout.set(batch, row, "sources", source)
        layout.set(batch, row, "targets", target)


def set_adjust(layout: Layout, batch: np.ndarray, row: int, request: Request) -> None:
    """Writes what adjusts a request's logits, if the layout has room for it and the request asks for it."""
    if not layout.has("adjusted") or not request.adjusts_logits:
        return
    params = request.params
    layout.set(batch, row, "adjusted", 1)
    layout.set(batch, row, "presence", float_bits(params.presence_penalty))
    layout.set(batch, row, "frequency", float_bits(params.frequency_penalty))
    layout.set(batch, row, "repetition", float_bits(params.repetition_penalty))
    if request.constraint is not None:
        mask = request.constraint.mask(request.output.token_ids)
        layout.set(batch, row, "masked", 1)
        layout.set(batch, row, "mask", mask.view(np.int32))
