"""The residual sum in front of a block, and the block's norm."""

from pallas_kernels.residual_rmsnorm.api import residual_rmsnorm as residual_rmsnorm
