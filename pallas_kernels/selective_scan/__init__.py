"""The selective scan of Mamba: a state for each channel, from an initial one to those after some tokens."""

from pallas_kernels.selective_scan.api import selective_chunk as selective_chunk
from pallas_kernels.selective_scan.api import selective_scan as selective_scan
from pallas_kernels.selective_scan.api import selective_window as selective_window
from pallas_kernels.selective_scan.inputs import ScanInputs as ScanInputs
from pallas_kernels.selective_scan.inputs import scan_inputs as scan_inputs
from pallas_kernels.selective_scan.reference import SelectiveChunk as SelectiveChunk
from pallas_kernels.selective_scan.reference import SelectiveScan as SelectiveScan
from pallas_kernels.selective_scan.reference import SelectiveWindow as SelectiveWindow
