"""Mamba-2 state-space scan over padded rows, from an initial state to a final one, and what is kept of their end."""

from pallas_kernels.ssd_scan.api import ssd_scan as ssd_scan
from pallas_kernels.ssd_scan.api import ssd_scan_frames as ssd_scan_frames
from pallas_kernels.ssd_scan.api import ssd_states_frames as ssd_states_frames
from pallas_kernels.ssd_scan.reference import ScanFrames as ScanFrames
from pallas_kernels.ssd_scan.tail import ScanTail as ScanTail
from pallas_kernels.ssd_scan.tail import store_tail as store_tail
