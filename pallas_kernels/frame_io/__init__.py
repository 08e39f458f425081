"""Reading, writing and copying equal frames of one uint32 arena."""

from pallas_kernels.frame_io.api import bounds_checked as bounds_checked
from pallas_kernels.frame_io.api import check_ids as check_ids
from pallas_kernels.frame_io.api import copy_frames as copy_frames
from pallas_kernels.frame_io.api import read_frames as read_frames
from pallas_kernels.frame_io.api import write_frames as write_frames
