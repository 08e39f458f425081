"""The causal convolution and step sizes of Mamba-2 and gated delta nets, over prompts and windows of new tokens."""

from pallas_kernels.causal_conv.api import causal_conv as causal_conv
from pallas_kernels.causal_conv.api import causal_conv_window as causal_conv_window
from pallas_kernels.causal_conv.reference import ConvWindow as ConvWindow
from pallas_kernels.records import ProjectionLayout as ProjectionLayout
