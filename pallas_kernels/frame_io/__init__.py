"""Reading, writing and copying equal frames of one uint32 arena."""

from pallas_kernels.frame_io.api import copy_frames as copy_frames
from pallas_kernels.frame_io.api import read_frames as read_frames
from pallas_kernels.frame_io.api import write_frames as write_frames
