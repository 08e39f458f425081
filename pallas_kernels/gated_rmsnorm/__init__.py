"""The gated RMS norm of a Mamba-2 mixer."""

from pallas_kernels.gated_rmsnorm.api import gated_rmsnorm as gated_rmsnorm
