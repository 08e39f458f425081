"""New tokens' queries, keys and values: norms, rotation, and the keys and values into their pages."""

from pallas_kernels.append_kv.api import append_kv as append_kv
from pallas_kernels.append_kv.reference import AppendArrays as AppendArrays
from pallas_kernels.append_kv.reference import AppendOptions as AppendOptions
