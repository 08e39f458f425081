"""A lone row times a matrix, as in a decode step of one sequence: every weight is read once."""

from pallas_kernels.row_product.api import row_product as row_product
