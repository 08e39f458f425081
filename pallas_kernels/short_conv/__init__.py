"""The gated short convolution, over prompts with what is kept of their end, and over windows of new tokens."""

from pallas_kernels.short_conv.api import short_conv as short_conv
from pallas_kernels.short_conv.api import short_conv_window as short_conv_window
from pallas_kernels.short_conv.api import store_short_tail as store_short_tail
from pallas_kernels.short_conv.reference import ShortTail as ShortTail
from pallas_kernels.short_conv.reference import ShortWindow as ShortWindow
