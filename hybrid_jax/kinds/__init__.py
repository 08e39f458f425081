"""What the host knows of each kind of layer: shapes of its weights and of what it caches, and its costs. No arrays.

May import: byte_sizes, config, pallas_kernels.grouped_linear.plan, pallas_kernels.paged_attention.plan,
pallas_kernels.plan, pallas_kernels.row_product.plan, pallas_kernels.ssd_scan.plan, products.parts.
"""
