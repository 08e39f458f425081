"""A lone row times a matrix, in parts."""

from typing import TYPE_CHECKING

from pallas_kernels.lazily import names_in

if TYPE_CHECKING:
    from pallas_kernels.row_product.kernel import row_product as row_product

__getattr__ = names_in(__name__, {"kernel": ("row_product",)})
