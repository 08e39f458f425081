"""The operations that take a tuple of arrays, called with each array by name, and with each option by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pallas_kernels import append_kv as append
from pallas_kernels import checkpoint, grouped_linear, ssd_window, token_sampling
from pallas_kernels import paged_attention as attention
from pallas_kernels.causal_conv import ConvWindow
from pallas_kernels.causal_conv.api import causal_conv_window as conv_window
from pallas_kernels.gated_delta import DeltaRings, DeltaScanFrames, DeltaWindow
from pallas_kernels.gated_delta.api import gated_delta_scan_frames as delta_scan
from pallas_kernels.gated_delta.api import gated_delta_window_frames as delta_window
from pallas_kernels.gated_delta.api import gated_delta_window_rings as delta_rings
from pallas_kernels.selective_scan import SelectiveChunk, SelectiveWindow
from pallas_kernels.selective_scan.api import selective_chunk as scan_of_chunks
from pallas_kernels.selective_scan.api import selective_window as scan_of_windows
from pallas_kernels.short_conv import ShortTail, ShortWindow
from pallas_kernels.short_conv.api import short_conv_window as conv_of_windows
from pallas_kernels.short_conv.api import store_short_tail as short_tail
from pallas_kernels.ssd_scan import ScanFrames, ScanTail
from pallas_kernels.ssd_scan.api import ssd_scan_frames as scan_frames
from pallas_kernels.ssd_scan.api import ssd_states_frames as states_frames
from pallas_kernels.ssd_scan.tail import store_tail as tail


def by_name(function: Callable, kind: type[tuple], options: type[tuple] | None = None) -> Callable:
    """The function with the fields of its tuples as arguments.

    Args:
        kind: the NamedTuple of its arrays. options: that of its argument `options`, where it has one.
    """

    def call(**given: Any):
        def taken(kind: type[tuple]) -> tuple:
            return kind(**{name: given.pop(name) for name in kind._fields if name in given})

        arrays = taken(kind)
        if options is not None:
            given["options"] = taken(options)
        return function(arrays, **given)

    call.__name__ = function.__name__
    return call


append_kv = by_name(append.append_kv, append.AppendArrays, append.AppendOptions)
causal_conv_window = by_name(conv_window, ConvWindow)
fold_frames = by_name(ssd_window.fold_frames, ssd_window.FoldFrames)
gated_delta_scan_frames = by_name(delta_scan, DeltaScanFrames)
gated_delta_window_frames = by_name(delta_window, DeltaWindow)
gated_delta_window_rings = by_name(delta_rings, DeltaRings)
mix_experts = by_name(grouped_linear.mix_experts, grouped_linear.ExpertArrays)
paged_attention = by_name(
    attention.paged_attention, attention.AttentionArrays, attention.AttentionOptions
)
selective_chunk = by_name(scan_of_chunks, SelectiveChunk)
selective_window = by_name(scan_of_windows, SelectiveWindow)
short_conv_window = by_name(conv_of_windows, ShortWindow)
store_short_tail = by_name(short_tail, ShortTail)
sample_tokens = by_name(token_sampling.sample_tokens, token_sampling.SamplingArrays)
ssd_scan_frames = by_name(scan_frames, ScanFrames)
ssd_states_frames = by_name(states_frames, ScanFrames)
ssd_window_frames = by_name(ssd_window.ssd_window_frames, ssd_window.WindowFrames)
ssd_window_rings = by_name(ssd_window.ssd_window_rings, ssd_window.WindowRings)
ssd_window_scores = by_name(ssd_window.ssd_window_scores, ssd_window.WindowScores)
store_states = by_name(checkpoint.store_states, checkpoint.States)
store_columns = by_name(checkpoint.store_columns, checkpoint.Columns)
store_tail = by_name(tail, ScanTail)
