"""Operations of hybrid models on accelerators; usable without `hybrid_jax`."""

from pallas_kernels.causal_conv import ConvWindow as ConvWindow
from pallas_kernels.causal_conv import causal_conv as causal_conv
from pallas_kernels.causal_conv import causal_conv_window as causal_conv_window
from pallas_kernels.rmsnorm import gated_rmsnorm as gated_rmsnorm
from pallas_kernels.rmsnorm import residual_rmsnorm as residual_rmsnorm
from pallas_kernels.ssd_scan import ssd_scan as ssd_scan
from pallas_kernels.ssd_window import WindowFrames as WindowFrames
from pallas_kernels.ssd_window import fold as fold
from pallas_kernels.ssd_window import ssd_window_frames as ssd_window_frames
