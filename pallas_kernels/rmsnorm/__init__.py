"""RMS norms: the gated one of a Mamba-2 mixer, and that of a block with the residual sum in front of it."""

from pallas_kernels.rmsnorm.api import gated_rmsnorm as gated_rmsnorm
from pallas_kernels.rmsnorm.api import residual_rmsnorm as residual_rmsnorm
