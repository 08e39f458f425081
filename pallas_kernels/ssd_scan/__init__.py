"""Mamba-2 state-space scan over padded rows, from an initial state to a final one, and what is kept of their end."""

from typing import TYPE_CHECKING

from pallas_kernels.lazily import names_in

if TYPE_CHECKING:
    from pallas_kernels.ssd_scan.api import ssd_scan as ssd_scan
    from pallas_kernels.ssd_scan.api import ssd_scan_frames as ssd_scan_frames
    from pallas_kernels.ssd_scan.api import ssd_states_frames as ssd_states_frames
    from pallas_kernels.ssd_scan.reference import ScanFrames as ScanFrames
    from pallas_kernels.ssd_scan.tail import ScanTail as ScanTail
    from pallas_kernels.ssd_scan.tail import store_tail as store_tail

_HOMES = {
    "api": ("ssd_scan", "ssd_scan_frames", "ssd_states_frames"),
    "reference": ("ScanFrames",),
    "tail": ("ScanTail", "store_tail"),
}
__getattr__ = names_in(__name__, _HOMES)
