"""Mamba-2 outputs for new tokens from a checkpoint and a ring of records, and their fold."""

from pallas_kernels.records import RecordSizes as RecordSizes
from pallas_kernels.ssd_window.api import fold as fold
from pallas_kernels.ssd_window.api import fold_frames as fold_frames
from pallas_kernels.ssd_window.api import ssd_window_frames as ssd_window_frames
from pallas_kernels.ssd_window.api import ssd_window_rings as ssd_window_rings
from pallas_kernels.ssd_window.api import ssd_window_scores as ssd_window_scores
from pallas_kernels.ssd_window.reference import FoldFrames as FoldFrames
from pallas_kernels.ssd_window.reference import WindowFrames as WindowFrames
from pallas_kernels.ssd_window.reference import WindowRings as WindowRings
from pallas_kernels.ssd_window.reference import WindowScores as WindowScores
