"""Operations of hybrid models on accelerators; usable without `hybrid_jax`. Names are loaded on first use."""

import sys
from types import ModuleType
from typing import TYPE_CHECKING

from pallas_kernels.lazily import names_in

if TYPE_CHECKING:
    from pallas_kernels.causal_conv import ConvWindow as ConvWindow
    from pallas_kernels.causal_conv import causal_conv as causal_conv
    from pallas_kernels.causal_conv import causal_conv_window as causal_conv_window
    from pallas_kernels.rmsnorm import gated_rmsnorm as gated_rmsnorm
    from pallas_kernels.rmsnorm import residual_rmsnorm as residual_rmsnorm
    from pallas_kernels.ssd_scan import ssd_scan as ssd_scan
    from pallas_kernels.ssd_window import WindowFrames as WindowFrames
    from pallas_kernels.ssd_window import fold as fold
    from pallas_kernels.ssd_window import ssd_window_frames as ssd_window_frames

_HOMES = {
    "causal_conv": ("ConvWindow", "causal_conv", "causal_conv_window"),
    "rmsnorm": ("gated_rmsnorm", "residual_rmsnorm"),
    "ssd_scan": ("ssd_scan",),
    "ssd_window": ("WindowFrames", "fold", "ssd_window_frames"),
}
__getattr__ = names_in(__name__, _HOMES)


class _Package(ModuleType):
    """`causal_conv` and `ssd_scan` are the functions: what Python loads of the packages they are in is not set here."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (isinstance(value, ModuleType) and any(name in names for names in _HOMES.values())):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
