"""Mamba-2 state-space scan over padded rows, from an initial state to a final one."""

from pallas_kernels.ssd_scan.api import ssd_scan as ssd_scan
from pallas_kernels.ssd_scan.api import ssd_scan_frames as ssd_scan_frames
