"""Attention of new tokens over the pages that hold their context, themselves included."""

from typing import TYPE_CHECKING

from pallas_kernels.lazily import names_in

if TYPE_CHECKING:
    from pallas_kernels.paged_attention.api import paged_attention as paged_attention
    from pallas_kernels.paged_attention.layout import PageLayout as PageLayout
    from pallas_kernels.paged_attention.reference import AttentionArrays as AttentionArrays
    from pallas_kernels.paged_attention.reference import AttentionOptions as AttentionOptions

_HOMES = {
    "api": ("paged_attention",),
    "layout": ("PageLayout",),
    "reference": ("AttentionArrays", "AttentionOptions"),
}
__getattr__ = names_in(__name__, _HOMES)
