"""The rows of a plan as the int32 arrays its dispatches take; unused lines stay inert."""

from __future__ import annotations

import functools

import numpy as np

from hybrid_jax.engine import pack
from hybrid_jax.engine.pack import Layout
from hybrid_jax.schedule.plan import DecodeRow, ForkRow, PrefillRow


def prefill_batch(rows: list[PrefillRow], layout: Layout, *, size: int, sink: int) -> np.ndarray:
    """int32[size, layout.size]; padding names the ring row `sink` and has length 0."""
    batch = np.zeros((size, layout.size), np.int32)
    batch[:, layout.span("row")] = sink
    for line, row in enumerate(rows):
        put = functools.partial(layout.set, batch, line)
        put("row", row.row)
        put("start", row.start)
        put("length", len(row.tokens))
        put("state_len", row.state_len)
        put("read_slot", row.read_slot)
        put("write_slot", row.write_slot)
        put("samples", row.samples)
        put("tokens", row.tokens)
        pack.set_pages(layout, batch, line, row.pages)
        pack.set_copies(layout, batch, line, row.copies)
        if row.samples:
            pack.set_sampling(layout, batch, line, row.request)
    return batch


def fork_batch(rows: list[ForkRow], layout: Layout, *, size: int, sink: int) -> np.ndarray:
    """int32[size, layout.size]; padding names the ring row `sink`."""
    batch = np.zeros((size, layout.size), np.int32)
    batch[:, layout.span("row")] = sink
    for line, row in enumerate(rows):
        put = functools.partial(layout.set, batch, line)
        put("row", row.row)
        put("source", row.source)
        put("line", row.line)
        put("position", row.position)
        pack.set_copies(layout, batch, line, row.copies)
        pack.set_sampling(layout, batch, line, row.request)
    return batch


def decode_batch(rows: list[DecodeRow], layout: Layout, *, size: int) -> np.ndarray:
    """int32[size, layout.size], each row at its ring row; the others take no step."""
    batch = np.zeros((size, layout.size), np.int32)
    for row in rows:
        put = functools.partial(layout.set, batch, row.row)
        put("position", row.position)
        put("checkpoint", row.checkpoint_position)
        put("read_slot", row.read_slot)
        put("fold_slot", row.fold_slot)
        put("num_steps", row.num_steps)
        pack.set_pages(layout, batch, row.row, row.pages)
        pack.set_sampling(layout, batch, row.row, row.request)
    return batch


def exact_batch(
    rows: list[PrefillRow | DecodeRow], layout: Layout, *, size: int, grain: int
) -> np.ndarray:
    """int32[size, layout.size], chunks and decode steps alike at their ring rows; the others have no token."""
    batch = np.zeros((size, layout.size), np.int32)
    batch[:, layout.span("fold_before")] = batch[:, layout.span("fold_after")] = -1
    for row in rows:
        put = functools.partial(layout.set, batch, row.row)
        if isinstance(row, PrefillRow):
            put("base", row.start)
            put("begin", row.start)
            put("end", row.start + len(row.tokens))
            put("checkpoint", row.start)
            put("fold_after", row.write_slot if row.state_len else -1)
            put("load_conv", 1)
            put("samples", row.samples)
            put("tokens", row.tokens)
            pack.set_copies(layout, batch, row.row, row.copies)
        else:
            full = row.position - row.checkpoint_position == grain
            put("base", row.position if full else row.checkpoint_position)
            put("begin", row.position)
            put("end", row.position + 1)
            put("checkpoint", row.checkpoint_position)
            put("fold_before", row.fold_slot if full else -1)
            put("feeds", 1)
            put("samples", 1)
        put("read_slot", row.read_slot)
        pack.set_pages(layout, batch, row.row, row.pages)
        if not isinstance(row, PrefillRow) or row.samples:
            pack.set_sampling(layout, batch, row.row, row.request)
    return batch
