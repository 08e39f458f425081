"""The gated delta rule: prompts, windows of new tokens over checkpoint and ring, folds."""

from pallas_kernels.gated_delta.api import gated_delta_fold as gated_delta_fold
from pallas_kernels.gated_delta.api import gated_delta_scan as gated_delta_scan
from pallas_kernels.gated_delta.api import gated_delta_scan_frames as gated_delta_scan_frames
from pallas_kernels.gated_delta.api import gated_delta_window_frames as gated_delta_window_frames
from pallas_kernels.gated_delta.api import gated_delta_window_rings as gated_delta_window_rings
from pallas_kernels.gated_delta.reference import DeltaFold as DeltaFold
from pallas_kernels.gated_delta.reference import DeltaRings as DeltaRings
from pallas_kernels.gated_delta.reference import DeltaScan as DeltaScan
from pallas_kernels.gated_delta.reference import DeltaScanFrames as DeltaScanFrames
from pallas_kernels.gated_delta.reference import DeltaWindow as DeltaWindow
