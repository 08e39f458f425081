"""What an engine's rings and checkpoints keep of the convolution and of the records."""

from pallas_kernels.ring_io.columns import store_columns as store_columns
from pallas_kernels.ring_io.tail import store_tail as store_tail
