"""Attention of new tokens over the pages that hold their context, themselves included."""

from pallas_kernels.paged_attention.api import paged_attention as paged_attention
from pallas_kernels.paged_attention.layout import PageLayout as PageLayout
from pallas_kernels.paged_attention.reference import AttentionArrays as AttentionArrays
from pallas_kernels.paged_attention.reference import AttentionOptions as AttentionOptions
